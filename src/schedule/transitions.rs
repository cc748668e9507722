//! What becomes of a sequence in all owners at once: its record and queue, its table, its promise and protection.

use crate::ids::TableId;
use crate::schedule::scheduler::{Index, Scheduler};

impl Scheduler {
    /// Ends a record that no step is writing through: out of its queue, its blocks back.
    pub(super) fn end(&mut self, index: Index) {
        self.sequences.leave_queue(index);
        self.sequences.take_fork(index, &self.cache);
        self.ledger.note_late_cut(index, false);
        self.set_protected(index, false);
        self.set_promised(index, false);
        self.restart(index);
        self.sequences.end(index);
    }

    /// Puts a running sequence back in line.
    pub(super) fn requeue(&mut self, index: Index) {
        self.set_protected(index, false);
        if self.sequences.requeue(index, &self.cache) {
            self.ledger.note_given_up();
        }
    }

    /// Has sequences that wait for what this one computes be asked again.
    pub(super) fn wake_behind(&mut self, index: Index) {
        if self.sequences.wake_behind(index) {
            self.ledger.note_given_up();
        }
    }

    /// Gives a sequence a table, whose blocks are promised if the sequence is.
    pub(super) fn set_table(&mut self, index: Index, table: TableId) {
        if self.sequences.set_table(index, table, &self.cache) {
            self.cache.set_promised(table, true);
        }
    }

    /// A sequence gives up all its blocks, and is computed again.
    pub(super) fn restart(&mut self, index: Index) {
        self.ledger.note_given_up();
        if let Some(table) = self.sequences.restart(index, &self.cache) {
            let released = self.cache.release(table);
            debug_assert!(released.is_ok(), "a table that no step writes through is released: {released:?}");
        }
    }

    /// Everything that a sequence may still need is reserved for it, or is not any more.
    pub(super) fn set_protected(&mut self, index: Index, protected: bool) {
        if self.sequences.set_protected(index, protected, &self.cache) {
            self.ledger.note_protected(protected);
        }
    }
}
