//! Samples that have not parted: several that one record stands for, by the id of the first one that lives.

use crate::schedule::scheduler::Index;
use crate::schedule::sequence::{Sequence, Sequences};

impl Sequence {
    /// The first sample that lives, of those that have not parted.
    pub(in crate::schedule) fn first_alive(&self) -> Option<u32> {
        self.samples.iter().copied().find(|sample| !self.aborted_samples.contains(sample))
    }
}

impl Sequences {
    /// The sequence itself ends when the outstanding step does. Returns whether that is new.
    pub(in crate::schedule) fn note_abort(&mut self, index: Index) -> bool {
        !std::mem::replace(&mut self.record(index).aborting, true)
    }

    /// A sample that has not parted ends: now, or, if its record is in the outstanding step, when that ends. Returns
    /// whether that is new.
    pub(in crate::schedule) fn abort_sample(&mut self, index: Index, sample: u32) -> bool {
        let record = self.record(index);
        if record.aborting || record.aborted_samples.contains(&sample) {
            return false;
        }
        if record.planned_rows > 0 {
            record.aborted_samples.push(sample);
        } else {
            record.samples.retain(|&other| other != sample);
        }
        true
    }

    /// The samples that were aborted while their record was in a step: they end now, and their record where none is left.
    pub(in crate::schedule) fn take_aborted_samples(&mut self, index: Index) -> Vec<u32> {
        let record = self.record(index);
        let aborted = std::mem::take(&mut record.aborted_samples);
        if !aborted.is_empty() {
            record.samples.retain(|sample| !aborted.contains(sample));
            record.aborting |= record.samples.is_empty();
        }
        aborted
    }

    /// All samples, with those among them that were aborted: from now on the record stands for one.
    pub(in crate::schedule) fn take_samples(&mut self, index: Index) -> (Vec<u32>, Vec<u32>) {
        let record = self.record(index);
        (std::mem::take(&mut record.samples), std::mem::take(&mut record.aborted_samples))
    }
}
