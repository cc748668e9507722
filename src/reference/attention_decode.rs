//! Twin of `attention_decode`: one row of a sequence over a span of its keys.

use crate::reference::online_softmax::{KeySpan, OnlineSoftmax};
use crate::reference::{AttentionInputs, RowsMut};
use crate::schedule::{DIRECT, DecodeItem};

/// Attends with the single row of each item's sequence to the keys of the item's span, all heads.
///
/// An item that has its row to itself ([`DIRECT`]) writes the row of `output` (`[num_query_heads, v_head_dim]`); any
/// other writes partial result `item.partial` (see [`CpuCache::partial_len`](crate::reference::CpuCache::partial_len)),
/// for [`attention_merge`](crate::reference::attention_merge). Each key and value is decoded once for all query heads
/// that read it.
///
/// # Panics
/// When `output` or `partials` does not hold a row that an item writes, the cache has no such layer, or an item names
/// what the plan or the cache does not have.
pub fn attention_decode(
    inputs: &AttentionInputs<'_>,
    items: &[DecodeItem],
    output: &mut RowsMut<'_>,
    partials: &mut RowsMut<'_>,
) {
    let block = inputs.cache.layout().block_of(inputs.layer);
    let v_len = block.v_head_dim() as usize;
    let heads = inputs.cache.group(inputs.layer).heads_per_kv_head();
    let mut softmax = OnlineSoftmax::new(inputs.cache, inputs.layer);
    for item in items {
        let row = inputs.plan.query_starts()[item.sequence as usize];
        let table = inputs.table(item.sequence);
        for kv_head in 0..block.num_kv_heads() {
            softmax.clear();
            for head in kv_head * heads..(kv_head + 1) * heads {
                let position = inputs.position(item.sequence, 0);
                softmax.push_query(inputs.query_of(row, head), inputs.logit(head), position);
            }
            softmax.attend(KeySpan {
                cache: inputs.cache,
                layer: inputs.layer,
                kv_head,
                table,
                first: item.first_token,
                end: item.end_token,
            });
            for query in 0..heads as usize {
                let head = (kv_head * heads) as usize + query;
                if item.partial == DIRECT {
                    let row = output.row_mut(row as usize, inputs.cache.output_len(inputs.layer));
                    softmax.write_output(query, &mut row[head * v_len..][..v_len]);
                } else {
                    let row = partials.row_mut(item.partial as usize, inputs.cache.partial_len(inputs.layer));
                    softmax.write_partial(query, &mut row[head * (v_len + 2)..][..v_len + 2]);
                }
            }
        }
    }
}
