//! Readable stories: what a scheduler does with a few requests, step by step.

use paged_kv::{
    Admission, CacheConfig, FinishReason, KvType, ModelShape, Request, RowResult, Schedule, Scheduler,
    SchedulerConfig, SequenceId, StepEvent,
};
use std::collections::BTreeMap;

pub(crate) fn cache(num_blocks: u32, block_size: u32) -> CacheConfig {
    let shape = ModelShape { num_layers: 1, num_query_heads: 2, num_kv_heads: 1, head_dim: 8 };
    CacheConfig::for_blocks(num_blocks, &shape, KvType::F32).unwrap().with_block_size(block_size).unwrap()
}

pub(crate) fn overcommitted(watermark_blocks: u32) -> SchedulerConfig {
    SchedulerConfig { admission: Admission::Overcommitted { watermark_blocks }, ..SchedulerConfig::default() }
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
    (rows, scheduler.commit(plan, &results).unwrap().to_vec())
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
                _ => unreachable!("no other events exist"),
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
        let mut scheduler = Scheduler::new(SchedulerConfig::default(), cache(64, 4)).unwrap();
        scheduler.add(Request::new(vec![1; prompt]).max_new_tokens(new).samples(4)).unwrap();
        assert_eq!(run(&mut scheduler).len(), 4);
        let stats = scheduler.stats().cache;
        assert_eq!((stats.held_blocks_peak, stats.block_copies), (blocks, copies));
    }
}
