//! One sequence's map from logical to physical blocks, and its length, which is kept apart from the block count.
//!
//! A table has one *run* per lane: consecutive logical blocks, those in the pool first and those that are swapped out
//! behind them. Entries before a run are not there, and nothing reads them.

use crate::cache::host_pool::HostSlot;
use crate::cache::lane::Lane;
use crate::cache::prefix_cache::NodeId;
use crate::ids::BlockId;
use std::collections::VecDeque;

/// A table row: live while it belongs to a sequence.
#[derive(Debug, Default)]
pub(super) struct BlockTable {
    /// One for each lane.
    pub(super) runs: Vec<Run>,
    /// Tokens whose slots are taken, the outstanding step's included.
    pub(super) len: u32,
    /// Tokens this table may hold.
    pub(super) max_tokens: u32,
    /// Nodes of the prefix cache that its first tokens are, each the parent of the next; of the last one it may have only
    /// the beginning.
    pub(super) registered: u32,
    /// These nodes, where no lane has them all.
    pub(super) path: Vec<NodeId>,
    /// Lengths at which others are likely to begin: blocks that a hit needs there are kept as well as any.
    pub(super) likely_hits: [u32; 2],
    pub(super) generation: u32,
    pub(super) live: bool,
    /// Its blocks count as promised.
    pub(super) promised: bool,
    /// The outstanding step writes through this table.
    pub(super) in_step: bool,
    /// It was swapped out and has not come back: what stayed in the pool because others hold it leaves with them.
    pub(super) parked: bool,
}

/// A table's blocks in one lane.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// The logical block that it begins with.
    pub(super) first: u32,
    pub(super) blocks: Vec<BlockId>,
    /// Blocks that are swapped out; they follow those in `blocks`.
    pub(super) host: VecDeque<HostSlot>,
    /// Entries from here on may differ from what the device has. Lowered by every change, raised only by a commit.
    pub(super) dirty_from: u32,
    /// The entry of a block that this table took from the prefix cache to go on from its middle: it is copied before it
    /// is written, even by its only holder.
    pub(super) borrowed: Option<u32>,
}

impl BlockTable {
    /// Takes the row for a new sequence. Its vectors grow to what it may hold at once, so later growth reallocates nothing.
    pub(super) fn open(&mut self, lanes: &[Lane], max_tokens: u32) {
        debug_assert!(!self.live && self.num_blocks() == 0, "a live table is opened again");
        self.runs.resize_with(lanes.len(), Run::default);
        for (run, lane) in self.runs.iter_mut().zip(lanes) {
            run.blocks.reserve(lane.most_blocks(max_tokens, 1) as usize);
            (run.first, run.dirty_from, run.borrowed) = (lane.start, lane.start, None);
        }
        self.len = 0;
        self.max_tokens = max_tokens;
        self.registered = 0;
        self.likely_hits = [0; 2];
        self.live = true;
        self.promised = false;
        self.in_step = false;
        self.parked = false;
    }

    /// Gives the row back; ids made for it become stale.
    pub(super) fn close(&mut self) {
        debug_assert!(self.live && self.num_blocks() == 0, "a table is closed while it holds blocks");
        debug_assert!(self.path.is_empty(), "a table is closed while it counts as registered");
        self.live = false;
        self.in_step = false;
        self.generation = self.generation.wrapping_add(1);
    }

    /// Blocks of all runs, swapped out ones included.
    pub(super) fn num_blocks(&self) -> u32 {
        self.runs.iter().map(|run| run.end() - run.first).sum()
    }

    /// Blocks in the pool, of all runs.
    pub(super) fn pool_blocks(&self) -> u32 {
        self.runs.iter().map(|run| run.blocks.len() as u32).sum()
    }

    /// Blocks in the host pool, of all runs.
    pub(super) fn host_blocks(&self) -> u32 {
        self.runs.iter().map(|run| run.host.len() as u32).sum()
    }

    /// Whether it was swapped out and has not come back.
    pub(super) fn is_out(&self) -> bool {
        self.parked || self.runs.iter().any(|run| !run.host.is_empty())
    }
}

impl Run {
    /// The entry after the last one in the pool.
    pub(super) fn pool_end(&self) -> u32 {
        self.first + self.blocks.len() as u32
    }

    /// The entry after the last one.
    pub(super) fn end(&self) -> u32 {
        self.pool_end() + self.host.len() as u32
    }

    /// The block at an entry, if it is there and in the pool.
    pub(super) fn block_at(&self, entry: u32) -> Option<BlockId> {
        self.blocks.get(entry.checked_sub(self.first)? as usize).copied()
    }

    /// Entries from `entry` on differ from what the device has.
    pub(super) fn mark_dirty(&mut self, entry: u32) {
        self.dirty_from = self.dirty_from.min(entry);
    }

    /// Entries from `entry` on are gone, or hold other blocks than before.
    pub(super) fn mark_replaced(&mut self, entry: u32) {
        self.mark_dirty(entry);
        self.borrowed = self.borrowed.filter(|&borrowed| borrowed < entry);
    }
}
