//! The `traffic` example: its allocator of extents, the traffic that it makes, and what it says of who serves it.
#![allow(clippy::unwrap_used)]
// Only a part of the example is looked at.
#![allow(dead_code)]

#[path = "../traffic/arrivals.rs"]
mod arrivals;
#[path = "../traffic/contiguous.rs"]
mod contiguous;
#[path = "../traffic/extents.rs"]
mod extents;
#[path = "../traffic/generator.rs"]
mod generator;
#[path = "../traffic/ledger.rs"]
mod ledger;
#[path = "../traffic/measure.rs"]
mod measure;
#[path = "../traffic/paging.rs"]
mod paging;
#[path = "../traffic/parameters.rs"]
mod parameters;
#[path = "../traffic/serve.rs"]
mod serve;
#[path = "../traffic/systems.rs"]
mod systems;

use approx::{abs_diff_eq, assert_abs_diff_eq};
use extents::FirstFit;
use generator::{Job, Traffic};
use paged_kv::{CacheConfig, KvType, ModelShape};
use parameters::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use systems::{Layout, Table};

#[test]
fn the_first_hole_that_is_large_enough_is_taken() {
    let mut pool = FirstFit::new(100);
    let starts: Vec<u32> = [10, 20, 30].map(|len| pool.take(len).unwrap()).into();
    assert_eq!(starts, [0, 10, 30]);
    pool.give_back(0, 10);
    assert_eq!(pool.take(11), Some(60), "the hole of 10 is too small");
    assert_eq!(pool.take(10), Some(0));
    assert_eq!(pool.free(), 29);
    assert_eq!(pool.take(30), None);
    assert_eq!(pool.free(), 29, "a refusal takes nothing");
}

#[test]
fn holes_in_pieces_do_not_add_up_to_an_extent() {
    let mut pool = FirstFit::new(40);
    for _ in 0..4 {
        pool.take(10).unwrap();
    }
    pool.give_back(0, 10);
    pool.give_back(20, 10);
    assert_eq!((pool.free(), pool.take(20)), (20, None));
    pool.give_back(10, 10);
    assert_eq!(pool.take(30), Some(0), "neighbours become one hole");
}

#[test]
fn extents_never_overlap_and_all_of_the_pool_comes_back() {
    const CAPACITY: u32 = 1000;
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let mut pool = FirstFit::new(CAPACITY);
    let mut taken: Vec<(u32, u32)> = Vec::new();
    for _ in 0..10_000 {
        if random.random_bool(0.5) && !taken.is_empty() {
            let (start, len) = taken.swap_remove(random.random_range(0..taken.len()));
            pool.give_back(start, len);
        } else {
            let len = random.random_range(1..200);
            if let Some(start) = pool.take(len) {
                assert!(start + len <= CAPACITY);
                assert!(
                    taken
                        .iter()
                        .all(|&(other, other_len)| start + len <= other || other + other_len <= start)
                );
                taken.push((start, len));
            }
        }
        assert_eq!(pool.free(), CAPACITY - taken.iter().map(|&(_, len)| len).sum::<u32>());
    }
    for (start, len) in taken {
        pool.give_back(start, len);
    }
    assert_eq!(pool.take(CAPACITY), Some(0), "one hole is left");
}

#[test]
fn lognormal_draws_have_the_mean_and_the_median_that_are_stated() {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    for distribution in [MESSAGE, ANSWER, PAUSE] {
        let mut draws: Vec<f64> = (0..100_000).map(|_| distribution.draw(&mut random)).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        draws.sort_by(f64::total_cmp);
        let median = distribution.mean / (distribution.sigma * distribution.sigma / 2.0).exp();
        // Three standard errors of the mean at the largest sigma are 1.3 %.
        let is_near = |ratio: f64| abs_diff_eq!(ratio, 1.0, epsilon = 0.02);
        assert!(is_near(mean / distribution.mean), "{mean} is not {distribution:?}");
        assert!(is_near(draws[50_000] / median), "{} is not {median}", draws[50_000]);
    }
}

#[test]
fn the_same_seed_makes_the_same_day_and_another_one_another() {
    let day = Traffic::generate(1, 2.0);
    assert_eq!(day, Traffic::generate(1, 2.0));
    assert_ne!(day, Traffic::generate(2, 2.0));
}

#[test]
fn a_day_has_the_chats_turns_and_extras_that_are_stated() {
    let day = Traffic::generate(1, 24.0);
    let bursts = f64::from(BURST_CHATS) * 24.0 / HOURS_BETWEEN_BURSTS;
    let expected = 24.0 * CHATS_PER_HOUR + bursts;
    assert_abs_diff_eq!(day.arrivals.len() as f64 / expected, 1.0, epsilon = 0.1);

    let turns: Vec<&Job> = day.jobs.iter().filter(|job| job.parent.is_none()).collect();
    let share = |counts: fn(&Job) -> bool, of: usize| {
        turns.iter().filter(|job| counts(job)).count() as f64 / of as f64
    };
    let single = turns.iter().filter(|job| job.answers.len() == 1).count();
    assert_abs_diff_eq!(share(|job| job.answers.len() > 1, turns.len()), SEVERAL_ANSWERS, epsilon = 0.01);
    assert_abs_diff_eq!(share(|job| job.stop_after.is_some(), single), STOP, epsilon = 0.01);
    assert_abs_diff_eq!(share(|job| job.leave_after.is_some(), day.arrivals.len()), LEAVE, epsilon = 0.02);
    // Some branches do not fit the context, and some chats end for the same reason.
    assert_abs_diff_eq!(share(|job| job.branch.is_some(), single), BRANCH, epsilon = 0.02);
    let per_chat = turns.len() as f64 / day.arrivals.len() as f64;
    assert!(per_chat > 2.3 && per_chat < 1.0 / (1.0 - NEXT_TURN), "{per_chat} turns a chat");
}

#[test]
fn a_turn_begins_with_everything_before_it() {
    let day = Traffic::generate(1, 4.0);
    for job in &day.jobs {
        assert!(job.prompt_len() + MAX_NEW_TOKENS <= CONTEXT);
        let mut before = job.prompt_tokens();
        let answer = job.answers[0];
        before.extend((0..job.answer_len(0)).map(|index| answer.token(index)));
        if let Some((_, next)) = job.next {
            assert_eq!(before, day.jobs[next].prompt_tokens()[..before.len()]);
        }
        if let Some((tokens, branch)) = job.branch {
            let common = (job.prompt_len() + tokens) as usize;
            assert_eq!(before[..common], day.jobs[branch].prompt_tokens()[..common]);
            assert_eq!(day.jobs[branch].parent.map(|(_, common)| common), Some(common as u32));
        }
    }
}

#[test]
fn documents_beside_the_chats_change_nothing_about_them() {
    let chats = Traffic::generate(1, 4.0);
    let both = Traffic::generate(1, 4.0).with_documents(1);
    assert_eq!(chats.jobs, both.jobs[..chats.jobs.len()]);
    let documents = &both.jobs[chats.jobs.len()..];
    assert_eq!(documents.len() as u32, 2 * BATCH_DOCUMENTS);
    assert!(documents.iter().all(|job| job.idle && job.prompt_len() + MAX_NEW_TOKENS <= LONG_CONTEXT));
    assert!(both.arrivals.is_sorted());
}

#[test]
fn what_two_requests_have_in_common_is_a_prefix_of_both() {
    let day = Traffic::generate(1, 2.0);
    let tokens = |job: &Job| {
        let answer = job.answers[0];
        let prompt = job.prompt_tokens().into_iter();
        prompt.chain((0..answer.len).map(|index| answer.token(index))).collect::<Vec<_>>()
    };
    for (job, other) in day.jobs.iter().zip(day.jobs.iter().skip(1)) {
        let common = job.common(other, 0) as usize;
        assert_eq!(tokens(job)[..common], tokens(other)[..common]);
    }
    let turn = day.jobs.iter().find(|job| job.next.is_some()).unwrap();
    let next = &day.jobs[turn.next.unwrap().1];
    assert!(next.common(turn, 0) >= turn.prompt_len(), "a next turn begins with the turn before it");
}

/// A quarter of an hour in a pool of half the size, so that every policy is put to use.
#[test]
fn whoever_serves_everybody_is_answered_and_blocks_leave_nobody_outside_without_need() {
    let shape = ModelShape::new(1, 1, 1, 32);
    let cache = CacheConfig::for_blocks(1024, &shape, KvType::F16)
        .and_then(|cache| cache.with_max_sequences(MAX_SEQUENCES))
        .and_then(|cache| cache.with_max_sequence_tokens(CONTEXT))
        .unwrap();
    let chats = Traffic::generate(1, 0.25);
    let both = Traffic::generate(1, 0.25).with_documents(1);
    let systems = systems::all(&cache);
    let days = systems::serve_all(&chats, &both, &cache, &systems).unwrap();
    for (system, day) in systems.iter().zip(&days) {
        let name = system.name;
        let traffic = if system.table == Table::Classes { &both } else { &chats };
        let branches = traffic.jobs.iter().filter(|job| job.parent.is_some()).count() as u64;
        let answered = day.finished + day.stopped + day.left;
        let jobs = traffic.jobs.len() as u64;
        // A chat that is left early does not ask again, nor is it branched off.
        assert!(answered <= jobs && answered + branches >= jobs, "{name:?}: {answered} of {jobs}");
        let Layout::Blocks(policy) = system.layout else { continue };
        let counters = day.counters;
        assert_eq!(counters.refused_with_room, 0, "{name:?}");
        assert_eq!(counters.preemptions > 0, system.overcommitted().is_some(), "{name:?}");
        assert_eq!(counters.swaps_out > 0, policy.swaps(), "{name:?}");
        assert_eq!(counters.hit_tokens > 0, policy.config.prefix_cache.is_some(), "{name:?}");
        assert_eq!(day.over_day.steps, traffic.steps, "{name:?}");
    }
}
