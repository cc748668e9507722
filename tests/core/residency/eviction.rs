//! What is given up when blocks are short, and what stays.

use super::{Served, overcommitted, pool, prompt};
use paged_kv::{MissReason, Namespace, PrefixCacheConfig, Request, Retention, SchedulerConfig};

fn plain(request: Request) -> Request {
    request
}

/// Tokens known of a prompt, except its last one. Uses nothing.
fn known(served: &Served, tokens: &[u32]) -> u32 {
    served.scheduler.cache().find_prefix(&Namespace::default(), tokens)
}

/// A pool of 12 blocks with three chains of three blocks each, the first one computed first.
fn three_chains(retention: [Retention; 3]) -> (Served, [Vec<u32>; 3]) {
    let mut served = Served::new(SchedulerConfig::default(), pool(12, 0));
    let chains = [1, 2, 3].map(|seed| prompt(seed, 12));
    for (tokens, retention) in chains.iter().zip(retention) {
        served.serve(tokens, |request| request.retain(0..12, retention, None));
    }
    assert_eq!(served.scheduler.stats().cache.cached_blocks, 9);
    (served, chains)
}

#[test]
fn the_least_recently_used_chain_goes_first_and_its_tail_before_its_head() {
    let (mut served, chains) = three_chains([Retention::Normal; 3]);
    // The first one is used again: now the second is the oldest.
    served.serve(&chains[0], plain);
    assert_eq!(served.scheduler.stats().cache.cached_blocks, 9);
    for (blocks, expected) in [
        (4, [11, 8, 11]),
        (5, [11, 4, 11]),
        (6, [11, 0, 11]),
        (7, [11, 0, 8]),
        (9, [11, 0, 0]),
        (11, [4, 0, 0]),
        (12, [0, 0, 0]),
    ] {
        served.squeeze(blocks);
        assert_eq!(chains.each_ref().map(|tokens| known(&served, tokens)), expected, "{blocks} blocks");
    }
    assert_eq!(served.scheduler.stats().cache.evictions, 9);
}

#[test]
fn what_is_retained_better_goes_later_whenever_it_was_used() {
    let (mut served, chains) = three_chains([Retention::High, Retention::Normal, Retention::Low]);
    for (blocks, expected) in [(6, [11, 11, 0]), (9, [11, 0, 0]), (12, [0, 0, 0])] {
        served.squeeze(blocks);
        assert_eq!(chains.each_ref().map(|tokens| known(&served, tokens)), expected, "{blocks} blocks");
    }
}

#[test]
fn only_the_blocks_within_the_range_are_retained_better() {
    let mut served = Served::new(SchedulerConfig::default(), pool(12, 0));
    // A system prompt of 10 tokens: its third block is not within it.
    let first = prompt(1, 20);
    served.serve(&first, |request| request.retain(0..10, Retention::High, None));
    served.serve(&prompt(2, 12), plain);
    served.squeeze(10);
    assert_eq!((known(&served, &first), known(&served, &prompt(2, 12))), (8, 0));
}

#[test]
fn pinned_content_stays_under_pressure() {
    for config in [SchedulerConfig::default(), overcommitted()] {
        let mut served = Served::new(config, pool(12, 0));
        let system = prompt(1, 9);
        served.serve(&system, |request| request.retain(0..8, Retention::Pinned, None));
        assert_eq!(served.scheduler.stats().cache.pinned_blocks, 2);
        // More than the pool holds beside it runs, in turns.
        let requests: Vec<_> =
            (0..6).map(|seed| (seed, served.add(&prompt(10 + seed, 12), |r| r.max_new_tokens(8)))).collect();
        served.finish();
        for (seed, request) in requests {
            assert_eq!(served.answers(request, &prompt(10 + seed, 12)), 8);
        }
        assert_eq!(served.scheduler.stats().cache.pinned_blocks, 2);
        assert_eq!(known(&served, &system), 8);
    }
}

#[test]
fn pinned_content_gives_way_only_to_who_cannot_run_without_it() {
    for config in [SchedulerConfig::default(), overcommitted()] {
        let mut served = Served::new(config, pool(12, 0));
        let system = prompt(1, 9);
        served.serve(&system, |request| request.retain(0..8, Retention::Pinned, None));
        // Ten blocks are left. A request for eleven waits while another one runs, and takes one block when it is alone.
        let small = served.add(&prompt(2, 4), |request| request.max_new_tokens(4));
        let large = served.add(&prompt(3, 40), |request| request.max_new_tokens(4));
        while !served.ends.contains_key(&small.sample(0)) {
            assert_eq!(served.scheduler.stats().cache.pinned_blocks, 2);
            served.step();
        }
        served.finish();
        assert_eq!(served.answers(large, &prompt(3, 40)), 4);
        assert_eq!(known(&served, &system), 4, "one of two pinned blocks was given up, the tail");
    }
}

#[test]
fn what_was_not_used_for_its_time_to_live_is_gone() {
    let tokens = prompt(1, 9);
    for (idle, expected) in [(0, 8), (4, 8), (5, 0), (9, 0)] {
        let mut served = Served::new(SchedulerConfig::default(), pool(32, 0));
        served.serve(&tokens, |request| request.retain(0..8, Retention::High, Some(5)));
        for _ in 0..idle {
            served.squeeze(1);
        }
        let report = served.serve(&tokens, plain);
        assert_eq!(report.cached_tokens, expected, "after {idle} steps without use");
        assert_eq!(report.miss == MissReason::Expired, expected == 0);
    }
    // A use begins its time anew.
    let mut served = Served::new(SchedulerConfig::default(), pool(32, 0));
    served.serve(&tokens, |request| request.retain(0..8, Retention::High, Some(5)));
    for _ in 0..6 {
        (0..3).for_each(|_| served.squeeze(1));
        assert_eq!(served.serve(&tokens, plain).cached_tokens, 8);
    }
}

#[test]
fn a_system_prompt_expires_although_chats_went_on_from_it() {
    let mut served = Served::new(SchedulerConfig::default(), pool(32, 0));
    let system = prompt(1, 8);
    let chat = |seed: u32| [system.clone(), prompt(seed, 9)].concat();
    for seed in 2..4 {
        served.serve(&chat(seed), |request| request.retain(0..8, Retention::Pinned, Some(5)));
    }
    served.serve(&chat(4), plain);
    assert_eq!(served.scheduler.stats().cache.pinned_blocks, 2);
    (0..5).for_each(|_| served.squeeze(1));
    assert_eq!(known(&served, &chat(4)), 16, "five steps after its last use");
    (0..2).for_each(|_| served.squeeze(1));
    assert_eq!(served.scheduler.stats().cache.pinned_blocks, 0);
    assert_eq!(served.serve(&chat(4), plain).miss, MissReason::Expired);
}

#[test]
fn expired_content_goes_whatever_was_given_up_before_it() {
    for retention in [Retention::Low, Retention::Normal, Retention::High, Retention::Pinned] {
        let mut served = Served::new(SchedulerConfig::default(), pool(100, 0));
        let lasting = prompt(1, 40);
        served.serve(&lasting, |request| request.retain(0..40, retention, None));
        // Two that go one after the other, and one that stays, in between.
        let (first, second, between) = (prompt(2, 120), prompt(3, 120), prompt(4, 8));
        served.serve(&first, |request| request.retain(0..120, retention, Some(5)));
        served.serve(&between, |request| request.retain(0..8, retention, None));
        served.serve(&second, |request| request.retain(0..120, retention, Some(5)));
        let cached = |served: &Served| {
            let stats = served.scheduler.stats().cache;
            assert_eq!(stats.pinned_blocks, stats.cached_blocks * u32::from(retention == Retention::Pinned));
            (stats.cached_blocks, stats.expirations)
        };
        assert_eq!(cached(&served), (72, 0));
        (0..3).for_each(|_| served.squeeze(1));
        assert_eq!(cached(&served), (72, 0), "five steps after the first one's last use");
        served.squeeze(1);
        assert_eq!(cached(&served), (42, 30));
        served.squeeze(1);
        assert_eq!(cached(&served), (42, 30));
        served.squeeze(1);
        assert_eq!(cached(&served), (12, 60));
        assert_eq!(served.scheduler.stats().cache.evictions, 0);
        (0..50).for_each(|_| served.squeeze(1));
        assert_eq!(cached(&served), (12, 60));
        assert_eq!((known(&served, &lasting), known(&served, &between)), (39, 7));
        assert_eq!((known(&served, &first), known(&served, &second)), (0, 0));
    }
}

#[test]
fn a_time_to_live_of_nothing_ends_with_the_step_after_the_last_use_and_none_never() {
    let tokens = prompt(1, 9);
    for (ttl, idle, expected) in [(Some(0), 0, 0), (Some(1), 0, 8), (Some(1), 1, 0), (None, 40, 8)] {
        let mut served = Served::new(SchedulerConfig::default(), pool(32, 0));
        served.serve(&tokens, |request| request.retain(0..8, Retention::Pinned, ttl));
        assert_eq!(known(&served, &tokens), 8, "until the next step begins");
        (0..idle).for_each(|_| served.squeeze(1));
        assert_eq!(served.serve(&tokens, plain).cached_tokens, expected, "{ttl:?}, {idle} steps later");
    }
    // Of ranges that overlap, the one without an end counts.
    let mut served = Served::new(SchedulerConfig::default(), pool(32, 0));
    served.serve(&tokens, |request| {
        let request = request.retain(0..8, Retention::Normal, Some(0));
        request.retain(0..8, Retention::Normal, None).retain(0..8, Retention::Normal, Some(3))
    });
    (0..8).for_each(|_| served.squeeze(1));
    assert_eq!(known(&served, &tokens), 8);
}

#[test]
fn what_a_sequence_holds_is_in_use_however_long_and_its_time_begins_afterwards() {
    let mut served = Served::new(SchedulerConfig::default(), pool(32, 0));
    let system = prompt(1, 8);
    let chat = |seed: u32| [system.clone(), prompt(seed, 5)].concat();
    let long = served.add(&chat(2), |r| r.max_new_tokens(20).retain(0..8, Retention::High, Some(2)));
    for _ in 0..10 {
        served.step();
    }
    assert_eq!(known(&served, &chat(3)), 8, "ten steps after it was registered");
    while !served.ends.contains_key(&long.sample(0)) {
        served.step();
    }
    assert_eq!(served.answers(long, &chat(2)), 20);
    for (idle, expected) in [(2, 8), (1, 0)] {
        (0..idle).for_each(|_| served.squeeze(1));
        assert_eq!(known(&served, &chat(3)), expected);
    }
}

#[test]
fn what_is_pinned_for_a_limited_time_is_given_up_before_what_is_pinned_for_ever() {
    for config in [SchedulerConfig::default(), overcommitted()] {
        let mut served = Served::new(config, pool(12, 0));
        let (lasting, limited) = (prompt(1, 9), prompt(2, 9));
        served.serve(&lasting, |request| request.retain(0..8, Retention::Pinned, None));
        served.serve(&limited, |request| request.retain(0..8, Retention::Pinned, Some(1000)));
        assert_eq!(served.scheduler.stats().cache.pinned_blocks, 4);
        let large = served.add(&prompt(3, 39), |request| request.max_new_tokens(1));
        served.finish();
        assert_eq!(served.answers(large, &prompt(3, 39)), 1);
        assert_eq!((known(&served, &lasting), known(&served, &limited)), (8, 0));
    }
}

#[test]
fn the_cache_keeps_within_its_cap() {
    for cap in [0, 1, 4] {
        let prefix_cache =
            Some(PrefixCacheConfig { max_cached_blocks: Some(cap), ..PrefixCacheConfig::default() });
        let mut served =
            Served::new(SchedulerConfig { prefix_cache, ..SchedulerConfig::default() }, pool(32, 0));
        for seed in 1..5 {
            // Pinned or not: the cap is the application's word, too.
            let retention = if seed % 2 == 0 { Retention::Pinned } else { Retention::Normal };
            let request =
                served.add(&prompt(seed, 17), |r| r.max_new_tokens(4).retain(0..16, retention, None));
            served.step();
            // What is held is found, whatever the cap.
            assert_eq!(known(&served, &prompt(seed, 17)), 16);
            served.finish();
            assert_eq!(served.answers(request, &prompt(seed, 17)), 4);
            let stats = served.scheduler.stats().cache;
            assert_eq!(stats.cached_blocks, cap.min(4), "of {seed} chains, {cap} at most");
        }
    }
}

#[test]
fn a_block_that_was_just_hit_is_not_evicted_for_its_neighbour() {
    for config in [SchedulerConfig::default(), overcommitted()] {
        let mut served = Served::new(config, pool(8, 0));
        let (old, new) = (prompt(1, 9), prompt(2, 9));
        served.serve(&old, plain);
        served.serve(&new, plain);
        // The oldest content is hit, and in the same step four blocks are free and two more must be had.
        let mut longer = old.clone();
        longer.extend(prompt(3, 6));
        let hit = served.add(&longer, |request| request.max_new_tokens(1));
        let other = served.add(&prompt(4, 15), |request| request.max_new_tokens(1));
        let step = served.step();
        assert_eq!(step.admitted().len(), 2, "both fit, if the hit blocks are those of the first");
        assert_eq!(step.admitted()[0].1.cached_tokens, 8);
        assert_eq!(known(&served, &new), 0, "the newer content went, since the older one was in use");
        served.finish();
        assert_eq!((served.answers(hit, &longer), served.answers(other, &prompt(4, 15))), (1, 1));
    }
}

#[test]
fn b47_hits_are_not_spare_capacity_and_a_refusal_changes_nothing() {
    for config in [SchedulerConfig::default(), overcommitted()] {
        let mut served = Served::new(config, pool(8, 0));
        // Three blocks are held by one that runs on, and five are available: one old, two hit by R, two free.
        let old = prompt(1, 4);
        served.serve(&old, plain);
        let hit = prompt(2, 8);
        served.serve(&hit, plain);
        let runs = served.add(&prompt(5, 9), |request| request.max_new_tokens(3));
        served.step();
        let before = served.scheduler.stats();
        let (free, cached) = (before.cache.free_blocks, before.cache.cached_blocks);
        assert_eq!((before.cache.held_blocks, free, cached), (3, 2, 3));
        let request = |new: u32| [hit.clone(), prompt(6, 4 * new)].concat();
        // Two hits and four new blocks.
        let large = served.add(&request(4), |request| request.max_new_tokens(0));
        let plan = served.plan();
        assert_eq!(plan.num_sequences(), 1, "only the one that runs");
        let after = served.scheduler.stats();
        assert_eq!(
            (after.prefix_hit_tokens, after.prefix_wanted_tokens),
            (before.prefix_hit_tokens, before.prefix_wanted_tokens)
        );
        assert_eq!((after.cache.free_blocks, after.cache.cached_blocks), (free, cached));
        assert_eq!((after.cache.evictions, after.cache.shared_blocks), (before.cache.evictions, 0));
        drop(plan);
        served.scheduler.abort(large).unwrap();
        // The order is as before, too: what is older goes first.
        served.squeeze(3);
        assert_eq!((known(&served, &old), known(&served, &request(1))), (0, 8));
        // Two hits and three new blocks.
        let exact = served.add(&request(3), |request| request.max_new_tokens(0));
        let plan = served.plan();
        let stats = served.scheduler.stats().cache;
        assert_eq!((stats.free_blocks, stats.cached_blocks, stats.held_blocks), (0, 0, 8));
        served.commit(plan);
        assert!(served.ends.contains_key(&exact.sample(0)));
        served.finish();
        assert_eq!(served.answers(runs, &prompt(5, 9)), 3);
    }
}

#[test]
fn b49_a_request_of_the_whole_pool_runs_over_whatever_is_cached() {
    for config in [SchedulerConfig::default(), overcommitted()] {
        let mut served = Served::new(config, super::cache(50, 16));
        for (seed, retention) in [(1, Retention::Normal), (2, Retention::Pinned), (3, Retention::High)] {
            served.serve(&prompt(seed, 100), |request| request.retain(0..100, retention, Some(1000)));
        }
        let kept = served.add(&prompt(4, 100), |request| request.max_new_tokens(0).keep(true));
        served.finish();
        let all = prompt(9, 790);
        let id = served.add(&all, |request| request.max_new_tokens(10));
        served.finish();
        assert_eq!(served.answers(id, &all), 10);
        assert_eq!(served.scheduler.computed_tokens(kept), Some(0));
    }
}
