//! The ledger: what sequences are owed, in sums and short lists, so that no question about it walks all sequences.
//!
//! It owns the sum of what promised sequences have at their declared maximum, and which of them have a last block that may
//! be others' as well or are cut when the outstanding step ends (I8); how many are protected from preemption (I9); and a
//! count that grows with everything that could let in a sequence which was refused.
//!
//! It keeps indices of records, and changes neither sequences nor the cache: the scheduler tells it what changes.

use crate::cache::KvCache;
use crate::schedule::blocks;
use crate::schedule::scheduler::Index;
use crate::schedule::sequence::Sequences;
use std::collections::BTreeSet;

#[derive(Debug, Default)]
pub(super) struct Ledger {
    maxima: u64,
    shared_tails: BTreeSet<Index>,
    late_cuts: BTreeSet<Index>,
    num_protected: u32,
    given_up: u64,
}

/// What is reserved, as one sequence sees it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reserve {
    /// Blocks that are reserved for others: copies that can be done without do not take them.
    pub(super) for_others: u32,
    /// Blocks that it must leave alone: none, if what it needs is reserved itself.
    pub(super) untouchable: u32,
}

impl Ledger {
    // Promises.

    /// A sequence's promise takes the place of another one: blocks at its declared maximum, or none.
    pub(super) fn replace_promise(&mut self, before: Option<u64>, now: Option<u64>) {
        self.maxima -= before.unwrap_or(0);
        self.maxima += now.unwrap_or(0);
    }

    /// Blocks that all promised sequences have at their declared maximum, shared ones counted for each.
    pub(super) fn promised_maxima(&self) -> u64 {
        self.maxima
    }

    /// The last block of a promised sequence is, or may come to be, others' as well.
    pub(super) fn note_shared_tail(&mut self, index: Index) {
        self.shared_tails.insert(index);
    }

    pub(super) fn forget_shared_tail(&mut self, index: Index) {
        self.shared_tails.remove(&index);
    }

    pub(super) fn keep_shared_tails(&mut self, is_shared: impl FnMut(&Index) -> bool) {
        self.shared_tails.retain(is_shared);
    }

    pub(super) fn shared_tails(&self) -> impl Iterator<Item = Index> {
        self.shared_tails.iter().copied()
    }

    /// A sequence of the outstanding step is cut when that ends, or is not any more.
    pub(super) fn note_late_cut(&mut self, index: Index, is_late: bool) {
        match is_late {
            true => self.late_cuts.insert(index),
            false => self.late_cuts.remove(&index),
        };
    }

    pub(super) fn late_cuts(&self) -> impl ExactSizeIterator<Item = Index> {
        self.late_cuts.iter().copied()
    }

    // Protection.

    pub(super) fn note_protected(&mut self, protected: bool) {
        match protected {
            true => self.num_protected += 1,
            false => self.num_protected -= 1,
        }
    }

    /// Sequences that run with everything reserved that they may still need.
    pub(super) fn num_protected(&self) -> u32 {
        self.num_protected
    }

    /// Blocks that protected sequences may still need and no other may take.
    pub(super) fn reserved(&self, sequences: &Sequences, cache: &KvCache) -> u32 {
        if self.num_protected == 0 {
            return 0;
        }
        let protected = sequences.running().iter().map(|&index| &sequences[index]);
        let protected = protected.filter(|sequence| sequence.is_protected());
        protected.map(|sequence| blocks::still_needed(cache, sequence)).sum()
    }

    /// The same, as one sequence sees it.
    pub(super) fn reserve(&self, index: Index, sequences: &Sequences, cache: &KvCache) -> Reserve {
        if self.num_protected == 0 {
            return Reserve::default();
        }
        let sequence = &sequences[index];
        // What is kept for others keeps it from copies that it can do without, and from nothing else.
        if sequence.is_protected() && !sequence.table().is_some_and(|table| cache.is_borrowing(table)) {
            return Reserve::default();
        }
        let all = self.reserved(sequences, cache);
        if !sequence.is_protected() {
            return Reserve { for_others: all, untouchable: all };
        }
        let own = blocks::still_needed(cache, sequence);
        Reserve { for_others: all - own, untouchable: 0 }
    }

    // What could let a sequence in.

    /// A sequence gave something up: blocks, a table, a place in line, or the need for them.
    pub(super) fn note_given_up(&mut self) {
        self.given_up += 1;
    }

    /// Grows with everything that was given up.
    pub(super) fn given_up(&self) -> u64 {
        self.given_up
    }
}
