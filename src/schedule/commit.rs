//! [`Scheduler::commit`]: takes the results of a submitted step.
//!
//! Only here do lengths grow, samples part, sequences end and blocks return: on what was computed, never on what was
//! planned (I7).

use crate::error::CommitError;
use crate::ids::TokenId;
use crate::schedule::blocks;
use crate::schedule::request::{FinishReason, RowResult, StepEvent};
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Sequence, State};
use crate::schedule::step_plan::{LogitRow, StepPlan};

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
        self.events.forget_told();
        if self.cache.finish_step() {
            self.count_losses();
        }
        self.resolve_forks();
        let mut first = 0;
        let planned = std::mem::take(&mut self.planned);
        for &index in &planned {
            let end = first + self.get(index).planned_logits as usize;
            let answers = Answers {
                tokens: &plan.token_ids,
                rows: &plan.logit_rows[first..end],
                results: &results[first..end],
            };
            self.commit_sequence(index, answers);
            first = end;
        }
        self.planned = planned;
        self.planned.clear();
        self.spare_plan = plan;
        self.forget_own_tails();
        self.stats.steps += 1;
        let waste = self.cache.stats().tail_waste_tokens;
        self.stats.tail_waste_tokens_peak = self.stats.tail_waste_tokens_peak.max(waste);
        self.cache.check_poison()?;
        Ok(self.events.tell())
    }

    fn commit_sequence(&mut self, index: Index, answers: Answers<'_>) {
        self.count_rows(index);
        self.get_mut(index).drafts.clear();
        if self.get(index).aborting {
            self.finish(index, FinishReason::Aborted);
            return;
        }
        // One valid result confirms all that was computed before it, and a sequence that asks for none says so itself.
        let valid = |result: &RowResult| *result != RowResult::Invalid;
        let sequence = self.get_mut(index);
        if answers.results.iter().any(valid)
            || fault!(InvalidRemembered)
            || (!sequence.wants_token() && sequence.uncomputed() == 0)
        {
            sequence.confirmed = sequence.computed;
            self.register_blocks(index);
        }
        let finished = if !self.get(index).pending_samples.is_empty() {
            match self.part_samples(index, answers) {
                Carrier::Gone => return,
                Carrier::Runs => None,
                Carrier::Finished(reason) => Some(reason),
            }
        } else {
            self.take_answer(index, answers, 0)
        };
        // Rows of refused drafts and blocks reserved ahead return.
        let sequence = self.get(index);
        if let Some(table) = sequence.table.filter(|_| !fault!(RefusedDraftsStay)) {
            let cut = self.cache.truncate(table, sequence.computed);
            debug_assert!(cut.is_ok(), "a committed table is cut to what is computed: {cut:?}");
        }
        match finished {
            Some(reason) => self.finish(index, reason),
            None => {
                self.recount(index);
                self.settle(index);
            }
        }
    }

    /// Counts the rows in: those of known tokens are computed now, those of drafts only if they are accepted.
    fn count_rows(&mut self, index: Index) {
        let sequence = self.get_mut(index);
        let rows = std::mem::take(&mut sequence.planned_rows);
        sequence.planned_logits = 0;
        let before = sequence.computed;
        let known = if fault!(DraftsCountedIn) { rows } else { sequence.uncomputed() };
        let end = before + rows.min(known);
        sequence.computed = end;
        let again = sequence.high_water.clamp(before, end) - before;
        sequence.high_water = sequence.high_water.max(end);
        let input = sequence.input_len.clamp(before + again, end) - (before + again);
        self.stats.recomputed_tokens += u64::from(again);
        self.stats.prompt_tokens += u64::from(input);
    }

    /// Appends what the `place`-th answer says. Returns why the sequence has ended, if it has.
    fn take_answer(&mut self, index: Index, answers: Answers<'_>, place: usize) -> Option<FinishReason> {
        let Some(&result) = answers.results.get(place) else {
            // Part of a prompt, or a sequence that had nothing to generate.
            let sequence = self.get(index);
            return (sequence.uncomputed() == 0).then(|| full_reason(sequence));
        };
        let (accepted, next) = match result {
            RowResult::Token(token) => (0, token),
            RowResult::Accepted { rows, next } => (rows, next),
            RowResult::Invalid => return Some(FinishReason::Invalid),
        };
        if self.get(index).truncating.is_some() {
            // What it answers lies behind the cut.
            return None;
        }
        let drafts = answers.rows[place].row as usize + 1;
        for &draft in &answers.tokens[drafts..drafts + accepted as usize] {
            let sequence = self.get_mut(index);
            // The draft's row is in the cache already.
            sequence.computed += 1;
            sequence.high_water = sequence.high_water.max(sequence.computed);
            if let Some(reason) = self.push_token(index, draft) {
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

    /// The samples of a request part, if its input is computed: each but the first, whose record it was, takes a table of
    /// its own, sharing the input, and each takes its first new token.
    fn part_samples(&mut self, index: Index, answers: Answers<'_>) -> Carrier {
        let sequence = self.get_mut(index);
        if sequence.uncomputed() > 0 {
            return Carrier::Runs;
        }
        let samples = std::mem::take(&mut sequence.pending_samples);
        let aborted = std::mem::take(&mut sequence.aborted_samples);
        let mut alive = samples.iter().copied().filter(|sample| !aborted.contains(sample));
        if alive.next().is_none() {
            sequence.pending_samples = samples;
            self.finish(index, FinishReason::Aborted);
            return Carrier::Gone;
        }
        // All share the input before any of them goes on from it.
        let others: Vec<Index> = alive.map(|sample| self.split_sample(index, sample)).collect();
        self.renew_promise(index);
        self.recount(index);
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
                None => self.recount(record),
            }
        }
        state
    }

    fn split_sample(&mut self, index: Index, sample: u32) -> Index {
        let parent = self.get(index);
        let (parent_table, computed, max_tokens) = (parent.table, parent.computed, parent.max_tokens);
        let mut tokens = Vec::with_capacity(max_tokens as usize);
        tokens.extend_from_slice(&parent.tokens);
        let mut hashes = Vec::with_capacity(self.cache.nodes_of(max_tokens));
        hashes.extend_from_slice(&parent.hashes);
        let record = Sequence {
            id: parent.id.request().sample(sample),
            rank: parent.rank,
            arrival: parent.arrival,
            priority: parent.priority,
            namespace: parent.namespace,
            retain: parent.retain.clone(),
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
            confirmed: 0,
            hashes,
            adopted_nodes: parent.adopted_nodes,
            prefix: parent.prefix,
            high_water: computed,
            drafts: Vec::new(),
            planned_rows: 0,
            planned_logits: 0,
            preemptions: 0,
            protected: false,
            promise: None,
            may_wait: parent.may_wait,
            lacking: None,
            behind: None,
            passed: 0,
            was_let_in: true,
            kept_as: 0,
            counted: None,
            aborted_samples: Vec::new(),
            aborting: false,
            truncating: None,
        };
        let promised = parent.is_promised();
        let other = self.insert(record);
        self.set_promised(other, promised);
        self.enter_running(other);
        // Tables were set aside when the request was let in; should none be left, the sample is computed alone.
        if let Some(Ok(table)) = parent_table.map(|table| self.cache.fork(table, computed, max_tokens)) {
            self.set_table(other, table);
            let sequence = self.get_mut(other);
            sequence.computed = computed;
            sequence.confirmed = computed;
        }
        if self.is_at_bound(other) && self.get(other).wants_token() {
            // It may never be preempted, so it runs only with everything it may still need.
            let need = blocks::still_needed(&self.cache, self.get(other), self.most_rows);
            if self.get(other).table.is_some() && self.missing_to(other, need) == 0 {
                self.protect(other);
            } else {
                self.release_table(other);
            }
        }
        if self.get(other).table.is_none() {
            self.requeue(other);
        }
        other
    }

    /// Ends a sequence: its blocks return at once, or stay as kept content.
    fn finish(&mut self, index: Index, reason: FinishReason) {
        if reason == FinishReason::Aborted {
            self.tell_ended(index);
        } else {
            let Sequence { id: sequence, preemptions, .. } = *self.get(index);
            self.events.push(StepEvent::Finished { sequence, reason, preemptions });
        }
        if reason == FinishReason::Invalid && !fault!(InvalidRemembered) {
            self.forget_blocks(index);
        }
        let sequence = self.get(index);
        if !sequence.keep || matches!(reason, FinishReason::Aborted | FinishReason::Invalid) {
            self.drop_record(index);
            return;
        }
        self.leave_queue(index);
        self.unprotect(index);
        self.set_promised(index, false);
        let kept_as = self.next_kept;
        self.next_kept += 1;
        let sequence = self.get_mut(index);
        sequence.state = State::Kept;
        sequence.lacking = None;
        sequence.kept_as = kept_as;
        self.ledger.note_given_up();
        self.kept.insert(kept_as, index);
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
