//! Whose blocks are taken.

use super::{Served, overcommitted, pool, prompt, swapping};
use paged_kv::{Preemption, PreemptionMode, Priority, SchedulerConfig, VictimPolicy};

const POLICIES: [VictimPolicy; 3] =
    [VictimPolicy::Requester, VictimPolicy::LowestPriority, VictimPolicy::LeastLost];

/// Three sequences of 3, 2 and 4 blocks fill the pool, and all want another one in the same step, the first one first.
fn first_victims(config: SchedulerConfig, priorities: [Priority; 3]) -> Vec<(usize, Preemption)> {
    let mut served = Served::new(config, pool(9, 16));
    let lens = [9, 5, 13];
    let requests: Vec<_> = (0..3)
        .map(|place| {
            let tokens = prompt(place as u32 + 1, lens[place]);
            served.add(&tokens, |request| request.max_new_tokens(8).priority(priorities[place]))
        })
        .collect();
    let step = served.steps_until(|_, step| !step.preempted().is_empty());
    let place =
        |id: paged_kv::SequenceId| requests.iter().position(|&request| request == id.request()).unwrap();
    let victims = step.preempted().into_iter().map(|(id, how, _)| (place(id), how)).collect();
    served.finish();
    for (place, request) in requests.iter().enumerate() {
        assert_eq!(served.answers(*request, &prompt(place as u32 + 1, lens[place])), 8);
    }
    victims
}

#[test]
fn each_policy_takes_its_own_victim() {
    for (victims, place, blocks) in [
        (VictimPolicy::Requester, 0, 3),
        (VictimPolicy::LowestPriority, 2, 4),
        (VictimPolicy::LeastLost, 1, 2),
    ] {
        let swap = SchedulerConfig { victims, ..swapping() };
        assert_eq!(first_victims(swap, Default::default()), [(place, Preemption::Swapped { blocks })]);
        let recompute = SchedulerConfig { victims, prefix_cache: None, ..overcommitted() };
        let dropped = Preemption::Dropped { tokens: 4 * blocks };
        assert_eq!(first_victims(recompute, Default::default()), [(place, dropped)], "{victims:?}");
    }
}

#[test]
fn a_higher_class_is_no_victim_of_a_lower_one() {
    // The one with the least to lose is interactive; or the last in line is.
    let [normal, interactive] = [Priority::Normal, Priority::Interactive];
    let least = SchedulerConfig { victims: VictimPolicy::LeastLost, ..swapping() };
    let victims = first_victims(least, [normal, interactive, normal]);
    assert!(victims.iter().all(|&(place, _)| place != 1), "{victims:?}");
    let lowest = SchedulerConfig { victims: VictimPolicy::LowestPriority, ..swapping() };
    let victims = first_victims(lowest, [normal, normal, interactive]);
    assert!(victims.iter().all(|&(place, _)| place != 2), "{victims:?}");
}

#[test]
fn b51_requests_that_outgrow_the_pool_finish_under_every_policy() {
    for victims in POLICIES {
        for preemption in [PreemptionMode::Recompute, PreemptionMode::Swap, PreemptionMode::Auto] {
            for prefix_cache in [None, Some(Default::default())] {
                let config = SchedulerConfig { victims, preemption, prefix_cache, ..overcommitted() };
                let mut served = Served::new(config, pool(6, 8));
                let requests =
                    [1, 2].map(|seed| served.add(&prompt(seed, 8), |request| request.max_new_tokens(8)));
                // Every step computes a token: `finish` takes nothing else.
                served.finish();
                for (request, seed) in requests.into_iter().zip(1..) {
                    assert_eq!(served.answers(request, &prompt(seed, 8)), 8);
                }
                let preemptions = served.scheduler.stats().preemptions;
                assert!((1..=4).contains(&preemptions), "{victims:?}, {preemption:?}: {preemptions}");
                assert!(served.steps <= 32, "{victims:?}, {preemption:?}: {} steps", served.steps);
            }
        }
    }
}

#[test]
fn many_requests_in_a_small_pool_finish_under_every_policy() {
    for victims in POLICIES {
        for preemption in [PreemptionMode::Recompute, PreemptionMode::Swap] {
            for max_preemptions in [0, 1, 3] {
                let config = SchedulerConfig { victims, preemption, max_preemptions, ..overcommitted() };
                let mut served = Served::new(config, pool(12, 10));
                let requests: Vec<_> = (0..12u32)
                    .map(|seed| {
                        let tokens = prompt(seed, 3 + 5 * seed % 17);
                        (served.add(&tokens, |request| request.max_new_tokens(10 + seed % 3 * 5)), tokens)
                    })
                    .collect();
                served.finish();
                for (seed, (request, tokens)) in requests.iter().enumerate() {
                    assert_eq!(served.answers(*request, tokens), 10 + seed % 3 * 5);
                }
                let stats = served.scheduler.stats();
                assert!(stats.preemptions <= 12 * u64::from(max_preemptions));
                assert_eq!(stats.cache.held_blocks, 0);
            }
        }
    }
}
