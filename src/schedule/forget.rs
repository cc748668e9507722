//! [`Scheduler::forget_device`]: what becomes of sequences when the device is lost.

use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::State;

impl Scheduler {
    /// Forgets everything that lay on the device. Call it before the next [`schedule`](Self::schedule) when the device
    /// is lost, or when a committed step never ran there. No tokens are lost, and those generated afterwards are the
    /// same.
    ///
    /// - A plan that was neither committed nor dropped is rolled back; committing it is
    ///   [`CommitError::StalePlan`](crate::CommitError::StalePlan). What was asked of its sequences meanwhile (abort, fork,
    ///   truncate) takes effect.
    /// - Every sequence that ran is in line again, at its place, and is computed again; that is no preemption. One whose
    ///   blocks were all in the host pool, and had arrived there, comes back from it.
    /// - A kept sequence stays kept; what it had on the device is computed again when it is extended.
    /// - The prefix cache is empty, pinned content included.
    /// - Under guaranteed admission, a sequence that was promised its blocks still is, in the order of the line, as far as the pool
    ///   holds what sequences now need each for itself: those that shared blocks may not all run side by side any more.
    ///   The others wait until their blocks can be promised again; none is refused.
    ///
    /// Pass on the device part's last reports ([`complete_transfers`](Self::complete_transfers)) first: blocks that have
    /// not been reported count as lost. `PagedAttention::rebuild` does the other half: it keeps the host pool, and
    /// takes no plan that was made before this call.
    ///
    /// # Complexity
    /// O(blocks of the pool + table entries + sequences · log sequences).
    pub fn forget_device(&mut self) {
        if self.cache.has_step() {
            self.rollback();
        }
        while let Some(table) = self.cache.take_broken_table() {
            self.restart_broken(table);
        }
        self.cache.forget_device();
        self.sequences.lose(&self.cache);
        let records: Vec<Index> = self.sequences.all().map(|(index, _)| index).collect();
        for &index in &records {
            // In the host pool altogether, and at least in part there: it can return.
            if self.sequences[index].computed() == 0 {
                self.restart(index);
            }
            if self.sequences[index].state() == State::Running {
                self.requeue(index);
            }
        }
        self.matched.forget();
        self.resume_at = None;
        self.closed_at = None;
        self.ledger.note_given_up();
        self.promise_again(records);
    }

    /// Keeps the promises that hold although nothing is shared any more, first come, first served.
    fn promise_again(&mut self, mut records: Vec<Index>) {
        records.retain(|&index| self.sequences[index].is_promised());
        records.sort_unstable_by_key(|&index| self.sequences[index].place());
        for &index in &records {
            self.set_promised(index, false);
        }
        for &index in &records {
            self.set_promised(index, true);
            if self.promises().check(None).is_err() && !fault!(LostSharingPromised) {
                self.set_promised(index, false);
            }
        }
    }
}
