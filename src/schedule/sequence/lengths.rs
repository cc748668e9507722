//! How far a sequence is computed, and what holds it: beside `results`, for steps that are committed, the only writer of
//! lengths, tables and rows in the step.

use crate::cache::{KvCache, PrefixMatch};
use crate::ids::{TableId, TokenId};
use crate::schedule::admission::Lacking;
use crate::schedule::request::PrefixReport;
use crate::schedule::scheduler::Index;
use crate::schedule::sequence::{Sequence, Sequences, State};

impl Sequence {
    /// No more than `len` tokens count as computed.
    pub(super) fn take_back(&mut self, len: u32) {
        self.computed = self.computed.min(len);
        self.confirmed = self.confirmed.min(self.computed);
    }
}

impl Sequences {
    // The table.

    /// A sequence has a table, of which it has computed nothing yet. Returns whether the blocks in it are promised.
    pub(in crate::schedule) fn set_table(&mut self, index: Index, table: TableId, cache: &KvCache) -> bool {
        let record = self.record(index);
        record.table = Some(table);
        let promised = record.promise.is_some();
        self.recount(index, cache);
        promised
    }

    /// A sequence in line has a new table, which begins with what the prefix cache had of it, so many nodes; it is counted
    /// when it is let in. Returns whether the blocks in it are promised.
    pub(in crate::schedule) fn open(
        &mut self,
        index: Index,
        table: TableId,
        found: Option<(PrefixReport, u32)>,
    ) -> bool {
        let record = self.record(index);
        record.table = Some(table);
        if let Some((prefix, nodes)) = found {
            let cached = prefix.cached_tokens;
            (record.computed, record.confirmed) = (cached, cached);
            record.high_water = record.high_water.max(cached);
            (record.prefix, record.adopted_nodes) = (prefix, nodes);
        }
        record.promise.is_some()
    }

    /// Its new table shares the first `len` tokens of another sequence's, which has computed them; of those, what is
    /// confirmed stays so.
    pub(in crate::schedule) fn share(&mut self, index: Index, len: u32) {
        let record = self.record(index);
        record.computed = len;
        record.confirmed = record.confirmed.min(len);
        record.high_water = len;
    }

    /// Its new table is like that of the sequence that it has parted from.
    pub(in crate::schedule) fn share_all(&mut self, index: Index, len: u32) {
        let record = self.record(index);
        (record.computed, record.confirmed) = (len, len);
    }

    /// Nothing of a sequence is computed any more. Returns the table that it had, which is to be released.
    pub(in crate::schedule) fn restart(&mut self, index: Index, cache: &KvCache) -> Option<TableId> {
        let record = self.record(index);
        (record.computed, record.confirmed) = (0, 0);
        let table = record.table.take();
        if table.is_some() {
            self.recount(index, cache);
        }
        table
    }

    /// Sequences whose blocks in the host pool are lost have as much computed as their table still holds.
    pub(in crate::schedule) fn lose(&mut self, cache: &KvCache) {
        for record in self.records() {
            if let Some(table) = record.table.filter(|_| record.planned_rows == 0) {
                let len = cache.len(table).unwrap_or(0);
                record.computed = record.computed.min(len);
                record.confirmed = record.confirmed.min(len);
            }
        }
    }

    // The outstanding step.

    /// A sequence has rows in the plan, and its table has grown for them; now it `has_all` that its tokens take, or is
    /// counted.
    pub(in crate::schedule) fn plan(
        &mut self,
        index: Index,
        (rows, logits): (u32, u32),
        has_all: bool,
        cache: &KvCache,
    ) {
        let record = self.record(index);
        (record.planned_rows, record.planned_logits, record.lacking) = (rows, logits, None);
        match has_all {
            true => self.owes_nothing(index),
            false => self.recount(index, cache),
        }
    }

    /// The plan was dropped, and its table is as before.
    pub(in crate::schedule) fn unplan(&mut self, index: Index, cache: &KvCache) {
        let record = self.record(index);
        (record.planned_rows, record.planned_logits) = (0, 0);
        self.recount(index, cache);
    }

    /// What the prefix cache has of a sequence.
    pub(in crate::schedule) fn look_up(&mut self, index: Index, cache: &KvCache, found: &mut PrefixMatch) {
        let Sequence { terms, tokens, hashes, .. } = self.record(index);
        cache.extend_hashes(&terms.namespace, tokens, hashes);
        cache.find_match(&terms.namespace, tokens, hashes, found);
    }

    pub(in crate::schedule) fn note_lacking(&mut self, index: Index, lacking: Option<Lacking>) {
        self.record(index).lacking = lacking;
    }

    // What is asked of it between steps.

    pub(in crate::schedule) fn propose(&mut self, index: Index, drafts: &[TokenId]) {
        let record = self.record(index);
        record.drafts.clear();
        record.drafts.extend_from_slice(drafts);
    }

    /// Sets to which length a sequence is to be cut, if at all: now, or when the outstanding step ends. Returns whether it
    /// is then.
    pub(in crate::schedule) fn set_cut(&mut self, index: Index, len: Option<u32>) -> bool {
        let record = self.record(index);
        record.truncating = len;
        len.is_some() && record.planned_rows > 0
    }

    /// Makes the cut that was asked for, if one was.
    pub(in crate::schedule) fn make_cut(&mut self, index: Index, node_tokens: u32) -> bool {
        let record = self.record(index);
        let Some(len) = record.truncating.take() else { return false };
        record.tokens.truncate(len as usize);
        record.terms.input_len = record.terms.input_len.min(len);
        record.high_water = record.high_water.min(len);
        record.drafts.clear();
        if let Some(fork) = &mut record.fork {
            fork.at = fork.at.min(len - 1);
        }
        // A running sequence computes its last token again, to choose the next one.
        record.take_back(if record.state == State::Kept { len } else { len - 1 });
        record.hashes.truncate((len / node_tokens) as usize);
        true
    }

    /// Sets what a kept sequence's next turn would begin with, and grow to. Returns what the last one did.
    pub(in crate::schedule) fn set_turn(
        &mut self,
        index: Index,
        (input_len, max_tokens): (u32, u32),
    ) -> (u32, u32) {
        let terms = &mut self.record(index).terms;
        let old = (terms.input_len, terms.max_tokens);
        (terms.input_len, terms.max_tokens) = (input_len, max_tokens);
        old
    }

    /// A branch that shares nothing has nothing confirmed.
    pub(in crate::schedule) fn forget_parent(&mut self, index: Index) {
        self.record(index).confirmed = 0;
    }

    // Promise and protection.

    /// Returns the promise that there was before.
    pub(in crate::schedule) fn set_promise(&mut self, index: Index, blocks: Option<u64>) -> Option<u64> {
        std::mem::replace(&mut self.record(index).promise, blocks)
    }

    /// Returns whether that has changed.
    pub(in crate::schedule) fn set_protected(
        &mut self,
        index: Index,
        protected: bool,
        cache: &KvCache,
    ) -> bool {
        let record = self.record(index);
        let changed = std::mem::replace(&mut record.protected, protected) != protected;
        if changed {
            self.recount(index, cache);
        }
        changed
    }

    pub(in crate::schedule) fn note_preemption(&mut self, index: Index) {
        self.record(index).preemptions += 1;
    }
}
