//! The split in which a row's arithmetic depends on its own query and keys alone.
//!
//! Every row, also a sequence's only one, is a prefill item's, walks its keys in the same spans whatever the step is, and
//! has partial results that are merged, however few; its tiles are all walked the same way ([`PrefillItem::guarded_from`]). So
//! neither its neighbours in the batch, nor the rows that its own prompt is cut into, nor how it came by its keys (computed
//! before, found in the prefix cache, brought back) change a bit of it.
//!
//! The partial results of a whole step may be more than the scratch buffer holds. Rows are therefore taken in *groups*
//! that fit: a group's attention, then its merge, then the next group's.

use super::{PrefillItem, SplitConfig, WorkSplit, chunk, cut, prefill_work, whole_quanta};
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

/// Partial results that a row of a context of `context` tokens has.
pub(super) fn spans_of(context: u32, config: &SplitConfig) -> u32 {
    context.div_ceil(whole_quanta(u64::from(config.fixed_span_tokens.unwrap_or(u32::MAX)), config)).max(1)
}

impl WorkSplit {
    pub(super) fn split_invariant(&mut self, plan: &StepPlan, config: &SplitConfig) {
        let span_tokens = whole_quanta(u64::from(config.fixed_span_tokens.unwrap_or(u32::MAX)), config);
        let max_partials = config.max_partials.max(1);
        let mut used = 0;
        for sequence in 0..plan.num_sequences() {
            let rows = chunk(plan, sequence).rows;
            let spans = spans_of(chunk(plan, sequence).context, config);
            let mut first = 0;
            while first < rows {
                if used > 0 && max_partials.saturating_sub(used) < spans {
                    self.close_group(config);
                    used = 0;
                }
                // One row at least: whether its partial results fit by themselves is the caller's to check.
                let fitting = (max_partials.saturating_sub(used) / spans).max(1);
                let end = rows.min(first.saturating_add(fitting));
                self.push_rows(plan, sequence, first..end, span_tokens, used, config);
                used += (end - first) * spans;
                self.num_partials = self.num_partials.max(used);
                first = end;
            }
        }
        self.close_group(config);
    }

    /// The tiles and merges of some rows of a sequence, whose partial results start at `first_partial`.
    fn push_rows(
        &mut self,
        plan: &StepPlan,
        sequence: u32,
        rows: Range<u32>,
        span_tokens: u32,
        first_partial: u32,
        config: &SplitConfig,
    ) {
        let heads = config.heads_per_kv_head.max(1);
        let chunk = chunk(plan, sequence);
        let num_spans = spans_of(chunk.context, config);
        let visible = |row: u32| chunk.context - chunk.rows + row + 1;
        let partial_of = |row: u32| first_partial + (row - rows.start) * num_spans;
        let end_of_queries = rows.end * heads;
        let mut first_query = rows.start * heads;
        while first_query < end_of_queries {
            let end_query = end_of_queries.min(first_query.saturating_add(config.prefill_queries.max(1)));
            let end = visible((end_query - 1) / heads);
            for (span, first_token) in (0..).zip((0..end).step_by(span_tokens as usize)) {
                self.prefill_items.push(PrefillItem {
                    sequence,
                    first_query,
                    end_query,
                    first_token,
                    end_token: end.min(first_token.saturating_add(span_tokens)),
                    partial: partial_of(first_query / heads) + span,
                    num_spans,
                    guarded_from: first_token,
                });
            }
            first_query = end_query;
        }
        let first_row = plan.query_starts[sequence as usize];
        self.merge_items.extend(rows.clone().map(|row| super::MergeItem {
            row: first_row + row,
            first_partial: partial_of(row),
            num_partials: visible(row).div_ceil(span_tokens),
            padding: 0,
        }));
    }

    /// Ends the group of the items since the last one.
    fn close_group(&mut self, config: &SplitConfig) {
        let last = self.groups.last().cloned().unwrap_or_default();
        let first_item = last.prefill_items.end;
        if first_item as usize == self.prefill_items.len() {
            return;
        }
        let heads = config.heads_per_kv_head.max(1);
        let items = &self.prefill_items[first_item as usize..];
        let first_dispatch = self.prefill_dispatches.len();
        cut(items, config.dispatch_work_budget, &mut self.prefill_dispatches, |item| {
            prefill_work(item, heads)
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
