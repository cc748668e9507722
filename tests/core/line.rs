//! The line: when a request is let in, beside which others, and what waiting costs.

use paged_kv::{
    CacheConfig, FinishReason, KvType, ModelShape, Request, RowResult, Schedule, Scheduler, SchedulerConfig,
    StepEvent,
};
use std::collections::BTreeMap;

/// A pool of 511 blocks of 16 tokens: 1 GiB of Llama 3.1 8B.
fn one_gib() -> CacheConfig {
    let shape = ModelShape { num_layers: 32, num_query_heads: 32, num_kv_heads: 8, head_dim: 128 };
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
