//! Overcommitted admission, and whose blocks are taken when none are free.

use crate::scenarios::{cache, overcommitted, plain, run, step, told};
use paged_kv::{
    FinishReason, PrefixCacheConfig, Priority, Request, RequestId, Schedule, Scheduler, SchedulerConfig,
    StepEvent,
};

fn kept(scheduler: &mut Scheduler, token: u32) -> RequestId {
    let chat = scheduler.add(Request::new(vec![token; 8]).max_new_tokens(0).keep(true)).unwrap();
    run(scheduler);
    chat
}

#[test]
fn kept_sequences_are_reclaimed_least_recently_finished_first() {
    for config in [plain(), overcommitted(0)] {
        let mut scheduler = Scheduler::new(config, cache(7, 4)).unwrap();
        let chats = [1, 2, 3].map(|token| kept(&mut scheduler, token));
        // The first one is used again: now the second is the oldest.
        scheduler.extend(chats[0], Request::new([]).max_new_tokens(0).keep(true)).unwrap();
        run(&mut scheduler);
        scheduler.add(Request::new(vec![4; 8]).max_new_tokens(1)).unwrap();
        step(&mut scheduler);
        let computed = chats.map(|chat| scheduler.computed_tokens(chat));
        assert_eq!(computed, [Some(8), Some(0), Some(8)]);
        assert_eq!((scheduler.stats().reclaimed, scheduler.stats().preemptions), (1, 0));
        // It is computed again when it goes on, and says so.
        scheduler.extend(chats[1], Request::new([9]).max_new_tokens(1)).unwrap();
        assert_eq!(run(&mut scheduler)[&chats[1].sample(0)].0, [1009]);
        assert_eq!(scheduler.stats().recomputed_tokens, 1 + 8);
    }
}

#[test]
fn a_kept_sequence_whose_blocks_others_hold_is_spared() {
    let mut scheduler = Scheduler::new(overcommitted(0), cache(6, 4)).unwrap();
    let shared = kept(&mut scheduler, 1);
    let branch = scheduler.fork(shared, 8, Request::new([5]).max_new_tokens(4)).unwrap();
    step(&mut scheduler);
    let alone = scheduler.add(Request::new(vec![2; 8]).max_new_tokens(0).keep(true)).unwrap();
    while scheduler.stats().kept < 2 {
        step(&mut scheduler);
    }
    // 5 blocks are held. Taking the older one would free nothing.
    scheduler.add(Request::new(vec![3; 8]).max_new_tokens(1)).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.computed_tokens(shared), Some(8));
    assert_eq!(scheduler.computed_tokens(alone), Some(0));
    assert!(run(&mut scheduler).contains_key(&branch.sample(0)));
}

#[test]
fn a_kept_sequence_is_reclaimed_where_that_only_saves_a_copy() {
    for config in [plain(), overcommitted(0)] {
        let mut scheduler = Scheduler::new(config, cache(2, 4)).unwrap();
        let chat = scheduler.add(Request::new(vec![1; 6]).max_new_tokens(0).keep(true)).unwrap();
        run(&mut scheduler);
        // Both blocks are shared and none is free: only the last holder can go on, in place.
        let branch = scheduler.fork(chat, 6, Request::new([7]).max_new_tokens(1)).unwrap();
        assert_eq!(run(&mut scheduler)[&branch.sample(0)], (vec![1007], FinishReason::MaxTokens));
        assert_eq!(scheduler.stats().cache.block_copies, 0);
    }
}

#[test]
fn samples_that_do_not_fit_side_by_side_run_one_after_the_other() {
    for num_blocks in 3..8 {
        let mut scheduler = Scheduler::new(overcommitted(0), cache(num_blocks, 4)).unwrap();
        let group = scheduler.add(Request::new(vec![1; 4]).max_new_tokens(8).samples(3)).unwrap();
        let finished = run(&mut scheduler);
        for sample in 0..3 {
            let expected = ((1004..1012).collect(), FinishReason::MaxTokens);
            assert_eq!(finished[&group.sample(sample)], expected);
        }
        // With 6 blocks the last one waits in place until the others have ended; with fewer it gives up its own.
        assert_eq!(scheduler.stats().preemptions > 0, num_blocks < 6, "{num_blocks} blocks");
        assert_eq!(scheduler.stats().cache.free_blocks, num_blocks);
    }
}

#[test]
fn a_sequence_preempted_in_mid_prompt_reads_it_again() {
    let config = SchedulerConfig { step_tokens: 3, ..overcommitted(0) };
    let mut scheduler = Scheduler::new(config, cache(8, 4)).unwrap();
    let first = scheduler.add(Request::new(vec![1; 8]).max_new_tokens(12)).unwrap();
    let second = scheduler.add(Request::new(vec![2; 20]).max_new_tokens(4)).unwrap();
    let mut before = 0;
    while scheduler.stats().preemptions == 0 {
        before = scheduler.computed_tokens(second).unwrap();
        step(&mut scheduler);
    }
    assert!((1..20).contains(&before), "{before} of 20 tokens were read");
    assert_eq!(scheduler.computed_tokens(second), Some(0));
    let finished = run(&mut scheduler);
    assert!(finished.contains_key(&first.sample(0)));
    assert_eq!(finished[&second.sample(0)].0, [1020, 1021, 1022, 1023]);
    assert_eq!(scheduler.stats().recomputed_tokens, u64::from(before));
}

#[test]
fn at_its_bound_a_sequence_returns_with_everything_reserved_and_stays() {
    for (max_preemptions, waits) in [(3, false), (1, true)] {
        let config = SchedulerConfig { max_preemptions, ..overcommitted(0) };
        let mut scheduler = Scheduler::new(config, cache(6, 4)).unwrap();
        let first = scheduler.add(Request::new(vec![1; 8]).max_new_tokens(12)).unwrap();
        let second = scheduler.add(Request::new(vec![2; 6]).max_new_tokens(10)).unwrap();
        while scheduler.stats().preemptions == 0 {
            step(&mut scheduler);
        }
        // The first one holds 4 of 6 blocks. The second has 11 tokens: 3 blocks, and 4 when it is done.
        let mut together = 0;
        let mut ends = Vec::new();
        while scheduler.stats().running + scheduler.stats().waiting > 0 {
            let (_, events) = told(&mut scheduler);
            together += u32::from(scheduler.stats().running == 2);
            ends.extend(events.into_iter().filter_map(|event| match event {
                StepEvent::Finished { sequence, preemptions, .. } => Some((sequence, preemptions)),
                _ => None,
            }));
        }
        assert_eq!(together == 0, waits || scheduler.stats().preemptions == 1, "at most {max_preemptions}");
        assert_eq!(ends.len(), 2);
        assert_eq!(ends[0], (first.sample(0), 0));
        assert_eq!(ends[1].0, second.sample(0));
        assert!(ends[1].1 <= max_preemptions);
    }
}

#[test]
fn a_protected_sequence_keeps_its_reservation_from_those_before_it() {
    // With no preemption allowed, every request is let in with everything reserved.
    let config = SchedulerConfig { max_preemptions: 0, ..overcommitted(0) };
    let mut scheduler = Scheduler::new(config, cache(9, 4)).unwrap();
    let requests: Vec<_> =
        (0..5).map(|token| scheduler.add(Request::new(vec![token; 5]).max_new_tokens(11)).unwrap()).collect();
    step(&mut scheduler);
    assert_eq!(scheduler.stats().running, 2, "4 blocks each");
    let finished = run(&mut scheduler);
    assert_eq!((finished.len(), scheduler.stats().preemptions), (requests.len(), 0));
}

#[test]
fn samples_are_not_preempted_where_no_preemption_is_allowed() {
    let config = SchedulerConfig { max_preemptions: 0, ..overcommitted(0) };
    for num_blocks in 3..9 {
        let mut scheduler = Scheduler::new(config, cache(num_blocks, 4)).unwrap();
        let group = scheduler.add(Request::new(vec![1; 5]).max_new_tokens(7).samples(3)).unwrap();
        let finished = run(&mut scheduler);
        assert_eq!(finished.len(), 3);
        assert_eq!(finished[&group.sample(2)].0.len(), 7);
        assert_eq!(scheduler.stats().preemptions, 0);
    }
}

#[test]
fn protected_sequences_that_share_and_are_cut_do_not_lock_the_pool() {
    let config = SchedulerConfig { max_preemptions: 0, ..overcommitted(0) };
    let mut scheduler = Scheduler::new(config, cache(9, 4)).unwrap();
    let parent = scheduler.add(Request::new(vec![1; 16]).max_new_tokens(16)).unwrap();
    step(&mut scheduler);
    let child = scheduler.fork(parent, 16, Request::new([5]).max_new_tokens(3)).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.stats().running, 2);
    // It gives up four shared blocks: nothing becomes free, and what it needs instead is reserved for the parent.
    scheduler.truncate(child, 1).unwrap();
    scheduler.assert_consistent();
    assert_eq!(scheduler.stats().waiting, 1, "it is let in again when everything can be reserved");
    let finished = run(&mut scheduler);
    assert_eq!(finished[&child.sample(0)].0.len(), 19);
    assert_eq!(finished[&parent.sample(0)].0.len(), 14, "two of 16 were told before");
    assert_eq!(scheduler.stats().preemptions, 0);
}

#[test]
fn a_watermark_is_left_free_unless_nobody_else_runs() {
    let mut scheduler = Scheduler::new(overcommitted(2), cache(8, 4)).unwrap();
    scheduler.add(Request::new(vec![1; 8]).max_new_tokens(1)).unwrap();
    scheduler.add(Request::new(vec![2; 16]).max_new_tokens(1)).unwrap();
    let small = scheduler.add(Request::new(vec![3; 4]).max_new_tokens(1)).unwrap();
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    assert_eq!(plan.num_sequences(), 2, "2 + 4 blocks are held and 2 stay free");
    drop(plan);
    assert_eq!(scheduler.stats().waiting, 1);
    assert!(run(&mut scheduler).contains_key(&small.sample(0)));
}

#[test]
fn nobody_is_let_in_by_a_step_that_preempted() {
    let mut scheduler = Scheduler::new(overcommitted(0), cache(6, 4)).unwrap();
    for token in 1..4 {
        scheduler.add(Request::new(vec![token; 8]).max_new_tokens(6)).unwrap();
    }
    let mut seen = 0;
    loop {
        let before = scheduler.stats();
        if step(&mut scheduler) == 0 {
            break;
        }
        let after = scheduler.stats();
        let preempted = u32::try_from(after.preemptions - before.preemptions).unwrap();
        if preempted > 0 {
            assert_eq!(after.waiting, before.waiting + preempted);
            seen += preempted;
        }
    }
    assert!(seen > 0);
}

#[test]
fn nobody_is_preempted_for_a_request_that_waits_for_an_equal_one() {
    let prefix_cache = Some(PrefixCacheConfig::default());
    let config = SchedulerConfig { max_running: Some(2), step_tokens: 8, prefix_cache, ..overcommitted(0) };
    let mut scheduler = Scheduler::new(config, cache(32, 4)).unwrap();
    let prompt = || Request::new(vec![1; 40]).max_new_tokens(1).priority(Priority::Interactive);
    scheduler.add(prompt()).unwrap();
    scheduler.add(Request::new([2, 2]).max_new_tokens(8).priority(Priority::Idle)).unwrap();
    step(&mut scheduler);
    step(&mut scheduler);
    assert_eq!(scheduler.stats().running, 2);
    // It would take the idle one's place, but has nothing to do until the prompt is read.
    scheduler.add(prompt()).unwrap();
    step(&mut scheduler);
    assert_eq!((scheduler.stats().running, scheduler.stats().preemptions), (2, 0));
    assert_eq!(run(&mut scheduler).len(), 3);
}
