//! [`Scheduler`]: takes requests, plans steps, takes results. This file holds what an application does between steps;
//! `records` are the sequences and their queues, `planner` makes the plan, `admission` is the queue's door, `promise` and
//! `room` decide who may have blocks, `commit` takes the results, `abort` ends sequences before their time.
//!
//! A step is planned, recorded, submitted, and committed; one is outstanding at a time. What an application does to a
//! sequence of the outstanding step (abort, fork, truncate) takes effect when the step is committed or rolled back.

use crate::cache::KvCache;
use crate::config::CacheConfig;
use crate::error::{Error, RequestError};
use crate::ids::{RequestId, SequenceId, TokenId};
use crate::schedule::events::Events;
use crate::schedule::ledger::Ledger;
use crate::schedule::line::Line;
use crate::schedule::prefix::Matched;
use crate::schedule::request::{Admission, Priority, Request, SchedulerConfig, SchedulerStats};
use crate::schedule::residency::Residency;
use crate::schedule::sequence::{Counted, PendingFork, Place, Sequence, State};
use crate::schedule::step_plan::StepPlan;
use std::collections::BTreeMap;

/// Index of a sequence's record.
pub(super) type Index = usize;

/// Continuous batching over a paged cache: admission, growth, preemption, and a plan for every step.
///
/// ```
/// use paged_kv::{CacheConfig, KvType, ModelShape, Request, RowResult, Schedule, Scheduler, SchedulerConfig, StepEvent};
///
/// let shape = ModelShape::new(2, 4, 2, 32);
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
    /// Rows of a step that a sequence's windows are promised, or reserved, to have at most.
    pub(super) most_rows: u32,
    pub(super) cache: KvCache,
    pub(super) records: Vec<Option<Sequence>>,
    pub(super) free_records: Vec<Index>,
    pub(super) by_id: BTreeMap<SequenceId, Index>,
    /// By place.
    pub(super) running: Vec<Index>,
    pub(super) line: Line,
    /// Least recently finished first.
    pub(super) kept: BTreeMap<u64, Index>,
    /// Sequences of the outstanding plan, in its order.
    pub(super) planned: Vec<Index>,
    /// Sequences whose table is forked when the outstanding step ends, in the order in which they came.
    pub(super) pending_forks: BTreeMap<u64, Index>,
    pub(super) spare_plan: StepPlan,
    pub(super) order: Vec<Index>,
    /// Rows that each prompt being read may have in the step that is planned.
    pub(super) shares: Vec<(Index, u32)>,
    pub(super) events: Events,
    /// What the prefix cache has for the sequence at the door.
    pub(super) matched: Matched,
    pub(super) residency: Residency,
    /// The step that is planned has no rows yet, and nobody finds room by usual means.
    pub(super) last_resort: bool,
    /// The sequence that the last step left outside, and what had been given up by then: until more is, no other is let in.
    pub(super) closed_at: Option<(Place, u64)>,
    /// Where the budget ran out among decoding sequences: the next step begins with this place.
    pub(super) resume_at: Option<Place>,
    pub(super) ledger: Ledger,
    /// Sums over sequences in line and running.
    pub(super) sums: Counted,
    /// Running records of each class.
    pub(super) running_of_class: [u32; Priority::COUNT],
    pub(super) next_kept: u64,
    pub(super) next_fork: u64,
    pub(super) next_request: u64,
    pub(super) next_arrival: u64,
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
        let mut cache = KvCache::new(cache);
        if let Some(prefix_cache) = config.prefix_cache {
            cache.enable_prefix_cache(prefix_cache.max_cached_blocks)?;
        }
        Ok(Self {
            most_rows: config.step_tokens,
            config,
            cache,
            records: Vec::new(),
            free_records: Vec::new(),
            by_id: BTreeMap::new(),
            running: Vec::new(),
            line: Line::default(),
            kept: BTreeMap::new(),
            planned: Vec::new(),
            pending_forks: BTreeMap::new(),
            spare_plan: StepPlan::default(),
            order: Vec::new(),
            shares: Vec::new(),
            events: Events::default(),
            matched: Matched::default(),
            residency: Residency::new(config.preemption),
            last_resort: false,
            closed_at: None,
            resume_at: None,
            ledger: Ledger::default(),
            sums: Counted::default(),
            running_of_class: [0; Priority::COUNT],
            next_kept: 0,
            next_fork: 0,
            next_request: 1,
            next_arrival: 1,
            stats: SchedulerStats::default(),
        })
    }

    /// Makes all hashes of the prefix cache alike, to test that hits are compared. Not part of the stable interface.
    #[doc(hidden)]
    pub fn set_constant_hash(&mut self, hash: Option<u64>) {
        self.cache.set_constant_hash(hash);
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
    /// guaranteed admission [`RequestError::PromiseExceeded`] when what it may need cannot be promised now and the request
    /// does not say that it [may wait](Request::may_wait). The sequence stays kept then.
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
        if self.config.admission == Admission::Guaranteed {
            match self.promise_turn(index, len as u32, max_tokens) {
                Err(RequestError::PromiseExceeded { .. }) if request.may_wait => {}
                promised => promised?,
            }
        }
        // What is computed stays, but for the last token where its logits are needed again (I6).
        let computed = self.get(index).computed.min(len as u32 - 1);
        let computed = if self.cut_table(index, computed) { 0 } else { computed };
        if let Some(table) = self.get(index).table {
            self.cache.set_max_tokens(table, max_tokens)?;
        }
        // Where the last token is computed again, its block may be one that others know.
        self.note_tail(index);
        let arrival = self.arrive();
        let rank = self.rank(request.priority);
        self.leave_queue(index);
        let sequence = self.get_mut(index);
        sequence.priority = request.priority;
        sequence.rank = rank;
        if !request.retain.is_empty() {
            sequence.retain = request.retain.into();
        }
        sequence.tokens.extend_from_slice(&request.tokens);
        sequence.drafts.clear();
        sequence.computed = computed;
        sequence.confirmed = sequence.confirmed.min(computed);
        sequence.input_len = len as u32;
        sequence.max_tokens = max_tokens;
        sequence.to_context_end = request.max_new_tokens.is_none();
        sequence.stop_tokens = request.stop_tokens.into();
        sequence.keep = request.keep;
        sequence.may_wait = request.may_wait;
        sequence.was_let_in = false;
        sequence.arrival = arrival;
        sequence.preemptions = 0;
        sequence.state = State::Waiting;
        self.enqueue(index);
        Ok(())
    }

    /// Promises a kept sequence its next turn, of `len` tokens and at most `max_tokens`; or changes nothing.
    fn promise_turn(&mut self, index: Index, len: u32, max_tokens: u32) -> Result<(), RequestError> {
        let sequence = self.get_mut(index);
        let old = (sequence.max_tokens, sequence.input_len);
        // Its last token is computed again if there is nothing else to compute.
        sequence.truncating = Some(len);
        (sequence.max_tokens, sequence.input_len) = (max_tokens, len);
        self.set_promised(index, true);
        let checked = self.check_promise(Some(index));
        let sequence = self.get_mut(index);
        sequence.truncating = None;
        if checked.is_err() {
            (sequence.max_tokens, sequence.input_len) = old;
            self.set_promised(index, false);
        }
        checked
    }

    /// A new request that begins with the first `at` tokens of `parent` and goes on with the request's tokens. Blocks
    /// that hold the common part are shared, as far as they are computed; nothing is copied until one of the two writes
    /// into a shared block.
    ///
    /// # Errors
    /// [`RequestError::Unknown`], [`RequestError::BeyondLength`] when `at` exceeds the parent's tokens, the errors of
    /// [`add`](Self::add), and under guaranteed admission [`RequestError::PromiseExceeded`] where the request does not say
    /// that it [may wait](Request::may_wait). Nothing has changed then. A branch that waits shares what the prefix cache
    /// has of it when it is let in.
    pub fn fork(
        &mut self,
        parent: impl Into<SequenceId>,
        at: usize,
        request: Request,
    ) -> Result<RequestId, RequestError> {
        self.cache.check_poison()?;
        let parent = self.find(parent.into())?;
        let source = self.get(parent);
        let len = source.tokens_left().len();
        if at > len {
            return Err(RequestError::BeyondLength { tokens: at, len });
        }
        let len = at + request.tokens.len();
        if len == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        let max_tokens = self.declared_maximum(len, &request)?;
        self.check_samples(request.samples)?;
        self.check_fits(len as u32, max_tokens, request.samples)?;
        // Committed tokens only, and not all of the child's (I6).
        let shared = (at as u32).min(source.computed).min(len as u32 - 1);
        let prefix = source.tokens[..at].to_vec();
        let namespace = source.namespace;
        let fork = source.table.filter(|&table| shared > 0 && self.cache.reaches(table, shared));
        let confirmed = fork.map_or(0, |_| source.confirmed);
        let fork = fork.map(|parent| PendingFork { order: None, parent, at: shared });
        let may_wait = request.may_wait;
        let id = self.new_request();
        let mut child = self.record(id.sample(0), request, prefix, max_tokens);
        child.fork = fork;
        (child.namespace, child.confirmed) = (namespace, confirmed);
        let index = self.insert(child);
        // From now on the sum of promises knows of the blocks to be shared.
        self.note_pending_fork(index);
        self.set_promised(index, self.config.admission == Admission::Guaranteed);
        self.enqueue(index);
        match self.share_or_go_alone(index, parent) {
            Err(RequestError::PromiseExceeded { .. }) if may_wait => self.go_alone(index),
            Err(error) => {
                self.drop_record(index);
                return Err(error);
            }
            Ok(()) => {}
        }
        if self.get(parent).is_promised() {
            // Its last block is about to be shared.
            self.ledger.note_shared_tail(parent);
        }
        if self.get(parent).planned_rows == 0 {
            self.resolve_fork(index);
        }
        Ok(id)
    }

    /// Promises a branch what it needs, and sets tables aside for it. Where none are left it shares nothing, and is
    /// computed alone.
    fn share_or_go_alone(&mut self, index: Index, parent: Index) -> Result<(), RequestError> {
        let guaranteed = self.config.admission == Admission::Guaranteed;
        if guaranteed {
            self.check_promise(None)?;
        }
        if self.get(index).fork.is_some() && !self.ensure_tables(index, Some(parent)) {
            self.drop_pending_fork(index);
            if guaranteed {
                self.check_promise(None)?;
            }
        }
        Ok(())
    }

    /// A branch shares nothing and is promised nothing: it waits in line like any other request.
    fn go_alone(&mut self, index: Index) {
        self.drop_pending_fork(index);
        self.set_promised(index, false);
        let sequence = self.get_mut(index);
        sequence.confirmed = 0;
    }

    fn note_pending_fork(&mut self, index: Index) {
        let order = self.next_fork;
        if let Some(fork) = &mut self.get_mut(index).fork {
            fork.order = Some(order);
            self.next_fork += 1;
            self.pending_forks.insert(order, index);
        }
    }

    fn drop_pending_fork(&mut self, index: Index) {
        if let Some(order) = self.get_mut(index).fork.take().and_then(|fork| fork.order) {
            self.pending_forks.remove(&order);
        }
        self.recount(index);
    }

    /// Cuts a sequence to its first `len` tokens; a running one generates again from there, up to the same maximum. What a
    /// step that is outstanding answers for it is not told, and lost.
    ///
    /// # Errors
    /// [`RequestError::Unknown`], [`RequestError::BeyondLength`] when it is shorter, [`RequestError::EmptyPrompt`] for 0;
    /// under guaranteed admission [`RequestError::PromiseExceeded`] when the cut gives up blocks that others hold, and
    /// what it will need instead cannot be promised, and [`RequestError::NeverFits`] when samples that share less would
    /// exceed the pool.
    pub fn truncate(&mut self, sequence: impl Into<SequenceId>, len: usize) -> Result<(), RequestError> {
        self.cache.check_poison()?;
        let index = self.find(sequence.into())?;
        let sequence = self.get(index);
        let current = sequence.tokens_left().len();
        if len > current {
            return Err(RequestError::BeyondLength { tokens: len, len: current });
        }
        if len == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        let len = len as u32;
        let earlier = sequence.truncating;
        if sequence.state != State::Kept {
            self.check_fits(len.min(sequence.input_len), sequence.max_tokens, sequence.width())?;
        }
        self.set_cut(index, Some(len));
        let is_late = self.get(index).planned_rows > 0;
        if self.get(index).is_promised() {
            let considered = Some(index).filter(|_| !is_late);
            if let Err(error) = self.check_promise(considered) {
                self.set_cut(index, earlier);
                return Err(error);
            }
        }
        if !is_late {
            self.truncate_now(index);
        }
        Ok(())
    }

    /// Notes to which length a sequence is to be cut, if at all: now, or when the outstanding step ends.
    fn set_cut(&mut self, index: Index, len: Option<u32>) {
        let sequence = self.get_mut(index);
        sequence.truncating = len;
        if len.is_some() && sequence.planned_rows > 0 {
            self.ledger.note_late_cut(index);
        } else {
            self.ledger.forget_late_cut(index);
        }
    }

    /// Makes a cut that was asked for.
    pub(super) fn truncate_now(&mut self, index: Index) {
        let node_tokens = self.cache.node_tokens();
        let sequence = self.get_mut(index);
        let Some(len) = sequence.truncating.take() else { return };
        self.ledger.forget_late_cut(index);
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
        sequence.confirmed = sequence.confirmed.min(computed);
        sequence.hashes.truncate((len / node_tokens) as usize);
        let is_behind = self.cut_table(index, computed);
        self.ledger.note_given_up();
        self.renew_promise(index);
        self.recount(index);
        self.wake_those_behind(index);
        // What was pinned after the cut was promised does not keep its blocks.
        while self.get(index).is_promised() && self.check_promise(None).is_err() {
            if self.cache.give_up_pins(self.cache.free_blocks() + 1) == 0 {
                break;
            }
        }
        // Shared blocks that it gave up are not free, so what it needs instead may not be there any more: then it is let
        // in again when everything can be reserved (I9).
        let is_short = self.get(index).protected && self.reserved_blocks() > self.cache.free_blocks();
        if is_short || is_behind && self.get(index).state == State::Running {
            self.release_table(index);
            self.requeue(index);
        }
    }

    /// Cuts a sequence's table to `len` tokens. Where a window has left behind what the next row would see, it gives the
    /// table up: it is computed again. Returns whether it did.
    fn cut_table(&mut self, index: Index, len: u32) -> bool {
        let Some(table) = self.get(index).table else { return false };
        if !self.cache.reaches(table, len) {
            self.release_table(index);
            return true;
        }
        let cut = self.cache.truncate(table, len);
        debug_assert!(cut.is_ok(), "a table that no step writes through is cut: {cut:?}");
        false
    }

    /// Drafts for a sequence's next step: the step computes one row for each, and the application answers with
    /// [`RowResult::Accepted`](crate::RowResult::Accepted). They replace earlier ones; those beyond the declared maximum
    /// or the step's budget are left out. A commit forgets them, used or not: what follows its new token is unknown yet.
    ///
    /// # Errors
    /// [`RequestError::Unknown`], and [`RequestError::TooManyDrafts`] beyond
    /// [`SchedulerConfig::max_drafts`](crate::SchedulerConfig::max_drafts).
    pub fn propose(
        &mut self,
        sequence: impl Into<SequenceId>,
        drafts: &[TokenId],
    ) -> Result<(), RequestError> {
        let index = self.find(sequence.into())?;
        let max = self.config.max_drafts;
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
        Some(self.get(index).tokens_left())
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
        let mut cache = self.cache.stats();
        if !self.is_overcommitted() {
            cache.promised_blocks = self.promised_blocks(None, false);
        }
        SchedulerStats {
            running: self.running.len() as u32,
            waiting: self.line.len() as u32,
            kept: self.kept.len() as u32,
            cache,
            ..self.stats
        }
    }

    // Checks at the door.

    fn declared_maximum(&self, len: usize, request: &Request) -> Result<u32, RequestError> {
        let config = self.cache.config();
        let max_tokens = config.max_sequence_tokens();
        let needed = len as u64 + u64::from(request.max_new_tokens.unwrap_or(0));
        if needed > u64::from(max_tokens) && !fault!(MaximumUnchecked) {
            return Err(RequestError::ExceedsContext { needed, max_tokens });
        }
        let pool_tokens = config.pool_tokens();
        Ok(match request.max_new_tokens {
            Some(_) => needed as u32,
            None => max_tokens.min(pool_tokens).max(needed as u32),
        })
    }

    pub(super) fn is_overcommitted(&self) -> bool {
        self.config.admission != Admission::Guaranteed
    }

    pub(super) fn max_running(&self) -> u32 {
        self.config.max_running.unwrap_or(self.cache.config().max_sequences())
    }

    fn check_samples(&self, samples: u32) -> Result<(), RequestError> {
        let max = self.max_running();
        if samples == 0 || samples > max { Err(RequestError::Samples { samples, max }) } else { Ok(()) }
    }
}
