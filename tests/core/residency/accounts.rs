//! The counts of both pools, state by state. (That they sum is checked after every operation of every test here.)

use super::swap::{both_finish, two_that_outgrow};
use super::{Served, pool, prompt, swapping};
use paged_kv::{Admission, Request, SchedulerConfig};

/// Free, held and in transfer in the host pool.
fn host(served: &Served) -> (u32, u32, u32) {
    served.check();
    let cache = served.scheduler.stats().cache;
    (cache.host_free_blocks, cache.host_held_blocks, cache.host_in_transfer_blocks)
}

#[test]
fn the_host_pools_counts_follow_its_blocks_out_and_in() {
    let (mut served, requests, _) = two_that_outgrow(swapping(), 8);
    served.late = true;
    assert_eq!(host(&served), (5, 0, 3), "on their way out");
    served.report(0);
    assert_eq!(host(&served), (5, 3, 0), "arrived");
    let plan = loop {
        let plan = served.plan();
        if !plan.swap_ins().is_empty() {
            break plan;
        }
        served.commit(plan);
    };
    assert_eq!(host(&served), (5, 0, 3), "to be brought back");
    drop(plan);
    let plan = served.plan();
    assert_eq!(host(&served), (5, 0, 3), "planned again");
    served.commit(plan);
    assert_eq!(host(&served), (5, 0, 3), "still being read");
    served.report(0);
    assert_eq!(host(&served), (8, 0, 0));
    served.late = false;
    both_finish(&mut served, requests);
}

#[test]
fn what_is_lost_is_free_in_the_host_pool() {
    let (mut served, requests, _) = two_that_outgrow(swapping(), 8);
    served.late = true;
    served.lose(0);
    assert_eq!(host(&served), (8, 0, 0));
    served.late = false;
    both_finish(&mut served, requests);
}

#[test]
fn what_is_aborted_on_its_way_stays_in_transfer_until_it_has_arrived() {
    let (mut served, requests, _) = two_that_outgrow(swapping(), 8);
    served.late = true;
    served.scheduler.abort(requests[1]).unwrap();
    assert_eq!(host(&served), (5, 0, 3));
    served.report(0);
    assert_eq!(host(&served), (8, 0, 0));
}

#[test]
fn the_pools_counts_follow_its_blocks_from_free_to_cached() {
    let guaranteed = SchedulerConfig { admission: Admission::Guaranteed, ..SchedulerConfig::default() };
    let mut served = Served::new(guaranteed, pool(16, 0));
    let counts = |served: &Served| {
        served.check();
        let cache = served.scheduler.stats().cache;
        let states = (cache.free_blocks, cache.cached_blocks, cache.held_blocks, cache.in_transfer_blocks);
        (states, cache.shared_blocks, cache.promised_blocks)
    };
    assert_eq!(counts(&served), ((16, 0, 0, 0), 0, 0));
    let first = served.add(&prompt(1, 10), |request| request.max_new_tokens(6));
    let plan = served.plan();
    assert_eq!(counts(&served), ((13, 0, 3, 0), 0, 4));
    served.commit(plan);
    // A branch in the middle of the third block: the first writer copies it.
    let branch = served.scheduler.fork(first, 10, Request::new([7]).max_new_tokens(2)).unwrap();
    served.tokens.insert(branch.sample(0), [prompt(1, 10), vec![7]].concat());
    assert_eq!(counts(&served), ((13, 0, 3, 0), 3, 4 + 2));
    let plan = served.plan();
    assert_eq!(plan.block_copies().len(), 1);
    assert_eq!(counts(&served), ((12, 0, 4, 0), 2, 4 + 2));
    served.commit(plan);
    served.scheduler.abort(branch).unwrap();
    served.finish();
    // 15 tokens of the first one were computed: three full blocks stay to be found.
    assert_eq!(counts(&served), ((13, 3, 0, 0), 0, 0));
}
