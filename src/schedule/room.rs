//! Room (I9): makes room for a sequence, by taking blocks and tables from those that `victims` chooses.
//!
//! A sequence for which no room can be made waits in place: whoever comes before it goes on, and frees blocks in the end.
//! Pinned content goes only where a step would have no row at all.

use crate::cache::PrefixMatch;
use crate::ids::BlockId;
use crate::schedule::blocks;
use crate::schedule::request::VictimPolicy;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::victims::{Candidate, Holding, Reach, Requester, Resort, Victims, View, choose_tables};

impl Scheduler {
    /// Frees blocks until `needed` are available to `index`, the copy of its shared last block included: those of idle
    /// sequences, and of running ones if it may `preempt`. All or nothing; returns whether they are available.
    pub(super) fn make_room(&mut self, index: Index, needed: u32, preempt: bool) -> bool {
        let missing = self.missing_to(index, needed);
        if missing == 0 {
            return true;
        }
        let reach = if preempt { Reach::Running } else { Reach::Idle };
        if let Some(victims) = self.victims_for(index, missing, reach, Resort::Usual) {
            return self.take_from(&victims, index, needed, Resort::Usual);
        }
        if !self.last_resort {
            return false;
        }
        let missing = missing.saturating_sub(self.cache.stats().pinned_blocks);
        match self.victims_for(index, missing, reach, Resort::Last) {
            Some(victims) => self.take_from(&victims, index, needed, Resort::Last),
            None => false,
        }
    }

    /// Whether idle sequences could give up enough.
    pub(super) fn can_reclaim(&self, index: Index, needed: u32) -> bool {
        self.victims_for(index, self.missing_to(index, needed), Reach::Idle, Resort::Usual).is_some()
    }

    /// Preempts sequences of lower classes than `index` until `needed` blocks are available to it. All or nothing.
    pub(super) fn displace_for(&mut self, index: Index, needed: u32) -> bool {
        match self.victims_for(index, self.missing_to(index, needed), Reach::LowerClass, Resort::Usual) {
            Some(victims) => self.take_from(&victims, index, needed, Resort::Usual),
            None => false,
        }
    }

    fn take_from(&mut self, victims: &[Index], index: Index, needed: u32, resort: Resort) -> bool {
        let shared_tails =
            |scheduler: &Self| blocks::shared_tails(&scheduler.cache, scheduler.get(index)).count() as u32;
        let shared = shared_tails(self);
        // When nobody else holds its last block any more, it is not copied.
        let missing = |scheduler: &Self| {
            let saved = shared.saturating_sub(shared_tails(scheduler));
            scheduler.missing_to(index, needed - saved.min(needed))
        };
        for &victim in victims {
            self.evict(victim, Some(index));
        }
        // What one victim left behind because another one shared it; then what the requester shares with one.
        for &victim in victims {
            if missing(self) > 0 {
                self.evict_rest(victim, index);
            }
        }
        for &victim in victims {
            if missing(self) > 0 {
                self.release_table(victim);
            }
        }
        while resort == Resort::Last && missing(self) > 0 {
            if self.cache.give_up_pins(self.cache.free_blocks() + 1) == 0 {
                break;
            }
        }
        let missing = missing(self);
        debug_assert_eq!(missing, 0, "victims free less than was counted");
        missing == 0
    }

    /// Gives up one block of pinned content. Returns whether there was any.
    pub(super) fn give_up_pinned_content(&mut self) -> bool {
        if let Some(&kept) = self.kept.values().find(|&&kept| self.get(kept).table.is_some()) {
            self.evict(kept, None);
            return true;
        }
        self.cache.give_up_pins(self.cache.free_blocks() + 1) > 0
    }

    /// Sequences that free `missing` blocks for `index` together.
    fn victims_for(&self, index: Index, missing: u32, reach: Reach, resort: Resort) -> Option<Vec<Index>> {
        let sequence = self.get(index);
        let found = self.found_for(index);
        let requester = Requester {
            index,
            place: sequence.place(),
            priority: sequence.priority,
            tails: blocks::shared_tails(&self.cache, sequence)
                .filter(|&block| !self.cache.is_copy_source(block))
                .collect(),
            found: found.map_or(Vec::new(), PrefixMatch::sorted_blocks),
        };
        let policy = self.is_overcommitted().then_some(self.config.victims);
        Victims { requester, policy, reach, resort }.choose(self, missing)
    }

    /// Whether a sequence for which no room can be made gives up its own blocks: by policy, while others run that may
    /// need them, and if that frees any. Where windows move on, several may hold what another one has left behind, so that
    /// none of them frees anything alone: then each gives way when nobody goes on otherwise.
    pub(super) fn yields(&self, index: Index) -> bool {
        let sequence = self.get(index);
        self.config.victims == VictimPolicy::Requester
            && self.is_overcommitted()
            && !sequence.protected
            && self.running.len() > 1
            && sequence.table.is_some_and(|table| {
                // Blocks return, or the copy of a shared one is saved.
                self.cache.swappable_blocks(table, None) > 0
                    || self.cache.shared_tail_blocks(table).next().is_some()
                    || (self.last_resort && self.cache.slides())
            })
    }

    /// Takes idle sequences' tables, `parent`'s apart, until all that `index` and its samples need can be opened. All or
    /// nothing; returns whether they can.
    pub(super) fn ensure_tables(&mut self, index: Index, parent: Option<Index>) -> bool {
        let missing = self.tables_missing_to(index);
        if missing == 0 {
            return true;
        }
        let Some(victims) = choose_tables(self, index, parent, missing) else { return false };
        for victim in victims {
            self.release_table(victim);
            self.stats.reclaimed += 1;
        }
        true
    }

    /// Tables that must become free before `index` and its samples can open theirs, beside those set aside: for samples
    /// that have not parted, and for branches that share when the outstanding step has ended.
    fn tables_missing_to(&self, index: Index) -> u32 {
        let others = self.sums.tables - self.get(index).counted.map_or(0, |counted| counted.tables);
        let sequence = self.get(index);
        let own = u32::from(sequence.table.is_some());
        (sequence.width() + others).saturating_sub(self.cache.free_tables() + own)
    }
}

impl Scheduler {
    fn candidate(&self, index: Index) -> Option<Candidate> {
        let sequence = self.get(index);
        sequence.table.map(|_| Candidate {
            index,
            place: sequence.place(),
            priority: sequence.priority,
            tables: sequence.width(),
            num_blocks: blocks::held(&self.cache, sequence),
            is_promised: sequence.is_promised(),
            is_spared: sequence.planned_rows > 0 || sequence.protected,
        })
    }
}

impl View for Scheduler {
    fn kept(&self) -> impl Iterator<Item = Candidate> {
        self.kept.values().filter_map(|&index| self.candidate(index))
    }

    fn waiting(&self) -> impl Iterator<Item = Candidate> {
        self.line.claimants().rev().filter_map(|index| self.candidate(index))
    }

    fn running(&self) -> impl Iterator<Item = Candidate> {
        self.running.iter().rev().filter_map(|&index| self.candidate(index))
    }

    fn blocks(&self, index: Index) -> impl Iterator<Item = BlockId> {
        blocks::of(&self.cache, self.get(index))
    }

    fn holding(&self, block: BlockId) -> Holding {
        Holding {
            holders: self.cache.ref_count(block),
            is_fenced: self.cache.is_pinned(block),
            is_retained: self.cache.is_retained(block),
        }
    }

    fn lost(&self, index: Index) -> u32 {
        self.get(index).table.map_or(0, |table| self.cache.swappable_blocks(table, None))
    }
}
