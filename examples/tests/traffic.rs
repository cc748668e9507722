//! The `traffic` example: its allocator of extents, and the traffic that it makes.
#![allow(clippy::unwrap_used)]
// Only a part of the example is looked at.
#![allow(dead_code)]

#[path = "../traffic/arrivals.rs"]
mod arrivals;
#[path = "../traffic/extents.rs"]
mod extents;
#[path = "../traffic/generator.rs"]
mod generator;
#[path = "../traffic/parameters.rs"]
mod parameters;

use extents::FirstFit;
use generator::{Job, Traffic};
use parameters::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

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
        assert!((mean / distribution.mean - 1.0).abs() < 0.02, "{mean} is not {distribution:?}");
        assert!((draws[50_000] / median - 1.0).abs() < 0.02, "{} is not {median}", draws[50_000]);
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
    assert!((day.arrivals.len() as f64 / expected - 1.0).abs() < 0.1, "{} chats", day.arrivals.len());

    let turns: Vec<&Job> = day.jobs.iter().filter(|job| job.parent.is_none()).collect();
    let share = |counts: fn(&Job) -> bool, of: usize| {
        turns.iter().filter(|job| counts(job)).count() as f64 / of as f64
    };
    let single = turns.iter().filter(|job| job.answers.len() == 1).count();
    assert!((share(|job| job.answers.len() > 1, turns.len()) - SEVERAL_ANSWERS).abs() < 0.01);
    assert!((share(|job| job.stop_after.is_some(), single) - STOP).abs() < 0.01);
    assert!((share(|job| job.leave_after.is_some(), day.arrivals.len()) - LEAVE).abs() < 0.02);
    // Some branches do not fit the context, and some chats end for the same reason.
    assert!((share(|job| job.branch.is_some(), single) - BRANCH).abs() < 0.02);
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
