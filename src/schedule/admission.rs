//! The queue's door: who is let in, and when.
//!
//! In order of place: the first in line goes first, or keeps the others waiting. There are four exceptions. A sequence
//! that begins like a prompt which another one is computing stands behind that one, and lets others pass. A sequence that
//! is promised its blocks already (a branch, a chat's next turn) does not wait for those that are not: it takes nothing
//! from them. For progress, when nothing runs and the first one cannot be let in, a sequence in line that already has
//! blocks goes. And where the first one lacks blocks, requests behind it that fit pass it, of its own class or a higher
//! one and only so many: it waits for their end at most, and for nothing that comes later.

use crate::error::RequestError;
use crate::schedule::blocks;
use crate::schedule::request::{Admission, Priority};
use crate::schedule::residency::MAX_STEPS_IN_TRANSFER;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Sequence, State};

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
    /// Lets in the first in line, or a sequence that may go instead; where others were preempted for the first one, none
    /// that merely fits. Returns which, or what the first one lacks.
    pub(super) fn admit_next(&mut self, preempted_for: Option<Index>) -> Result<Index, Lacking> {
        let admitted = match preempted_for.filter(|&index| self.line.first() != Some(index)) {
            // Whoever stood behind a victim may come before it now.
            Some(index) => match self.ask(index) {
                Err(_) if self.running.is_empty() => self.admit_first(true),
                asked => asked.map(|()| index),
            },
            None => self.admit_first(preempted_for.is_some()),
        };
        self.matched.index = None;
        admitted
    }

    fn admit_first(&mut self, only_first: bool) -> Result<Index, Lacking> {
        let mut lacking = Lacking::Table;
        let mut first = None;
        for _ in 0..MOST_SENT_BEHIND {
            let Some(index) = self.line.first() else { break };
            match self.ask(index) {
                Ok(()) => return Ok(index),
                // What others were preempted for stands behind one that runs, now that theirs is gone: nobody else goes.
                Err(Lacking::Prompt(other)) if only_first => return Err(Lacking::Prompt(other)),
                Err(Lacking::Prompt(other)) => lacking = Lacking::Prompt(other),
                Err(other) => {
                    (first, lacking) = (Some(index), other);
                    break;
                }
            }
        }
        let Some(first) = first else { return Err(lacking) };
        if self.running.is_empty() || !self.is_overcommitted() {
            let has_blocks = |other| self.running.is_empty() && self.get(other).table.is_some();
            let entitled = |&other: &Index| self.get(other).is_promised() || has_blocks(other);
            let behind = self.line.claimants_after(self.get(first).place());
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
        let Sequence { passed, priority, .. } = *self.get(first);
        if !matches!(lacking, Lacking::Blocks { .. }) || passed >= self.config.max_passed {
            return None;
        }
        let mut asked = [0; MOST_ASKED_TO_PASS];
        let mut num_asked = 0;
        for (slot, index) in asked.iter_mut().zip(self.line.after(self.get(first).place())) {
            *slot = index;
            num_asked += 1;
        }
        for &index in &asked[..num_asked] {
            if self.get(index).priority <= priority && self.ask(index).is_ok() {
                self.get_mut(first).passed += 1;
                return Some(index);
            }
        }
        None
    }

    /// Lets a sequence in, or notes what it lacks.
    fn ask(&mut self, index: Index) -> Result<(), Lacking> {
        let asked = self.try_admit(index);
        self.get_mut(index).lacking = asked.err();
        // What it is promised may have it asked although it stands behind another one already.
        if let (Err(Lacking::Prompt(other)), None) = (asked, self.get(index).behind) {
            self.get_mut(index).behind = Some(other);
            self.line.stand_behind(self.get(index).place(), other);
        }
        asked
    }

    fn try_admit(&mut self, index: Index) -> Result<(), Lacking> {
        if self.sums.running + self.get(index).width() > self.max_running() {
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
        let max_tokens = self.get(index).max_tokens;
        if table.is_none() {
            let table = self.cache.create(max_tokens).map_err(|_| Lacking::Table)?;
            self.set_table(index, table);
            self.adopt_prefix(index);
            self.note_tail(index);
        }
        if let Some(table) = table.filter(|&table| self.cache.host_blocks_of(table).unwrap_or(0) > 0) {
            self.cache.swap_in(table).map_err(|_| Lacking::Transfers)?;
            self.stats.swaps_in += 1;
        }
        self.let_in(index, max_tokens);
        Ok(())
    }

    fn let_in(&mut self, index: Index, max_tokens: u32) {
        self.leave_queue(index);
        let nodes = self.cache.nodes_of(max_tokens);
        let sequence = self.get_mut(index);
        // Growing to the declared maximum reallocates nothing.
        sequence.tokens.reserve((max_tokens as usize).saturating_sub(sequence.tokens.len()));
        sequence.hashes.reserve(nodes.saturating_sub(sequence.hashes.len()));
        sequence.state = State::Running;
        sequence.lacking = None;
        sequence.was_let_in = true;
        let (table, input_len) = (sequence.table, sequence.input_len);
        if let Some(table) = table {
            self.cache.expect_hits_at(table, input_len);
        }
        self.enter_running(index);
        self.tell_admitted(index);
    }

    fn admit_promised(&mut self, index: Index) -> Result<(), Lacking> {
        if !self.get(index).is_promised() {
            self.promise(index)?;
        }
        // Idle content gives way to blocks that come back.
        let returning = blocks::returning(&self.cache, self.get(index));
        let may_return = returning == 0 || self.make_room(index, returning, false);
        if self.ensure_tables(index, None) && may_return { Ok(()) } else { Err(Lacking::Table) }
    }

    fn promise(&mut self, index: Index) -> Result<(), Lacking> {
        self.set_promised(index, true);
        loop {
            let evictions = self.cache.num_evictions();
            let lacking = match self.check_promise(None) {
                Ok(()) if self.ensure_tables(index, None) => {
                    if self.cache.num_evictions() != evictions {
                        // A window's block may have gone, and with it the hit that shares what others are promised.
                        self.match_prefix(index);
                        continue;
                    }
                    self.line.note_claims(self.get(index).place(), index);
                    return Ok(());
                }
                Err(RequestError::PromiseExceeded { needed, available }) => {
                    // Alone, a request is stopped by nothing but its own size.
                    if self.is_alone(index) && self.give_up_pinned_content() {
                        self.match_prefix(index);
                        continue;
                    }
                    let own = blocks::whole_need(&self.cache, self.get(index), self.most_rows);
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
        let promised = |other: Index| other != index && self.get(other).is_promised();
        self.running.is_empty() && !self.line.claimants().any(promised)
    }

    fn admit_fitting(&mut self, index: Index) -> Result<(), Lacking> {
        if !self.ensure_tables(index, None) {
            return Err(Lacking::Table);
        }
        loop {
            let needed = self.blocks_to_enter(index);
            let evictions = self.cache.num_evictions();
            if !self.make_room(index, needed, false) {
                if self.cache.drop_partial(&mut self.matched.found) {
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
        let sequence = self.get(index);
        let copies = blocks::shared_tails(&self.cache, sequence).count() as u32;
        let target = if self.is_at_bound(index) { sequence.max_tokens } else { sequence.len() };
        let found = self.found_for(index);
        let taken = found.map_or(0, |found| self.cache.blocks_taken_by(found));
        // A block that matches in part is taken, and copied.
        let adopted = found.map_or(0, |found| found.num_full_blocks());
        // A pool that does not hold a prompt's largest steps holds smaller ones.
        let at_most = [self.most_rows, 1].map(|rows| self.cache.most_blocks(target, rows));
        let at_most = if at_most[0] > self.cache.config().num_blocks() { at_most[1] } else { at_most[0] };
        let own = at_most.saturating_sub(blocks::held(&self.cache, sequence) + adopted);
        // Prompts that are being read still need blocks that they were let in for. Those of lower classes step back.
        let steps_back =
            |other: &Sequence| other.priority > sequence.priority && other.place() > sequence.place();
        let own_owed = sequence.counted.map_or(0, |counted| counted.owed);
        let back: u32 = match self.running_below(sequence.priority) {
            0 => 0,
            _ => {
                let running = self.running.iter().map(|&other| self.get(other));
                let back = running.filter(|other| steps_back(other)).filter_map(|other| other.counted);
                back.map(|counted| counted.owed).sum()
            }
        };
        let owed = self.sums.owed - own_owed - back;
        let watermark = if self.running.is_empty() { 0 } else { watermark_blocks };
        (own + taken + copies).saturating_add(owed).saturating_add(watermark)
    }

    /// Running sequences of lower classes.
    fn running_below(&self, priority: Priority) -> u32 {
        self.running_of_class[priority as usize + 1..].iter().sum()
    }

    /// Whether a sequence may not be preempted any more (I9).
    pub(super) fn is_at_bound(&self, index: Index) -> bool {
        let bound = if fault!(PreemptedWithoutBound) { u32::MAX } else { self.config.max_preemptions };
        self.is_overcommitted() && self.get(index).preemptions >= bound
    }
}
