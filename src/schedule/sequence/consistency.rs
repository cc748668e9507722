//! What must hold between the records, their queues and the sums over them, checked from the inside.

use crate::cache::KvCache;
use crate::schedule::sequence::{Counted, Sequences, State};

impl Sequences {
    /// Checks records, queues and sums against each other.
    ///
    /// # Panics
    /// When they disagree.
    pub(in crate::schedule) fn assert_consistent(&self, cache: &KvCache) {
        let mut queues = vec![[0u32; 3]; self.num_records()];
        self.line().all().for_each(|(_, index, _)| queues[index][State::Waiting as usize] += 1);
        self.running().iter().for_each(|&index| queues[index][State::Running as usize] += 1);
        self.kept().for_each(|index| queues[index][State::Kept as usize] += 1);
        for (index, sequence) in self.all() {
            let (id, found) = (sequence.id, self.find(sequence.id));
            assert_eq!(found, Some(index), "{id:?} is filed under another record");
            let mut expected = [0; 3];
            expected[sequence.state as usize] = 1;
            assert_eq!(queues[index], expected, "{id:?} is in a wrong queue");
        }
        let places = self.running().iter().map(|&index| self[index].place());
        assert!(places.is_sorted(), "running sequences are out of order");
        self.assert_line_consistent();
        self.assert_sums_consistent(cache);
    }

    fn assert_line_consistent(&self) {
        for (place, index, behind) in self.line().all() {
            let sequence = &self[index];
            assert_eq!((sequence.place(), sequence.behind), (place, behind), "a sequence is filed elsewhere");
            let running = behind.is_none_or(|other| self[other].state == State::Running);
            assert!(running, "{:?} stands behind a sequence that does not run", sequence.id);
            assert!(
                !sequence.has_claims() || self.line().has_noted(place),
                "a sequence in line that holds something is not listed"
            );
        }
        let in_line = self.line().claimants().all(|index| self[index].state == State::Waiting);
        assert!(in_line, "a claimant is not in line");
    }

    fn assert_sums_consistent(&self, cache: &KvCache) {
        let mut sums = Counted::default();
        for (_, sequence) in self.all().filter(|(_, sequence)| sequence.state != State::Kept) {
            let counted = sequence.count(cache);
            let id = sequence.id;
            assert_eq!(sequence.counted, Some(counted), "what {id:?} adds to the sums is out of date");
            sums.running += counted.running;
            sums.tables += counted.tables;
            sums.owed += counted.owed;
        }
        assert_eq!(self.sums(), sums, "the sums over sequences are miscounted");
    }
}
