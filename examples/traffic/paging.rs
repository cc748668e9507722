//! (b) Paging, and (c) paging and prefix sharing: the crate's scheduler over a simulated device, which answers what the
//! traffic says, and reports what a step has moved to and from the host pool some steps later.

use std::collections::{BTreeSet, VecDeque};

use paged_kv::{
    Admission, CacheConfig, Error, FinishReason, PreemptionMode, Priority, Request, RequestId, RowResult,
    Schedule, Scheduler, SchedulerConfig, SequenceId, StepEvent, StepPlan, TransferReport, WaitReason,
};

use crate::generator::{END, Job, Traffic};
use crate::ledger::{Door, Ledger};
use crate::measure::{Counters, PoolUse};
use crate::parameters::{MAX_NEW_TOKENS, MAX_SEQUENCES, RATES, STEP_TOKENS, TRANSFER_STEPS};
use crate::serve::{Server, Told};

/// One way to run the scheduler.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    pub(crate) config: SchedulerConfig,
    /// Chats are interactive and jobs that nobody waits for idle; otherwise all are alike.
    pub(crate) classes: bool,
}

impl Policy {
    pub(crate) fn swaps(&self) -> bool {
        self.config.preemption != PreemptionMode::Recompute
    }
}

/// A request that waits or runs.
#[derive(Clone, Debug)]
pub(crate) struct Live {
    pub(crate) job: usize,
    pub(crate) id: RequestId,
    /// The step at which it stands in line: that of its arrival, and what its class adds.
    rank: u64,
    /// Everything it may need is set aside for it.
    pub(crate) promised: bool,
    /// Nothing, once a sample has ended; otherwise how often it has lost its blocks.
    pub(crate) samples: Vec<Option<u32>>,
}

/// Who is where. Of samples that have not parted, only the first one is.
#[derive(Debug, Default)]
pub(crate) struct Crowd {
    /// By arrival, which is the order of their ids.
    pub(crate) live: Vec<Live>,
    /// In line, the first one first.
    pub(crate) line: BTreeSet<(u64, SequenceId)>,
    pub(crate) running: BTreeSet<SequenceId>,
}

impl Crowd {
    pub(crate) fn find(&self, id: RequestId) -> &Live {
        &self.live[self.place_of(id)]
    }

    fn place_of(&self, id: RequestId) -> usize {
        self.live.binary_search_by_key(&id, |live| live.id).expect("a request of this server")
    }

    fn enter(&mut self, sequence: SequenceId, guaranteed: bool) {
        let place = self.place_of(sequence.request());
        self.line.remove(&(self.live[place].rank, sequence));
        self.live[place].promised = guaranteed;
        self.running.insert(sequence);
    }

    fn leave(&mut self, sequence: SequenceId) {
        let place = self.place_of(sequence.request());
        let live = &mut self.live[place];
        live.samples[sequence.sample() as usize].iter_mut().for_each(|preemptions| *preemptions += 1);
        self.running.remove(&sequence);
        self.line.insert((live.rank, sequence));
    }

    /// Returns whether it was the last sample.
    fn end(&mut self, sequence: SequenceId) -> bool {
        let place = self.place_of(sequence.request());
        self.running.remove(&sequence);
        self.live[place].samples[sequence.sample() as usize] = None;
        let is_last = self.live[place].samples.iter().all(Option::is_none);
        if is_last {
            self.live.remove(place);
        }
        is_last
    }

    fn cancel(&mut self, job: usize) -> Option<RequestId> {
        let live = self.live.extract_if(.., |live| live.job == job).next()?;
        for sample in 0..live.samples.len() as u32 {
            self.running.remove(&live.id.sample(sample));
            self.line.remove(&(live.rank, live.id.sample(sample)));
        }
        Some(live.id)
    }
}

pub(crate) struct Paging<'a> {
    jobs: &'a [Job],
    policy: Policy,
    scheduler: Scheduler,
    crowd: Crowd,
    ledger: Ledger,
    /// What steps have moved, and when that is reported.
    transfers: VecDeque<(u64, TransferReport)>,
    now: u64,
    lacks_memory: bool,
    /// A sequence has come in, ended or lost blocks since the first in line was looked at.
    changed: bool,
    /// Blocks that promises may take, held ones among them, as of the last change.
    promised: u32,
    idle_preemptions: u64,
}

impl<'a> Paging<'a> {
    pub(crate) fn new(traffic: &'a Traffic, policy: Policy, cache: CacheConfig) -> Result<Self, Error> {
        let host_blocks = cache.num_blocks();
        let cache = if policy.swaps() { cache.with_host_blocks(host_blocks)? } else { cache };
        let mut scheduler = Scheduler::new(policy.config, cache)?;
        scheduler.set_rates(RATES);
        Ok(Self {
            jobs: &traffic.jobs,
            policy,
            scheduler,
            crowd: Crowd::default(),
            ledger: Ledger::new(policy.config),
            transfers: VecDeque::new(),
            now: 0,
            lacks_memory: false,
            changed: false,
            promised: 0,
            idle_preemptions: 0,
        })
    }

    fn is_guaranteed(&self) -> bool {
        self.policy.config.admission == Admission::Guaranteed
    }

    fn priority(&self, job: &Job) -> Priority {
        match (self.policy.classes, job.idle) {
            (false, _) => Priority::Normal,
            (true, false) => Priority::Interactive,
            (true, true) => Priority::Idle,
        }
    }

    /// The request as the app sends it: as a branch of one that runs, where there is one. Returns whether it is promised
    /// what it needs.
    fn add(&mut self, job: &Job) -> (RequestId, bool) {
        let priority = self.priority(job);
        let request = |tokens| {
            Request::new(tokens)
                .max_new_tokens(MAX_NEW_TOKENS)
                .samples(job.answers.len() as u32)
                .stop_tokens(&[END])
                .priority(priority)
        };
        if let Some((parent, common)) = job.parent {
            let parent = self.crowd.live.iter().find(|live| live.job == parent).map(|live| live.id);
            let own = request(job.prompt_tokens().split_off(common as usize));
            // What cannot be promised to a branch now waits in line as a request of its own.
            let branch = parent.and_then(|id| self.scheduler.fork(id, common as usize, own).ok());
            if let Some(branch) = branch {
                return (branch, self.is_guaranteed());
            }
        }
        let whole = request(job.prompt_tokens());
        (self.scheduler.add(whole).expect("the pool holds every request alone"), false)
    }

    fn results(&self, plan: &StepPlan) -> Vec<RowResult> {
        let answer = |sequence: SequenceId, position: u32| {
            let job = &self.jobs[self.crowd.find(sequence.request()).job];
            job.answers[sequence.sample() as usize].token(position - job.prompt_len())
        };
        plan.logit_rows()
            .iter()
            .map(|row| RowResult::Token(answer(row.sequence, row.next_position)))
            .collect()
    }

    /// Takes note of who came in and who lost its blocks. Returns whether anybody did.
    fn follow(&mut self, events: &[StepEvent]) -> bool {
        let mut preempted = false;
        for event in events {
            self.changed |= !matches!(event, StepEvent::Token { .. });
            match *event {
                StepEvent::Admitted { sequence, .. } => self.crowd.enter(sequence, self.is_guaranteed()),
                StepEvent::Preempted { sequence, .. } => {
                    preempted = true;
                    let idle = self.jobs[self.crowd.find(sequence.request()).job].idle;
                    self.idle_preemptions += u64::from(idle);
                    self.crowd.leave(sequence);
                }
                _ => {}
            }
        }
        preempted
    }

    fn take_tokens(&mut self, events: &[StepEvent], told: &mut Vec<Told>) {
        for &event in events {
            match event {
                StepEvent::Token { sequence, .. } => {
                    self.crowd.running.insert(sequence);
                    told.push(Told::Token { job: self.crowd.find(sequence.request()).job });
                }
                // No one waits for the end of those that were aborted.
                StepEvent::Finished { sequence, reason, .. } if reason != FinishReason::Aborted => {
                    let job = self.crowd.find(sequence.request()).job;
                    if self.crowd.end(sequence) {
                        told.push(Told::Finished { job });
                    }
                }
                _ => {}
            }
        }
    }

    fn compute(&mut self, plan: StepPlan, told: &mut Vec<Told>) {
        let results = self.results(&plan);
        let rows_left = plan.num_rows() < STEP_TOKENS;
        // While those that run only write on, less becomes free, and none gets in.
        let reads = plan.num_rows() > plan.num_sequences();
        let changes = std::mem::take(&mut self.changed) || reads;
        let has_cache = self.policy.config.prefix_cache.is_some();
        let door = (changes && rows_left)
            .then(|| Door::look(self.jobs, &self.crowd, &self.scheduler, self.promised, has_cache))
            .flatten();
        if !(plan.swap_outs().is_empty() && plan.swap_ins().is_empty()) {
            let report = TransferReport { step: plan.step(), complete: true };
            self.transfers.push_back((self.now + TRANSFER_STEPS, report));
        }
        let events = self.scheduler.commit(plan, &results).expect("the outstanding plan").to_vec();
        let preempted = self.follow(&events);
        let rows_left = rows_left && self.crowd.running.len() < MAX_SEQUENCES as usize;
        if changes || self.changed {
            self.lacks_memory = rows_left && !self.crowd.line.is_empty();
        }
        if let Some(door) = door.filter(|_| self.lacks_memory && !preempted) {
            self.lacks_memory = !door.waits_for_twin(&self.crowd);
            let arriving = !self.transfers.is_empty();
            self.ledger.check(self.jobs, &self.crowd, &self.scheduler, &door, arriving);
        }
        self.take_tokens(&events, told);
        if self.changed && self.is_guaranteed() {
            self.promised = self.scheduler.stats().cache.promised_blocks;
        }
    }
}

impl Server for Paging<'_> {
    fn submit(&mut self, index: usize) {
        let job = &self.jobs[index];
        let (id, promised) = self.add(job);
        let behind = u64::from(self.policy.config.ageing_steps) * self.priority(job) as u64;
        let stats = self.scheduler.stats();
        let rank = stats.steps + behind;
        self.promised = stats.cache.promised_blocks;
        self.crowd.live.push(Live {
            job: index,
            id,
            rank,
            promised,
            samples: vec![Some(0); job.answers.len()],
        });
        self.crowd.line.insert((rank, id.sample(0)));
        self.changed = true;
    }

    fn cancel(&mut self, job: usize) {
        if let Some(id) = self.crowd.cancel(job) {
            self.scheduler.abort(id).expect("an id of this scheduler");
            self.changed = true;
        }
    }

    fn step(&mut self, told: &mut Vec<Told>) -> bool {
        self.now += 1;
        while let Some(&(_, report)) = self.transfers.front().filter(|&&(due, _)| due <= self.now) {
            self.transfers.pop_front();
            self.changed = true;
            self.scheduler.complete_transfers(&[report]);
        }
        match self.scheduler.schedule() {
            Schedule::Step(plan) => {
                self.compute(plan, told);
                true
            }
            Schedule::Waiting(WaitReason::Transfers { .. }) if !self.transfers.is_empty() => {
                self.lacks_memory = false;
                true
            }
            // None runs, and none gets in: no end of anything would change that.
            Schedule::Waiting(reason) => panic!("the scheduler stands still: {reason:?}"),
            Schedule::Idle => {
                self.lacks_memory = false;
                false
            }
        }
    }

    fn pool(&self) -> PoolUse {
        let cache = self.scheduler.cache().stats();
        let block_size = u64::from(self.scheduler.cache().config().block_size());
        let tokens = |blocks: u32| u64::from(blocks) * block_size;
        let held = tokens(cache.held_blocks);
        let internal = cache.tail_waste_tokens.min(held);
        let set_aside = tokens(self.promised.saturating_sub(cache.held_blocks));
        let never = self.ledger.never_used(self.jobs, &self.crowd, &self.scheduler).min(set_aside);
        PoolUse {
            capacity: tokens(cache.num_blocks),
            live: held - internal,
            internal,
            later: set_aside - never,
            never,
            ended: tokens(cache.in_transfer_blocks),
            cached: tokens(cache.cached_blocks),
            unshared: cache.tokens + cache.tail_waste_tokens,
            held,
            residents: self.crowd.running.len() as u64,
            waiting: self.lacks_memory,
        }
    }

    fn counters(&self) -> Counters {
        let stats = self.scheduler.stats();
        let config = self.scheduler.cache().config();
        let moved = stats.cache.blocks_swapped_out + stats.cache.blocks_swapped_in;
        Counters {
            refused_with_room: self.ledger.refused_with_room(),
            prompt_tokens: stats.prompt_tokens,
            copied_tokens: stats.cache.block_copies * u64::from(config.block_size()),
            preemptions: stats.preemptions,
            idle_preemptions: self.idle_preemptions,
            recomputed_tokens: stats.recomputed_tokens,
            swaps_out: stats.swaps_out,
            swaps_in: stats.swaps_in,
            moved_bytes: moved * config.bytes_per_block(),
            hit_tokens: stats.prefix_hit_tokens,
            wanted_tokens: stats.prefix_wanted_tokens,
        }
    }
}
