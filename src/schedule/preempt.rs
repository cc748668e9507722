//! Preemption: how a sequence loses its blocks, and how it gets them back.
//!
//! Either a victim is swapped out, and the outstanding step moves its blocks to the host pool; or its blocks are given
//! up, and its tokens computed again. `residency` chooses. In the queue it keeps its place. A step that is dropped
//! takes what it moved with it: then the tokens are computed again.

use crate::ids::{SequenceId, TableId};
use crate::schedule::blocks;
use crate::schedule::request::{Preemption, PreemptionReason, PrefixReport, Rates, StepEvent};
use crate::schedule::residency::Cost;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Sequence, State};
use crate::schedule::step_plan::TransferReport;

impl Scheduler {
    /// How fast the machine is, for [`PreemptionMode::Auto`](crate::PreemptionMode::Auto). Rates that are not positive count
    /// as not known.
    pub fn set_rates(&mut self, rates: Rates) {
        self.residency.set_rates(rates);
    }

    /// Takes note of transfers that the device part is done with (`PagedAttention::poll_transfers`): blocks that have
    /// arrived can come back, and slots that were read are free. What did not arrive is computed again. Reports of
    /// dropped steps, and repeated ones, are ignored; any order will do.
    pub fn complete_transfers(&mut self, reports: &[TransferReport]) {
        for report in reports {
            self.cache.complete_transfers(report.step, report.complete);
        }
        if reports.iter().any(|report| !report.complete) {
            self.sequences.lose(&self.cache);
        }
        if !reports.is_empty() {
            self.ledger.note_given_up();
        }
    }

    /// A sequence whose blocks did not come back although its step was committed is computed again.
    pub(super) fn restart_broken(&mut self, table: TableId) {
        let has_it = |&(_, sequence): &(Index, &Sequence)| sequence.table() == Some(table);
        let Some((index, _)) = self.sequences.all().find(has_it) else { return };
        self.restart(index);
        if self.sequences[index].state() == State::Running {
            self.requeue(index);
        }
    }

    /// Takes a sequence's blocks as part of the outstanding step, except those that `requester` holds, too; a running one
    /// goes back into the queue.
    pub(super) fn evict(&mut self, index: Index, requester: Option<Index>) {
        let running = self.sequences[index].state() == State::Running;
        let spared = requester.and_then(|requester| self.sequences[requester].table());
        let (how, why) = self.give_up_blocks(index, spared);
        if !running {
            self.stats.reclaimed += 1;
            return;
        }
        self.sequences.note_preemption(index);
        let sequence = self.sequences[index].id();
        self.stats.preemptions += 1;
        self.events.push(StepEvent::Preempted { sequence, how, why });
        self.requeue(index);
    }

    fn give_up_blocks(&mut self, index: Index, spared: Option<TableId>) -> (Preemption, PreemptionReason) {
        let (swap, why) = self.prefers_swap(index, spared);
        if let Some(table) = self.sequences[index].table().filter(|_| swap) {
            if let Ok(blocks) = self.cache.swap_out(table, spared) {
                self.ledger.note_given_up();
                self.stats.swaps_out += 1;
                return (Preemption::Swapped { blocks }, why);
            }
        }
        let tokens = self.sequences[index].computed();
        self.restart(index);
        (Preemption::Dropped { tokens }, why)
    }

    /// Moves what a victim held together with other victims to where its other blocks are.
    pub(super) fn evict_rest(&mut self, index: Index, requester: Index) {
        let spared = self.sequences[requester].table();
        let sequence = &self.sequences[index];
        let table = sequence.table();
        match table.filter(|_| blocks::returning(&self.cache, table) > 0) {
            Some(table) if self.cache.swap_out(table, spared).is_ok() => {}
            _ => self.restart(index),
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
        if self.sequences[index].state() == State::Running {
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
        let (config, sequence) = (self.cache.config(), &self.sequences[index]);
        let blocks = sequence.table().map_or(0, |table| self.cache.swappable_blocks(table, spared));
        let shared = || blocks::tokens_staying(&self.cache, sequence.table(), blocks);
        Cost {
            blocks,
            block_bytes: config.bytes_per_block(),
            computed: sequence.computed(),
            findable: self.cache.has_prefix_cache().then(shared),
            steps_in_transfer: self.cache.num_transfers(),
        }
    }

    /// Gives up a sequence's `blocks` blocks in the host pool if, as the machine and the prefix cache are now, its tokens are
    /// better computed again.
    pub(super) fn reconsider_return(&mut self, index: Index, blocks: u32) {
        if blocks == 0 || !self.residency.reconsiders() {
            return;
        }
        let found = self.num_found(index);
        let computed = self.sequences[index].computed();
        let tokens = computed.saturating_sub(found);
        let block_bytes = self.cache.config().bytes_per_block();
        if self.residency.prefers_return(blocks, block_bytes, tokens) {
            self.residency.note_found_again(computed - tokens, computed);
        } else {
            self.restart(index);
        }
    }

    /// Idle sequences give up their blocks in the host pool, least recently finished first, if that makes room.
    fn make_host_room(&mut self, needed: u32, victim: Index) {
        let on_host = |other: Index| blocks::returning(&self.cache, self.sequences[other].table());
        let idle = self.sequences.kept().filter(|&other| other != victim && on_host(other) > 0);
        let candidates: Vec<Index> = idle.collect();
        let most: u32 = candidates.iter().map(|&other| on_host(other)).sum();
        let free = self.cache.free_host_blocks();
        if free >= needed || free + most < needed {
            return;
        }
        for other in candidates {
            if self.cache.free_host_blocks() >= needed {
                return;
            }
            self.restart(other);
        }
    }

    /// Preempts sequences of lower classes for `first`, the first in line, if it cannot be let in otherwise and that lets it in.
    /// Returns whether it did: then this step lets in no other (I9).
    pub(super) fn displace(&mut self, first: Index) -> bool {
        if !self.is_overcommitted() || !self.sequences.runs_below(first) {
            return false;
        }
        let sequence = &self.sequences[first];
        let (priority, place) = (sequence.priority(), sequence.place());
        if sequence.table().is_some_and(|table| !self.cache.can_return(table)) {
            return false;
        }
        let is_lower = |scheduler: &Self, other: Index| {
            let other = &scheduler.sequences[other];
            other.priority() > priority && other.place() > place && !other.is_protected()
        };
        let excess = |scheduler: &Self| {
            scheduler.sequences.num_running_with(first).saturating_sub(scheduler.max_running)
        };
        let lower = self.sequences.running().iter().copied().filter(|&other| is_lower(self, other));
        let most: u32 = lower.map(|other| self.sequences[other].width()).sum();
        if most == 0 || most < excess(self) {
            return false;
        }
        self.match_prefix(first);
        let needed = self.blocks_to_enter(first);
        let fits = self.missing_to(first, needed) == 0 || self.can_reclaim(first, needed);
        let lets_in = self.computes_prompt_of(first).is_none() && (fits || self.displace_for(first, needed));
        self.matched.forget();
        let mut displaced = lets_in && !fits;
        while lets_in && excess(self) > 0 {
            let last = self.sequences.running().iter().rev().copied().find(|&other| is_lower(self, other));
            let Some(last) = last else { break };
            self.evict(last, Some(first));
            displaced = true;
        }
        displaced
    }

    /// Which of a sequence's tokens the prefix cache had when it was last let in, and why not the others.
    pub fn prefix_report(&self, sequence: impl Into<SequenceId>) -> Option<PrefixReport> {
        let index = self.sequences.find(sequence.into())?;
        Some(self.sequences[index].prefix)
    }
}
