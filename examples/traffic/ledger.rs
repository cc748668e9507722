//! What paging has set aside, and whether anybody was left outside without need.
//!
//! The scheduler says neither, so both are reckoned here from lengths alone. Where sharing makes a need smaller than
//! what lengths say, the larger figure counts: what is found wrong is wrong.

use paged_kv::{Admission, CacheConfig, Scheduler, SchedulerConfig, SequenceId};

use crate::generator::Job;
use crate::paging::{Live, Progress};
use crate::parameters::MAX_NEW_TOKENS;

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

    /// Tokens that free blocks are promised to: those that will come, and those that never will.
    pub(crate) fn promised(&self, jobs: &[Job], live: &[Live], cache: &CacheConfig) -> (u64, u64) {
        if self.config.admission != Admission::Guaranteed {
            return (0, 0);
        }
        let layout = cache.layout();
        let (mut later, mut never) = (0, 0);
        for (job, samples) in
            live.iter().filter(|live| is_in(live)).map(|live| (&jobs[live.job], &live.samples))
        {
            let most = layout.blocks_for(job.prompt_len() + MAX_NEW_TOKENS);
            let shared = job.prompt_len() / layout.block_size;
            for (place, progress) in samples.iter().enumerate() {
                let Some(progress) = progress else { continue };
                let held = layout.blocks_for(progress.computed);
                let held = if place > 0 { held.max(shared) } else { held };
                let last = layout.blocks_for(job.prompt_len() + job.answer_len(place) - 1).max(held);
                later += last - held;
                never += most - last;
            }
        }
        (u64::from(later * layout.block_size), u64::from(never * layout.block_size))
    }

    /// Looks at a step that let nobody else in although rows were left: `free` blocks were free when it was planned.
    pub(crate) fn check(&mut self, jobs: &[Job], live: &[Live], scheduler: &Scheduler, free: u32) {
        // Who is first in line has not moved, or has just lost its blocks. A branch that waits holds some; it is left out.
        let stands = |live: &Live, sample: u32| {
            let now = scheduler.computed_tokens(live.id.sample(sample));
            live.samples[sample as usize]
                .is_some_and(|progress| now == Some(progress.before) || now == Some(0))
        };
        let standing = |live: &&Live| (0..live.samples.len() as u32).any(|sample| stands(live, sample));
        let Some(first) = live.iter().find(standing) else { return };
        let Some(sample) = (0..first.samples.len() as u32).find(|&sample| stands(first, sample)) else {
            return;
        };
        let id = first.id.sample(sample);
        if scheduler.computed_tokens(id) != Some(0) || self.counted == Some(id) {
            return;
        }
        let fits = match self.config.admission {
            Admission::Guaranteed => self.promise_fits(jobs, live, first, scheduler.cache().config()),
            Admission::Overcommitted { watermark_blocks } => {
                self.fits(live, id, scheduler, free.saturating_sub(watermark_blocks))
            }
        };
        if fits {
            self.counted = Some(id);
            self.refused_with_room += 1;
        }
    }

    fn promise_fits(&self, jobs: &[Job], live: &[Live], first: &Live, cache: &CacheConfig) -> bool {
        let layout = cache.layout();
        let need = |live: &Live| {
            let job = &jobs[live.job];
            let full = job.prompt_len() / layout.block_size;
            let most = layout.blocks_for(job.prompt_len() + MAX_NEW_TOKENS);
            // One more for the copy of a block shared with a branch's parent.
            full + live.samples.len() as u32 * (most - full) + u32::from(job.parent.is_some())
        };
        let promised: u32 = live.iter().filter(|live| is_in(live)).map(need).sum();
        promised + need(first) <= cache.num_blocks()
    }

    fn fits(&self, live: &[Live], id: SequenceId, scheduler: &Scheduler, free: u32) -> bool {
        let layout = scheduler.cache().config().layout();
        let all = || {
            live.iter().filter(|live| live.started).flat_map(|live| {
                (0..).zip(&live.samples).map(move |(sample, progress)| (live, sample, progress))
            })
        };
        // What is reserved for those that may not be preempted any more is not known from outside.
        let at_bound = |progress: &Progress| progress.preemptions >= self.config.max_preemptions;
        if all().any(|(_, _, progress)| progress.as_ref().is_some_and(at_bound)) {
            return false;
        }
        let len = |id: SequenceId| scheduler.tokens(id).map_or(0, <[_]>::len) as u32;
        let owed = |(live, sample, _): (&Live, u32, _)| {
            let id = live.id.sample(sample);
            let computed = scheduler.computed_tokens(id).unwrap_or(0);
            let reads = computed > 0 && len(id) - computed > 1;
            if reads { layout.blocks_for(len(id)) - layout.blocks_for(computed) } else { 0 }
        };
        layout.blocks_for(len(id)) + all().map(owed).sum::<u32>() <= free
    }
}

/// Whether it was let in.
fn is_in(live: &Live) -> bool {
    live.started && live.samples.iter().flatten().any(|progress| progress.computed > 0)
}
