//! Guaranteed admission: what is promised, to the block, and that promises are kept.

use crate::scenarios::{cache, plain, run, step};
use paged_kv::{FinishReason, Request, RequestError, RequestId, Schedule, Scheduler, SchedulerConfig};

fn guaranteed(num_blocks: u32) -> Scheduler {
    Scheduler::new(plain(), cache(num_blocks, 4)).unwrap()
}

/// A scheduler with one running sequence that has read a prompt of `len` tokens.
fn with_parent(num_blocks: u32, len: usize, max_new: u32) -> (Scheduler, RequestId) {
    let mut scheduler = guaranteed(num_blocks);
    let parent = scheduler.add(Request::new(vec![1; len]).max_new_tokens(max_new)).unwrap();
    step(&mut scheduler);
    (scheduler, parent)
}

fn everything_finishes(mut scheduler: Scheduler, sequences: usize) {
    assert_eq!(run(&mut scheduler).len(), sequences);
    let stats = scheduler.stats();
    assert_eq!(stats.preemptions, 0);
    assert_eq!(stats.cache.free_blocks, stats.cache.num_blocks);
}

#[test]
fn a_fork_is_promised_up_to_the_last_block() {
    // The parent holds 2 blocks and may need 2 more. A branch shares 2, so 6 of its own fill the pool of 10.
    let (mut scheduler, parent) = with_parent(10, 8, 8);
    let before = (scheduler.stats(), scheduler.tokens(parent).unwrap().to_vec());
    let error = scheduler.fork(parent, 8, Request::new([5]).max_new_tokens(24)).unwrap_err();
    assert_eq!(error, RequestError::PromiseExceeded { needed: 11, available: 10 });
    let mut after = (scheduler.stats(), scheduler.tokens(parent).unwrap().to_vec());
    after.0.cache.shared_blocks_peak = before.0.cache.shared_blocks_peak;
    assert_eq!(after, before, "a refused fork changes nothing");
    scheduler.fork(parent, 8, Request::new([5]).max_new_tokens(23)).unwrap();
    let error = scheduler.fork(parent, 0, Request::new([5]).max_new_tokens(0)).unwrap_err();
    assert_eq!(error, RequestError::PromiseExceeded { needed: 11, available: 10 });
    everything_finishes(scheduler, 2);
}

#[test]
fn a_fork_within_a_block_is_promised_a_copy_of_it() {
    // 2 blocks held, 2 to come, 1 copy: a branch of 7 blocks has 5 of its own, and 8 would be one too many.
    let (mut scheduler, parent) = with_parent(10, 6, 8);
    let error = scheduler.fork(parent, 6, Request::new([5]).max_new_tokens(22)).unwrap_err();
    assert_eq!(error, RequestError::PromiseExceeded { needed: 11, available: 10 });
    scheduler.fork(parent, 6, Request::new([5]).max_new_tokens(21)).unwrap();
    everything_finishes(scheduler, 2);
}

#[test]
fn a_fork_in_a_step_is_promised_as_if_the_step_had_ended() {
    let (mut scheduler, parent) = with_parent(10, 6, 8);
    for dropped in [true, false] {
        let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
        let error = scheduler.fork(parent, 6, Request::new([5]).max_new_tokens(22)).unwrap_err();
        assert!(matches!(error, RequestError::PromiseExceeded { needed: 11, .. }), "{error}");
        if dropped {
            drop(plan);
            continue;
        }
        let child = scheduler.fork(parent, 6, Request::new([5]).max_new_tokens(21)).unwrap();
        scheduler.assert_consistent();
        assert_eq!(scheduler.computed_tokens(child), Some(0), "not before the step has ended");
        let results = [paged_kv::RowResult::Token(1007)];
        scheduler.commit(plan, &results).unwrap();
        assert_eq!(scheduler.computed_tokens(child), Some(6), "what the parent had computed then");
    }
    everything_finishes(scheduler, 2);
}

#[test]
fn samples_that_fill_the_pool_exactly_are_let_in() {
    // 6 + 6 tokens: one full block shared and two of each sample's own.
    let mut scheduler = guaranteed(9);
    scheduler.add(Request::new(vec![1; 6]).max_new_tokens(6).samples(4)).unwrap();
    assert_eq!(run(&mut scheduler).len(), 4);
    assert_eq!((scheduler.stats().cache.free_blocks, scheduler.stats().cache.block_copies), (9, 3));
    let mut scheduler = guaranteed(8);
    let error = scheduler.add(Request::new(vec![1; 6]).max_new_tokens(6).samples(4)).unwrap_err();
    assert_eq!(error, RequestError::NeverFits { needed_blocks: 9, num_blocks: 8 });
}

#[test]
fn an_extension_that_cannot_be_promised_leaves_the_sequence_kept_and_computed() {
    let mut scheduler = guaranteed(6);
    let chat = scheduler.add(Request::new(vec![1; 8]).max_new_tokens(0).keep(true)).unwrap();
    run(&mut scheduler);
    let other = scheduler.add(Request::new(vec![2; 8]).max_new_tokens(8)).unwrap();
    step(&mut scheduler);
    // Without new tokens the last one would be computed again; a refusal must not have cut it off.
    for turn in [Request::new([9]).max_new_tokens(7), Request::new([]).max_new_tokens(8)] {
        let error = scheduler.extend(chat, turn).unwrap_err();
        assert_eq!(error, RequestError::PromiseExceeded { needed: 8, available: 6 });
        assert_eq!(scheduler.computed_tokens(chat), Some(8));
        assert_eq!(scheduler.stats().kept, 1);
    }
    scheduler.abort(other).unwrap();
    scheduler.extend(chat, Request::new([9]).max_new_tokens(7)).unwrap();
    assert_eq!(run(&mut scheduler)[&chat.sample(0)].1, FinishReason::MaxTokens);
}

#[test]
fn a_kept_sequence_gives_way_before_a_copy_of_what_it_shares() {
    // The branch may fill the pool although its last block is shared with a kept sequence.
    let mut scheduler = guaranteed(4);
    let chat = scheduler.add(Request::new(vec![1; 6]).max_new_tokens(0).keep(true)).unwrap();
    run(&mut scheduler);
    let branch = scheduler.fork(chat, 6, Request::new([7]).max_new_tokens(9)).unwrap();
    let finished = run(&mut scheduler);
    assert_eq!(finished[&branch.sample(0)], ((1007..1016).collect(), FinishReason::MaxTokens));
    assert_eq!(scheduler.computed_tokens(chat), Some(0), "reclaimed");
}

#[test]
fn a_cut_that_gives_up_shared_blocks_must_be_promised() {
    // Both may grow to 5 blocks and share 4: 6 in all.
    for planned in [false, true] {
        let (mut scheduler, parent) = with_parent(7, 16, 4);
        let child = scheduler.fork(parent, 16, Request::new([5]).max_new_tokens(3)).unwrap();
        step(&mut scheduler);
        let plan = planned.then(|| scheduler.schedule());
        let before = scheduler.stats();
        let error = scheduler.truncate(child, 1).unwrap_err();
        assert_eq!(error, RequestError::PromiseExceeded { needed: 10, available: 7 });
        let error = scheduler.truncate(child, 12).unwrap_err();
        assert_eq!(error, RequestError::PromiseExceeded { needed: 8, available: 7 });
        assert_eq!(scheduler.stats(), before);
        // Cut within the fourth block, it needs a copy of that one: 7 in all.
        scheduler.truncate(child, 15).unwrap();
        drop(plan);
        let finished = run(&mut scheduler);
        assert_eq!(finished[&child.sample(0)].0, (1015..1020).collect::<Vec<_>>());
        assert_eq!(scheduler.stats().preemptions, 0);
    }
}

#[test]
fn a_cut_that_waits_for_its_step_is_promised_to_nobody_else() {
    let (mut scheduler, parent) = with_parent(7, 16, 4);
    let child = scheduler.fork(parent, 16, Request::new([5]).max_new_tokens(3)).unwrap();
    step(&mut scheduler);
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    scheduler.truncate(child, 15).unwrap();
    // 6 blocks are promised now and 7 when the step ends: a branch of one block does not fit any more.
    let error = scheduler.fork(parent, 0, Request::new([1]).max_new_tokens(1)).unwrap_err();
    assert_eq!(error, RequestError::PromiseExceeded { needed: 8, available: 7 });
    drop(plan);
    everything_finishes(scheduler, 2);
}

#[test]
fn samples_that_wait_are_not_cut_until_they_can_never_fit() {
    // 12 shared tokens and 2 blocks of each sample's own: 3 + 4 x 2 fill the pool of 11.
    let mut scheduler = guaranteed(11);
    let first = scheduler.add(Request::new(vec![2; 4]).max_new_tokens(4)).unwrap();
    step(&mut scheduler);
    let group = scheduler.add(Request::new(vec![1; 12]).max_new_tokens(8).samples(4)).unwrap();
    let error = scheduler.truncate(group, 8).unwrap_err();
    assert_eq!(error, RequestError::NeverFits { needed_blocks: 14, num_blocks: 11 });
    scheduler.abort(first).unwrap();
    // The four samples, and the one that was aborted.
    everything_finishes(scheduler, 5);
}

#[test]
fn whoever_is_promised_goes_before_a_first_in_line_that_waits_for_the_promise() {
    let (mut scheduler, parent) = with_parent(8, 8, 8);
    let large = scheduler.add(Request::new(vec![3; 24]).max_new_tokens(8)).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.stats().waiting, 1);
    // It shares nothing, so it has no table, but it is promised the blocks that the large one waits for.
    let branch = scheduler.fork(parent, 0, Request::new(vec![4; 8]).max_new_tokens(8)).unwrap();
    let finished = run(&mut scheduler);
    for request in [parent, large, branch] {
        assert!(finished.contains_key(&request.sample(0)), "{request} waits for ever");
    }
}

#[test]
fn a_reclaimed_chat_that_is_extended_goes_before_a_first_in_line_that_waits_for_it() {
    let mut scheduler = guaranteed(8);
    let chat = scheduler.add(Request::new(vec![1; 8]).max_new_tokens(1).keep(true)).unwrap();
    run(&mut scheduler);
    let all = scheduler.add(Request::new(vec![2; 31]).max_new_tokens(1)).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.computed_tokens(chat), Some(0), "reclaimed");
    scheduler.abort(all).unwrap();
    scheduler.add(Request::new(vec![3; 31]).max_new_tokens(1)).unwrap();
    scheduler.extend(chat, Request::new([9]).max_new_tokens(3)).unwrap();
    everything_finishes_but_kept(scheduler, 2);
}

fn everything_finishes_but_kept(mut scheduler: Scheduler, sequences: usize) {
    assert_eq!(run(&mut scheduler).len(), sequences);
    assert_eq!(scheduler.stats().preemptions, 0);
}

#[test]
fn branches_do_not_take_the_tables_of_samples() {
    let config = SchedulerConfig { step_tokens: 4, ..plain() };
    let cache = cache(64, 4).with_max_sequences(4).unwrap();
    let mut scheduler = Scheduler::new(config, cache).unwrap();
    let chat = scheduler.add(Request::new(vec![1; 4]).max_new_tokens(0).keep(true)).unwrap();
    run(&mut scheduler);
    // One table for the chat, one for the group, and two set aside for its samples.
    scheduler.add(Request::new(vec![2; 12]).max_new_tokens(4).samples(3)).unwrap();
    step(&mut scheduler);
    let branch = scheduler.fork(chat, 4, Request::new([5]).max_new_tokens(2)).unwrap();
    assert_eq!(scheduler.computed_tokens(branch), Some(0), "no table is left, so it is computed alone");
    while scheduler.stats().cache.shared_blocks == 0 {
        assert!(step(&mut scheduler) > 0, "the samples share their prompt");
    }
    assert_eq!(scheduler.stats().cache.shared_blocks, 3, "the samples share their prompt");
    assert_eq!(run(&mut scheduler).len(), 3, "the branch has ended before");
}

#[test]
fn an_aborted_sample_hands_its_table_on() {
    for planned in [false, true] {
        let config = SchedulerConfig { step_tokens: 4, ..plain() };
        let cache = cache(64, 4).with_max_sequences(3).unwrap();
        let mut scheduler = Scheduler::new(config, cache).unwrap();
        let group = scheduler.add(Request::new(vec![2; 12]).max_new_tokens(4).samples(3)).unwrap();
        step(&mut scheduler);
        step(&mut scheduler);
        let plan = planned.then(|| scheduler.schedule());
        assert!(scheduler.abort_sequence(group.sample(0)).unwrap());
        assert!(!scheduler.abort_sequence(group.sample(0)).unwrap());
        assert_eq!(scheduler.tokens(group.sample(0)), None);
        assert_eq!(scheduler.tokens(group.sample(1)).map(<[u32]>::len), Some(12));
        drop(plan);
        let finished = run(&mut scheduler);
        let done = finished.values().filter(|(tokens, _)| tokens.len() == 4).count();
        assert_eq!(done, 2, "{finished:?}");
        assert_eq!(scheduler.stats().cache.free_blocks, 64);
    }
}

#[test]
fn samples_that_generate_nothing_are_all_kept() {
    let mut scheduler = guaranteed(16);
    let request = Request::new(vec![1; 6]).max_new_tokens(0).samples(3).keep(true);
    let group = scheduler.add(request).unwrap();
    assert_eq!(run(&mut scheduler).len(), 3);
    assert_eq!((scheduler.stats().kept, scheduler.stats().cache.held_blocks), (3, 2));
    for sample in 0..3 {
        scheduler.extend(group.sample(sample), Request::new([sample]).max_new_tokens(2)).unwrap();
    }
    assert_eq!(run(&mut scheduler).len(), 3);
    assert_eq!(scheduler.stats().cache.free_blocks, 16);
}

#[test]
fn branches_of_one_step_do_not_count_on_the_same_table() {
    let cache = cache(9, 4).with_max_sequences(2).unwrap();
    let mut scheduler = Scheduler::new(plain(), cache).unwrap();
    let parent = scheduler.add(Request::new(vec![1; 8]).max_new_tokens(8)).unwrap();
    step(&mut scheduler);
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    let turn = || Request::new([5]).max_new_tokens(7);
    scheduler.fork(parent, 8, turn()).unwrap();
    // 4 blocks of the parent, 2 of the branch; without a table the second branch shares nothing and needs all its 4.
    let error = scheduler.fork(parent, 8, turn()).unwrap_err();
    assert_eq!(error, RequestError::PromiseExceeded { needed: 10, available: 9 });
    drop(plan);
    everything_finishes(scheduler, 2);
}

#[test]
fn samples_that_part_before_they_are_cut_are_promised_a_copy() {
    // 7 + 6 tokens: one block shared and three of each sample's own. Cut to the block's end when the samples have parted,
    // the first one computes its fourth token again, apart from the other.
    let mut scheduler = guaranteed(7);
    let group = || Request::new(vec![1; 7]).max_new_tokens(6).samples(2);
    let id = scheduler.add(group()).unwrap();
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    let error = scheduler.truncate(id, 4).unwrap_err();
    assert_eq!(error, RequestError::PromiseExceeded { needed: 8, available: 7 });
    drop(plan);
    everything_finishes(scheduler, 2);
    let mut scheduler = guaranteed(8);
    let id = scheduler.add(group()).unwrap();
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    scheduler.truncate(id, 4).unwrap();
    scheduler.commit(plan, &[paged_kv::RowResult::Token(5); 2]).unwrap();
    scheduler.assert_consistent();
    assert_eq!(scheduler.tokens(id.sample(1)).map(<[u32]>::len), Some(8), "only the first one is cut");
    everything_finishes(scheduler, 2);
}

#[test]
fn a_branch_that_is_promised_its_blocks_does_not_wait_for_a_request_that_is_not() {
    let mut scheduler = Scheduler::new(plain(), cache(32, 16)).unwrap();
    scheduler.add(Request::new([1; 16]).max_new_tokens(144)).unwrap();
    let parent = scheduler.add(Request::new([2; 16]).max_new_tokens(48)).unwrap();
    step(&mut scheduler);
    let next = scheduler.add(Request::new([3; 160]).max_new_tokens(144)).unwrap();
    step(&mut scheduler);
    let branch = scheduler.fork(parent, 17, Request::new([4; 16]).max_new_tokens(100)).unwrap();
    // 10 + 4 + 8 blocks are promised, so `next` with its 19 waits in front of the branch.
    step(&mut scheduler);
    assert_eq!(scheduler.computed_tokens(next), Some(0));
    assert!(scheduler.computed_tokens(branch) > Some(17), "the branch has begun");
    assert_eq!(run(&mut scheduler).len(), 4);
}
