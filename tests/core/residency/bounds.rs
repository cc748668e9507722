//! At their preemption bound: requests that may not be preempted any more, in a pool that does not hold them all.

use super::{Served, overcommitted, pool, prompt, swapping};
use paged_kv::{Priority, SchedulerConfig, StepEvent, VictimPolicy};

#[test]
fn two_requests_at_their_bound_in_a_full_pool_run_one_after_the_other() {
    let recomputing = SchedulerConfig { prefix_cache: None, ..overcommitted() };
    for config in [recomputing, swapping(), overcommitted()] {
        for victims in [VictimPolicy::Requester, VictimPolicy::LowestPriority, VictimPolicy::LeastLost] {
            let config = SchedulerConfig { max_preemptions: 1, victims, ..config };
            let mut served = Served::new(config, pool(6, 8));
            let requests =
                [1, 2].map(|seed| served.add(&prompt(seed, 8), |request| request.max_new_tokens(8)));
            served.step();
            // A chat needs the whole pool: both are displaced, and are at their bound.
            let chat = |seed: u32| prompt(seed, 23);
            let interactive =
                |request: paged_kv::Request| request.max_new_tokens(1).priority(Priority::Interactive);
            served.add(&chat(3), interactive);
            let step = served.step();
            assert_eq!((step.preempted().len(), step.tokens()), (2, 1));
            // 4 + 4 blocks are more than 6: only one is let in, with everything reserved.
            let step = served.step();
            assert_eq!((step.admitted().len(), served.scheduler.stats().running), (1, 1), "{victims:?}");
            // Nothing displaces it now: the next chat waits.
            let waits = served.add(&chat(4), interactive);
            let mut ends = Vec::new();
            while served.ends.len() < 4 {
                let step = served.step();
                assert_eq!(step.preempted(), [], "{victims:?}");
                ends.extend(step.events.into_iter().filter_map(|event| match event {
                    StepEvent::Finished { sequence, preemptions, .. } => {
                        Some((sequence.request(), preemptions))
                    }
                    _ => None,
                }));
            }
            assert_eq!(ends, [(requests[0], 1), (waits, 0), (requests[1], 1)], "{victims:?}");
            for (request, seed) in requests.into_iter().zip(1..) {
                assert_eq!(served.answers(request, &prompt(seed, 8)), 8);
            }
        }
    }
}
