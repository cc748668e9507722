//! Faults that users of other schedulers reported, tried on this one. The numbers are those of the project's list of bug
//! cases; each test is named after what holds here.

use crate::scenarios::{cache, overcommitted, plain, run, step};
use crate::simulation::random::Random;
use paged_kv::{
    ConfigError, Error, FinishReason, PrefixCacheConfig, Priority, Request, RequestError, RequestId,
    RowResult, Schedule, Scheduler, SchedulerConfig, StepEvent, VictimPolicy,
};

fn with_step_tokens(step_tokens: u32) -> SchedulerConfig {
    SchedulerConfig { step_tokens, ..plain() }
}

#[test]
fn b25_a_prompt_of_65537_tokens_fits_one_step() {
    let config = SchedulerConfig { step_work_budget: 1 << 32, ..with_step_tokens(1 << 17) };
    let mut scheduler = Scheduler::new(config, cache(4097, 16)).unwrap();
    scheduler.add(Request::new(vec![1; 65_537]).max_new_tokens(1)).unwrap();
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    assert_eq!((plan.num_rows(), plan.logit_rows()[0].row), (65_537, 65_536));
    assert_eq!(plan.positions().last(), Some(&65_536));
}

#[test]
fn b31_a_chunk_sees_its_own_end_and_no_further() {
    let mut scheduler = Scheduler::new(with_step_tokens(4), cache(16, 4)).unwrap();
    scheduler.add(Request::new((0..10).collect::<Vec<_>>()).max_new_tokens(1)).unwrap();
    for (context, rows, logits) in [(4, 4, 0), (8, 4, 0), (10, 2, 1)] {
        let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
        assert_eq!(plan.context_lens(), [context]);
        assert_eq!((plan.num_rows(), plan.logit_rows().len()), (rows, logits));
        scheduler.commit(plan, &vec![RowResult::Token(1); logits]).unwrap();
    }
    assert!(matches!(scheduler.schedule(), Schedule::Idle));
}

#[test]
fn b31_a_prompt_of_whole_blocks_takes_the_next_block_with_its_first_token() {
    let mut scheduler = Scheduler::new(with_step_tokens(20), cache(16, 16)).unwrap();
    scheduler.add(Request::new(vec![1; 32]).max_new_tokens(2)).unwrap();
    for (rows, held) in [(20, 2), (12, 2), (1, 3)] {
        let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
        assert_eq!(plan.num_rows(), rows);
        assert_eq!(scheduler.stats().cache.held_blocks, held);
        let results = vec![RowResult::Token(1); plan.logit_rows().len()];
        scheduler.commit(plan, &results).unwrap();
    }
}

#[test]
fn b31_a_chunk_within_the_last_block_adds_none() {
    let mut scheduler = Scheduler::new(with_step_tokens(17), cache(16, 16)).unwrap();
    scheduler.add(Request::new(vec![1; 20]).max_new_tokens(1)).unwrap();
    for (rows, changes) in [(17, 2), (3, 0)] {
        let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
        assert_eq!((plan.num_rows() as usize, plan.changed_entries().len()), (rows, changes));
        let results = vec![RowResult::Token(1); plan.logit_rows().len()];
        scheduler.commit(plan, &results).unwrap();
    }
}

/// A group of three with a prompt of 6 and a step of 2 rows, `steps` steps after it was added.
fn group(steps: usize) -> (Scheduler, RequestId) {
    let mut scheduler = Scheduler::new(with_step_tokens(2), cache(8, 4)).unwrap();
    let group = scheduler.add(Request::new(vec![1; 6]).max_new_tokens(3).samples(3)).unwrap();
    for _ in 0..steps {
        step(&mut scheduler);
    }
    (scheduler, group)
}

/// Nothing is left of what was aborted, and the next request is let in at once.
fn all_returned(scheduler: &mut Scheduler) {
    scheduler.assert_consistent();
    let stats = scheduler.stats();
    assert_eq!((stats.running, stats.waiting, stats.kept), (0, 0, 0));
    assert_eq!((stats.cache.free_blocks, stats.cache.num_tables), (8, 0));
    scheduler.add(Request::new(vec![2; 8]).max_new_tokens(24)).unwrap();
    let Schedule::Step(_) = scheduler.schedule() else { panic!("the next request is let in") };
}

#[test]
fn b39_aborting_a_group_returns_everything_in_every_state() {
    // Waiting, after chunks 1 and 2 of 3, after the first token, and later.
    for steps in 0..=5 {
        let (mut scheduler, group) = group(steps);
        assert!(scheduler.abort(group).unwrap());
        assert!(!scheduler.abort(group).unwrap(), "a second abort ends nothing");
        all_returned(&mut scheduler);
    }
}

#[test]
fn b39_aborting_a_group_in_a_step_ends_it_at_commit() {
    for steps in 0..=5 {
        let (mut scheduler, group) = group(steps);
        let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
        let alive = if steps <= 2 { 3 } else { scheduler.stats().running as usize };
        assert!(scheduler.abort(group).unwrap());
        assert!(!scheduler.abort(group).unwrap(), "a second abort ends nothing");
        scheduler.assert_consistent();
        let results = vec![RowResult::Token(1); plan.logit_rows().len()];
        let mut events = scheduler.commit(plan, &results).unwrap().to_vec();
        events.retain(|event| !matches!(event, StepEvent::Admitted { .. }));
        let ended = events
            .iter()
            .filter(|event| matches!(event, StepEvent::Finished { reason: FinishReason::Aborted, .. }))
            .count();
        assert_eq!((events.len(), ended), (alive, alive));
        all_returned(&mut scheduler);
    }
}

#[test]
fn b39_aborting_a_group_whose_plan_is_dropped_returns_everything() {
    for steps in 0..=5 {
        let (mut scheduler, group) = group(steps);
        let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
        assert!(scheduler.abort(group).unwrap());
        drop(plan);
        assert!(matches!(scheduler.schedule(), Schedule::Idle));
        all_returned(&mut scheduler);
    }
}

#[test]
fn b39_an_unknown_request_is_no_error_to_abort() {
    let (mut scheduler, group) = group(0);
    let foreign = RequestError::Foreign { request: 99, owner: 0, scheduler: scheduler.cache().instance() };
    assert_eq!(scheduler.abort(RequestId::from_raw(99)), Err(foreign));
    assert!(!scheduler.abort_sequence(group.sample(3)).unwrap());
    assert_eq!(scheduler.abort_sequence(RequestId::from_raw(99).sample(0)), Err(foreign));
    assert_eq!(run(&mut scheduler).len(), 3);
}

#[test]
fn b39_an_unusable_result_ends_its_sequence_and_no_other() {
    let (mut scheduler, group) = group(2);
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    assert_eq!(plan.logit_rows().len(), 3);
    let results = [RowResult::Token(1), RowResult::Invalid, RowResult::Token(3)];
    let events = scheduler.commit(plan, &results).unwrap();
    let invalid =
        StepEvent::Finished { sequence: group.sample(1), reason: FinishReason::Invalid, preemptions: 0 };
    assert!(events.contains(&invalid));
    assert_eq!(scheduler.tokens(group.sample(1)), None);
    let finished = run(&mut scheduler);
    assert_eq!(finished.len(), 2);
    assert_eq!(scheduler.stats().cache.free_blocks, 8);
}

#[test]
fn b45_a_turn_without_new_tokens_computes_one_token_again() {
    for (block_size, len) in [(4, 1), (4, 4), (4, 5), (4, 8), (64, 7680), (64, 7681)] {
        let config = SchedulerConfig { step_work_budget: 1 << 30, ..with_step_tokens(8192) };
        let mut scheduler = Scheduler::new(config, cache(1000, block_size)).unwrap();
        let chat = scheduler.add(Request::new(vec![1; len]).max_new_tokens(0).keep(true)).unwrap();
        run(&mut scheduler);
        assert_eq!(scheduler.computed_tokens(chat), Some(len as u32));
        // A branch shares all of it and must not notice.
        let branch = scheduler.fork(chat, len, Request::new(vec![7]).max_new_tokens(9)).unwrap();
        scheduler.extend(chat, Request::new(Vec::new()).max_new_tokens(1)).unwrap();
        let shared = scheduler.stats().cache.shared_blocks;
        let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
        assert_eq!(plan.num_rows(), 2, "one row for the branch's token, one for the last token of {len}");
        assert_eq!(plan.positions(), [len as u32, len as u32 - 1]);
        assert!(shared >= (len as u32 - 1) / block_size);
        let copied = u32::from(!(len as u32).is_multiple_of(block_size) || block_size > 1);
        assert!(plan.block_copies().len() as u32 <= copied);
        scheduler.commit(plan, &[RowResult::Token(1); 2]).unwrap();
        scheduler.abort(branch).unwrap();
        scheduler.assert_consistent();
    }
}

#[test]
fn b49_a_request_that_can_never_fit_is_refused_and_holds_up_nobody() {
    for config in [plain(), overcommitted(0)] {
        let pool = cache(50, 16).with_max_sequence_tokens(2000).unwrap();
        let mut scheduler = Scheduler::new(config, pool).unwrap();
        let error = scheduler.add(Request::new(vec![1; 1002]).max_new_tokens(0)).unwrap_err();
        assert_eq!(error, RequestError::NeverFits { needed_blocks: 63, num_blocks: 50 });
        let served = scheduler.add(Request::new(vec![1; 5]).max_new_tokens(1)).unwrap();
        assert!(run(&mut scheduler).contains_key(&served.sample(0)));

        let mut scheduler = Scheduler::new(config, cache(50, 16)).unwrap();
        let error = scheduler.add(Request::new(vec![1; 1002])).unwrap_err();
        assert_eq!(error, RequestError::ExceedsContext { needed: 1002, max_tokens: 800 });
    }
}

#[test]
fn b49_a_request_of_the_whole_pool_runs_and_one_token_more_is_refused() {
    for config in [plain(), overcommitted(0), overcommitted(1), overcommitted(49)] {
        let mut scheduler = Scheduler::new(config, cache(50, 16)).unwrap();
        let all = scheduler.add(Request::new(vec![1; 800]).max_new_tokens(0)).unwrap();
        assert_eq!(run(&mut scheduler)[&all.sample(0)], (Vec::new(), FinishReason::MaxTokens));
        let error = scheduler.add(Request::new(vec![1; 800]).max_new_tokens(1)).unwrap_err();
        assert_eq!(error, RequestError::ExceedsContext { needed: 801, max_tokens: 800 });
        // Without a maximum the sequence ends with the context, at once here.
        let all = scheduler.add(Request::new(vec![1; 800])).unwrap();
        assert_eq!(run(&mut scheduler)[&all.sample(0)], (Vec::new(), FinishReason::ContextFull));
    }
}

#[test]
fn b49_a_watermark_of_the_whole_pool_is_refused() {
    for watermark_blocks in [50, 51, u32::MAX] {
        let error = Scheduler::new(overcommitted(watermark_blocks), cache(50, 16)).unwrap_err();
        assert_eq!(error, Error::Config(ConfigError::Watermark { watermark_blocks, num_blocks: 50 }));
    }
}

#[test]
fn b51_requests_that_outgrow_the_pool_finish_with_few_preemptions() {
    let mut scheduler = Scheduler::new(overcommitted(0), cache(6, 4)).unwrap();
    let requests = [1, 2].map(|token| scheduler.add(Request::new(vec![token; 8]).max_new_tokens(8)).unwrap());
    let finished = run(&mut scheduler);
    for request in requests {
        let expected: Vec<u32> = (1008..1016).collect();
        assert_eq!(finished[&request.sample(0)], (expected, FinishReason::MaxTokens));
    }
    let preemptions = scheduler.stats().preemptions;
    assert!((1..=4).contains(&preemptions), "{preemptions} preemptions");
    assert_eq!(scheduler.stats().cache.free_blocks, 6);
}

#[test]
fn b51_a_resumed_sequence_reads_its_prompt_and_its_answer_again() {
    let mut scheduler = Scheduler::new(overcommitted(0), cache(4, 4)).unwrap();
    let first = scheduler.add(Request::new(vec![1; 6]).max_new_tokens(6)).unwrap();
    let second = scheduler.add(Request::new(vec![2; 5]).max_new_tokens(6)).unwrap();
    for _ in 0..3 {
        step(&mut scheduler);
    }
    assert_eq!(scheduler.tokens(second).map(<[u32]>::len), Some(5 + 3));
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    assert_eq!((plan.num_rows(), scheduler.stats().preemptions), (1, 1), "only the first one goes on");
    assert_eq!(scheduler.computed_tokens(second), Some(0));
    scheduler.commit(plan, &[RowResult::Token(1009)]).unwrap();
    let rows = std::iter::repeat_with(|| step(&mut scheduler)).take(10).find(|&rows| rows != 1);
    assert_eq!(rows, Some(8), "prompt and answer are read again in one step");
    assert_eq!(scheduler.tokens(first), None);
    assert_eq!(scheduler.stats().recomputed_tokens, 7);
    let finished = run(&mut scheduler);
    // Three tokens and the one after the pause were told before.
    assert_eq!(finished[&second.sample(0)], (vec![1009, 1010], FinishReason::MaxTokens));
}

#[test]
fn b51_preempting_for_one_block_takes_one_victim() {
    let mut scheduler = Scheduler::new(overcommitted(0), cache(8, 4)).unwrap();
    for token in 0..4 {
        scheduler.add(Request::new(vec![token; 6]).max_new_tokens(8)).unwrap();
    }
    while scheduler.stats().preemptions == 0 {
        step(&mut scheduler);
    }
    // All four want a third block in the same step. The last one's two serve the first two; the third waits in place.
    let stats = scheduler.stats();
    assert_eq!((stats.preemptions, stats.running, stats.waiting), (1, 3, 1));
    assert_eq!(stats.cache.free_blocks, 0);
}

#[test]
fn b67_a_full_context_ends_with_the_numbers_and_a_shortened_history_finds_its_beginning() {
    let config = SchedulerConfig { prefix_cache: Some(PrefixCacheConfig::default()), ..overcommitted(0) };
    let mut scheduler = Scheduler::new(config, cache(64, 16).with_max_sequence_tokens(256).unwrap()).unwrap();
    let prompt: Vec<u32> = (0..132).collect();
    let chat = scheduler.add(Request::new(prompt.clone()).keep(true)).unwrap();
    let (answer, reason) = run(&mut scheduler).remove(&chat.sample(0)).unwrap();
    assert_eq!((answer.len(), reason), (256 - 132, FinishReason::ContextFull));
    let refused = scheduler.extend(chat, Request::new([7]));
    assert_eq!(refused, Err(RequestError::ExceedsContext { needed: 257, max_tokens: 256 }));
    // Without 112 tokens of the middle: nothing of what follows is taken for what it was, at other positions.
    let history = [prompt, answer].concat();
    let shortened = [&history[..32], &history[32 + 112..]].concat();
    assert_eq!(shortened.len(), 144);
    let next = scheduler.add(Request::new(shortened).max_new_tokens(1)).unwrap();
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    assert_eq!((scheduler.prefix_report(next).unwrap().cached_tokens, plan.num_rows()), (32, 112));
}

/// Preemptions in 600 steps of a pool that is always too small.
fn preemptions_of_unplanned_sequences(seed: u64) -> u64 {
    let mut random = Random::new(seed);
    let policies = [VictimPolicy::LowestPriority, VictimPolicy::LeastLost, VictimPolicy::Requester];
    let config = SchedulerConfig {
        step_tokens: random.below(8..32),
        victims: random.pick(&policies),
        ageing_steps: 20,
        ..overcommitted(0)
    };
    let mut scheduler = Scheduler::new(config, cache(random.below(12..24), 4)).unwrap();
    for _ in 0..600 {
        while scheduler.stats().waiting < 3 {
            let classes = [Priority::Interactive, Priority::Normal, Priority::Idle];
            let prompt = vec![random.below(0..9); random.below(1..24) as usize];
            let request = Request::new(prompt).max_new_tokens(random.below(1..24));
            scheduler.add(request.priority(random.pick(&classes))).unwrap();
        }
        let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
        scheduler.assert_consistent();
        let planned: Vec<_> = scheduler.planned_sequences().collect();
        let results = vec![RowResult::Token(1); plan.logit_rows().len()];
        for event in scheduler.commit(plan, &results).unwrap() {
            if let StepEvent::Preempted { sequence, .. } = event {
                assert!(!planned.contains(sequence), "seed {seed}: {sequence} has rows and no blocks");
            }
        }
    }
    scheduler.stats().preemptions
}

#[test]
fn b71_whoever_has_rows_in_a_step_is_not_preempted_in_it() {
    let preemptions: u64 = (0..60).map(preemptions_of_unplanned_sequences).sum();
    assert!(preemptions >= 1000, "{preemptions} preemptions in all");
}

/// A window is hidden with a step on its way, and the application goes on.
#[test]
fn b79_a_plan_may_stay_outstanding_while_2000_requests_come_go_and_branch() {
    let mut scheduler = Scheduler::new(plain(), cache(64, 4)).unwrap();
    let chat = scheduler.add(Request::new(vec![7; 10]).max_new_tokens(5)).unwrap();
    step(&mut scheduler);
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    let (mut aborted, mut left) = (0, Vec::new());
    for number in 0..2000 {
        let request = Request::new(vec![number; 6]).max_new_tokens(2);
        // One branch lives on; the pool does not promise all of them their blocks at a time.
        let id = match number % 4 {
            0 => scheduler.fork(chat, 8, request).unwrap(),
            _ => scheduler.add(request).unwrap(),
        };
        match number % 100 {
            99 | 0 if number < 1000 => left.push(id),
            _ => aborted += u32::from(scheduler.abort(id).unwrap()),
        }
    }
    scheduler.assert_consistent();
    assert_eq!((aborted, left.len()), (1980, 20));
    let events = scheduler.commit(plan, &[RowResult::Token(1011)]).unwrap();
    assert!(events.contains(&StepEvent::Token { sequence: chat.sample(0), token: 1011 }), "{events:?}");
    let finished = run(&mut scheduler);
    assert_eq!(finished.len(), 21);
    assert_eq!(finished[&chat.sample(0)].0, [1012, 1013, 1014]);
    assert!(left.iter().all(|id| finished[&id.sample(0)].0.len() == 2));
    assert_eq!(scheduler.stats().cache.free_blocks, 64);
}
