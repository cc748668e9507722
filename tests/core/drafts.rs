//! Drafts: rows for tokens that are not decided yet, and what is reserved for them.

use crate::scenarios::{cache, plain, run};
use paged_kv::{
    CommitError, FinishReason, Request, RequestError, RequestId, RowResult, Schedule, Scheduler,
    SchedulerConfig, StepEvent, StepPlan,
};

/// A sequence of 5 prompt tokens and the token 1, about to decode with drafts.
fn decoding(request: Request) -> (Scheduler, RequestId) {
    let config = SchedulerConfig { lookahead: 4, ..plain() };
    let mut scheduler = Scheduler::new(config, cache(16, 4)).unwrap();
    let id = scheduler.add(request).unwrap();
    let plan = planned(&mut scheduler);
    scheduler.commit(plan, &[RowResult::Token(1)]).unwrap();
    scheduler.assert_consistent();
    (scheduler, id)
}

fn prompt() -> Request {
    Request::new(vec![9; 5]).max_new_tokens(20)
}

fn planned(scheduler: &mut Scheduler) -> StepPlan {
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    scheduler.assert_consistent();
    plan
}

fn tokens(events: &[StepEvent]) -> Vec<u32> {
    let tokens = events.iter().filter_map(|event| match event {
        StepEvent::Token { token, .. } => Some(*token),
        _ => None,
    });
    tokens.collect()
}

#[test]
fn every_draft_has_a_row_and_the_answer_covers_them_all() {
    for accepted in 0..=4 {
        let (mut scheduler, id) = decoding(prompt());
        scheduler.propose(id, &[2, 3, 4, 5]).unwrap();
        let plan = planned(&mut scheduler);
        assert_eq!(plan.token_ids(), [1, 2, 3, 4, 5]);
        assert_eq!(plan.positions(), [5, 6, 7, 8, 9]);
        let [row] = plan.logit_rows() else { panic!("one answer") };
        assert_eq!((row.row, row.num_rows, row.next_position), (0, 5, 6));
        assert_eq!(scheduler.stats().cache.held_blocks, 3);
        let result = RowResult::Accepted { rows: accepted, next: 77 };
        let events = scheduler.commit(plan, &[result]).unwrap();
        let mut expected: Vec<u32> = (2..2 + accepted).collect();
        expected.push(77);
        assert_eq!(tokens(events), expected);
        scheduler.assert_consistent();
        let computed = 6 + accepted;
        assert_eq!(scheduler.computed_tokens(id), Some(computed));
        assert_eq!(scheduler.stats().cache.held_blocks, computed.div_ceil(4), "refused rows return");
        let plan = planned(&mut scheduler);
        assert_eq!(plan.token_ids(), [77], "used or not, drafts serve one step");
        assert_eq!(plan.positions(), [computed]);
    }
}

#[test]
fn a_plain_token_accepts_no_draft() {
    let (mut scheduler, id) = decoding(prompt());
    scheduler.propose(id, &[2, 3]).unwrap();
    let plan = planned(&mut scheduler);
    assert_eq!(tokens(scheduler.commit(plan, &[RowResult::Token(6)]).unwrap()), [6]);
    assert_eq!(scheduler.tokens(id), Some(&[9, 9, 9, 9, 9, 1, 6][..]));
}

#[test]
fn a_stop_token_among_accepted_drafts_ends_the_sequence_there() {
    let (mut scheduler, id) = decoding(prompt().stop_tokens(&[3]).keep(true));
    scheduler.propose(id, &[2, 3, 4]).unwrap();
    let plan = planned(&mut scheduler);
    let events = scheduler.commit(plan, &[RowResult::Accepted { rows: 3, next: 5 }]).unwrap();
    assert_eq!(tokens(events), [2, 3]);
    let end = StepEvent::Finished { sequence: id.sample(0), reason: FinishReason::Stop, preemptions: 0 };
    assert_eq!(events.last(), Some(&end));
    scheduler.assert_consistent();
    // The stop token's row is in the cache; what came after it is not.
    assert_eq!((scheduler.tokens(id).unwrap().len(), scheduler.computed_tokens(id)), (8, Some(8)));
    assert_eq!(scheduler.stats().cache.held_blocks, 2);
}

#[test]
fn drafts_and_the_token_after_them_stay_within_the_maximum() {
    let (mut scheduler, id) = decoding(Request::new(vec![9; 5]).max_new_tokens(4));
    scheduler.propose(id, &[2, 3, 4, 5]).unwrap();
    let plan = planned(&mut scheduler);
    assert_eq!(plan.token_ids(), [1, 2, 3]);
    let events = scheduler.commit(plan, &[RowResult::Accepted { rows: 2, next: 4 }]).unwrap();
    assert_eq!(tokens(events), [2, 3, 4]);
    let end = StepEvent::Finished { sequence: id.sample(0), reason: FinishReason::MaxTokens, preemptions: 0 };
    assert_eq!(events.last(), Some(&end));
    assert_eq!(scheduler.stats().cache.free_blocks, 16);
}

#[test]
fn the_last_token_needs_no_draft() {
    let (mut scheduler, id) = decoding(Request::new(vec![9; 5]).max_new_tokens(2));
    scheduler.propose(id, &[2]).unwrap();
    assert_eq!(planned(&mut scheduler).token_ids(), [1]);
}

#[test]
fn drafts_beyond_the_lookahead_are_refused() {
    let (mut scheduler, id) = decoding(prompt());
    let error = scheduler.propose(id, &[1; 5]).unwrap_err();
    assert_eq!(error, RequestError::TooManyDrafts { drafts: 5, max: 4 });
    assert!(scheduler.propose(RequestId::from_raw(99), &[1]).is_err());
}

#[test]
fn accepting_more_than_was_planned_is_an_error_and_loses_nothing() {
    let (mut scheduler, id) = decoding(prompt());
    scheduler.propose(id, &[2, 3]).unwrap();
    let plan = planned(&mut scheduler);
    let error = scheduler.commit(plan, &[RowResult::Accepted { rows: 3, next: 4 }]).unwrap_err();
    assert_eq!(error, CommitError::TooManyAccepted { sequence: id.sample(0), accepted: 3, drafts: 2 });
    let plan = planned(&mut scheduler);
    assert_eq!(plan.token_ids(), [1, 2, 3], "the step is planned again, drafts and all");
    scheduler.commit(plan, &[RowResult::Accepted { rows: 2, next: 4 }]).unwrap();
}

#[test]
fn drafts_proposed_while_a_step_is_outstanding_do_not_change_it() {
    for later in [&[][..], &[7, 8, 7, 8]] {
        let (mut scheduler, id) = decoding(prompt());
        scheduler.propose(id, &[2, 3]).unwrap();
        let plan = planned(&mut scheduler);
        scheduler.propose(id, later).unwrap();
        let events = scheduler.commit(plan, &[RowResult::Accepted { rows: 2, next: 4 }]).unwrap();
        assert_eq!(tokens(events), [2, 3, 4]);
        assert_eq!(planned(&mut scheduler).token_ids(), [4]);
    }
}

#[test]
fn drafts_of_a_kept_sequence_do_not_outlive_its_extension() {
    let (mut scheduler, id) = decoding(Request::new(vec![9; 5]).max_new_tokens(1).keep(true));
    scheduler.propose(id, &[2, 3]).unwrap();
    scheduler.extend(id, Request::new([]).max_new_tokens(8)).unwrap();
    assert_eq!(planned(&mut scheduler).token_ids(), [1]);
}

#[test]
fn lookahead_is_reserved_in_the_step_and_returned_at_commit() {
    let config = SchedulerConfig { lookahead: 4, ..plain() };
    let mut scheduler = Scheduler::new(config, cache(4, 4)).unwrap();
    scheduler.add(Request::new(vec![1; 4]).max_new_tokens(5)).unwrap();
    for (rows, planned_blocks, after) in [(4, 2, 1), (1, 3, 2), (1, 3, 2)] {
        let plan = planned(&mut scheduler);
        assert_eq!(plan.num_rows(), rows);
        let cache = scheduler.stats().cache;
        assert_eq!(cache.held_blocks, planned_blocks);
        assert_eq!(cache.lookahead_tokens > 0, planned_blocks > after);
        scheduler.commit(plan, &[RowResult::Token(1)]).unwrap();
        let cache = scheduler.stats().cache;
        assert_eq!((cache.held_blocks, cache.lookahead_tokens), (after, 0));
    }
    // Never beyond the declared maximum of 9 tokens, 3 blocks.
    assert_eq!(scheduler.stats().cache.held_blocks_peak, 3);
    assert_eq!(run(&mut scheduler).len(), 1);
}

#[test]
fn a_full_pool_costs_the_lookahead_before_it_costs_anybody_a_block() {
    let config = SchedulerConfig { lookahead: 4, ..plain() };
    let mut scheduler = Scheduler::new(config, cache(3, 4)).unwrap();
    let first = scheduler.add(Request::new(vec![1; 4]).max_new_tokens(4)).unwrap();
    let second = scheduler.add(Request::new(vec![2; 3]).max_new_tokens(1)).unwrap();
    let finished = run(&mut scheduler);
    assert!(finished.contains_key(&first.sample(0)) && finished.contains_key(&second.sample(0)));
}
