//! The split in which a row's arithmetic depends on its own query and keys alone.
//!
//! Every row, also a sequence's only one, is a prefill item's, walks its keys in the same spans whatever the step is, and
//! has partial results that are merged, however few; its tiles are all walked the same way ([`PrefillItem::guarded_from`]). So
//! neither its neighbours in the batch, nor the rows that its own prompt is cut into, nor how it came by its keys (computed
//! before, found in the prefix cache, brought back) change a bit of it.
//!
//! The partial results of a whole step may be more than the scratch buffer holds. Rows are therefore taken in *groups*
//! that fit: a group's attention, then its merge, then the next group's.

use super::{Chunk, Grid, Rows, SplitConfig, WorkSplit, chunk, cut, prefill_work, whole_quanta};
use crate::schedule::step_plan::StepPlan;
use std::ops::Range;

/// Rows whose partial results are in the scratch buffer together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowGroup {
    /// Range of [`WorkSplit::prefill_items`].
    pub prefill_items: Range<u32>,
    /// Range of [`WorkSplit::prefill_dispatches`].
    pub prefill_dispatches: Range<u32>,
    /// Range of [`WorkSplit::merge_items`].
    pub merge_items: Range<u32>,
}

/// How the keys of a sequence's rows are cut: at the same tokens for every row of every step.
fn grid(chunk: Chunk, config: &SplitConfig) -> Grid {
    let span_tokens = whole_quanta(u64::from(config.fixed_span_tokens.unwrap_or(u32::MAX)), config);
    let start = chunk.walked(0, config).start / span_tokens * span_tokens;
    Grid { start, span_tokens, num_spans: (chunk.context - start).div_ceil(span_tokens).max(1) }
}

impl WorkSplit {
    pub(super) fn split_invariant(&mut self, plan: &StepPlan, config: &SplitConfig) {
        let max_partials = config.max_partials.max(1);
        let mut used = 0;
        for sequence in 0..plan.num_sequences() {
            let chunk = chunk(plan, sequence);
            let grid = grid(chunk, config);
            let mut first = 0;
            while first < chunk.rows {
                if used > 0 && max_partials.saturating_sub(used) < grid.num_spans {
                    self.close_group(config);
                    used = 0;
                }
                // One row at least: whether its partial results fit by themselves is the caller's to check.
                let fitting = (max_partials.saturating_sub(used) / grid.num_spans).max(1);
                let end = chunk.rows.min(first.saturating_add(fitting));
                let rows = Rows { range: first..end, first_partial: Some(used) };
                self.push_rows(plan, sequence, &rows, grid, config);
                used += (end - first) * grid.num_spans;
                self.num_partials = self.num_partials.max(used);
                first = end;
            }
        }
        self.close_group(config);
    }

    /// Ends the group of the items since the last one.
    fn close_group(&mut self, config: &SplitConfig) {
        let last = self.groups.last().cloned().unwrap_or_default();
        let first_item = last.prefill_items.end;
        if first_item as usize == self.prefill_items.len() {
            return;
        }
        let items = &self.prefill_items[first_item as usize..];
        let first_dispatch = self.prefill_dispatches.len();
        cut(items, config.dispatch_work_budget, &mut self.prefill_dispatches, |item| {
            prefill_work(item, config)
        });
        for dispatch in &mut self.prefill_dispatches[first_dispatch..] {
            *dispatch = first_item + dispatch.start..first_item + dispatch.end;
        }
        self.groups.push(RowGroup {
            prefill_items: first_item..self.prefill_items.len() as u32,
            prefill_dispatches: first_dispatch as u32..self.prefill_dispatches.len() as u32,
            merge_items: last.merge_items.end..self.merge_items.len() as u32,
        });
    }
}
