//! What the results of a step make of a record: its rows are computed, valid results confirm them, and new tokens follow.

use crate::cache::KvCache;
use crate::ids::{SequenceId, TokenId};
use crate::schedule::request::{FinishReason, RowResult};
use crate::schedule::sequence::Sequence;
use crate::schedule::step_plan::LogitRow;

/// What a plan asked, and what the application answered.
#[derive(Clone, Copy)]
pub(in crate::schedule) struct Answers<'a> {
    /// All tokens of the plan, drafts among them.
    pub(in crate::schedule) tokens: &'a [TokenId],
    pub(in crate::schedule) rows: &'a [LogitRow],
    /// One for each of `rows`.
    pub(in crate::schedule) results: &'a [RowResult],
}

/// What a commit has made of a sequence's record, and what others need to know of it.
pub(in crate::schedule) struct Committed<'a> {
    /// Rows that were computed before.
    pub(in crate::schedule) again: u32,
    /// Rows of input tokens that were not.
    pub(in crate::schedule) input: u32,
    /// Whether rows of drafts were among them: those that are refused return.
    pub(in crate::schedule) has_drafts: bool,
    pub(in crate::schedule) next: Next<'a>,
    /// Whether anything was asked of it that is done now.
    pub(in crate::schedule) is_asked: bool,
    /// Whether others can find more of its input now.
    pub(in crate::schedule) is_found_further: bool,
}

/// How a sequence goes on.
pub(in crate::schedule) enum Next<'a> {
    /// It ends, because an application has ended it.
    Aborts,
    /// Its input is computed: samples part, and then take these answers.
    Parts(Answers<'a>),
    /// It has taken its answer.
    Took(Taken<'a>),
}

/// What a sequence has taken of an answer.
pub(in crate::schedule) struct Taken<'a> {
    pub(in crate::schedule) sequence: SequenceId,
    /// Tokens that it has appended: drafts that hold …
    pub(in crate::schedule) drafts: &'a [TokenId],
    /// … and the token after them.
    pub(in crate::schedule) next: Option<TokenId>,
    /// Why it has ended, if it has.
    pub(in crate::schedule) reason: Option<FinishReason>,
}

impl Sequence {
    /// Its rows are computed: those of known tokens all, those of drafts as far as they are accepted. The first of the
    /// answers that are `left` are its own.
    #[inline]
    pub(super) fn commit<'a>(&mut self, left: &mut Answers<'a>, cache: &mut KvCache) -> Committed<'a> {
        let rows = std::mem::take(&mut self.planned_rows);
        let logits = std::mem::take(&mut self.planned_logits) as usize;
        let answers = Answers { rows: &left.rows[..logits], results: &left.results[..logits], ..*left };
        (left.rows, left.results) = (&left.rows[logits..], &left.results[logits..]);
        self.drafts.clear();
        let (before, len) = (self.computed, self.tokens.len() as u32);
        let known = if fault!(DraftsCountedIn) { rows } else { len - before };
        let end = before + rows.min(known);
        self.computed = end;
        let again = self.high_water.clamp(before, end) - before;
        self.high_water = self.high_water.max(end);
        let input = self.terms.input_len.clamp(before + again, end) - (before + again);
        let has_drafts = before + rows > len;
        let (is_asked, next) = (self.is_asked(), self.go_on(answers));
        let is_found_further = self.confirm(end, answers.results, cache);
        Committed { again, input, has_drafts, next, is_asked, is_found_further }
    }

    /// Takes its answer, unless it ends, or its samples part first.
    #[inline]
    fn go_on<'a>(&mut self, answers: Answers<'a>) -> Next<'a> {
        if self.aborting {
            return Next::Aborts;
        }
        if !self.samples.is_empty() && self.computed >= self.tokens.len() as u32 {
            if self.samples.len() > 1 || !self.aborted_samples.is_empty() {
                return Next::Parts(answers);
            }
            // One that is alone has none to part from.
            self.samples.clear();
        }
        Next::Took(self.take_answer(answers, 0))
    }

    /// Appends what the `place`-th answer says, unless that lies behind a cut.
    #[inline]
    pub(super) fn take_answer<'a>(&mut self, answers: Answers<'a>, place: usize) -> Taken<'a> {
        let mut taken = Taken { sequence: self.id, drafts: &[], next: None, reason: None };
        let (accepted, next) = match answers.results.get(place) {
            Some(&RowResult::Token(token)) => (0, token),
            Some(&RowResult::Accepted { rows, next }) => (rows as usize, next),
            Some(RowResult::Invalid) => return Taken { reason: Some(FinishReason::Invalid), ..taken },
            // Part of a prompt, or a sequence that had nothing to generate.
            None => {
                let is_complete = self.computed == self.tokens.len() as u32;
                return Taken { reason: is_complete.then(|| self.full_reason()), ..taken };
            }
        };
        if self.truncating.is_some() {
            return taken;
        }
        let drafts = &answers.tokens[answers.rows[place].row as usize + 1..][..accepted];
        for (index, &draft) in drafts.iter().enumerate() {
            // The draft's row is in the cache already.
            self.computed += 1;
            self.high_water = self.high_water.max(self.computed);
            (taken.drafts, taken.reason) = (&drafts[..=index], self.push(draft));
            if taken.reason.is_some() {
                return taken;
            }
        }
        (taken.next, taken.reason) = (Some(next), self.push(next));
        taken
    }

    /// Appends a token. Returns why the sequence ends with it, if it does.
    fn push(&mut self, token: TokenId) -> Option<FinishReason> {
        self.tokens.push(token);
        if self.terms.stop_tokens.contains(&token) {
            return Some(FinishReason::Stop);
        }
        (self.tokens.len() as u32 >= self.terms.max_tokens).then(|| self.full_reason())
    }

    /// Why it has ended, now that all its tokens are there.
    fn full_reason(&self) -> FinishReason {
        if self.terms.to_context_end { FinishReason::ContextFull } else { FinishReason::MaxTokens }
    }

    /// One valid result confirms all that was computed before it, the first `len` tokens, and a sequence that asks for none
    /// says so itself. Others find the full blocks of what is confirmed (I6). Returns whether they find more of its input now.
    #[inline]
    fn confirm(&mut self, len: u32, results: &[RowResult], cache: &mut KvCache) -> bool {
        let is_complete = len == self.tokens.len() as u32 && len >= self.terms.max_tokens;
        let is_valid = is_complete || results.iter().any(|result| *result != RowResult::Invalid);
        if self.aborting || !is_valid && !fault!(InvalidRemembered) {
            return false;
        }
        self.confirmed = len;
        let Some(table) = self.table else { return false };
        let Self { terms, tokens, hashes, .. } = self;
        let end = cache.register(table, &terms.namespace, &tokens[..len as usize], hashes, &terms.retain);
        end.is_some_and(|end| end <= terms.input_len)
    }

    /// Whether something was asked of it that is done when the outstanding step ends.
    pub(in crate::schedule) fn is_asked(&self) -> bool {
        self.aborting || self.truncating.is_some() || !self.aborted_samples.is_empty()
    }
}
