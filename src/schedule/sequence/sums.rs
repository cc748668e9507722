//! Sums over the sequences that wait or run, so that no question about them walks them all.

use crate::cache::KvCache;
use crate::schedule::scheduler::Index;
use crate::schedule::sequence::{Sequence, Sequences, State};

/// A sequence's part of the sums over those that wait or run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::schedule) struct Counted {
    /// Running sequences that it stands for.
    pub(in crate::schedule) running: u32,
    /// Tables set aside for it and its samples.
    pub(in crate::schedule) tables: u32,
    /// Blocks that it was let in for and does not have yet, while it runs and nothing is reserved for it.
    pub(in crate::schedule) owed: u32,
}

impl Sequence {
    /// What it adds to the sums while it is in line or runs.
    pub(super) fn count(&self, cache: &KvCache) -> Counted {
        let width = (self.samples.len() as u32).max(1);
        // Tables that it will need beside its own: for samples that have not parted, and where it shares its parent's
        // blocks when the outstanding step has ended.
        let tables = match (self.table, self.fork) {
            (Some(_), _) => width - 1,
            (None, Some(_)) => width,
            (None, None) => 0,
        };
        match self.state {
            State::Running if self.protected => Counted { running: width, tables, owed: 0 },
            State::Running => {
                let owed = cache.blocks_beyond(self.table, self.tokens.len() as u32);
                Counted { running: width, tables, owed }
            }
            _ => Counted { running: 0, tables, owed: 0 },
        }
    }
}

impl Sequences {
    /// Sums over all that wait or run.
    pub(super) fn sums(&self) -> Counted {
        self.sums
    }

    /// Whether sequences of lower classes than this one run.
    pub(in crate::schedule) fn runs_below(&self, index: Index) -> bool {
        let class = self[index].priority as usize;
        self.running_of_class[class + 1..].iter().any(|&running| running > 0)
    }

    /// Running sequences, samples one by one, if `index` ran too.
    pub(in crate::schedule) fn num_running_with(&self, index: Index) -> u32 {
        self.sums.running + (self[index].samples.len() as u32).max(1)
    }

    /// Tables that a sequence and its samples open, and those that are set aside for others: for samples that have not
    /// parted, and for branches that share when the outstanding step has ended.
    pub(in crate::schedule) fn tables_wanted(&self, index: Index) -> u32 {
        let sequence = &self[index];
        let others = self.sums.tables - sequence.counted.map_or(0, |counted| counted.tables);
        (sequence.samples.len() as u32).max(1) - u32::from(sequence.table.is_some()) + others
    }

    /// Blocks that sequences beside `index` were let in for and do not have yet. Those of lower classes that come after it
    /// step back.
    pub(in crate::schedule) fn owed_beside(&self, index: Index) -> u32 {
        let owed_by = |sequence: &Sequence| sequence.counted.map_or(0, |counted| counted.owed);
        let sequence = &self[index];
        let owed = self.sums.owed - owed_by(sequence);
        if self.running_of_class[sequence.priority as usize + 1..].iter().all(|&running| running == 0) {
            return owed;
        }
        let (priority, place) = (sequence.priority, sequence.place());
        let running = self.running().iter().map(|&other| &self[other]);
        let back = running.filter(|other| other.priority > priority && other.place() > place);
        owed - back.map(owed_by).sum::<u32>()
    }

    /// Brings the sums over sequences in line and running up to date with this one.
    pub(in crate::schedule) fn recount(&mut self, index: Index, cache: &KvCache) {
        let Some(record) = &mut self.records[index] else { return };
        if let Some(before) = record.counted {
            let now = record.count(cache);
            record.counted = Some(now);
            self.sums.running = self.sums.running - before.running + now.running;
            self.sums.tables = self.sums.tables - before.tables + now.tables;
            self.sums.owed = self.sums.owed - before.owed + now.owed;
        }
    }

    /// The same, where this one has all the blocks that its tokens take.
    pub(super) fn owes_nothing(&mut self, index: Index) {
        let Some(record) = &mut self.records[index] else { return };
        if let Some(counted) = &mut record.counted {
            self.sums.owed -= std::mem::take(&mut counted.owed);
        }
    }
}
