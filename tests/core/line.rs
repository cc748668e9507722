//! The line: when a request is let in, beside which others, and what waiting costs.

use crate::scenarios::{cache, overcommitted, plain};
use paged_kv::{
    Admission, CacheConfig, FinishReason, KvType, ModelShape, PreemptionMode, PrefixCacheConfig, Request,
    RequestError, Retention, RowResult, Schedule, Scheduler, SchedulerConfig, SequenceState, StepEvent,
    StepPlan, WaitReason,
};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A pool of 511 blocks of 16 tokens: 1 GiB of Llama 3.1 8B.
fn one_gib() -> CacheConfig {
    let shape = ModelShape::new(32, 32, 8, 128);
    let cache = CacheConfig::for_bytes(1 << 30, &shape, KvType::F16).unwrap();
    assert_eq!(cache.num_blocks(), 511);
    cache
}

const STOP: u32 = 2;

/// Runs to the end. Sequence `i` answers with `answers[i]` tokens, the last of them a stop token. Returns the step of each
/// sequence's first token, and how each ended.
fn serve(scheduler: &mut Scheduler, answers: &[u32]) -> (Vec<u32>, Vec<FinishReason>) {
    let mut told = BTreeMap::new();
    let (mut first_tokens, mut reasons) = (BTreeMap::new(), BTreeMap::new());
    let mut step = 0;
    while let Schedule::Step(plan) = scheduler.schedule() {
        step += 1;
        let results: Vec<RowResult> = plan
            .logit_rows()
            .iter()
            .map(|row| {
                let index = row.sequence.request().raw() as usize - 1 + row.sequence.sample() as usize;
                let told: &mut u32 = told.entry(index).or_default();
                *told += 1;
                first_tokens.entry(index).or_insert(step);
                RowResult::Token(if *told == answers[index] { STOP } else { 7 })
            })
            .collect();
        for event in scheduler.commit(plan, &results).unwrap() {
            if let StepEvent::Finished { sequence, reason, .. } = event {
                reasons.insert(sequence.request().raw() as usize - 1 + sequence.sample() as usize, *reason);
            }
        }
    }
    (first_tokens.into_values().collect(), reasons.into_values().collect())
}

#[test]
fn b55_four_chats_without_a_maximum_start_together_by_default() {
    let mut scheduler = Scheduler::new(SchedulerConfig::default(), one_gib()).unwrap();
    for chat in 0..4 {
        scheduler.add(Request::new(vec![100 + chat; 100]).stop_tokens(&[STOP])).unwrap();
    }
    let (first_tokens, reasons) = serve(&mut scheduler, &[400, 20, 20, 20]);
    assert_eq!(first_tokens, [1; 4]);
    assert_eq!(reasons, [FinishReason::Stop; 4]);
    assert_eq!(scheduler.stats().preemptions, 0);
}

#[test]
fn b55_chats_without_a_maximum_that_fill_the_pool_all_reach_their_end() {
    let mut scheduler = Scheduler::new(SchedulerConfig::default(), one_gib()).unwrap();
    for chat in 0..4 {
        scheduler.add(Request::new(vec![100 + chat; 100]).stop_tokens(&[STOP])).unwrap();
    }
    // Together 16,400 tokens in a pool of 8,176.
    let (first_tokens, reasons) = serve(&mut scheduler, &[4000; 4]);
    assert_eq!(first_tokens, [1; 4]);
    assert_eq!(reasons, [FinishReason::Stop; 4]);
    assert!(scheduler.stats().preemptions > 0);
}

#[test]
fn b55_samples_branches_and_turns_run_beside_a_chat_without_a_maximum() {
    let mut scheduler = Scheduler::new(SchedulerConfig::default(), one_gib()).unwrap();
    scheduler.add(Request::new(vec![5; 10]).samples(4).stop_tokens(&[STOP])).unwrap();
    let (first_tokens, reasons) = serve(&mut scheduler, &[9, 12, 3, 30]);
    assert_eq!((first_tokens, reasons), (vec![1; 4], vec![FinishReason::Stop; 4]));

    let kept = scheduler.add(Request::new(vec![6; 10]).max_new_tokens(1).keep(true)).unwrap();
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    scheduler.commit(plan, &[RowResult::Token(7)]).unwrap();
    scheduler.add(Request::new(vec![8; 10])).unwrap();
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    scheduler.commit(plan, &[RowResult::Token(7)]).unwrap();
    scheduler.extend(kept, Request::new([7, 7]).max_new_tokens(10)).unwrap();
    scheduler.fork(kept, 10, Request::new([9]).max_new_tokens(10)).unwrap();
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    assert_eq!(plan.num_sequences(), 3);
}

fn plan_of(scheduler: &mut Scheduler) -> StepPlan {
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    plan
}

/// Commits with the token 7 for every row.
fn commit(scheduler: &mut Scheduler, plan: StepPlan) -> Vec<StepEvent> {
    let results = vec![RowResult::Token(7); plan.logit_rows().len()];
    scheduler.commit(plan, &results).unwrap().to_vec()
}

fn admitted(events: &[StepEvent]) -> usize {
    events.iter().filter(|event| matches!(event, StepEvent::Admitted { .. })).count()
}

#[test]
fn b53_a_request_that_waits_for_pins_is_let_in_when_their_time_has_passed() {
    let config = SchedulerConfig { admission: Admission::Guaranteed, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(config, cache(16, 64)).unwrap();
    let pinned = Request::new(vec![1; 512]).max_new_tokens(0).retain(0..512, Retention::Pinned, Some(20));
    scheduler.add(pinned).unwrap();
    let plan = plan_of(&mut scheduler);
    commit(&mut scheduler, plan);
    scheduler.add(Request::new(vec![2; 2]).max_new_tokens(382)).unwrap();
    let waits = scheduler.add(Request::new(vec![3; 500]).max_new_tokens(2)).unwrap();
    // 6 blocks are promised and 8 are pinned, of 16: another 8 can be promised when the pins are gone.
    let mut steps = 0;
    while scheduler.status(waits).unwrap().state == SequenceState::Waiting {
        let plan = plan_of(&mut scheduler);
        commit(&mut scheduler, plan);
        steps += 1;
        assert!(steps <= 22, "still waits {:?}", scheduler.status(waits));
    }
    assert!(steps >= 19, "the pins were gone after {steps} steps");
}

/// The least time that `run` takes of three runs of what `prepare` makes.
fn least_time<T>(mut prepare: impl FnMut() -> T, mut run: impl FnMut(&mut T)) -> Duration {
    let times = (0..3).map(|_| {
        let mut prepared = prepare();
        let start = Instant::now();
        run(&mut prepared);
        start.elapsed()
    });
    times.min().unwrap()
}

/// A scheduler over a pool of `num_blocks` blocks of one token and as many tables as requests can run.
fn wide(admission: Admission, num_blocks: u32, max_sequences: u32) -> Scheduler {
    let config = SchedulerConfig { admission, step_tokens: 1 << 20, ..plain() };
    let cache = cache(num_blocks, 1)
        .with_max_sequence_tokens(4)
        .and_then(|cache| cache.with_max_sequences(max_sequences))
        .unwrap();
    Scheduler::new(config, cache).unwrap()
}

#[test]
fn an_admission_costs_the_same_in_a_large_pool_and_beside_many_others() {
    for admission in [Admission::Guaranteed, Admission::Overcommitted { watermark_blocks: 0 }] {
        let time = |num_blocks, requests: u32| {
            let prepare = || {
                let mut scheduler = wide(admission, num_blocks, requests);
                for request in 0..requests {
                    scheduler.add(Request::new([request]).max_new_tokens(3)).unwrap();
                }
                scheduler
            };
            least_time(prepare, |scheduler| {
                assert_eq!(plan_of(scheduler).num_rows(), requests, "all are let in by one step");
            })
        };
        let (few, many) = (time(4_000, 1_000), time(1_000_000, 10_000));
        // Walking the pool for each would take 2,500 times as long, walking the others 100 times.
        assert!(many < 400 * few, "{admission:?}: 10,000 take {many:?}, 1,000 take {few:?}");
        assert!(many < Duration::from_secs(1), "{admission:?}: 10,000 take {many:?}");
    }
}

#[test]
fn b77_giving_up_a_long_line_one_by_one_costs_the_same_for_each() {
    let time = |requests: u32| {
        let prepare = || {
            let mut scheduler = wide(Admission::Guaranteed, 4, 1);
            let ids: Vec<_> = (0..requests)
                .map(|request| scheduler.add(Request::new([request]).max_new_tokens(1)).unwrap())
                .collect();
            (scheduler, ids)
        };
        least_time(prepare, |(scheduler, ids)| {
            assert!(ids.iter().all(|&id| scheduler.abort(id).unwrap()));
            assert_eq!(scheduler.stats().waiting, 0);
        })
    };
    let (few, many) = (time(5_000), time(100_000));
    // Walking the line for each would take 400 times as long.
    assert!(many < 200 * few, "100,000 take {many:?}, 5,000 take {few:?}");
}

#[test]
fn cutting_a_sequence_costs_the_same_in_a_large_pool() {
    let time = |num_blocks| {
        let prepare = || {
            let mut scheduler = wide(Admission::Guaranteed, num_blocks, 8);
            let id = scheduler.add(Request::new([1, 2]).max_new_tokens(2)).unwrap();
            let plan = plan_of(&mut scheduler);
            commit(&mut scheduler, plan);
            (scheduler, id)
        };
        least_time(prepare, |(scheduler, id)| {
            for _ in 0..1_000 {
                scheduler.truncate(*id, 2).unwrap();
            }
        })
    };
    let (small, large) = (time(100), time(1_000_000));
    assert!(
        large < 200 * small + Duration::from_millis(1),
        "{large:?} in a large pool, {small:?} in a small one"
    );
}

#[test]
fn a_line_of_equal_prompts_costs_a_step_nothing() {
    let time = |waiting: u32| {
        let prepare = || {
            let config = SchedulerConfig {
                step_tokens: 1,
                prefix_cache: Some(PrefixCacheConfig::default()),
                ..plain()
            };
            let cache = cache(100_000, 4).with_max_sequence_tokens(2_100).unwrap();
            let mut scheduler = Scheduler::new(config, cache).unwrap();
            for _ in 0..=waiting {
                scheduler.add(Request::new(vec![5; 2_000]).max_new_tokens(1)).unwrap();
            }
            // Some steps have the line stand behind the first prompt.
            for _ in 0..100 {
                let plan = plan_of(&mut scheduler);
                commit(&mut scheduler, plan);
            }
            scheduler
        };
        least_time(prepare, |scheduler| {
            for _ in 0..100 {
                let plan = plan_of(scheduler);
                assert_eq!(plan.num_rows(), 1);
                commit(scheduler, plan);
            }
        })
    };
    let (alone, many) = (time(0), time(4_000));
    assert!(
        many < 100 * alone + Duration::from_millis(1),
        "{many:?} with 4,000 in line, {alone:?} with none"
    );
}

#[test]
fn sequences_that_wait_for_an_equal_prompt_are_let_in_when_it_ends_early() {
    let config =
        SchedulerConfig { step_tokens: 4, prefix_cache: Some(PrefixCacheConfig::default()), ..plain() };
    let mut scheduler = Scheduler::new(config, cache(64, 4)).unwrap();
    let first = scheduler.add(Request::new(vec![5; 40]).max_new_tokens(1)).unwrap();
    let second = scheduler.add(Request::new(vec![5; 40]).max_new_tokens(1)).unwrap();
    for _ in 0..2 {
        let plan = plan_of(&mut scheduler);
        commit(&mut scheduler, plan);
    }
    let waits_for = scheduler.status(second).unwrap().waits_for;
    assert_eq!(waits_for, Some(WaitReason::EqualPrompt { sequence: first.into() }));
    assert!(scheduler.abort(first).unwrap());
    let plan = plan_of(&mut scheduler);
    assert_eq!(scheduler.status(second).unwrap().state, SequenceState::Running);
    commit(&mut scheduler, plan);
}

#[test]
fn a_step_that_is_dropped_again_and_again_tells_once_who_came_back() {
    let config =
        SchedulerConfig { preemption: PreemptionMode::Swap, max_preemptions: 100, ..overcommitted(0) };
    let mut scheduler = Scheduler::new(config, cache(4, 4).with_host_blocks(8).unwrap()).unwrap();
    for first in 1..3 {
        scheduler.add(Request::new(vec![first; 6]).max_new_tokens(8)).unwrap();
    }
    // The second one is moved out for the first, which ends.
    let mut told = 0;
    loop {
        let plan = plan_of(&mut scheduler);
        let (outs, step) = (plan.swap_outs().len(), plan.step());
        if !plan.swap_ins().is_empty() {
            break;
        }
        told += admitted(&commit(&mut scheduler, plan));
        if outs > 0 {
            scheduler.complete_transfers(&[paged_kv::TransferReport { step, complete: true }]);
        }
    }
    assert_eq!(told, 2);
    for _ in 0..1_000 {
        assert!(!plan_of(&mut scheduler).swap_ins().is_empty(), "it is brought back");
    }
    let plan = plan_of(&mut scheduler);
    let events = commit(&mut scheduler, plan);
    assert_eq!(admitted(&events), 1, "{events:?}");
}

#[test]
fn every_sequence_that_is_aborted_is_told_to_have_finished_by_the_next_commit() {
    let ended = |events: &[StepEvent]| {
        let ended = events.iter().filter_map(|event| match event {
            StepEvent::Finished { sequence, reason: FinishReason::Aborted, .. } => Some(sequence.request()),
            _ => None,
        });
        ended.collect::<Vec<_>>()
    };
    let mut scheduler = Scheduler::new(plain(), cache(16, 4)).unwrap();
    let ids: Vec<_> =
        (0..4).map(|first| scheduler.add(Request::new([first; 4]).max_new_tokens(9)).unwrap()).collect();
    let in_line = scheduler.add(Request::new([9; 4]).max_new_tokens(40)).unwrap();
    let plan = plan_of(&mut scheduler);
    commit(&mut scheduler, plan);
    // Between steps, in line, in a step that is dropped, and in one that is committed.
    scheduler.abort(ids[0]).unwrap();
    scheduler.abort(in_line).unwrap();
    let dropped = plan_of(&mut scheduler);
    scheduler.abort(ids[1]).unwrap();
    drop(dropped);
    let plan = plan_of(&mut scheduler);
    scheduler.abort(ids[2]).unwrap();
    let events = commit(&mut scheduler, plan);
    let mut told = ended(&events);
    told.sort_unstable();
    assert_eq!(told, [ids[0], ids[1], ids[2], in_line]);
    let plan = plan_of(&mut scheduler);
    assert_eq!(ended(&commit(&mut scheduler, plan)), [], "each of them once");
    // What has finished and is only kept does not finish again.
    let kept = scheduler.add(Request::new([3; 4]).max_new_tokens(0).keep(true)).unwrap();
    let plan = plan_of(&mut scheduler);
    commit(&mut scheduler, plan);
    scheduler.abort(kept).unwrap();
    let plan = plan_of(&mut scheduler);
    assert_eq!(ended(&commit(&mut scheduler, plan)), []);
}

#[test]
fn ids_of_another_scheduler_are_refused_with_both() {
    let new = || Scheduler::new(plain(), cache(16, 4)).unwrap();
    let (mut own, mut other) = (new(), new());
    let kept = |scheduler: &mut Scheduler| {
        let id = scheduler.add(Request::new([1; 4]).max_new_tokens(0).keep(true)).unwrap();
        let plan = plan_of(scheduler);
        commit(scheduler, plan);
        id
    };
    let (mine, foreign) = (kept(&mut own), kept(&mut other));
    assert_eq!(mine.raw(), foreign.raw(), "equal numbers");
    let instances = (other.cache().instance(), own.cache().instance());
    let refused = RequestError::Foreign { request: 1, owner: instances.0, scheduler: instances.1 };
    let turn = || Request::new([2]).max_new_tokens(1);
    assert_eq!(own.abort(foreign), Err(refused));
    assert_eq!(own.abort_sequence(foreign.into()), Err(refused));
    assert_eq!(own.extend(foreign, turn()), Err(refused));
    assert_eq!(own.fork(foreign, 1, turn()), Err(refused));
    assert_eq!(own.truncate(foreign, 1), Err(refused));
    assert_eq!(own.propose(foreign, &[]), Err(refused));
    assert!(own.tokens(foreign).is_none() && own.status(foreign).is_none());
    assert!(own.computed_tokens(foreign).is_none() && own.prefix_report(foreign).is_none());
    assert!(refused.to_string().contains(&instances.0.to_string()), "{refused}");
    assert_eq!(own.abort(mine), Ok(true));
}

#[test]
fn a_small_request_passes_a_large_one_that_waits_for_blocks() {
    for config in [plain(), overcommitted(0)] {
        let mut scheduler = Scheduler::new(config, cache(16, 4)).unwrap();
        scheduler.add(Request::new(vec![1; 24]).max_new_tokens(16)).unwrap();
        let large = scheduler.add(Request::new(vec![2; 44]).max_new_tokens(8)).unwrap();
        let small = scheduler.add(Request::new(vec![3; 4]).max_new_tokens(4)).unwrap();
        let plan = plan_of(&mut scheduler);
        commit(&mut scheduler, plan);
        assert_eq!(scheduler.status(small).unwrap().state, SequenceState::Running);
        let status = scheduler.status(large).unwrap();
        assert_eq!(status.state, SequenceState::Waiting);
        assert!(matches!(status.waits_for, Some(WaitReason::Blocks { .. })), "{status:?}");
    }
}

#[test]
fn every_sequence_that_waits_says_why() {
    let waits_for = |scheduler: &Scheduler, id| scheduler.status(id).unwrap().waits_for;
    let add = |scheduler: &mut Scheduler| {
        [1, 2, 3].map(|first| scheduler.add(Request::new([first]).max_new_tokens(9)).unwrap())
    };
    let one_table = cache(16, 4).with_max_sequences(1).unwrap();
    let mut scheduler = Scheduler::new(plain(), one_table).unwrap();
    let ids = add(&mut scheduler);
    assert_eq!(ids.map(|id| waits_for(&scheduler, id)), [Some(WaitReason::Line); 3], "none was asked");
    for _ in 0..3 {
        let plan = plan_of(&mut scheduler);
        let waiting = ids.map(|id| waits_for(&scheduler, id));
        assert_eq!(waiting, [None, Some(WaitReason::Tables), Some(WaitReason::Line)]);
        commit(&mut scheduler, plan);
    }
    // Three that run, and rows for one.
    let mut scheduler = Scheduler::new(plain(), cache(16, 4)).unwrap();
    let ids = add(&mut scheduler);
    let plan = plan_of(&mut scheduler);
    commit(&mut scheduler, plan);
    scheduler.set_step_budgets(1, 1 << 20).unwrap();
    for _ in 0..3 {
        let plan = plan_of(&mut scheduler);
        let mut waiting = ids.map(|id| waits_for(&scheduler, id));
        waiting.sort_by_key(Option::is_some);
        assert_eq!(waiting, [None, Some(WaitReason::Budget), Some(WaitReason::Budget)]);
        commit(&mut scheduler, plan);
    }
}

#[test]
fn a_large_request_is_passed_by_as_many_small_ones_as_configured_and_no_more() {
    for max_passed in [0, 3] {
        let mut scheduler = Scheduler::new(SchedulerConfig { max_passed, ..plain() }, cache(16, 4)).unwrap();
        scheduler.add(Request::new(vec![1; 24]).max_new_tokens(8)).unwrap();
        let large = scheduler.add(Request::new(vec![2; 40]).max_new_tokens(8)).unwrap();
        let mut passed = 0;
        // A small request arrives before every step, for longer than the first one runs.
        for _ in 0..40 {
            scheduler.add(Request::new(vec![3; 4]).max_new_tokens(4)).unwrap();
            let plan = plan_of(&mut scheduler);
            let events = commit(&mut scheduler, plan);
            if scheduler.status(large).is_none_or(|status| status.state == SequenceState::Running) {
                break;
            }
            passed += admitted(&events);
        }
        assert_ne!(scheduler.status(large).map(|status| status.state), Some(SequenceState::Waiting));
        // The first one is let in by the first step, too.
        assert_eq!(passed, 1 + max_passed as usize);
    }
}

#[test]
fn a_cut_in_a_step_shows_at_once_and_what_the_step_answers_is_not_told() {
    let mut scheduler = Scheduler::new(plain(), cache(16, 4)).unwrap();
    let id = scheduler.add(Request::new(vec![1; 6]).max_new_tokens(9)).unwrap();
    for _ in 0..2 {
        let plan = plan_of(&mut scheduler);
        commit(&mut scheduler, plan);
    }
    let plan = plan_of(&mut scheduler);
    scheduler.truncate(id, 5).unwrap();
    assert_eq!(scheduler.tokens(id).map(<[u32]>::len), Some(5));
    assert_eq!(scheduler.status(id).unwrap().tokens, 5);
    assert_eq!(scheduler.truncate(id, 6), Err(RequestError::BeyondLength { tokens: 6, len: 5 }));
    let events = commit(&mut scheduler, plan);
    assert_eq!(events, [], "the token belongs to what was cut off");
    assert_eq!(scheduler.tokens(id), Some(&[1; 5][..]));
    let plan = plan_of(&mut scheduler);
    assert_eq!((plan.token_ids(), plan.positions()), (&[1][..], &[4][..]));
}

#[test]
fn a_branch_and_a_turn_that_cannot_be_promised_wait_in_line_if_they_may() {
    let mut scheduler = Scheduler::new(plain(), cache(10, 4)).unwrap();
    let chat = scheduler.add(Request::new(vec![1; 4]).max_new_tokens(0).keep(true)).unwrap();
    let plan = plan_of(&mut scheduler);
    commit(&mut scheduler, plan);
    let parent = scheduler.add(Request::new(vec![2; 8]).max_new_tokens(24)).unwrap();
    let plan = plan_of(&mut scheduler);
    commit(&mut scheduler, plan);
    let turn = |tokens: u32| Request::new([5]).max_new_tokens(tokens);
    let refused = scheduler.fork(parent, 8, turn(24)).unwrap_err();
    assert!(matches!(refused, RequestError::PromiseExceeded { available: 10, .. }), "{refused}");
    let refused = scheduler.extend(chat, turn(20)).unwrap_err();
    assert!(matches!(refused, RequestError::PromiseExceeded { available: 10, .. }), "{refused}");
    let branch = scheduler.fork(parent, 8, turn(24).may_wait(true)).unwrap();
    scheduler.extend(chat, turn(20).may_wait(true)).unwrap();
    scheduler.assert_consistent();
    let mut tokens = BTreeMap::new();
    while let Schedule::Step(plan) = scheduler.schedule() {
        scheduler.assert_consistent();
        for event in commit(&mut scheduler, plan) {
            if let StepEvent::Token { sequence, .. } = event {
                *tokens.entry(sequence.request()).or_insert(0) += 1;
            }
        }
    }
    assert_eq!(tokens, BTreeMap::from([(chat, 20), (parent, 23), (branch, 24)]));
    assert_eq!(scheduler.stats().preemptions, 0);
}

#[test]
fn b62_what_a_sequence_finds_of_itself_after_a_preemption_is_no_hit() {
    let config = SchedulerConfig { prefix_cache: Some(PrefixCacheConfig::default()), ..overcommitted(0) };
    let mut scheduler = Scheduler::new(config, cache(40, 4)).unwrap();
    for request in 0..24 {
        let prompt: Vec<u32> = (0..24).map(|token| 1_000 * request + token).collect();
        scheduler.add(Request::new(prompt).max_new_tokens(24)).unwrap();
    }
    while let Schedule::Step(plan) = scheduler.schedule() {
        commit(&mut scheduler, plan);
    }
    let stats = scheduler.stats();
    assert!(stats.preemptions > 0 && stats.prefix_refound_tokens > 0, "{stats:?}");
    assert_eq!((stats.prefix_hit_tokens, stats.prefix_wanted_tokens), (0, 24 * 23), "{stats:?}");
}
