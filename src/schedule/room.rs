//! Room (I9): makes room for a sequence, by taking blocks and tables from those that `victims` chooses.
//!
//! A sequence for which no room can be made waits in place: those before it go on, and free blocks in the end.
//! Pinned content goes only where a step would have no row at all.

use crate::cache::{KvCache, PrefixMatch};
use crate::ids::BlockId;
use crate::schedule::blocks;
use crate::schedule::request::VictimPolicy;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::Sequences;
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
        let missing = missing.saturating_sub(self.cache.num_pinned());
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
        let shared_tails = |scheduler: &Self| {
            blocks::shared_tails(&scheduler.cache, scheduler.sequences[index].table()).count() as u32
        };
        let shared = shared_tails(self);
        // When no other holds its last block any more, it is not copied.
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
                self.restart(victim);
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
        let with_table = self.sequences.kept().find(|&kept| self.sequences[kept].table().is_some());
        if let Some(kept) = with_table {
            self.evict(kept, None);
            return true;
        }
        self.cache.give_up_pins(self.cache.free_blocks() + 1) > 0
    }

    /// Sequences that free `missing` blocks for `index` together.
    fn victims_for(&self, index: Index, missing: u32, reach: Reach, resort: Resort) -> Option<Vec<Index>> {
        let sequence = &self.sequences[index];
        let found = self.matched.found_for(index);
        let requester = Requester {
            index,
            place: sequence.place(),
            priority: sequence.priority(),
            is_protected: sequence.is_protected(),
            tails: blocks::shared_tails(&self.cache, sequence.table())
                .filter(|&block| !self.cache.is_copy_source(block))
                .collect(),
            found: found.map_or(Vec::new(), PrefixMatch::sorted_blocks),
        };
        let policy = self.is_overcommitted().then_some(self.config.victims);
        Victims { requester, policy, reach, resort }.choose(&self.holders(), missing)
    }

    /// Whether a sequence for which no room can be made gives up its own blocks: by policy, while others run that may
    /// need them, and if that frees any. Where windows move on, several may hold what another one has left behind, so that
    /// none of them frees anything alone: then each gives way when none goes on otherwise.
    pub(super) fn yields(&self, index: Index) -> bool {
        let sequence = &self.sequences[index];
        self.config.victims == VictimPolicy::Requester
            && self.is_overcommitted()
            && !sequence.is_protected()
            && self.sequences.running().len() > 1
            && sequence.table().is_some_and(|table| {
                // Blocks return, or the copy of a shared one is saved.
                self.cache.swappable_blocks(table, None) > 0
                    || self.cache.shared_tail_blocks(table).next().is_some()
                    || (self.last_resort && self.slides)
            })
    }

    /// Takes idle sequences' tables, except `parent`'s, until all that `index` and its samples need can be opened. All or
    /// nothing; returns whether they can.
    pub(super) fn ensure_tables(&mut self, index: Index, parent: Option<Index>) -> bool {
        let missing = self.sequences.tables_wanted(index).saturating_sub(self.cache.free_tables());
        if missing == 0 {
            return true;
        }
        let Some(victims) = choose_tables(&self.holders(), index, parent, missing) else { return false };
        for victim in victims {
            self.restart(victim);
            self.stats.reclaimed += 1;
        }
        true
    }

    /// Blocks that protected sequences may still need and no other may take.
    pub(super) fn reserved_blocks(&self) -> u32 {
        self.ledger.reserved(&self.sequences, &self.cache)
    }

    /// Free blocks that `index` may take.
    pub(super) fn available_to(&self, index: Index) -> u32 {
        let reserve = self.ledger.reserve(index, &self.sequences, &self.cache);
        self.cache.free_blocks().saturating_sub(reserve.untouchable)
    }

    /// Blocks that must become free before `index` may take `needed`.
    pub(super) fn missing_to(&self, index: Index, needed: u32) -> u32 {
        if needed == 0 {
            return 0;
        }
        let reserve = self.ledger.reserve(index, &self.sequences, &self.cache);
        needed.saturating_add(reserve.untouchable).saturating_sub(self.cache.free_blocks())
    }

    /// Who holds what, for a choice of victims.
    fn holders(&self) -> Holders<'_> {
        Holders { sequences: &self.sequences, cache: &self.cache }
    }
}

/// Sequences, and the blocks that they hold.
struct Holders<'a> {
    sequences: &'a Sequences,
    cache: &'a KvCache,
}

impl Holders<'_> {
    fn candidate(&self, index: Index) -> Option<Candidate> {
        let sequence = &self.sequences[index];
        sequence.table().map(|_| Candidate {
            index,
            place: sequence.place(),
            priority: sequence.priority(),
            tables: sequence.width(),
            num_blocks: blocks::held(self.cache, sequence.table()),
            is_promised: sequence.is_promised(),
            is_spared: sequence.is_planned() || sequence.is_protected(),
        })
    }
}

impl View for Holders<'_> {
    fn kept(&self) -> impl Iterator<Item = Candidate> {
        self.sequences.kept().filter_map(|index| self.candidate(index))
    }

    fn waiting(&self) -> impl Iterator<Item = Candidate> {
        self.sequences.line().claimants().rev().filter_map(|index| self.candidate(index))
    }

    fn running(&self) -> impl Iterator<Item = Candidate> {
        self.sequences.running().iter().rev().filter_map(|&index| self.candidate(index))
    }

    fn blocks(&self, index: Index) -> impl Iterator<Item = BlockId> {
        blocks::of(self.cache, self.sequences[index].table())
    }

    fn holding(&self, block: BlockId) -> Holding {
        Holding {
            holders: self.cache.ref_count(block),
            is_fenced: self.cache.is_pinned(block),
            is_retained: self.cache.is_retained(block),
        }
    }

    fn lost(&self, index: Index) -> u32 {
        self.sequences[index].table().map_or(0, |table| self.cache.swappable_blocks(table, None))
    }
}
