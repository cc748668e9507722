//! Who may have blocks: promises, room made by reclaiming and preempting, and the queue's door.
//!
//! # Promise (I8)
//! Under guaranteed admission, the blocks that promised sequences hold (each counted once), plus what each may still
//! need up to its declared maximum, plus the copies of shared last blocks, never exceed the pool. A last block with `k`
//! holders of which `w` are promised needs `min(w, k - 1)` copies: the last holder writes in place.
//!
//! # Room (I9)
//! Kept sequences are idle content: their blocks are taken first, least recently finished first. Under overcommitted
//! admission running sequences that arrived after the requester follow, the latest first, unless they are in this step
//! already or protected. Victims are taken only when together they free enough. A sequence for which no room can be made
//! waits in place: whoever arrived before it goes on, and frees blocks in the end.

use crate::error::RequestError;
use crate::ids::BlockId;
use crate::schedule::request::Admission;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Sequence, State};
use std::collections::{HashMap, HashSet};

impl Scheduler {
    /// Blocks that promised sequences hold and may still need.
    pub(super) fn promised_blocks(&self) -> u32 {
        let mut held: HashSet<BlockId> = HashSet::new();
        let mut tails: HashMap<BlockId, u32> = HashMap::new();
        let mut remaining = 0;
        for sequence in self.records.iter().flatten().filter(|sequence| sequence.promised) {
            remaining += self.remaining_blocks(sequence);
            let Some(table) = sequence.table else { continue };
            held.extend(self.cache.block_ids(table).unwrap_or_default());
            if let Some(block) = self.cache.shared_tail_block(table) {
                *tails.entry(block).or_default() += 1;
            }
        }
        let copies: u32 =
            tails.iter().map(|(&block, &writers)| writers.min(self.cache.ref_count(block) - 1)).sum();
        held.len() as u32 + remaining + copies
    }

    /// Blocks that a sequence may still take until its declared maximum, all its samples counted.
    fn remaining_blocks(&self, sequence: &Sequence) -> u32 {
        let layout = self.cache.config().layout();
        let most = layout.blocks_for(sequence.max_tokens);
        if let Some(fork) = sequence.fork {
            // Not shared yet: its own blocks, and a copy of the last shared one if it is partly filled.
            return sequence.width() * (most - fork.at / layout.block_size);
        }
        let held =
            sequence.table.and_then(|table| self.cache.block_ids(table).ok()).map_or(0, <[_]>::len) as u32;
        if sequence.width() == 1 {
            return most.saturating_sub(held);
        }
        // Samples will share the full blocks of the input and nothing else.
        let full = sequence.input_len / layout.block_size;
        (full + sequence.width() * (most - full)).saturating_sub(held)
    }

    /// Fails when the promises exceed the pool.
    pub(super) fn check_promise(&self) -> Result<(), RequestError> {
        let promised = self.promised_blocks();
        let available = self.cache.config().num_blocks();
        if promised > available {
            return Err(RequestError::PromiseExceeded { needed: promised, available });
        }
        Ok(())
    }

    /// Blocks that protected sequences may still need and nobody else may take.
    fn reserved_blocks(&self) -> u32 {
        self.running
            .iter()
            .map(|&index| self.get(index))
            .filter(|sequence| sequence.protected)
            .map(|sequence| {
                let copy = sequence.table.and_then(|table| self.cache.shared_tail_block(table)).is_some();
                self.remaining_blocks(sequence) + u32::from(copy)
            })
            .sum()
    }

    /// Free blocks that `index` may take.
    pub(super) fn available_to(&self, index: Index) -> u32 {
        let free = self.cache.free_blocks();
        if self.get(index).protected || self.num_protected == 0 {
            free
        } else {
            free.saturating_sub(self.reserved_blocks())
        }
    }

    /// Frees blocks until `needed` are available to `index`: those of idle sequences, and of running ones if it may
    /// `preempt`. All or nothing; returns whether they are available.
    pub(super) fn make_room(&mut self, index: Index, needed: u32, preempt: bool) -> bool {
        let arrival = self.get(index).arrival;
        let mut victims: Vec<Index> =
            self.kept.iter().copied().filter(|&kept| self.get(kept).table.is_some()).collect();
        // A turn or branch that waits in line holds blocks as a kept sequence does; under guarantee they are promised.
        let waiting = self.waiting.iter().rev().copied();
        victims.extend(waiting.filter(|&other| {
            let other = self.get(other);
            other.arrival > arrival && other.table.is_some() && !other.promised
        }));
        if preempt && self.config.admission != Admission::Guaranteed {
            let running = self.running.iter().rev().copied();
            victims.extend(running.filter(|&other| {
                let other = self.get(other);
                other.arrival > arrival
                    && other.planned_rows == 0
                    && !other.protected
                    && other.table.is_some()
            }));
        }
        let missing = needed.saturating_sub(self.available_to(index));
        let Some(enough) = self.victims_needed(&victims, missing) else { return false };
        for &victim in &victims[..enough] {
            self.evict(victim);
        }
        true
    }

    /// How many of `victims`, in order, free `missing` blocks together.
    fn victims_needed(&self, victims: &[Index], missing: u32) -> Option<usize> {
        let mut holders: HashMap<BlockId, u32> = HashMap::new();
        let mut freed = 0;
        for (taken, &victim) in victims.iter().enumerate() {
            if freed >= missing {
                return Some(taken);
            }
            let Some(table) = self.get(victim).table else { continue };
            for &block in self.cache.block_ids(table).unwrap_or_default() {
                let given_up = holders.entry(block).or_default();
                *given_up += 1;
                freed += u32::from(*given_up == self.cache.ref_count(block) && !self.cache.is_pinned(block));
            }
        }
        (freed >= missing).then_some(victims.len())
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

    /// Lets the first request in line in, or says what it lacks: blocks needed and available.
    pub(super) fn try_admit(&mut self, index: Index) -> Result<(), Option<(u32, u32)>> {
        let width = self.get(index).width();
        let running: u32 = self.running.iter().map(|&other| self.get(other).width()).sum();
        if running + width > self.max_running() || !self.ensure_tables(index, width) {
            return Err(None);
        }
        match self.config.admission {
            Admission::Guaranteed => self.admit_promised(index)?,
            Admission::Overcommitted { watermark_blocks } => self.admit_fitting(index, watermark_blocks)?,
        }
        if self.get(index).table.is_none() {
            let max_tokens = self.get(index).max_tokens;
            let table = self.cache.create(max_tokens).map_err(|_| None)?;
            self.get_mut(index).table = Some(table);
        }
        let arrival = self.get(index).arrival;
        self.get_mut(index).state = State::Running;
        self.waiting.retain(|&other| other != index);
        let place = self.running.partition_point(|&other| self.get(other).arrival < arrival);
        self.running.insert(place, index);
        Ok(())
    }

    fn admit_promised(&mut self, index: Index) -> Result<(), Option<(u32, u32)>> {
        if !self.get(index).promised {
            self.get_mut(index).promised = true;
            if let Err(RequestError::PromiseExceeded { needed, available }) = self.check_promise() {
                self.get_mut(index).promised = false;
                let own = self.remaining_blocks(self.get(index));
                return Err(Some((own, (available + own).saturating_sub(needed))));
            }
        }
        Ok(())
    }

    fn admit_fitting(&mut self, index: Index, watermark_blocks: u32) -> Result<(), Option<(u32, u32)>> {
        let layout = *self.cache.config().layout();
        let sequence = self.get(index);
        let at_bound = sequence.preemptions >= self.config.max_preemptions;
        let held =
            sequence.table.and_then(|table| self.cache.block_ids(table).ok()).map_or(0, <[_]>::len) as u32;
        let copy = u32::from(sequence.table.and_then(|table| self.cache.shared_tail_block(table)).is_some());
        let target = if at_bound { sequence.max_tokens } else { sequence.len() };
        let own = layout.blocks_for(target).saturating_sub(held) + copy;
        // Prompts that are being read still need blocks that they were let in for.
        let owed: u32 = self
            .running
            .iter()
            .map(|&other| self.get(other))
            .filter(|other| !other.protected)
            .map(|other| {
                let held =
                    other.table.and_then(|table| self.cache.block_ids(table).ok()).map_or(0, <[_]>::len);
                layout.blocks_for(other.len()).saturating_sub(held as u32)
            })
            .sum();
        let watermark = if self.running.is_empty() { 0 } else { watermark_blocks };
        let needed = own + owed + watermark;
        if !self.make_room(index, needed, false) {
            return Err(Some((needed, self.available_to(index))));
        }
        if at_bound {
            self.get_mut(index).protected = true;
            self.num_protected += 1;
        }
        Ok(())
    }

    /// Gives up idle sequences' tables until `width` can be opened; returns whether they can.
    fn ensure_tables(&mut self, index: Index, width: u32) -> bool {
        let reserved: u32 = self.running.iter().map(|&other| self.get(other).width() - 1).sum();
        loop {
            let own = u32::from(self.get(index).table.is_some());
            if self.cache.free_tables() + own >= width + reserved {
                return true;
            }
            let idle = self.kept.iter().chain(self.waiting.iter().rev()).copied().find(|&other| {
                let sequence = self.get(other);
                other != index && sequence.table.is_some() && !sequence.promised
            });
            match idle {
                Some(victim) => self.evict(victim),
                None => return false,
            }
        }
    }
}
