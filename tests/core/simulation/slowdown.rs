//! Nothing starves: a request ends within a bound that follows from what was there before it.
//!
//! In the worst case every step computes one row. Before a request ends, everything that came before it may be computed,
//! and computed again as often as it may be preempted, and so may itself and whatever arrives while it ages. A transfer
//! that fails, a step that is dropped and a cut cost at most all rows of everybody once more.

use paged_kv::{SchedulerConfig, SequenceId};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug)]
struct Allowance {
    steps: u64,
    used: u64,
}

/// Steps that each request has had, and may have.
#[derive(Debug)]
pub(crate) struct Slowdown {
    requests: BTreeMap<SequenceId, Allowance>,
    times: u64,
    ageing: u64,
    /// Most of its allowance that a request has used, in percent.
    pub(crate) worst: u64,
}

impl Slowdown {
    pub(crate) fn new(config: &SchedulerConfig) -> Self {
        Self {
            requests: BTreeMap::new(),
            times: u64::from(config.max_preemptions) + 2,
            ageing: 2 * u64::from(config.ageing_steps),
            worst: 0,
        }
    }

    /// Something happened that costs everybody's rows at most once more.
    pub(crate) fn setback(&mut self, unfinished: &[(SequenceId, u64)]) {
        let rows: u64 = unfinished.iter().map(|(_, rows)| rows).sum();
        self.requests.values_mut().for_each(|request| request.steps += rows);
    }

    /// Requests that were not there before.
    pub(crate) fn arrive(&mut self, unfinished: &[(SequenceId, u64)]) {
        let all: u64 = unfinished.iter().map(|(_, rows)| rows).sum();
        self.requests.retain(|id, _| unfinished.binary_search_by_key(id, |(id, _)| *id).is_ok());
        for &(id, rows) in unfinished {
            if self.requests.contains_key(&id) {
                continue;
            }
            for request in self.requests.values_mut().filter(|request| request.used <= self.ageing) {
                request.steps += self.times * rows;
            }
            self.requests.insert(id, Allowance { steps: self.times * all + self.ageing, used: 0 });
        }
    }

    /// A step was committed.
    pub(crate) fn step(&mut self) {
        for (id, request) in &mut self.requests {
            request.used += 1;
            self.worst = self.worst.max(100 * request.used / request.steps.max(1));
            assert!(request.used <= request.steps, "I9: {id:?} has not ended after {} steps", request.used);
        }
    }
}
