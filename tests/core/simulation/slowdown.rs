//! Nothing starves: a request ends within a bound that follows from what was there before it.
//!
//! In the worst case every step computes one row. Before a request ends, everything that came before it may be
//! computed, and computed again as often as it may be preempted. So may the request itself, whatever arrives while it
//! ages, and as many later requests as may pass it and those before it. A transfer that fails, a step that is dropped
//! and a cut cost at most all rows of all requests once more.

use paged_kv::{SchedulerConfig, SequenceId};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug)]
struct Allowance {
    steps: u64,
    used: u64,
    /// Requests that may still come later and go first: each one before it in line is passed a number of times.
    passes: u64,
}

/// Steps that each request has had, and may have.
#[derive(Debug)]
pub(crate) struct Slowdown {
    requests: BTreeMap<SequenceId, Allowance>,
    times: u64,
    ageing: u64,
    max_passed: u64,
    /// Most of its allowance that a request has used, in percent.
    pub(crate) worst: u64,
}

impl Slowdown {
    pub(crate) fn new(config: &SchedulerConfig) -> Self {
        Self {
            requests: BTreeMap::new(),
            times: u64::from(config.max_preemptions) + 2,
            ageing: 2 * u64::from(config.ageing_steps),
            max_passed: u64::from(config.max_passed),
            worst: 0,
        }
    }

    /// Something happened that costs all rows at most once more.
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
            for request in self.requests.values_mut() {
                if request.used <= self.ageing || request.passes > 0 {
                    request.steps += self.times * rows;
                }
                if request.used > self.ageing {
                    request.passes = request.passes.saturating_sub(1);
                }
            }
            let passes = self.max_passed * (self.requests.len() as u64 + 1);
            self.requests.insert(id, Allowance { steps: self.times * all + self.ageing, used: 0, passes });
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
