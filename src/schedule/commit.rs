//! [`Scheduler::commit`]: takes the results of a submitted step.
//!
//! Only here do lengths grow, samples part, sequences end and blocks return: on what was computed, never on what was
//! planned (I7).

use crate::error::CommitError;
use crate::ids::TokenId;
use crate::schedule::request::{FinishReason, RowResult, StepEvent};
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Sequence, State};
use crate::schedule::step_plan::StepPlan;

impl Scheduler {
    /// Accepts a step whose commands were submitted, with one result for each of `plan.logit_rows()`, in their order.
    ///
    /// # Errors
    /// [`CommitError::StalePlan`], [`CommitError::ForeignPlan`], [`CommitError::ResultCount`],
    /// [`CommitError::TooManyAccepted`]: the step is not committed, and the next [`schedule`](Self::schedule) rolls it
    /// back.
    pub fn commit(&mut self, plan: StepPlan, results: &[RowResult]) -> Result<&[StepEvent], CommitError> {
        self.cache.check_plan(&plan)?;
        check_results(&plan, results)?;
        self.events.clear();
        self.cache.finish_step();
        self.resolve_forks();
        let mut results = results.iter();
        let planned = std::mem::take(&mut self.planned);
        for &index in &planned {
            let logits = self.get(index).planned_logits as usize;
            self.commit_sequence(index, &mut results.by_ref().take(logits).copied());
        }
        self.planned = planned;
        self.planned.clear();
        self.spare_plan = plan;
        self.stats.steps += 1;
        let waste = self.cache.stats().tail_waste_tokens;
        self.stats.tail_waste_tokens_peak = self.stats.tail_waste_tokens_peak.max(waste);
        self.cache.check_poison()?;
        Ok(&self.events)
    }

    fn commit_sequence(&mut self, index: Index, results: &mut dyn Iterator<Item = RowResult>) {
        let sequence = self.get_mut(index);
        let rows = std::mem::take(&mut sequence.planned_rows);
        let logits = std::mem::take(&mut sequence.planned_logits);
        let known = rows.min(sequence.uncomputed());
        sequence.computed += known;
        let (before, end) = (sequence.computed - known, sequence.computed);
        let again = sequence.high_water.clamp(before, end) - before;
        sequence.high_water = sequence.high_water.max(end);
        let input = sequence.input_len.clamp(before + again, end) - (before + again);
        self.stats.recomputed_tokens += u64::from(again);
        self.stats.prompt_tokens += u64::from(input);
        if self.get(index).aborting {
            results.for_each(drop);
            self.finish(index, FinishReason::Aborted);
            return;
        }
        let finished = if logits == 0 {
            let sequence = self.get(index);
            (sequence.uncomputed() == 0).then(|| full_reason(sequence))
        } else if self.get(index).pending_samples.is_empty() {
            results.next().and_then(|result| self.take_result(index, result, rows - known))
        } else {
            match self.part_samples(index, results) {
                Carrier::Gone => return,
                Carrier::Runs => None,
                Carrier::Finished(reason) => Some(reason),
            }
        };
        self.get_mut(index).drafts.clear();
        // Rows of refused drafts and blocks reserved ahead return.
        let sequence = self.get(index);
        if let Some(table) = sequence.table {
            let cut = self.cache.truncate(table, sequence.computed);
            debug_assert!(cut.is_ok(), "a committed table is cut to what is computed: {cut:?}");
        }
        match finished {
            Some(reason) => self.finish(index, reason),
            None => self.settle(index),
        }
    }

    /// Appends what a result says. Returns why the sequence has ended, if it has.
    fn take_result(&mut self, index: Index, result: RowResult, drafts: u32) -> Option<FinishReason> {
        let (accepted, next) = match result {
            RowResult::Token(token) => (0, token),
            RowResult::Accepted { rows, next } => (rows, next),
            RowResult::Invalid => return Some(FinishReason::Invalid),
        };
        debug_assert!(accepted <= drafts, "accepted drafts were checked");
        for draft in 0..accepted {
            let sequence = self.get_mut(index);
            let token = sequence.drafts[draft as usize];
            // The draft's row is in the cache already.
            sequence.computed += 1;
            sequence.high_water = sequence.high_water.max(sequence.computed);
            if let Some(reason) = self.push_token(index, token) {
                return Some(reason);
            }
        }
        self.push_token(index, next)
    }

    fn push_token(&mut self, index: Index, token: TokenId) -> Option<FinishReason> {
        let sequence = self.get_mut(index);
        sequence.tokens.push(token);
        let event = StepEvent::Token { sequence: sequence.id, token };
        let reason = if sequence.stop_tokens.contains(&token) {
            Some(FinishReason::Stop)
        } else {
            (!sequence.wants_token()).then(|| full_reason(sequence))
        };
        self.events.push(event);
        self.stats.generated_tokens += 1;
        reason
    }

    /// The first new token of a request's samples: each but the first takes a table of its own, sharing the input.
    fn part_samples(&mut self, index: Index, results: &mut dyn Iterator<Item = RowResult>) -> Carrier {
        let sequence = self.get_mut(index);
        let samples = std::mem::take(&mut sequence.pending_samples);
        let aborted_samples = std::mem::take(&mut sequence.aborted_samples);
        let carrier = sequence.id.sample();
        let mut own = None;
        for (sample, result) in samples.into_iter().zip(results) {
            if aborted_samples.contains(&sample) {
                let event = aborted(self.get(index), sample);
                self.events.push(event);
            } else if sample == carrier {
                own = Some(result);
            } else {
                let other = self.split_sample(index, sample);
                if let Some(reason) = self.take_result(other, result, 0) {
                    self.finish(other, reason);
                }
            }
        }
        match own {
            Some(result) => match self.take_result(index, result, 0) {
                Some(reason) => Carrier::Finished(reason),
                None => Carrier::Runs,
            },
            // The carrier's own sample was aborted.
            None => {
                self.drop_record(index);
                Carrier::Gone
            }
        }
    }

    fn split_sample(&mut self, index: Index, sample: u32) -> Index {
        let parent = self.get(index);
        let (parent_table, computed, max_tokens) = (parent.table, parent.computed, parent.max_tokens);
        let mut tokens = Vec::with_capacity(max_tokens as usize);
        tokens.extend_from_slice(&parent.tokens);
        let record = Sequence {
            id: parent.id.request().sample(sample),
            arrival: parent.arrival,
            state: State::Running,
            tokens,
            input_len: parent.input_len,
            max_tokens,
            to_context_end: parent.to_context_end,
            stop_tokens: parent.stop_tokens.clone(),
            keep: parent.keep,
            pending_samples: Vec::new(),
            table: None,
            fork: None,
            computed: 0,
            high_water: computed,
            drafts: Vec::new(),
            planned_rows: 0,
            planned_logits: 0,
            preemptions: 0,
            protected: false,
            promised: parent.promised,
            aborted_samples: Vec::new(),
            aborting: false,
            truncating: None,
        };
        let other = self.insert(record);
        // Samples of a request stand side by side, in their order.
        let arrival = self.get(other).arrival;
        let place = self.running.partition_point(|&running| self.get(running).arrival <= arrival);
        self.running.insert(place, other);
        // Tables were set aside when the request was let in; should none be left, the sample is computed alone.
        match parent_table.map(|table| self.cache.fork(table, computed, max_tokens)) {
            Some(Ok(table)) => {
                let sequence = self.get_mut(other);
                sequence.table = Some(table);
                sequence.computed = computed;
            }
            _ => self.requeue(other),
        }
        other
    }

    /// Ends a sequence: its blocks return at once, or stay as kept content.
    fn finish(&mut self, index: Index, reason: FinishReason) {
        let sequence = self.records[index].as_mut().expect("an index in a queue has a record");
        let pending = std::mem::take(&mut sequence.pending_samples);
        if pending.is_empty() {
            let (sequence, preemptions) = (sequence.id, sequence.preemptions);
            self.events.push(StepEvent::Finished { sequence, reason, preemptions });
        }
        for sample in pending {
            let (sequence, preemptions) = (sequence.id.request().sample(sample), sequence.preemptions);
            self.events.push(StepEvent::Finished { sequence, reason, preemptions });
        }
        if !sequence.keep || matches!(reason, FinishReason::Aborted | FinishReason::Invalid) {
            self.drop_record(index);
            return;
        }
        match sequence.state {
            State::Waiting => self.waiting.retain(|&other| other != index),
            _ => self.running.retain(|&other| other != index),
        }
        sequence.state = State::Kept;
        sequence.promised = false;
        self.unprotect(index);
        self.kept.push_back(index);
        self.settle(index);
    }
}

/// What became of the record that carried a request's samples.
enum Carrier {
    Runs,
    Finished(FinishReason),
    Gone,
}

/// The end of a sample that was aborted before it parted from the others.
pub(super) fn aborted(carrier: &Sequence, sample: u32) -> StepEvent {
    let (sequence, preemptions) = (carrier.id.request().sample(sample), carrier.preemptions);
    StepEvent::Finished { sequence, reason: FinishReason::Aborted, preemptions }
}

fn full_reason(sequence: &Sequence) -> FinishReason {
    if sequence.to_context_end { FinishReason::ContextFull } else { FinishReason::MaxTokens }
}

fn check_results(plan: &StepPlan, results: &[RowResult]) -> Result<(), CommitError> {
    let expected = plan.logit_rows.len();
    if results.len() != expected {
        return Err(CommitError::ResultCount { expected, actual: results.len() });
    }
    for (row, result) in plan.logit_rows.iter().zip(results) {
        match *result {
            RowResult::Accepted { rows, .. } if rows >= row.num_rows => {
                return Err(CommitError::TooManyAccepted {
                    sequence: row.sequence,
                    accepted: rows,
                    drafts: row.num_rows - 1,
                });
            }
            _ => {}
        }
    }
    Ok(())
}
