//! What must hold between any two operations, checked from the inside.

use crate::ids::BlockId;
use crate::schedule::blocks;
use crate::schedule::request::Admission;
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence::Sequence;

impl Scheduler {
    /// Checks records, queues, promises and the cache against each other. For tests: O(sequences + blocks).
    ///
    /// # Panics
    /// With the invariant's number when they disagree.
    pub fn assert_consistent(&self) {
        self.cache.assert_consistent();
        let mut tables = 0;
        for (_, sequence) in self.sequences.all() {
            assert!(
                sequence.preemptions <= self.config.max_preemptions,
                "I9: {:?} was preempted too often",
                sequence.id()
            );
            tables += u32::from(sequence.table().is_some());
            self.assert_lengths(sequence);
        }
        assert_eq!(tables, self.cache.stats().num_tables, "I2: a table belongs to no sequence");
        self.sequences.assert_consistent(&self.cache);
        let running = self.sequences.running().iter();
        let protected = running.filter(|&&index| self.sequences[index].is_protected()).count();
        assert_eq!(protected as u32, self.ledger.num_protected(), "I9: protected sequences are miscounted");
        if self.config.admission == Admission::Guaranteed {
            self.assert_promises_counted();
            let broken = self.promises().check(None).err();
            assert_eq!(broken, None, "I8: the promises exceed the pool");
            assert_eq!(self.stats.preemptions, 0, "I8: a promised sequence was preempted");
        }
    }

    fn assert_lengths(&self, sequence: &Sequence) {
        let (id, computed) = (sequence.id(), sequence.computed());
        assert!(sequence.len() <= sequence.terms.max_tokens, "I10: {id:?} outgrew its declared maximum");
        assert!(computed <= sequence.len(), "I4: {id:?} has more computed than it has");
        match sequence.table() {
            Some(table) => {
                let len = self.cache.len(table).expect("a record's table is live");
                assert_eq!(len, computed + sequence.planned_rows(), "I4: {id:?} and its table disagree");
                assert!(sequence.confirmed() <= computed, "I6: {id:?} has more confirmed than it has");
            }
            None => assert_eq!(computed, 0, "I4: {id:?} is computed but holds no table"),
        }
    }

    /// Counts the promises block by block: the long way to what [`Promises::blocks`](crate::schedule::promise::Promises::blocks) keeps.
    fn assert_promises_counted(&self) {
        for later in [false, true] {
            let mut holders = vec![0u64; self.cache.config().num_blocks() as usize];
            let mut writers = holders.clone();
            // What windows hold was promised with them, pinned or not.
            let mut windows = vec![false; holders.len()];
            let mut needed = 0;
            let promised = self.sequences.all().map(|(_, sequence)| sequence);
            for sequence in promised.filter(|sequence| sequence.is_promised()) {
                let cut = sequence.cut().filter(|_| later && sequence.is_planned());
                needed += blocks::at_most(&self.cache, sequence, cut);
                let end = cut.map_or(u32::MAX, |_| blocks::end_of_cut(&self.cache, sequence));
                for block in self.promised_entries(sequence, end) {
                    needed -= 1;
                    holders[block.index() as usize] += 1;
                }
                let lasting: Vec<BlockId> =
                    blocks::lasting_beyond(&self.cache, sequence.table(), 0).collect();
                for block in
                    blocks::of(&self.cache, sequence.table()).filter(|block| !lasting.contains(block))
                {
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
                u64::from(self.promises().blocks(None, later)),
                needed,
                "I8: what is promised is miscounted, later: {later}"
            );
        }
    }

    /// Blocks that last and that a promised sequence holds, or will share when the outstanding step ends.
    fn promised_entries(&self, sequence: &Sequence, end: u32) -> Vec<BlockId> {
        if sequence.fork().is_some() {
            return blocks::to_be_shared(&self.cache, sequence, u32::MAX).collect();
        }
        let beyond = |end| blocks::lasting_beyond(&self.cache, sequence.table(), end);
        let behind: Vec<BlockId> = beyond(end).collect();
        beyond(0).filter(|block| !behind.contains(block)).collect()
    }
}
