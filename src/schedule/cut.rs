//! Cuts: a sequence goes back to its first tokens.

use crate::error::RequestError;
use crate::ids::SequenceId;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::State;

impl Scheduler {
    /// Cuts a sequence to its first `len` tokens; a running one generates again from there, up to the same maximum.
    /// What an outstanding step answers for it is lost.
    ///
    /// # Errors
    /// [`RequestError::Unknown`], [`RequestError::BeyondLength`] when it is shorter, [`RequestError::EmptyPrompt`] for 0;
    /// under guaranteed admission [`RequestError::PromiseExceeded`] when the cut gives up blocks that others hold, and
    /// what it will need instead cannot be promised, and [`RequestError::NeverFits`] when samples that share less would
    /// exceed the pool.
    pub fn truncate(&mut self, sequence: impl Into<SequenceId>, len: usize) -> Result<(), RequestError> {
        self.cache.check_poison()?;
        let index = self.find(sequence.into())?;
        let sequence = &self.sequences[index];
        let current = sequence.tokens_left().len();
        if len > current {
            return Err(RequestError::BeyondLength { tokens: len, len: current });
        }
        if len == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        let len = len as u32;
        let earlier = sequence.cut();
        if sequence.state() != State::Kept {
            let input_len = sequence.terms.input_len.min(len);
            self.check_fits(input_len, sequence.terms.max_tokens, sequence.width())?;
        }
        let is_promised = sequence.is_promised();
        let is_late = self.set_cut(index, Some(len));
        if is_promised {
            let considered = Some(index).filter(|_| !is_late);
            if let Err(error) = self.promises().check(considered) {
                self.set_cut(index, earlier);
                return Err(error);
            }
        }
        if !is_late {
            self.make_cut(index);
        }
        Ok(())
    }

    /// Notes to which length a sequence is to be cut, if at all: now, or when the outstanding step ends. Returns whether it
    /// is then.
    fn set_cut(&mut self, index: Index, len: Option<u32>) -> bool {
        let is_late = self.sequences.set_cut(index, len);
        self.ledger.note_late_cut(index, is_late);
        is_late
    }

    /// Makes a cut that was asked for.
    pub(super) fn make_cut(&mut self, index: Index) {
        if !self.sequences.make_cut(index, self.cache.node_tokens()) {
            return;
        }
        self.ledger.note_late_cut(index, false);
        let mut is_restarted = self.cut_table(index, self.sequences[index].computed());
        self.ledger.note_given_up();
        self.renew_promise(index);
        self.sequences.recount(index, &self.cache);
        self.wake_behind(index);
        // What was pinned after the cut was promised does not keep its blocks: neither idle content, nor what the sequence
        // would have to copy because it was cut to within it.
        while self.sequences[index].is_promised() && self.promises().check(None).is_err() {
            if self.cache.give_up_pins(self.cache.free_blocks() + 1) > 0 {
                continue;
            }
            if self.sequences[index].table().is_none() {
                break;
            }
            self.restart(index);
            self.renew_promise(index);
            is_restarted = true;
        }
        // Shared blocks that it gave up are not free, so what it needs instead may not be there any more: then it is let
        // in again when everything can be reserved (I9).
        let sequence = &self.sequences[index];
        let is_short = sequence.is_protected() && self.reserved_blocks() > self.cache.free_blocks();
        if is_short || is_restarted && sequence.state() == State::Running {
            self.restart(index);
            self.requeue(index);
        }
    }

    /// Cuts a sequence's table to `len` tokens. Where a window has left behind what the next row would see, it gives the
    /// table up: it is computed again. Returns whether it did.
    pub(super) fn cut_table(&mut self, index: Index, len: u32) -> bool {
        let Some(table) = self.sequences[index].table() else { return false };
        if !self.cache.reaches(table, len) {
            self.restart(index);
            return true;
        }
        let cut = self.cache.truncate(table, len);
        debug_assert!(cut.is_ok(), "a table that no step writes through is cut: {cut:?}");
        false
    }
}
