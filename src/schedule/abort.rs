//! Ending sequences before their time.

use crate::ids::{RequestId, SequenceId};
use crate::schedule::request::{FinishReason, StepEvent};
use crate::schedule::scheduler::{Index, Scheduler};

impl Scheduler {
    /// Ends all samples of a request, whatever their state, and drops what is kept of them. Sequences of the
    /// outstanding step end when it does: if it is committed, with [`FinishReason::Aborted`](crate::FinishReason::Aborted)
    /// among its events.
    ///
    /// Returns whether there was anything to end: ending a request twice, or an unknown one, is harmless.
    pub fn abort(&mut self, request: RequestId) -> bool {
        let all = request.sample(0)..=request.sample(u32::MAX);
        let records: Vec<Index> = self.by_id.range(all).map(|(_, &index)| index).collect();
        let mut ended = false;
        for index in records {
            ended |= self.abort_record(index);
        }
        ended
    }

    /// Ends one sequence; the other samples of its request go on. Returns whether there was anything to end.
    pub fn abort_sequence(&mut self, sequence: SequenceId) -> bool {
        let all = sequence.request().sample(0)..=sequence.request().sample(u32::MAX);
        let carrier = self
            .by_id
            .range(all)
            .map(|(_, &index)| index)
            .find(|&index| self.get(index).pending_samples.contains(&sequence.sample()));
        match carrier.or_else(|| self.by_id.get(&sequence).copied()) {
            Some(index) if self.get(index).pending_samples.is_empty() => self.abort_record(index),
            Some(carrier) => self.abort_pending(carrier, sequence.sample()),
            None => false,
        }
    }

    fn abort_record(&mut self, index: Index) -> bool {
        let sequence = self.get_mut(index);
        if sequence.planned_rows == 0 {
            self.drop_record(index);
            return true;
        }
        !std::mem::replace(&mut sequence.aborting, true)
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
        self.releases += 1;
        match first {
            Some(first) => self.rename(carrier, first),
            None if !planned => self.drop_record(carrier),
            None => {}
        }
        true
    }

    /// Ends the samples that were aborted before they parted, if the step that they were in has ended.
    pub(super) fn drop_aborted_samples(&mut self, index: Index) {
        if self.get(index).aborted_samples.is_empty() {
            return;
        }
        self.releases += 1;
        for sample in std::mem::take(&mut self.get_mut(index).aborted_samples) {
            let sequence = self.get_mut(index);
            sequence.pending_samples.retain(|&pending| pending != sample);
            sequence.aborting |= sequence.pending_samples.is_empty();
            self.tell_aborted(index, sample);
        }
    }

    /// The end of a sample that was aborted before it parted from the others.
    pub(super) fn tell_aborted(&mut self, carrier: Index, sample: u32) {
        let carrier = self.get(carrier);
        let (sequence, preemptions) = (carrier.id.request().sample(sample), carrier.preemptions);
        self.tell(StepEvent::Finished { sequence, reason: FinishReason::Aborted, preemptions });
    }
}
