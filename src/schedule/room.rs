//! Room (I9): whose blocks and tables are taken when none are free.
//!
//! Kept sequences are idle content: their blocks are taken first, least recently finished first. Under overcommitted
//! admission, sequences in line and then running ones that come after the requester follow, the last first, unless they
//! are in this step already or protected. Victims are taken only when together they free enough, and none is taken that
//! is not needed for it. A sequence for which no room can be made waits in place: whoever comes before it goes on, and
//! frees blocks in the end.

use crate::ids::BlockId;
use crate::schedule::request::Admission;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::State;
use std::collections::HashMap;

impl Scheduler {
    /// Frees blocks until `needed` are available to `index`, the copy of its shared last block included: those of idle
    /// sequences, and of running ones if it may `preempt`. All or nothing; returns whether they are available.
    pub(super) fn make_room(&mut self, index: Index, needed: u32, preempt: bool) -> bool {
        let missing = self.missing_to(index, needed);
        if missing == 0 {
            return true;
        }
        let Some(victims) = self.victims_for(index, missing, preempt) else { return false };
        for victim in victims {
            self.evict(victim);
        }
        true
    }

    /// Sequences that free `missing` blocks for `index` together.
    fn victims_for(&self, index: Index, missing: u32, preempt: bool) -> Option<Vec<Index>> {
        let place = self.get(index).place();
        let mut candidates: Vec<Index> =
            self.kept.iter().copied().filter(|&kept| self.get(kept).table.is_some()).collect();
        // A turn or branch that waits in line holds blocks as a kept sequence does; under guarantee they are promised.
        let waiting = self.waiting.iter().rev().copied();
        candidates.extend(waiting.filter(|&other| {
            let other = self.get(other);
            other.place() > place && other.table.is_some() && !other.promised
        }));
        if preempt && self.config.admission != Admission::Guaranteed {
            let running = self.running.iter().rev().copied();
            candidates.extend(running.filter(|&other| {
                let other = self.get(other);
                other.place() > place && other.planned_rows == 0 && !other.protected && other.table.is_some()
            }));
        }
        // A copy is saved when all others give the requester's last block up.
        let tail = self.get(index).table.and_then(|table| self.cache.shared_tail_block(table));
        let tail = tail.filter(|&block| !self.cache.is_pinned(block));
        let at_most: u32 = candidates.iter().map(|&other| self.table_blocks(self.get(other)) + 1).sum();
        if at_most < missing {
            return None;
        }
        let mut freed = Freed::default();
        let enough = candidates.iter().position(|&victim| freed.add(self, victim, tail) >= missing)?;
        candidates.truncate(enough + 1);
        // Those that free nothing, or less than what is freed beyond need, are spared.
        for place in (0..enough).rev() {
            let spared = freed.freed_by(self, candidates[place], tail);
            if freed.blocks - spared >= missing {
                freed.remove(self, candidates[place], tail);
                candidates.remove(place);
            }
        }
        Some(candidates)
    }

    fn blocks_of(&self, index: Index) -> &[BlockId] {
        self.get(index).table.and_then(|table| self.cache.block_ids(table).ok()).unwrap_or_default()
    }

    /// Takes a sequence's blocks; a running one goes back into the queue.
    fn evict(&mut self, index: Index) {
        self.release_table(index);
        let sequence = self.get_mut(index);
        if sequence.state != State::Running {
            self.stats.reclaimed += 1;
            return;
        }
        sequence.preemptions += 1;
        self.stats.preemptions += 1;
        self.requeue(index);
    }

    /// Takes idle sequences' tables, `parent`'s apart, until all that `index` and its samples need can be opened. All or
    /// nothing; returns whether they can.
    pub(super) fn ensure_tables(&mut self, index: Index, parent: Option<Index>) -> bool {
        let missing = self.tables_missing_to(index);
        if missing == 0 {
            return true;
        }
        let waiting = self.waiting.iter().rev().filter(|_| parent.is_none());
        let idle = self.kept.iter().chain(waiting).copied().filter(|&other| {
            let sequence = self.get(other);
            other != index && Some(other) != parent && sequence.table.is_some() && !sequence.promised
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
            self.evict(victim);
        }
        true
    }

    /// Tables that must become free before `index` and its samples can open theirs, beside those set aside: for samples
    /// that have not parted, and for branches that share when the outstanding step has ended.
    fn tables_missing_to(&self, index: Index) -> u32 {
        let set_aside = |other: Index| {
            let sequence = self.get(other);
            match (sequence.table, sequence.fork) {
                _ if other == index => 0,
                (Some(_), _) => sequence.width() - 1,
                (None, Some(_)) => sequence.width(),
                (None, None) => 0,
            }
        };
        let others: u32 = self.running.iter().chain(&self.waiting).map(|&other| set_aside(other)).sum();
        let sequence = self.get(index);
        let own = u32::from(sequence.table.is_some());
        (sequence.width() + others).saturating_sub(self.cache.free_tables() + own)
    }
}

/// Blocks that victims free together.
#[derive(Default)]
struct Freed {
    given_up: HashMap<BlockId, u32>,
    blocks: u32,
}

impl Freed {
    /// Adds a victim; returns what is freed then. Giving up `tail` frees no block, but saves the copy of it.
    fn add(&mut self, scheduler: &Scheduler, victim: Index, tail: Option<BlockId>) -> u32 {
        for &block in scheduler.blocks_of(victim) {
            *self.given_up.entry(block).or_default() += 1;
        }
        self.blocks += self.freed_by(scheduler, victim, tail);
        self.blocks
    }

    fn remove(&mut self, scheduler: &Scheduler, victim: Index, tail: Option<BlockId>) {
        self.blocks -= self.freed_by(scheduler, victim, tail);
        for block in scheduler.blocks_of(victim) {
            self.given_up.entry(*block).and_modify(|given_up| *given_up -= 1);
        }
    }

    /// Blocks of a victim that nobody would hold any more.
    fn freed_by(&self, scheduler: &Scheduler, victim: Index, tail: Option<BlockId>) -> u32 {
        let is_freed = |block: BlockId| {
            let holders = scheduler.cache.ref_count(block) - u32::from(tail == Some(block));
            self.given_up.get(&block) == Some(&holders) && !scheduler.cache.is_pinned(block)
        };
        scheduler.blocks_of(victim).iter().filter(|&&block| is_freed(block)).count() as u32
    }
}
