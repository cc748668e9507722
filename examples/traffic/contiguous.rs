//! (a) One extent per sequence: contiguous memory, reserved at admission and held to the sequence's end.
//!
//! Everything else is as in the paged scheduler: first come, first served; decoding sequences first, then prompts, then
//! the next in line, within the same rows per step. It is generous where layouts differ: a prompt with several answers is
//! computed once and copied to their extents, and a branch copies what its parent has, if that still runs.

use std::collections::VecDeque;

use crate::extents::FirstFit;
use crate::generator::{Job, Traffic};
use crate::measure::{Counters, PoolUse};
use crate::parameters::{CONTEXT, MAX_NEW_TOKENS, MAX_SEQUENCES, STEP_TOKENS};
use crate::serve::{Server, Told};

/// How long an extent is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reserve {
    /// The model's context.
    Context,
    /// Prompt and declared answer.
    Declared,
    /// Prompt and answer as they will be: what nobody knows.
    Exact,
}

#[derive(Clone, Copy, Debug)]
struct Sequence {
    job: usize,
    sample: usize,
    start: u32,
    reserved: u32,
    /// Tokens computed.
    filled: u32,
    /// Tokens known: those of the prompt and of the answer so far.
    known: u32,
    /// Computes its prompt; the samples beside it get it by copy.
    reads: bool,
}

pub(crate) struct Contiguous<'a> {
    jobs: &'a [Job],
    reserve: Reserve,
    pool: FirstFit,
    capacity: u32,
    waiting: VecDeque<usize>,
    running: Vec<Sequence>,
    /// The first in line does not fit.
    lacks_memory: bool,
    /// Whether that was counted as refused although there was room.
    counted: Option<usize>,
    counters: Counters,
}

impl<'a> Contiguous<'a> {
    pub(crate) fn new(traffic: &'a Traffic, reserve: Reserve, capacity: u32) -> Self {
        Self {
            jobs: &traffic.jobs,
            reserve,
            pool: FirstFit::new(capacity),
            capacity,
            waiting: VecDeque::new(),
            running: Vec::new(),
            lacks_memory: false,
            counted: None,
            counters: Counters::default(),
        }
    }

    fn extent_of(&self, job: &Job, sample: usize) -> u32 {
        match self.reserve {
            Reserve::Context => CONTEXT,
            Reserve::Declared => job.prompt_len() + MAX_NEW_TOKENS,
            Reserve::Exact => job.prompt_len() + job.answer_len(sample),
        }
    }

    /// Gives the first in line its extents, all or none.
    fn admit(&mut self) -> bool {
        let Some(&index) = self.waiting.front() else { return false };
        let job = &self.jobs[index];
        if self.running.len() + job.answers.len() > MAX_SEQUENCES as usize {
            return false;
        }
        let first = self.running.len();
        for sample in 0..job.answers.len() {
            let reserved = self.extent_of(job, sample);
            let Some(start) = self.pool.take(reserved) else {
                self.refuse(index, first);
                return false;
            };
            let (known, reads) = (job.prompt_len(), sample == 0);
            self.running.push(Sequence { job: index, sample, start, reserved, filled: 0, known, reads });
        }
        self.waiting.pop_front();
        if let Some((parent, common)) = job.parent {
            let parent = self.running[..first].iter().find(|other| other.job == parent);
            let copied = parent.map_or(0, |parent| parent.filled.min(common));
            self.running[first].filled = copied;
            self.counters.copied_tokens += u64::from(copied);
        }
        true
    }

    /// Takes back the extents from the `first` running sequence on.
    fn refuse(&mut self, index: usize, first: usize) {
        for taken in self.running.drain(first..) {
            self.pool.give_back(taken.start, taken.reserved);
        }
        self.lacks_memory = true;
        let job = &self.jobs[index];
        let needed: u32 = (0..job.answers.len()).map(|sample| self.extent_of(job, sample)).sum();
        if self.pool.free() >= needed && self.counted != Some(index) {
            self.counted = Some(index);
            self.counters.refused_with_room += 1;
        }
    }

    /// Computes up to `rows` tokens of a prompt, or one of an answer; returns how many.
    fn compute(&mut self, place: usize, rows: u32, told: &mut Vec<Told>) -> u32 {
        let sequence = &mut self.running[place];
        if !sequence.reads {
            return 0;
        }
        let rows = rows.min(sequence.known - sequence.filled);
        let prompt_len = self.jobs[sequence.job].prompt_len();
        let prompt_rows = prompt_len.saturating_sub(sequence.filled).min(rows);
        self.counters.prompt_tokens += u64::from(prompt_rows);
        sequence.filled += rows;
        let Sequence { job, filled, known, .. } = *sequence;
        if filled < known || rows == 0 {
            return rows;
        }
        sequence.known += 1;
        told.push(Told::Token { job });
        if known == prompt_len {
            // The last row of a prompt chooses the first token of every sample.
            for other in self.running.iter_mut().filter(|other| other.job == job && !other.reads) {
                (other.filled, other.known, other.reads) = (filled, known + 1, true);
                self.counters.copied_tokens += u64::from(filled);
            }
        }
        rows
    }

    /// Lets go of those that have all their tokens.
    fn release_finished(&mut self, told: &mut Vec<Told>) {
        for place in (0..self.running.len()).rev() {
            let Sequence { job, sample, start, reserved, known, .. } = self.running[place];
            if known == self.jobs[job].prompt_len() + self.jobs[job].answers[sample].len {
                self.pool.give_back(start, reserved);
                self.running.remove(place);
                if self.running.iter().all(|other| other.job != job) {
                    told.push(Told::Finished { job });
                }
            }
        }
    }
}

impl Server for Contiguous<'_> {
    fn submit(&mut self, job: usize) {
        self.waiting.push_back(job);
    }

    fn cancel(&mut self, job: usize) {
        self.waiting.retain(|&other| other != job);
        for sequence in self.running.extract_if(.., |other| other.job == job) {
            self.pool.give_back(sequence.start, sequence.reserved);
        }
    }

    fn step(&mut self, told: &mut Vec<Told>) -> bool {
        if self.running.is_empty() && self.waiting.is_empty() {
            return false;
        }
        let decodes = |sequence: &Sequence| sequence.filled > 0 && sequence.known - sequence.filled == 1;
        let decoding: Vec<bool> = self.running.iter().map(decodes).collect();
        let mut rows = STEP_TOKENS - decoding.iter().filter(|&&decoding| decoding).count() as u32;
        for (place, decoding) in decoding.into_iter().enumerate() {
            if decoding {
                self.compute(place, 1, told);
            } else {
                rows -= self.compute(place, rows, told);
            }
        }
        self.lacks_memory = false;
        while rows > 0 {
            let first = self.running.len();
            if !self.admit() {
                break;
            }
            rows -= self.compute(first, rows, told);
        }
        self.release_finished(told);
        true
    }

    fn pool(&self) -> PoolUse {
        let mut pool =
            PoolUse { capacity: u64::from(self.capacity), waiting: self.lacks_memory, ..Default::default() };
        for sequence in &self.running {
            let job = &self.jobs[sequence.job];
            // The last token of an answer is never computed.
            let last = job.prompt_len() + job.answer_len(sequence.sample) - 1;
            pool.live += u64::from(sequence.filled);
            pool.later += u64::from(last - sequence.filled);
            pool.never += u64::from(sequence.reserved - last);
            pool.held += u64::from(sequence.reserved);
            pool.residents += 1;
        }
        pool.unshared = pool.held;
        pool
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}
