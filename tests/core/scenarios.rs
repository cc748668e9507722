//! Readable stories: what a scheduler does with a few requests, step by step.

use paged_kv::{
    Admission, CacheConfig, FinishReason, KvType, ModelShape, Request, RowResult, Schedule, Scheduler,
    SchedulerConfig, SequenceId, StepEvent,
};
use std::collections::BTreeMap;

fn cache(num_blocks: u32, block_size: u32) -> CacheConfig {
    let shape = ModelShape { num_layers: 1, num_query_heads: 2, num_kv_heads: 1, head_dim: 8 };
    CacheConfig::for_blocks(num_blocks, &shape, KvType::F32).unwrap().with_block_size(block_size).unwrap()
}

/// Runs to the end; the token after position `p` is `p + 1000`. Returns tokens and the finish reason per sequence.
fn run(scheduler: &mut Scheduler) -> BTreeMap<SequenceId, (Vec<u32>, FinishReason)> {
    let mut tokens: BTreeMap<SequenceId, Vec<u32>> = BTreeMap::new();
    let mut finished = BTreeMap::new();
    for _ in 0..10_000 {
        scheduler.assert_consistent();
        match scheduler.schedule() {
            Schedule::Step(plan) => {
                scheduler.assert_consistent();
                let results: Vec<_> =
                    plan.logit_rows().iter().map(|row| RowResult::Token(row.next_position + 1000)).collect();
                for &event in scheduler.commit(plan, &results).unwrap() {
                    match event {
                        StepEvent::Token { sequence, token } => {
                            tokens.entry(sequence).or_default().push(token)
                        }
                        StepEvent::Finished { sequence, reason, .. } => {
                            finished.insert(sequence, (tokens.remove(&sequence).unwrap_or_default(), reason));
                        }
                        _ => unreachable!("no other events exist"),
                    }
                }
            }
            Schedule::Idle => return finished,
            Schedule::Waiting(reason) => panic!("nothing runs: {reason:?}"),
        }
    }
    panic!("no end after 10,000 steps");
}

#[test]
fn two_requests_that_outgrow_the_pool_both_finish() {
    let config = SchedulerConfig {
        admission: Admission::Overcommitted { watermark_blocks: 0 },
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(config, cache(6, 4)).unwrap();
    let first = scheduler.add(Request::new(vec![1; 8]).max_new_tokens(8)).unwrap();
    let second = scheduler.add(Request::new(vec![2; 8]).max_new_tokens(8)).unwrap();
    let finished = run(&mut scheduler);
    for request in [first, second] {
        let expected: Vec<u32> = (1008..1016).collect();
        assert_eq!(finished[&request.sample(0)], (expected, FinishReason::MaxTokens));
    }
    let preemptions = scheduler.stats().preemptions;
    assert!((1..=4).contains(&preemptions), "{preemptions} preemptions");
    assert_eq!(scheduler.stats().cache.free_blocks, 6);
}

#[test]
fn samples_share_the_full_blocks_of_their_prompt() {
    // floor(L / P) + 4 (ceil((L + N - 1) / P) - floor(L / P)) blocks at the peak.
    for (prompt, new, blocks, copies) in [(10, 9, 2 + 4 * 3, 3), (8, 9, 2 + 4 * 2, 0)] {
        let mut scheduler = Scheduler::new(SchedulerConfig::default(), cache(64, 4)).unwrap();
        scheduler.add(Request::new(vec![1; prompt]).max_new_tokens(new).samples(4)).unwrap();
        assert_eq!(run(&mut scheduler).len(), 4);
        let stats = scheduler.stats().cache;
        assert_eq!((stats.held_blocks_peak, stats.block_copies), (blocks, copies));
    }
}
