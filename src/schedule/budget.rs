//! A step's budgets, and how those that run share them. Pure arithmetic: it knows neither records nor blocks.
//!
//! What decoding sequences want is set aside first. Each prompt that is being read takes half of the rows left, the last
//! one all of them, and what is left then goes to the first ones. So a short prompt is read at once while a long one is
//! read on. While a request may be let in, the half that is left is for it.

use crate::schedule::scheduler::Index;
use crate::schedule::sequence::Wants;
use crate::schedule::step_plan::rows_work;

/// Rows and (row, key) pairs: what is left of a step, or what some rows take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Budget {
    pub(super) rows: u32,
    pub(super) work: u64,
}

impl Budget {
    /// What `rows` rows after `computed` tokens take.
    pub(super) fn of(computed: u32, rows: u32) -> Self {
        let rows_wide = u64::from(rows);
        Self { rows, work: rows_work(rows_wide, u64::from(computed) + rows_wide) }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self { rows: self.rows.saturating_add(other.rows), work: self.work.saturating_add(other.work) }
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Self { rows: self.rows.saturating_sub(other.rows), work: self.work.saturating_sub(other.work) }
    }

    pub(super) fn covers(self, other: Self) -> bool {
        other.rows <= self.rows && other.work <= self.work
    }

    /// What the most rows that this allows take, up to `rows`, after a context of `computed` tokens.
    pub(super) fn most(self, computed: u32, rows: u32) -> Self {
        let rows = rows.min(self.rows);
        let all = Self::of(computed, rows);
        if all.work <= self.work {
            return all;
        }
        let (mut low, mut high) = (0, rows);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if Self::of(computed, middle).work <= self.work { low = middle } else { high = middle }
        }
        Self::of(computed, low)
    }
}

/// A running sequence in the step that is planned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    pub(super) index: Index,
    pub(super) wants: Wants,
    pub(super) kind: Kind,
}

/// What a turn is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// One row per step from here on, except for drafts: they are set aside.
    Decode,
    /// A prompt that is read, and its share of the rows.
    Prompt(u32),
}

impl Turn {
    pub(super) fn new(index: Index, wants: Wants) -> Self {
        let decodes = wants.known == 1 && wants.computed > 0;
        Self { index, wants, kind: if decodes { Kind::Decode } else { Kind::Prompt(0) } }
    }

    /// What all the rows take that it wants.
    pub(super) fn wanted(&self) -> Budget {
        Budget::of(self.wants.computed, self.wants.known + self.wants.drafts)
    }
}

/// What decoding sequences want, and the row that the first prompt needs.
pub(super) fn wanted(turns: &[Turn]) -> (Budget, Budget) {
    let (mut decoding, mut first_prompt) = (Budget::default(), None);
    for turn in turns {
        match turn.kind {
            Kind::Decode => decoding = decoding.plus(turn.wanted()),
            Kind::Prompt(_) => {
                first_prompt.get_or_insert_with(|| Budget::of(turn.wants.computed, 1));
            }
        }
    }
    (decoding, first_prompt.unwrap_or_default())
}

/// Shares `rows` rows out among the prompts that are being read, with or without `newcomers` to come. Returns the place of
/// the last prompt.
pub(super) fn share_rows(turns: &mut [Turn], rows: u32, newcomers: impl FnOnce() -> bool) -> Option<usize> {
    let last = turns.iter().rposition(|turn| matches!(turn.kind, Kind::Prompt(_)))?;
    let (mut left, newcomers) = (rows, newcomers());
    for (place, turn) in turns.iter_mut().enumerate() {
        if let Kind::Prompt(share) = &mut turn.kind {
            let half = if place == last && !newcomers { left } else { left.div_ceil(2) };
            *share = half.min(turn.wants.known);
            left -= *share;
        }
    }
    for turn in turns.iter_mut().filter(|_| !newcomers) {
        if let Kind::Prompt(share) = &mut turn.kind {
            let more = left.min(turn.wants.known - *share);
            *share += more;
            left -= more;
        }
    }
    Some(last)
}

/// What a prompt may use of `limit`: its share of the rows and, unless all is for the last one, half the work.
pub(super) fn prompt_limit(limit: Budget, turn: &Turn, share: u32, takes_all: bool) -> Budget {
    let least = Budget::of(turn.wants.computed, 1).work;
    let work = if takes_all { limit.work } else { (limit.work / 2).max(least).min(limit.work) };
    Budget { rows: limit.rows.min(share), work }
}
