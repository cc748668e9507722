//! Block records: reference counts, the free list, and pins.
//!
//! A block is in exactly one state: *free* (on the free list), *held* (count of at least one), or *in transfer* (count
//! zero, but pinned because a recorded copy still reads it; it returns to the free list when the step ends).
//! Allocation and release are O(1). Blocks are reused in the order in which they were released, oldest first, so that a
//! released block keeps its content as long as possible.

use crate::ids::BlockId;
use std::collections::VecDeque;

/// Counts of the pool, see [`CacheStats`](crate::CacheStats).
#[derive(Debug)]
pub(super) struct BlockPool {
    ref_counts: Vec<u32>,
    pinned: Vec<bool>,
    /// Blocks with `pinned` set, in pinning order.
    pins: Vec<BlockId>,
    free: VecDeque<BlockId>,
    num_held: u32,
    num_shared: u32,
    peak_held: u32,
    peak_shared: u32,
}

impl BlockPool {
    pub(super) fn new(num_blocks: u32) -> Self {
        Self {
            ref_counts: vec![0; num_blocks as usize],
            pinned: vec![false; num_blocks as usize],
            pins: Vec::new(),
            free: (0..num_blocks).map(BlockId).collect(),
            num_held: 0,
            num_shared: 0,
            peak_held: 0,
            peak_shared: 0,
        }
    }

    pub(super) fn num_blocks(&self) -> u32 {
        self.ref_counts.len() as u32
    }

    pub(super) fn num_free(&self) -> u32 {
        self.free.len() as u32
    }

    pub(super) fn num_held(&self) -> u32 {
        self.num_held
    }

    pub(super) fn num_shared(&self) -> u32 {
        self.num_shared
    }

    pub(super) fn num_in_transfer(&self) -> u32 {
        self.num_blocks() - self.num_free() - self.num_held
    }

    pub(super) fn peak_held(&self) -> u32 {
        self.peak_held
    }

    pub(super) fn peak_shared(&self) -> u32 {
        self.peak_shared
    }

    pub(super) fn ref_count(&self, block: BlockId) -> u32 {
        self.ref_counts[block.0 as usize]
    }

    pub(super) fn is_pinned(&self, block: BlockId) -> bool {
        self.pinned[block.0 as usize]
    }

    /// Takes the free block that was released longest ago.
    pub(super) fn allocate(&mut self) -> Option<BlockId> {
        let block = self.free.pop_front()?;
        debug_assert_eq!(self.ref_count(block), 0, "{block:?} is on the free list with a holder");
        debug_assert!(!self.is_pinned(block), "{block:?} is on the free list while a copy reads it");
        self.ref_counts[block.0 as usize] = 1;
        self.num_held += 1;
        self.peak_held = self.peak_held.max(self.num_held);
        Some(block)
    }

    /// One holder more. The block is held, or pinned and just given up by its last holder.
    pub(super) fn retain(&mut self, block: BlockId) {
        let pinned = self.is_pinned(block);
        let count = &mut self.ref_counts[block.0 as usize];
        debug_assert!(*count > 0 || pinned, "{block:?} is retained while free");
        *count += 1;
        match *count {
            1 => self.num_held += 1,
            2 => self.num_shared += 1,
            _ => {}
        }
        self.peak_held = self.peak_held.max(self.num_held);
        self.peak_shared = self.peak_shared.max(self.num_shared);
    }

    /// One holder less; the last one frees the block, or leaves it in transfer while it is pinned.
    ///
    /// Returns false, and changes nothing, when the block has no holder: a broken invariant.
    #[must_use]
    pub(super) fn release(&mut self, block: BlockId) -> bool {
        let count = &mut self.ref_counts[block.0 as usize];
        debug_assert!(*count > 0, "{block:?} is released twice");
        if *count == 0 {
            return false;
        }
        *count -= 1;
        match *count {
            0 => {
                self.num_held -= 1;
                if !self.pinned[block.0 as usize] {
                    self.free.push_back(block);
                }
            }
            1 => self.num_shared -= 1,
            _ => {}
        }
        true
    }

    /// Keeps a block off the free list until [`unpin_all`](Self::unpin_all).
    pub(super) fn pin(&mut self, block: BlockId) {
        if !self.pinned[block.0 as usize] {
            self.pinned[block.0 as usize] = true;
            self.pins.push(block);
        }
    }

    /// Ends all pins; blocks without a holder become free.
    pub(super) fn unpin_all(&mut self) {
        for block in self.pins.drain(..) {
            self.pinned[block.0 as usize] = false;
            if self.ref_counts[block.0 as usize] == 0 {
                self.free.push_back(block);
            }
        }
    }

    /// Panics when counts, free list and pins disagree; `expected` are the reference counts that the tables imply.
    pub(super) fn assert_consistent(&self, expected: &[u32]) {
        assert_eq!(self.ref_counts, expected, "I2: reference counts differ from the number of tables");
        let mut on_free_list = vec![false; self.ref_counts.len()];
        for block in &self.free {
            assert!(!on_free_list[block.0 as usize], "I1: {block:?} is on the free list twice");
            on_free_list[block.0 as usize] = true;
        }
        let mut in_transfer = 0;
        for (index, &count) in self.ref_counts.iter().enumerate() {
            let fenced = count == 0 && self.pinned[index];
            in_transfer += u32::from(fenced);
            assert_eq!(
                on_free_list[index],
                count == 0 && !fenced,
                "I1: block {index} is in two states or none"
            );
        }
        let held = self.ref_counts.iter().filter(|&&count| count > 0).count() as u32;
        let shared = self.ref_counts.iter().filter(|&&count| count > 1).count() as u32;
        assert_eq!(self.num_held, held, "I1: held blocks are miscounted");
        assert_eq!(self.num_shared, shared, "I1: shared blocks are miscounted");
        assert_eq!(
            self.num_in_transfer(),
            in_transfer,
            "I1: free, held and in transfer do not sum to the pool"
        );
        let pins = self.pinned.iter().filter(|&&pinned| pinned).count();
        assert_eq!(self.pins.len(), pins, "I5: pinned blocks are miscounted");
    }
}
