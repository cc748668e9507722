//! [`Scheduler`]: takes requests, plans steps, takes results. It coordinates owners, each of which alone changes what it
//! has: `Sequences` the records and their queues, `Ledger` what is promised and reserved, `Residency` what swapping costs,
//! `Events` what is not told yet, `KvCache` the blocks. This file holds requests and questions between steps, `branch`
//! and `cut` what else an application does then. `transitions` moves a sequence through several owners at once,
//! `planner` makes the plan, `admission` is the queue's door, `promise` and `room` decide who may have blocks, `commit`
//! takes the results, and `abort` ends sequences before their time.
//!
//! A step is planned, recorded, submitted, and committed; one is outstanding at a time. What an application does to a
//! sequence of the outstanding step (abort, fork, truncate) takes effect when the step is committed or rolled back.

use crate::cache::KvCache;
use crate::config::CacheConfig;
use crate::error::{Error, RequestError};
use crate::ids::{RequestId, SequenceId, TokenId};
use crate::schedule::budget::Turn;
use crate::schedule::events::Events;
use crate::schedule::ledger::Ledger;
use crate::schedule::prefix::Matched;
use crate::schedule::request::{Admission, Priority, Request, SchedulerConfig, SchedulerStats};
use crate::schedule::residency::Residency;
use crate::schedule::sequence::{Place, Sequences, State};
use crate::schedule::step_plan::StepPlan;

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
    /// Sequences that run at a time, samples one by one.
    pub(super) max_running: u32,
    pub(super) cache: KvCache,
    /// Whether there are windows, behind which sequences give blocks back while they live.
    pub(super) slides: bool,
    pub(super) sequences: Sequences,
    pub(super) ledger: Ledger,
    pub(super) residency: Residency,
    pub(super) events: Events,
    pub(super) stats: SchedulerStats,
    /// What the prefix cache has for the sequence at the door.
    pub(super) matched: Matched,
    /// The sequence that the last step left outside, and what had been given up by then: until more is, no other is let in.
    pub(super) closed_at: Option<(Place, u64)>,
    /// Sequences of the outstanding plan, in its order.
    pub(super) planned: Vec<Index>,
    /// Those that run, in the order in which the step that is planned has rows for them; kept for its memory.
    pub(super) turns: Vec<Turn>,
    /// Where the budget ran out among decoding sequences: the next step begins with this place.
    pub(super) resume_at: Option<Place>,
    /// The step that is planned has no rows yet, and no sequence finds room by usual means.
    pub(super) last_resort: bool,
    pub(super) spare_plan: StepPlan,
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
        cache.reckon_with(config.step_tokens);
        if let Some(prefix_cache) = config.prefix_cache {
            cache.enable_prefix_cache(prefix_cache.max_cached_blocks)?;
        }
        Ok(Self {
            max_running: config.max_running.unwrap_or(cache.config().max_sequences()),
            slides: cache.slides(),
            config,
            cache,
            sequences: Sequences::default(),
            ledger: Ledger::default(),
            residency: Residency::new(config.preemption),
            events: Events::default(),
            stats: SchedulerStats::default(),
            matched: Matched::default(),
            closed_at: None,
            planned: Vec::new(),
            turns: Vec::new(),
            resume_at: None,
            last_resort: false,
            spare_plan: StepPlan::default(),
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
        let (id, rank) = (self.sequences.new_request(self.cache.instance()), self.rank(request.priority));
        self.sequences.add(id.sample(0), request, max_tokens, rank, &self.cache);
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
        let sequence = &self.sequences[index];
        if sequence.state() != State::Kept {
            return Err(RequestError::NotKept { sequence: id });
        }
        if request.samples != 1 {
            return Err(RequestError::Samples { samples: request.samples, max: 1 });
        }
        let len = sequence.tokens().len() + request.tokens.len();
        let max_tokens = self.declared_maximum(len, &request)?;
        self.check_fits(len as u32, max_tokens, 1)?;
        if self.config.admission == Admission::Guaranteed {
            match self.promise_turn(index, len as u32, max_tokens) {
                Err(RequestError::PromiseExceeded { .. }) if request.may_wait => {}
                promised => promised?,
            }
        }
        // What is computed stays, but for the last token where its logits are needed again (I6).
        let computed = self.sequences[index].computed().min(len as u32 - 1);
        if self.cut_table(index, computed) {
            self.renew_promise(index);
        }
        if let Some(table) = self.sequences[index].table() {
            self.cache.set_max_tokens(table, max_tokens)?;
        }
        // Its last block may be partly filled now, and others' as well.
        self.note_tail(index);
        let rank = self.rank(request.priority);
        self.sequences.extend(index, request, max_tokens, rank, &self.cache);
        Ok(())
    }

    /// Promises a kept sequence its next turn, of `len` tokens and at most `max_tokens`; or changes nothing.
    fn promise_turn(&mut self, index: Index, len: u32, max_tokens: u32) -> Result<(), RequestError> {
        let old = self.sequences.set_turn(index, (len, max_tokens));
        // Its last token is computed again if there is nothing else to compute.
        self.sequences.set_cut(index, Some(len));
        self.set_promised(index, true);
        let checked = self.promises().check(Some(index));
        self.sequences.set_cut(index, None);
        if checked.is_err() {
            self.sequences.set_turn(index, old);
            self.set_promised(index, false);
        }
        checked
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
        self.sequences.propose(index, drafts);
        Ok(())
    }

    /// All tokens of a sequence that waits, runs or is kept: input and generated ones.
    pub fn tokens(&self, sequence: impl Into<SequenceId>) -> Option<&[TokenId]> {
        let index = self.sequences.find(sequence.into())?;
        Some(self.sequences[index].tokens_left())
    }

    /// How many of a sequence's tokens are in the cache.
    pub fn computed_tokens(&self, sequence: impl Into<SequenceId>) -> Option<u32> {
        let index = self.sequences.find(sequence.into())?;
        Some(self.sequences[index].computed())
    }

    /// Counters, and the pool as it is.
    ///
    /// # Complexity
    /// O(tables).
    pub fn stats(&self) -> SchedulerStats {
        let mut cache = self.cache.stats();
        if !self.is_overcommitted() {
            cache.promised_blocks = self.promises().blocks(None, false);
        }
        SchedulerStats {
            running: self.sequences.running().len() as u32,
            waiting: self.sequences.line().len() as u32,
            kept: self.sequences.kept().len() as u32,
            cache,
            ..self.stats
        }
    }

    // Checks at the door.

    pub(super) fn declared_maximum(&self, len: usize, request: &Request) -> Result<u32, RequestError> {
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

    /// Whether the request could run alone in an empty pool.
    pub(super) fn check_fits(&self, len: u32, max_tokens: u32, samples: u32) -> Result<(), RequestError> {
        let needed_blocks = match self.config.admission {
            Admission::Guaranteed => self.cache.side_by_side(len, max_tokens, samples),
            // Samples that do not fit side by side run one after the other.
            Admission::Overcommitted { .. } => u64::from(self.cache.blocks_at_least(max_tokens)),
        };
        let num_blocks = self.cache.config().num_blocks();
        if needed_blocks > u64::from(num_blocks) {
            return Err(RequestError::NeverFits { needed_blocks, num_blocks });
        }
        Ok(())
    }

    pub(super) fn is_overcommitted(&self) -> bool {
        self.config.admission != Admission::Guaranteed
    }

    pub(super) fn check_samples(&self, samples: u32) -> Result<(), RequestError> {
        let max = self.max_running;
        if samples == 0 || samples > max { Err(RequestError::Samples { samples, max }) } else { Ok(()) }
    }

    pub(super) fn find(&self, id: SequenceId) -> Result<Index, RequestError> {
        self.check_own(id.request())?;
        self.sequences.find(id).ok_or(RequestError::Unknown { sequence: id })
    }

    /// Fails for a request that another scheduler took.
    pub(super) fn check_own(&self, request: RequestId) -> Result<(), RequestError> {
        let scheduler = self.cache.instance();
        match request.scheduler() {
            owner if owner == scheduler => Ok(()),
            owner => Err(RequestError::Foreign { request: request.raw(), owner, scheduler }),
        }
    }

    /// The step at which a request counts as having arrived.
    pub(super) fn rank(&self, priority: Priority) -> u64 {
        self.stats.steps + u64::from(self.config.ageing_steps) * priority as u64
    }
}
