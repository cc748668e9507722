//! Random histories of a scheduler.

use crate::gate::{FULL, Recording, text};
use crate::simulation::random::Random;
use paged_kv::{
    Admission, CacheConfig, DuplicatePrompts, FinishReason, KvType, ModelShape, Namespace, PreemptionMode,
    PrefixCacheConfig, Priority, Rates, Request, RequestId, Retention, RowResult, Schedule, Scheduler,
    SchedulerConfig, SchedulerStats, SequenceId, StepEvent, StepId, StepPlan, TransferReport, VictimPolicy,
};
use std::collections::BTreeSet;

pub(super) const HISTORIES: usize = 400;

/// What a history may contain. Each leaves a mark that others do not, or must be kept apart.
#[derive(Clone, Copy, Debug)]
struct Scope {
    /// Sequences are ended, and cut in mid-step: then events do not count.
    aborts: bool,
    drops: bool,
    branches: bool,
    loses_devices: bool,
    /// Tokens of a prompt at most.
    prompt: u32,
    operations: u32,
}

/// What a history came to.
#[derive(Debug, Default)]
pub(super) struct Reached {
    pub(super) stats: SchedulerStats,
    pub(super) accepted: u64,
    pub(super) dropped: u64,
    pub(super) forks: u64,
    pub(super) extensions: u64,
    pub(super) cuts: u64,
    pub(super) aborts: u64,
    pub(super) losses: u64,
    pub(super) lost_transfers: u64,
    pub(super) refusals: u64,
}

struct History {
    random: Random,
    scope: Scope,
    config: SchedulerConfig,
    scheduler: Scheduler,
    /// Every sequence there may be, whether it still is or not.
    sequences: Vec<SequenceId>,
    admitted: BTreeSet<SequenceId>,
    plan: Option<StepPlan>,
    last_step: u64,
    /// Steps whose swaps have not been reported.
    transfers: Vec<StepId>,
    entries: Vec<String>,
    reached: Reached,
}

/// Records one history; `hash` makes all hashes of its prefix cache alike.
pub(super) fn record(number: usize, hash: Option<u64>) -> (Recording, Reached) {
    let mut random = Random::new(0x6a7e + number as u64);
    let (scope, config, cache) = setup(number, &mut random);
    let title = title(&scope, &config, &cache);
    let mut scheduler = Scheduler::new(config, cache).unwrap();
    scheduler.set_constant_hash(hash);
    let rates = Rates { swap_bytes_per_s: 1e5, prefill_tokens_per_s: f64::from(random.below(100..5000)) };
    if config.preemption == PreemptionMode::Auto && random.chance(70) {
        scheduler.set_rates(rates);
    }
    let mut history = History {
        random,
        scope,
        config,
        scheduler,
        sequences: Vec::new(),
        admitted: BTreeSet::new(),
        plan: None,
        last_step: 0,
        transfers: Vec::new(),
        entries: Vec::new(),
        reached: Reached::default(),
    };
    (0..3).for_each(|_| history.add());
    for _ in 0..scope.operations {
        history.act();
        history.scheduler.assert_consistent();
    }
    history.reached.stats = history.scheduler.stats();
    (Recording { title, entries: history.entries }, history.reached)
}

fn setup(number: usize, random: &mut Random) -> (Scope, SchedulerConfig, CacheConfig) {
    let is_full = number.is_multiple_of(FULL);
    let block_size = [1, 4, 16, 256][if is_full { number / FULL % 3 } else { number / 2 % 4 }];
    let aborts = !is_full && number % 5 == 4;
    let scope = Scope {
        aborts,
        drops: number % 3 == 1,
        branches: number % 4 < 3,
        loses_devices: number % 7 == 3,
        prompt: if is_full { 10 } else { [24, 24, 64, 600][number / 2 % 4] },
        operations: if is_full { 24 } else { 150 },
    };
    let tight = random.chance(75);
    let num_blocks = match block_size {
        1 => random.below(if tight { 24..60 } else { 100..200 }),
        4 => random.below(if tight { 6..14 } else { 30..60 }),
        _ => random.below(if tight { 4..8 } else { 16..40 }),
    };
    let shape = ModelShape::new(2, 2, 1, 8);
    let cache = CacheConfig::for_blocks(num_blocks, &shape, KvType::F16).unwrap();
    let cache = cache.with_block_size(block_size).unwrap();
    let cache = cache.with_max_sequences(random.below(2..12)).unwrap();
    let cache = cache.with_host_blocks(if random.chance(75) { random.below(1..40) } else { 0 }).unwrap();
    let watermark_blocks = random.below(0..3);
    let overcommitted = number % 2 == 1 || random.chance(40);
    let config = SchedulerConfig {
        step_tokens: if random.chance(30) { 512 } else { random.below(2..scope.prompt) },
        step_work_budget: if random.chance(30) { u64::from(random.below(8..400)) } else { 1 << 24 },
        max_running: random.maybe(30, |random| random.below(1..cache.max_sequences() + 1)),
        admission: match overcommitted {
            true => Admission::Overcommitted { watermark_blocks },
            false => Admission::Guaranteed,
        },
        max_drafts: if random.chance(30) { random.below(1..5) } else { 0 },
        max_passed: random.below(0..4),
        max_preemptions: random.below(0..5),
        prefix_cache: random.maybe(80, |random| PrefixCacheConfig {
            max_cached_blocks: random.maybe(20, |random| random.below(0..6)),
            duplicates: random.pick(&[DuplicatePrompts::Wait, DuplicatePrompts::ComputeAlone]),
        }),
        preemption: random.pick(&[
            PreemptionMode::Recompute,
            PreemptionMode::Swap,
            PreemptionMode::Swap,
            PreemptionMode::Auto,
        ]),
        victims: random.pick(&[
            VictimPolicy::LowestPriority,
            VictimPolicy::Requester,
            VictimPolicy::LeastLost,
        ]),
        ageing_steps: random.below(0..20),
    };
    (scope, config, cache)
}

fn title(scope: &Scope, config: &SchedulerConfig, cache: &CacheConfig) -> String {
    let (blocks, size, tables) = (cache.num_blocks(), cache.block_size(), cache.max_sequences());
    let (rows, work) = (config.step_tokens, config.step_work_budget);
    let told = if scope.aborts { ", plans alone" } else { "" };
    format!(
        "{blocks} blocks of {size} tokens, {tables} tables, {} host blocks; {:?}, {rows} rows of {work} pairs, \
         max_drafts {}, {:?} of {:?}, at most {} times{told}",
        cache.host_blocks(),
        config.admission,
        config.max_drafts,
        config.preemption,
        config.victims,
        config.max_preemptions,
    )
}

impl History {
    fn act(&mut self) {
        match self.random.below(0..100) {
            0..14 => self.add(),
            14..17 if self.scope.branches => self.fork(),
            17..22 => self.extend(),
            22..24 => self.cut(),
            24..27 if self.scope.aborts => self.abort(),
            27..28 => self.misuse(),
            28..33 if self.scope.drops => self.drop_plan(),
            33..34 if self.scope.loses_devices => self.lose_device(),
            34..46 => self.report_transfer(),
            46..47 => self.set_budgets(),
            47..58 if self.plan.is_none() => self.schedule(),
            _ => self.step(),
        }
    }

    fn log(&mut self, entry: String) {
        self.entries.push(entry);
    }

    /// Notes what an operation returned.
    fn outcome<T, E: std::fmt::Display>(&mut self, what: String, outcome: Result<T, E>) -> Option<T> {
        match outcome {
            Ok(value) => {
                self.log(what);
                Some(value)
            }
            Err(error) => {
                self.reached.refusals += 1;
                self.log(format!("{what}: {error}"));
                None
            }
        }
    }

    /// Few different prompts, so that they begin alike.
    fn tokens(&mut self, len: u32) -> Vec<u32> {
        let seed = self.random.below(0..3);
        let parts = self.random.below(0..len + 1);
        (0..len).map(|place| place * 7 % 23 + 30 * if place < parts { 0 } else { seed }).collect()
    }

    fn request(&mut self, tokens: Vec<u32>, max_new: u32) -> Request {
        // A sequence that may grow to the end of the context is charged by policy: it is let in freely here.
        let endless = self.config.max_preemptions > 3 && self.is_overcommitted();
        let random = &mut self.random;
        let priority =
            random.pick(&[Priority::Normal, Priority::Normal, Priority::Interactive, Priority::Idle]);
        let salt = if random.chance(10) { 1 } else { 0 };
        let stops: &[u32] = if random.chance(30) { &[3, 11] } else { &[] };
        let mut request = Request::new(tokens).priority(priority).stop_tokens(stops).keep(random.chance(40));
        request = request.namespace(Namespace { salt, ..Namespace::default() });
        if random.chance(25) {
            let end = random.below(1..self.scope.prompt);
            let retention = random.pick(&[Retention::Low, Retention::High, Retention::Pinned]);
            request = request.retain(0..end, retention, None);
        }
        if endless && random.chance(10) { request } else { request.max_new_tokens(max_new) }
    }

    fn is_overcommitted(&self) -> bool {
        self.config.admission != Admission::Guaranteed
    }

    /// Whether a turn of `tokens` tokens can be promised for sure, where it would be refused otherwise.
    fn is_promised(&self, tokens: u32, samples: u32) -> bool {
        let cache = self.scheduler.stats().cache;
        let own = (self.scheduler.cache().config().layout().blocks_for(tokens) + 1) * samples;
        self.is_overcommitted() || cache.promised_blocks + cache.pinned_blocks + own <= cache.num_blocks
    }

    fn max_new(&mut self) -> u32 {
        let most = if self.random.chance(20) { 2 } else { self.scope.prompt };
        self.random.below(0..most)
    }

    fn add(&mut self) {
        let len = self.random.below(1..self.scope.prompt);
        let samples = if self.scope.branches && self.random.chance(25) { self.random.below(2..4) } else { 1 };
        let max_new = self.max_new();
        let tokens = self.tokens(len);
        let request = self.request(tokens, max_new).samples(samples);
        let added = self.scheduler.add(request);
        if let Some(id) = self.outcome(format!("add {len} tokens, {max_new} more, {samples} samples"), added)
        {
            self.sequences.extend((0..samples).map(|sample| id.sample(sample)));
        }
    }

    fn pick(&mut self) -> Option<SequenceId> {
        let living: Vec<_> =
            self.sequences.iter().copied().filter(|&id| self.scheduler.tokens(id).is_some()).collect();
        if living.is_empty() { None } else { Some(self.random.pick(&living)) }
    }

    fn len(&self, id: SequenceId) -> u32 {
        self.scheduler.tokens(id).map_or(0, |tokens| tokens.len() as u32)
    }

    fn fork(&mut self) {
        let Some(parent) = self.pick() else { return };
        let len = self.len(parent);
        let at = self.random.below(0..len + 1);
        let (more, max_new) = (self.random.below(1..6), self.max_new());
        if !self.is_promised(at + more + max_new, 1) {
            return;
        }
        let tokens = self.tokens(more);
        let request = self.request(tokens, max_new);
        let forked = self.scheduler.fork(parent, at as usize, request);
        if let Some(id) =
            self.outcome(format!("fork {parent} at {at}, {more} tokens, {max_new} more"), forked)
        {
            self.sequences.push(id.into());
            self.reached.forks += 1;
        }
    }

    fn extend(&mut self) {
        let Some(id) = self.pick() else { return };
        let (more, max_new) = (self.random.below(0..12), self.max_new());
        if !self.is_promised(self.len(id) + more + max_new, 1) {
            return;
        }
        let tokens = self.tokens(more);
        let request = self.request(tokens, max_new);
        let extended = self.scheduler.extend(id, request);
        let what = format!("extend {id} by {more} tokens, {max_new} more");
        self.reached.extensions += u64::from(self.outcome(what, extended).is_some());
    }

    /// A cut in mid-step changes what is told of the step: only where events do not count, and the step ends with it.
    fn cut(&mut self) {
        let Some(id) = self.pick() else { return };
        if self.plan.is_some() && !self.scope.aborts {
            return;
        }
        let len = self.len(id);
        let len = self.random.below(0..len + 2);
        let cut = self.scheduler.truncate(id, len as usize);
        self.reached.cuts += u64::from(self.outcome(format!("cut {id} to {len}"), cut).is_some());
        if self.plan.is_some() {
            self.step();
        }
    }

    fn abort(&mut self) {
        let Some(id) = self.pick() else { return };
        self.reached.aborts += 1;
        let whole = self.random.chance(50);
        let ended = match whole {
            true => self.scheduler.abort(id.request()).unwrap(),
            false => self.scheduler.abort_sequence(id).unwrap(),
        };
        self.log(format!("abort {id}{}: {ended}", if whole { " with its request" } else { "" }));
        if self.plan.is_some() {
            self.step();
        }
    }

    /// Requests that are refused, whatever the state.
    fn misuse(&mut self) {
        let max_tokens = self.scheduler.cache().config().max_sequence_tokens();
        let unknown = RequestId::from_raw(1 << 40);
        match self.random.below(0..6) {
            0 => {
                let refused = self.scheduler.add(Request::new([]));
                self.outcome("add nothing".into(), refused);
            }
            1 => {
                let refused = self.scheduler.add(Request::new([1, 2]).max_new_tokens(max_tokens));
                self.outcome("add too much".into(), refused);
            }
            2 => {
                let refused = self.scheduler.add(Request::new([1, 2]).max_new_tokens(1).samples(1000));
                self.outcome("add too many samples".into(), refused);
            }
            3 => {
                // Its text has the scheduler's number within the process.
                let refused = self.scheduler.truncate(unknown, 1).map_err(|_| "not this scheduler's");
                self.outcome("cut an unknown one".into(), refused);
            }
            4 => {
                let drafts = vec![1; self.config.max_drafts as usize + 1];
                let Some(id) = self.pick() else { return };
                let refused = self.scheduler.propose(id, &drafts);
                self.outcome("propose too much".into(), refused);
            }
            _ => {
                let Some(id) = self.pick() else { return };
                let refused = self.scheduler.fork(id, 1 << 20, Request::new([1]).max_new_tokens(1));
                self.outcome("fork beyond the end".into(), refused);
            }
        }
    }

    fn drop_plan(&mut self) {
        if self.plan.take().is_some() {
            self.reached.dropped += 1;
            self.log("drop the plan".into());
        }
    }

    fn lose_device(&mut self) {
        self.reached.losses += 1;
        for step in std::mem::take(&mut self.transfers) {
            let complete = self.random.chance(50);
            self.scheduler.complete_transfers(&[TransferReport { step, complete }]);
        }
        self.scheduler.forget_device();
        self.plan = None;
        self.log("lose the device".into());
    }

    fn report_transfer(&mut self) {
        if self.transfers.is_empty() {
            return;
        }
        let place = self.random.index() % self.transfers.len();
        let step = self.transfers.remove(place);
        // What fails while its step is outstanding is left out.
        let outstanding = self.plan.as_ref().is_some_and(|plan| plan.step() == step);
        let complete = !self.random.chance(10) || outstanding;
        self.reached.lost_transfers += u64::from(!complete);
        self.scheduler.complete_transfers(&[TransferReport { step, complete }]);
        self.log(format!("the {place}-th transfer under way ends: {complete}"));
    }

    fn set_budgets(&mut self) {
        let (rows, work) = (self.random.below(0..40), u64::from(self.random.below(0..4000)));
        let set = self.scheduler.set_step_budgets(rows, work);
        self.outcome(format!("budgets of {rows} rows, {work} pairs"), set);
    }

    fn schedule(&mut self) {
        // As many drafts as are allowed, for every sequence.
        for id in self.sequences.clone().into_iter().filter(|_| self.config.max_drafts > 0) {
            let drafts: Vec<u32> = (0..self.config.max_drafts).map(|_| self.random.below(0..40)).collect();
            if self.scheduler.tokens(id).is_some() {
                self.scheduler.propose(id, &drafts).unwrap();
            }
        }
        match self.scheduler.schedule() {
            Schedule::Step(plan) => {
                self.log(format!("schedule\n{}", text::plan(&plan, self.last_step)));
                self.last_step = plan.step().raw();
                if !plan.swap_outs().is_empty() || !plan.swap_ins().is_empty() {
                    self.transfers.push(plan.step());
                }
                self.plan = Some(plan);
            }
            Schedule::Waiting(_) => self.log("schedule: wait".into()),
            Schedule::Idle => self.log("schedule: idle".into()),
        }
    }

    fn step(&mut self) {
        if self.plan.is_none() {
            self.schedule();
        }
        let Some(plan) = self.plan.take() else { return };
        let mut results = Vec::new();
        for row in plan.logit_rows() {
            let next = self.random.below(0..40);
            results.push(match row.num_rows {
                _ if self.random.chance(2) => RowResult::Invalid,
                1 => RowResult::Token(next),
                rows => RowResult::Accepted { rows: self.random.below(0..rows), next },
            });
        }
        if self.random.chance(2) {
            results.push(RowResult::Invalid);
        }
        self.reached.accepted += results
            .iter()
            .map(|result| if let RowResult::Accepted { rows, .. } = result { u64::from(*rows) } else { 0 })
            .sum::<u64>();
        let told = match self.scheduler.commit(plan, &results) {
            Ok(events) => events.to_vec(),
            Err(error) => return self.log(format!("commit: {error}")),
        };
        let mut entry = "commit".to_string();
        for event in &told {
            let is_again = match *event {
                StepEvent::Admitted { sequence, .. } => !self.admitted.insert(sequence),
                _ => false,
            };
            // A plan that is dropped lets its sequences in once more when it is planned again.
            let is_admission = matches!(event, StepEvent::Admitted { .. });
            let is_end = matches!(event, StepEvent::Finished { reason: FinishReason::Aborted, .. });
            let is_silent = self.scope.aborts || is_end || self.scope.drops && is_admission;
            if !is_silent {
                entry = format!("{entry}\n{}", text::event(event, is_again));
            }
        }
        self.log(entry);
    }
}
