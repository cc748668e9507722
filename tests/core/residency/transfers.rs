//! Transfers that are late, out of order, or lost, and sequences that end while their blocks are under way.

use super::swap::{both_finish, displaced_group, two_that_outgrow};
use super::{Served, pool, prompt, swapping};
use paged_kv::{Preemption, PreemptionReason, Priority, Request, RequestId, Schedule, WaitReason};

#[test]
fn a_late_transfer_is_waited_for_and_nothing_is_read_before_it_has_arrived() {
    let (mut served, requests, _) = two_that_outgrow(swapping(), 8);
    served.late = true;
    // The first one goes on alone; the second one waits for its blocks, and for nothing else.
    let mut alone = 0;
    loop {
        match served.schedule() {
            Schedule::Step(plan) => {
                assert_eq!(plan.num_sequences(), 1);
                served.commit(plan);
                alone += 1;
            }
            Schedule::Waiting(reason) => {
                assert_eq!(reason, WaitReason::Transfers { steps: 1 });
                break;
            }
            Schedule::Idle => panic!("a sequence waits"),
        }
    }
    assert_eq!(alone, 2, "until its end");
    assert_eq!(served.ends.len(), 1);
    served.late = false;
    both_finish(&mut served, requests);
    assert_eq!(served.scheduler.stats().recomputed_tokens, 0);
}

/// Three requests, of which two are swapped out in different steps and neither is reported.
fn two_under_way() -> (Served, Vec<paged_kv::RequestId>) {
    let mut served = Served::new(swapping(), pool(9, 16));
    served.late = true;
    let requests: Vec<_> =
        (1..4).map(|seed| served.add(&prompt(seed, 8), |request| request.max_new_tokens(16))).collect();
    while served.device.num_transfers() < 2 {
        served.step();
    }
    assert_eq!(served.scheduler.stats().waiting, 2);
    (served, requests)
}

#[test]
fn transfers_complete_in_any_order() {
    for order in [[0, 0], [1, 0]] {
        let (mut served, requests) = two_under_way();
        for place in order {
            served.report(place);
        }
        served.late = false;
        served.finish();
        for (request, seed) in requests.into_iter().zip(1..) {
            assert_eq!(served.answers(request, &prompt(seed, 8)), 16);
        }
        assert_eq!(served.scheduler.stats().recomputed_tokens, 0, "{order:?}");
    }
}

#[test]
fn what_did_not_arrive_is_computed_again_and_nothing_else() {
    for lost in [0, 1] {
        let (mut served, requests) = two_under_way();
        served.lose(lost);
        served.late = false;
        served.finish();
        for (request, seed) in requests.into_iter().zip(1..) {
            assert_eq!(served.answers(request, &prompt(seed, 8)), 16);
        }
        let stats = served.scheduler.stats();
        assert!(
            (12..=20).contains(&stats.recomputed_tokens),
            "{} tokens of one victim",
            stats.recomputed_tokens
        );
        assert_eq!(stats.cache.host_free_blocks, 16);
    }
}

#[test]
fn a_sequence_whose_blocks_did_not_come_back_starts_again() {
    let (mut served, requests, _) = two_that_outgrow(swapping(), 8);
    served.late = true;
    served.report(0);
    served.steps_until(|_, step| !step.ins.is_empty());
    assert_eq!(served.device.num_transfers(), 1);
    // The step that brought it back is lost on the device: what its rows saw means nothing, so its results are
    // the application's to discard. Here the loss is told after the commit.
    served.lose(0);
    let plan = served.plan();
    assert_eq!(served.scheduler.stats().waiting + served.scheduler.stats().running, 1);
    assert_eq!(plan.positions()[0], 0, "from its first token on");
    served.commit(plan);
    served.late = false;
    both_finish(&mut served, requests);
}

#[test]
fn blocks_that_are_told_to_be_lost_before_their_step_is_committed_are_computed_again() {
    let mut served = Served::new(swapping(), pool(9, 16));
    served.late = true;
    let requests: Vec<_> =
        (1..4).map(|seed| served.add(&prompt(seed, 8), |request| request.max_new_tokens(16))).collect();
    let plan = loop {
        let plan = served.plan();
        if !plan.swap_outs().is_empty() {
            break plan;
        }
        served.commit(plan);
    };
    let report = paged_kv::TransferReport { step: plan.step(), complete: false };
    served.scheduler.complete_transfers(&[report]);
    served.commit(plan);
    served.device.complete(0);
    served.late = false;
    served.finish();
    for (request, seed) in requests.into_iter().zip(1..) {
        assert_eq!(served.answers(request, &prompt(seed, 8)), 16);
    }
    assert!(served.scheduler.stats().recomputed_tokens > 0);
}

#[test]
fn reports_of_unknown_dropped_and_ended_steps_change_nothing() {
    let (mut served, requests, _) = two_that_outgrow(swapping(), 8);
    let report = served.device.complete(0).unwrap();
    for _ in 0..3 {
        served.scheduler.complete_transfers(&[report, report]);
        served.check();
    }
    // Late bad news about a step that has ended is no news.
    served.scheduler.complete_transfers(&[paged_kv::TransferReport { complete: false, ..report }]);
    both_finish(&mut served, requests);
    assert_eq!(served.scheduler.stats().recomputed_tokens, 0);
}

#[test]
fn b39_a_group_aborted_while_it_is_swapped_out_leaves_nothing_in_either_pool() {
    // In the step that moves it out; when that is committed; when its blocks have arrived; on its way back; when back.
    for moment in 0..5 {
        let (mut served, mut group, mut chat, _) = displaced_group();
        served.late = true;
        let mut plan = None;
        match moment {
            0 => {
                (served, [group, chat], plan) = displacing_plan();
                plan = Some(plan.unwrap());
            }
            1 => {}
            2 => served.report(0),
            _ => {
                served.report(0);
                let back = served.plan();
                assert_eq!(back.swap_ins().len(), 4);
                if moment == 3 {
                    plan = Some(back);
                } else {
                    served.commit(back);
                }
            }
        }
        assert!(served.scheduler.abort(group).unwrap());
        assert!(!served.scheduler.abort(group).unwrap(), "a second abort ends nothing");
        served.check();
        if let Some(plan) = plan {
            served.commit(plan);
        }
        served.scheduler.abort(chat).unwrap();
        while served.device.num_transfers() > 0 {
            served.report(0);
        }
        let stats = served.scheduler.stats();
        assert_eq!((stats.running, stats.waiting, stats.kept), (0, 0, 0), "moment {moment}");
        assert_eq!((stats.cache.free_blocks, stats.cache.host_free_blocks), (8, 8), "moment {moment}");
        let next = served.add(&prompt(9, 8), |request| request.max_new_tokens(24));
        assert_eq!(served.step().admitted()[0].0, next.sample(0), "the next request is let in at once");
    }
}

/// The step that displaces the group, not committed yet.
fn displacing_plan() -> (Served, [RequestId; 2], Option<paged_kv::StepPlan>) {
    let mut served = Served::new(swapping(), pool(8, 8));
    let idle = |request: Request| request.max_new_tokens(6).samples(3).priority(Priority::Idle);
    let group = served.add(&prompt(1, 6), idle);
    (0..2).for_each(|_| drop(served.step()));
    let interactive = |request: Request| request.max_new_tokens(1).priority(Priority::Interactive);
    let chat = served.add(&prompt(2, 28), interactive);
    let plan = served.plan();
    (served, [group, chat], Some(plan))
}

#[test]
fn b51_with_all_transfers_outstanding_one_block_takes_one_victim() {
    // Four running, each with two blocks of eight; all want a third. What is under way frees the pool at once, so the
    // second victim is not taken for want of the first one's transfer.
    let mut served = Served::new(swapping(), pool(8, 3));
    served.late = true;
    for seed in 0..4 {
        served.add(&prompt(seed, 6), |request| request.max_new_tokens(8));
    }
    let step = served.steps_until(|_, step| !step.preempted().is_empty());
    assert_eq!(step.preempted().len(), 1);
    assert_eq!(step.preempted()[0].1, Preemption::Swapped { blocks: 2 });
    let stats = served.scheduler.stats();
    assert_eq!((stats.running, stats.cache.host_in_transfer_blocks, stats.cache.host_free_blocks), (3, 2, 1));
    // The next victim finds the host pool on its way, and is computed again rather than waited for.
    let step = served.steps_until(|_, step| !step.preempted().is_empty());
    assert_eq!(step.preempted().len(), 1);
    let (_, how, why) = step.preempted()[0];
    assert!(matches!(how, Preemption::Dropped { .. }), "{how:?}");
    assert!(matches!(why, PreemptionReason::HostPoolFull { available: 1, .. }), "{why:?}");
    served.late = false;
    served.finish();
    assert_eq!(served.ends.len(), 4);
    assert_eq!(served.scheduler.stats().cache.host_free_blocks, 3);
}
