//! What must hold between any two operations, checked from the inside.

use crate::ids::BlockId;
use crate::schedule::blocks;
use crate::schedule::request::Admission;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Counted, State};

impl Scheduler {
    /// Checks records, queues, promises and the cache against each other. For tests: O(sequences + blocks).
    ///
    /// # Panics
    /// With the invariant's number when they disagree.
    pub fn assert_consistent(&self) {
        self.cache.assert_consistent();
        let mut queues = vec![[0u32; 3]; self.records.len()];
        let queued = |state: State| state as usize;
        self.line.all().for_each(|(_, index, _)| queues[index][queued(State::Waiting)] += 1);
        self.running.iter().for_each(|&index| queues[index][queued(State::Running)] += 1);
        self.kept.values().for_each(|&index| queues[index][queued(State::Kept)] += 1);
        let mut tables = 0;
        for (index, sequence) in self.records.iter().enumerate() {
            let Some(sequence) = sequence else { continue };
            assert_eq!(
                self.by_id.get(&sequence.id),
                Some(&index),
                "{:?} is filed under another record",
                sequence.id
            );
            let mut expected = [0; 3];
            expected[queued(sequence.state)] = 1;
            assert_eq!(queues[index], expected, "{:?} is in a wrong queue", sequence.id);
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
        self.assert_line_consistent();
        let protected = self.running.iter().filter(|&&index| self.get(index).protected).count();
        assert_eq!(protected as u32, self.ledger.num_protected(), "I9: protected sequences are miscounted");
        if self.config.admission == Admission::Guaranteed {
            self.assert_promises_counted();
            let broken = self.check_promise(None).err();
            assert_eq!(broken, None, "I8: the promises exceed the pool");
            assert_eq!(self.stats.preemptions, 0, "I8: a promised sequence was preempted");
        }
    }

    fn assert_line_consistent(&self) {
        for (place, index, behind) in self.line.all() {
            let sequence = self.get(index);
            assert_eq!((sequence.place(), sequence.behind), (place, behind), "a sequence is filed elsewhere");
            let running = behind.is_none_or(|other| self.get(other).state == State::Running);
            assert!(running, "{:?} stands behind a sequence that does not run", sequence.id);
            assert!(
                !sequence.has_claims() || self.line.has_noted(place),
                "a sequence in line that holds something is not listed"
            );
        }
        let in_line = self.line.claimants().all(|index| self.get(index).state == State::Waiting);
        assert!(in_line, "a claimant is not in line");
        let queued = || self.records.iter().flatten().filter(|sequence| sequence.state != State::Kept);
        let mut sums = Counted::default();
        for sequence in queued() {
            let counted = self.count_of(sequence);
            assert_eq!(
                sequence.counted,
                Some(counted),
                "what {:?} adds to the sums is out of date",
                sequence.id
            );
            sums.running += counted.running;
            sums.tables += counted.tables;
            sums.owed += counted.owed;
        }
        assert_eq!(self.sums, sums, "the sums over sequences are miscounted");
    }

    /// Counts the promises block by block: the long way to what [`promised_blocks`](Self::promised_blocks) keeps.
    fn assert_promises_counted(&self) {
        for later in [false, true] {
            let mut holders = vec![0u64; self.cache.config().num_blocks() as usize];
            let mut writers = holders.clone();
            // What windows hold was promised with them, pinned or not.
            let mut windows = vec![false; holders.len()];
            let mut needed = 0;
            for (index, sequence) in self.records.iter().enumerate() {
                let Some(sequence) = sequence.as_ref().filter(|sequence| sequence.is_promised()) else {
                    continue;
                };
                let cut = sequence.truncating.filter(|_| later && sequence.planned_rows > 0);
                needed += blocks::at_most(&self.cache, sequence, cut, self.most_rows);
                let end = cut.map_or(u32::MAX, |_| self.end_of_cut(sequence));
                for block in self.promised_entries(index, end) {
                    needed -= 1;
                    holders[block.index() as usize] += 1;
                }
                let lasting: Vec<BlockId> = blocks::lasting_beyond(&self.cache, sequence, 0).collect();
                for block in blocks::of(&self.cache, sequence).filter(|block| !lasting.contains(block)) {
                    windows[block.index() as usize] = true;
                }
                for tail in blocks::tails_within(&self.cache, sequence, end) {
                    writers[tail.index() as usize] += 1;
                }
            }
            for (index, (&holders, &writers)) in (0..).zip(holders.iter().zip(&writers)) {
                let stays = self.cache.is_retained(BlockId(index)) && !windows[index as usize];
                needed += u64::from(holders > 0 || stays);
                needed += writers.min(holders.saturating_sub(u64::from(!stays)));
            }
            assert_eq!(
                u64::from(self.promised_blocks(None, later)),
                needed,
                "I8: what is promised is miscounted, later: {later}"
            );
        }
    }

    /// Blocks that last and that a promised sequence holds, or will share when the outstanding step ends.
    fn promised_entries(&self, index: Index, end: u32) -> Vec<BlockId> {
        let sequence = self.get(index);
        match (sequence.fork, sequence.table) {
            (Some(fork), _) => self.cache.lasting_full(fork.parent, fork.at).collect(),
            (None, Some(table)) => {
                let beyond: Vec<BlockId> = self.cache.lasting_beyond(table, end).collect();
                self.cache.lasting_beyond(table, 0).filter(|block| !beyond.contains(block)).collect()
            }
            (None, None) => Vec::new(),
        }
    }
}
