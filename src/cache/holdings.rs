//! What tables hold and will hold, in blocks: pure questions, summed over runs.
//!
//! What lies in lanes that do not slide *lasts*: tables that share it share it for as long as they live. Behind windows each
//! table goes on to blocks of its own, whatever it shares now.

use crate::cache::KvCache;
use crate::cache::block_table::{BlockTable, Run};
use crate::cache::lane::Lane;
use crate::ids::{BlockId, TableId};

/// A table's blocks in one lane, as a plan writes them down.
pub(crate) struct PlannedRun<'a> {
    pub(crate) stack: u32,
    pub(crate) block_size: u32,
    pub(crate) block_shift: u32,
    /// Logical block that `blocks` begins with, all of them in the pool.
    pub(crate) first_entry: u32,
    pub(crate) blocks: &'a [BlockId],
    /// Entries from here on may differ from what the device has.
    pub(crate) dirty_from: u32,
    /// Tokens that the lane has blocks for: others are another one's.
    pub(crate) first_token: u32,
    pub(crate) end_token: u32,
}

impl KvCache {
    /// The runs of a table, lane by lane; those of one stack in the order of their tokens.
    pub(crate) fn runs(&self, table: TableId) -> impl Iterator<Item = PlannedRun<'_>> {
        let runs = &self.tables[table.row as usize].runs;
        self.lanes.iter().zip(runs.iter()).map(|(lane, run)| PlannedRun {
            stack: lane.stack,
            block_size: lane.block_size(),
            block_shift: lane.block_size().trailing_zeros(),
            first_entry: run.first,
            blocks: &run.blocks,
            dirty_from: run.dirty_from,
            first_token: lane.tokens_before(lane.start),
            end_token: lane.end_token(),
        })
    }

    /// All blocks of a table that are in the pool, run by run.
    pub(crate) fn blocks_of(&self, table: TableId) -> impl Iterator<Item = BlockId> {
        let table = self.live(table).ok();
        table.into_iter().flat_map(|table| table.runs.iter().flat_map(|run| run.blocks.iter().copied()))
    }

    /// How many blocks of the pool a table has.
    #[inline]
    pub(crate) fn num_held(&self, table: TableId) -> u32 {
        self.live(table).map_or(0, |table| table.pool_blocks())
    }

    /// Blocks that last and that a table's first `len` tokens do not need.
    pub(crate) fn lasting_beyond(&self, table: TableId, len: u32) -> impl Iterator<Item = BlockId> {
        self.lasting(table).flat_map(move |(lane, run)| {
            let kept = lane.end_of(len).saturating_sub(run.first) as usize;
            run.blocks[kept.min(run.blocks.len())..].iter().copied()
        })
    }

    /// Blocks that last and that a table's first `len` tokens fill.
    pub(crate) fn lasting_full(&self, table: TableId, len: u32) -> impl Iterator<Item = BlockId> {
        self.lasting(table).flat_map(move |(lane, run)| {
            let full = lane.end_of(len - len % lane.block_size()).saturating_sub(run.first) as usize;
            run.blocks[..full.min(run.blocks.len())].iter().copied()
        })
    }

    /// Blocks that last and that a table's next token goes into, if they are partly filled when at most `end` tokens are
    /// left.
    pub(crate) fn lasting_tails(&self, table: TableId, end: u32) -> impl Iterator<Item = BlockId> {
        let len = self.live(table).map_or(0, |table| table.len).min(end);
        self.lasting(table).filter_map(move |(lane, run)| run.block_at(lane.tail_of(len)?))
    }

    fn lasting(&self, table: TableId) -> impl Iterator<Item = (&Lane, &Run)> {
        let table = self.live(table).ok();
        let runs = table.into_iter().flat_map(|table| self.lanes.iter().zip(table.runs.iter()));
        runs.filter(|(lane, _)| !lane.slides())
    }

    /// Whether some lane gives blocks back while a sequence lives.
    pub(crate) fn slides(&self) -> bool {
        self.slides
    }

    /// Windows are sized for at most `rows` rows of a sequence in a step.
    pub(crate) fn reckon_with(&mut self, rows: u32) {
        self.rows_at_most = rows;
    }

    /// The most rows of a sequence in a step that windows are sized for.
    pub(crate) fn rows_at_most(&self) -> u32 {
        self.rows_at_most
    }

    /// The most blocks that a sequence holds on its way to `max_tokens`, with one row in a step.
    pub(crate) fn blocks_at_least(&self, max_tokens: u32) -> u32 {
        self.lanes.iter().fold(0, |sum: u32, lane| sum.saturating_add(lane.most_blocks(max_tokens, 1)))
    }

    /// The most blocks that a sequence holds while its first `len` tokens are read. A pool that does not hold the largest
    /// steps' holds smaller ones'.
    pub(crate) fn blocks_to_read(&self, len: u32) -> u32 {
        let rows = self.rows_at_most;
        let most =
            self.lanes.iter().fold(0, |sum: u32, lane| sum.saturating_add(lane.most_blocks(len, rows)));
        if most > self.config.num_blocks() { self.blocks_at_least(len) } else { most }
    }

    /// Blocks that `len` tokens take, while they are read, beyond those that a table has.
    #[inline]
    pub(crate) fn blocks_beyond(&self, table: Option<TableId>, len: u32) -> u32 {
        if self.is_plain {
            // Asked of each sequence in each step.
            let held = table.map_or(0, |table| self.tables[table.row as usize].runs[0].blocks.len() as u32);
            return self.lanes[0].end_of(len).saturating_sub(held);
        }
        let held = table.map_or(0, |table| self.num_held(table));
        self.blocks_to_read(len).saturating_sub(held)
    }

    /// The most blocks of `samples` sequences together that begin with the same `shared` tokens: they share what these fill
    /// and what lasts.
    pub(crate) fn side_by_side(&self, shared: u32, max_tokens: u32, samples: u32) -> u64 {
        let rows = self.rows_at_most;
        let of_lane = |lane: &Lane| {
            let most = lane.most_blocks(max_tokens, rows);
            let full = lane.end_of(shared - shared % lane.block_size()) - lane.start;
            let full = if lane.slides() { 0 } else { full.min(most) };
            u64::from(full) + u64::from(samples) * u64::from(most - full)
        };
        self.lanes.iter().map(of_lane).sum()
    }

    /// Free blocks that a sequence may still take on its way to `max_tokens`, its own copies of shared last blocks included.
    pub(crate) fn still_needed(&self, table: Option<TableId>, max_tokens: u32) -> u32 {
        let rows = self.rows_at_most;
        let table = table.map(|table| &self.tables[table.row as usize]);
        let mut needed = 0;
        for (index, lane) in self.lanes.iter().enumerate() {
            let most = lane.most_blocks(max_tokens, rows);
            let held = table.map_or(0, |table| self.held_for_good(table, lane, &table.runs[index]));
            needed += most.saturating_sub(held);
        }
        needed
    }

    /// Blocks of a run that its table will not have to take again: of a shared last block it takes a copy.
    #[inline]
    fn held_for_good(&self, table: &BlockTable, lane: &Lane, run: &Run) -> u32 {
        if lane.slides() {
            // What others hold as well is not free when it falls behind the window.
            let own =
                |&&block: &&BlockId| self.pool.ref_count(block) == 1 && !self.pool.is_pinned_content(block);
            return run.blocks.iter().filter(own).count() as u32;
        }
        let tail = || lane.tail_of(table.len).is_some_and(|entry| self.is_shared_tail(run, entry, table.len));
        let copied = run.borrowed.is_some() || tail();
        (run.blocks.len() as u32).saturating_sub(u32::from(copied))
    }

    /// The most rows, up to `rows`, that `free` more blocks hold.
    pub(crate) fn rows_within(&self, table: TableId, rows: u32, free: u32) -> u32 {
        let fits = |rows: u32| self.growth(table, rows, free).is_ok_and(|growth| growth.needed() <= free);
        if rows == 0 || fits(rows) {
            return rows;
        }
        let (mut below, mut above) = (0, rows);
        while above - below > 1 {
            let middle = below + (above - below) / 2;
            if fits(middle) { below = middle } else { above = middle }
        }
        below
    }
}
