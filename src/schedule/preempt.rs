//! Preemption: how a sequence loses its blocks, and how it gets them back.
//!
//! A victim is swapped out, its blocks moved to the host pool by the outstanding step, or its blocks are given up and its
//! tokens computed again. In the queue it keeps its place. A step that is dropped takes what it moved with it: then the
//! tokens are computed again.

use crate::ids::{SequenceId, TableId};
use crate::schedule::blocks;
use crate::schedule::request::{
    Preemption, PreemptionMode, PreemptionReason, PrefixReport, Rates, StepEvent,
};
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::State;
use crate::schedule::step_plan::TransferReport;

/// Steps whose transfers may be under way at a time. More means that nobody collects them, and the device part keeps
/// staging memory for each.
pub(super) const MAX_STEPS_IN_TRANSFER: usize = 4;

/// How much of what victims had computed the prefix cache still had when they came back, lately.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FoundAgain {
    found: u64,
    wanted: u64,
}

impl FoundAgain {
    /// Tokens after which what was seen before counts half.
    const MEMORY: u64 = 1 << 16;

    pub(super) fn note(&mut self, found: u32, wanted: u32) {
        self.found += u64::from(found.min(wanted));
        self.wanted += u64::from(wanted);
        if self.wanted > Self::MEMORY {
            (self.found, self.wanted) = (self.found / 2, self.wanted / 2);
        }
    }

    /// From 0 to 1; 0 where nothing is known.
    fn rate(self) -> f64 {
        self.found as f64 / self.wanted.max(1) as f64
    }
}

impl Scheduler {
    /// How fast the machine is, for [`PreemptionMode::Auto`]. Rates that are not positive count as not known.
    pub fn set_rates(&mut self, rates: Rates) {
        let known = rates.swap_bytes_per_s > 0.0 && rates.prefill_tokens_per_s > 0.0;
        self.rates = known.then_some(rates);
    }

    /// Takes note of transfers that the device part is done with (`PagedAttention::poll_transfers`): blocks that have
    /// arrived can come back, and slots that were read are free. What did not arrive is computed again. Reports of dropped steps, and
    /// repeated ones, are ignored; any order will do.
    pub fn complete_transfers(&mut self, reports: &[TransferReport]) {
        for report in reports {
            self.cache.complete_transfers(report.step, report.complete);
        }
        if reports.iter().any(|report| !report.complete) {
            self.count_losses();
        }
        if !reports.is_empty() {
            self.ledger.note_given_up();
        }
    }

    /// Sequences whose blocks in the host pool are lost have as much computed as their table still holds.
    pub(super) fn count_losses(&mut self) {
        for sequence in self.records.iter_mut().flatten() {
            if let Some(table) = sequence.table.filter(|_| sequence.planned_rows == 0) {
                let len = self.cache.len(table).unwrap_or(0);
                sequence.computed = sequence.computed.min(len);
                sequence.confirmed = sequence.confirmed.min(len);
            }
        }
    }

    /// Sequences whose blocks did not come back although their step was committed are computed again.
    pub(super) fn restart_broken(&mut self) {
        while let Some(table) = self.cache.take_broken_table() {
            let Some(index) = self.record_of(table) else { continue };
            self.release_table(index);
            if self.get(index).state == State::Running {
                self.requeue(index);
            }
        }
    }

    fn record_of(&self, table: TableId) -> Option<Index> {
        self.records
            .iter()
            .position(|record| record.as_ref().is_some_and(|record| record.table == Some(table)))
    }

    /// Takes a sequence's blocks as part of the outstanding step, those apart that `requester` holds, too; a running one
    /// goes back into the queue.
    pub(super) fn evict(&mut self, index: Index, requester: Option<Index>) {
        let running = self.get(index).state == State::Running;
        let spared = requester.and_then(|requester| self.get(requester).table);
        let (how, why) = self.give_up_blocks(index, spared);
        if !running {
            self.stats.reclaimed += 1;
            return;
        }
        let sequence = self.get_mut(index);
        sequence.preemptions += 1;
        let sequence = sequence.id;
        self.stats.preemptions += 1;
        self.events.push(StepEvent::Preempted { sequence, how, why });
        self.requeue(index);
    }

    fn give_up_blocks(&mut self, index: Index, spared: Option<TableId>) -> (Preemption, PreemptionReason) {
        let (swap, why) = self.prefers_swap(index, spared);
        if let Some(table) = self.get(index).table.filter(|_| swap) {
            if let Ok(blocks) = self.cache.swap_out(table, spared) {
                self.ledger.note_given_up();
                self.stats.swaps_out += 1;
                return (Preemption::Swapped { blocks }, why);
            }
        }
        let tokens = self.get(index).computed;
        self.release_table(index);
        (Preemption::Dropped { tokens }, why)
    }

    /// Moves what a victim held together with other victims to where its other blocks are.
    pub(super) fn evict_rest(&mut self, index: Index, requester: Index) {
        let spared = self.get(requester).table;
        match self.get(index).table.filter(|&table| self.cache.host_blocks_of(table).unwrap_or(0) > 0) {
            Some(table) if self.cache.swap_out(table, spared).is_ok() => {}
            _ => self.release_table(index),
        }
    }

    /// Whether a victim is swapped out, and why or why not.
    fn prefers_swap(&mut self, index: Index, spared: Option<TableId>) -> (bool, PreemptionReason) {
        let mode = self.config.preemption;
        if mode == PreemptionMode::Recompute {
            return (false, PreemptionReason::Configured);
        }
        let Some(table) = self.get(index).table else { return (false, PreemptionReason::NothingToMove) };
        let needed = self.cache.swappable_blocks(table, spared);
        if needed == 0 {
            return (false, PreemptionReason::NothingToMove);
        }
        let steps = self.cache.num_transfers();
        if steps >= MAX_STEPS_IN_TRANSFER {
            return (false, PreemptionReason::TransfersPending { steps });
        }
        let why = match (mode, self.rates) {
            (PreemptionMode::Auto, Some(rates)) => self.compare(index, needed, rates),
            (PreemptionMode::Auto, None) => PreemptionReason::NoRates,
            _ => PreemptionReason::Configured,
        };
        if matches!(why, PreemptionReason::Rates { swap_s, recompute_s } if recompute_s < swap_s) {
            return (false, why);
        }
        if self.get(index).state == State::Running {
            self.make_host_room(needed, index);
        }
        let available = self.cache.free_host_blocks();
        if needed > available {
            return (false, PreemptionReason::HostPoolFull { needed, available });
        }
        (true, why)
    }

    /// Seconds that a victim costs either way.
    fn compare(&self, index: Index, moved: u32, rates: Rates) -> PreemptionReason {
        let config = self.cache.config();
        let bytes = 2.0 * f64::from(moved) * config.bytes_per_block() as f64;
        let computed = self.get(index).computed;
        // What stays shared need not be computed again where it can be found, nor what is found again as a rule.
        let found = if self.cache.has_prefix_cache() {
            let shared = blocks::tokens_staying(&self.cache, self.get(index), moved);
            shared.max((f64::from(computed) * self.found_again.rate()) as u32)
        } else {
            0
        };
        PreemptionReason::Rates {
            swap_s: bytes / rates.swap_bytes_per_s,
            recompute_s: f64::from(computed.saturating_sub(found)) / rates.prefill_tokens_per_s,
        }
    }

    /// Gives up a sequence's blocks in the host pool if, as the machine and the prefix cache are now, its tokens are
    /// better computed again.
    pub(super) fn reconsider_return(&mut self, index: Index) {
        let blocks = blocks::returning(&self.cache, self.get(index));
        let (PreemptionMode::Auto, Some(rates), true) = (self.config.preemption, self.rates, blocks > 0)
        else {
            return;
        };
        let Some(sequence) = self.records[index].as_mut() else { return };
        self.cache.extend_hashes(&sequence.namespace, &sequence.tokens, &mut sequence.hashes);
        let found = &mut self.matched.found;
        self.cache.find_match(&sequence.namespace, &sequence.tokens, &sequence.hashes, found);
        let tokens = sequence.computed.saturating_sub(found.num_tokens);
        let bytes = f64::from(blocks) * self.cache.config().bytes_per_block() as f64;
        if bytes / rates.swap_bytes_per_s > f64::from(tokens) / rates.prefill_tokens_per_s {
            self.release_table(index);
        } else {
            let computed = self.get(index).computed;
            self.found_again.note(computed - tokens, computed);
        }
    }

    /// Idle sequences give up their blocks in the host pool, least recently finished first, if that makes room.
    fn make_host_room(&mut self, needed: u32, victim: Index) {
        let idle = |scheduler: &Self| {
            let on_host = |&&other: &&Index| {
                other != victim && blocks::returning(&scheduler.cache, scheduler.get(other)) > 0
            };
            scheduler.kept.values().filter(on_host).copied().collect::<Vec<Index>>()
        };
        let candidates = idle(self);
        let most: u32 = candidates.iter().map(|&other| blocks::returning(&self.cache, self.get(other))).sum();
        if self.cache.free_host_blocks() >= needed || self.cache.free_host_blocks() + most < needed {
            return;
        }
        for other in candidates {
            if self.cache.free_host_blocks() >= needed {
                return;
            }
            self.release_table(other);
        }
    }

    /// Preempts sequences of lower classes for the first in line, if it cannot be let in otherwise and that lets it in.
    /// Returns whether it did: then this step lets in nobody else (I9).
    pub(super) fn displace(&mut self) -> bool {
        let Some(first) = self.line.first() else { return false };
        let (priority, place) = (self.get(first).priority, self.get(first).place());
        let is_lower = |scheduler: &Self, other: Index| {
            let other = scheduler.get(other);
            other.priority > priority && other.place() > place && !other.protected
        };
        if !self.is_overcommitted() || !self.running.iter().any(|&other| is_lower(self, other)) {
            return false;
        }
        let table = self.get(first).table;
        if table.is_some_and(|table| !self.cache.can_return(table)) {
            return false;
        }
        let excess = |scheduler: &Self| {
            (scheduler.sums.running + scheduler.get(first).width()).saturating_sub(scheduler.max_running())
        };
        let lower = self.running.iter().copied().filter(|&other| is_lower(self, other));
        if lower.map(|other| self.get(other).width()).sum::<u32>() < excess(self) {
            return false;
        }
        self.match_prefix(first);
        let needed = self.blocks_to_enter(first);
        let fits = self.missing_to(first, needed) == 0 || self.can_reclaim(first, needed);
        let lets_in = self.computes_prompt_of(first).is_none() && (fits || self.displace_for(first, needed));
        self.matched.index = None;
        let mut displaced = lets_in && !fits;
        while lets_in && excess(self) > 0 {
            let last = self.running.iter().rev().copied().find(|&other| is_lower(self, other));
            let Some(last) = last else { break };
            self.evict(last, Some(first));
            displaced = true;
        }
        displaced
    }

    /// Which of a sequence's tokens the prefix cache had when it was last let in, and why not the others.
    pub fn prefix_report(&self, sequence: impl Into<SequenceId>) -> Option<PrefixReport> {
        let index = *self.by_id.get(&sequence.into())?;
        Some(self.get(index).prefix)
    }
}
