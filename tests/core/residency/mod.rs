//! Residency, case by case: who holds which block, for how long, and what happens when the pool is empty.
//!
//! Every test runs its plans on the simulated device. What a row sees must be exactly the sequence's own tokens, and the
//! next token follows from it; so whatever was shared, copied, swapped or computed again, a sequence that read one wrong
//! slot fails its test.

mod accounts;
mod auto;
mod bounds;
mod chats;
mod device_loss;
mod eviction;
mod isolation;
mod prefix;
mod priorities;
mod status;
mod swap;
mod tables;
mod transfers;
mod victims;

use crate::block_states::assert_states_sum;
use crate::model::answer;
use crate::scenarios::cache;
use crate::simulated_device::{SimulatedDevice, history};
use paged_kv::{
    Admission, BlockSwap, CacheConfig, FinishReason, Preemption, PreemptionMode, PreemptionReason,
    PrefixReport, Request, RequestId, RowResult, Schedule, Scheduler, SchedulerConfig, SequenceId, StepEvent,
    StepPlan, TransferReport,
};
use std::collections::BTreeMap;

/// `len` tokens that no other prompt begins with.
fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|position| 1000 * seed + 100 + position).collect()
}

/// Overcommitted admission and a prefix cache, by recomputation.
fn overcommitted() -> SchedulerConfig {
    SchedulerConfig {
        admission: Admission::Overcommitted { watermark_blocks: 0 },
        ..SchedulerConfig::default()
    }
}

/// The same without a prefix cache, by swapping.
fn swapping() -> SchedulerConfig {
    SchedulerConfig { preemption: PreemptionMode::Swap, prefix_cache: None, ..overcommitted() }
}

/// A pool of `num_blocks` blocks of 4 tokens, and a host pool.
fn pool(num_blocks: u32, host_blocks: u32) -> CacheConfig {
    cache(num_blocks, 4).with_host_blocks(host_blocks).unwrap()
}

/// What a step did.
struct Step {
    rows: u32,
    copies: usize,
    outs: Vec<BlockSwap>,
    ins: Vec<BlockSwap>,
    events: Vec<StepEvent>,
}

impl Step {
    fn tokens(&self) -> usize {
        self.events.iter().filter(|event| matches!(event, StepEvent::Token { .. })).count()
    }

    fn preempted(&self) -> Vec<(SequenceId, Preemption, PreemptionReason)> {
        let preempted = |event: &StepEvent| match *event {
            StepEvent::Preempted { sequence, how, why } => Some((sequence, how, why)),
            _ => None,
        };
        self.events.iter().filter_map(preempted).collect()
    }

    fn admitted(&self) -> Vec<(SequenceId, PrefixReport)> {
        let admitted = |event: &StepEvent| match *event {
            StepEvent::Admitted { sequence, prefix } => Some((sequence, prefix)),
            _ => None,
        };
        self.events.iter().filter_map(admitted).collect()
    }
}

/// A scheduler, its device, and every token that its sequences should have.
struct Served {
    scheduler: Scheduler,
    device: SimulatedDevice,
    tokens: BTreeMap<SequenceId, Vec<u32>>,
    ends: BTreeMap<SequenceId, FinishReason>,
    /// Transfers are reported only when a test says so.
    late: bool,
    steps: u32,
}

impl Served {
    fn new(config: SchedulerConfig, cache: CacheConfig) -> Self {
        Self {
            device: SimulatedDevice::new(&cache),
            scheduler: Scheduler::new(config, cache).unwrap(),
            tokens: BTreeMap::new(),
            ends: BTreeMap::new(),
            late: false,
            steps: 0,
        }
    }

    fn add(&mut self, tokens: &[u32], shape: impl Fn(Request) -> Request) -> RequestId {
        let id = self.scheduler.add(shape(Request::new(tokens))).unwrap();
        self.tokens.extend((0..8).map(|sample| (id.sample(sample), tokens.to_vec())));
        id
    }

    fn extend(&mut self, id: RequestId, tokens: &[u32], shape: impl Fn(Request) -> Request) {
        self.scheduler.extend(id, shape(Request::new(tokens))).unwrap();
        self.tokens.get_mut(&id.sample(0)).unwrap().extend(tokens);
        self.ends.remove(&id.sample(0));
    }

    /// Every count sums, whatever the state.
    fn check(&self) {
        self.scheduler.assert_consistent();
        assert_states_sum(self.scheduler.cache());
        let cache = self.scheduler.stats().cache;
        let sum = cache.free_blocks + cache.cached_blocks + cache.held_blocks + cache.in_transfer_blocks;
        assert_eq!(sum, cache.num_blocks, "I1: {cache:?}");
        let sum = cache.host_free_blocks + cache.host_held_blocks + cache.host_in_transfer_blocks;
        assert_eq!(sum, cache.host_blocks, "I1: {cache:?}");
        assert!(cache.pinned_blocks <= cache.cached_blocks && cache.shared_blocks <= cache.held_blocks);
    }

    fn report(&mut self, index: usize) {
        let report = self.device.complete(index).expect("a transfer under way");
        self.scheduler.complete_transfers(&[report]);
        self.check();
    }

    fn lose(&mut self, index: usize) {
        let report = self.device.complete(index).expect("a transfer under way");
        self.scheduler.complete_transfers(&[TransferReport { complete: false, ..report }]);
        self.check();
    }

    fn schedule(&mut self) -> Schedule {
        while !self.late && self.device.num_transfers() > 0 {
            self.report(0);
        }
        let planned = self.scheduler.schedule();
        self.check();
        planned
    }

    fn plan(&mut self) -> StepPlan {
        match self.schedule() {
            Schedule::Step(plan) => plan,
            other => panic!("no step but {other:?}"),
        }
    }

    /// Runs a plan on the device, checks what its rows see, and commits it.
    fn commit(&mut self, plan: StepPlan) -> Step {
        self.commit_with(plan, |_, token| RowResult::Token(token))
    }

    fn commit_with(&mut self, plan: StepPlan, result: impl Fn(SequenceId, u32) -> RowResult) -> Step {
        let seen = self.device.run(&plan);
        let mut results = Vec::new();
        for row in plan.logit_rows() {
            let tokens = &self.tokens[&row.sequence];
            assert_eq!(row.next_position as usize, tokens.len());
            assert_eq!(seen[row.row as usize], history(tokens), "what {:?} sees", row.sequence);
            results.push(result(row.sequence, answer(history(tokens), row.sequence.sample())));
        }
        let (rows, copies) = (plan.num_rows(), plan.block_copies().len());
        let (outs, ins) = (plan.swap_outs().to_vec(), plan.swap_ins().to_vec());
        let events = self.scheduler.commit(plan, &results).unwrap().to_vec();
        for event in &events {
            match *event {
                StepEvent::Token { sequence, token } => self.tokens.get_mut(&sequence).unwrap().push(token),
                StepEvent::Finished { sequence, reason, .. } => {
                    assert_eq!(self.ends.insert(sequence, reason), None, "{sequence:?} ends twice");
                }
                _ => {}
            }
        }
        self.check();
        self.steps += 1;
        Step { rows, copies, outs, ins, events }
    }

    fn step(&mut self) -> Step {
        let plan = self.plan();
        self.commit(plan)
    }

    /// Steps until `done`.
    fn steps_until(&mut self, done: impl Fn(&Self, &Step) -> bool) -> Step {
        for _ in 0..10_000 {
            let step = self.step();
            if done(self, &step) {
                return step;
            }
        }
        panic!("10,000 steps");
    }

    /// Runs to the end; every step computes something.
    fn finish(&mut self) {
        for _ in 0..10_000 {
            match self.schedule() {
                Schedule::Step(plan) => drop(self.commit(plan)),
                Schedule::Idle => return,
                Schedule::Waiting(reason) => panic!("nothing runs: {reason:?}"),
            }
        }
        panic!("no end after 10,000 steps");
    }

    /// What was generated after a prompt, checked to be what a run without any other sequence generates.
    fn answers(&self, id: impl Into<SequenceId>, prompt: &[u32]) -> usize {
        let id = id.into();
        let tokens = &self.tokens[&id];
        assert!(tokens.starts_with(prompt));
        let mut alone = prompt.to_vec();
        while alone.len() < tokens.len() {
            alone.push(answer(history(&alone), id.sample()));
        }
        assert_eq!(*tokens, alone, "{id:?} differs from a run alone");
        tokens.len() - prompt.len()
    }

    /// Computes a prompt and one token. Returns what was found of it.
    fn serve(&mut self, tokens: &[u32], shape: impl Fn(Request) -> Request) -> PrefixReport {
        let id = self.add(tokens, |request| shape(request.max_new_tokens(1))).sample(0);
        let mut found = None;
        while !self.ends.contains_key(&id) {
            let admitted = self.step().admitted();
            found = found.or(admitted.iter().find(|admitted| admitted.0 == id).map(|admitted| admitted.1));
        }
        found.expect("it was let in")
    }

    /// Takes `blocks` blocks for a step and gives them back with nothing in them that could be found.
    fn squeeze(&mut self, blocks: u32) {
        let block_size = self.scheduler.cache().config().block_size();
        let tokens = prompt(900 + self.steps, blocks * block_size - 1);
        let id = self.add(&tokens, |request| request.max_new_tokens(1)).sample(0);
        while !self.ends.contains_key(&id) {
            let plan = self.plan();
            self.commit_with(
                plan,
                |sequence, token| {
                    if sequence == id { RowResult::Invalid } else { RowResult::Token(token) }
                },
            );
        }
    }
}
