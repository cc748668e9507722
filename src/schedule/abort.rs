//! Ending sequences before their time.

use crate::error::RequestError;
use crate::ids::{RequestId, SequenceId};
use crate::schedule::request::{FinishReason, StepEvent};
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::State;

impl Scheduler {
    /// Ends all samples of a request, whatever their state, and drops what is kept of them. Sequences of the
    /// outstanding step end when it does. Each that had not finished is told to have finished, with
    /// [`FinishReason::Aborted`](crate::FinishReason::Aborted), among the events of the next commit.
    ///
    /// Returns whether there was anything to end: ending a request twice is harmless.
    ///
    /// # Errors
    /// [`RequestError::Foreign`] for a request of another scheduler.
    ///
    /// # Complexity
    /// O(log sequences + blocks given back), for each sample.
    pub fn abort(&mut self, request: RequestId) -> Result<bool, RequestError> {
        self.check_own(request)?;
        let records: Vec<Index> = self.sequences.of_request(request).collect();
        let mut ended = false;
        for index in records {
            ended |= self.abort_record(index);
        }
        Ok(ended)
    }

    /// Ends one sequence; the other samples of its request go on. Returns whether there was anything to end.
    ///
    /// # Errors
    /// [`RequestError::Foreign`] for a sequence of another scheduler.
    pub fn abort_sequence(&mut self, sequence: SequenceId) -> Result<bool, RequestError> {
        self.check_own(sequence.request())?;
        let (request, sample) = (sequence.request(), sequence.sample());
        let has_it = |&index: &Index| self.sequences[index].samples().contains(&sample);
        let carrier = self.sequences.of_request(request).find(has_it);
        Ok(match carrier.or_else(|| self.sequences.find(sequence)) {
            Some(index) if self.sequences[index].samples().is_empty() => self.abort_record(index),
            Some(carrier) => self.abort_pending(carrier, sample),
            None => false,
        })
    }

    fn abort_record(&mut self, index: Index) -> bool {
        let sequence = &self.sequences[index];
        if !sequence.is_planned() {
            if sequence.state() != State::Kept {
                self.tell_ended(index);
            }
            self.end(index);
            return true;
        }
        let ended = self.sequences.note_abort(index);
        // It computes nothing that others may wait for.
        self.wake_behind(index);
        ended
    }

    /// Ends a sample that has not parted from the others. Their record goes by the id of the first one that lives.
    fn abort_pending(&mut self, carrier: Index, sample: u32) -> bool {
        if !self.sequences.abort_sample(carrier, sample) {
            return false;
        }
        self.ledger.note_given_up();
        let record = &self.sequences[carrier];
        let (first, planned) = (record.first_alive(), record.is_planned());
        if !planned {
            self.tell_aborted(carrier, sample);
        }
        match first {
            Some(first) => {
                self.sequences.rename(carrier, first);
                self.renew_promise(carrier);
                self.sequences.recount(carrier, &self.cache);
            }
            None if !planned => self.end(carrier),
            None => {}
        }
        true
    }

    /// Ends the samples that were aborted before they parted, if the step that they were in has ended. Returns whether none
    /// is left.
    pub(super) fn drop_aborted_samples(&mut self, index: Index) -> bool {
        let aborted = self.sequences.take_aborted_samples(index);
        if aborted.is_empty() {
            return false;
        }
        self.ledger.note_given_up();
        for sample in aborted {
            self.tell_aborted(index, sample);
        }
        self.renew_promise(index);
        self.sequences.recount(index, &self.cache);
        self.sequences[index].samples().is_empty()
    }

    /// The end of an aborted sequence: of all its samples, where they have not parted.
    pub(super) fn tell_ended(&mut self, index: Index) {
        let own = self.sequences[index].id().sample();
        let (pending, _) = self.sequences.take_samples(index);
        if pending.is_empty() {
            self.tell_aborted(index, own);
        }
        for sample in pending {
            self.tell_aborted(index, sample);
        }
    }

    /// The end of a sample that was aborted before it parted from the others.
    pub(super) fn tell_aborted(&mut self, carrier: Index, sample: u32) {
        let carrier = &self.sequences[carrier];
        let (sequence, preemptions) = (carrier.id().request().sample(sample), carrier.preemptions);
        self.events.push(StepEvent::Finished { sequence, reason: FinishReason::Aborted, preemptions });
    }
}
