//! Drafts: rows for tokens that are not decided yet, for which nothing is reserved.

use crate::scenarios::{cache, overcommitted, plain};
use paged_kv::{
    CommitError, FinishReason, Request, RequestError, RequestId, RowResult, Schedule, Scheduler,
    SchedulerConfig, StepEvent, StepPlan,
};

/// A sequence of 5 prompt tokens and the token 1, about to decode with drafts.
fn decoding(request: Request) -> (Scheduler, RequestId) {
    let config = SchedulerConfig { max_drafts: 4, ..plain() };
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
fn b73_accepted_drafts_end_at_the_maximum_or_the_stop_token_and_the_next_turn_goes_on_there() {
    struct Case {
        max_new_tokens: u32,
        drafts: [u32; 4],
        rows: u32,
        told: &'static [u32],
        /// Where the rows of the next turn's only token, and of what was not computed before it, are.
        positions: &'static [u32],
    }
    let cases = [
        // Two tokens are left: one draft and what follows it.
        Case { max_new_tokens: 3, drafts: [2, 4, 5, 6], rows: 2, told: &[2, 77], positions: &[7, 8] },
        // The stop token is 3: the second one, and the last one.
        Case { max_new_tokens: 20, drafts: [2, 3, 4, 5], rows: 5, told: &[2, 3], positions: &[8] },
        Case { max_new_tokens: 20, drafts: [2, 4, 5, 3], rows: 5, told: &[2, 4, 5, 3], positions: &[10] },
    ];
    for Case { max_new_tokens, drafts, rows, told, positions } in cases {
        let request = Request::new(vec![9; 5]).max_new_tokens(max_new_tokens).stop_tokens(&[3]).keep(true);
        let (mut scheduler, id) = decoding(request);
        scheduler.propose(id, &drafts).unwrap();
        let plan = planned(&mut scheduler);
        assert_eq!(plan.num_rows(), rows);
        let result = RowResult::Accepted { rows: rows - 1, next: 77 };
        let events = scheduler.commit(plan, &[result]).unwrap();
        assert_eq!(tokens(events), told);
        assert!(matches!(events.last(), Some(StepEvent::Finished { .. })), "{events:?}");
        assert_eq!(scheduler.stats().generated_tokens, 1 + told.len() as u64);
        assert_eq!(scheduler.tokens(id).unwrap()[6..], *told);
        scheduler.extend(id, Request::new([8]).max_new_tokens(1)).unwrap();
        assert_eq!(planned(&mut scheduler).positions(), positions);
    }
}

#[test]
fn the_last_token_needs_no_draft() {
    let (mut scheduler, id) = decoding(Request::new(vec![9; 5]).max_new_tokens(2));
    scheduler.propose(id, &[2]).unwrap();
    assert_eq!(planned(&mut scheduler).token_ids(), [1]);
}

#[test]
fn more_drafts_than_configured_are_refused() {
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

/// Steps until all are done, and the rows of each.
fn rows_of_steps(scheduler: &mut Scheduler) -> Vec<u32> {
    let mut rows = Vec::new();
    while let Schedule::Step(plan) = scheduler.schedule() {
        rows.push(plan.num_rows());
        let results = vec![RowResult::Token(1); plan.logit_rows().len()];
        scheduler.commit(plan, &results).unwrap();
    }
    rows
}

#[test]
fn allowing_drafts_takes_no_block_while_none_is_proposed() {
    let steps = |max_drafts| {
        let config = SchedulerConfig { max_drafts, ..overcommitted(0) };
        let mut scheduler = Scheduler::new(config, cache(4, 4)).unwrap();
        for first in 1..3 {
            scheduler.add(Request::new(vec![first; 4]).max_new_tokens(5)).unwrap();
        }
        rows_of_steps(&mut scheduler)
    };
    // Four blocks hold both prompts and the first tokens of both answers.
    assert_eq!(steps(4), steps(0));
    assert_eq!(steps(4), [8, 2, 2, 2, 2]);
}

#[test]
fn allowing_drafts_keeps_no_request_outside() {
    let entered = |max_drafts| {
        let config = SchedulerConfig { max_drafts, ..overcommitted(0) };
        let mut scheduler = Scheduler::new(config, cache(6, 4)).unwrap();
        for first in 1..4 {
            scheduler.add(Request::new(vec![first; 4]).max_new_tokens(4)).unwrap();
        }
        let plan = planned(&mut scheduler);
        let sequences = plan.num_sequences();
        scheduler.commit(plan, &vec![RowResult::Token(1); sequences as usize]).unwrap();
        sequences
    };
    assert_eq!((entered(0), entered(4)), (3, 3));
}
