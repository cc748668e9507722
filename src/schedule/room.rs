//! Room (I9): whose blocks and tables are taken when none are free.
//!
//! Kept sequences are idle content: their blocks are taken first, least recently finished first. Under overcommitted
//! admission, sequences in line that come after the requester follow, then running ones as the policy says, unless they
//! are in this step already or protected. Victims are taken only when together they free enough, and none is taken that
//! is not needed for it. A sequence for which no room can be made waits in place: whoever comes before it goes on, and
//! frees blocks in the end. Pinned content goes only where a step would have no row at all.

use crate::cache::PrefixMatch;
use crate::ids::BlockId;
use crate::schedule::request::VictimPolicy;
use crate::schedule::scheduler::{Index, Scheduler};
use std::cmp::Reverse;
use std::collections::HashMap;

/// Whose blocks may be taken, beside idle content's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    Idle,
    /// Running sequences, by the policy.
    Running,
    /// Running sequences of lower classes.
    LowerClass,
}

/// How far it goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Resort {
    #[default]
    Usual,
    /// Pinned content goes, and whatever sequences in line hold, even those before the requester: nobody goes on otherwise.
    Last,
}

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
        let shares_tail = |scheduler: &Self| {
            scheduler.get(index).table.and_then(|table| scheduler.cache.shared_tail_block(table)).is_some()
        };
        let shared = shares_tail(self);
        // When nobody else holds its last block any more, it is not copied.
        let missing = |scheduler: &Self| {
            let saved = u32::from(shared && !shares_tail(scheduler));
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

    /// Sequences that only hold content: kept ones, then those in line behind the requester that are not promised it.
    fn idle_candidates(&self, index: Index, resort: Resort) -> impl Iterator<Item = Index> {
        let place = self.get(index).place();
        let kept = self.kept.values().copied().filter(|&kept| self.get(kept).table.is_some());
        // A turn or branch that waits in line holds blocks as a kept sequence does; under guarantee they are promised.
        let waiting = self.line.claimants().rev().filter(move |&other| {
            let within_reach = resort == Resort::Last || self.get(other).place() > place;
            within_reach
                && other != index
                && self.get(other).table.is_some()
                && !self.get(other).is_promised()
        });
        kept.chain(waiting)
    }

    /// Sequences that free `missing` blocks for `index` together.
    fn victims_for(&self, index: Index, missing: u32, reach: Reach, resort: Resort) -> Option<Vec<Index>> {
        if missing == 0 {
            return Some(Vec::new());
        }
        let mut candidates: Vec<Index> = self.idle_candidates(index, resort).collect();
        let idle = candidates.len();
        if self.is_overcommitted() && reach != Reach::Idle {
            candidates.extend(self.running_candidates(index, reach));
            if reach == Reach::Running && self.config.victims == VictimPolicy::LeastLost {
                candidates[idle..].sort_by_key(|&other| {
                    let table = self.get(other).table;
                    let lost = table.map_or(0, |table| self.cache.swappable_blocks(table, None));
                    (lost, Reverse(self.get(other).place()))
                });
            }
        }
        // A copy is saved when all others give the requester's last block up.
        let tail = self.get(index).table.and_then(|table| self.cache.shared_tail_block(table));
        let tail = tail.filter(|&block| !self.cache.is_copy_source(block));
        let at_most: u32 = candidates.iter().map(|&other| self.table_blocks(self.get(other)) + 1).sum();
        if at_most < missing {
            return None;
        }
        let found = self.found_for(index).map_or(&[][..], |found| &found.blocks()[..]);
        let partial = self.found_for(index).and_then(PrefixMatch::partial_block);
        let mut freed = Freed { tail, found, partial, resort, ..Freed::default() };
        let enough = candidates.iter().position(|&victim| freed.add(self, victim) >= missing)?;
        candidates.truncate(enough + 1);
        // Those that free nothing, or less than what is freed beyond need, are spared.
        for place in (0..enough).rev() {
            let spared = freed.freed_by(self, candidates[place]);
            if freed.blocks - spared + u32::from(fault!(VictimsFreeTooLittle)) >= missing {
                freed.remove(self, candidates[place]);
                candidates.remove(place);
            }
        }
        Some(candidates)
    }

    /// Running sequences that may be preempted for `index`, the last in line first.
    fn running_candidates(&self, index: Index, reach: Reach) -> impl Iterator<Item = Index> {
        let (place, priority) = (self.get(index).place(), self.get(index).priority);
        let policy = self.config.victims;
        let running = self.running.iter().rev().copied();
        running.filter(move |&other| {
            let sequence = self.get(other);
            let within_reach = match (reach, policy) {
                (Reach::Idle, _) => false,
                (Reach::LowerClass, _) => sequence.priority > priority && sequence.place() > place,
                (Reach::Running, VictimPolicy::LowestPriority) => sequence.place() > place,
                (Reach::Running, VictimPolicy::LeastLost) => other != index && sequence.priority >= priority,
                (Reach::Running, VictimPolicy::Requester) => false,
            };
            within_reach && sequence.planned_rows == 0 && !sequence.protected && sequence.table.is_some()
        })
    }

    /// Whether a sequence for which no room can be made gives up its own blocks: by policy, while others run that may
    /// need them, and if that frees any.
    pub(super) fn yields(&self, index: Index) -> bool {
        let sequence = self.get(index);
        self.config.victims == VictimPolicy::Requester
            && self.is_overcommitted()
            && !sequence.protected
            && self.running.len() > 1
            && sequence.table.is_some_and(|table| {
                // Blocks return, or the copy of a shared one is saved.
                self.cache.swappable_blocks(table, None) > 0 || self.cache.shared_tail_block(table).is_some()
            })
    }

    pub(super) fn blocks_of(&self, index: Index) -> &[BlockId] {
        self.get(index).table.and_then(|table| self.cache.block_ids(table).ok()).unwrap_or_default()
    }

    /// Takes idle sequences' tables, `parent`'s apart, until all that `index` and its samples need can be opened. All or
    /// nothing; returns whether they can.
    pub(super) fn ensure_tables(&mut self, index: Index, parent: Option<Index>) -> bool {
        let missing = self.tables_missing_to(index);
        if missing == 0 {
            return true;
        }
        let waiting = self.line.claimants().rev().filter(|_| parent.is_none());
        let idle = self.kept.values().copied().chain(waiting).filter(|&other| {
            let sequence = self.get(other);
            other != index && Some(other) != parent && sequence.table.is_some() && !sequence.is_promised()
        });
        let mut victims = Vec::new();
        let mut freed = 0;
        for victim in idle {
            if freed >= missing {
                break;
            }
            // With its table, what was set aside for its samples.
            freed += self.get(victim).width();
            victims.push(victim);
        }
        if freed < missing {
            return false;
        }
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

/// Blocks that victims free together.
#[derive(Default)]
struct Freed<'a> {
    given_up: HashMap<BlockId, u32>,
    blocks: u32,
    /// The requester's shared last block: giving it up frees no block, but saves the copy of it.
    tail: Option<BlockId>,
    /// What the requester has found in the prefix cache, and will hold itself.
    found: &'a [BlockId],
    partial: Option<BlockId>,
    resort: Resort,
}

impl Freed<'_> {
    /// Adds a victim; returns what is freed then.
    fn add(&mut self, scheduler: &Scheduler, victim: Index) -> u32 {
        for &block in scheduler.blocks_of(victim) {
            *self.given_up.entry(block).or_default() += 1;
        }
        self.blocks += self.freed_by(scheduler, victim);
        self.blocks
    }

    fn remove(&mut self, scheduler: &Scheduler, victim: Index) {
        self.blocks -= self.freed_by(scheduler, victim);
        for block in scheduler.blocks_of(victim) {
            self.given_up.entry(*block).and_modify(|given_up| *given_up -= 1);
        }
    }

    /// Blocks of a victim that nobody would hold any more, and that anybody may take.
    fn freed_by(&self, scheduler: &Scheduler, victim: Index) -> u32 {
        let is_freed = |&(entry, &block): &(usize, &BlockId)| {
            let holders = scheduler.cache.ref_count(block) - u32::from(self.tail == Some(block));
            // Who holds the same history holds it at the same entry.
            let is_found = self.found.get(entry) == Some(&block) || self.partial == Some(block);
            self.given_up.get(&block) == Some(&holders)
                && !is_found
                && (self.tail == Some(block) || !scheduler.cache.is_pinned(block))
                && (self.resort == Resort::Last || !scheduler.cache.is_retained(block))
        };
        scheduler.blocks_of(victim).iter().enumerate().filter(is_freed).count() as u32
    }
}
