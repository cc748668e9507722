//! The records of sequences, and the queues they stand in.

use crate::error::RequestError;
use crate::ids::{RequestId, SequenceId, TokenId};
use crate::schedule::request::{PrefixReport, Priority, Request, StepEvent};
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Sequence, State};

impl Scheduler {
    pub(super) fn new_request(&mut self) -> RequestId {
        let id = RequestId(self.next_request);
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
            adopted_blocks: 0,
            prefix: PrefixReport::default(),
            high_water: 0,
            drafts: Vec::new(),
            planned_rows: 0,
            planned_logits: 0,
            preemptions: 0,
            protected: false,
            promised: false,
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
        let old = self.get(index).id;
        self.by_id.remove(&old);
        let id = old.request().sample(sample);
        self.get_mut(index).id = id;
        self.by_id.insert(id, index);
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
        self.pending_forks.retain(|&other| other != index);
        self.unprotect(index);
        self.release_table(index);
        self.remove(index);
    }

    /// Takes a sequence out of the queue that its state names.
    pub(super) fn leave_queue(&mut self, index: Index) {
        match self.get(index).state {
            State::Waiting => {
                self.waiting.retain(|&other| other != index);
                self.claimants.retain(|&other| other != index);
            }
            State::Running => self.running.retain(|&other| other != index),
            State::Kept => self.kept.retain(|&other| other != index),
        }
    }

    pub(super) fn release_table(&mut self, index: Index) {
        self.releases += 1;
        let sequence = self.get_mut(index);
        sequence.computed = 0;
        sequence.confirmed = 0;
        if let Some(table) = sequence.table.take() {
            let released = self.cache.release(table);
            debug_assert!(released.is_ok(), "a table that no step writes through is released: {released:?}");
        }
    }

    pub(super) fn protect(&mut self, index: Index) {
        self.get_mut(index).protected = true;
        self.num_protected += 1;
    }

    pub(super) fn unprotect(&mut self, index: Index) {
        if std::mem::take(&mut self.get_mut(index).protected) {
            self.num_protected -= 1;
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
        let place = self.get(index).place();
        let position = self.waiting.partition_point(|&other| self.get(other).place() < place);
        self.waiting.insert(position, index);
        if self.get(index).has_claims() {
            self.note_claims(index);
        }
    }

    /// Files a sequence in line among those that may hold something.
    pub(super) fn note_claims(&mut self, index: Index) {
        let place = self.get(index).place();
        let position = self.claimants.partition_point(|&other| self.get(other).place() < place);
        if self.claimants.get(position) != Some(&index) {
            self.claimants.insert(position, index);
        }
    }

    /// Puts a running sequence among the others, at its place.
    pub(super) fn enter_running(&mut self, index: Index) {
        let place = self.get(index).place();
        let position = self.running.partition_point(|&other| self.get(other).place() < place);
        self.running.insert(position, index);
    }

    /// Shares the parent's blocks with a sequence that forked while the parent's step was outstanding.
    pub(super) fn resolve_forks(&mut self) {
        for index in std::mem::take(&mut self.pending_forks) {
            self.resolve_fork(index);
        }
    }

    pub(super) fn resolve_fork(&mut self, index: Index) {
        let max_tokens = self.get(index).max_tokens;
        let Some(fork) = self.get_mut(index).fork.take() else { return };
        // Without a table or with the parent gone, the sequence is computed alone.
        if let Ok(table) = self.cache.fork(fork.parent, fork.at, max_tokens) {
            let sequence = self.get_mut(index);
            sequence.table = Some(table);
            sequence.computed = fork.at;
            sequence.confirmed = sequence.confirmed.min(fork.at);
            sequence.high_water = fork.at;
        }
    }

    /// Adds an event to those of the next commit.
    pub(super) fn tell(&mut self, event: StepEvent) {
        if std::mem::take(&mut self.events_are_told) {
            self.events.clear();
        }
        self.events.push(event);
    }

    pub(super) fn get(&self, index: Index) -> &Sequence {
        self.records[index].as_ref().expect("an index in a queue has a record")
    }

    pub(super) fn get_mut(&mut self, index: Index) -> &mut Sequence {
        self.records[index].as_mut().expect("an index in a queue has a record")
    }

    pub(super) fn find(&self, id: SequenceId) -> Result<Index, RequestError> {
        self.by_id.get(&id).copied().ok_or(RequestError::Unknown { sequence: id })
    }
}
