//! What the attention twins of one layer read, and all of them in a row.

use crate::reference::rule::{Logit, position};
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
    /// The layer's number in its group.
    layer_in_group: u32,
}

impl<'a> AttentionInputs<'a> {
    /// These inputs.
    ///
    /// # Panics
    /// When the cache has no such layer.
    pub fn new(cache: &'a CpuCache, plan: &'a StepPlan, layer: u32, query: Rows<'a>) -> Self {
        let layer_in_group = cache.group(layer).index_of(layer);
        Self { cache, plan, layer, query, layer_in_group }
    }

    /// The position of a sequence's row.
    pub(super) fn position(&self, sequence: u32, row: u32) -> Option<u32> {
        let starts = self.plan.query_starts();
        let rows = starts[sequence as usize + 1] - starts[sequence as usize];
        position(self.plan.context_lens()[sequence as usize], rows, row)
    }

    /// What becomes of the products of a query head.
    pub(super) fn logit(&self, head: u32) -> Logit {
        let group = self.cache.group(self.layer);
        Logit::of(group.logits(), self.layer_in_group, head, group.num_query_heads(), group.head_dim())
    }

    /// The query of one head in one row.
    pub(super) fn query_of(&self, row: u32, head: u32) -> &'a [f32] {
        let group = self.cache.group(self.layer);
        let k_len = group.head_dim() as usize;
        let row = self.query.row(row as usize, k_len * group.num_query_heads() as usize);
        &row[head as usize * k_len..][..k_len]
    }

    /// The block table of a sequence.
    pub(super) fn table(&self, sequence: u32) -> &'a [u32] {
        self.cache.table(self.layer, self.plan.table_rows()[sequence as usize])
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
    let partial_len = inputs.cache.partial_len(inputs.layer);
    let needed = split.num_partials as usize * partial_len;
    if partials.len() < needed {
        partials.resize(needed, 0.0);
    }
    let mut partial_rows = RowsMut::new(partials, partial_len);
    if split.groups.is_empty() {
        attention_decode(inputs, &split.decode_items, output, &mut partial_rows);
        attention_prefill(inputs, &split.prefill_items, output, &mut partial_rows);
        attention_merge(inputs, &split.merge_items, partial_rows.as_rows(), output);
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
        attention_merge(inputs, merge_items, partial_rows.as_rows(), output);
    }
}
