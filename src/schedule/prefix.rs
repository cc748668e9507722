//! The prefix cache as requests see it: what a sequence finds when it is let in, whom it waits for, and what it leaves.
//!
//! A sequence's full blocks are registered when a step of it commits with a valid result: that confirms all its tokens so
//! far. So what an invalid or aborted sequence computed, and nobody has confirmed, is never found by others (I6).

use crate::cache::{MissReason, PrefixMatch};
use crate::schedule::request::{DuplicatePrompts, PrefixReport, StepEvent};
use crate::schedule::scheduler::{Index, Scheduler};

/// What was found for the sequence that is at the door.
#[derive(Debug, Default)]
pub(super) struct Matched {
    pub(super) index: Option<Index>,
    pub(super) found: PrefixMatch,
}

impl Scheduler {
    /// Looks a sequence without a table up in the prefix cache. Changes nothing else.
    pub(super) fn match_prefix(&mut self, index: Index) {
        self.matched.found.clear();
        self.matched.index = Some(index);
        let Some(sequence) = self.records[index].as_mut() else { return };
        if sequence.table.is_some() || sequence.fork.is_some() {
            self.matched.index = None;
            return;
        }
        self.cache.extend_hashes(&sequence.namespace, &sequence.tokens, &mut sequence.hashes);
        let found = &mut self.matched.found;
        self.cache.find_match(&sequence.namespace, &sequence.tokens, &sequence.hashes, found);
    }

    /// What was found for `index`, if it is the one at the door.
    pub(super) fn found_for(&self, index: Index) -> Option<&PrefixMatch> {
        (self.matched.index == Some(index)).then_some(&self.matched.found)
    }

    /// The running sequence that is computing what `index` would compute next, and will be done with it sooner.
    pub(super) fn computes_prompt_of(&self, index: Index) -> Option<Index> {
        let waits =
            self.config.prefix_cache.is_some_and(|config| config.duplicates == DuplicatePrompts::Wait);
        let found = self.found_for(index).filter(|_| waits)?;
        let sequence = self.get(index);
        let next = found.num_nodes() as usize;
        let hash = sequence.hashes.get(next)?;
        let block_size = self.cache.node_tokens() as usize;
        self.running.iter().copied().find(|&other| {
            let other = self.get(other);
            let comes = other.hashes.get(next) == Some(hash)
                && other.namespace == sequence.namespace
                && !other.aborting
                && (other.confirmed as usize) < (next + 1) * block_size;
            if !comes {
                return false;
            }
            let common = other.tokens.iter().zip(&sequence.tokens).take_while(|(a, b)| a == b).count();
            let gained = (common / block_size).saturating_sub(next) * block_size;
            gained > 0 && (other.uncomputed() as usize) < 2 * gained
        })
    }

    /// Gives a sequence's new table what was found for it.
    pub(super) fn adopt_prefix(&mut self, index: Index) {
        if self.matched.index.take() != Some(index) {
            return;
        }
        let Some(sequence) = self.records[index].as_mut() else { return };
        let Some(table) = sequence.table else { return };
        let found = &self.matched.found;
        let cached = self.cache.adopt(table, found);
        let wanted = sequence.len() - 1;
        let report = PrefixReport { cached_tokens: cached, wanted_tokens: wanted, miss: found.miss };
        sequence.computed = cached;
        sequence.confirmed = cached;
        let again = sequence.was_let_in;
        if sequence.preemptions > 0 {
            self.residency.note_found_again(cached, sequence.high_water);
        }
        sequence.high_water = sequence.high_water.max(cached);
        sequence.adopted_nodes = found.num_nodes();
        sequence.prefix = report;
        let retain = &sequence.retain;
        if !retain.is_empty() {
            self.cache.keep_nodes(table, sequence.adopted_nodes, retain);
        }
        if again {
            // What a sequence has computed itself, and finds when it comes back, is no hit.
            self.stats.prefix_refound_tokens += u64::from(cached);
            return;
        }
        self.stats.prefix_hit_tokens += u64::from(cached);
        self.stats.prefix_wanted_tokens += u64::from(wanted);
        match report.miss {
            MissReason::Unseen => self.stats.prefix_misses.unseen += 1,
            MissReason::Evicted => self.stats.prefix_misses.evicted += 1,
            MissReason::Expired => self.stats.prefix_misses.expired += 1,
            MissReason::None | MissReason::Disabled => {}
        }
    }

    pub(super) fn tell_admitted(&mut self, index: Index) {
        let sequence = self.get(index);
        let event = StepEvent::Admitted { sequence: sequence.id, prefix: sequence.prefix };
        self.events.push(event);
    }

    /// Lets others find a sequence's full blocks, as far as they are confirmed.
    pub(super) fn register_blocks(&mut self, index: Index) {
        let block_size = self.cache.node_tokens();
        let Some(sequence) = self.records[index].as_mut() else { return };
        let Some(table) = sequence.table else { return };
        let full = sequence.confirmed / block_size;
        let registered = self.cache.registered_nodes(table);
        if !self.cache.has_prefix_cache() || registered >= full {
            return;
        }
        let tokens = &sequence.tokens[..(full * block_size) as usize];
        self.cache.extend_hashes(&sequence.namespace, tokens, &mut sequence.hashes);
        self.cache.register(table, &sequence.namespace, tokens, &sequence.hashes, &sequence.retain);
        if (registered + 1) * block_size <= sequence.input_len
            && self.cache.registered_nodes(table) > registered
        {
            // Those that were refused may find an equal prompt now.
            self.ledger.note_given_up();
            self.wake_those_behind(index);
        }
    }

    /// Nobody finds what an invalid sequence computed, nor what continues it.
    pub(super) fn forget_blocks(&mut self, index: Index) {
        let sequence = self.get(index);
        if let Some(table) = sequence.table {
            let adopted = sequence.adopted_nodes;
            let forgotten = self.cache.forget_prefix(table, adopted);
            debug_assert!(forgotten.is_ok(), "a live table is forgotten: {forgotten:?}");
        }
    }
}
