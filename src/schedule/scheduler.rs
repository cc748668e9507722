//! [`Scheduler`]: takes requests, plans steps, takes results. This file holds its records and the verbs that an
//! application uses between steps; `planner` makes the plan, `admission` decides who may have blocks, `commit` takes the
//! results.
//!
//! A step is planned, recorded, submitted, and committed; one is outstanding at a time. What an application does to a
//! sequence of the outstanding step (abort, fork, truncate) takes effect when the step is committed or rolled back.

use crate::cache::KvCache;
use crate::config::CacheConfig;
use crate::error::{Error, RequestError};
use crate::ids::{RequestId, SequenceId, TokenId};
use crate::schedule::request::{Admission, Request, SchedulerConfig, SchedulerStats, StepEvent};
use crate::schedule::sequence::{PendingFork, Sequence, State};
use crate::schedule::step_plan::StepPlan;
use std::collections::{HashMap, VecDeque};

/// Index of a sequence's record.
pub(super) type Index = usize;

/// Continuous batching over a paged cache: admission, growth, preemption, and a plan for every step.
///
/// ```
/// use paged_kv::{CacheConfig, KvType, ModelShape, Request, RowResult, Schedule, Scheduler, SchedulerConfig, StepEvent};
///
/// let shape = ModelShape { num_layers: 2, num_query_heads: 4, num_kv_heads: 2, head_dim: 32 };
/// let cache = CacheConfig::for_context(64, 4, &shape, KvType::F16)?;
/// let mut scheduler = Scheduler::new(SchedulerConfig::default(), cache)?;
/// let chat = scheduler.add(Request::new([5, 6, 7]).max_new_tokens(2))?;
///
/// let mut answer = Vec::new();
/// while let Schedule::Step(plan) = scheduler.schedule() {
///     // … record and submit; choose a token for each of `plan.logit_rows()` …
///     let results = vec![RowResult::Token(9); plan.logit_rows().len()];
///     for event in scheduler.commit(plan, &results)? {
///         if let StepEvent::Token { token, .. } = event {
///             answer.push(*token);
///         }
///     }
/// }
/// assert_eq!(answer, [9, 9]);
/// # let _ = chat;
/// # Ok::<(), paged_kv::Error>(())
/// ```
#[derive(Debug)]
pub struct Scheduler {
    pub(super) config: SchedulerConfig,
    pub(super) cache: KvCache,
    pub(super) records: Vec<Option<Sequence>>,
    free_records: Vec<Index>,
    by_id: HashMap<SequenceId, Index>,
    /// By arrival.
    pub(super) running: Vec<Index>,
    /// By arrival.
    pub(super) waiting: VecDeque<Index>,
    /// Least recently finished first.
    pub(super) kept: VecDeque<Index>,
    /// Sequences of the outstanding plan, in its order.
    pub(super) planned: Vec<Index>,
    /// Sequences whose table is forked when the outstanding step ends.
    pending_forks: Vec<Index>,
    pub(super) spare_plan: StepPlan,
    pub(super) order: Vec<Index>,
    pub(super) events: Vec<StepEvent>,
    /// Where the budget ran out among decoding sequences: the next step begins with this arrival.
    pub(super) resume_at: Option<u64>,
    /// Protected sequences among those that run.
    pub(super) num_protected: u32,
    next_request: u64,
    next_arrival: u64,
    pub(super) stats: SchedulerStats,
}

impl Scheduler {
    /// A scheduler over an empty cache.
    ///
    /// # Errors
    /// [`ConfigError`](crate::ConfigError) for a zero budget, a watermark of the whole pool, or more running sequences
    /// than tables.
    pub fn new(config: SchedulerConfig, cache: CacheConfig) -> Result<Self, Error> {
        config.validate(&cache)?;
        Ok(Self {
            config,
            cache: KvCache::new(cache),
            records: Vec::new(),
            free_records: Vec::new(),
            by_id: HashMap::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            kept: VecDeque::new(),
            planned: Vec::new(),
            pending_forks: Vec::new(),
            spare_plan: StepPlan::default(),
            order: Vec::new(),
            events: Vec::new(),
            resume_at: None,
            num_protected: 0,
            next_request: 1,
            next_arrival: 1,
            stats: SchedulerStats::default(),
        })
    }

    /// The cache under the scheduler.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`RequestError::EmptyPrompt`], [`RequestError::ExceedsContext`] when prompt and new tokens exceed the longest
    /// sequence, [`RequestError::NeverFits`] when they exceed the pool, [`RequestError::Samples`] for none or more than
    /// can run.
    pub fn add(&mut self, request: Request) -> Result<RequestId, RequestError> {
        self.cache.check_poison()?;
        if request.tokens.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        let max_tokens = self.declared_maximum(request.tokens.len(), &request)?;
        self.check_samples(request.samples)?;
        self.check_fits(request.tokens.len() as u32, max_tokens, request.samples)?;
        let id = self.new_request();
        let sequence = self.record(id.sample(0), request, Vec::new(), max_tokens);
        let index = self.insert(sequence);
        self.enqueue(index);
        Ok(id)
    }

    /// Goes on with a kept sequence: appends the request's tokens and generates. Only what is not in the cache is
    /// computed; with no new tokens that is the last one.
    ///
    /// # Errors
    /// [`RequestError::Unknown`], [`RequestError::NotKept`] while it runs, the errors of [`add`](Self::add), and under
    /// guaranteed admission [`RequestError::PromiseExceeded`] when what it may need cannot be promised now. The sequence
    /// stays kept then.
    pub fn extend(&mut self, sequence: impl Into<SequenceId>, request: Request) -> Result<(), RequestError> {
        self.cache.check_poison()?;
        let id = sequence.into();
        let index = self.find(id)?;
        if self.get(index).state != State::Kept {
            return Err(RequestError::NotKept { sequence: id });
        }
        if request.samples != 1 {
            return Err(RequestError::Samples { samples: request.samples, max: 1 });
        }
        let len = self.get(index).tokens.len() + request.tokens.len();
        let max_tokens = self.declared_maximum(len, &request)?;
        self.check_fits(len as u32, max_tokens, 1)?;
        // What is computed stays, but for the last token where its logits are needed again.
        let computed = self.get(index).computed.min(len as u32 - 1);
        if let Some(table) = self.get(index).table.filter(|_| computed < self.get(index).computed) {
            self.cache.truncate(table, computed)?;
            self.get_mut(index).computed = computed;
        }
        if self.config.admission == Admission::Guaranteed {
            let old_max = std::mem::replace(&mut self.get_mut(index).max_tokens, max_tokens);
            self.get_mut(index).promised = true;
            if let Err(error) = self.check_promise() {
                let sequence = self.get_mut(index);
                sequence.max_tokens = old_max;
                sequence.promised = false;
                return Err(error);
            }
        }
        if let Some(table) = self.get(index).table {
            self.cache.set_max_tokens(table, max_tokens)?;
        }
        let arrival = self.arrive();
        let sequence = self.get_mut(index);
        sequence.tokens.extend_from_slice(&request.tokens);
        sequence.computed = computed;
        sequence.input_len = len as u32;
        sequence.max_tokens = max_tokens;
        sequence.to_context_end = request.max_new_tokens.is_none();
        sequence.stop_tokens = request.stop_tokens.into();
        sequence.keep = request.keep;
        sequence.arrival = arrival;
        sequence.preemptions = 0;
        sequence.state = State::Waiting;
        self.kept.retain(|&kept| kept != index);
        self.enqueue(index);
        Ok(())
    }

    /// A new request that begins with the first `at` tokens of `parent` and goes on with the request's tokens. Blocks
    /// that hold the common part are shared, as far as they are computed; nothing is copied until one of the two writes
    /// into a shared block.
    ///
    /// # Errors
    /// [`RequestError::Unknown`], [`RequestError::BeyondLength`] when `at` exceeds the parent's tokens, the errors of
    /// [`add`](Self::add), and under guaranteed admission [`RequestError::PromiseExceeded`]. Nothing has changed then.
    pub fn fork(
        &mut self,
        parent: impl Into<SequenceId>,
        at: usize,
        request: Request,
    ) -> Result<RequestId, RequestError> {
        self.cache.check_poison()?;
        let parent = self.find(parent.into())?;
        let source = self.get(parent);
        if at > source.tokens.len() {
            return Err(RequestError::BeyondLength { tokens: at, len: source.tokens.len() });
        }
        let len = at + request.tokens.len();
        if len == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        let shared = (at as u32).min(source.computed).min(len as u32 - 1);
        let prefix = source.tokens[..at].to_vec();
        let parent_table = source.table.filter(|_| shared > 0);
        let parent_planned = source.planned_rows > 0;
        let max_tokens = self.declared_maximum(len, &request)?;
        self.check_samples(request.samples)?;
        self.check_fits(len as u32, max_tokens, request.samples)?;
        let id = self.new_request();
        let mut child = self.record(id.sample(0), request, prefix, max_tokens);
        child.fork = parent_table.map(|parent| PendingFork { parent, at: shared });
        child.promised = self.config.admission == Admission::Guaranteed;
        let index = self.insert(child);
        self.enqueue(index);
        if parent_planned {
            self.pending_forks.push(index);
        } else {
            self.resolve_fork(index);
        }
        if self.config.admission == Admission::Guaranteed {
            if let Err(error) = self.check_promise() {
                self.drop_record(index);
                return Err(error);
            }
        }
        Ok(id)
    }

    /// Cuts a sequence to its first `len` tokens; a running one generates again from there.
    ///
    /// # Errors
    /// [`RequestError::Unknown`], [`RequestError::BeyondLength`] when it is shorter, [`RequestError::EmptyPrompt`] for 0;
    /// under guaranteed admission [`RequestError::PromiseExceeded`] when the cut leads into a block that others hold and
    /// its copy cannot be promised.
    pub fn truncate(&mut self, sequence: impl Into<SequenceId>, len: usize) -> Result<(), RequestError> {
        self.cache.check_poison()?;
        let index = self.find(sequence.into())?;
        let sequence = self.get_mut(index);
        if len > sequence.tokens.len() {
            return Err(RequestError::BeyondLength { tokens: len, len: sequence.tokens.len() });
        }
        if len == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        let len = len as u32;
        self.check_cut(index, len)?;
        let sequence = self.get_mut(index);
        if sequence.planned_rows > 0 {
            sequence.truncating = Some(sequence.truncating.map_or(len, |earlier| earlier.min(len)));
            return Ok(());
        }
        self.truncate_now(index, len);
        Ok(())
    }

    /// Under guarantee, a cut into a shared block needs a copy that was not promised.
    fn check_cut(&self, index: Index, len: u32) -> Result<(), RequestError> {
        let sequence = self.get(index);
        let Some(table) = sequence.table.filter(|_| sequence.promised) else { return Ok(()) };
        let end = sequence.computed.min(len - 1);
        let block_size = self.cache.config().block_size();
        let tail = self.cache.block_ids(table)?.get((end / block_size) as usize);
        let copies =
            !end.is_multiple_of(block_size) && tail.is_some_and(|&block| self.cache.ref_count(block) > 1);
        let needed = self.promised_blocks() + u32::from(copies);
        let available = self.cache.config().num_blocks();
        if needed > available { Err(RequestError::PromiseExceeded { needed, available }) } else { Ok(()) }
    }

    pub(super) fn truncate_now(&mut self, index: Index, len: u32) {
        let sequence = self.get_mut(index);
        sequence.tokens.truncate(len as usize);
        sequence.input_len = sequence.input_len.min(len);
        sequence.high_water = sequence.high_water.min(len);
        sequence.drafts.clear();
        if let Some(fork) = &mut sequence.fork {
            fork.at = fork.at.min(len - 1);
        }
        // A running sequence computes its last token again, to choose the next one.
        let keep = if sequence.state == State::Kept { len } else { len - 1 };
        let computed = sequence.computed.min(keep);
        sequence.computed = computed;
        if let Some(table) = sequence.table {
            let cut = self.cache.truncate(table, computed);
            debug_assert!(cut.is_ok(), "a table that no step writes through is cut: {cut:?}");
        }
    }

    /// Ends all samples of a request, whatever their state, and drops what is kept of them. Sequences of the
    /// outstanding step end when it does, with [`FinishReason::Aborted`](crate::FinishReason::Aborted) among its events.
    ///
    /// Returns whether there was anything to end: ending a request twice, or an unknown one, is harmless.
    pub fn abort(&mut self, request: RequestId) -> bool {
        let mut samples: Vec<SequenceId> =
            self.by_id.keys().copied().filter(|id| id.request() == request).collect();
        samples.sort_unstable();
        for &sample in &samples {
            if let Some(&index) = self.by_id.get(&sample) {
                self.abort_record(index);
            }
        }
        !samples.is_empty()
    }

    /// Ends one sequence; the other samples of its request go on. Returns whether there was anything to end.
    pub fn abort_sequence(&mut self, sequence: SequenceId) -> bool {
        // Samples that have not parted yet live in the first one's record.
        if let Some(&carrier) = self.by_id.get(&sequence.request().sample(0)) {
            let record = self.get_mut(carrier);
            if let Some(place) = record.pending_samples.iter().position(|&sample| sample == sequence.sample())
            {
                if record.planned_rows > 0 {
                    let fresh = !record.aborted_samples.contains(&sequence.sample());
                    if fresh {
                        record.aborted_samples.push(sequence.sample());
                    }
                    return fresh;
                }
                record.pending_samples.remove(place);
                if record.pending_samples.is_empty() {
                    self.abort_record(carrier);
                }
                return true;
            }
            if !record.pending_samples.is_empty() {
                return false;
            }
        }
        match self.by_id.get(&sequence) {
            Some(&index) => {
                self.abort_record(index);
                true
            }
            None => false,
        }
    }

    fn abort_record(&mut self, index: Index) {
        let sequence = self.get_mut(index);
        if sequence.planned_rows > 0 {
            sequence.aborting = true;
        } else {
            self.drop_record(index);
        }
    }

    /// Drafts for a sequence's next step: the step computes one row for each, and the application answers with
    /// [`RowResult::Accepted`](crate::RowResult::Accepted). They replace earlier ones; those beyond the declared maximum
    /// or the step's budget are left out.
    ///
    /// # Errors
    /// [`RequestError::Unknown`], and [`RequestError::TooManyDrafts`] beyond the configured lookahead.
    pub fn propose(
        &mut self,
        sequence: impl Into<SequenceId>,
        drafts: &[TokenId],
    ) -> Result<(), RequestError> {
        let index = self.find(sequence.into())?;
        let max = self.config.lookahead;
        if drafts.len() > max as usize {
            return Err(RequestError::TooManyDrafts { drafts: drafts.len(), max });
        }
        let record = self.get_mut(index);
        record.drafts.clear();
        record.drafts.extend_from_slice(drafts);
        Ok(())
    }

    /// All tokens of a sequence that waits, runs or is kept: input and generated ones.
    pub fn tokens(&self, sequence: impl Into<SequenceId>) -> Option<&[TokenId]> {
        let index = *self.by_id.get(&sequence.into())?;
        Some(&self.get(index).tokens)
    }

    /// How many of a sequence's tokens are in the cache.
    pub fn computed_tokens(&self, sequence: impl Into<SequenceId>) -> Option<u32> {
        let index = *self.by_id.get(&sequence.into())?;
        Some(self.get(index).computed)
    }

    /// Counters, and the pool as it is.
    ///
    /// # Complexity
    /// O(tables).
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            kept: self.kept.len() as u32,
            cache: self.cache.stats(),
            ..self.stats
        }
    }

    /// Panics with the invariant's number when records, queues, promises and the cache disagree. For tests.
    pub fn assert_consistent(&self) {
        self.cache.assert_consistent();
        let mut tables = 0;
        for (index, sequence) in self.records.iter().enumerate() {
            let Some(sequence) = sequence else { continue };
            assert_eq!(
                self.by_id.get(&sequence.id),
                Some(&index),
                "{:?} is filed under another record",
                sequence.id
            );
            let queues = [
                (State::Waiting, self.waiting.iter().filter(|&&other| other == index).count()),
                (State::Running, self.running.iter().filter(|&&other| other == index).count()),
                (State::Kept, self.kept.iter().filter(|&&other| other == index).count()),
            ];
            for (state, entries) in queues {
                assert_eq!(
                    entries,
                    usize::from(state == sequence.state),
                    "{:?} is in a wrong queue",
                    sequence.id
                );
            }
            assert!(
                sequence.len() <= sequence.max_tokens,
                "I10: {:?} outgrew its declared maximum",
                sequence.id
            );
            assert!(
                sequence.computed <= sequence.len(),
                "I4: {:?} has more computed than it has",
                sequence.id
            );
            assert!(
                sequence.preemptions <= self.config.max_preemptions,
                "I9: {:?} was preempted too often",
                sequence.id
            );
            if let Some(table) = sequence.table {
                tables += 1;
                let len = self.cache.len(table).expect("a record's table is live");
                assert_eq!(
                    len,
                    sequence.computed + sequence.planned_rows,
                    "I4: {:?} and its table disagree",
                    sequence.id
                );
            } else {
                assert_eq!(sequence.computed, 0, "I4: {:?} is computed but holds no table", sequence.id);
            }
        }
        assert_eq!(tables, self.cache.stats().num_tables, "I2: a table belongs to no sequence");
        let arrivals = |queue: &mut dyn Iterator<Item = &Index>| -> Vec<u64> {
            queue.map(|&index| self.get(index).arrival).collect()
        };
        assert!(arrivals(&mut self.running.iter()).is_sorted(), "running sequences are out of order");
        assert!(arrivals(&mut self.waiting.iter()).is_sorted(), "waiting sequences are out of order");
        let protected = self.running.iter().filter(|&&index| self.get(index).protected).count();
        assert_eq!(protected as u32, self.num_protected, "I9: protected sequences are miscounted");
        if self.config.admission == Admission::Guaranteed {
            let promised = self.promised_blocks();
            assert!(promised <= self.cache.config().num_blocks(), "I8: {promised} blocks are promised");
            assert_eq!(self.stats.preemptions, 0, "I8: a promised sequence was preempted");
        }
    }

    // Records.

    fn new_request(&mut self) -> RequestId {
        let id = RequestId(self.next_request);
        self.next_request += 1;
        id
    }

    fn arrive(&mut self) -> u64 {
        self.next_arrival += 1;
        self.next_arrival
    }

    fn record(
        &mut self,
        id: SequenceId,
        request: Request,
        prefix: Vec<TokenId>,
        max_tokens: u32,
    ) -> Sequence {
        let mut tokens = prefix;
        tokens.extend_from_slice(&request.tokens);
        // Growing to the declared maximum reallocates nothing.
        tokens.reserve((max_tokens as usize).saturating_sub(tokens.len()));
        Sequence {
            id,
            arrival: self.arrive(),
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

    fn remove(&mut self, index: Index) -> Option<Sequence> {
        let sequence = self.records[index].take()?;
        self.by_id.remove(&sequence.id);
        self.free_records.push(index);
        Some(sequence)
    }

    /// Ends a record that no step is writing through: out of its queue, its blocks back.
    pub(super) fn drop_record(&mut self, index: Index) {
        match self.get(index).state {
            State::Waiting => self.waiting.retain(|&other| other != index),
            State::Running => self.running.retain(|&other| other != index),
            State::Kept => self.kept.retain(|&other| other != index),
        }
        self.pending_forks.retain(|&other| other != index);
        self.unprotect(index);
        self.release_table(index);
        self.remove(index);
    }

    pub(super) fn release_table(&mut self, index: Index) {
        let sequence = self.get_mut(index);
        sequence.computed = 0;
        if let Some(table) = sequence.table.take() {
            let released = self.cache.release(table);
            debug_assert!(released.is_ok(), "a table that no step writes through is released: {released:?}");
        }
    }

    pub(super) fn unprotect(&mut self, index: Index) {
        if std::mem::take(&mut self.get_mut(index).protected) {
            self.num_protected -= 1;
        }
    }

    /// Puts a running sequence without a table back in line.
    pub(super) fn requeue(&mut self, index: Index) {
        self.get_mut(index).state = State::Waiting;
        self.running.retain(|&other| other != index);
        self.enqueue(index);
    }

    /// Puts a waiting sequence into the queue by its arrival.
    pub(super) fn enqueue(&mut self, index: Index) {
        let arrival = self.get(index).arrival;
        let place = self.waiting.partition_point(|&other| self.get(other).arrival < arrival);
        self.waiting.insert(place, index);
    }

    /// Shares the parent's blocks with a sequence that forked while the parent's step was outstanding.
    pub(super) fn resolve_forks(&mut self) {
        for index in std::mem::take(&mut self.pending_forks) {
            self.resolve_fork(index);
        }
    }

    fn resolve_fork(&mut self, index: Index) {
        let max_tokens = self.get(index).max_tokens;
        let Some(fork) = self.get_mut(index).fork.take() else { return };
        // Without a table or with the parent gone, the sequence is computed alone.
        if let Ok(table) = self.cache.fork(fork.parent, fork.at, max_tokens) {
            let sequence = self.get_mut(index);
            sequence.table = Some(table);
            sequence.computed = fork.at;
            sequence.high_water = fork.at;
        }
    }

    pub(super) fn get(&self, index: Index) -> &Sequence {
        self.records[index].as_ref().expect("an index in a queue has a record")
    }

    pub(super) fn get_mut(&mut self, index: Index) -> &mut Sequence {
        self.records[index].as_mut().expect("an index in a queue has a record")
    }

    fn find(&self, id: SequenceId) -> Result<Index, RequestError> {
        self.by_id.get(&id).copied().ok_or(RequestError::Unknown { sequence: id })
    }

    // Checks at the door.

    fn declared_maximum(&self, len: usize, request: &Request) -> Result<u32, RequestError> {
        let config = self.cache.config();
        let max_tokens = config.max_sequence_tokens();
        let needed = len as u64 + u64::from(request.max_new_tokens.unwrap_or(0));
        if needed > u64::from(max_tokens) {
            return Err(RequestError::ExceedsContext { needed, max_tokens });
        }
        let pool_tokens = config.num_blocks() * config.block_size();
        Ok(match request.max_new_tokens {
            Some(_) => needed as u32,
            None => max_tokens.min(pool_tokens).max(needed as u32),
        })
    }

    pub(super) fn max_running(&self) -> u32 {
        self.config.max_running.unwrap_or(self.cache.config().max_sequences())
    }

    fn check_samples(&self, samples: u32) -> Result<(), RequestError> {
        let max = self.max_running();
        if samples == 0 || samples > max { Err(RequestError::Samples { samples, max }) } else { Ok(()) }
    }

    /// Whether the request could run alone in an empty pool.
    fn check_fits(&self, len: u32, max_tokens: u32, samples: u32) -> Result<(), RequestError> {
        let layout = self.cache.config().layout();
        let most = layout.blocks_for(max_tokens);
        let needed_blocks = match self.config.admission {
            Admission::Guaranteed => {
                let full = len / layout.block_size;
                u64::from(full) + u64::from(samples) * u64::from(most - full)
            }
            // Samples that do not fit side by side run one after the other.
            Admission::Overcommitted { .. } => u64::from(most),
        };
        let num_blocks = self.cache.config().num_blocks();
        if needed_blocks > u64::from(num_blocks) {
            return Err(RequestError::NeverFits { needed_blocks, num_blocks });
        }
        Ok(())
    }
}
