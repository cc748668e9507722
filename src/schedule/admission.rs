//! The queue's door: who is let in, and when.
//!
//! In order of place: the first in line goes first, or keeps the others waiting. There are four exceptions. A sequence
//! that begins like a prompt which another one is computing stands behind that one, and lets others pass. A sequence that
//! is promised its blocks already (a branch, a chat's next turn) does not wait for those that are not: it takes nothing
//! from them. For progress, when nothing runs and the first one cannot be let in, a sequence in line that already has
//! blocks goes. And where the first one lacks blocks, requests behind it that fit pass it, if they are of its own class
//! or a higher one, and a bounded number of times: it waits for their end at most, and for nothing that comes later.

use crate::error::RequestError;
use crate::ids::TableId;
use crate::schedule::blocks;
use crate::schedule::request::{Admission, StepEvent};
use crate::schedule::residency::MAX_STEPS_IN_TRANSFER;
use crate::schedule::scheduler::{Index, Scheduler};

/// Most sequences at the head of the line that a step has stand behind others: to look at one takes as long as its prompt.
const MOST_SENT_BEHIND: usize = 64;

/// Most sequences behind the first in line that a step asks whether they fit.
const MOST_ASKED_TO_PASS: usize = 16;

/// What keeps a sequence outside, or without rows.
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
    /// This running sequence is computing what it needs.
    Prompt(Index),
    /// What is left of the step's rows or work.
    Budget,
}

impl Scheduler {
    /// Lets in the `first` in line, or a sequence that may go instead. Where others were preempted for one, that one
    /// alone, though a sequence that stood behind a victim may have come before it since. Returns which, or what the
    /// first one lacks.
    pub(super) fn admit_next(
        &mut self,
        first: Index,
        preempted_for: Option<Index>,
    ) -> Result<Index, Lacking> {
        if let Some(index) = preempted_for.filter(|&index| index != first) {
            let asked = self.ask(index).map(|()| index);
            if asked.is_ok() || !self.sequences.running().is_empty() {
                return asked;
            }
        }
        let only_first = preempted_for.is_some();
        let (mut first, mut num_sent) = (first, 0);
        let mut lacking = loop {
            match self.ask(first) {
                Ok(()) => return Ok(first),
                // Others were preempted for it, and it stands behind one that runs now that they are gone: none goes.
                Err(Lacking::Prompt(other)) if only_first => return Err(Lacking::Prompt(other)),
                Err(Lacking::Prompt(other)) => {
                    num_sent += 1;
                    let next = self.sequences.first_in_line().filter(|_| num_sent < MOST_SENT_BEHIND);
                    first = next.ok_or(Lacking::Prompt(other))?;
                }
                Err(lacking) => break lacking,
            }
        };
        let nobody_runs = self.sequences.running().is_empty();
        if nobody_runs || !self.is_overcommitted() {
            let entitled = |&other: &Index| {
                let other = &self.sequences[other];
                other.is_promised() || (nobody_runs && other.table().is_some())
            };
            let behind = self.sequences.line().claimants_after(self.sequences[first].place());
            let others: Vec<Index> = behind.filter(entitled).collect();
            for other in others {
                match self.ask(other) {
                    Ok(()) => return Ok(other),
                    // It will go when its blocks have arrived.
                    Err(Lacking::Transfers) => lacking = Lacking::Transfers,
                    Err(_) => {}
                }
            }
        }
        let passing = if only_first { None } else { self.admit_passing(first, lacking) };
        passing.ok_or(lacking)
    }

    /// Lets a request in that comes after the first in line and fits, if that one lacks blocks and may still be passed.
    fn admit_passing(&mut self, first: Index, lacking: Lacking) -> Option<Index> {
        let sequence = &self.sequences[first];
        if !matches!(lacking, Lacking::Blocks { .. }) || sequence.passed >= self.config.max_passed {
            return None;
        }
        let (priority, place) = (sequence.priority(), sequence.place());
        let mut asked = [0; MOST_ASKED_TO_PASS];
        let mut num_asked = 0;
        for (slot, index) in asked.iter_mut().zip(self.sequences.line().after(place)) {
            *slot = index;
            num_asked += 1;
        }
        for &index in &asked[..num_asked] {
            if self.sequences[index].priority() <= priority && self.ask(index).is_ok() {
                self.sequences.note_passed(first);
                return Some(index);
            }
        }
        None
    }

    /// Lets a sequence in, or notes what it lacks.
    fn ask(&mut self, index: Index) -> Result<(), Lacking> {
        let asked = self.try_admit(index);
        if let Err(lacking) = asked {
            self.sequences.note_lacking(index, Some(lacking));
        }
        if let Err(Lacking::Prompt(other)) = asked {
            self.sequences.stand_behind(index, other);
        }
        asked
    }

    fn try_admit(&mut self, index: Index) -> Result<(), Lacking> {
        if self.sequences.num_running_with(index) > self.max_running {
            return Err(Lacking::Table);
        }
        let table = match self.sequences[index].table() {
            Some(table) => self.check_return(index, table)?,
            None => None,
        };
        self.match_prefix(index);
        let evictions = self.cache.num_evictions();
        if let Some(other) = self.computes_prompt_of(index) {
            return Err(Lacking::Prompt(other));
        }
        match self.config.admission {
            Admission::Guaranteed => self.admit_promised(index)?,
            Admission::Overcommitted { .. } => self.admit_fitting(index)?,
        }
        if self.cache.num_evictions() != evictions {
            // What made room may have been among what was found. It is free now, so the sum is the same.
            self.match_prefix(index);
        }
        let table = match table {
            None => self.open_table(index)?,
            Some(table) => {
                if blocks::returning(&self.cache, Some(table)) > 0 {
                    self.cache.swap_in(table).map_err(|_| Lacking::Transfers)?;
                    self.stats.swaps_in += 1;
                }
                table
            }
        };
        let sequence = self.sequences.let_in(index, &self.cache);
        self.cache.expect_hits_at(table, sequence.terms.input_len);
        self.events.push(StepEvent::Admitted { sequence: sequence.id(), prefix: sequence.prefix });
        Ok(())
    }

    /// Whether the table of a sequence in line, which may be in the host pool, can come back. Returns none where the
    /// sequence is better computed again, and has given it up.
    fn check_return(&mut self, index: Index, table: TableId) -> Result<Option<TableId>, Lacking> {
        let returning = blocks::returning(&self.cache, Some(table));
        let busy = returning > 0 && self.cache.num_transfers() >= MAX_STEPS_IN_TRANSFER;
        if busy || !self.cache.can_return(table) {
            return Err(Lacking::Transfers);
        }
        self.reconsider_return(index, returning);
        Ok(self.sequences[index].table())
    }

    fn admit_promised(&mut self, index: Index) -> Result<(), Lacking> {
        if !self.sequences[index].is_promised() {
            self.promise(index)?;
        }
        // Idle content gives way to blocks that come back.
        let returning = blocks::returning(&self.cache, self.sequences[index].table());
        let may_return = returning == 0 || self.make_room(index, returning, false);
        if self.ensure_tables(index, None) && may_return { Ok(()) } else { Err(Lacking::Table) }
    }

    fn promise(&mut self, index: Index) -> Result<(), Lacking> {
        self.set_promised(index, true);
        loop {
            let evictions = self.cache.num_evictions();
            let lacking = match self.promises().check(None) {
                Ok(()) if self.ensure_tables(index, None) => {
                    if self.cache.num_evictions() != evictions {
                        // A window's block may have gone, and with it the hit that shares what others are promised.
                        self.match_prefix(index);
                        continue;
                    }
                    self.sequences.note_claims(index);
                    return Ok(());
                }
                Err(RequestError::PromiseExceeded { needed, available }) => {
                    // Alone, a request is stopped by nothing but its own size.
                    if self.is_alone(index) && self.give_up_pinned_content() {
                        self.match_prefix(index);
                        continue;
                    }
                    let own = blocks::whole_need(&self.cache, &self.sequences[index]);
                    let available = (available + own).saturating_sub(needed);
                    Lacking::Blocks { needed: own, available }
                }
                _ => Lacking::Table,
            };
            self.set_promised(index, false);
            return Err(lacking);
        }
    }

    /// Whether nothing runs, and nothing else is promised.
    fn is_alone(&self, index: Index) -> bool {
        let promised = |other: Index| other != index && self.sequences[other].is_promised();
        self.sequences.running().is_empty() && !self.sequences.line().claimants().any(promised)
    }

    fn admit_fitting(&mut self, index: Index) -> Result<(), Lacking> {
        if !self.ensure_tables(index, None) {
            return Err(Lacking::Table);
        }
        loop {
            let needed = self.blocks_to_enter(index);
            let evictions = self.cache.num_evictions();
            if !self.make_room(index, needed, false) {
                if self.matched.drop_partial(&self.cache) {
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
            self.set_protected(index, true);
        }
        Ok(())
    }

    /// Blocks that must be available before `index` is let in: its own, those that it finds in the prefix cache or brings
    /// back from the host pool, what others were let in for and do not have yet, and the watermark.
    pub(super) fn blocks_to_enter(&self, index: Index) -> u32 {
        let Admission::Overcommitted { watermark_blocks } = self.config.admission else { return 0 };
        let sequence = &self.sequences[index];
        let (copies, held) = match sequence.table() {
            None => (0, 0),
            table => {
                (blocks::shared_tails(&self.cache, table).count() as u32, blocks::held(&self.cache, table))
            }
        };
        let target = if self.is_at_bound(index) { sequence.terms.max_tokens } else { sequence.len() };
        let found = self.matched.found_for(index);
        let taken = found.map_or(0, |found| self.cache.blocks_taken_by(found));
        // A block that matches in part is taken, and copied.
        let adopted = found.map_or(0, |found| found.num_full_blocks());
        let returning = blocks::returning(&self.cache, sequence.table());
        let own = self.cache.blocks_to_read(target).saturating_sub(held + adopted).max(returning);
        // Prompts that are being read still need blocks that they were let in for.
        let owed = self.sequences.owed_beside(index);
        let watermark = if self.sequences.running().is_empty() { 0 } else { watermark_blocks };
        (own + taken + copies).saturating_add(owed).saturating_add(watermark)
    }

    /// Whether a sequence may not be preempted any more (I9).
    pub(super) fn is_at_bound(&self, index: Index) -> bool {
        let bound = if fault!(PreemptedWithoutBound) { u32::MAX } else { self.config.max_preemptions };
        self.config.admission != Admission::Guaranteed && self.sequences[index].preemptions >= bound
    }
}
