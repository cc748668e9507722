//! Twin of `attention_prefill`: a tile of one sequence's queries over a span of the keys that they see.

use crate::reference::online_softmax::{KeySpan, OnlineSoftmax};
use crate::reference::{AttentionInputs, RowsMut};
use crate::schedule::{DIRECT, PrefillItem};

/// Attends with each item's queries to the keys of the item's span, for every kv head.
///
/// An item whose queries have no other span ([`DIRECT`]) writes their heads of the rows of `output`
/// (`[num_query_heads, v_head_dim]`); any other writes their heads of its rows' partial results, `item.num_spans` apart
/// (see [`CpuCache::partial_len`](crate::reference::CpuCache::partial_len)), for
/// [`attention_merge`](crate::reference::attention_merge).
///
/// Query `q` of a sequence is head `q % heads_per_kv_head` of a kv head in row `q / heads_per_kv_head`. Row `i` of a
/// sequence with `n` rows and context length `c` is at position `c - n + i`; one before the first token gives 0.
///
/// # Panics
/// When `output` or `partials` does not hold a row that an item writes, the cache has no such layer, or an item names
/// what the plan or the cache does not have.
pub fn attention_prefill(
    inputs: &AttentionInputs<'_>,
    items: &[PrefillItem],
    output: &mut RowsMut<'_>,
    partials: &mut RowsMut<'_>,
) {
    let block = inputs.cache.layout().block_of(inputs.layer);
    let v_len = block.v_head_dim() as usize;
    let heads = inputs.cache.group(inputs.layer).heads_per_kv_head();
    let mut softmax = OnlineSoftmax::new(inputs.cache, inputs.layer);
    for item in items {
        let first_row = inputs.plan.query_starts()[item.sequence as usize];
        let table = inputs.table(item.sequence);
        for kv_head in 0..block.num_kv_heads() {
            softmax.clear();
            for query in item.first_query..item.end_query {
                let row = query / heads;
                let head = kv_head * heads + query % heads;
                let position = inputs.position(item.sequence, row);
                softmax.push_query(inputs.query_of(first_row + row, head), inputs.logit(head), position);
            }
            softmax.attend(KeySpan {
                cache: inputs.cache,
                layer: inputs.layer,
                kv_head,
                table,
                first: item.first_token,
                end: item.end_token,
            });
            for query in item.first_query..item.end_query {
                let head = (kv_head * heads + query % heads) as usize;
                let index = (query - item.first_query) as usize;
                if item.partial == DIRECT {
                    let row = output
                        .row_mut((first_row + query / heads) as usize, inputs.cache.output_len(inputs.layer));
                    softmax.write_output(index, &mut row[head * v_len..][..v_len]);
                } else {
                    let row = item.partial + (query / heads - item.first_query / heads) * item.num_spans;
                    let row = partials.row_mut(row as usize, inputs.cache.partial_len(inputs.layer));
                    softmax.write_partial(index, &mut row[head * (v_len + 2)..][..v_len + 2]);
                }
            }
        }
    }
}
