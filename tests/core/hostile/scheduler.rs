//! Calls of a scheduler, beside another one of the same configuration.

use crate::hostile::{Call, World, is_known};
use crate::simulation::random::Random;
use paged_kv::{
    Admission, CacheConfig, Namespace, PreemptionMode, Priority, Rates, Request, RequestId, Retention,
    RowResult, Schedule, Scheduler, SchedulerConfig, SchedulerStats, SequenceId, StepId, StepPlan,
    TransferReport, VictimPolicy,
};

pub(super) struct Schedulers {
    own: Scheduler,
    other: Scheduler,
    sequences: Vec<SequenceId>,
    plans: Vec<StepPlan>,
    foreign_plans: Vec<StepPlan>,
    steps: Vec<StepId>,
}

fn config(random: &mut Random, cache: &CacheConfig) -> SchedulerConfig {
    let watermark_blocks = random.below(0..cache.num_blocks());
    SchedulerConfig {
        step_tokens: random.below(1..40),
        step_work_budget: u64::from(random.below(1..2000)),
        admission: random.pick(&[Admission::Guaranteed, Admission::Overcommitted { watermark_blocks }]),
        max_drafts: random.below(0..4),
        max_passed: random.below(0..4),
        max_preemptions: random.below(0..4),
        preemption: random.pick(&[PreemptionMode::Recompute, PreemptionMode::Swap, PreemptionMode::Auto]),
        victims: random.pick(&[
            VictimPolicy::LowestPriority,
            VictimPolicy::Requester,
            VictimPolicy::LeastLost,
        ]),
        ..SchedulerConfig::default()
    }
}

impl Schedulers {
    pub(super) fn new(random: &mut Random, cache: CacheConfig) -> Self {
        let config = config(random, &cache);
        let [own, other] = [(); 2].map(|()| Scheduler::new(config, cache.clone()).unwrap());
        Self {
            own,
            other,
            sequences: Vec::new(),
            plans: Vec::new(),
            foreign_plans: Vec::new(),
            steps: vec![StepId::default()],
        }
    }

    pub(super) fn stats(&self) -> SchedulerStats {
        self.own.stats()
    }

    pub(super) fn check(&self) {
        self.own.assert_consistent();
    }
}

impl World {
    fn sequence(&mut self) -> SequenceId {
        let sequences = &self.schedulers.sequences;
        match self.random.below(0..10) {
            0 => RequestId::from_raw(self.random.next()).sample(0),
            1 => RequestId::from_raw(0).sample(u32::MAX),
            2 if !sequences.is_empty() => self.random.pick(sequences).request().sample(u32::MAX),
            _ if !sequences.is_empty() => self.random.pick(sequences),
            _ => RequestId::from_raw(1).sample(1),
        }
    }

    fn request(&mut self) -> Request {
        let mut request = Request::new(self.tokens());
        if self.random.chance(80) {
            request =
                request.max_new_tokens(if self.random.chance(70) { self.small() } else { self.number() });
        }
        let samples = if self.random.chance(90) { 1 } else { self.number() };
        request = request
            .samples(samples)
            .keep(self.random.chance(50))
            .may_wait(self.random.chance(50))
            .stop_tokens(&self.tokens());
        request =
            request.priority(self.random.pick(&[Priority::Interactive, Priority::Normal, Priority::Idle]));
        request = request.namespace(Namespace { salt: self.random.next() % 3, ..Namespace::default() });
        let retention =
            self.random.pick(&[Retention::Low, Retention::Normal, Retention::High, Retention::Pinned]);
        let (start, end) = (self.number(), self.number());
        let ttl_steps = if self.random.chance(50) { Some(self.number()) } else { None };
        if self.random.chance(20) { request.retain(start..end, retention, ttl_steps) } else { request }
    }
}

fn new(world: &mut World) {
    let config = SchedulerConfig {
        step_tokens: world.number(),
        step_work_budget: world.random.next() >> world.random.below(0..64),
        max_running: if world.random.chance(50) { Some(world.number()) } else { None },
        admission: Admission::Overcommitted { watermark_blocks: world.number() },
        max_drafts: world.number(),
        max_passed: world.number(),
        max_preemptions: world.number(),
        ageing_steps: world.number(),
        ..SchedulerConfig::default()
    };
    let made = Scheduler::new(config, world.schedulers.own.cache().config().clone());
    let Some(mut scheduler) = world.judge("Scheduler::new", made) else { return };
    // What it takes, it can work with.
    for _ in 0..4 {
        let request = world.request();
        let _ = world.judge("Scheduler::add", scheduler.add(request));
    }
    while let (Schedule::Step(plan), true) = (scheduler.schedule(), world.random.chance(80)) {
        let results = vec![RowResult::Token(1); plan.logit_rows().len()];
        let committed = scheduler.commit(plan, &results).map(|_| ());
        world.judge("Scheduler::commit", committed);
    }
    scheduler.assert_consistent();
}

pub(super) fn add(world: &mut World) {
    let request = world.request();
    let added = match world.random.chance(90) {
        true => world.schedulers.own.add(request),
        false => world.schedulers.other.add(request),
    };
    if let Some(id) = world.judge("Scheduler::add", added) {
        world.schedulers.sequences.extend((0..3).map(|sample| id.sample(sample)));
    }
}

fn extend(world: &mut World) {
    let (id, request) = (world.sequence(), world.request());
    let extended = world.schedulers.own.extend(id, request);
    world.judge("Scheduler::extend", extended);
}

fn fork(world: &mut World) {
    let (id, at, request) = (world.sequence(), world.number(), world.request());
    let at = if world.random.chance(10) { usize::MAX } else { at as usize };
    let forked = world.schedulers.own.fork(id, at, request);
    if let Some(id) = world.judge("Scheduler::fork", forked) {
        world.schedulers.sequences.push(id.into());
    }
}

fn truncate(world: &mut World) {
    let (id, len) = (world.sequence(), world.number());
    let len = if world.random.chance(10) { usize::MAX } else { len as usize };
    let cut = world.schedulers.own.truncate(id, len);
    world.judge("Scheduler::truncate", cut);
}

fn propose(world: &mut World) {
    let (id, drafts) = (world.sequence(), world.tokens());
    let proposed = world.schedulers.own.propose(id, &drafts);
    world.judge("Scheduler::propose", proposed);
}

fn abort(world: &mut World) {
    let id = world.sequence();
    match world.random.chance(50) {
        true => drop(world.schedulers.own.abort(id.request())),
        false => drop(world.schedulers.own.abort_sequence(id)),
    }
}

pub(super) fn schedule(world: &mut World) {
    let own = world.random.chance(85);
    let Schedulers { own: first, other, plans, foreign_plans, steps, .. } = &mut world.schedulers;
    let (scheduler, plans) = if own { (first, plans) } else { (other, foreign_plans) };
    if let Schedule::Step(plan) = scheduler.schedule() {
        steps.push(plan.step());
        plans.push(plan);
    }
    plans.truncate(8);
    if plans.len() == 8 {
        drop(plans.remove(0));
    }
}

pub(super) fn commit(world: &mut World) {
    let choice = world.random.below(0..10);
    let Schedulers { plans, foreign_plans, .. } = &mut world.schedulers;
    let (plan, is_foreign) = match choice {
        0 if !foreign_plans.is_empty() => (foreign_plans.pop(), true),
        1 if !plans.is_empty() => (Some(plans.remove(0)), false),
        2 => (Some(StepPlan::default()), true),
        _ => (plans.pop(), false),
    };
    let Some(plan) = plan else { return };
    let mut results: Vec<RowResult> = plan
        .logit_rows()
        .iter()
        .map(|row| match world.random.below(0..12) {
            0 => RowResult::Invalid,
            1 => RowResult::Accepted { rows: world.random.next() as u32, next: u32::MAX },
            2..6 => RowResult::Accepted { rows: world.random.below(0..row.num_rows), next: 2 },
            _ => RowResult::Token(world.random.below(0..4)),
        })
        .collect();
    if world.random.chance(10) {
        results.truncate(world.random.below(0..3) as usize);
    }
    if world.random.chance(10) {
        results.push(RowResult::Token(u32::MAX));
    }
    let committed = world.schedulers.own.commit(plan, &results).map(|_| ());
    if is_foreign && committed.is_ok() {
        world.wrong.push("Scheduler::commit: takes another scheduler's plan".to_string());
    }
    world.judge("Scheduler::commit", committed);
}

/// Plans a step and commits it with a token for every row; reports what it moved, perhaps later.
pub(super) fn honest_step(world: &mut World) {
    let random = &mut world.random;
    let Schedulers { own, steps, .. } = &mut world.schedulers;
    let Schedule::Step(plan) = own.schedule() else { return };
    let step = plan.step();
    steps.push(step);
    let results: Vec<_> = plan.logit_rows().iter().map(|_| RowResult::Token(random.below(0..9))).collect();
    own.commit(plan, &results).expect("the outstanding plan");
    if random.chance(80) {
        own.complete_transfers(&[TransferReport { step, complete: true }]);
    }
}

fn forget_device(world: &mut World) {
    if world.random.chance(10) {
        world.schedulers.own.forget_device();
    }
}

fn set_step_budgets(world: &mut World) {
    let (rows, work) = (world.number(), world.random.next() >> world.random.below(0..64));
    // Steps of one row would make all that follows slow to arrive at anything.
    let rows = if rows == 1 { 2 } else { rows };
    let set = world.schedulers.own.set_step_budgets(rows, work);
    world.judge("Scheduler::set_step_budgets", set);
}

fn set_rates(world: &mut World) {
    let rates = [0.0, -1.0, 1.0, 1e300, f64::NAN, f64::INFINITY, f64::MIN_POSITIVE];
    let (swap_bytes_per_s, prefill_tokens_per_s) = (world.random.pick(&rates), world.random.pick(&rates));
    world.schedulers.own.set_rates(Rates { swap_bytes_per_s, prefill_tokens_per_s });
}

pub(super) fn complete_transfers(world: &mut World) {
    let outstanding = world.schedulers.plans.last().map(StepPlan::step);
    let reports: Vec<_> = (0..world.random.below(0..4))
        .map(|_| {
            let last = world.schedulers.steps.len().saturating_sub(4);
            let recent = world.random.pick(&world.schedulers.steps[last..]);
            let step =
                if world.random.chance(70) { recent } else { world.random.pick(&world.schedulers.steps) };
            let spared = is_known("Scheduler::complete_transfers") && Some(step) == outstanding;
            TransferReport { step, complete: spared || world.random.chance(70) }
        })
        .collect();
    world.schedulers.own.complete_transfers(&reports);
}

fn look(world: &mut World) {
    let id = world.sequence();
    let own = &world.schedulers.own;
    let told = (own.tokens(id).is_some(), own.computed_tokens(id).is_some(), own.status(id).is_some());
    assert!(told == (true, true, true) || told == (false, false, false), "{id}: {told:?}");
    assert!(own.prefix_report(id).is_none_or(|report| report.cached_tokens <= report.wanted_tokens));
    assert!(own.planned_sequences().count() <= own.cache().config().max_sequences() as usize);
    assert_eq!(own.stats().cache.num_blocks, own.cache().config().num_blocks());
}

fn read_plan(world: &mut World) {
    let empty = StepPlan::default();
    let plan = world.schedulers.plans.first().unwrap_or(&empty);
    let rows = plan.num_rows() as usize;
    let arrays = [plan.token_ids().len(), plan.positions().len(), plan.slot_mapping().len()];
    assert_eq!(arrays, [rows; 3]);
    assert!(plan.last_committed() <= plan.step());
    let sequences = plan.num_sequences() as usize;
    assert_eq!([plan.context_lens().len(), plan.table_rows().len()], [sequences; 2]);
    assert!(plan.query_starts().len() == sequences + 1 || rows == 0);
    for stack in plan.stacks() {
        assert_eq!(stack.slot_mapping().len(), rows);
        let entries: u32 = stack.table_changes().iter().map(|change| change.len).sum();
        assert_eq!(stack.changed_entries().len(), entries as usize);
    }
    let entries: u32 = plan.table_changes().iter().map(|change| change.len).sum();
    assert_eq!(plan.changed_entries().len(), entries as usize);
    assert!(plan.logit_rows().iter().all(|row| row.row + row.num_rows <= rows as u32));
    assert!(plan.work() >= rows as u64);
    let moved = plan.swap_outs().len() + plan.swap_ins().len() + plan.block_copies().len();
    assert!(moved <= 3 * 20, "{moved} blocks");
    let made = plan.step().raw() > 0;
    assert!(plan.cache_instance() > 0 || !made || plan.fingerprint() > 0 || plan.forgotten_devices() > 0);
}

/// Calls that make much of the rest possible stand here more than once.
pub(super) const CALLS: &[(&str, Call)] = &[
    ("Scheduler::new", new),
    ("Scheduler::add", add),
    ("Scheduler::add", add),
    ("Scheduler::extend", extend),
    ("Scheduler::fork", fork),
    ("Scheduler::truncate", truncate),
    ("Scheduler::propose", propose),
    ("Scheduler::abort", abort),
    ("Scheduler::abort_sequence", abort),
    ("Scheduler::schedule", schedule),
    ("Scheduler::schedule", schedule),
    ("Scheduler::schedule", schedule),
    ("Scheduler::schedule", schedule),
    ("Scheduler::commit", commit),
    ("Scheduler::commit", commit),
    ("Scheduler::commit", commit),
    ("Scheduler::commit", commit),
    ("Scheduler::forget_device", forget_device),
    ("Scheduler::set_step_budgets", set_step_budgets),
    ("Scheduler::set_rates", set_rates),
    ("Scheduler::complete_transfers", complete_transfers),
    ("Scheduler::cache", look),
    ("Scheduler::tokens", look),
    ("Scheduler::computed_tokens", look),
    ("Scheduler::status", look),
    ("Scheduler::stats", look),
    ("Scheduler::prefix_report", look),
    ("Scheduler::planned_sequences", look),
    ("Request::new", add),
    ("Request::max_new_tokens", add),
    ("Request::stop_tokens", add),
    ("Request::samples", add),
    ("Request::keep", add),
    ("Request::may_wait", add),
    ("Request::priority", add),
    ("Request::namespace", add),
    ("Request::retain", add),
    ("StepPlan::step", read_plan),
    ("StepPlan::last_committed", read_plan),
    ("StepPlan::cache_instance", read_plan),
    ("StepPlan::fingerprint", read_plan),
    ("StepPlan::forgotten_devices", read_plan),
    ("StepPlan::num_rows", read_plan),
    ("StepPlan::num_sequences", read_plan),
    ("StepPlan::token_ids", read_plan),
    ("StepPlan::positions", read_plan),
    ("StepPlan::stacks", read_plan),
    ("StackPlan::slot_mapping", read_plan),
    ("StackPlan::table_changes", read_plan),
    ("StackPlan::changed_entries", read_plan),
    ("StepPlan::slot_mapping", read_plan),
    ("StepPlan::query_starts", read_plan),
    ("StepPlan::context_lens", read_plan),
    ("StepPlan::table_rows", read_plan),
    ("StepPlan::table_changes", read_plan),
    ("StepPlan::changed_entries", read_plan),
    ("StepPlan::swap_outs", read_plan),
    ("StepPlan::swap_ins", read_plan),
    ("StepPlan::block_copies", read_plan),
    ("StepPlan::logit_rows", read_plan),
    ("StepPlan::work", read_plan),
];
