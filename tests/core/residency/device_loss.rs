//! The device is lost: who is computed again, who comes back from the host pool, and what is promised then.

use super::{Served, overcommitted, pool, prompt, swapping};
use paged_kv::{
    Admission, CommitError, KvCache, MissReason, Retention, RowResult, Schedule, SchedulerConfig,
    StepBuilder, StepId,
};

impl Served {
    /// The simulated device takes the place of a lost one.
    fn lose_device(&mut self) {
        let reports = self.device.replace();
        self.scheduler.complete_transfers(&reports);
        self.scheduler.forget_device();
        self.check();
        let cache = self.scheduler.stats().cache;
        assert_eq!((cache.held_blocks, cache.cached_blocks, cache.host_in_transfer_blocks), (0, 0, 0));
    }
}

#[test]
fn everybody_is_computed_again_and_says_the_same() {
    let mut served = Served::new(overcommitted(), pool(32, 0));
    let requests = [1, 2, 3].map(|seed| served.add(&prompt(seed, 9), |request| request.max_new_tokens(12)));
    for _ in 0..4 {
        served.step();
    }
    served.lose_device();
    for request in requests {
        assert_eq!(served.scheduler.computed_tokens(request), Some(0));
    }
    // In one step again, and in their order.
    let plan = served.plan();
    assert_eq!((plan.num_sequences(), plan.num_rows()), (3, 3 * (9 + 4)));
    assert_eq!(plan.forgotten_devices(), 1);
    assert!(plan.table_changes().iter().all(|change| change.first_entry == 0), "tables are sent in full");
    served.commit(plan);
    served.finish();
    for (request, seed) in requests.into_iter().zip(1..) {
        assert_eq!(served.answers(request, &prompt(seed, 9)), 12);
    }
    let stats = served.scheduler.stats();
    assert_eq!((stats.preemptions, stats.recomputed_tokens), (0, 3 * (9 + 3)));
}

#[test]
fn a_plan_under_way_is_dropped_and_what_was_asked_meanwhile_takes_effect() {
    for ran in [false, true] {
        let mut served = Served::new(overcommitted(), pool(32, 0));
        let [stays, ends, cut] =
            [1, 2, 3].map(|seed| served.add(&prompt(seed, 9), |request| request.max_new_tokens(12)));
        served.step();
        let plan = served.plan();
        if ran {
            served.device.run(&plan);
        }
        assert!(served.scheduler.abort(ends).unwrap());
        served.scheduler.truncate(cut, 9).unwrap();
        let branch = served.scheduler.fork(stays, 10, paged_kv::Request::new([5]).max_new_tokens(3)).unwrap();
        served.lose_device();
        let step = plan.step();
        let results = vec![RowResult::Token(0); plan.logit_rows().len()];
        assert_eq!(served.scheduler.commit(plan, &results).unwrap_err(), CommitError::StalePlan { step });
        assert_eq!(served.scheduler.tokens(ends), None);
        assert_eq!(served.scheduler.tokens(cut), Some(&prompt(3, 9)[..]));
        served.tokens.insert(cut.sample(0), prompt(3, 9));
        let mut begun = served.tokens[&stays.sample(0)][..10].to_vec();
        begun.push(5);
        served.tokens.insert(branch.sample(0), begun.clone());
        served.finish();
        assert_eq!(served.answers(stays, &prompt(1, 9)), 12);
        assert_eq!(served.answers(cut, &prompt(3, 9)), 12);
        assert_eq!(served.answers(branch, &begun), 3);
    }
}

/// Two sequences that do not fit side by side: the second is in the host pool, on its way or there.
fn one_away(arrived: bool) -> (Served, [paged_kv::RequestId; 2]) {
    let mut served = Served::new(swapping(), pool(8, 16));
    let requests = [1, 2].map(|seed| served.add(&prompt(seed, 8), |request| request.max_new_tokens(16)));
    served.late = true;
    served.steps_until(|_, step| !step.outs.is_empty());
    if arrived {
        served.report(0);
    }
    (served, requests)
}

#[test]
fn what_had_arrived_in_the_host_pool_comes_back_and_the_rest_is_computed_again() {
    for arrived in [true, false] {
        let (mut served, [runs, away]) = one_away(arrived);
        let before = served.scheduler.computed_tokens(away).unwrap();
        served.lose_device();
        served.late = false;
        assert_eq!(served.scheduler.computed_tokens(runs), Some(0));
        assert_eq!(served.scheduler.computed_tokens(away), Some(if arrived { before } else { 0 }));
        let host = served.scheduler.stats().cache;
        assert_eq!(host.host_held_blocks, if arrived { before.div_ceil(4) } else { 0 });
        served.finish();
        let moved = served.scheduler.stats().swaps_in;
        assert!(!arrived || moved > 0);
        for (request, seed) in [runs, away].into_iter().zip(1..) {
            assert_eq!(served.answers(request, &prompt(seed, 8)), 16);
        }
        assert_eq!(served.scheduler.stats().cache.host_free_blocks, 16);
    }
}

#[test]
fn a_kept_chat_is_read_again_by_its_next_turn() {
    let mut served = Served::new(overcommitted(), pool(32, 0));
    let chat = served.add(&prompt(1, 9), |request| request.max_new_tokens(4).keep(true));
    served.finish();
    served.lose_device();
    assert_eq!(served.scheduler.computed_tokens(chat), Some(0));
    served.ends.clear();
    served.extend(chat, &[7, 8], |request| request.max_new_tokens(2));
    assert_eq!(served.step().rows, 9 + 4 + 2);
    served.finish();
}

#[test]
fn the_prefix_cache_forgets_even_pinned_content() {
    let mut served = Served::new(overcommitted(), pool(32, 0));
    served.serve(&prompt(1, 17), |request| request.retain(0..16, Retention::Pinned, None));
    assert_eq!(served.scheduler.stats().cache.pinned_blocks, 4);
    served.lose_device();
    assert_eq!(served.scheduler.stats().cache.pinned_blocks, 0);
    let found = served.serve(&prompt(1, 17), |request| request);
    assert_eq!(found.cached_tokens, 0);
    // Which of the two is left to chance: evictions share few places.
    assert!(matches!(found.miss, MissReason::Evicted | MissReason::Unseen), "{:?}", found.miss);
    // Computed and registered again.
    assert_eq!(served.serve(&prompt(1, 17), |request| request).cached_tokens, 16);
}

#[test]
fn promises_that_rested_on_sharing_are_made_again_one_after_the_other() {
    for prefix_cache in [None, Some(Default::default())] {
        let config =
            SchedulerConfig { admission: Admission::Guaranteed, prefix_cache, ..SchedulerConfig::default() };
        let mut served = Served::new(config, pool(14, 0));
        // Eight shared blocks, and two for each: all of the pool. Without sharing, each one needs ten.
        let request = served.add(&prompt(1, 32), |request| request.samples(3).max_new_tokens(8));
        served.step();
        served.step();
        assert_eq!(served.scheduler.stats().cache.promised_blocks, 14);
        served.lose_device();
        assert_eq!(served.scheduler.stats().cache.promised_blocks, 10, "the first one's");
        served.finish();
        for sample in 0..3 {
            assert_eq!(served.answers(request.sample(sample), &prompt(1, 32)), 8);
        }
        assert_eq!(served.scheduler.stats().preemptions, 0);
    }
}

#[test]
fn at_its_bound_a_sequence_comes_back_with_everything_reserved() {
    let config = SchedulerConfig { max_preemptions: 1, ..overcommitted() };
    let mut served = Served::new(config, pool(8, 0));
    let requests = [1, 2].map(|seed| served.add(&prompt(seed, 8), |request| request.max_new_tokens(16)));
    let preempted = served.steps_until(|_, step| !step.preempted().is_empty()).preempted();
    let victim = preempted[0].0;
    for _ in 0..3 {
        // Wherever it is, in line or running again: it is not preempted once more.
        served.lose_device();
        served.step();
        served.step();
    }
    served.finish();
    assert_eq!(served.scheduler.stats().preemptions, 1);
    assert!(requests.iter().any(|request| request.sample(0) == victim));
    for (request, seed) in requests.into_iter().zip(1..) {
        assert_eq!(served.answers(request, &prompt(seed, 8)), 16);
    }
}

#[test]
fn a_scheduler_without_a_device_to_forget_goes_on_as_before() {
    let mut served = Served::new(overcommitted(), pool(8, 0));
    served.lose_device();
    assert!(matches!(served.schedule(), Schedule::Idle));
    let request = served.add(&prompt(1, 8), |request| request.max_new_tokens(4));
    served.lose_device();
    served.lose_device();
    served.finish();
    assert_eq!(served.answers(request, &prompt(1, 8)), 4);
}

/// A step of an application's own scheduler, committed.
fn step_of(cache: &mut KvCache, act: impl FnOnce(&mut StepBuilder<'_>)) -> StepId {
    let mut builder = StepBuilder::new(cache);
    act(&mut builder);
    let plan = builder.finish();
    let step = plan.step();
    cache.commit_step(plan).unwrap();
    step
}

#[test]
fn tables_alone_are_empty_but_for_those_in_the_host_pool() {
    let mut cache = KvCache::new(pool(16, 8));
    let [stays, away, shared, late] = [(); 4].map(|()| cache.create(24).unwrap());
    let step = |cache: &mut KvCache, pushes: &[(paged_kv::TableId, u32)], outs: &[paged_kv::TableId]| {
        step_of(cache, |builder| {
            for &(table, rows) in pushes {
                builder.push(table, &vec![7; rows as usize]).unwrap();
            }
            for &table in outs {
                builder.swap_out(table).unwrap();
            }
        })
    };
    step(&mut cache, &[(stays, 6), (away, 5), (shared, 8), (late, 9)], &[]);
    let fork = cache.fork(shared, 4, 24).unwrap();
    // Of `shared`, the block that the fork has stays in the pool.
    let arrived = step(&mut cache, &[], &[away, shared]);
    cache.complete_transfers(arrived, true);
    let unreported = step(&mut cache, &[], &[late]);
    let mut builder = StepBuilder::new(&mut cache);
    builder.push(stays, &[7]).unwrap();
    let outstanding = builder.finish();

    cache.forget_device();
    cache.assert_consistent();
    for (table, len) in [(stays, 0), (away, 5), (shared, 0), (late, 0), (fork, 0)] {
        assert_eq!(cache.len(table), Ok(len));
    }
    assert_eq!((cache.free_blocks(), cache.stats().host_held_blocks), (16, 2));
    assert!(matches!(cache.commit_step(outstanding), Err(CommitError::StalePlan { .. })));
    cache.complete_transfers(unreported, true);
    assert_eq!(cache.len(late), Ok(0), "it comes too late");
    let mut builder = StepBuilder::new(&mut cache);
    builder.swap_in(away).unwrap();
    builder.push(stays, &[7; 6]).unwrap();
    let plan = builder.finish();
    assert_eq!((plan.swap_ins().len(), plan.table_changes()[0].first_entry), (2, 0));
    cache.commit_step(plan).unwrap();
    cache.assert_consistent();
}

#[test]
fn what_a_failed_return_left_is_not_kept_though_it_was_moved_out_again() {
    let mut cache = KvCache::new(pool(16, 8));
    let table = cache.create(24).unwrap();
    step_of(&mut cache, |builder| {
        builder.push(table, &[7; 8]).unwrap();
    });
    let arrived = step_of(&mut cache, |builder| {
        builder.swap_out(table).unwrap();
    });
    cache.complete_transfers(arrived, true);
    let failed = step_of(&mut cache, |builder| builder.swap_in(table).unwrap());
    let arrived = step_of(&mut cache, |builder| {
        builder.swap_out(table).unwrap();
    });
    cache.complete_transfers(failed, false);
    cache.complete_transfers(arrived, true);
    assert_eq!(cache.stats().host_held_blocks, 2);
    cache.forget_device();
    cache.assert_consistent();
    assert_eq!((cache.len(table), cache.stats().host_held_blocks), (Ok(0), 0));
}
