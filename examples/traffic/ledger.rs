//! What paging has set aside for nothing, and whether a sequence was left outside without need.
//!
//! The scheduler says neither, so both are computed here, from lengths and from what requests have in common. Where the
//! need might be smaller than that says, the larger figure counts: what is found wrong is wrong.

use paged_kv::{Admission, Namespace, PreemptionMode, Scheduler, SchedulerConfig, SequenceId};

use crate::generator::Job;
use crate::paging::{Crowd, Live};
use crate::parameters::MAX_NEW_TOKENS;

/// The first in line, and what it found when a step was planned that had rows left and did not let it in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Door {
    first: SequenceId,
    /// Blocks that can be taken, cached ones among them.
    available: u32,
    /// Blocks that are promised, held ones among them.
    promised: u32,
    /// Blocks of its beginning that a running sequence holds: to be shared.
    shared: u32,
    /// A running sequence is computing more of its beginning.
    has_twin: bool,
}

impl Door {
    /// Before the step is committed: blocks return and are found by others when it is.
    pub(crate) fn look(
        jobs: &[Job],
        crowd: &Crowd,
        scheduler: &Scheduler,
        promised: u32,
        has_cache: bool,
    ) -> Option<Self> {
        let &(_, first) = crowd.line.first()?;
        let available = scheduler.cache().free_blocks();
        let mut door = Self { first, available, promised, shared: 0, has_twin: false };
        let tokens = scheduler.tokens(first)?;
        if !has_cache || scheduler.computed_tokens(first) != Some(0) {
            return Some(door);
        }
        let found = scheduler.cache().find_prefix(&Namespace::default(), tokens);
        let block_size = scheduler.cache().config().block_size();
        let job = &jobs[crowd.find(first.request()).job];
        for &other in &crowd.running {
            let theirs = &jobs[crowd.find(other.request()).job];
            let len = scheduler.tokens(other).map_or(0, <[_]>::len) as u32;
            let computed = scheduler.computed_tokens(other).unwrap_or(0);
            let common = job.common(theirs, other.sample() as usize);
            door.has_twin |= len > computed + 1 && common.min(len) / block_size > found / block_size;
            door.shared = door.shared.max(common.min(computed).min(found) / block_size);
        }
        Some(door)
    }

    /// Whether the first in line waits for a sequence that computes what it needs, rather than for memory.
    pub(crate) fn waits_for_twin(&self, crowd: &Crowd) -> bool {
        self.has_twin && self.stands(crowd)
    }

    /// Whether the step let nobody in.
    fn stands(&self, crowd: &Crowd) -> bool {
        crowd.line.first().is_some_and(|&(_, first)| first == self.first)
    }
}

#[derive(Debug)]
pub(crate) struct Ledger {
    config: SchedulerConfig,
    counted: Option<SequenceId>,
    refused_with_room: u64,
}

impl Ledger {
    pub(crate) fn new(config: SchedulerConfig) -> Self {
        Self { config, counted: None, refused_with_room: 0 }
    }

    /// Sequences that waited, first in line, while what was free and not set aside for others would have done.
    pub(crate) fn refused_with_room(&self) -> u64 {
        self.refused_with_room
    }

    /// Tokens that free blocks are promised to, and that will never come.
    pub(crate) fn never_used(&self, jobs: &[Job], crowd: &Crowd, scheduler: &Scheduler) -> u64 {
        if self.config.admission != Admission::Guaranteed {
            return 0;
        }
        let layout = scheduler.cache().config().layout();
        let never = |live: &Live, sample: usize| {
            let job = &jobs[live.job];
            let most = layout.blocks_for(job.prompt_len() + MAX_NEW_TOKENS);
            // The last token of an answer is never computed.
            most - layout.blocks_for(job.prompt_len() + job.answer_len(sample) - 1)
        };
        let promised = crowd.live.iter().filter(|live| live.promised).flat_map(|live| {
            let samples = live.samples.iter().enumerate().filter(|(_, preemptions)| preemptions.is_some());
            samples.map(move |(sample, _)| never(live, sample))
        });
        u64::from(promised.sum::<u32>() * layout.block_size())
    }

    /// Judges a step that left a sequence at the door: none was preempted for it. With `arriving`, blocks are on their
    /// way to the host pool.
    pub(crate) fn check(
        &mut self,
        jobs: &[Job],
        crowd: &Crowd,
        scheduler: &Scheduler,
        door: &Door,
        arriving: bool,
    ) {
        let waits_for_transfer = arriving && scheduler.computed_tokens(door.first) != Some(0);
        if !door.stands(crowd) || door.has_twin || waits_for_transfer || self.counted == Some(door.first) {
            return;
        }
        let fits = match self.config.admission {
            Admission::Guaranteed => Self::promise_fits(jobs, crowd, scheduler, door),
            Admission::Overcommitted { watermark_blocks } => {
                self.needs(jobs, crowd, scheduler, door) + watermark_blocks <= door.available
            }
        };
        if fits {
            self.counted = Some(door.first);
            self.refused_with_room += 1;
        }
    }

    /// Whether its promise fits beside those that others have: by what the scheduler says of them, or by their lengths.
    fn promise_fits(jobs: &[Job], crowd: &Crowd, scheduler: &Scheduler, door: &Door) -> bool {
        let layout = scheduler.cache().config().layout();
        let need = |live: &Live| {
            let job = &jobs[live.job];
            let full = job.prompt_len() / layout.block_size();
            let most = layout.blocks_for(job.prompt_len() + MAX_NEW_TOKENS);
            // One more for the copy of a block shared with a branch's parent.
            full + live.samples.len() as u32 * (most - full) + u32::from(job.parent.is_some())
        };
        let first = crowd.find(door.first.request());
        let of_others: u32 = crowd.live.iter().filter(|live| live.promised).map(need).sum();
        let said = door.promised + need(first) - door.shared;
        said.min(of_others + need(first)) <= scheduler.cache().config().num_blocks()
    }

    /// Blocks that must be available to let the first in line in, without the watermark.
    fn needs(&self, jobs: &[Job], crowd: &Crowd, scheduler: &Scheduler, door: &Door) -> u32 {
        let layout = scheduler.cache().config().layout();
        let lengths = |sequence: SequenceId| {
            let live = crowd.find(sequence.request());
            let preemptions = live.samples[sequence.sample() as usize].unwrap_or(0);
            let at_bound = preemptions >= self.config.max_preemptions;
            let len = scheduler.tokens(sequence).map_or(0, <[_]>::len) as u32;
            let computed = scheduler.computed_tokens(sequence).unwrap_or(0);
            let most = jobs[live.job].prompt_len() + MAX_NEW_TOKENS;
            (len, computed, at_bound.then_some(most))
        };
        let owed = |&sequence: &SequenceId| {
            let (len, computed, bound) = lengths(sequence);
            match bound {
                // One more for the copy of a block that is shared.
                Some(most) => layout.blocks_for(most) - layout.blocks_for(computed) + 1,
                None if len > computed + 1 => layout.blocks_for(len) - layout.blocks_for(computed),
                None => 0,
            }
        };
        let (len, computed, bound) = lengths(door.first);
        // What is computed of one that waits may be in the host pool, and comes back as a whole. A branch shares it otherwise.
        let moves = self.config.preemption != PreemptionMode::Recompute;
        let held = if moves { 0 } else { computed / layout.block_size() };
        let own = layout.blocks_for(bound.unwrap_or(len)) - held.max(door.shared);
        own + crowd.running.iter().map(owed).sum::<u32>()
    }
}
