//! The records of sequences, the queues they stand in, and the transitions from one to another.
//!
//! It owns what the queues say of each other: a record stands in the queue that its state names, and in no other; places
//! are in order; the sums over those that wait or run are those of their records. It knows nothing of why a sequence moves.

use crate::cache::KvCache;
use crate::ids::{RequestId, SequenceId};
use crate::schedule::line::Line;
use crate::schedule::request::{Priority, Request};
use crate::schedule::scheduler::Index;
use crate::schedule::sequence::{
    Answers, Committed, Counted, PendingFork, Place, Sequence, State, Taken, Terms,
};
use std::collections::BTreeMap;

/// All sequences: those in line, those that run, those that are kept.
#[derive(Debug, Default)]
pub(in crate::schedule) struct Sequences {
    /// Read by the parent module's `Index`, changed through [`record`](Self::record).
    pub(super) records: Vec<Option<Sequence>>,
    free_records: Vec<Index>,
    by_id: BTreeMap<SequenceId, Index>,
    /// By place.
    running: Vec<Index>,
    line: Line,
    /// Least recently finished first.
    kept: BTreeMap<u64, Index>,
    /// Those whose table is forked when the outstanding step ends, in the order in which they came.
    pending_forks: BTreeMap<u64, Index>,
    /// Sums over those in line and running.
    pub(super) sums: Counted,
    /// Running records of each class.
    pub(super) running_of_class: [u32; Priority::COUNT],
    num_kept: u64,
    num_forks: u64,
    num_requests: u64,
    num_arrivals: u64,
}

impl Sequences {
    // Who is there.

    pub(in crate::schedule) fn get(&self, index: Index) -> Option<&Sequence> {
        self.records[index].as_ref()
    }

    pub(in crate::schedule) fn find(&self, id: SequenceId) -> Option<Index> {
        self.by_id.get(&id).copied()
    }

    /// Records of a request: one for all samples that have not parted, and one for each other.
    pub(in crate::schedule) fn of_request(&self, request: RequestId) -> impl Iterator<Item = Index> {
        self.by_id.range(request.sample(0)..=request.sample(u32::MAX)).map(|(_, &index)| index)
    }

    /// All records with their indices.
    pub(in crate::schedule) fn all(&self) -> impl Iterator<Item = (Index, &Sequence)> {
        self.records.iter().enumerate().filter_map(|(index, record)| Some((index, record.as_ref()?)))
    }

    /// Those that run, by place.
    pub(in crate::schedule) fn running(&self) -> &[Index] {
        &self.running
    }

    /// Those that wait, by place.
    pub(in crate::schedule) fn line(&self) -> &Line {
        &self.line
    }

    /// The first of those in line that may be asked.
    pub(in crate::schedule) fn first_in_line(&self) -> Option<Index> {
        self.line.first()
    }

    /// Those that are kept, least recently finished first.
    pub(in crate::schedule) fn kept(&self) -> impl ExactSizeIterator<Item = Index> {
        self.kept.values().copied()
    }

    /// Those that share their parent's blocks when the outstanding step ends.
    pub(in crate::schedule) fn pending_forks(&self) -> impl Iterator<Item = Index> {
        self.pending_forks.values().copied()
    }

    /// Whether no sequence runs or waits.
    pub(in crate::schedule) fn are_idle(&self) -> bool {
        self.running.is_empty() && self.line.is_empty()
    }

    // Coming.

    pub(in crate::schedule) fn new_request(&mut self, scheduler: u64) -> RequestId {
        self.num_requests += 1;
        RequestId { scheduler, number: self.num_requests }
    }

    /// A new sequence, in line at the step that `rank` says.
    pub(in crate::schedule) fn add(
        &mut self,
        id: SequenceId,
        request: Request,
        max_tokens: u32,
        rank: u64,
        cache: &KvCache,
    ) -> Index {
        let sequence = Sequence::new(id, request, Vec::new(), max_tokens);
        let index = self.arrive(sequence, rank);
        self.enqueue(index, cache);
        index
    }

    /// A new sequence that begins with the first `at` tokens of `parent`, and is to share its blocks of the first `shared`.
    /// It enters the line when it is known what it is promised.
    pub(in crate::schedule) fn add_branch(
        &mut self,
        (parent, at, shared): (Index, usize, u32),
        (id, request): (SequenceId, Request),
        max_tokens: u32,
        rank: u64,
    ) -> Index {
        let source = &self[parent];
        let table = source.table.filter(|_| shared > 0);
        let (namespace, confirmed) = (source.terms.namespace, table.map_or(0, |_| source.confirmed));
        let mut sequence = Sequence::new(id, request, source.tokens[..at].to_vec(), max_tokens);
        (sequence.terms.namespace, sequence.confirmed) = (namespace, confirmed);
        let order = self.num_forks;
        sequence.fork = table.map(|parent| PendingFork { order, parent, at: shared });
        let index = self.arrive(sequence, rank);
        if table.is_some() {
            self.num_forks += 1;
            self.pending_forks.insert(order, index);
        }
        index
    }

    fn arrive(&mut self, mut sequence: Sequence, rank: u64) -> Index {
        self.num_arrivals += 1;
        (sequence.rank, sequence.arrival) = (rank, self.num_arrivals);
        self.file(sequence)
    }

    fn file(&mut self, sequence: Sequence) -> Index {
        let id = sequence.id;
        let index = self.free_records.pop().unwrap_or(self.records.len());
        if index == self.records.len() {
            self.records.push(None);
        }
        self.records[index] = Some(sequence);
        self.by_id.insert(id, index);
        index
    }

    /// A sample parts from those that `parent` stands for: a running sequence of its own, without a table.
    pub(in crate::schedule) fn part(&mut self, parent: Index, sample: u32, cache: &KvCache) -> Index {
        let parent = &self[parent];
        let mut tokens = Vec::with_capacity(parent.terms.max_tokens as usize);
        tokens.extend_from_slice(&parent.tokens);
        let id = parent.id.request().sample(sample);
        let sequence = Sequence {
            rank: parent.rank,
            arrival: parent.arrival,
            state: State::Running,
            high_water: parent.computed,
            hashes: parent.hashes.clone(),
            prefix: parent.prefix,
            adopted_nodes: parent.adopted_nodes,
            was_let_in: true,
            ..Sequence::bare(id, parent.terms.clone(), parent.priority, tokens)
        };
        let place = sequence.place();
        let index = self.file(sequence);
        self.record(index).reserve(cache);
        self.enter_running(index, place, cache);
        index
    }

    /// Files a record under another sample's id, and with it at another place in line. One that runs stays where it is.
    pub(in crate::schedule) fn rename(&mut self, index: Index, sample: u32) {
        let in_line = self[index].state == State::Waiting;
        if in_line {
            self.leave_line(index);
        }
        let record = self.record(index);
        let (old, id) = (record.id, record.id.request().sample(sample));
        record.id = id;
        self.by_id.remove(&old);
        self.by_id.insert(id, index);
        if in_line {
            self.stand_in_line(index);
        }
    }

    // The end of a step.

    /// A sequence has its rows of the step computed, and takes its answer of those that are `left`. Those in line that wait
    /// for what others can find now are asked again.
    #[inline]
    pub(in crate::schedule) fn commit<'a>(
        &mut self,
        index: Index,
        left: &mut Answers<'a>,
        cache: &mut KvCache,
    ) -> Committed<'a> {
        let committed = self.record(index).commit(left, cache);
        if committed.is_found_further {
            self.wake_behind(index);
        }
        committed
    }

    /// One of those that have parted takes the answer at its place.
    pub(in crate::schedule) fn take_answer<'a>(
        &mut self,
        index: Index,
        answers: Answers<'a>,
        place: usize,
    ) -> Taken<'a> {
        self.record(index).take_answer(answers, place)
    }

    // Transitions.

    /// Waiting -> Running.
    pub(in crate::schedule) fn let_in(&mut self, index: Index, cache: &KvCache) -> &Sequence {
        let record = self.record(index);
        record.reserve(cache);
        let (place, behind) = (record.place(), record.behind.take());
        (record.state, record.lacking, record.was_let_in) = (State::Running, None, true);
        self.line.leave(place, behind);
        self.enter_running(index, place, cache);
        &self[index]
    }

    /// Running -> Waiting, at its old place. Returns whether a sequence in line stood behind it, and is asked again.
    pub(in crate::schedule) fn requeue(&mut self, index: Index, cache: &KvCache) -> bool {
        let woken = self.leave_queue(index);
        let record = self.record(index);
        debug_assert!(!record.protected, "a protected sequence is preempted");
        record.state = State::Waiting;
        self.enqueue(index, cache);
        woken
    }

    /// Running -> Kept.
    pub(in crate::schedule) fn keep(&mut self, index: Index) {
        self.leave_queue(index);
        let kept_as = self.num_kept;
        self.num_kept += 1;
        let record = self.record(index);
        (record.state, record.lacking, record.kept_as) = (State::Kept, None, kept_as);
        self.kept.insert(kept_as, index);
    }

    /// Kept -> Waiting, as if it came at the step that `rank` says: with the request's tokens after its own.
    pub(in crate::schedule) fn extend(
        &mut self,
        index: Index,
        request: Request,
        max_tokens: u32,
        rank: u64,
        cache: &KvCache,
    ) {
        self.leave_queue(index);
        self.num_arrivals += 1;
        let arrival = self.num_arrivals;
        let record = self.record(index);
        (record.rank, record.arrival, record.priority) = (rank, arrival, request.priority);
        record.tokens.extend_from_slice(&request.tokens);
        record.drafts.clear();
        let len = record.tokens.len() as u32;
        record.take_back(len - 1);
        // Without ranges of its own, a turn keeps those of the turn before.
        let retain =
            if request.retain.is_empty() { record.terms.retain.clone() } else { request.retain.into() };
        record.terms = Terms {
            namespace: record.terms.namespace,
            retain,
            input_len: len,
            max_tokens,
            to_context_end: request.max_new_tokens.is_none(),
            stop_tokens: request.stop_tokens.into(),
            keep: request.keep,
        };
        (record.was_let_in, record.preemptions, record.state) = (false, 0, State::Waiting);
        self.enqueue(index, cache);
    }

    /// Any state -> no record. Its blocks, promise and protection have been given up.
    pub(in crate::schedule) fn end(&mut self, index: Index) {
        if let Some(record) = self.records[index].take() {
            debug_assert!(record.table.is_none(), "a sequence ends and leaves its table");
            self.by_id.remove(&record.id);
            self.free_records.push(index);
        }
    }

    /// Puts a waiting sequence into the line, at its place.
    pub(in crate::schedule) fn enqueue(&mut self, index: Index, cache: &KvCache) {
        let record = self.record(index);
        (record.passed, record.lacking, record.counted) = (0, None, Some(Counted::default()));
        self.recount(index, cache);
        self.stand_in_line(index);
    }

    /// Takes a sequence out of the queue that its state names. Returns whether a sequence in line stood behind it.
    ///
    /// # Complexity
    /// O(log sequences), and for a running one the memory of the indices behind it.
    pub(in crate::schedule) fn leave_queue(&mut self, index: Index) -> bool {
        let record = self.record(index);
        let (state, kept_as) = (record.state, record.kept_as);
        if let Some(before) = record.counted.take() {
            self.sums.running -= before.running;
            self.sums.tables -= before.tables;
            self.sums.owed -= before.owed;
        }
        match state {
            State::Waiting => self.leave_line(index),
            State::Running => return self.leave_running(index),
            State::Kept => {
                self.kept.remove(&kept_as);
            }
        }
        false
    }

    fn leave_line(&mut self, index: Index) {
        let record = self.record(index);
        let (place, behind) = (record.place(), record.behind.take());
        self.line.leave(place, behind);
    }

    fn leave_running(&mut self, index: Index) -> bool {
        let (priority, place) = (self[index].priority, self[index].place());
        let position = self.running.partition_point(|&other| self[other].place() < place);
        debug_assert_eq!(self.running.get(position), Some(&index), "a running sequence is in order");
        self.running.remove(position);
        self.running_of_class[priority as usize] -= 1;
        self.wake_behind(index)
    }

    /// Puts a running sequence among the others, at its place.
    fn enter_running(&mut self, index: Index, place: Place, cache: &KvCache) {
        let position = self.running.partition_point(|&other| self[other].place() < place);
        self.running.insert(position, index);
        let record = self.record(index);
        record.counted.get_or_insert_default();
        let class = record.priority as usize;
        self.running_of_class[class] += 1;
        self.recount(index, cache);
    }

    fn stand_in_line(&mut self, index: Index) {
        let record = &self[index];
        let (place, has_claims) = (record.place(), record.has_claims());
        self.line.enter(place, index);
        if has_claims {
            self.line.note_claims(place, index);
        }
    }

    // In line.

    /// Has a sequence in line wait behind a running one, which computes what it needs.
    pub(in crate::schedule) fn stand_behind(&mut self, index: Index, other: Index) {
        let record = self.record(index);
        // One that is promised its blocks is asked out of turn, and may stand behind a sequence already.
        let (place, before) = (record.place(), record.behind.replace(other));
        self.line.stand_behind(place, before, other);
    }

    /// Has those in line that wait for what this one computes be asked again. Returns whether there are any.
    pub(in crate::schedule) fn wake_behind(&mut self, index: Index) -> bool {
        let mut woken = false;
        while let Some(other) = self.line.wake_one(index) {
            let record = self.record(other);
            (record.behind, record.lacking) = (None, None);
            woken = true;
        }
        woken
    }

    /// One more was let in before the first in line.
    pub(in crate::schedule) fn note_passed(&mut self, index: Index) {
        self.record(index).passed += 1;
    }

    /// A sequence in line has been promised what it needs.
    pub(in crate::schedule) fn note_claims(&mut self, index: Index) {
        self.line.note_claims(self[index].place(), index);
    }

    // Branches.

    /// A sequence shares nothing when the outstanding step ends, or does so now. Returns what it was to share.
    pub(in crate::schedule) fn take_fork(&mut self, index: Index, cache: &KvCache) -> Option<PendingFork> {
        let fork = self.record(index).fork.take();
        if let Some(fork) = fork {
            self.pending_forks.remove(&fork.order);
        }
        self.recount(index, cache);
        fork
    }

    /// The next one that is to share its parent's blocks.
    pub(in crate::schedule) fn pop_pending_fork(&mut self) -> Option<Index> {
        self.pending_forks.pop_first().map(|(_, index)| index)
    }

    // The record's own state: for this module alone.

    /// How a record is changed: by the functions of this module and its neighbours alone.
    #[inline]
    pub(super) fn record(&mut self, index: Index) -> &mut Sequence {
        self.records[index].as_mut().expect("an index in a queue has a record")
    }

    /// Records that there are, those without a sequence among them.
    pub(super) fn num_records(&self) -> usize {
        self.records.len()
    }

    pub(super) fn records(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.records.iter_mut().flatten()
    }
}
