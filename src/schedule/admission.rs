//! The queue's door: who is let in, and when.
//!
//! In order of place: whoever is first in line goes first or keeps the others waiting. There are three exceptions.
//! Whoever waits for blocks that another sequence is computing lets others pass. Whoever is promised its blocks already
//! (a branch, a chat's next turn) does not wait for those that are not: it takes nothing from them. And for progress,
//! when nothing runs and the first one cannot be let in, whoever in line already has blocks goes.

use crate::error::RequestError;
use crate::schedule::preempt::MAX_STEPS_IN_TRANSFER;
use crate::schedule::request::Admission;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Place, Sequence, State};

/// What keeps a sequence outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lacking {
    Blocks {
        needed: u32,
        available: u32,
    },
    /// A block table, or a place among those that run.
    Table,
    /// Its blocks have not arrived in the host pool.
    Transfers,
    /// Another sequence is computing what it needs.
    Twin,
}

/// A refusal that stands until blocks return.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    place: Place,
    releases: u64,
    lacking: Lacking,
}

impl Scheduler {
    /// Lets in the first in line, or whoever may go instead. Returns who, or what the first one lacks.
    pub(super) fn admit_next(&mut self) -> Result<Index, Lacking> {
        let admitted = self.admit_first();
        self.matched.index = None;
        admitted
    }

    fn admit_first(&mut self) -> Result<Index, Lacking> {
        let (mut position, mut lacking) = (0, Lacking::Twin);
        while let Some(&index) = self.waiting.get(position) {
            match self.try_admit(index) {
                Ok(()) => return Ok(index),
                Err(Lacking::Twin) => position += 1,
                Err(other) => {
                    lacking = other;
                    break;
                }
            }
        }
        if self.running.is_empty() || !self.is_overcommitted() {
            let has_blocks = |other| self.running.is_empty() && self.get(other).table.is_some();
            let entitled = |&other: &Index| self.get(other).promised || has_blocks(other);
            let refused = self.waiting.get(position).map(|&index| self.get(index).place());
            let behind = |&other: &Index| refused.is_some_and(|refused| self.get(other).place() > refused);
            let others: Vec<Index> = self.claimants.iter().copied().filter(behind).filter(entitled).collect();
            for other in others {
                match self.try_admit(other) {
                    Ok(()) => return Ok(other),
                    // It will go when its blocks have arrived.
                    Err(Lacking::Transfers) => lacking = Lacking::Transfers,
                    Err(_) => {}
                }
            }
        }
        Err(lacking)
    }

    fn try_admit(&mut self, index: Index) -> Result<(), Lacking> {
        let running: u32 = self.running.iter().map(|&other| self.get(other).width()).sum();
        if running + self.get(index).width() > self.max_running() {
            return Err(Lacking::Table);
        }
        let table = self.get(index).table;
        let returns = table.is_some_and(|table| self.cache.host_blocks_of(table).unwrap_or(0) > 0);
        let busy = returns && self.cache.num_transfers() >= MAX_STEPS_IN_TRANSFER;
        if busy || table.is_some_and(|table| !self.cache.can_return(table)) {
            return Err(Lacking::Transfers);
        }
        self.reconsider_return(index);
        let table = self.get(index).table;
        self.match_prefix(index);
        let evictions = self.cache.num_evictions();
        if self.waits_for_twin(index) {
            return Err(Lacking::Twin);
        }
        match self.config.admission {
            Admission::Guaranteed => self.admit_promised(index)?,
            Admission::Overcommitted { .. } => self.admit_fitting(index)?,
        }
        if self.cache.num_evictions() != evictions {
            // What made room may have been among what was found. It is free now, so the sum is the same.
            self.match_prefix(index);
        }
        let max_tokens = self.get(index).max_tokens;
        if table.is_none() {
            let table = self.cache.create(max_tokens).map_err(|_| Lacking::Table)?;
            self.get_mut(index).table = Some(table);
            self.adopt_prefix(index);
        }
        if let Some(table) = table.filter(|&table| self.cache.host_blocks_of(table).unwrap_or(0) > 0) {
            self.cache.swap_in(table).map_err(|_| Lacking::Transfers)?;
            self.stats.swaps_in += 1;
        }
        self.let_in(index, max_tokens);
        Ok(())
    }

    fn let_in(&mut self, index: Index, max_tokens: u32) {
        match self.waiting.front() {
            Some(&first) if first == index => drop(self.waiting.pop_front()),
            _ => self.waiting.retain(|&other| other != index),
        }
        self.claimants.retain(|&other| other != index);
        let blocks = self.cache.config().layout().blocks_for(max_tokens) as usize;
        let sequence = self.get_mut(index);
        // Growing to the declared maximum reallocates nothing.
        sequence.tokens.reserve((max_tokens as usize).saturating_sub(sequence.tokens.len()));
        sequence.hashes.reserve(blocks.saturating_sub(sequence.hashes.len()));
        sequence.state = State::Running;
        self.enter_running(index);
        self.tell_admitted(index);
    }

    fn admit_promised(&mut self, index: Index) -> Result<(), Lacking> {
        if !self.get(index).promised {
            self.promise(index)?;
        }
        // Idle content gives way to blocks that come back.
        let returning = self.blocks_returning(index);
        let may_return = returning == 0 || self.make_room(index, returning, false);
        if self.ensure_tables(index, None) && may_return { Ok(()) } else { Err(Lacking::Table) }
    }

    fn promise(&mut self, index: Index) -> Result<(), Lacking> {
        let place = self.get(index).place();
        // What promised sequences hold and need does not shrink until one of them gives something up.
        match self.refusal {
            Some(refusal) if refusal.place == place && refusal.releases == self.releases => {
                return Err(refusal.lacking);
            }
            _ => self.refusal = None,
        }
        self.get_mut(index).promised = true;
        loop {
            let lacking = match self.check_promise() {
                Ok(()) if self.ensure_tables(index, None) => {
                    self.note_claims(index);
                    return Ok(());
                }
                Err(RequestError::PromiseExceeded { needed, available }) => {
                    // Alone, a request is stopped by nothing but its own size.
                    if self.is_alone(index) && self.give_up_pinned_content() {
                        self.match_prefix(index);
                        continue;
                    }
                    let own = self.whole_need(self.get(index));
                    let available = (available + own).saturating_sub(needed);
                    let lacking = Lacking::Blocks { needed: own, available };
                    self.refusal = Some(Refusal { place, releases: self.releases, lacking });
                    lacking
                }
                _ => Lacking::Table,
            };
            self.get_mut(index).promised = false;
            return Err(lacking);
        }
    }

    /// Whether nobody runs, and nobody else is promised anything.
    fn is_alone(&self, index: Index) -> bool {
        let promised = |&other: &Index| other != index && self.get(other).promised;
        self.running.is_empty() && !self.claimants.iter().any(promised)
    }

    fn admit_fitting(&mut self, index: Index) -> Result<(), Lacking> {
        if !self.ensure_tables(index, None) {
            return Err(Lacking::Table);
        }
        loop {
            let needed = self.blocks_to_enter(index);
            let evictions = self.cache.num_evictions();
            if !self.make_room(index, needed, false) {
                if self.matched.found.partial.take().is_some() {
                    // Without the copy of a block that matches in part, it may fit.
                    continue;
                }
                return Err(Lacking::Blocks { needed, available: self.available_to(index) });
            }
            if self.cache.num_evictions() == evictions {
                break;
            }
            // What made room may have been among what was found.
            self.match_prefix(index);
        }
        if self.is_at_bound(index) {
            self.protect(index);
        }
        Ok(())
    }

    /// Blocks that must be available before `index` is let in: its own, those that it finds in the prefix cache or brings
    /// back from the host pool, what others were let in for and do not have yet, and the watermark.
    pub(super) fn blocks_to_enter(&self, index: Index) -> u32 {
        let Admission::Overcommitted { watermark_blocks } = self.config.admission else { return 0 };
        let layout = *self.cache.config().layout();
        let sequence = self.get(index);
        let copy = u32::from(sequence.table.and_then(|table| self.cache.shared_tail_block(table)).is_some());
        let target = if self.is_at_bound(index) { sequence.max_tokens } else { sequence.len() };
        let found = self.found_for(index);
        let taken = found.map_or(0, |found| self.cache.blocks_taken_by(found));
        // A block that matches in part is taken, and copied.
        let adopted = found.map_or(0, |found| found.blocks.len() as u32);
        let own = layout.blocks_for(target).saturating_sub(self.table_blocks(sequence) + adopted);
        // Prompts that are being read still need blocks that they were let in for. Those of lower classes step back.
        let steps_back =
            |other: &Sequence| other.priority > sequence.priority && other.place() > sequence.place();
        let owed: u32 = self
            .running
            .iter()
            .map(|&other| self.get(other))
            .filter(|other| !other.protected && !steps_back(other))
            .map(|other| layout.blocks_for(other.len()).saturating_sub(self.table_blocks(other)))
            .sum();
        let watermark = if self.running.is_empty() { 0 } else { watermark_blocks };
        (own + taken + copy).saturating_add(owed).saturating_add(watermark)
    }

    /// Blocks of a sequence in the host pool.
    pub(super) fn blocks_returning(&self, index: Index) -> u32 {
        self.get(index).table.map_or(0, |table| self.cache.host_blocks_of(table).unwrap_or(0))
    }

    /// Whether a sequence may not be preempted any more (I9).
    pub(super) fn is_at_bound(&self, index: Index) -> bool {
        let bound = if fault!(PreemptedWithoutBound) { u32::MAX } else { self.config.max_preemptions };
        self.is_overcommitted() && self.get(index).preemptions >= bound
    }
}
