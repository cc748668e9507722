//! What must hold between any two operations, checked from the inside.

use crate::schedule::request::Admission;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::State;

impl Scheduler {
    /// Checks records, queues, promises and the cache against each other. For tests: O(sequences + blocks).
    ///
    /// # Panics
    /// With the invariant's number when they disagree.
    pub fn assert_consistent(&self) {
        self.cache.assert_consistent();
        let mut tables = 0;
        for (index, sequence) in self.records.iter().enumerate() {
            let Some(sequence) = sequence else { continue };
            assert_eq!(
                self.by_id.get(&sequence.id),
                Some(&index),
                "{:?} is filed under another record",
                sequence.id
            );
            let queues = [
                (State::Waiting, self.waiting.iter().filter(|&&other| other == index).count()),
                (State::Running, self.running.iter().filter(|&&other| other == index).count()),
                (State::Kept, self.kept.iter().filter(|&&other| other == index).count()),
            ];
            for (state, entries) in queues {
                assert_eq!(
                    entries,
                    usize::from(state == sequence.state),
                    "{:?} is in a wrong queue",
                    sequence.id
                );
            }
            assert!(
                sequence.len() <= sequence.max_tokens,
                "I10: {:?} outgrew its declared maximum",
                sequence.id
            );
            assert!(
                sequence.computed <= sequence.len(),
                "I4: {:?} has more computed than it has",
                sequence.id
            );
            assert!(
                sequence.preemptions <= self.config.max_preemptions,
                "I9: {:?} was preempted too often",
                sequence.id
            );
            if let Some(table) = sequence.table {
                tables += 1;
                let len = self.cache.len(table).expect("a record's table is live");
                assert_eq!(
                    len,
                    sequence.computed + sequence.planned_rows,
                    "I4: {:?} and its table disagree",
                    sequence.id
                );
            } else {
                assert_eq!(sequence.computed, 0, "I4: {:?} is computed but holds no table", sequence.id);
            }
        }
        assert_eq!(tables, self.cache.stats().num_tables, "I2: a table belongs to no sequence");
        let place = |index: &Index| self.get(*index).place();
        assert!(self.running.iter().map(place).is_sorted(), "running sequences are out of order");
        assert!(self.waiting.iter().map(place).is_sorted(), "waiting sequences are out of order");
        assert!(self.claimants.iter().map(place).is_sorted(), "claimants are out of order");
        let in_line = self.claimants.iter().all(|&index| self.get(index).state == State::Waiting);
        assert!(in_line, "a claimant is not in line");
        let listed = |index: &Index| self.claimants.iter().filter(|&other| other == index).count();
        let missed = self
            .waiting
            .iter()
            .find(|&index| listed(index) > 1 || (listed(index) == 0 && self.get(*index).has_claims()));
        assert_eq!(missed, None, "a sequence in line that holds something is not listed once");
        let protected = self.running.iter().filter(|&&index| self.get(index).protected).count();
        assert_eq!(protected as u32, self.num_protected, "I9: protected sequences are miscounted");
        if self.config.admission == Admission::Guaranteed {
            let broken = self.check_promise().err();
            assert_eq!(broken, None, "I8: the promises exceed the pool");
            assert_eq!(self.stats.preemptions, 0, "I8: a promised sequence was preempted");
        }
    }
}
