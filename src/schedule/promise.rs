//! Promises (I8): whether what guaranteed admission has promised fits in the pool.
//!
//! The blocks that promised sequences hold (each counted once), plus what each may still need up to its declared maximum,
//! plus the copies of shared last blocks, never exceed the pool. A block with `k` promised holders, of which `w` go on
//! writing into it, needs `min(w, k - 1)` copies: the last holder writes in place. Kept holders do not count: they give way
//! before a copy takes a block that is not there.
//!
//! A fork or a cut of a sequence in the outstanding step is made when that step ends. Until then a promise must hold
//! both ways: with the cuts and without.

use crate::cache::{KvCache, PrefixMatch, PromisedBlocks};
use crate::error::RequestError;
use crate::ids::BlockId;
use crate::schedule::blocks;
use crate::schedule::ledger::Ledger;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::Sequences;

/// A block whose promised holders would be one more or one fewer.
type Change = (BlockId, i32);

/// All promises, to be counted. Changes nothing.
#[derive(Clone, Copy)]
pub(super) struct Promises<'a> {
    cache: &'a KvCache,
    sequences: &'a Sequences,
    ledger: &'a Ledger,
    /// What the prefix cache has for the sequence at the door, if that is promised its blocks.
    found: Option<&'a PrefixMatch>,
}

impl Scheduler {
    /// Promises a sequence its declared maximum, or takes the promise back. To be called again when what it may need
    /// changes.
    pub(super) fn set_promised(&mut self, index: Index, promised: bool) {
        let sequence = &self.sequences[index];
        let table = sequence.table();
        let most = promised.then(|| blocks::at_most(&self.cache, sequence, None));
        let before = self.sequences.set_promise(index, most);
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
        if self.sequences[index].is_promised() {
            self.set_promised(index, true);
        }
    }

    /// Takes note if the last block of a promised sequence is, or may come to be, others' as well.
    pub(super) fn note_tail(&mut self, index: Index) {
        let sequence = &self.sequences[index];
        if sequence.is_promised() && blocks::has_open_tail(&self.cache, sequence.table()) {
            self.ledger.note_shared_tail(index);
        }
    }

    /// Forgets those last blocks that are not, and cannot come to be, others' as well.
    pub(super) fn forget_own_tails(&mut self) {
        let Self { ledger, sequences, cache, .. } = self;
        ledger.keep_shared_tails(|&index| {
            sequences.get(index).is_some_and(|sequence| blocks::has_open_tail(cache, sequence.table()))
        });
    }

    pub(super) fn promises(&self) -> Promises<'_> {
        Promises {
            cache: &self.cache,
            sequences: &self.sequences,
            ledger: &self.ledger,
            found: self.matched.found_for_promised(&self.sequences),
        }
    }
}

impl Promises<'_> {
    /// Fails when the promises exceed the pool: with the cuts that wait for the outstanding step, and without them.
    /// `considered` is a sequence between steps whose cut is being considered.
    pub(super) fn check(self, considered: Option<Index>) -> Result<(), RequestError> {
        let available = self.cache.config().num_blocks();
        let mut needed = self.blocks(considered, false);
        if self.ledger.late_cuts().len() > 0 {
            needed = needed.max(self.blocks(considered, true));
        }
        if needed > available { Err(RequestError::PromiseExceeded { needed, available }) } else { Ok(()) }
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
    pub(super) fn blocks(self, considered: Option<Index>, later: bool) -> u32 {
        let mut maxima = self.ledger.promised_maxima();
        let mut changes: Vec<Change> = Vec::new();
        let mut cuts: Vec<(Index, u32)> = Vec::new();
        for index in self.ledger.late_cuts().filter(|_| later).chain(considered) {
            let sequence = self.sequences.get(index).filter(|sequence| sequence.is_promised());
            let Some((sequence, len)) = sequence.and_then(|sequence| Some((sequence, sequence.cut()?)))
            else {
                continue;
            };
            let at_most = |cut| blocks::at_most(self.cache, sequence, cut);
            maxima = maxima - at_most(None) + at_most(Some(len));
            let end = blocks::end_of_cut(self.cache, sequence);
            cuts.push((index, end));
            let cut_off = blocks::lasting_beyond(self.cache, sequence.table(), end);
            changes.extend(cut_off.map(|block| (block, -1)));
        }
        self.add_forks(considered, &mut changes);
        let others = changes.len();
        let found = self.found.into_iter().flat_map(|found| self.cache.lasting_found(found));
        changes.extend(found.map(|block| (block, 1)));
        let found = (changes.len() - others) as u64;
        changes.sort_unstable();
        let held = self.changed_holdings(&changes);
        let uncounted = if fault!(HitNotPromised) { found } else { 0 };
        let copies = if fault!(CopyNotPromised) { 0 } else { self.copies(&cuts, &changes) };
        let needed = maxima.saturating_sub(held.entries) + u64::from(held.held + held.pinned) + copies;
        u32::try_from(needed.saturating_sub(uncounted)).unwrap_or(u32::MAX)
    }

    /// Blocks that branches are to share. A partly filled last block will be copied, so it counts as needed.
    fn add_forks(self, considered: Option<Index>, changes: &mut Vec<Change>) {
        for index in self.sequences.pending_forks() {
            let sequence = &self.sequences[index];
            if sequence.is_promised() {
                let cut = sequence.cut().filter(|_| considered == Some(index));
                let shared = blocks::to_be_shared(self.cache, sequence, cut.map_or(u32::MAX, |len| len - 1));
                changes.extend(shared.map(|block| (block, 1)));
            }
        }
    }

    /// What promised tables would hold after `changes`, which are in order.
    fn changed_holdings(self, changes: &[Change]) -> PromisedBlocks {
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
    fn copies(self, cuts: &[(Index, u32)], changes: &[Change]) -> u64 {
        let is_cut = |&index: &Index| cuts.iter().any(|cut| cut.0 == index);
        let whole = self.ledger.shared_tails().filter(|index| !is_cut(index)).map(|index| (index, u32::MAX));
        let mut tails: Vec<BlockId> = Vec::new();
        for (index, end) in whole.chain(cuts.iter().copied()) {
            if let Some(sequence) = self.sequences.get(index) {
                tails.extend(blocks::tails_within(self.cache, sequence, end));
            }
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
}
