//! The prefix cache as requests see it: what a sequence finds when it is let in, whom it waits for, and what is forgotten.
//!
//! A sequence's full blocks are registered when a step of it commits with a valid result (`sequence/results.rs`): that
//! confirms all its tokens so far. So what an invalid or aborted sequence computed, and no result has confirmed, is never
//! found by others (I6).

use crate::cache::{KvCache, PrefixMatch};
use crate::ids::TableId;
use crate::schedule::admission::Lacking;
use crate::schedule::request::{DuplicatePrompts, PrefixReport};
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::Sequences;

/// What the prefix cache has for the sequence that is at the door.
#[derive(Debug, Default)]
pub(super) struct Matched {
    index: Option<Index>,
    found: PrefixMatch,
}

impl Matched {
    /// No sequence is at the door.
    pub(super) fn forget(&mut self) {
        self.index = None;
    }

    /// What was found for `index`, if it is the one at the door.
    pub(super) fn found_for(&self, index: Index) -> Option<&PrefixMatch> {
        (self.index == Some(index)).then_some(&self.found)
    }

    /// The same for the one that is there, if that sequence is promised its blocks and has none yet.
    pub(super) fn found_for_promised(&self, sequences: &Sequences) -> Option<&PrefixMatch> {
        let sequence = &sequences[self.index?];
        let counts = sequence.is_promised() && sequence.table().is_none() && sequence.fork().is_none();
        counts.then_some(&self.found)
    }

    /// Gives up a block that matches in part. Returns whether there was any.
    pub(super) fn drop_partial(&mut self, cache: &KvCache) -> bool {
        cache.drop_partial(&mut self.found)
    }
}

impl Scheduler {
    /// Looks a sequence without a table up in the prefix cache. Changes nothing else.
    pub(super) fn match_prefix(&mut self, index: Index) {
        if self.sequences[index].has_blocks() {
            return self.matched.forget();
        }
        self.matched.index = Some(index);
        self.sequences.look_up(index, &self.cache, &mut self.matched.found);
    }

    /// How many tokens of a sequence the prefix cache has.
    pub(super) fn num_found(&mut self, index: Index) -> u32 {
        self.sequences.look_up(index, &self.cache, &mut self.matched.found);
        self.matched.found.num_tokens
    }

    /// The running sequence that is computing what `index` would compute next, and will be done with it sooner.
    pub(super) fn computes_prompt_of(&self, index: Index) -> Option<Index> {
        let waits =
            self.config.prefix_cache.is_some_and(|config| config.duplicates == DuplicatePrompts::Wait);
        if !waits || self.sequences.running().is_empty() {
            return None;
        }
        let found = self.matched.found_for(index)?;
        let sequence = &self.sequences[index];
        let next = found.num_nodes() as usize;
        let hash = sequence.hashes().get(next)?;
        let node_tokens = self.cache.node_tokens() as usize;
        self.sequences.running().iter().copied().find(|&other| {
            let other = &self.sequences[other];
            let comes = other.hashes().get(next) == Some(hash)
                && other.terms.namespace == sequence.terms.namespace
                && !other.is_aborting()
                && (other.confirmed() as usize) < (next + 1) * node_tokens;
            if !comes {
                return false;
            }
            let both = other.tokens().iter().zip(sequence.tokens());
            let common = both.take_while(|(a, b)| a == b).count();
            let gained = (common / node_tokens).saturating_sub(next) * node_tokens;
            gained > 0 && (other.uncomputed() as usize) < 2 * gained
        })
    }

    /// Opens a table for a sequence in line. It begins with what was found, if it is the one at the door.
    pub(super) fn open_table(&mut self, index: Index) -> Result<TableId, Lacking> {
        let sequence = &self.sequences[index];
        let table = self.cache.create(sequence.terms.max_tokens).map_err(|_| Lacking::Table)?;
        let mut adopted = None;
        if self.matched.index.take() == Some(index) {
            let found = &self.matched.found;
            let cached_tokens = self.cache.adopt(table, found);
            let report = PrefixReport { cached_tokens, wanted_tokens: sequence.len() - 1, miss: found.miss };
            let nodes = found.num_nodes();
            if sequence.preemptions > 0 {
                self.residency.note_found_again(cached_tokens, sequence.high_water());
            }
            if !sequence.terms.retain.is_empty() {
                self.cache.keep_nodes(table, nodes, &sequence.terms.retain);
            }
            self.stats.count_found(report, sequence.was_let_in);
            adopted = Some((report, nodes));
        }
        if self.sequences.open(index, table, adopted) {
            self.cache.set_promised(table, true);
            self.note_tail(index);
        }
        Ok(table)
    }

    /// A fault: blocks can be found as soon as they are planned, before anything has computed them.
    pub(super) fn register_planned(&mut self, index: Index, len: u32) {
        let sequence = &self.sequences[index];
        let Some(table) = sequence.table() else { return };
        let (namespace, known) = (&sequence.terms.namespace, &sequence.tokens()[..len as usize]);
        self.cache.register(table, namespace, known, &mut Vec::new(), &[]);
    }

    /// No request finds what an invalid sequence computed, nor what continues it.
    pub(super) fn forget_blocks(&mut self, index: Index) {
        let sequence = &self.sequences[index];
        if let Some(table) = sequence.table() {
            let forgotten = self.cache.forget_prefix(table, sequence.adopted_nodes);
            debug_assert!(forgotten.is_ok(), "a live table is forgotten: {forgotten:?}");
        }
    }
}
