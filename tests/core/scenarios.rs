//! Readable stories: what a scheduler does with a few requests, step by step.

use paged_kv::{
    Admission, CacheConfig, CommitError, ConfigError, FinishReason, KvType, ModelShape, Request,
    RequestError, RowResult, Schedule, Scheduler, SchedulerConfig, SequenceId, StepEvent,
};
use std::collections::BTreeMap;

pub(crate) fn cache(num_blocks: u32, block_size: u32) -> CacheConfig {
    let shape = ModelShape::new(1, 2, 1, 8);
    CacheConfig::for_blocks(num_blocks, &shape, KvType::F32).unwrap().with_block_size(block_size).unwrap()
}

/// Without a prefix cache, so that a story is of its own blocks alone.
pub(crate) fn plain() -> SchedulerConfig {
    SchedulerConfig { prefix_cache: None, admission: Admission::Guaranteed, ..SchedulerConfig::default() }
}

pub(crate) fn overcommitted(watermark_blocks: u32) -> SchedulerConfig {
    SchedulerConfig { admission: Admission::Overcommitted { watermark_blocks }, ..plain() }
}

/// One step; the token after position `p` is `p + 1000`. Returns its rows, none when all is done.
pub(crate) fn step(scheduler: &mut Scheduler) -> u32 {
    told(scheduler).0
}

/// One step, and what it told.
pub(crate) fn told(scheduler: &mut Scheduler) -> (u32, Vec<StepEvent>) {
    scheduler.assert_consistent();
    let plan = match scheduler.schedule() {
        Schedule::Step(plan) => plan,
        Schedule::Idle => return (0, Vec::new()),
        Schedule::Waiting(reason) => panic!("nothing runs: {reason:?}"),
    };
    scheduler.assert_consistent();
    let rows = plan.num_rows();
    let results: Vec<_> =
        plan.logit_rows().iter().map(|row| RowResult::Token(row.next_position + 1000)).collect();
    let events = scheduler.commit(plan, &results).unwrap().iter().copied();
    (rows, events.filter(|event| !matches!(event, StepEvent::Admitted { .. })).collect())
}

/// Runs to the end. Returns tokens and the finish reason per sequence.
pub(crate) fn run(scheduler: &mut Scheduler) -> BTreeMap<SequenceId, (Vec<u32>, FinishReason)> {
    let mut tokens: BTreeMap<SequenceId, Vec<u32>> = BTreeMap::new();
    let mut finished = BTreeMap::new();
    for _ in 0..10_000 {
        let (rows, events) = told(scheduler);
        for event in events {
            match event {
                StepEvent::Token { sequence, token } => tokens.entry(sequence).or_default().push(token),
                StepEvent::Finished { sequence, reason, .. } => {
                    finished.insert(sequence, (tokens.remove(&sequence).unwrap_or_default(), reason));
                }
                _ => {}
            }
        }
        if rows == 0 {
            scheduler.assert_consistent();
            return finished;
        }
    }
    panic!("no end after 10,000 steps");
}

#[test]
fn samples_share_the_full_blocks_of_their_prompt() {
    // floor(L / P) + 4 (ceil((L + N - 1) / P) - floor(L / P)) blocks at the peak.
    for (prompt, new, blocks, copies) in [(10, 9, 2 + 4 * 3, 3), (8, 9, 2 + 4 * 2, 0)] {
        let mut scheduler = Scheduler::new(plain(), cache(64, 4)).unwrap();
        scheduler.add(Request::new(vec![1; prompt]).max_new_tokens(new).samples(4)).unwrap();
        assert_eq!(run(&mut scheduler).len(), 4);
        let stats = scheduler.stats().cache;
        assert_eq!((stats.held_blocks_peak, stats.block_copies), (blocks, copies));
    }
}

#[test]
fn every_way_to_end_has_its_reason() {
    let mut scheduler = Scheduler::new(plain(), cache(64, 4)).unwrap();
    let stop = scheduler.add(Request::new(vec![1; 3]).stop_tokens(&[1004]).max_new_tokens(9)).unwrap();
    let max = scheduler.add(Request::new(vec![1; 3]).stop_tokens(&[7]).max_new_tokens(2)).unwrap();
    let none = scheduler.add(Request::new(vec![1; 3]).max_new_tokens(0)).unwrap();
    let finished = run(&mut scheduler);
    assert_eq!(finished[&stop.sample(0)], (vec![1003, 1004], FinishReason::Stop));
    assert_eq!(finished[&max.sample(0)], (vec![1003, 1004], FinishReason::MaxTokens));
    assert_eq!(finished[&none.sample(0)], (vec![], FinishReason::MaxTokens));
    let cache = cache(64, 4).with_max_sequence_tokens(6).unwrap();
    let mut scheduler = Scheduler::new(plain(), cache).unwrap();
    let full = scheduler.add(Request::new(vec![1; 3])).unwrap();
    assert_eq!(run(&mut scheduler)[&full.sample(0)], (vec![1003, 1004, 1005], FinishReason::ContextFull));
    let error = scheduler.add(Request::new(vec![1; 3]).max_new_tokens(4)).unwrap_err();
    assert_eq!(error, RequestError::ExceedsContext { needed: 7, max_tokens: 6 });
    assert_eq!(scheduler.add(Request::new([])).unwrap_err(), RequestError::EmptyPrompt);
    for samples in [0, 65] {
        let error = scheduler.add(Request::new([1]).samples(samples)).unwrap_err();
        assert_eq!(error, RequestError::Samples { samples, max: 64 });
    }
}

#[test]
fn sequences_take_turns_when_a_step_has_fewer_rows_than_they_need() {
    let config = SchedulerConfig { step_tokens: 2, ..plain() };
    let mut scheduler = Scheduler::new(config, cache(64, 4)).unwrap();
    let group = scheduler.add(Request::new(vec![1; 2]).max_new_tokens(40).samples(5)).unwrap();
    step(&mut scheduler);
    let lens = |scheduler: &Scheduler| {
        [0, 1, 2, 3, 4].map(|sample| scheduler.tokens(group.sample(sample)).map_or(0, <[u32]>::len))
    };
    assert_eq!(lens(&scheduler), [3; 5], "all have their first token from one row");
    for round in 1..9 {
        // 5 steps of 2 rows: 2 for each of 5.
        for _ in 0..5 {
            assert_eq!(step(&mut scheduler), 2);
        }
        assert_eq!(lens(&scheduler), [3 + 2 * round; 5]);
    }
}

#[test]
fn a_prompt_is_read_beside_decoding_that_uses_most_of_the_work_budget() {
    let config = SchedulerConfig { step_work_budget: 100, ..plain() };
    let mut scheduler = Scheduler::new(config, cache(64, 4)).unwrap();
    for token in 1..3 {
        scheduler.add(Request::new(vec![token; 30]).max_new_tokens(20)).unwrap();
    }
    while scheduler.stats().generated_tokens < 4 {
        step(&mut scheduler);
    }
    let prompt = scheduler.add(Request::new(vec![3; 40]).max_new_tokens(1)).unwrap();
    let mut last = 0;
    for _ in 0..40 {
        // Rows of 33 and more keys for the two, up to 40 for the prompt: all three make progress in three steps.
        for _ in 0..3 {
            step(&mut scheduler);
        }
        let Some(computed) = scheduler.computed_tokens(prompt) else { break };
        assert!(computed > last, "the prompt is starved at {computed}");
        last = computed;
    }
    assert_eq!(scheduler.tokens(prompt), None);
}

#[test]
fn a_work_budget_splits_a_long_prompt() {
    let config = SchedulerConfig { step_work_budget: 50, ..plain() };
    let mut scheduler = Scheduler::new(config, cache(64, 4)).unwrap();
    scheduler.add(Request::new(vec![1; 60]).max_new_tokens(1)).unwrap();
    let mut rows = Vec::new();
    while let Schedule::Step(plan) = scheduler.schedule() {
        assert!(plan.work() <= 50 || plan.num_rows() == 1);
        rows.push(plan.num_rows());
        let results = vec![RowResult::Token(1); plan.logit_rows().len()];
        scheduler.commit(plan, &results).unwrap();
    }
    assert_eq!(rows[..4], [9, 4, 3, 2], "1 + ... + 9, 10 + ... + 13, 14 + 15 + 16, 17 + 18");
    assert_eq!(rows.iter().sum::<u32>(), 60);
    assert_eq!(rows.last(), Some(&1), "a row beyond the budget goes alone");
}

#[test]
fn budgets_may_change_between_steps() {
    let config = SchedulerConfig { step_tokens: 4, ..plain() };
    let mut scheduler = Scheduler::new(config, cache(64, 4)).unwrap();
    scheduler.add(Request::new(vec![1; 100]).max_new_tokens(1)).unwrap();
    assert_eq!(step(&mut scheduler), 4);
    scheduler.set_step_budgets(20, 1 << 20).unwrap();
    assert_eq!(step(&mut scheduler), 20);
    // The next rows see 25, 26 and so on.
    scheduler.set_step_budgets(20, 60).unwrap();
    assert_eq!(step(&mut scheduler), 2);
    for (tokens, work, field) in [(0, 1, "step_tokens"), (1, 0, "step_work_budget")] {
        assert_eq!(scheduler.set_step_budgets(tokens, work), Err(ConfigError::Zero { field }));
    }
    assert_eq!(step(&mut scheduler), 2, "27 and 28, and with one more row 84");
}

#[test]
fn a_commit_that_fails_leaves_the_step_to_be_planned_again() {
    let mut scheduler = Scheduler::new(plain(), cache(16, 4)).unwrap();
    let mut other = Scheduler::new(plain(), cache(16, 4)).unwrap();
    for scheduler in [&mut scheduler, &mut other] {
        scheduler.add(Request::new(vec![1; 6]).max_new_tokens(2)).unwrap();
    }
    let plan_of = |scheduler: &mut Scheduler| match scheduler.schedule() {
        Schedule::Step(plan) => plan,
        nothing => panic!("{nothing:?}"),
    };
    let (plan, foreign) = (plan_of(&mut scheduler), plan_of(&mut other));
    let (own, theirs) = (plan.cache_instance(), foreign.cache_instance());
    let error = scheduler.commit(foreign, &[RowResult::Token(1)]).unwrap_err();
    assert_eq!(error, CommitError::ForeignPlan { plan: theirs, cache: own });
    let error = scheduler.commit(plan, &[]).unwrap_err();
    assert_eq!(error, CommitError::ResultCount { expected: 1, actual: 0 });
    let stale = plan_of(&mut scheduler);
    let step = stale.step();
    let plan = plan_of(&mut scheduler);
    assert_eq!(
        (plan.token_ids(), plan.positions(), plan.context_lens()),
        (stale.token_ids(), stale.positions(), stale.context_lens()),
        "the same step, planned again"
    );
    assert!(plan.step() > step);
    let error = scheduler.commit(stale, &[RowResult::Token(1)]).unwrap_err();
    assert_eq!(error, CommitError::StalePlan { step });
    scheduler.assert_consistent();
    scheduler.commit(plan, &[RowResult::Token(1)]).unwrap();
    assert_eq!(scheduler.stats().steps, 1);
    assert_eq!(run(&mut scheduler).len(), 1);
}

#[test]
fn a_sequence_aborted_in_a_step_ends_with_it_and_the_others_go_on() {
    let mut scheduler = Scheduler::new(plain(), cache(16, 4)).unwrap();
    let [first, second] =
        [1, 2].map(|token| scheduler.add(Request::new(vec![token; 6]).max_new_tokens(4)).unwrap());
    step(&mut scheduler);
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    assert!(scheduler.abort(first).unwrap());
    assert!(scheduler.tokens(first).is_some(), "until the step ends");
    assert_eq!(scheduler.stats().cache.held_blocks, 4);
    let events = scheduler.commit(plan, &[RowResult::Token(5), RowResult::Token(6)]).unwrap();
    let aborted =
        StepEvent::Finished { sequence: first.sample(0), reason: FinishReason::Aborted, preemptions: 0 };
    assert_eq!(events, [aborted, StepEvent::Token { sequence: second.sample(0), token: 6 }]);
    assert_eq!((scheduler.tokens(first), scheduler.stats().cache.held_blocks), (None, 2));
    assert_eq!(run(&mut scheduler).len(), 1);
}

#[test]
fn a_branch_of_a_sequence_whose_step_is_dropped_shares_what_was_committed() {
    let mut scheduler = Scheduler::new(plain(), cache(16, 4)).unwrap();
    let parent = scheduler.add(Request::new(vec![1; 6]).max_new_tokens(6)).unwrap();
    step(&mut scheduler);
    step(&mut scheduler);
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    let branch = scheduler.fork(parent, 8, Request::new([77]).max_new_tokens(2)).unwrap();
    assert_eq!(scheduler.tokens(branch), Some(&[1, 1, 1, 1, 1, 1, 1006, 1007, 77][..]));
    assert_eq!(scheduler.computed_tokens(branch), Some(0));
    scheduler.assert_consistent();
    drop(plan);
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    // 7 tokens of the parent were computed; the branch computes its eighth and its own.
    assert_eq!(plan.token_ids(), [1007, 1007, 77]);
    assert_eq!(plan.positions(), [7, 7, 8]);
    assert_eq!(plan.block_copies().len(), 1);
    drop(plan);
    let finished = run(&mut scheduler);
    assert_eq!(finished[&branch.sample(0)].0, [1009, 1010]);
    assert_eq!(finished[&parent.sample(0)].0, [1008, 1009, 1010, 1011]);
    assert_eq!(scheduler.stats().cache.free_blocks, 16);
}

#[test]
fn a_cut_sequence_generates_again_from_there() {
    let mut scheduler = Scheduler::new(plain(), cache(16, 4)).unwrap();
    let id = scheduler.add(Request::new(vec![1; 6]).max_new_tokens(6)).unwrap();
    for _ in 0..4 {
        step(&mut scheduler);
    }
    scheduler.truncate(id, 7).unwrap();
    assert_eq!((scheduler.tokens(id).map(<[u32]>::len), scheduler.computed_tokens(id)), (Some(7), Some(6)));
    assert_eq!(scheduler.truncate(id, 8).unwrap_err(), RequestError::BeyondLength { tokens: 8, len: 7 });
    assert_eq!(scheduler.truncate(id, 0).unwrap_err(), RequestError::EmptyPrompt);
    let finished = run(&mut scheduler);
    assert_eq!(finished[&id.sample(0)].0, [1007, 1008, 1009, 1010, 1011]);
}
