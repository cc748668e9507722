//! Cuts a step's attention into work items of similar size, and the items into dispatches within a work budget.
//!
//! Pure arithmetic on a [`StepPlan`]: no device, no policy of admission. A sequence with one row becomes decode items
//! (spans of keys); one with more becomes prefill items (tiles of query rows, and spans of keys where the tiles alone do
//! not fill the device: a few drafts to verify, or the end of a prompt, over a long context). Spans of one row are merged
//! exactly, so every cut gives the same result up to rounding. With [`SplitConfig::fixed_span_tokens`] the cuts of a row
//! that is a sequence's only one in the step depend on its own context alone. With [`SplitConfig::batch_invariant`]
//! those of every row do, and its bits depend on nothing but its query and its keys (`row_groups.rs`).
//!
//! Numbers of zero in a [`SplitConfig`] count as one.

use crate::schedule::step_plan::{StepPlan, rows_work};
use std::ops::Range;

mod row_groups;

pub use row_groups::RowGroup;

/// Destination of a decode item that has its row to itself: the final output instead of a partial result.
pub const DIRECT: u32 = u32::MAX;

/// How to split: facts of the device and the model, fixed for the life of the attention object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitConfig {
    /// Workgroups that one decode item becomes: kv heads times tiles of query heads.
    pub workgroups_per_item: u32,
    /// Workgroups that one prefill item becomes: kv heads.
    pub workgroups_per_tile: u32,
    /// Query heads per kv head.
    pub heads_per_kv_head: u32,
    /// (row, query head) pairs that one prefill workgroup handles. The lists have an item for so many, and take memory
    /// accordingly.
    pub prefill_queries: u32,
    /// Spans start at multiples of this many tokens: a multiple of the block size and of the key tile of the kernel that
    /// runs them.
    pub span_quantum: u32,
    /// Workgroups that fill the device; decode is split until it has about as many, and so is prefill.
    pub target_workgroups: u32,
    /// Partial results that the scratch buffer holds: spans are lengthened until they suffice.
    pub max_partials: u32,
    /// Cut every decode row into spans of this many tokens, rounded up to the quantum, whatever else is in the batch, and
    /// no prefill row. Such spans are never lengthened: when [`WorkSplit::num_partials`] exceeds the scratch buffer, the
    /// step must be refused.
    pub fixed_span_tokens: Option<u32>,
    /// Treat every row alike, whatever step it is in: see [`RowGroup`]. Needs `fixed_span_tokens`, and scratch for the spans
    /// of one row.
    pub batch_invariant: bool,
    /// (row, key) pairs that one dispatch of attention may have, all kv heads counted once. A single item may exceed it.
    pub dispatch_work_budget: u64,
}

/// A span of one decode row: `[sequence, first token, end token, partial]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct DecodeItem {
    /// Index of the sequence in the step; its only row is `query_starts[sequence]`.
    pub sequence: u32,
    /// First key of the span.
    pub first_token: u32,
    /// End of the span.
    pub end_token: u32,
    /// Index of the partial result, or [`DIRECT`].
    pub partial: u32,
}

/// A tile of one sequence's queries over a span of the keys that they see. Query `q` of a sequence is row
/// `q / heads_per_kv_head`, head `q % heads_per_kv_head` of the kv head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PrefillItem {
    /// Index of the sequence in the step.
    pub sequence: u32,
    /// First query of the tile.
    pub first_query: u32,
    /// End of the tile.
    pub end_query: u32,
    /// First key of the span.
    pub first_token: u32,
    /// End of the span; at most what the last query sees.
    pub end_token: u32,
    /// Index of the first row's partial result, or [`DIRECT`].
    pub partial: u32,
    /// From one row's partial result to the next one's: spans of the sequence.
    pub num_spans: u32,
    /// Keys from this one on are read with guards, even where all queries of the tile see them: the end of the span, or its
    /// first key, so that a row's arithmetic does not depend on what the other rows of the tile see.
    pub guarded_from: u32,
}

impl PrefillItem {
    /// Words of an item as shaders read it: they take the number from here.
    pub const WORDS: u32 = 8;

    /// The item as shaders read it.
    pub fn words(&self) -> [u32; Self::WORDS as usize] {
        let Self {
            sequence,
            first_query,
            end_query,
            first_token,
            end_token,
            partial,
            num_spans,
            guarded_from,
        } = *self;
        [sequence, first_query, end_query, first_token, end_token, partial, num_spans, guarded_from]
    }
}

/// A row whose spans must be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct MergeItem {
    /// Row of the step.
    pub row: u32,
    /// First of its partial results; they are consecutive.
    pub first_partial: u32,
    /// Number of partial results.
    pub num_partials: u32,
    /// Always 0: keeps the item at 16 bytes.
    pub padding: u32,
}

/// The work lists of a step. Reused from step to step: planning a steady step allocates nothing.
#[derive(Debug, Default)]
pub struct WorkSplit {
    /// Decode items, a row's spans in order.
    pub decode_items: Vec<DecodeItem>,
    /// Prefill items: sequence after sequence, tile after tile, a tile's spans in order.
    pub prefill_items: Vec<PrefillItem>,
    /// Rows to merge.
    pub merge_items: Vec<MergeItem>,
    /// Ranges of `decode_items`, one dispatch each.
    pub decode_dispatches: Vec<Range<u32>>,
    /// Ranges of `prefill_items`, one dispatch each.
    pub prefill_dispatches: Vec<Range<u32>>,
    /// Groups of rows whose attention and merge come one after the other; none unless the split is batch-invariant.
    pub groups: Vec<RowGroup>,
    /// Partial results used, at most, at a time.
    pub num_partials: u32,
}

impl WorkSplit {
    /// Splits `plan`, replacing what was here.
    pub fn split(&mut self, plan: &StepPlan, config: &SplitConfig) {
        self.decode_items.clear();
        self.prefill_items.clear();
        self.merge_items.clear();
        self.decode_dispatches.clear();
        self.prefill_dispatches.clear();
        self.groups.clear();
        self.num_partials = 0;
        if config.batch_invariant {
            return self.split_invariant(plan, config);
        }
        let span_tokens = match config.fixed_span_tokens {
            Some(tokens) => whole_quanta(u64::from(tokens), config),
            None => balanced_span(plan, config),
        };
        let room = u64::from(config.max_partials).saturating_sub(partials(plan, span_tokens));
        let chunk_span = chunk_span(plan, config, room);
        for sequence in 0..plan.num_sequences() {
            let rows = plan.query_starts[sequence as usize + 1] - plan.query_starts[sequence as usize];
            if rows == 1 {
                self.push_decode(plan, sequence, span_tokens);
            } else {
                self.push_prefill(plan, sequence, chunk_span, config);
            }
        }
        let budget = config.dispatch_work_budget;
        cut(&self.decode_items, budget, &mut self.decode_dispatches, |item| {
            u64::from(item.end_token - item.first_token)
        });
        cut(&self.prefill_items, budget, &mut self.prefill_dispatches, |item| {
            prefill_work(item, config.heads_per_kv_head.max(1))
        });
    }

    fn push_decode(&mut self, plan: &StepPlan, sequence: u32, span_tokens: u32) {
        let context = plan.context_lens[sequence as usize];
        let spans = context.div_ceil(span_tokens).max(1);
        let first_partial = self.num_partials;
        for span in 0..spans {
            let first_token = span * span_tokens;
            self.decode_items.push(DecodeItem {
                sequence,
                first_token,
                end_token: context.min(first_token.saturating_add(span_tokens)),
                partial: if spans == 1 { DIRECT } else { first_partial + span },
            });
        }
        if spans > 1 {
            self.push_merges(plan.query_starts[sequence as usize], spans, 1, |_| spans);
        }
    }

    /// The tiles of a sequence's rows, in spans of `span_tokens` if its context is longer. Then every row has partial
    /// results, one for each span of which it sees a key; those of a row are consecutive.
    fn push_prefill(&mut self, plan: &StepPlan, sequence: u32, span_tokens: u32, config: &SplitConfig) {
        let Chunk { rows, context } = chunk(plan, sequence);
        let heads = config.heads_per_kv_head.max(1);
        let spans = context.div_ceil(span_tokens);
        let is_cut = spans > 1;
        let queries = rows.saturating_mul(heads);
        let visible = |row: u32| context - rows + row + 1;
        let mut first_query = 0;
        while first_query < queries {
            let end_query = queries.min(first_query.saturating_add(config.prefill_queries.max(1)));
            let end = visible((end_query - 1) / heads);
            for first_token in (0..end).step_by(span_tokens as usize) {
                let end_token = end.min(first_token.saturating_add(span_tokens));
                self.prefill_items.push(PrefillItem {
                    sequence,
                    first_query,
                    end_query,
                    first_token,
                    end_token,
                    partial: match is_cut {
                        true => self.num_partials + first_query / heads * spans + first_token / span_tokens,
                        false => DIRECT,
                    },
                    num_spans: spans,
                    guarded_from: end_token,
                });
            }
            first_query = end_query;
        }
        if is_cut {
            self.push_merges(plan.query_starts[sequence as usize], spans, rows, |row| {
                visible(row).div_ceil(span_tokens)
            });
        }
    }

    /// Merges of consecutive rows with room for `spans` partial results each.
    fn push_merges(&mut self, first_row: u32, spans: u32, rows: u32, num_partials: impl Fn(u32) -> u32) {
        self.merge_items.extend((0..rows).map(|row| MergeItem {
            row: first_row + row,
            first_partial: self.num_partials + row * spans,
            num_partials: num_partials(row),
            padding: 0,
        }));
        self.num_partials += rows * spans;
    }
}

/// A sequence of the step.
#[derive(Clone, Copy)]
struct Chunk {
    rows: u32,
    /// Tokens that its last row sees.
    context: u32,
}

fn chunk(plan: &StepPlan, sequence: u32) -> Chunk {
    let sequence = sequence as usize;
    let rows = plan.query_starts[sequence + 1] - plan.query_starts[sequence];
    Chunk { rows, context: plan.context_lens[sequence] }
}

/// The sequences with several rows.
fn chunks(plan: &StepPlan) -> impl Iterator<Item = Chunk> {
    (0..plan.num_sequences()).map(|sequence| chunk(plan, sequence)).filter(|chunk| chunk.rows != 1)
}

/// One span length for all chunks of the step, such that their tiles have about `target_workgroups` workgroups, and their
/// partial results fit into `room`. Where the tiles fill the device as they are, only those are cut that walk much more
/// keys than the others. With fixed spans nothing is cut, since how much there is to fill depends on the batch.
fn chunk_span(plan: &StepPlan, config: &SplitConfig, room: u64) -> u32 {
    let mut tiles = 0u64;
    let mut tokens = 0u64;
    let mut longest = 1u32;
    for Chunk { rows, context } in chunks(plan) {
        let queries = u64::from(rows) * u64::from(config.heads_per_kv_head.max(1));
        let chunk_tiles = queries.div_ceil(u64::from(config.prefill_queries.max(1)));
        tiles += chunk_tiles;
        tokens += chunk_tiles * u64::from(context);
        longest = longest.max(context);
    }
    let wanted_tiles = u64::from(config.target_workgroups.div_ceil(config.workgroups_per_tile.max(1)));
    if config.fixed_span_tokens.is_some() {
        return u32::MAX;
    }
    let wanted_span = match tiles >= wanted_tiles {
        true => 2 * tokens.div_ceil(tiles.max(1)),
        false => tokens.div_ceil(wanted_tiles),
    };
    let mut span = whole_quanta(wanted_span, config);
    while span < longest && chunk_partials(plan, span) > room {
        let longer = whole_quanta(2 * u64::from(span), config);
        // Beyond the longest multiple of the quantum nothing is cut.
        span = if longer > span { longer } else { u32::MAX };
    }
    span
}

/// Partial results of the step's chunks when they are cut into spans of `span_tokens`.
fn chunk_partials(plan: &StepPlan, span_tokens: u32) -> u64 {
    let cut = chunks(plan).filter(|chunk| chunk.context > span_tokens);
    cut.map(|chunk| u64::from(chunk.rows) * u64::from(chunk.context.div_ceil(span_tokens))).sum()
}

/// Contexts of the sequences with one row.
fn decode_contexts(plan: &StepPlan) -> impl Iterator<Item = u32> {
    let rows = plan.query_starts.windows(2).map(|pair| pair[1] - pair[0]);
    rows.zip(&plan.context_lens).filter(|&(rows, _)| rows == 1).map(|(_, &context)| context)
}

/// One span length for all rows of the step, such that the step has about `target_workgroups` workgroups, no span exceeds
/// a dispatch's budget, and the partial results fit. The last of these wins.
fn balanced_span(plan: &StepPlan, config: &SplitConfig) -> u32 {
    let mut rows = 0u64;
    let mut tokens = 0u64;
    let mut longest = 1u32;
    for context in decode_contexts(plan) {
        rows += 1;
        tokens += u64::from(context);
        longest = longest.max(context);
    }
    let wanted_items = u64::from(config.target_workgroups.div_ceil(config.workgroups_per_item.max(1)));
    let wanted_span = if rows >= wanted_items {
        // The rows fill the device as they are; still even out one row that is much longer than the others.
        2 * tokens.div_ceil(rows.max(1))
    } else {
        tokens.div_ceil(wanted_items)
    };
    let quantum = u64::from(config.span_quantum.max(1));
    let budget = (config.dispatch_work_budget / quantum * quantum).max(quantum);
    let mut span = whole_quanta(wanted_span.min(u64::from(longest)).min(budget), config);
    while span < longest && partials(plan, span) > u64::from(config.max_partials) {
        span = whole_quanta(2 * u64::from(span), config);
    }
    span
}

/// Partial results of the step's rows when they are cut into spans of `span_tokens`.
fn partials(plan: &StepPlan, span_tokens: u32) -> u64 {
    let spans = decode_contexts(plan).map(|context| u64::from(context.div_ceil(span_tokens)));
    spans.filter(|&spans| spans > 1).sum()
}

/// `tokens`, at least one, rounded up to a multiple of the span quantum.
fn whole_quanta(tokens: u64, config: &SplitConfig) -> u32 {
    let quantum = u64::from(config.span_quantum.max(1));
    let most = u64::from(u32::MAX) / quantum * quantum;
    tokens.max(1).next_multiple_of(quantum).min(most) as u32
}

/// (row, key) pairs of a prefill item, rounded up to whole rows, and those of a span to a rectangle.
fn prefill_work(item: &PrefillItem, heads: u32) -> u64 {
    let rows = u64::from(item.end_query.div_ceil(heads) - item.first_query / heads);
    match item.partial {
        DIRECT => rows_work(rows, u64::from(item.end_token)),
        _ => rows * u64::from(item.end_token - item.first_token),
    }
}

/// Consecutive items while their work stays within `budget`; an item beyond it has a dispatch of its own.
fn cut<T>(items: &[T], budget: u64, ranges: &mut Vec<Range<u32>>, work_of: impl Fn(&T) -> u64) {
    let mut start = 0;
    let mut work = 0u64;
    for (index, item) in items.iter().enumerate() {
        let item_work = work_of(item);
        if index > start && work.saturating_add(item_work) > budget {
            ranges.push(start as u32..index as u32);
            start = index;
            work = 0;
        }
        work = work.saturating_add(item_work);
    }
    if start < items.len() {
        ranges.push(start as u32..items.len() as u32);
    }
}

#[cfg(test)]
mod tests;
