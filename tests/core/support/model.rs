//! A naive model of the scheduler: it keeps every token of every sequence and knows nothing of blocks.
//!
//! The simulated device tells what each row sees; the next token is a pure function of that and of the sample's number.
//! The model computes the same function over the tokens it keeps itself, so a run with preemptions, copies, forks and
//! dropped plans must produce the very tokens that a run without any of them produces.

use crate::block_states::assert_states_sum;
use crate::naive_blocks::{most_blocks, num_blocks, pool_tokens};
use crate::simulated_device::{Device, Known, Stack, history, stacks_of, then};
use paged_kv::{
    Admission, CacheConfig, CacheStats, CommitError, FinishReason, Namespace, Priority, Rates, Request,
    RequestError, RequestId, Retention, RowResult, Schedule, Scheduler, SchedulerConfig, SequenceId,
    StepEvent, StepPlan, WaitReason,
};
use std::collections::{BTreeMap, BTreeSet};

/// The token that follows a history in a sample: small numbers, so that stop tokens are met.
pub(crate) fn answer(history: u64, sample: u32) -> u32 {
    ((then(history, sample) >> 33) % 16) as u32
}

/// How a request goes on from its first tokens.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// New tokens; their values follow from `seed`.
    pub(crate) len: u32,
    pub(crate) seed: u32,
    pub(crate) max_new: Option<u32>,
    pub(crate) samples: u32,
    pub(crate) keep: bool,
    pub(crate) stops: bool,
    pub(crate) priority: Priority,
    pub(crate) salt: u64,
    /// Leading tokens that follow from another seed: a system prompt that others have, too.
    pub(crate) system: u32,
    pub(crate) system_seed: u32,
    /// Leading tokens that stay in the prefix cache in their own way.
    pub(crate) retain: Option<(u32, Retention, Option<u32>)>,
}

impl Turn {
    fn tokens(&self) -> Vec<u32> {
        let seed = |index| if index < self.system { self.system_seed } else { self.seed };
        (0..self.len).map(|index| answer(u64::from(seed(index)), index)).collect()
    }

    fn stop_tokens(&self) -> &'static [u32] {
        if self.stops { &[3, 11] } else { &[] }
    }

    fn request(&self) -> Request {
        let request = Request::new(self.tokens()).stop_tokens(self.stop_tokens());
        let request = request.samples(self.samples).keep(self.keep).priority(self.priority);
        let request = request.namespace(Namespace { salt: self.salt, ..Namespace::default() });
        let request = match self.retain {
            Some((tokens, retention, ttl_steps)) => request.retain(0..tokens, retention, ttl_steps),
            None => request,
        };
        match self.max_new {
            Some(max_new) => request.max_new_tokens(max_new),
            None => request,
        }
    }
}

/// One sequence, or the samples of a request until they part.
#[derive(Clone, Debug)]
struct Chat {
    tokens: Vec<u32>,
    salt: u64,
    max_len: usize,
    to_context_end: bool,
    stops: &'static [u32],
    keep: bool,
    kept: bool,
    /// Samples that have not parted; empty once they have.
    samples: Vec<u32>,
    drafts: Vec<u32>,
    /// What waits for the outstanding step to end.
    cut: Option<usize>,
    aborting: bool,
    dead: Vec<u32>,
}

impl Chat {
    /// Appends a token; returns why the sequence ends with it, if it does.
    fn push(&mut self, token: u32) -> Option<FinishReason> {
        self.tokens.push(token);
        if self.stops.contains(&token) {
            return Some(FinishReason::Stop);
        }
        (self.tokens.len() >= self.max_len).then(|| self.full())
    }

    fn full(&self) -> FinishReason {
        if self.to_context_end { FinishReason::ContextFull } else { FinishReason::MaxTokens }
    }
}

/// The sequences that a chat stands for.
fn samples_of(id: SequenceId, chat: &Chat) -> impl Iterator<Item = SequenceId> {
    let own = chat.samples.is_empty().then_some(id.sample());
    let samples: Vec<u32> = chat.samples.iter().copied().chain(own).collect();
    samples.into_iter().map(move |sample| id.request().sample(sample))
}

#[derive(Debug)]
struct Outstanding<Seen> {
    plan: StepPlan,
    /// Of each of its sequences.
    known: Vec<Known>,
    seen: Option<Vec<Seen>>,
}

/// What a commit said about one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Told {
    tokens: Vec<u32>,
    end: Option<FinishReason>,
}

/// How often a history came to what is hard to reach.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reached {
    pub(crate) preemptions: u64,
    pub(crate) reclaimed: u64,
    pub(crate) copies: u64,
    pub(crate) accepted_drafts: u64,
    pub(crate) late_cuts: u64,
    pub(crate) promises_refused: u64,
    pub(crate) hit_tokens: u64,
    pub(crate) evictions: u64,
    pub(crate) swaps_in: u64,
    pub(crate) cuts: u64,
    /// Devices lost, and sequences that the host pool kept through it.
    pub(crate) losses: u64,
    pub(crate) survivors: u64,
}

/// How often a history came to what only windows and chunks have.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slid {
    /// Rows after blocks that were given back.
    pub(crate) rows: u64,
    /// Cuts to where a window had left something behind: what was computed is lost.
    pub(crate) cuts_behind: u64,
    /// Requests that began in the middle of what was known, with windows that had left blocks behind there.
    pub(crate) hits: u64,
}

impl Slid {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            rows: self.rows + other.rows,
            cuts_behind: self.cuts_behind + other.cuts_behind,
            hits: self.hits + other.hits,
        }
    }

    /// How often it came to what was rarest.
    pub(crate) fn rarest(self) -> u64 {
        let Self { rows, cuts_behind, hits } = self;
        rows.min(cuts_behind).min(hits)
    }
}

impl Reached {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            preemptions: self.preemptions + other.preemptions,
            reclaimed: self.reclaimed + other.reclaimed,
            copies: self.copies + other.copies,
            accepted_drafts: self.accepted_drafts + other.accepted_drafts,
            late_cuts: self.late_cuts + other.late_cuts,
            promises_refused: self.promises_refused + other.promises_refused,
            hit_tokens: self.hit_tokens + other.hit_tokens,
            evictions: self.evictions + other.evictions,
            swaps_in: self.swaps_in + other.swaps_in,
            cuts: self.cuts + other.cuts,
            losses: self.losses + other.losses,
            survivors: self.survivors + other.survivors,
        }
    }

    /// How often it came to what was rarest.
    pub(crate) fn rarest(self) -> u64 {
        let Self {
            preemptions,
            reclaimed,
            copies,
            accepted_drafts,
            late_cuts,
            promises_refused,
            hit_tokens,
            evictions,
            swaps_in,
            cuts,
            losses,
            survivors,
        } = self;
        let rare = [
            preemptions,
            reclaimed,
            copies,
            accepted_drafts,
            late_cuts,
            promises_refused,
            hit_tokens,
            evictions,
            swaps_in,
            cuts,
            losses,
            survivors,
        ];
        rare.into_iter().min().unwrap_or_default()
    }
}

/// Scheduler, simulated device and model side by side.
#[derive(Debug)]
pub(crate) struct World<D: Device> {
    scheduler: Scheduler,
    config: SchedulerConfig,
    cache: CacheConfig,
    stacks: Vec<Stack>,
    /// Of one sequence, row by row.
    pool_tokens: u32,
    pub(crate) device: D,
    /// Sequences at a time.
    pub(crate) max_chats: usize,
    chats: BTreeMap<SequenceId, Chat>,
    plan: Option<Outstanding<D::Seen>>,
    /// A step was planned and neither committed nor rolled back yet, whether its plan still exists or not.
    in_step: bool,
    /// Sequences whose logits the outstanding step wants.
    with_logits: BTreeSet<SequenceId>,
    /// Sequences that were aborted since the last commit, which the next one tells.
    ended: BTreeSet<SequenceId>,
    generated: u64,
    /// Of requests, and of sequences that were extended.
    priorities: BTreeMap<RequestId, Priority>,
    extended: BTreeMap<SequenceId, Priority>,
    /// Since the last commit.
    schedule_calls: u32,
    pub(crate) reached: Reached,
    pub(crate) slid: Slid,
}

impl<D: Device> World<D> {
    pub(crate) fn new(config: SchedulerConfig, cache: CacheConfig) -> Self {
        Self {
            scheduler: Scheduler::new(config, cache.clone()).unwrap(),
            config,
            device: D::new(&cache),
            stacks: stacks_of(&cache),
            pool_tokens: pool_tokens(&cache, 1),
            cache,
            max_chats: 12,
            chats: BTreeMap::new(),
            plan: None,
            in_step: false,
            with_logits: BTreeSet::new(),
            ended: BTreeSet::new(),
            generated: 0,
            priorities: BTreeMap::new(),
            extended: BTreeMap::new(),
            schedule_calls: 0,
            reached: Reached::default(),
            slid: Slid::default(),
        }
    }

    /// Compares everything that can be compared between operations.
    pub(crate) fn check(&mut self) {
        self.scheduler.assert_consistent();
        assert_states_sum(self.scheduler.cache());
        if !self.in_step {
            self.device.spoil_free(self.scheduler.cache());
        }
        for (&id, chat) in &self.chats {
            let left = &chat.tokens[..chat.cut.unwrap_or(chat.tokens.len())];
            assert_eq!(self.scheduler.tokens(id), Some(left), "tokens of {id:?}");
        }
        let stats = self.scheduler.stats();
        assert_eq!((stats.running + stats.waiting + stats.kept) as usize, self.chats.len(), "sequences");
        assert_eq!(stats.generated_tokens, self.generated);
        if self.config.admission == Admission::Guaranteed {
            assert_eq!(stats.preemptions, 0, "I8: guaranteed sequences are not preempted");
        }
        self.reached.preemptions = stats.preemptions;
        self.reached.reclaimed = stats.reclaimed;
        self.reached.copies = stats.cache.block_copies;
        self.reached.hit_tokens = stats.prefix_hit_tokens;
        self.reached.evictions = stats.cache.evictions;
        self.reached.swaps_in = stats.swaps_in;
        let cache = stats.cache;
        assert_eq!(
            cache.free_blocks + cache.cached_blocks + cache.held_blocks + cache.in_transfer_blocks,
            cache.num_blocks,
            "I1: {cache:?}"
        );
        assert!(
            cache.host_free_blocks + cache.host_in_transfer_blocks <= cache.host_blocks,
            "I1: the host pool: {cache:?}"
        );
        assert!(stats.prefix_hit_tokens <= stats.prefix_wanted_tokens, "I6: {stats:?}");
    }

    /// Requests that have not ended, with the rows that each may need at most if it is computed once.
    pub(crate) fn unfinished(&self) -> impl Iterator<Item = (SequenceId, u64)> {
        let rows = |chat: &Chat| (chat.max_len * chat.samples.len().max(1)) as u64;
        self.chats.iter().filter(|(_, chat)| !chat.kept).map(move |(&id, chat)| (id, rows(chat)))
    }

    pub(crate) fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    pub(crate) fn num_chats(&self) -> usize {
        self.chats.len()
    }

    pub(crate) fn set_rates(&mut self, rates: Rates) {
        self.scheduler.set_rates(rates);
    }

    /// All hashes of the prefix cache are alike from now on.
    pub(crate) fn make_hashes_collide(&mut self) {
        self.scheduler.set_constant_hash(Some(0));
    }

    fn pick(&self, index: usize) -> Option<SequenceId> {
        self.chats.keys().copied().nth(index % self.chats.len().max(1))
    }

    fn limit(&self, len: usize, max_new: Option<u32>) -> usize {
        match max_new {
            Some(max_new) => len + max_new as usize,
            None => (self.cache.max_sequence_tokens().min(self.pool_tokens) as usize).max(len),
        }
    }

    fn chat(&self, tokens: Vec<u32>, salt: u64, turn: &Turn, samples: Vec<u32>) -> Chat {
        Chat {
            max_len: self.limit(tokens.len(), turn.max_new),
            tokens,
            salt,
            to_context_end: turn.max_new.is_none(),
            stops: turn.stop_tokens(),
            keep: turn.keep,
            kept: false,
            samples,
            drafts: Vec::new(),
            cut: None,
            aborting: false,
            dead: Vec::new(),
        }
    }

    /// What a refused operation must leave as it was.
    fn snapshot(&self) -> impl PartialEq + std::fmt::Debug + use<D> {
        let stats = self.scheduler.stats();
        let queues = (stats.running, stats.waiting, stats.kept);
        let cache = stats.cache;
        let blocks = (cache.free_blocks, cache.shared_blocks, cache.num_tables, cache.tokens);
        let computed: Vec<_> = self.chats.keys().map(|&id| self.scheduler.computed_tokens(id)).collect();
        (queues, blocks, computed)
    }

    pub(crate) fn add(&mut self, turn: &Turn) -> Option<RequestId> {
        if self.chats.len() >= self.max_chats {
            return None;
        }
        let before = self.snapshot();
        match self.scheduler.add(turn.request()) {
            Ok(id) => {
                let chat = self.chat(turn.tokens(), turn.salt, turn, (0..turn.samples).collect());
                self.chats.insert(id.sample(0), chat);
                self.priorities.insert(id, turn.priority);
                Some(id)
            }
            Err(error) => {
                assert_eq!(self.snapshot(), before, "{error}");
                let most = self.limit(turn.len as usize, turn.max_new);
                let blocks = most_blocks(&self.cache, most as u32, self.config.step_tokens);
                let fits = most <= self.cache.max_sequence_tokens() as usize
                    && turn.samples * blocks <= self.cache.num_blocks();
                let running = self.config.max_running.unwrap_or(self.cache.max_sequences());
                assert!(!fits || turn.samples > running || turn.len == 0, "{error} though it fits");
                None
            }
        }
    }

    pub(crate) fn fork(&mut self, index: usize, at: usize, turn: &Turn) {
        let Some(parent) = self.pick(index).filter(|_| self.chats.len() < self.max_chats) else { return };
        let at = at % (self.chats[&parent].tokens.len() + 2);
        let before = self.snapshot();
        match self.scheduler.fork(parent, at, turn.request()) {
            Ok(id) => {
                let mut tokens = self.chats[&parent].tokens[..at].to_vec();
                tokens.extend(turn.tokens());
                let chat = self.chat(tokens, self.chats[&parent].salt, turn, (0..turn.samples).collect());
                self.chats.insert(id.sample(0), chat);
                self.priorities.insert(id, turn.priority);
            }
            Err(error) => {
                assert_eq!(self.snapshot(), before, "{error}");
                if let RequestError::PromiseExceeded { needed, available } = error {
                    self.reached.promises_refused += 1;
                    assert!(needed > available && self.config.admission == Admission::Guaranteed);
                }
            }
        }
    }

    pub(crate) fn extend(&mut self, index: usize, turn: &Turn) {
        let kept: Vec<SequenceId> =
            self.chats.iter().filter(|(_, chat)| chat.kept).map(|(&id, _)| id).collect();
        let Some(&id) = kept.get(index % kept.len().max(1)) else { return };
        let turn = Turn { samples: 1, ..turn.clone() };
        let before = self.snapshot();
        match self.scheduler.extend(id, turn.request()) {
            Ok(()) => {
                let mut tokens = self.chats[&id].tokens.clone();
                tokens.extend(turn.tokens());
                let chat = self.chat(tokens, self.chats[&id].salt, &turn, Vec::new());
                self.chats.insert(id, chat);
                self.extended.insert(id, turn.priority);
            }
            Err(RequestError::Cache(error)) => panic!("{error}"),
            Err(error) => assert_eq!(self.snapshot(), before, "{error}"),
        }
    }

    pub(crate) fn truncate(&mut self, index: usize, len: usize) {
        let Some(id) = self.pick(index) else { return };
        let old = self.chats[&id].cut.unwrap_or(self.chats[&id].tokens.len());
        let len = len % (old + 2);
        let before = self.snapshot();
        let computed = self.scheduler.computed_tokens(id).unwrap_or(0);
        match self.scheduler.truncate(id, len) {
            Ok(()) => {
                self.reached.cuts += 1;
                assert_eq!(self.scheduler.tokens(id).map(<[u32]>::len), Some(len), "{id:?} is cut at once");
                let is_planned = self.in_step && self.scheduler.planned_sequences().any(|other| other == id);
                let chat = self.chats.get_mut(&id).unwrap();
                if is_planned {
                    self.reached.late_cuts += 1;
                    chat.cut = Some(len);
                } else {
                    chat.tokens.truncate(len);
                    let most = if chat.kept { len } else { len - 1 } as u32;
                    let left = self.scheduler.computed_tokens(id).unwrap_or(0);
                    // All of it, or nothing where a window has left something behind.
                    let is_behind = left == 0 && computed.min(most) > 0;
                    assert!(left == computed.min(most) || is_behind, "{id:?}: {left} of {computed} are left");
                    self.slid.cuts_behind += u64::from(is_behind);
                }
                chat.drafts.clear();
            }
            Err(error) => {
                assert_eq!(self.snapshot(), before, "{error}");
                let refused =
                    matches!(error, RequestError::PromiseExceeded { .. } | RequestError::NeverFits { .. })
                        && self.config.admission == Admission::Guaranteed;
                assert!(refused || len == 0 || len > old, "{error}");
            }
        }
    }

    /// Proposes `num` drafts, the first `right` of them as the sequence will go on.
    pub(crate) fn propose(&mut self, index: usize, num: u32, right: u32) {
        let Some(id) = self.pick(index) else { return };
        let chat = self.chats.get_mut(&id).unwrap();
        let mut hash = history(&chat.tokens);
        let drafts: Vec<u32> = (0..num)
            .map(|place| {
                let token = answer(hash, id.sample()) + 16 * u32::from(place >= right);
                hash = then(hash, token);
                token
            })
            .collect();
        match self.scheduler.propose(id, &drafts) {
            Ok(()) => chat.drafts = drafts,
            Err(error) => assert!(matches!(error, RequestError::TooManyDrafts { .. }), "{error}"),
        }
    }

    pub(crate) fn abort(&mut self, index: usize) {
        let Some(request) = self.pick(index).map(SequenceId::request) else { return };
        let ids: Vec<SequenceId> = self.chats.keys().copied().filter(|id| id.request() == request).collect();
        let fresh = ids.iter().any(|id| !self.chats[id].aborting);
        assert_eq!(self.scheduler.abort(request).unwrap(), fresh);
        for id in ids {
            self.aborted(id);
        }
        assert!(!self.scheduler.abort(request).unwrap(), "aborting twice ends nothing");
    }

    pub(crate) fn abort_sample(&mut self, index: usize, sample: u32) {
        let Some(id) = self.pick(index) else { return };
        let chat = self.chats.get_mut(&id).unwrap();
        if chat.samples.is_empty() {
            let fresh = !chat.aborting;
            assert_eq!(self.scheduler.abort_sequence(id).unwrap(), fresh);
            self.aborted(id);
            return;
        }
        let sample = chat.samples[sample as usize % chat.samples.len()];
        let fresh = !chat.dead.contains(&sample) && !chat.aborting;
        assert_eq!(self.scheduler.abort_sequence(id.request().sample(sample)).unwrap(), fresh);
        assert!(
            !self.scheduler.abort_sequence(id.request().sample(sample)).unwrap(),
            "aborting twice ends nothing"
        );
        if !fresh {
            return;
        }
        let request = id.request();
        // Whether a sequence without logits is in the step cannot be seen from here; `commit` accepts both.
        if self.in_step {
            chat.dead.push(sample);
        } else {
            chat.samples.retain(|&other| other != sample);
        }
        let alive = chat.samples.iter().find(|sample| !chat.dead.contains(sample));
        let name = id.request().sample(alive.copied().unwrap_or(id.sample()));
        if self.scheduler.tokens(name).is_none() {
            let ended = if self.in_step { self.chats[&id].dead.clone() } else { vec![sample] };
            self.ended.extend(ended.into_iter().map(|sample| request.sample(sample)));
            self.chats.remove(&id);
            return;
        }
        if !self.in_step {
            self.ended.insert(request.sample(sample));
        }
        if name != id {
            // The others go by the first one that lives.
            assert_eq!(self.scheduler.tokens(id), None);
            let chat = self.chats.remove(&id).unwrap();
            self.chats.insert(name, chat);
            if self.with_logits.remove(&id) {
                self.with_logits.insert(name);
            }
        }
    }

    fn aborted(&mut self, id: SequenceId) {
        if self.scheduler.tokens(id).is_none() {
            let chat = self.chats.remove(&id).unwrap();
            if !chat.kept {
                self.ended.extend(samples_of(id, &chat));
            }
        } else {
            assert!(self.in_step, "only a sequence of the step is aborted later");
            self.chats.get_mut(&id).unwrap().aborting = true;
        }
    }

    /// A step that was dropped ends what was to end with it; the next commit tells.
    fn drop_ended(&mut self) {
        for (&id, chat) in &self.chats {
            let ends = |sample: &SequenceId| chat.aborting || chat.dead.contains(&sample.sample());
            self.ended.extend(samples_of(id, chat).filter(ends));
        }
        self.settle();
    }

    /// What waited for the step takes effect.
    fn settle(&mut self) {
        self.in_step = false;
        self.with_logits.clear();
        self.chats.retain(|_, chat| {
            let dead = std::mem::take(&mut chat.dead);
            let grouped = !chat.samples.is_empty();
            chat.samples.retain(|sample| !dead.contains(sample));
            if let Some(len) = chat.cut.take() {
                chat.tokens.truncate(len);
            }
            !chat.aborting && (!grouped || !chat.samples.is_empty())
        });
    }

    /// Plans a step; an outstanding one is rolled back. Returns whether there is one.
    pub(crate) fn schedule(&mut self) -> bool {
        let stale = self.plan.take();
        let mut planned = self.scheduler.schedule();
        self.schedule_calls += 1;
        while let Schedule::Waiting(WaitReason::Transfers { steps }) = planned {
            assert!(steps > 0 && self.device.num_transfers() > 0, "waits for transfers that nobody makes");
            assert_eq!(self.scheduler.stats().running, 0, "I9: who runs waits for somebody else's transfer");
            self.complete_transfer(0);
            planned = self.scheduler.schedule();
            self.schedule_calls += 1;
        }
        self.drop_ended();
        if let Some(stale) = stale {
            let results = vec![RowResult::Token(0); stale.plan.logit_rows().len()];
            let step = stale.plan.step();
            assert_eq!(
                self.scheduler.commit(stale.plan, &results).unwrap_err(),
                CommitError::StalePlan { step }
            );
        }
        let plan = match planned {
            Schedule::Step(plan) => plan,
            Schedule::Idle => {
                assert!(self.chats.values().all(|chat| chat.kept), "idle while a sequence waits or runs");
                return false;
            }
            Schedule::Waiting(reason) => panic!("I9: nothing is computed: {reason:?}\n{:#?}", self.scheduler),
        };
        assert!(plan.num_rows() <= self.config.step_tokens, "I13: {} rows", plan.num_rows());
        let work = plan.work();
        assert!(work <= self.config.step_work_budget || plan.num_rows() == 1, "I13: {work} of work");
        for row in plan.logit_rows() {
            let id = self.chat_of(row.sequence);
            let chat = &self.chats[&id];
            let drafts = &plan.token_ids()[row.row as usize + 1..][..row.num_rows as usize - 1];
            assert!(chat.drafts.starts_with(drafts), "drafts of {id:?}");
            self.with_logits.insert(id);
        }
        self.in_step = true;
        let planned: Vec<SequenceId> = self.scheduler.planned_sequences().collect();
        assert_eq!(planned.len() as u32, plan.num_sequences(), "sequences of the plan");
        let firsts = plan.query_starts().iter().map(|&row| plan.positions().get(row as usize));
        let known = planned.iter().zip(firsts).map(|(&id, first)| {
            let chat = &self.chats[&self.chat_of(id)];
            Known { salt: chat.salt, before: chat.tokens[..*first.unwrap() as usize].to_vec() }
        });
        let known: Vec<Known> = known.collect();
        for (known, rows) in known.iter().zip(plan.query_starts().windows(2)) {
            if self.leaves_behind(known.before.len() as u32) {
                self.slid.rows += u64::from(rows[1] - rows[0]);
            }
        }
        self.plan = Some(Outstanding { plan, known, seen: None });
        true
    }

    /// Whether some stack lacks blocks of a sequence of `len` tokens.
    fn leaves_behind(&self, len: u32) -> bool {
        let lacks = |stack: &Stack| {
            let [first, rest] = stack.reach.kept(len, stack.block_size);
            first.end < rest.start
        };
        self.stacks.iter().any(lacks)
    }

    /// A transfer under way ends, and is reported; twice, for good measure.
    pub(crate) fn complete_transfer(&mut self, index: usize) {
        let Some(report) = self.device.complete(index) else { return };
        self.scheduler.complete_transfers(&[report, report]);
    }

    /// A transfer fails: its blocks never arrive.
    pub(crate) fn lose_transfer(&mut self, index: usize) {
        let Some(report) = self.device.lose(index) else { return };
        self.scheduler.complete_transfers(&[report]);
    }

    /// Whether blocks are in the host pool.
    pub(crate) fn has_swapped(&self) -> bool {
        self.scheduler.cache().stats().host_held_blocks > 0
    }

    /// Whether blocks are shared.
    pub(crate) fn has_shared(&self) -> bool {
        self.scheduler.cache().stats().shared_blocks > 0
    }

    /// The device is lost, and what was on it. Transfers under way have just `arrived`, or they fail, which is reported
    /// before or, too late to matter, `after` the scheduler forgets the device.
    pub(crate) fn lose_device(&mut self, arrived: bool, after: bool) {
        while arrived && self.device.num_transfers() > 0 {
            self.complete_transfer(0);
        }
        let stale = self.plan.take();
        let reports = self.device.replace();
        if !after {
            self.scheduler.complete_transfers(&reports);
        }
        self.scheduler.forget_device();
        self.drop_ended();
        self.check();
        if after {
            self.scheduler.complete_transfers(&reports);
        }
        if let Some(Outstanding { plan, .. }) = stale {
            let (step, results) = (plan.step(), vec![RowResult::Token(0); plan.logit_rows().len()]);
            assert_eq!(self.scheduler.commit(plan, &results).unwrap_err(), CommitError::StalePlan { step });
        }
        let stats = self.scheduler.stats();
        assert_eq!(stats.running, 0, "a lost device runs something: {stats:?}");
        let CacheStats { held_blocks, cached_blocks, host_in_transfer_blocks, .. } = stats.cache;
        let left = (held_blocks, cached_blocks, host_in_transfer_blocks);
        assert!(left == (0, 0, 0), "a lost device still holds blocks: {stats:?}");
        self.reached.losses += 1;
        let computed = self.chats.keys().filter(|&&id| self.scheduler.computed_tokens(id).unwrap_or(0) > 0);
        self.reached.survivors += computed.count() as u64;
    }

    /// The key of the chat that a sample belongs to.
    fn chat_of(&self, sample: SequenceId) -> SequenceId {
        let mut groups = self.chats.iter().filter(|(id, _)| id.request() == sample.request());
        groups.find(|(_, chat)| chat.samples.contains(&sample.sample())).map_or(sample, |(&id, _)| id)
    }

    /// The outstanding plan runs on the device.
    pub(crate) fn run(&mut self) {
        if let Some(outstanding) = &mut self.plan {
            let Outstanding { plan, known, seen } = outstanding;
            seen.get_or_insert_with(|| self.device.run(plan, known));
        }
    }

    /// The outstanding plan is dropped, or lost to a commit that fails.
    pub(crate) fn drop_plan(&mut self, by_mistake: bool) {
        let Some(Outstanding { plan, .. }) = self.plan.take() else { return };
        if by_mistake {
            let expected = plan.logit_rows().len();
            let error = self.scheduler.commit(plan, &vec![RowResult::Token(1); expected + 1]).unwrap_err();
            assert_eq!(error, CommitError::ResultCount { expected, actual: expected + 1 });
        }
    }

    /// Runs and commits the outstanding plan. `choice` decides how many right drafts are accepted; the `invalid`-th
    /// logit row is useless.
    pub(crate) fn commit(&mut self, choice: u32, invalid: Option<usize>) {
        self.run();
        let Some(Outstanding { plan, seen: Some(seen), .. }) = self.plan.take() else { return };
        let mut results = Vec::new();
        let mut expected: BTreeMap<SequenceId, Told> = BTreeMap::new();
        let mut parted: BTreeMap<SequenceId, Chat> = BTreeMap::new();
        for (index, row) in plan.logit_rows().iter().enumerate() {
            let id = self.chat_of(row.sequence);
            let mut chat = self.chats[&id].clone();
            assert_eq!(row.next_position as usize, chat.tokens.len());
            let drafts = &plan.token_ids()[row.row as usize + 1..][..row.num_rows as usize - 1];
            let mut hash = history(&chat.tokens);
            let mut right = Vec::new();
            let mut tokens = chat.tokens.clone();
            let seen = |row: u32| &seen[row as usize];
            self.device.check_seen(seen(row.row), chat.salt, &tokens, row.sequence);
            for (&draft, place) in drafts.iter().zip(row.row + 1..) {
                if answer(hash, row.sequence.sample()) != draft {
                    break;
                }
                hash = then(hash, draft);
                tokens.push(draft);
                self.device.check_seen(seen(place), chat.salt, &tokens, row.sequence);
                right.push(draft);
            }
            right.truncate(choice as usize % (right.len() + 1));
            let accepted = right.len() as u32;
            self.reached.accepted_drafts += u64::from(accepted);
            tokens.truncate(chat.tokens.len() + right.len());
            let next = answer(history(&tokens), row.sequence.sample());
            let result = match (invalid == Some(index), accepted) {
                (true, _) => RowResult::Invalid,
                (_, 0) if choice.is_multiple_of(2) => RowResult::Token(next),
                _ => RowResult::Accepted { rows: accepted, next },
            };
            results.push(result);
            let mut told = Told::default();
            if chat.aborting || chat.dead.contains(&row.sequence.sample()) {
                told.end = Some(FinishReason::Aborted);
            } else if result == RowResult::Invalid {
                told.end = Some(FinishReason::Invalid);
            } else if chat.cut.is_none() || row.sequence != id {
                for token in right.into_iter().chain([next]) {
                    told.tokens.push(token);
                    told.end = chat.push(token);
                    if told.end.is_some() {
                        break;
                    }
                }
            }
            self.generated += told.tokens.len() as u64;
            chat.samples.clear();
            chat.dead.clear();
            chat.drafts.clear();
            if row.sequence != id {
                chat.cut = None;
            }
            chat.kept = chat.keep && told.end.is_some();
            let gone = matches!(told.end, Some(FinishReason::Aborted | FinishReason::Invalid));
            if !gone && (told.end.is_none() || chat.keep) {
                parted.insert(row.sequence, chat);
            }
            if told != Told::default() {
                expected.insert(row.sequence, told);
            }
        }
        for id in std::mem::take(&mut self.with_logits) {
            self.chats.remove(&id);
        }
        self.chats.extend(parted);
        self.spoil(&plan, &results);
        self.compare(plan, &results, expected);
        self.settle();
    }

    /// What a sequence without a valid result computed in this step is worth nothing: no sequence may read it later.
    fn spoil(&mut self, plan: &StepPlan, results: &[RowResult]) {
        let starts = plan.query_starts();
        for rows in starts.windows(2) {
            let answers = plan.logit_rows().iter().zip(results);
            let mut own = answers.filter(|(row, _)| (rows[0]..rows[1]).contains(&row.row)).peekable();
            if own.peek().is_some() && own.all(|(_, &result)| result == RowResult::Invalid) {
                self.device.spoil(plan, rows[0] as usize..rows[1] as usize);
            }
        }
    }

    /// Commits, and checks what is said about every sequence.
    fn compare(&mut self, plan: StepPlan, results: &[RowResult], expected: BTreeMap<SequenceId, Told>) {
        let mut told: BTreeMap<SequenceId, Told> = BTreeMap::new();
        let class = |id: SequenceId| {
            self.extended.get(&id).copied().unwrap_or_else(|| self.priorities[&id.request()])
        };
        let mut preempted = Vec::new();
        let mut admitted = Vec::new();
        let mut hits = Vec::new();
        let one_call = std::mem::take(&mut self.schedule_calls) == 1;
        let events = self.scheduler.commit(plan, results).unwrap().to_vec();
        for &event in &events {
            match event {
                StepEvent::Token { sequence, token } => {
                    let told = told.entry(sequence).or_default();
                    assert_eq!(told.end, None, "{sequence:?} goes on after its end");
                    told.tokens.push(token);
                }
                StepEvent::Finished { sequence, reason, preemptions } => {
                    assert!(preemptions <= self.config.max_preemptions, "I9: {preemptions} preemptions");
                    let end = told.entry(sequence).or_default().end.replace(reason);
                    assert_eq!(end, None, "{sequence:?} ends twice");
                }
                StepEvent::Admitted { sequence, prefix } => {
                    admitted.push(class(sequence));
                    hits.push(prefix.cached_tokens);
                    assert!(prefix.cached_tokens <= prefix.wanted_tokens, "I6: {prefix:?}");
                }
                StepEvent::Preempted { sequence, .. } => {
                    preempted.push(class(sequence));
                }
                _ => unreachable!("no other events exist"),
            }
        }
        if one_call && !preempted.is_empty() {
            // None but the one that sequences of lower classes were preempted for.
            let for_whom = |&class: &Priority| preempted.iter().all(|&victim| victim > class);
            assert!(
                admitted.len() <= 1 && admitted.iter().all(for_whom),
                "I9: {admitted:?} admitted by a step that preempted {preempted:?}: {events:?}"
            );
        }
        self.slid.hits += hits.into_iter().filter(|&len| self.leaves_behind(len)).count() as u64;
        for id in std::mem::take(&mut self.ended) {
            let ended = Told { tokens: Vec::new(), end: Some(FinishReason::Aborted) };
            assert_eq!(told.remove(&id), Some(ended), "{id:?} was aborted before the step");
        }
        for (id, expected) in &expected {
            assert_eq!(told.remove(id).as_ref(), Some(expected), "{id:?}");
        }
        for id in self.chats.keys().copied().collect::<Vec<_>>() {
            self.end_without_logits(id, &mut told);
        }
        assert!(told.is_empty(), "events of sequences that do not exist: {told:?}");
    }

    /// Sequences without logits end when they were aborted, or when they had nothing to generate.
    fn end_without_logits(&mut self, id: SequenceId, told: &mut BTreeMap<SequenceId, Told>) {
        let chat = &self.chats[&id];
        let (alive, dead): (Vec<u32>, Vec<u32>) = match &chat.samples[..] {
            [] => (vec![id.sample()], Vec::new()),
            samples => samples.iter().partition(|sample| !chat.dead.contains(sample)),
        };
        let mut end = |sample: &u32| {
            let told = told.remove(&id.request().sample(*sample))?;
            assert!(told.tokens.is_empty(), "{id:?} has tokens that nobody chose");
            told.end
        };
        assert!(dead.iter().filter_map(&mut end).all(|reason| reason == FinishReason::Aborted));
        let ends: Vec<FinishReason> = alive.iter().filter_map(&mut end).collect();
        let expected = if chat.aborting { FinishReason::Aborted } else { chat.full() };
        assert!(ends.iter().all(|&reason| reason == expected), "{id:?} ends with {ends:?}");
        assert!(!chat.aborting || ends.len() == alive.len(), "{id:?} was aborted and not told so");
        if chat.aborting || ends.is_empty() {
            return;
        }
        assert_eq!(chat.tokens.len(), chat.max_len, "{id:?} ends early");
        assert_eq!(ends.len(), alive.len(), "samples that generate nothing end together");
        let chat = self.chats.remove(&id).unwrap();
        for sample in alive.into_iter().filter(|_| chat.keep) {
            let cut = chat.cut.filter(|_| sample == id.sample());
            let own = Chat { samples: Vec::new(), dead: Vec::new(), kept: true, cut, ..chat.clone() };
            self.chats.insert(id.request().sample(sample), own);
        }
    }

    /// Runs to the end, then drops what was kept: everything must finish, within a bounded number of steps, and every
    /// block must return.
    pub(crate) fn finish(mut self) -> (Reached, Slid) {
        self.plan = None;
        let most: usize = self.chats.values().map(|chat| chat.max_len * chat.samples.len().max(1)).sum();
        let bound = most * (self.config.max_preemptions as usize + 3) + 100;
        for step in 0.. {
            while self.device.num_transfers() > 0 {
                self.complete_transfer(step);
            }
            assert!(step < bound, "no end after {bound} steps");
            if !self.schedule() {
                break;
            }
            self.check_planned();
            self.commit(0, None);
            self.check();
        }
        for id in self.chats.keys().copied().collect::<Vec<_>>() {
            assert!(self.scheduler.abort_sequence(id).unwrap());
        }
        self.scheduler.assert_consistent();
        let stats = self.scheduler.stats();
        assert_eq!((stats.running, stats.waiting, stats.kept), (0, 0, 0));
        let cache = stats.cache;
        assert_eq!((cache.free_blocks + cache.cached_blocks, cache.num_tables), (self.cache.num_blocks(), 0));
        while self.device.num_transfers() > 0 {
            self.complete_transfer(0);
        }
        assert_eq!(self.scheduler.stats().cache.host_free_blocks, self.cache.host_blocks(), "leaked");
        self.take_the_whole_pool();
        (self.reached, self.slid)
    }

    /// After any history one sequence can have every block (I1).
    fn take_the_whole_pool(&mut self) {
        // What is promised must be there for the largest steps, and otherwise they may be as small as they must.
        let rows = if self.config.admission == Admission::Guaranteed { self.config.step_tokens } else { 1 };
        let tokens = pool_tokens(&self.cache, rows).min(self.cache.max_sequence_tokens());
        let request = Request::new(vec![1; tokens as usize]).max_new_tokens(0).keep(true);
        let id = self.scheduler.add(request).unwrap();
        let mut slid_at = 0;
        while let Schedule::Step(plan) = self.scheduler.schedule() {
            slid_at = plan.positions()[0];
            self.scheduler.commit(plan, &[]).unwrap();
        }
        assert_eq!(
            self.scheduler.computed_tokens(id.sample(0)),
            Some(tokens),
            "I1: one sequence cannot have the pool"
        );
        let (blocks, held) = (num_blocks(&self.cache, slid_at, tokens), self.scheduler.stats().cache);
        assert_eq!(held.held_blocks, blocks, "I1: one sequence cannot have the pool: {held:?}");
        assert!(self.scheduler.abort(id).unwrap());
    }

    /// Between planning and commit the scheduler must be sound, too.
    pub(crate) fn check_planned(&self) {
        self.scheduler.assert_consistent();
    }
}
