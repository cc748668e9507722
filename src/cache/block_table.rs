//! One sequence's map from logical to physical blocks, and its length, which is kept beside the block count.
//!
//! A table has one *run* per lane: consecutive logical blocks, those in the pool first and those that are swapped out
//! behind them. Entries before a run are not there, and nothing reads them.

use crate::cache::host_pool::HostSlot;
use crate::cache::lane::Lane;
use crate::cache::prefix_cache::NodeId;
use crate::ids::BlockId;
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};

/// A table row: live while it belongs to a sequence.
#[derive(Debug, Default)]
pub(super) struct BlockTable {
    /// One for each lane.
    pub(super) runs: Runs,
    /// Tokens whose slots are taken, the outstanding step's included.
    pub(super) len: u32,
    /// Tokens this table may hold.
    pub(super) max_tokens: u32,
    /// Nodes of the prefix cache that its first tokens are, each the parent of the next; of the last one it may have only
    /// the beginning.
    pub(super) registered: u32,
    pub(super) generation: u32,
    pub(super) live: bool,
    /// Its blocks count as promised.
    pub(super) promised: bool,
    /// The outstanding step writes through this table.
    pub(super) in_step: bool,
    /// It was swapped out and has not come back: what stayed in the pool because others hold it leaves with them.
    pub(super) parked: bool,
}

/// What is known of a table only where there is more than one lane, or one that slides. It lies outside the table
/// because steps of other caches do without it.
#[derive(Debug, Default)]
pub(super) struct Aside {
    /// The nodes that the table is, where no lane has them all.
    pub(super) path: Vec<NodeId>,
    /// Lengths at which others are likely to begin: blocks that a hit needs there are kept as well as any.
    pub(super) likely_hits: [u32; 2],
}

/// The runs of a table, as a slice. A single run lies in the table itself, because each step reads it.
#[derive(Debug)]
pub(super) enum Runs {
    One(Run),
    Many(Vec<Run>),
}

impl Default for Runs {
    fn default() -> Self {
        Self::One(Run::default())
    }
}

impl Runs {
    fn make_room_for(&mut self, num_lanes: usize) {
        if self.len() != num_lanes {
            *self = Self::Many(std::iter::repeat_with(Run::default).take(num_lanes).collect());
        }
    }
}

impl Deref for Runs {
    type Target = [Run];

    #[inline]
    fn deref(&self) -> &[Run] {
        match self {
            Self::One(run) => std::slice::from_ref(run),
            Self::Many(runs) => runs,
        }
    }
}

impl DerefMut for Runs {
    #[inline]
    fn deref_mut(&mut self) -> &mut [Run] {
        match self {
            Self::One(run) => std::slice::from_mut(run),
            Self::Many(runs) => runs,
        }
    }
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
        self.runs.make_room_for(lanes.len());
        for (run, lane) in self.runs.iter_mut().zip(lanes) {
            run.blocks.reserve(lane.most_blocks(max_tokens, 1) as usize);
            (run.first, run.dirty_from, run.borrowed) = (lane.start, lane.start, None);
        }
        self.len = 0;
        self.max_tokens = max_tokens;
        self.registered = 0;
        self.live = true;
        self.promised = false;
        self.in_step = false;
        self.parked = false;
    }

    /// Gives the row back; ids made for it become stale.
    pub(super) fn close(&mut self) {
        debug_assert!(self.live && self.num_blocks() == 0, "a table is closed while it holds blocks");
        debug_assert_eq!(self.registered, 0, "a table is closed while it counts as registered");
        self.live = false;
        self.in_step = false;
        self.generation = self.generation.wrapping_add(1);
    }

    /// The outstanding step is committed: the device has all entries of blocks in the pool.
    pub(super) fn commit(&mut self) {
        self.in_step = false;
        self.runs.iter_mut().for_each(|run| run.dirty_from = run.pool_end());
    }

    /// Blocks of all runs, swapped out ones included.
    pub(super) fn num_blocks(&self) -> u32 {
        self.runs.iter().map(|run| run.end() - run.first).sum()
    }

    /// Blocks in the pool, of all runs.
    #[inline]
    pub(super) fn pool_blocks(&self) -> u32 {
        match &self.runs[..] {
            [run] => run.blocks.len() as u32,
            runs => runs.iter().map(|run| run.blocks.len() as u32).sum(),
        }
    }

    /// Blocks in the host pool, of all runs.
    #[inline]
    pub(super) fn host_blocks(&self) -> u32 {
        self.runs.iter().map(|run| run.host.len() as u32).sum()
    }

    /// Whether some of its blocks are in the host pool.
    #[inline]
    pub(super) fn is_swapped(&self) -> bool {
        self.runs.iter().any(|run| !run.host.is_empty())
    }

    /// Whether it was swapped out and has not come back.
    #[inline]
    pub(super) fn is_out(&self) -> bool {
        self.parked || self.is_swapped()
    }
}

impl Run {
    /// The entry after the last one in the pool.
    #[inline]
    pub(super) fn pool_end(&self) -> u32 {
        self.first + self.blocks.len() as u32
    }

    /// The entry after the last one.
    #[inline]
    pub(super) fn end(&self) -> u32 {
        self.pool_end() + self.host.len() as u32
    }

    /// The block at an entry, if it is there and in the pool.
    #[inline]
    pub(super) fn block_at(&self, entry: u32) -> Option<BlockId> {
        self.blocks.get(entry.checked_sub(self.first)? as usize).copied()
    }

    /// Entries from `entry` on differ from what the device has.
    #[inline]
    pub(super) fn mark_dirty(&mut self, entry: u32) {
        self.dirty_from = self.dirty_from.min(entry);
    }

    /// Entries from `entry` on are gone, or hold other blocks than before.
    pub(super) fn mark_replaced(&mut self, entry: u32) {
        self.mark_dirty(entry);
        self.borrowed = self.borrowed.filter(|&borrowed| borrowed < entry);
    }
}
