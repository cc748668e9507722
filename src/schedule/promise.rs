//! Promises (I8), and what is reserved for protected sequences (I9).
//!
//! Under guaranteed admission, the blocks that promised sequences hold (each counted once), plus what each may still
//! need up to its declared maximum, plus the copies of shared last blocks, never exceed the pool. A block with `k`
//! promised holders, of which `w` go on writing into it, needs `min(w, k - 1)` copies: the last holder writes in place.
//! Kept holders do not count: they give way before a copy takes a block that is not there.
//!
//! A fork or a cut of a sequence in the outstanding step is made when that step ends. Until then a promise must hold
//! both ways: with the cuts and without.

use crate::error::RequestError;
use crate::ids::BlockId;
use crate::schedule::request::Admission;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::Sequence;

/// Promised sequences that hold a block, and those of them whose next token goes into it.
#[derive(Clone, Default)]
struct Promised {
    holders: u32,
    writers: u32,
    /// Pinned content: it stays when all writers have copied it.
    stays: bool,
}

impl Scheduler {
    /// Fails when the promises exceed the pool.
    pub(super) fn check_promise(&self) -> Result<(), RequestError> {
        let available = self.cache.config().num_blocks();
        let later = |sequence: &Sequence| sequence.planned_rows > 0 && sequence.truncating.is_some();
        let mut needed = self.promised_blocks(false);
        if self.records.iter().flatten().any(later) {
            needed = needed.max(self.promised_blocks(true));
        }
        if needed > available { Err(RequestError::PromiseExceeded { needed, available }) } else { Ok(()) }
    }

    /// Blocks that promised sequences hold and may still need; with `later`, after the cuts that wait for the
    /// outstanding step. O(blocks of the pool and of all tables): not for every step.
    pub(super) fn promised_blocks(&self, later: bool) -> u32 {
        let block_size = self.cache.config().block_size();
        let mut blocks_of_pool = vec![Promised::default(); self.cache.config().num_blocks() as usize];
        let mut tails: Vec<BlockId> = Vec::new();
        let mut held = 0u64;
        let mut remaining = 0u64;
        for (index, sequence) in self.records.iter().enumerate() {
            let Some(sequence) = sequence.as_ref().filter(|sequence| sequence.promised) else { continue };
            let cut = sequence.truncating.filter(|_| later || sequence.planned_rows == 0);
            let end = cut.map_or(u32::MAX, |len| len - 1);
            let found = self.found_for(index).filter(|_| sequence.table.is_none());
            let table = sequence.fork.map(|fork| fork.parent).or(sequence.table);
            let blocks = table.and_then(|table| self.cache.block_ids(table).ok()).unwrap_or_default();
            let (blocks, own) = match (sequence.fork, found) {
                // Not shared yet: a partly filled last block will be copied, so it counts as needed.
                (Some(fork), _) => (blocks, (fork.at.min(end) / block_size).min(blocks.len() as u32)),
                (None, Some(found)) => (&found.blocks[..], found.blocks.len() as u32),
                (None, None) => (blocks, self.held_blocks(sequence, end)),
            };
            remaining += self.blocks_at_most(sequence, cut).saturating_sub(u64::from(own));
            for &block in &blocks[..own as usize] {
                let block = &mut blocks_of_pool[block.index() as usize];
                held += u64::from(block.holders == 0 && !(fault!(HitNotPromised) && found.is_some()));
                block.holders += 1;
            }
            let len = table.and_then(|table| self.cache.len(table).ok()).unwrap_or(0).min(end);
            let tail = blocks.get((len / block_size) as usize).copied();
            if let Some(tail) = tail.filter(|_| sequence.fork.is_none() && !len.is_multiple_of(block_size)) {
                let block = &mut blocks_of_pool[tail.index() as usize];
                if block.writers == 0 {
                    tails.push(tail);
                }
                block.writers += 1;
                block.stays |= self.cache.is_retained(tail);
            }
        }
        // Pinned content stays, whoever holds it now.
        let blocks = blocks_of_pool.iter().enumerate().filter(|(_, block)| block.holders == 0);
        held += blocks.filter(|&(block, _)| self.cache.is_retained(BlockId(block as u32))).count() as u64;
        let tails = tails.iter().map(|tail| &blocks_of_pool[tail.index() as usize]);
        let copies: u64 =
            tails.map(|block| u64::from(block.writers.min(block.holders - u32::from(!block.stays)))).sum();
        let copies = if fault!(CopyNotPromised) { 0 } else { copies };
        u32::try_from(remaining + held + copies).unwrap_or(u32::MAX)
    }

    /// Blocks of a sequence's table, of its first `end` tokens at most.
    fn held_blocks(&self, sequence: &Sequence, end: u32) -> u32 {
        let held = self.table_blocks(sequence);
        let len = sequence.table.and_then(|table| self.cache.len(table).ok()).unwrap_or(0);
        if len <= end { held } else { self.cache.config().layout().blocks_for(end).min(held) }
    }

    /// Blocks of a sequence's table.
    pub(super) fn table_blocks(&self, sequence: &Sequence) -> u32 {
        sequence.table.and_then(|table| self.cache.block_ids(table).ok()).map_or(0, <[_]>::len) as u32
    }

    /// Blocks that a sequence and all its samples hold at their declared maximum. Samples share the full blocks of the
    /// input, and nothing else.
    fn blocks_at_most(&self, sequence: &Sequence, cut: Option<u32>) -> u64 {
        let layout = self.cache.config().layout();
        // Should samples part before the cut is made, the one that is cut computes its last token apart from the others.
        let apart = u32::from(sequence.planned_rows > 0);
        let input = cut.map_or(sequence.input_len, |len| (len - apart).min(sequence.input_len));
        side_by_side(input / layout.block_size, layout.blocks_for(sequence.max_tokens), sequence.width())
    }

    /// Blocks that a sequence and all its samples may still need.
    pub(super) fn whole_need(&self, sequence: &Sequence) -> u32 {
        let most = u32::try_from(self.blocks_at_most(sequence, None)).unwrap_or(u32::MAX);
        most.saturating_sub(self.table_blocks(sequence))
    }

    /// Whether the request could run alone in an empty pool.
    pub(super) fn check_fits(&self, len: u32, max_tokens: u32, samples: u32) -> Result<(), RequestError> {
        let layout = self.cache.config().layout();
        let most = layout.blocks_for(max_tokens);
        let needed_blocks = match self.config.admission {
            Admission::Guaranteed => side_by_side(len / layout.block_size, most, samples),
            // Samples that do not fit side by side run one after the other.
            Admission::Overcommitted { .. } => u64::from(most),
        };
        let num_blocks = self.cache.config().num_blocks();
        if needed_blocks > u64::from(num_blocks) {
            return Err(RequestError::NeverFits { needed_blocks, num_blocks });
        }
        Ok(())
    }

    /// Blocks that protected sequences may still need and nobody else may take.
    pub(super) fn reserved_blocks(&self) -> u32 {
        if self.num_protected == 0 {
            return 0;
        }
        let protected =
            self.running.iter().map(|&index| self.get(index)).filter(|sequence| sequence.protected);
        protected.map(|sequence| self.outstanding_need(sequence)).sum()
    }

    /// Blocks that protected sequences other than `index` may still need.
    pub(super) fn reserved_by_others(&self, index: Index) -> u32 {
        let sequence = self.get(index);
        let own = if sequence.protected { self.outstanding_need(sequence) } else { 0 };
        self.reserved_blocks() - own
    }

    /// Blocks that one sequence may still need, its own copy of a shared last block included.
    pub(super) fn outstanding_need(&self, sequence: &Sequence) -> u32 {
        let most = self.cache.config().layout().blocks_for(sequence.max_tokens);
        let copied = |table| self.cache.shared_tail_block(table).is_some() || self.cache.is_borrowing(table);
        let copy = sequence.table.is_some_and(copied);
        most.saturating_sub(self.table_blocks(sequence)) + u32::from(copy)
    }

    /// Free blocks that `index` may take.
    pub(super) fn available_to(&self, index: Index) -> u32 {
        let reserved = if self.get(index).protected { 0 } else { self.reserved_blocks() };
        self.cache.free_blocks().saturating_sub(reserved)
    }

    /// Blocks that must become free before `index` may take `needed`.
    pub(super) fn missing_to(&self, index: Index, needed: u32) -> u32 {
        if needed == 0 {
            return 0;
        }
        let reserved = if self.get(index).protected { 0 } else { self.reserved_blocks() };
        needed.saturating_add(reserved).saturating_sub(self.cache.free_blocks())
    }
}

/// Blocks of `samples` sequences of `most` blocks each that share their first `full`.
fn side_by_side(full: u32, most: u32, samples: u32) -> u64 {
    u64::from(full) + u64::from(samples) * u64::from(most - full)
}
