//! One sequence's map from logical to physical blocks, and its length, which is kept apart from the block count.

use crate::cache::host_pool::HostSlot;
use crate::ids::BlockId;
use std::collections::VecDeque;

/// A table row: live while it belongs to a sequence.
#[derive(Debug, Default)]
pub(super) struct BlockTable {
    pub(super) blocks: Vec<BlockId>,
    /// Blocks that are swapped out; they follow those in `blocks`.
    pub(super) host: VecDeque<HostSlot>,
    /// Tokens whose slots are taken, the outstanding step's included.
    pub(super) len: u32,
    /// Tokens this table may hold.
    pub(super) max_tokens: u32,
    /// Blocks that hold them: it may grow to as many.
    pub(super) max_blocks: u32,
    /// Entries from here on may differ from what the device has. Lowered by every change, raised only by a commit.
    pub(super) dirty_from: u32,
    /// Entries that are nodes of the prefix cache: the first ones, each the parent of the next.
    pub(super) registered: u32,
    /// The entry of a block that this table took from the prefix cache to go on from its middle: it is copied before it
    /// is written, even by its only holder.
    pub(super) borrowed: Option<u32>,
    pub(super) generation: u32,
    pub(super) live: bool,
    /// Its blocks count as promised.
    pub(super) promised: bool,
    /// The outstanding step writes through this table.
    pub(super) in_step: bool,
    /// It was swapped out and has not come back: what stayed in the pool because others hold it leaves with them.
    pub(super) parked: bool,
}

impl BlockTable {
    /// Takes the row for a new sequence. Its vector grows to `max_blocks` at once, so later growth reallocates nothing.
    pub(super) fn open(&mut self, max_tokens: u32, max_blocks: u32) {
        debug_assert!(!self.live && self.num_blocks() == 0, "a live table is opened again");
        self.blocks.reserve(max_blocks as usize);
        self.len = 0;
        self.max_tokens = max_tokens;
        self.max_blocks = max_blocks;
        self.dirty_from = 0;
        self.registered = 0;
        self.borrowed = None;
        self.live = true;
        self.promised = false;
        self.in_step = false;
        self.parked = false;
    }

    /// Gives the row back; ids made for it become stale.
    pub(super) fn close(&mut self) {
        debug_assert!(self.live && self.num_blocks() == 0, "a table is closed while it holds blocks");
        self.live = false;
        self.in_step = false;
        self.generation = self.generation.wrapping_add(1);
    }

    /// Blocks, swapped out ones included.
    pub(super) fn num_blocks(&self) -> u32 {
        (self.blocks.len() + self.host.len()) as u32
    }

    /// Whether it was swapped out and has not come back.
    pub(super) fn is_out(&self) -> bool {
        self.parked || !self.host.is_empty()
    }

    /// Entries from `entry` on differ from what the device has.
    pub(super) fn mark_dirty(&mut self, entry: usize) {
        self.dirty_from = self.dirty_from.min(entry as u32);
    }

    /// Entries from `entry` on are gone, or hold other blocks than before.
    pub(super) fn mark_replaced(&mut self, entry: usize) {
        self.mark_dirty(entry);
        self.registered = self.registered.min(entry as u32);
        self.borrowed = self.borrowed.filter(|&borrowed| (borrowed as usize) < entry);
    }
}
