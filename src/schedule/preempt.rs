//! Preemption: how a sequence loses its blocks, and how it gets them back.
//!
//! As `residency` says, a victim is swapped out, its blocks moved to the host pool by the outstanding step, or its blocks are given up and its
//! tokens computed again. In the queue it keeps its place. A step that is dropped takes what it moved with it: then the
//! tokens are computed again.

use crate::ids::{SequenceId, TableId};
use crate::schedule::blocks;
use crate::schedule::request::{Preemption, PreemptionReason, PrefixReport, Rates, StepEvent};
use crate::schedule::residency::Cost;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::State;
use crate::schedule::step_plan::TransferReport;

impl Scheduler {
    /// How fast the machine is, for [`PreemptionMode::Auto`]. Rates that are not positive count as not known.
    pub fn set_rates(&mut self, rates: Rates) {
        self.residency.set_rates(rates);
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
        if !self.residency.may_swap() {
            return (false, PreemptionReason::Configured);
        }
        let cost = self.cost_of(index, spared);
        let (swap, why) = self.residency.prefers_swap(&cost);
        if !swap {
            return (false, why);
        }
        let needed = cost.blocks;
        if self.get(index).state == State::Running {
            self.make_host_room(needed, index);
        }
        let available = self.cache.free_host_blocks();
        if needed > available {
            return (false, PreemptionReason::HostPoolFull { needed, available });
        }
        (true, why)
    }

    /// What a victim costs, moved or computed again.
    fn cost_of(&self, index: Index, spared: Option<TableId>) -> Cost {
        let (config, sequence) = (self.cache.config(), self.get(index));
        let blocks = sequence.table.map_or(0, |table| self.cache.swappable_blocks(table, spared));
        let shared = || blocks::tokens_staying(&self.cache, sequence, blocks);
        Cost {
            blocks,
            block_bytes: config.bytes_per_block(),
            computed: sequence.computed,
            findable: self.cache.has_prefix_cache().then(shared),
            steps_in_transfer: self.cache.num_transfers(),
        }
    }

    /// Gives up a sequence's blocks in the host pool if, as the machine and the prefix cache are now, its tokens are
    /// better computed again.
    pub(super) fn reconsider_return(&mut self, index: Index) {
        let blocks = blocks::returning(&self.cache, self.get(index));
        if blocks == 0 || !self.residency.reconsiders() {
            return;
        }
        let Some(sequence) = self.records[index].as_mut() else { return };
        self.cache.extend_hashes(&sequence.namespace, &sequence.tokens, &mut sequence.hashes);
        let found = &mut self.matched.found;
        self.cache.find_match(&sequence.namespace, &sequence.tokens, &sequence.hashes, found);
        let tokens = sequence.computed.saturating_sub(found.num_tokens);
        let block_bytes = self.cache.config().bytes_per_block();
        if self.residency.prefers_return(blocks, block_bytes, tokens) {
            let computed = self.get(index).computed;
            self.residency.note_found_again(computed - tokens, computed);
        } else {
            self.release_table(index);
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
    /// Returns for whom: then this step lets in nobody else (I9).
    pub(super) fn displace(&mut self) -> Option<Index> {
        let first = self.line.first()?;
        self.displace_for_first(first).then_some(first)
    }

    fn displace_for_first(&mut self, first: Index) -> bool {
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
