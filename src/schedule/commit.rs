//! [`Scheduler::commit`]: takes the results of a submitted step.
//!
//! Only here do lengths grow, samples part, sequences end and blocks return: on what was computed, never on what was
//! planned (I7).

use crate::error::CommitError;
use crate::schedule::blocks;
use crate::schedule::request::{Admission, FinishReason, RowResult, StepEvent};
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Answers, Committed, Next, Taken};
use crate::schedule::step_plan::StepPlan;

impl Scheduler {
    /// Accepts a step whose commands were submitted, with one result for each of `plan.logit_rows()`, in their order.
    ///
    /// # Errors
    /// [`CommitError::StalePlan`], [`CommitError::ForeignPlan`], [`CommitError::ResultCount`],
    /// [`CommitError::TooManyAccepted`]: the step is not committed, and the next [`schedule`](Self::schedule) rolls it
    /// back.
    pub fn commit(&mut self, plan: StepPlan, results: &[RowResult]) -> Result<&[StepEvent], CommitError> {
        self.cache.check_step(plan.cache_instance, plan.step)?;
        check_results(&plan, results)?;
        if self.cache.finish_step() {
            self.sequences.lose(&self.cache);
        }
        while let Some(index) = self.sequences.pop_pending_fork() {
            self.resolve_fork(index);
        }
        let mut left = Answers { tokens: &plan.token_ids, rows: &plan.logit_rows, results };
        let planned = std::mem::take(&mut self.planned);
        for &index in &planned {
            let committed = self.sequences.commit(index, &mut left, &mut self.cache);
            self.settle_results(index, committed);
        }
        self.planned = planned;
        self.planned.clear();
        self.spare_plan = plan;
        if self.config.admission == Admission::Guaranteed {
            self.forget_own_tails();
        }
        self.stats.steps += 1;
        self.cache.check_poison()?;
        let waste = self.cache.tail_waste_tokens();
        self.stats.tail_waste_tokens_peak = self.stats.tail_waste_tokens_peak.max(waste);
        Ok(self.events.tell())
    }

    /// What follows for all others from what a sequence has computed and taken.
    #[inline]
    fn settle_results(&mut self, index: Index, committed: Committed<'_>) {
        self.stats.recomputed_tokens += u64::from(committed.again);
        self.stats.prompt_tokens += u64::from(committed.input);
        let finished = match committed.next {
            Next::Aborts => return self.finish(index, FinishReason::Aborted),
            Next::Parts(answers) => match self.part_samples(index, answers) {
                Carrier::Gone => return,
                Carrier::Runs => None,
                Carrier::Finished(reason) => Some(reason),
            },
            Next::Took(taken) => self.tell_tokens(taken),
        };
        if committed.is_found_further {
            // Those that were refused may find an equal prompt now.
            self.ledger.note_given_up();
        }
        if committed.has_drafts && !fault!(RefusedDraftsStay) {
            self.give_back(index);
        }
        match finished {
            Some(reason) => self.finish(index, reason),
            None => {
                self.sequences.recount(index, &self.cache);
                if committed.is_asked {
                    self.settle(index);
                }
            }
        }
    }

    /// Tells the tokens that a sequence has taken. Returns why it has ended, if it has.
    fn tell_tokens(&mut self, taken: Taken<'_>) -> Option<FinishReason> {
        for token in taken.drafts.iter().copied().chain(taken.next) {
            self.events.push(StepEvent::Token { sequence: taken.sequence, token });
            self.stats.generated_tokens += 1;
        }
        taken.reason
    }

    /// Rows of refused drafts return.
    fn give_back(&mut self, index: Index) {
        let sequence = &self.sequences[index];
        if let Some(table) = sequence.table() {
            let cut = self.cache.truncate(table, sequence.computed());
            debug_assert!(cut.is_ok(), "a committed table is cut to what is computed: {cut:?}");
        }
    }

    /// The samples of a request part: each but the first, whose record it was, takes a table of its own, sharing the input,
    /// and each takes its first new token.
    fn part_samples(&mut self, index: Index, answers: Answers<'_>) -> Carrier {
        if self.sequences[index].first_alive().is_none() {
            self.finish(index, FinishReason::Aborted);
            return Carrier::Gone;
        }
        let (samples, aborted) = self.sequences.take_samples(index);
        let alive = samples.iter().copied().filter(|sample| !aborted.contains(sample)).skip(1);
        // All share the input before any of them goes on from it.
        let others: Vec<Index> = alive.map(|sample| self.split_sample(index, sample)).collect();
        self.renew_promise(index);
        let mut records = std::iter::once(index).chain(others);
        let mut state = Carrier::Runs;
        for (place, sample) in samples.into_iter().enumerate() {
            let record = if aborted.contains(&sample) { None } else { records.next() };
            let Some(record) = record else {
                self.tell_aborted(index, sample);
                continue;
            };
            let taken = self.sequences.take_answer(record, answers, place);
            match self.tell_tokens(taken) {
                Some(reason) if record == index => state = Carrier::Finished(reason),
                Some(reason) => self.finish(record, reason),
                // The first one is counted when its step is settled.
                None if record == index => {}
                None => self.sequences.recount(record, &self.cache),
            }
        }
        state
    }

    fn split_sample(&mut self, index: Index, sample: u32) -> Index {
        let parent = &self.sequences[index];
        let (parent_table, computed, max_tokens) =
            (parent.table(), parent.computed(), parent.terms.max_tokens);
        let promised = parent.is_promised();
        let other = self.sequences.part(index, sample, &self.cache);
        self.set_promised(other, promised);
        // Tables were set aside when the request was let in; should none be left, the sample is computed alone.
        if let Some(Ok(table)) = parent_table.map(|table| self.cache.fork(table, computed, max_tokens)) {
            self.set_table(other, table);
            self.sequences.share_all(other, computed);
            self.note_tail(other);
        }
        let sequence = &self.sequences[other];
        if self.is_at_bound(other) && sequence.wants_token() {
            // It may never be preempted, so it runs only with everything it may still need.
            let need = blocks::still_needed(&self.cache, sequence);
            if sequence.table().is_some() && self.missing_to(other, need) == 0 {
                self.set_protected(other, true);
            } else {
                self.restart(other);
            }
        }
        if self.sequences[other].table().is_none() {
            self.requeue(other);
        }
        other
    }

    /// Ends a sequence: its blocks return at once, or stay as kept content.
    fn finish(&mut self, index: Index, reason: FinishReason) {
        if reason == FinishReason::Aborted {
            self.tell_ended(index);
        } else {
            let record = &self.sequences[index];
            let (sequence, preemptions) = (record.id(), record.preemptions);
            self.events.push(StepEvent::Finished { sequence, reason, preemptions });
        }
        if reason == FinishReason::Invalid && !fault!(InvalidRemembered) {
            self.forget_blocks(index);
        }
        let ends = matches!(reason, FinishReason::Aborted | FinishReason::Invalid);
        if ends || !self.sequences[index].terms.keep {
            self.end(index);
            return;
        }
        self.set_protected(index, false);
        self.set_promised(index, false);
        self.sequences.keep(index);
        self.ledger.note_given_up();
        self.settle(index);
    }
}

/// What became of the record that carried a request's samples.
enum Carrier {
    Runs,
    Finished(FinishReason),
    Gone,
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
