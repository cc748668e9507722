//! Cuts a step's attention into work items of similar size, and the items into dispatches within a work budget.
//!
//! Pure arithmetic on a [`StepPlan`]: no device, no policy of admission. A sequence with one row becomes decode items
//! (spans of keys); one with more becomes prefill items (tiles of query rows, and spans of keys where the tiles alone do
//! not fill the device: a few drafts to verify, or the end of a prompt, over a long context). Spans of one row are merged
//! exactly, so every cut gives the same result up to rounding. Keys that no row of an item sees are in no span, except for
//! less than a quantum before a window. First tokens that rows see beside a window belong to the span in which it begins.
//!
//! With [`SplitConfig::fixed_span_tokens`] the cuts of a row that is a sequence's only one in the step depend on its own
//! context alone. With [`SplitConfig::batch_invariant`] those of every row do, and its bits depend on nothing but its query
//! and its keys (`row_groups.rs`).
//!
//! Numbers of zero in a [`SplitConfig`] count as one.

use crate::reach::Reach;
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
    /// The keys that rows see.
    pub reach: Reach,
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
        let room = u64::from(config.max_partials).saturating_sub(partials(plan, span_tokens, config));
        let chunk_span = chunk_span(plan, config, room);
        for sequence in 0..plan.num_sequences() {
            let rows = plan.query_starts[sequence as usize + 1] - plan.query_starts[sequence as usize];
            if rows == 1 {
                self.push_decode(plan, sequence, span_tokens, config);
            } else {
                self.push_prefill(plan, sequence, chunk_span, config);
            }
        }
        let budget = config.dispatch_work_budget;
        cut(&self.decode_items, budget, &mut self.decode_dispatches, |item| {
            u64::from(item.end_token - item.first_token) + first_tokens_before(item.first_token, config)
        });
        cut(&self.prefill_items, budget, &mut self.prefill_dispatches, |item| prefill_work(item, config));
    }

    fn push_decode(&mut self, plan: &StepPlan, sequence: u32, span_tokens: u32, config: &SplitConfig) {
        let keys = chunk(plan, sequence).walked(0, config);
        let spans = (keys.end - keys.start).div_ceil(span_tokens).max(1);
        let first_partial = self.num_partials;
        for span in 0..spans {
            let first_token = keys.start + span * span_tokens;
            self.decode_items.push(DecodeItem {
                sequence,
                first_token,
                end_token: keys.end.min(first_token.saturating_add(span_tokens)),
                partial: if spans == 1 { DIRECT } else { first_partial + span },
            });
        }
        if spans > 1 {
            let row = plan.query_starts[sequence as usize];
            self.merge_items.push(MergeItem { row, first_partial, num_partials: spans, padding: 0 });
            self.num_partials += spans;
        }
    }

    /// The tiles of a sequence's rows, in spans of `span_tokens` if a tile walks more keys.
    fn push_prefill(&mut self, plan: &StepPlan, sequence: u32, span_tokens: u32, config: &SplitConfig) {
        let chunk = chunk(plan, sequence);
        let start = chunk.walked(0, config).start;
        let is_cut = chunk.tile_keys(config) > span_tokens;
        let span_tokens = if is_cut { span_tokens } else { u32::MAX };
        let grid = Grid { start, span_tokens, num_spans: (chunk.context - start).div_ceil(span_tokens) };
        let rows = Rows { range: 0..chunk.rows, first_partial: is_cut.then_some(self.num_partials) };
        self.push_rows(plan, sequence, &rows, grid, config);
        if is_cut {
            self.num_partials += chunk.rows * grid.num_spans;
        }
    }

    /// The tiles of some rows of a sequence, cut by `grid`, and the merges of rows that have partial results: one for each
    /// span of which a row walks a key, with room for all of the grid's.
    fn push_rows(&mut self, plan: &StepPlan, sequence: u32, rows: &Rows, grid: Grid, config: &SplitConfig) {
        let heads = config.heads_per_kv_head.max(1);
        let chunk = chunk(plan, sequence);
        let partial_of = |first: u32, row: u32| first + (row - rows.range.start) * grid.num_spans;
        let end_of_queries = rows.range.end.saturating_mul(heads);
        let mut first_query = rows.range.start * heads;
        while first_query < end_of_queries {
            let end_query = end_of_queries.min(first_query.saturating_add(config.prefill_queries.max(1)));
            let mut first_token = chunk.walked(first_query / heads, config).start;
            let end = chunk.walked((end_query - 1) / heads, config).end;
            while first_token < end {
                let span = grid.span_of(first_token);
                let end_token =
                    end.min(grid.start.saturating_add((span + 1).saturating_mul(grid.span_tokens)));
                self.prefill_items.push(PrefillItem {
                    sequence,
                    first_query,
                    end_query,
                    first_token,
                    end_token,
                    partial: match rows.first_partial {
                        Some(first) => partial_of(first, first_query / heads) + span,
                        None => DIRECT,
                    },
                    num_spans: grid.num_spans,
                    guarded_from: if config.batch_invariant { first_token } else { end_token },
                });
                first_token = end_token;
            }
            first_query = end_query;
        }
        let Some(first) = rows.first_partial else { return };
        let first_row = plan.query_starts[sequence as usize];
        self.merge_items.extend(rows.range.clone().map(|row| {
            let keys = chunk.walked(row, config);
            let first_span = grid.span_of(keys.start);
            MergeItem {
                row: first_row + row,
                first_partial: partial_of(first, row) + first_span,
                num_partials: grid.span_of(keys.end - 1) + 1 - first_span,
                padding: 0,
            }
        }));
    }
}

/// How the keys of a sequence's rows are cut.
#[derive(Clone, Copy)]
struct Grid {
    /// First token of the first span, and tokens of each.
    start: u32,
    span_tokens: u32,
    num_spans: u32,
}

impl Grid {
    fn span_of(&self, token: u32) -> u32 {
        (token - self.start) / self.span_tokens
    }
}

/// Rows of a sequence, and the first of their partial results.
struct Rows {
    range: Range<u32>,
    first_partial: Option<u32>,
}

/// A sequence of the step.
#[derive(Clone, Copy)]
struct Chunk {
    rows: u32,
    /// Tokens that its last row sees.
    context: u32,
}

impl Chunk {
    /// The keys that a row walks: those that it sees, first tokens beside a window excepted, from a multiple of the quantum.
    fn walked(&self, row: u32, config: &SplitConfig) -> Range<u32> {
        let end = self.context - self.rows + row + 1;
        let Some(position) = end.checked_sub(1) else { return 0..0 };
        let [_, seen] = config.reach.visible(position);
        let quantum = config.span_quantum.max(1);
        seen.start / quantum * quantum..end
    }

    /// The most keys that one of its tiles walks.
    fn tile_keys(&self, config: &SplitConfig) -> u32 {
        let all = self.context - self.walked(0, config).start;
        match config.reach {
            Reach::All => all,
            Reach::Window { tokens, .. } | Reach::Chunk { tokens } => {
                let rows = config.prefill_queries.max(1).div_ceil(config.heads_per_kv_head.max(1));
                let more = rows.min(self.rows).saturating_add(config.span_quantum.max(1));
                all.min(tokens.saturating_add(more))
            }
        }
    }

    /// Partial results of its rows in spans of `span_tokens`.
    fn partials(&self, span_tokens: u32, config: &SplitConfig) -> u64 {
        if self.tile_keys(config) <= span_tokens {
            return 0;
        }
        let keys = self.context - self.walked(0, config).start;
        u64::from(self.rows) * u64::from(keys.div_ceil(span_tokens))
    }
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
    for chunk in chunks(plan) {
        let queries = u64::from(chunk.rows) * u64::from(config.heads_per_kv_head.max(1));
        let chunk_tiles = queries.div_ceil(u64::from(config.prefill_queries.max(1)));
        let keys = chunk.tile_keys(config);
        tiles += chunk_tiles;
        tokens += chunk_tiles * u64::from(keys);
        longest = longest.max(keys);
    }
    let wanted_tiles = u64::from(config.target_workgroups.div_ceil(config.workgroups_per_tile.max(1)));
    if config.fixed_span_tokens.is_some() {
        return u32::MAX;
    }
    let wanted_span = match tiles >= wanted_tiles {
        true => 2 * tokens.div_ceil(tiles.max(1)),
        false => tokens.div_ceil(wanted_tiles),
    };
    let partials = |span| chunks(plan).map(|chunk| chunk.partials(span, config)).sum::<u64>();
    let mut span = whole_quanta(wanted_span, config);
    while span < longest && partials(span) > room {
        let longer = whole_quanta(2 * u64::from(span), config);
        // Beyond the longest multiple of the quantum nothing is cut.
        span = if longer > span { longer } else { u32::MAX };
    }
    span
}

/// Keys that each sequence with one row walks.
fn decode_keys(plan: &StepPlan, config: &SplitConfig) -> impl Iterator<Item = u32> {
    let chunks = (0..plan.num_sequences()).map(|sequence| chunk(plan, sequence));
    let rows = chunks.filter(|chunk| chunk.rows == 1).map(|chunk| chunk.walked(0, config));
    rows.map(|keys| keys.end - keys.start)
}

/// One span length for all rows of the step, such that the step has about `target_workgroups` workgroups, no span exceeds
/// a dispatch's budget, and the partial results fit. The last of these wins.
fn balanced_span(plan: &StepPlan, config: &SplitConfig) -> u32 {
    let mut rows = 0u64;
    let mut tokens = 0u64;
    let mut longest = 1u32;
    for keys in decode_keys(plan, config) {
        rows += 1;
        tokens += u64::from(keys);
        longest = longest.max(keys);
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
    while span < longest && partials(plan, span, config) > u64::from(config.max_partials) {
        span = whole_quanta(2 * u64::from(span), config);
    }
    span
}

/// Partial results of the step's rows when they are cut into spans of `span_tokens`.
fn partials(plan: &StepPlan, span_tokens: u32, config: &SplitConfig) -> u64 {
    let spans = decode_keys(plan, config).map(|keys| u64::from(keys.div_ceil(span_tokens)));
    spans.filter(|&spans| spans > 1).sum()
}

/// `tokens`, at least one, rounded up to a multiple of the span quantum.
fn whole_quanta(tokens: u64, config: &SplitConfig) -> u32 {
    let quantum = u64::from(config.span_quantum.max(1));
    let most = u64::from(u32::MAX) / quantum * quantum;
    tokens.max(1).next_multiple_of(quantum).min(most) as u32
}

/// (row, key) pairs of a prefill item, rounded up to whole rows, and those of a span to a rectangle.
fn prefill_work(item: &PrefillItem, config: &SplitConfig) -> u64 {
    let heads = config.heads_per_kv_head.max(1);
    let rows = u64::from(item.end_query.div_ceil(heads) - item.first_query / heads);
    match (item.partial, item.first_token) {
        (DIRECT, 0) => rows_work(rows, u64::from(item.end_token)),
        (_, first_token) => {
            rows * (u64::from(item.end_token - first_token) + first_tokens_before(first_token, config))
        }
    }
}

/// The first tokens, beside a window, that an item may have to walk before its span.
fn first_tokens_before(first_token: u32, config: &SplitConfig) -> u64 {
    match config.reach {
        Reach::Window { first, .. } => u64::from(first.min(first_token)),
        _ => 0,
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
