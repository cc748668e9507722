//! (b) Paging: the crate's scheduler over a simulated device, which answers what the traffic says.

use paged_kv::{
    Admission, CacheConfig, Error, Request, RequestId, RowResult, Schedule, Scheduler, SchedulerConfig,
    SequenceId, StepEvent, StepPlan,
};

use crate::generator::{END, Job, Traffic};
use crate::ledger::Ledger;
use crate::measure::{Counters, PoolUse};
use crate::parameters::{MAX_NEW_TOKENS, MAX_SEQUENCES, STEP_TOKENS};
use crate::serve::{Server, Told};

/// One way to run the scheduler.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    pub(crate) admission: Admission,
}

/// A request that waits or runs.
#[derive(Clone, Debug)]
pub(crate) struct Live {
    pub(crate) job: usize,
    pub(crate) id: RequestId,
    /// Whether it was let in before, or may share blocks as a branch.
    pub(crate) started: bool,
    /// Nothing, once a sample has ended. Until the prompt is computed, only the first one is followed.
    pub(crate) samples: Vec<Option<Progress>>,
}

/// How far a sample is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    /// Tokens in the cache after the last step.
    pub(crate) computed: u32,
    /// And before it.
    pub(crate) before: u32,
    /// How often it has lost its blocks.
    pub(crate) preemptions: u32,
}

pub(crate) struct Paging<'a> {
    jobs: &'a [Job],
    scheduler: Scheduler,
    /// By arrival, which is the order of their ids.
    live: Vec<Live>,
    ledger: Ledger,
    preemptions: u64,
    lacks_memory: bool,
}

impl<'a> Paging<'a> {
    pub(crate) fn new(traffic: &'a Traffic, policy: Policy, cache: CacheConfig) -> Result<Self, Error> {
        let config =
            SchedulerConfig { step_tokens: STEP_TOKENS, admission: policy.admission, ..Default::default() };
        Ok(Self {
            jobs: &traffic.jobs,
            scheduler: Scheduler::new(config, cache)?,
            live: Vec::new(),
            ledger: Ledger::new(config),
            preemptions: 0,
            lacks_memory: false,
        })
    }

    /// The request as the app sends it: as a branch of one that runs, where there is one.
    fn add(&mut self, job: &Job) -> RequestId {
        let request = |tokens| {
            Request::new(tokens)
                .max_new_tokens(MAX_NEW_TOKENS)
                .samples(job.answers.len() as u32)
                .stop_tokens(&[END])
        };
        if let Some((parent, common)) = job.parent {
            let parent = self.live.iter().find(|live| live.job == parent).map(|live| live.id);
            let own = job.prompt_tokens().split_off(common as usize);
            // What cannot be promised to a branch now waits in line as a request of its own.
            let branch = parent.and_then(|id| self.scheduler.fork(id, common as usize, request(own)).ok());
            if let Some(branch) = branch {
                return branch;
            }
        }
        self.scheduler.add(request(job.prompt_tokens())).expect("the pool holds every request alone")
    }

    fn results(&self, plan: &StepPlan) -> Vec<RowResult> {
        let answer = |sequence: SequenceId, position: u32| {
            let job = &self.jobs[self.live[self.place_of(sequence.request())].job];
            job.answers[sequence.sample() as usize].token(position - job.prompt_len())
        };
        plan.logit_rows()
            .iter()
            .map(|row| RowResult::Token(answer(row.sequence, row.next_position)))
            .collect()
    }

    fn place_of(&self, id: RequestId) -> usize {
        self.live.binary_search_by_key(&id, |live| live.id).expect("a request of this server")
    }

    /// Notes how far everybody is, and who has lost blocks on the way.
    fn follow(&mut self) {
        let mut line_moves = true;
        for live in &mut self.live {
            // First come, first served: behind one that was not let in, none was.
            if !live.started && !line_moves {
                continue;
            }
            let samples = live.samples.iter_mut().enumerate();
            for (sample, progress) in
                samples.filter_map(|(sample, progress)| Some((sample, progress.as_mut()?)))
            {
                let now = self.scheduler.computed_tokens(live.id.sample(sample as u32));
                progress.before = progress.computed;
                progress.computed = now.unwrap_or(progress.computed);
                progress.preemptions += u32::from(progress.before > 0 && progress.computed == 0);
                live.started |= progress.computed > 0;
            }
            line_moves &= live.started;
        }
    }

    fn take_events(&mut self, events: &[StepEvent], told: &mut Vec<Told>) {
        for &event in events {
            let (StepEvent::Token { sequence, .. } | StepEvent::Finished { sequence, .. }) = event else {
                continue;
            };
            let place = self.place_of(sequence.request());
            let job = self.live[place].job;
            if let StepEvent::Token { .. } = event {
                told.push(Told::Token { job });
                continue;
            }
            self.live[place].samples[sequence.sample() as usize] = None;
            if self.live[place].samples.iter().all(Option::is_none) {
                self.live.remove(place);
                told.push(Told::Finished { job });
            }
        }
    }

    fn compute(&mut self, plan: StepPlan, told: &mut Vec<Told>) {
        let results = self.results(&plan);
        let stats = self.scheduler.stats();
        let preempted = stats.preemptions > self.preemptions;
        self.preemptions = stats.preemptions;
        let rows_left = plan.num_rows() < STEP_TOKENS && stats.cache.num_tables < MAX_SEQUENCES;
        self.lacks_memory = stats.waiting > 0 && rows_left;
        let events = self.scheduler.commit(plan, &results).expect("the outstanding plan").to_vec();
        self.follow();
        if self.lacks_memory && !preempted {
            self.ledger.check(self.jobs, &self.live, &self.scheduler, stats.cache.free_blocks);
        }
        self.take_events(&events, told);
    }
}

impl Server for Paging<'_> {
    fn submit(&mut self, index: usize) {
        let job = &self.jobs[index];
        let id = self.add(job);
        let shared = self.scheduler.computed_tokens(id).unwrap_or(0);
        let progress = Progress { computed: shared, ..Default::default() };
        let samples = vec![Some(progress); job.answers.len()];
        self.live.push(Live { job: index, id, started: job.parent.is_some(), samples });
    }

    fn cancel(&mut self, job: usize) {
        for live in self.live.extract_if(.., |live| live.job == job) {
            self.scheduler.abort(live.id);
        }
    }

    fn step(&mut self, told: &mut Vec<Told>) -> bool {
        match self.scheduler.schedule() {
            Schedule::Step(plan) => {
                self.compute(plan, told);
                true
            }
            // Nobody runs, and nobody gets in: no end of anything would change that.
            Schedule::Waiting(reason) => panic!("the scheduler stands still: {reason:?}"),
            Schedule::Idle => false,
        }
    }

    fn pool(&self) -> PoolUse {
        let cache = self.scheduler.stats().cache;
        let block_size = u64::from(self.scheduler.cache().config().block_size());
        let held = u64::from(cache.held_blocks) * block_size;
        let internal = cache.tail_waste_tokens.min(held);
        let free = u64::from(cache.num_blocks) * block_size - held;
        let (later, never) = self.ledger.promised(self.jobs, &self.live, self.scheduler.cache().config());
        let later = later.min(free);
        PoolUse {
            capacity: u64::from(cache.num_blocks) * block_size,
            live: held - internal,
            internal,
            later,
            never: never.min(free - later),
            ended: 0,
            unshared: cache.tokens + cache.tail_waste_tokens + cache.lookahead_tokens,
            held,
            residents: u64::from(cache.num_tables),
            waiting: self.lacks_memory,
        }
    }

    fn counters(&self) -> Counters {
        let stats = self.scheduler.stats();
        Counters {
            refused_with_room: self.ledger.refused_with_room(),
            prompt_tokens: stats.prompt_tokens,
            copied_tokens: stats.cache.block_copies * u64::from(self.scheduler.cache().config().block_size()),
            preemptions: stats.preemptions,
            recomputed_tokens: stats.recomputed_tokens,
        }
    }
}
