//! What a long line of waiting requests costs.

use crate::scenarios::{cache, plain, step};
use paged_kv::{Request, Scheduler};
use std::time::{Duration, Instant};

const ROUNDS: usize = 5;
const ABORTS: usize = 100;

/// How long a hundred requests take that are given up, from all over a line of `len`: the fastest of five rounds.
fn time_to_give_up(len: usize) -> Duration {
    let mut scheduler = Scheduler::new(plain(), cache(16, 4)).unwrap();
    let mut add = |max| scheduler.add(Request::new([1]).max_new_tokens(max)).unwrap();
    // One runs with the whole pool, and all others wait.
    add(63);
    let ids: Vec<_> = (0..len).map(|_| add(1)).collect();
    step(&mut scheduler);
    assert_eq!(scheduler.stats().waiting as usize, len);
    let rounds = (0..ROUNDS).map(|round| {
        let start = Instant::now();
        for number in 0..ABORTS {
            let place = (ABORTS * round + number) * 7 % (ROUNDS * ABORTS);
            assert!(scheduler.abort(ids[place * (len / (ROUNDS * ABORTS))]).unwrap());
        }
        start.elapsed()
    });
    let fastest = rounds.min().unwrap();
    assert_eq!(scheduler.stats().waiting as usize, len - ROUNDS * ABORTS);
    fastest
}

#[test]
fn b77_giving_up_a_place_in_line_does_not_walk_the_line() {
    let (short, long) = (time_to_give_up(1_000), time_to_give_up(100_000));
    println!("100 requests of 1,000: {short:?}, of 100,000: {long:?}");
    // A line a hundred times as long adds to the depth of some tree, and does not take a hundred times as long.
    assert!(long < 10 * short, "{short:?} in a line of 1,000 and {long:?} in one of 100,000");
}
