//! The records of sequences, and the queues they stand in.

use crate::error::RequestError;
use crate::ids::{RequestId, SequenceId, TableId, TokenId};
use crate::schedule::blocks;
use crate::schedule::request::{PrefixReport, Priority, Request};
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Counted, Sequence, State};

impl Scheduler {
    pub(super) fn new_request(&mut self) -> RequestId {
        let id = RequestId { scheduler: self.cache.instance(), number: self.next_request };
        self.next_request += 1;
        id
    }

    pub(super) fn arrive(&mut self) -> u64 {
        self.next_arrival += 1;
        self.next_arrival
    }

    /// The step at which a request counts as having arrived.
    pub(super) fn rank(&self, priority: Priority) -> u64 {
        self.stats.steps + u64::from(self.config.ageing_steps) * priority as u64
    }

    pub(super) fn record(
        &mut self,
        id: SequenceId,
        request: Request,
        prefix: Vec<TokenId>,
        max_tokens: u32,
    ) -> Sequence {
        let mut tokens = prefix;
        tokens.extend_from_slice(&request.tokens);
        Sequence {
            id,
            rank: self.rank(request.priority),
            arrival: self.arrive(),
            priority: request.priority,
            namespace: request.namespace,
            retain: request.retain.into(),
            state: State::Waiting,
            input_len: tokens.len() as u32,
            tokens,
            max_tokens,
            to_context_end: request.max_new_tokens.is_none(),
            stop_tokens: request.stop_tokens.into(),
            keep: request.keep,
            pending_samples: (0..request.samples).collect(),
            table: None,
            fork: None,
            computed: 0,
            confirmed: 0,
            hashes: Vec::new(),
            adopted_nodes: 0,
            prefix: PrefixReport::default(),
            high_water: 0,
            drafts: Vec::new(),
            planned_rows: 0,
            planned_logits: 0,
            preemptions: 0,
            protected: false,
            promise: None,
            may_wait: request.may_wait,
            lacking: None,
            behind: None,
            passed: 0,
            was_let_in: false,
            counted: None,
            kept_as: 0,
            aborted_samples: Vec::new(),
            aborting: false,
            truncating: None,
        }
    }

    pub(super) fn insert(&mut self, sequence: Sequence) -> Index {
        let id = sequence.id;
        let index = match self.free_records.pop() {
            Some(index) => {
                self.records[index] = Some(sequence);
                index
            }
            None => {
                self.records.push(Some(sequence));
                self.records.len() - 1
            }
        };
        self.by_id.insert(id, index);
        index
    }

    /// Files a record under another sample's id.
    pub(super) fn rename(&mut self, index: Index, sample: u32) {
        let Sequence { id: old, behind, state, .. } = *self.get(index);
        let in_line = state == State::Waiting;
        if in_line {
            self.line.leave(self.get(index).place(), behind);
        }
        self.by_id.remove(&old);
        let id = old.request().sample(sample);
        self.get_mut(index).id = id;
        self.by_id.insert(id, index);
        if in_line {
            self.get_mut(index).behind = None;
            self.stand_in_line(index);
        }
    }

    fn remove(&mut self, index: Index) -> Option<Sequence> {
        let sequence = self.records[index].take()?;
        self.by_id.remove(&sequence.id);
        self.free_records.push(index);
        Some(sequence)
    }

    /// Ends a record that no step is writing through: out of its queue, its blocks back.
    pub(super) fn drop_record(&mut self, index: Index) {
        self.leave_queue(index);
        if let Some(order) = self.get(index).fork.and_then(|fork| fork.order) {
            self.pending_forks.remove(&order);
        }
        self.ledger.forget_late_cut(index);
        self.unprotect(index);
        self.set_promised(index, false);
        self.release_table(index);
        self.remove(index);
    }

    /// Takes a sequence out of the queue that its state names.
    ///
    /// # Complexity
    /// O(log sequences), and for a running one the memory of the indices behind it.
    pub(super) fn leave_queue(&mut self, index: Index) {
        self.uncount(index);
        let sequence = self.get_mut(index);
        let place = sequence.place();
        match sequence.state {
            State::Waiting => {
                let behind = sequence.behind.take();
                self.line.leave(place, behind);
            }
            State::Running => {
                let position = self.running.partition_point(|&other| self.get(other).place() < place);
                debug_assert_eq!(self.running.get(position), Some(&index), "a running sequence is in order");
                self.running.remove(position);
                self.running_of_class[self.get(index).priority as usize] -= 1;
                self.wake_those_behind(index);
            }
            State::Kept => {
                let kept_as = sequence.kept_as;
                self.kept.remove(&kept_as);
            }
        }
    }

    /// Has sequences that wait for what this one computes be asked again.
    pub(super) fn wake_those_behind(&mut self, index: Index) {
        while let Some(woken) = self.line.wake_one(index) {
            let woken = self.get_mut(woken);
            (woken.behind, woken.lacking) = (None, None);
            self.ledger.note_given_up();
        }
    }

    /// Gives a sequence a table, whose blocks are promised if the sequence is.
    pub(super) fn set_table(&mut self, index: Index, table: TableId) {
        let sequence = self.get_mut(index);
        sequence.table = Some(table);
        let promised = sequence.is_promised();
        self.cache.set_promised(table, promised);
        self.note_tail(index);
        self.recount(index);
    }

    pub(super) fn release_table(&mut self, index: Index) {
        self.ledger.note_given_up();
        let sequence = self.get_mut(index);
        sequence.computed = 0;
        sequence.confirmed = 0;
        if let Some(table) = sequence.table.take() {
            let released = self.cache.release(table);
            debug_assert!(released.is_ok(), "a table that no step writes through is released: {released:?}");
            self.recount(index);
        }
    }

    pub(super) fn protect(&mut self, index: Index) {
        self.get_mut(index).protected = true;
        self.ledger.note_protected(true);
        self.recount(index);
    }

    pub(super) fn unprotect(&mut self, index: Index) {
        if std::mem::take(&mut self.get_mut(index).protected) {
            self.ledger.note_protected(false);
            self.recount(index);
        }
    }

    /// Puts a running sequence back in line.
    pub(super) fn requeue(&mut self, index: Index) {
        self.leave_queue(index);
        self.unprotect(index);
        self.get_mut(index).state = State::Waiting;
        self.enqueue(index);
    }

    /// Puts a waiting sequence into the queue, at its place.
    pub(super) fn enqueue(&mut self, index: Index) {
        let sequence = self.get_mut(index);
        sequence.passed = 0;
        sequence.lacking = None;
        sequence.counted = Some(Counted::default());
        self.recount(index);
        self.stand_in_line(index);
    }

    fn stand_in_line(&mut self, index: Index) {
        let place = self.get(index).place();
        self.line.enter(place, index);
        if self.get(index).has_claims() {
            self.line.note_claims(place, index);
        }
    }

    /// Brings the sums over sequences in line and running up to date with this one.
    pub(super) fn recount(&mut self, index: Index) {
        let Some(before) = self.get(index).counted else { return };
        let now = self.count_of(self.get(index));
        self.get_mut(index).counted = Some(now);
        let sums = &mut self.sums;
        sums.running = sums.running - before.running + now.running;
        sums.tables = sums.tables - before.tables + now.tables;
        sums.owed = sums.owed - before.owed + now.owed;
    }

    /// What a sequence adds to the sums while it is in line or runs.
    pub(super) fn count_of(&self, sequence: &Sequence) -> Counted {
        let tables = sequence.tables_set_aside();
        if sequence.state != State::Running {
            return Counted { tables, ..Counted::default() };
        }
        let owed = blocks::owed(&self.cache, sequence, self.most_rows);
        Counted { running: sequence.width(), tables, owed: if sequence.protected { 0 } else { owed } }
    }

    fn uncount(&mut self, index: Index) {
        let Some(before) = self.get_mut(index).counted.take() else { return };
        self.sums.running -= before.running;
        self.sums.tables -= before.tables;
        self.sums.owed -= before.owed;
    }

    /// Puts a running sequence among the others, at its place.
    pub(super) fn enter_running(&mut self, index: Index) {
        let place = self.get(index).place();
        let position = self.running.partition_point(|&other| self.get(other).place() < place);
        self.running.insert(position, index);
        self.running_of_class[self.get(index).priority as usize] += 1;
        self.get_mut(index).counted = Some(Counted::default());
        self.recount(index);
    }

    /// Shares the parent's blocks with a sequence that forked while the parent's step was outstanding.
    pub(super) fn resolve_forks(&mut self) {
        while let Some((_, index)) = self.pending_forks.pop_first() {
            self.resolve_fork(index);
        }
    }

    pub(super) fn resolve_fork(&mut self, index: Index) {
        let max_tokens = self.get(index).max_tokens;
        let Some(fork) = self.get_mut(index).fork.take() else { return };
        if let Some(order) = fork.order {
            self.pending_forks.remove(&order);
        }
        self.recount(index);
        // Without a table or with the parent gone, the sequence is computed alone.
        if let Ok(table) = self.cache.fork(fork.parent, fork.at, max_tokens) {
            self.set_table(index, table);
            let sequence = self.get_mut(index);
            sequence.computed = fork.at;
            sequence.confirmed = sequence.confirmed.min(fork.at);
            sequence.high_water = fork.at;
        }
    }

    pub(super) fn get(&self, index: Index) -> &Sequence {
        self.records[index].as_ref().expect("an index in a queue has a record")
    }

    pub(super) fn get_mut(&mut self, index: Index) -> &mut Sequence {
        self.records[index].as_mut().expect("an index in a queue has a record")
    }

    pub(super) fn find(&self, id: SequenceId) -> Result<Index, RequestError> {
        self.check_own(id.request())?;
        self.by_id.get(&id).copied().ok_or(RequestError::Unknown { sequence: id })
    }

    /// Fails for a request that another scheduler took.
    pub(super) fn check_own(&self, request: RequestId) -> Result<(), RequestError> {
        let scheduler = self.cache.instance();
        match request.scheduler() {
            owner if owner == scheduler => Ok(()),
            owner => Err(RequestError::Foreign { request: request.raw(), owner, scheduler }),
        }
    }
}
