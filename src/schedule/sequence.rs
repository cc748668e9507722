//! One sequence's record: its tokens, how far they are computed, and which state it is in.
//!
//! ```text
//!            admit              finish, kept
//!  Waiting ────────▶ Running ────────────────▶ Kept
//!     ▲  ◀────────── │  preempt                 │
//!     └───────────────────── extend ────────────┘
//! ```
//! A sequence that finishes and is not kept has no record any more. `tokens[..computed]` are in the cache; what follows
//! is to be computed, and the last token's logits choose the next one.

use crate::cache::{Namespace, RetainRange};
use crate::ids::{SequenceId, TableId, TokenId};
use crate::schedule::admission::Lacking;
use crate::schedule::request::{PrefixReport, Priority};
use crate::schedule::scheduler::Index;
use std::sync::Arc;

/// Place in line, and among those that run: by arrival, a class behind the first as if it came later; the samples of a
/// request by their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// Step of arrival, plus what the class adds.
    rank: u64,
    arrival: u64,
    sample: u32,
}

impl Place {
    /// No sequence comes before it.
    pub(super) const FIRST: Self = Self { rank: 0, arrival: 0, sample: 0 };

    /// Of a sequence of the first class.
    #[cfg(test)]
    pub(super) fn arrived(step: u64) -> Self {
        Self { rank: step, arrival: step, sample: 0 }
    }
}

/// Where a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// In line: new, or preempted.
    Waiting,
    /// Takes part in steps.
    Running,
    /// Has ended, and is kept to be extended or branched.
    Kept,
}

/// A table to share once the outstanding step has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingFork {
    /// Its key among the pending forks, if it waits for a step to end.
    pub(super) order: Option<u64>,
    pub(super) parent: TableId,
    /// Tokens to share.
    pub(super) at: u32,
}

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    /// A preempted sequence keeps rank and arrival, and with them its place.
    pub(super) rank: u64,
    pub(super) arrival: u64,
    pub(super) priority: Priority,
    pub(super) namespace: Namespace,
    pub(super) retain: Arc<[RetainRange]>,
    pub(super) state: State,
    pub(super) tokens: Vec<TokenId>,
    /// Input tokens of the current turn end here; the rest was generated.
    pub(super) input_len: u32,
    /// Declared maximum length.
    pub(super) max_tokens: u32,
    /// Whether `max_tokens` is the context's limit rather than the request's.
    pub(super) to_context_end: bool,
    pub(super) stop_tokens: Arc<[TokenId]>,
    pub(super) keep: bool,
    /// Samples that the first new token is chosen for; empty once it is.
    pub(super) pending_samples: Vec<u32>,
    pub(super) table: Option<TableId>,
    pub(super) fork: Option<PendingFork>,
    /// Committed tokens in the cache or, swapped out, in the host pool.
    pub(super) computed: u32,
    /// Those that a valid result has confirmed: their full blocks may be found by others.
    pub(super) confirmed: u32,
    /// Hashes of its full nodes, as far as they were asked for.
    pub(super) hashes: Vec<u64>,
    /// Nodes that it took from the prefix cache in full when it was last let in.
    pub(super) adopted_nodes: u32,
    pub(super) prefix: PrefixReport,
    /// Most tokens that were ever computed: what lies below is recomputed after a preemption.
    pub(super) high_water: u32,
    pub(super) drafts: Vec<TokenId>,
    /// Rows in the outstanding plan.
    pub(super) planned_rows: u32,
    /// Logit rows in the outstanding plan.
    pub(super) planned_logits: u32,
    pub(super) preemptions: u32,
    /// Everything it may still need is reserved, and it is not preempted.
    pub(super) protected: bool,
    /// Blocks that it and its samples have at their declared maximum, if these are promised (guaranteed admission).
    pub(super) promise: Option<u64>,
    /// Waits in line where what it needs cannot be promised at once.
    pub(super) may_wait: bool,
    /// What it lacked when it was last asked, or had no rows in a step.
    pub(super) lacking: Option<Lacking>,
    /// The running sequence that it waits behind in line.
    pub(super) behind: Option<Index>,
    /// How many were let in before it since it became the first in line.
    pub(super) passed: u32,
    /// It was let in before in its current turn.
    pub(super) was_let_in: bool,
    /// While it is in line or runs, what it adds to the sums over all that do.
    pub(super) counted: Option<Counted>,
    /// Its number among those that were kept.
    pub(super) kept_as: u64,
    /// Pending samples to be aborted when the outstanding step ends.
    pub(super) aborted_samples: Vec<u32>,
    /// To be aborted when the outstanding step ends.
    pub(super) aborting: bool,
    /// To be cut to this length when the outstanding step ends.
    pub(super) truncating: Option<u32>,
}

/// A sequence's part of the scheduler's sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    /// Running sequences that it stands for.
    pub(super) running: u32,
    /// Tables set aside for it and its samples.
    pub(super) tables: u32,
    /// Blocks that it was let in for and does not have yet, while it runs and nothing is reserved for it.
    pub(super) owed: u32,
}

impl Sequence {
    /// Tables that it will need beside its own: for samples that have not parted, and where it shares its parent's blocks
    /// when the outstanding step has ended.
    pub(super) fn tables_set_aside(&self) -> u32 {
        match (self.table, self.fork) {
            (Some(_), _) => self.width() - 1,
            (None, Some(_)) => self.width(),
            (None, None) => 0,
        }
    }

    pub(super) fn place(&self) -> Place {
        Place { rank: self.rank, arrival: self.arrival, sample: self.id.sample() }
    }

    pub(super) fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Its tokens but for those that are cut off when the outstanding step ends.
    pub(super) fn tokens_left(&self) -> &[TokenId] {
        &self.tokens[..self.truncating.map_or(self.tokens.len(), |len| len as usize)]
    }

    /// Tokens whose keys and values are not in the cache: at least one while it waits or runs.
    pub(super) fn uncomputed(&self) -> u32 {
        self.len() - self.computed
    }

    /// One row per step from here on, drafts apart.
    pub(super) fn is_decoding(&self) -> bool {
        self.uncomputed() == 1 && self.computed > 0
    }

    /// Whether the last row's logits are wanted.
    pub(super) fn wants_token(&self) -> bool {
        self.len() < self.max_tokens
    }

    /// Drafts that the next step verifies: none until the first token is chosen, none beyond the declared maximum.
    pub(super) fn usable_drafts(&self) -> u32 {
        if self.uncomputed() != 1 || !self.pending_samples.is_empty() || !self.wants_token() {
            return 0;
        }
        // Drafts and the token after them fit below the maximum.
        (self.drafts.len() as u32).min(self.max_tokens - self.len() - 1)
    }

    /// Whether it has something that others wait for, or will have: a table, one set aside, or a promise.
    pub(super) fn has_claims(&self) -> bool {
        self.table.is_some() || self.fork.is_some() || self.is_promised()
    }

    /// Whether its declared maximum is promised.
    pub(super) fn is_promised(&self) -> bool {
        self.promise.is_some()
    }

    /// Running sequences that this one stands for: its samples until they part.
    pub(super) fn width(&self) -> u32 {
        (self.pending_samples.len() as u32).max(1)
    }
}
