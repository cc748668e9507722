//! Victims whose blocks are moved to the host pool: what moves, what stays shared, and what is computed again.

use super::{Served, Step, overcommitted, pool, prompt, swapping};
use paged_kv::{
    Admission, Preemption, PreemptionMode, PreemptionReason, Priority, Request, RequestId, Schedule,
    SchedulerConfig,
};

/// Two requests that outgrow a pool of six blocks, up to the step that preempts the second one.
pub(super) fn two_that_outgrow(config: SchedulerConfig, host_blocks: u32) -> (Served, [RequestId; 2], Step) {
    let mut served = Served::new(config, pool(6, host_blocks));
    let requests = [1, 2].map(|seed| served.add(&prompt(seed, 8), |request| request.max_new_tokens(8)));
    let step = served.steps_until(|_, step| !step.preempted().is_empty());
    (served, requests, step)
}

pub(super) fn both_finish(served: &mut Served, requests: [RequestId; 2]) {
    served.finish();
    for (request, seed) in requests.into_iter().zip(1..) {
        assert_eq!(served.answers(request, &prompt(seed, 8)), 8);
    }
    let stats = served.scheduler.stats().cache;
    assert_eq!(stats.free_blocks + stats.cached_blocks, stats.num_blocks);
    served.schedule();
    assert_eq!(served.scheduler.stats().cache.host_free_blocks, stats.host_blocks);
}

#[test]
fn b51_a_swapped_sequence_goes_on_where_it_was_and_nothing_is_computed_again() {
    let (mut served, requests, step) = two_that_outgrow(swapping(), 8);
    let expected = (requests[1].sample(0), Preemption::Swapped { blocks: 3 }, PreemptionReason::Configured);
    assert_eq!(step.preempted(), [expected]);
    assert_eq!((step.outs.len(), step.ins.len()), (3, 0));
    assert_eq!(served.scheduler.computed_tokens(requests[1]), Some(12), "8 tokens and 4 generated ones");
    let back = served.steps_until(|_, step| !step.ins.is_empty());
    assert_eq!((back.ins.len(), back.rows), (3, 1));
    assert_eq!(back.admitted()[0].0, requests[1].sample(0));
    both_finish(&mut served, requests);
    let stats = served.scheduler.stats();
    assert_eq!((stats.recomputed_tokens, stats.swaps_out, stats.swaps_in), (0, 1, 1));
    assert_eq!((stats.cache.blocks_swapped_out, stats.cache.blocks_swapped_in), (3, 3));
}

#[test]
fn what_leaves_is_reused_by_the_same_step() {
    let (served, _, step) = two_that_outgrow(swapping(), 8);
    // The pool was full: the first one's new block is one that the second one gave up.
    let stats = served.scheduler.stats().cache;
    assert_eq!((step.rows, stats.free_blocks, stats.held_blocks, stats.in_transfer_blocks), (1, 2, 4, 0));
    assert_eq!((stats.host_free_blocks, stats.host_in_transfer_blocks), (5, 3));
}

#[test]
fn a_full_host_pool_means_computing_again_and_says_so_in_numbers() {
    for host_blocks in 0..4 {
        let (mut served, requests, step) = two_that_outgrow(swapping(), host_blocks);
        let expected = match host_blocks {
            3 => (Preemption::Swapped { blocks: 3 }, PreemptionReason::Configured),
            available => {
                let why = PreemptionReason::HostPoolFull { needed: 3, available };
                (Preemption::Dropped { tokens: 12 }, why)
            }
        };
        assert_eq!(step.preempted(), [(requests[1].sample(0), expected.0, expected.1)]);
        both_finish(&mut served, requests);
        assert_eq!(served.scheduler.stats().recomputed_tokens, if host_blocks == 3 { 0 } else { 12 });
    }
}

#[test]
fn a_dropped_plan_takes_what_it_moved_with_it() {
    for ran in [false, true] {
        let mut served = Served::new(swapping(), pool(6, 8));
        let requests = [1, 2].map(|seed| served.add(&prompt(seed, 8), |request| request.max_new_tokens(8)));
        let plan = loop {
            let plan = served.plan();
            if !plan.swap_outs().is_empty() {
                break plan;
            }
            served.commit(plan);
        };
        if ran {
            served.device.run(&plan);
        }
        drop(plan);
        // The report of a dropped step is late, and means nothing.
        served.step();
        assert_eq!(served.scheduler.computed_tokens(requests[1]), Some(0));
        both_finish(&mut served, requests);
        let stats = served.scheduler.stats();
        assert_eq!((stats.preemptions, stats.swaps_in, stats.recomputed_tokens), (1, 0, 12));
    }
}

#[test]
fn a_dropped_plan_leaves_what_it_was_to_bring_back_in_the_host_pool() {
    for ran in [false, true] {
        let (mut served, requests, _) = two_that_outgrow(swapping(), 8);
        for round in 0..3 {
            let plan = loop {
                let plan = served.plan();
                if !plan.swap_ins().is_empty() {
                    break plan;
                }
                served.commit(plan);
            };
            if round == 2 {
                served.commit(plan);
                break;
            }
            if ran {
                served.device.run(&plan);
            }
            drop(plan);
        }
        both_finish(&mut served, requests);
        let stats = served.scheduler.stats();
        assert_eq!((stats.recomputed_tokens, stats.cache.blocks_swapped_in), (0, 3));
    }
}

/// A group of three idle samples, displaced from a pool of eight blocks by an interactive request of seven.
pub(super) fn displaced_group() -> (Served, RequestId, RequestId, Step) {
    let mut served = Served::new(swapping(), pool(8, 8));
    let group =
        served.add(&prompt(1, 6), |request| request.max_new_tokens(6).samples(3).priority(Priority::Idle));
    (0..2).for_each(|_| drop(served.step()));
    let stats = served.scheduler.stats().cache;
    assert_eq!((stats.held_blocks, stats.shared_blocks, stats.free_blocks), (4, 1, 4));
    let chat =
        served.add(&prompt(2, 28), |request| request.max_new_tokens(1).priority(Priority::Interactive));
    let step = served.step();
    assert_eq!(step.admitted()[0].0, chat.sample(0));
    (served, group, chat, step)
}

#[test]
fn shared_blocks_move_once_and_are_shared_when_they_are_back() {
    let (mut served, group, chat, step) = displaced_group();
    assert_eq!(step.preempted().len(), 3);
    assert!(step.preempted().iter().all(|victim| matches!(victim.1, Preemption::Swapped { .. })));
    assert_eq!(step.outs.len(), 4, "one shared block, and one of each sample's own");
    assert_eq!(served.scheduler.stats().cache.host_tokens, 3 * 7);
    assert_eq!(step.tokens(), 1);
    let back = served.step();
    assert_eq!((back.ins.len(), back.rows), (4, 3), "four blocks come back for all three");
    assert_eq!(served.scheduler.stats().cache.shared_blocks, 1);
    served.finish();
    assert_eq!(served.answers(chat, &prompt(2, 28)), 1);
    for sample in 0..3 {
        assert_eq!(served.answers(group.sample(sample), &prompt(1, 6)), 6);
    }
    let stats = served.scheduler.stats();
    assert_eq!((stats.recomputed_tokens, stats.cache.blocks_swapped_out), (0, 4));
}

#[test]
fn an_idle_chat_is_swapped_out_and_its_next_turn_computes_only_its_own_tokens() {
    let guaranteed = SchedulerConfig { admission: Admission::Guaranteed, ..swapping() };
    let with_prefix_cache = SchedulerConfig { preemption: PreemptionMode::Swap, ..overcommitted() };
    for config in [guaranteed, swapping(), with_prefix_cache] {
        let mut served = Served::new(config, pool(6, 8));
        let first = prompt(1, 10);
        let chat = served.add(&first, |request| request.max_new_tokens(3).keep(true));
        served.finish();
        // The rest of the pool is 3 blocks; this one needs 5.
        let other = served.add(&prompt(2, 18), |request| request.max_new_tokens(2));
        let step = served.step();
        assert_eq!((step.outs.len(), step.preempted().len()), (3, 0), "idle content is not preempted");
        served.finish();
        assert_eq!(served.answers(other, &prompt(2, 18)), 2);
        let stats = served.scheduler.stats();
        assert_eq!((stats.reclaimed, stats.preemptions, stats.waiting), (1, 0, 0));
        served.extend(chat, &prompt(3, 5), |request| request.max_new_tokens(2));
        let step = served.step();
        // 12 tokens are in the cache; the answer's last one and the turn's five are not.
        assert_eq!((step.ins.len(), step.rows), (3, 6));
        served.finish();
        let stats = served.scheduler.stats();
        assert_eq!(stats.recomputed_tokens, 0);
        assert_eq!(served.tokens[&chat.sample(0)].len(), 10 + 3 + 5 + 2);
    }
}

#[test]
fn idle_chats_make_room_in_the_host_pool_for_those_that_run() {
    let mut served = Served::new(swapping(), pool(6, 4));
    let chat = served.add(&prompt(7, 8), |request| request.max_new_tokens(1).keep(true));
    served.finish();
    let requests =
        [1, 2].map(|seed| served.add(&prompt(seed, 8), |request: Request| request.max_new_tokens(8)));
    let first = served.steps_until(|_, step| !step.outs.is_empty());
    assert_eq!((first.outs.len(), first.preempted().len()), (2, 0), "the chat first");
    let second = served.steps_until(|_, step| !step.preempted().is_empty());
    assert_eq!(
        second.preempted()[0].1,
        Preemption::Swapped { blocks: 3 },
        "two of four slots were the chat's"
    );
    both_finish(&mut served, requests);
    // The chat's blocks are gone; it is computed again.
    assert_eq!(served.scheduler.computed_tokens(chat), Some(0));
    served.extend(chat, &prompt(8, 2), |request| request.max_new_tokens(1));
    assert_eq!(served.step().rows, 8 + 1 + 2);
    assert!(matches!(served.schedule(), Schedule::Idle));
}
