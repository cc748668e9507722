//! The people: ask when it is time, read, stop, branch off, leave, and note how long they waited.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::generator::{Job, Traffic};
use crate::measure::{Counters, PoolUse, Record};

/// What answers, step by step. It knows a request by its place among the jobs.
pub(crate) trait Server {
    /// Takes a request.
    fn submit(&mut self, job: usize);
    /// Ends a request, whatever its state.
    fn cancel(&mut self, job: usize);
    /// Computes a step, and tells what came of it. Returns false if there was nothing to do.
    fn step(&mut self, told: &mut Vec<Told>) -> bool;
    /// The pool after the last step.
    fn pool(&self) -> PoolUse;
    fn counters(&self) -> Counters;
}

/// What a step brought.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Told {
    Token {
        job: usize,
    },
    /// The request's last sample has ended.
    Finished {
        job: usize,
    },
}

/// Something that people do at a given step; at the same step, in the order of the jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Act {
    Ask,
    Leave,
}

#[derive(Clone, Copy, Default)]
struct Progress {
    asked_at: Option<u64>,
    tokens: u32,
    ended: bool,
}

struct People<'a> {
    jobs: &'a [Job],
    progress: Vec<Progress>,
    plans: BinaryHeap<Reverse<(u64, usize, Act)>>,
    record: Record,
}

/// Serves all requests, to the last answer.
pub(crate) fn serve(traffic: &Traffic, server: &mut dyn Server) -> Record {
    let plans = traffic.arrivals.iter().map(|&(step, job)| Reverse((step, job, Act::Ask))).collect();
    let progress = vec![Progress::default(); traffic.jobs.len()];
    let mut people = People { jobs: &traffic.jobs, progress, plans, record: Record::new(traffic.steps) };
    let mut told = Vec::new();
    let mut now = 0;
    loop {
        people.act(server, now);
        told.clear();
        let busy = server.step(&mut told);
        for &told in &told {
            people.hear(server, told, now + 1);
        }
        let next = match people.plans.peek() {
            _ if busy => now + 1,
            Some(&Reverse((step, ..))) => step.max(now + 1),
            None => break,
        };
        people.record.add(now, next - now, &server.pool());
        now = next;
    }
    people.record.counters = server.counters();
    people.record
}

impl People<'_> {
    /// Does what is due.
    fn act(&mut self, server: &mut dyn Server, now: u64) {
        while let Some(&Reverse((step, job, act))) = self.plans.peek() {
            if step > now {
                break;
            }
            self.plans.pop();
            match act {
                Act::Ask => self.ask(server, job, now),
                Act::Leave if !self.progress[job].ended => {
                    server.cancel(job);
                    self.progress[job].ended = true;
                    self.record.left += 1;
                }
                Act::Leave => {}
            }
        }
    }

    fn ask(&mut self, server: &mut dyn Server, job: usize, now: u64) {
        self.progress[job].asked_at = Some(now);
        server.submit(job);
        if let Some(steps) = self.jobs[job].leave_after {
            self.plans.push(Reverse((now + steps.max(1), job, Act::Leave)));
        }
    }

    fn hear(&mut self, server: &mut dyn Server, told: Told, now: u64) {
        match told {
            Told::Token { job } => self.read(server, job, now),
            Told::Finished { job } => {
                self.record.finished += 1;
                self.end(job, now);
            }
        }
    }

    fn read(&mut self, server: &mut dyn Server, job: usize, now: u64) {
        let progress = &mut self.progress[job];
        if progress.tokens == 0 {
            let class = usize::from(self.jobs[job].idle);
            self.record.first_token_steps[class].push(now - progress.asked_at.unwrap_or(now));
        }
        progress.tokens += 1;
        let tokens = progress.tokens;
        if let Some((_, branch)) = self.jobs[job].branch.filter(|&(at, _)| at == tokens) {
            self.ask(server, branch, now);
        }
        if self.jobs[job].stop_after == Some(tokens) {
            server.cancel(job);
            self.record.stopped += 1;
            self.end(job, now);
        }
    }

    fn end(&mut self, job: usize, now: u64) {
        self.progress[job].ended = true;
        if let Some((pause, next)) = self.jobs[job].next {
            self.plans.push(Reverse((now + pause, next, Act::Ask)));
        }
    }
}
