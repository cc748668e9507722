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
        let all = request.sample(0)..=request.sample(u32::MAX);
        let records: Vec<Index> = self.by_id.range(all).map(|(_, &index)| index).collect();
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
        let all = sequence.request().sample(0)..=sequence.request().sample(u32::MAX);
        let carrier = self
            .by_id
            .range(all)
            .map(|(_, &index)| index)
            .find(|&index| self.get(index).pending_samples.contains(&sequence.sample()));
        Ok(match carrier.or_else(|| self.by_id.get(&sequence).copied()) {
            Some(index) if self.get(index).pending_samples.is_empty() => self.abort_record(index),
            Some(carrier) => self.abort_pending(carrier, sequence.sample()),
            None => false,
        })
    }

    fn abort_record(&mut self, index: Index) -> bool {
        let sequence = self.get_mut(index);
        if sequence.planned_rows == 0 {
            if sequence.state != State::Kept {
                self.tell_ended(index);
            }
            self.drop_record(index);
            return true;
        }
        let ended = !std::mem::replace(&mut sequence.aborting, true);
        // It computes nothing that others may wait for.
        self.wake_those_behind(index);
        ended
    }

    /// Ends a sample that has not parted from the others. Their record goes by the id of the first one that lives.
    fn abort_pending(&mut self, carrier: Index, sample: u32) -> bool {
        let record = self.get_mut(carrier);
        if record.aborting || record.aborted_samples.contains(&sample) {
            return false;
        }
        if record.planned_rows > 0 {
            record.aborted_samples.push(sample);
        } else {
            record.pending_samples.retain(|&pending| pending != sample);
        }
        let mut alive =
            record.pending_samples.iter().filter(|sample| !record.aborted_samples.contains(sample));
        let first = alive.next().copied();
        let planned = record.planned_rows > 0;
        self.ledger.note_given_up();
        if !planned {
            self.tell_aborted(carrier, sample);
        }
        match first {
            Some(first) => {
                self.rename(carrier, first);
                self.renew_promise(carrier);
                self.recount(carrier);
            }
            None if !planned => self.drop_record(carrier),
            None => {}
        }
        true
    }

    /// Ends the samples that were aborted before they parted, if the step that they were in has ended. Returns whether none
    /// is left.
    pub(super) fn drop_aborted_samples(&mut self, index: Index) -> bool {
        if self.get(index).aborted_samples.is_empty() {
            return false;
        }
        self.ledger.note_given_up();
        for sample in std::mem::take(&mut self.get_mut(index).aborted_samples) {
            let sequence = self.get_mut(index);
            sequence.pending_samples.retain(|&pending| pending != sample);
            sequence.aborting |= sequence.pending_samples.is_empty();
            self.tell_aborted(index, sample);
        }
        self.renew_promise(index);
        self.recount(index);
        self.get(index).pending_samples.is_empty()
    }

    /// The end of an aborted sequence: of all its samples, where they have not parted.
    pub(super) fn tell_ended(&mut self, index: Index) {
        let sequence = self.get_mut(index);
        let (own, pending) = (sequence.id.sample(), std::mem::take(&mut sequence.pending_samples));
        if pending.is_empty() {
            self.tell_aborted(index, own);
        }
        for sample in pending {
            self.tell_aborted(index, sample);
        }
    }

    /// The end of a sample that was aborted before it parted from the others.
    pub(super) fn tell_aborted(&mut self, carrier: Index, sample: u32) {
        let carrier = self.get(carrier);
        let (sequence, preemptions) = (carrier.id.request().sample(sample), carrier.preemptions);
        self.events.push(StepEvent::Finished { sequence, reason: FinishReason::Aborted, preemptions });
    }
}
