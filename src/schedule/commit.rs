//! [`Scheduler::commit`]: takes the results of a submitted step.
//!
//! Only here do lengths grow, samples part, sequences end and blocks return: on what was computed, never on what was
//! planned (I7).

use crate::error::CommitError;
use crate::ids::TokenId;
use crate::schedule::blocks;
use crate::schedule::request::{Admission, FinishReason, RowResult, StepEvent};
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Counts, Parting};
use crate::schedule::step_plan::{LogitRow, StepPlan};

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
        let mut first = 0;
        let planned = std::mem::take(&mut self.planned);
        for &index in &planned {
            let counts = self.sequences.count_in(index);
            let end = first + counts.logits;
            let answers = Answers {
                tokens: &plan.token_ids,
                rows: &plan.logit_rows[first..end],
                results: &results[first..end],
            };
            self.commit_sequence(index, counts, answers);
            first = end;
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

    fn commit_sequence(&mut self, index: Index, counts: Counts, answers: Answers<'_>) {
        self.stats.recomputed_tokens += u64::from(counts.again);
        self.stats.prompt_tokens += u64::from(counts.input);
        if counts.is_aborting {
            self.finish(index, FinishReason::Aborted);
            return;
        }
        // One valid result confirms all that was computed before it, and a sequence that asks for none says so itself.
        let valid = |result: &RowResult| *result != RowResult::Invalid;
        if answers.results.iter().any(valid)
            || fault!(InvalidRemembered)
            || self.sequences[index].is_complete()
        {
            self.register_blocks(index);
        }
        let finished = if counts.has_samples {
            match self.part_samples(index, answers) {
                Carrier::Gone => return,
                Carrier::Runs => None,
                Carrier::Finished(reason) => Some(reason),
            }
        } else {
            self.take_answer(index, answers, 0)
        };
        if counts.has_drafts && !fault!(RefusedDraftsStay) {
            self.give_back(index);
        }
        match finished {
            Some(reason) => self.finish(index, reason),
            None => {
                self.sequences.recount(index, &self.cache);
                if counts.is_asked {
                    self.settle(index);
                }
            }
        }
    }

    /// Rows of refused drafts return.
    fn give_back(&mut self, index: Index) {
        let sequence = &self.sequences[index];
        if let Some(table) = sequence.table() {
            let cut = self.cache.truncate(table, sequence.computed());
            debug_assert!(cut.is_ok(), "a committed table is cut to what is computed: {cut:?}");
        }
    }

    /// Appends what the `place`-th answer says. Returns why the sequence has ended, if it has.
    fn take_answer(&mut self, index: Index, answers: Answers<'_>, place: usize) -> Option<FinishReason> {
        let Some(&result) = answers.results.get(place) else {
            // Part of a prompt, or a sequence that had nothing to generate.
            let sequence = &self.sequences[index];
            return (sequence.uncomputed() == 0).then(|| sequence.full_reason());
        };
        let (accepted, next) = match result {
            RowResult::Token(token) => (0, token),
            RowResult::Accepted { rows, next } => (rows, next),
            RowResult::Invalid => return Some(FinishReason::Invalid),
        };
        let drafts = answers.rows[place].row as usize + 1;
        for &draft in &answers.tokens[drafts..drafts + accepted as usize] {
            // The draft's row is in the cache already.
            if let Some(reason) = self.push_token(index, draft, true) {
                return Some(reason);
            }
        }
        self.push_token(index, next, false)
    }

    /// Appends a token, unless what the step answers lies behind a cut.
    fn push_token(&mut self, index: Index, token: TokenId, draft: bool) -> Option<FinishReason> {
        let (sequence, reason) = self.sequences.push(index, token, draft)?;
        self.events.push(StepEvent::Token { sequence, token });
        self.stats.generated_tokens += 1;
        reason
    }

    /// The samples of a request part, if its input is computed: each but the first, whose record it was, takes a table of
    /// its own, sharing the input, and each takes its first new token.
    fn part_samples(&mut self, index: Index, answers: Answers<'_>) -> Carrier {
        let (samples, aborted) = match self.sequences.part_samples(index) {
            Parting::NotYet => return Carrier::Runs,
            Parting::NoneAlive => {
                self.finish(index, FinishReason::Aborted);
                return Carrier::Gone;
            }
            Parting::Now { samples, aborted } => (samples, aborted),
        };
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
            match self.take_answer(record, answers, place) {
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

/// What a plan asked of one sequence, and what the application answered.
#[derive(Clone, Copy)]
struct Answers<'a> {
    /// All tokens of the plan, drafts among them.
    tokens: &'a [TokenId],
    rows: &'a [LogitRow],
    results: &'a [RowResult],
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
