//! What the attention twins of one layer read, and all of them in a row.

use crate::reference::{CpuCache, Rows, RowsMut, attention_decode, attention_merge, attention_prefill};
use crate::schedule::{StepPlan, WorkSplit};

/// What the attention of one layer reads in one step.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInputs<'a> {
    /// Keys, values and block tables, up to date with the step: table changes, block copies and this layer's new keys
    /// and values applied.
    pub cache: &'a CpuCache,
    /// The step.
    pub plan: &'a StepPlan,
    /// The layer.
    pub layer: u32,
    /// Queries, `[rows][num_query_heads, k_head_dim]`.
    pub query: Rows<'a>,
    /// Factor of the logits.
    pub scale: f32,
}

impl<'a> AttentionInputs<'a> {
    /// Inputs with the usual scale, `1 / sqrt(k_head_dim)`.
    pub fn new(cache: &'a CpuCache, plan: &'a StepPlan, layer: u32, query: Rows<'a>) -> Self {
        let scale = 1.0 / (cache.layout().block().k_head_dim() as f32).sqrt();
        Self { cache, plan, layer, query, scale }
    }

    /// Tokens that a sequence's last row sees, and its rows.
    pub(super) fn context_and_rows(&self, sequence: u32) -> (usize, usize) {
        let starts = self.plan.query_starts();
        let rows = starts[sequence as usize + 1] - starts[sequence as usize];
        (self.plan.context_lens()[sequence as usize] as usize, rows as usize)
    }

    /// The query of one head in one row.
    pub(super) fn query_of(&self, row: u32, head: u32) -> &'a [f32] {
        let k_len = self.cache.layout().block().k_head_dim() as usize;
        let row = self.query.row(row as usize, k_len * self.cache.num_query_heads() as usize);
        &row[head as usize * k_len..][..k_len]
    }

    /// The block table of a sequence.
    pub(super) fn table(&self, sequence: u32) -> &'a [u32] {
        self.cache.table(self.plan.table_rows()[sequence as usize])
    }
}

/// The attention of one layer, all items of `split`: decode, prefill, merge.
///
/// Writes the row of every token of the step into `output` (`[rows][num_query_heads, v_head_dim]`); rows of padding stay
/// as they are. `partials` is scratch, grown as needed and reusable.
///
/// # Panics
/// When a tensor has fewer rows than the step, the cache has no such layer, or plan and split belong to another cache or
/// step.
pub fn attention(
    inputs: &AttentionInputs<'_>,
    split: &WorkSplit,
    output: &mut RowsMut<'_>,
    partials: &mut Vec<f32>,
) {
    let partial_len = inputs.cache.partial_len();
    let needed = split.num_partials as usize * partial_len;
    if partials.len() < needed {
        partials.resize(needed, 0.0);
    }
    let mut partial_rows = RowsMut::new(partials, partial_len);
    if split.groups.is_empty() {
        attention_decode(inputs, &split.decode_items, output, &mut partial_rows);
        attention_prefill(inputs, &split.prefill_items, output, &mut partial_rows);
        attention_merge(inputs.cache, &split.merge_items, partial_rows.as_rows(), output);
    }
    let indices = |range: &std::ops::Range<u32>| range.start as usize..range.end as usize;
    for group in &split.groups {
        attention_prefill(
            inputs,
            &split.prefill_items[indices(&group.prefill_items)],
            output,
            &mut partial_rows,
        );
        let merge_items = &split.merge_items[indices(&group.merge_items)];
        attention_merge(inputs.cache, merge_items, partial_rows.as_rows(), output);
    }
}
