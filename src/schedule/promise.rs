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
use crate::schedule::blocks;
use crate::schedule::request::Admission;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::Sequence;

/// A block whose promised holders would be one more or one fewer.
type Change = (BlockId, i32);

impl Scheduler {
    /// Promises a sequence its declared maximum, or takes the promise back. To be called again when what it may need
    /// changes.
    pub(super) fn set_promised(&mut self, index: Index, promised: bool) {
        let most = if promised {
            Some(blocks::at_most(&self.cache, self.get(index), None, self.most_rows))
        } else {
            None
        };
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

    /// The tokens whose blocks a sequence keeps when it is cut: none, where a window has left behind what comes next.
    pub(super) fn end_of_cut(&self, sequence: &Sequence) -> u32 {
        let Some(len) = sequence.truncating else { return u32::MAX };
        let left = sequence.computed.min(len - 1);
        match sequence.table {
            Some(table) if !self.cache.reaches(table, left) => 0,
            _ => len - 1,
        }
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
            let end = self.end_of_cut(sequence);
            let at_most = |cut| blocks::at_most(&self.cache, sequence, cut, self.most_rows);
            maxima = maxima - at_most(None) + at_most(sequence.truncating);
            cuts.push((index, end));
            changes.extend(blocks::lasting_beyond(&self.cache, sequence, end).map(|block| (block, -1)));
        }
        for &index in self.pending_forks.values() {
            let sequence = self.get(index);
            let Some(fork) = sequence.fork.filter(|_| sequence.is_promised()) else { continue };
            // Not shared yet: a partly filled last block will be copied, so it counts as needed.
            let end =
                sequence.truncating.filter(|_| considered == Some(index)).map_or(u32::MAX, |len| len - 1);
            let full = self.cache.lasting_full(fork.parent, fork.at.min(end));
            changes.extend(full.map(|block| (block, 1)));
        }
        let at_door = self.matched.index.filter(|&index| {
            self.get(index).is_promised() && self.get(index).table.is_none() && self.get(index).fork.is_none()
        });
        let others = changes.len();
        if at_door.is_some() {
            changes.extend(self.cache.lasting_found(&self.matched.found).map(|block| (block, 1)));
        }
        let found = (changes.len() - others) as u64;
        changes.sort_unstable();
        let held = self.changed_holdings(&changes);
        let uncounted = if fault!(HitNotPromised) { found } else { 0 };
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
                tails.extend(blocks::tails_within(&self.cache, self.get(index), u32::MAX));
            }
        }
        for &(index, end) in cuts {
            tails.extend(blocks::tails_within(&self.cache, self.get(index), end));
        }
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

    /// Whether the request could run alone in an empty pool.
    pub(super) fn check_fits(&self, len: u32, max_tokens: u32, samples: u32) -> Result<(), RequestError> {
        let needed_blocks = match self.config.admission {
            Admission::Guaranteed => self.cache.side_by_side(len, max_tokens, self.most_rows, samples),
            // Samples that do not fit side by side run one after the other.
            Admission::Overcommitted { .. } => self.cache.side_by_side(0, max_tokens, 1, 1),
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
        protected.map(|sequence| blocks::still_needed(&self.cache, sequence, self.most_rows)).sum()
    }

    /// Blocks that protected sequences other than `index` may still need.
    pub(super) fn reserved_by_others(&self, index: Index) -> u32 {
        let sequence = self.get(index);
        let own =
            if sequence.protected { blocks::still_needed(&self.cache, sequence, self.most_rows) } else { 0 };
        self.reserved_blocks() - own
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
