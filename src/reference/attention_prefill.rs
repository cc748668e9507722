//! Twin of `attention_prefill`: a tile of one sequence's queries over the keys that they see.

use crate::reference::online_softmax::{KeySpan, OnlineSoftmax};
use crate::reference::{AttentionInputs, RowsMut};
use crate::schedule::PrefillItem;

/// Attends with each item's queries, for every kv head, and writes their heads of the rows of `output`
/// (`[num_query_heads, v_head_dim]`).
///
/// Query `q` of a sequence is head `q % heads_per_kv_head` of a kv head in row `q / heads_per_kv_head`. Row `i` of a
/// sequence with `n` rows and context length `c` sees the keys `0 ..= c - n + i`; a row for which there are none gives 0.
///
/// # Panics
/// When `output` does not hold a row that an item writes.
pub fn attention_prefill(inputs: &AttentionInputs<'_>, items: &[PrefillItem], output: &mut RowsMut<'_>) {
    let block = &inputs.cache.layout().block;
    let v_len = block.v_head_dim as usize;
    let heads = inputs.cache.heads_per_kv_head();
    let mut softmax = OnlineSoftmax::new(inputs.cache);
    for item in items {
        let first_row = inputs.plan.query_starts()[item.sequence as usize];
        let (_, past) = inputs.rows_and_past(item.sequence);
        let table = inputs.table(item.sequence);
        for kv_head in 0..block.num_kv_heads {
            softmax.clear();
            for query in item.first_query..item.end_query {
                let row = query / heads;
                let visible_end = (past + i64::from(row) + 1).max(0) as u32;
                let head = kv_head * heads + query % heads;
                softmax.push_query(inputs.query_of(first_row + row, head), inputs.scale, visible_end);
            }
            softmax.attend(KeySpan {
                cache: inputs.cache,
                layer: inputs.layer,
                kv_head,
                table,
                first: 0,
                end: inputs.plan.context_lens()[item.sequence as usize],
            });
            for query in item.first_query..item.end_query {
                let row = output.row_mut((first_row + query / heads) as usize, inputs.cache.output_len());
                let head = (kv_head * heads + query % heads) as usize;
                let index = (query - item.first_query) as usize;
                softmax.write_output(index, &mut row[head * v_len..][..v_len]);
            }
        }
    }
}
