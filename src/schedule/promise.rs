//! Promises (I8), and what is reserved for protected sequences (I9).
//!
//! Under guaranteed admission, the blocks that promised sequences hold (each counted once), plus what each may still
//! need up to its declared maximum, plus the copies of shared last blocks, never exceed the pool. A block with `k`
//! promised holders, of which `w` go on writing into it, needs `min(w, k - 1)` copies: the last holder writes in place.
//! Kept holders do not count: they give way before a copy takes a block that is not there.
//!
//! A fork or a cut of a sequence in the outstanding step is made when that step ends. Until then a promise must hold
//! both ways: with the cuts and without.

use crate::cache::PromisedBlocks;
use crate::error::RequestError;
use crate::ids::BlockId;
use crate::schedule::request::Admission;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::Sequence;

/// A block whose promised holders would be one more or one fewer.
type Change = (BlockId, i32);

impl Scheduler {
    /// Promises a sequence its declared maximum, or takes the promise back. To be called again when what it may need
    /// changes.
    pub(super) fn set_promised(&mut self, index: Index, promised: bool) {
        let most = if promised { Some(self.blocks_at_most(self.get(index), None)) } else { None };
        let sequence = self.get_mut(index);
        let before = std::mem::replace(&mut sequence.promise, most);
        let table = sequence.table;
        self.ledger.replace_promise(before, most);
        if let Some(table) = table {
            self.cache.set_promised(table, promised);
        }
        if promised {
            self.note_tail(index);
        } else {
            self.ledger.forget_shared_tail(index);
        }
    }

    /// Counts a promise anew, if there is one.
    pub(super) fn renew_promise(&mut self, index: Index) {
        if self.get(index).is_promised() {
            self.set_promised(index, true);
        }
    }

    /// Takes note if the last block of a promised sequence is, or may come to be, others' as well.
    pub(super) fn note_tail(&mut self, index: Index) {
        let sequence = self.get(index);
        let is_open = sequence.table.is_some_and(|table| self.cache.has_open_tail(table));
        if sequence.is_promised() && is_open {
            self.ledger.note_shared_tail(index);
        }
    }

    /// Forgets those last blocks that are not, and cannot come to be, others' as well.
    pub(super) fn forget_own_tails(&mut self) {
        let Self { ledger, records, cache, .. } = self;
        ledger.keep_shared_tails(|&index| {
            let table = records[index].as_ref().and_then(|sequence| sequence.table);
            table.is_some_and(|table| cache.has_open_tail(table))
        });
    }

    /// Fails when the promises exceed the pool: with the cuts that wait for the outstanding step, and without them.
    /// `considered` is a sequence between steps whose cut is being considered.
    pub(super) fn check_promise(&self, considered: Option<Index>) -> Result<(), RequestError> {
        let available = self.cache.config().num_blocks();
        let mut needed = self.promised_blocks(considered, false);
        if self.ledger.late_cuts().len() > 0 {
            needed = needed.max(self.promised_blocks(considered, true));
        }
        if needed > available { Err(RequestError::PromiseExceeded { needed, available }) } else { Ok(()) }
    }

    fn is_to_be_cut(&self, index: Index) -> bool {
        self.records[index].as_ref().is_some_and(|sequence| sequence.truncating.is_some())
    }

    /// Blocks that promised sequences hold and may still need; with `later`, after the cuts that wait for the outstanding
    /// step.
    ///
    /// What all of them have at their declared maximum is a running sum, and so is what the blocks that they share save.
    /// What is not in their tables yet, or would be cut off them, is added block by block.
    ///
    /// # Complexity
    /// O(sequences in the outstanding step that are cut, pending forks, shared last blocks, and blocks of all these and of
    /// what was found for the sequence at the door).
    pub(super) fn promised_blocks(&self, considered: Option<Index>, later: bool) -> u32 {
        let mut maxima = self.ledger.promised_maxima();
        let mut changes: Vec<Change> = Vec::new();
        let mut cuts: Vec<(Index, u32)> = Vec::new();
        let cut = self.ledger.late_cuts().filter(|_| later).chain(considered);
        for index in cut.filter(|&index| self.is_to_be_cut(index) && self.get(index).is_promised()) {
            let sequence = self.get(index);
            let end = sequence.truncating.map_or(u32::MAX, |len| len - 1);
            maxima = maxima - self.blocks_at_most(sequence, None)
                + self.blocks_at_most(sequence, sequence.truncating);
            cuts.push((index, end));
            let held = self.held_blocks(sequence, end) as usize;
            changes.extend(self.blocks_of(index)[held..].iter().map(|&block| (block, -1)));
        }
        for &index in self.pending_forks.values() {
            let sequence = self.get(index);
            let Some(fork) = sequence.fork.filter(|_| sequence.is_promised()) else { continue };
            // Not shared yet: a partly filled last block will be copied, so it counts as needed.
            let blocks = self.cache.block_ids(fork.parent).unwrap_or_default();
            let end =
                sequence.truncating.filter(|_| considered == Some(index)).map_or(u32::MAX, |len| len - 1);
            let full = (fork.at.min(end) / self.cache.config().block_size()) as usize;
            changes.extend(blocks.iter().take(full).map(|&block| (block, 1)));
        }
        let at_door = self.matched.index.filter(|&index| {
            self.get(index).is_promised() && self.get(index).table.is_none() && self.get(index).fork.is_none()
        });
        let found = at_door.map_or(&[][..], |_| &self.matched.found.blocks[..]);
        changes.extend(found.iter().map(|&block| (block, 1)));
        changes.sort_unstable();
        let held = self.changed_holdings(&changes);
        let uncounted = if fault!(HitNotPromised) { found.len() as u64 } else { 0 };
        let copies = if fault!(CopyNotPromised) { 0 } else { self.promised_copies(&cuts, &changes) };
        let needed = maxima.saturating_sub(held.entries) + u64::from(held.held + held.pinned) + copies;
        u32::try_from(needed.saturating_sub(uncounted)).unwrap_or(u32::MAX)
    }

    /// What promised tables would hold after `changes`, which are in order.
    fn changed_holdings(&self, changes: &[Change]) -> PromisedBlocks {
        let mut holdings = self.cache.promised_blocks();
        for same in changes.chunk_by(|a, b| a.0 == b.0) {
            let block = same[0].0;
            let change: i32 = same.iter().map(|change| change.1).sum();
            holdings.entries = holdings.entries.saturating_add_signed(i64::from(change));
            let before = self.cache.promised_holders(block);
            match (before, before.saturating_add_signed(change)) {
                (0, 1..) => {
                    holdings.held += 1;
                    holdings.pinned -= u32::from(self.cache.is_retained(block));
                }
                (1.., 0) => {
                    holdings.held -= 1;
                    holdings.pinned += u32::from(self.cache.is_retained(block));
                }
                _ => {}
            }
        }
        holdings
    }

    /// Copies of shared last blocks that promised sequences will ask for, as they are cut and after `changes`.
    fn promised_copies(&self, cuts: &[(Index, u32)], changes: &[Change]) -> u64 {
        let mut tails: Vec<BlockId> = Vec::new();
        for index in self.ledger.shared_tails() {
            if cuts.iter().all(|cut| cut.0 != index) {
                tails.extend(self.tail_within(index, u32::MAX));
            }
        }
        tails.extend(cuts.iter().filter_map(|&(index, end)| self.tail_within(index, end)));
        tails.sort_unstable();
        let copies = tails.chunk_by(|a, b| a == b).map(|writers| {
            let tail = writers[0];
            let first = changes.partition_point(|change| change.0 < tail);
            let change: i32 =
                changes[first..].iter().take_while(|change| change.0 == tail).map(|change| change.1).sum();
            let holders = self.cache.promised_holders(tail).saturating_add_signed(change);
            // Pinned content stays when all writers have copied it.
            let copied = holders.saturating_sub(u32::from(!self.cache.is_retained(tail)));
            u64::from(copied.min(writers.len() as u32))
        });
        copies.sum()
    }

    /// The block of a sequence's table that its next token goes into, if that is partly filled when at most `end` tokens
    /// are left.
    pub(super) fn tail_within(&self, index: Index, end: u32) -> Option<BlockId> {
        let sequence = self.records[index].as_ref().filter(|sequence| sequence.fork.is_none())?;
        let table = sequence.table?;
        let len = self.cache.len(table).ok()?.min(end);
        let block_size = self.cache.config().block_size();
        let tail = self.cache.block_ids(table).ok()?.get((len / block_size) as usize).copied();
        tail.filter(|_| !len.is_multiple_of(block_size))
    }

    /// Blocks of a sequence's table, of its first `end` tokens at most.
    pub(super) fn held_blocks(&self, sequence: &Sequence, end: u32) -> u32 {
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
    pub(super) fn blocks_at_most(&self, sequence: &Sequence, cut: Option<u32>) -> u64 {
        let layout = self.cache.config().layout();
        // Should samples part before the cut is made, the one that is cut computes its last token apart from the others.
        let apart = u32::from(sequence.planned_rows > 0);
        let input = cut.map_or(sequence.input_len, |len| (len - apart).min(sequence.input_len));
        side_by_side(input / layout.block_size(), layout.blocks_for(sequence.max_tokens), sequence.width())
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
            Admission::Guaranteed => side_by_side(len / layout.block_size(), most, samples),
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
        if self.ledger.num_protected() == 0 {
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
