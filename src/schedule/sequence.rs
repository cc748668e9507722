//! One sequence's record, and the states that it goes through. [`Sequences`] owns all records and the queues they stand in;
//! it alone changes them; all others read.
//!
//! ```text
//!      add, add_branch                             part
//!            │               let_in                 │
//!            ▼    ┌───────────────────────────┐     ▼
//!         Waiting ┘                           └▶ Running
//!            ▲  ▲            requeue              │   │
//!            │  └─────────────────────────────────┘   │ keep
//!            │               extend                   ▼
//!            └──────────────────────────────────────Kept
//!
//!         any state ─── end ───▶ no record
//! ```
//!
//! | state | what holds in it |
//! |---|---|
//! | Waiting | In line by its place, or behind a running sequence that computes what it needs; not protected, no rows in the step. At least one token is not computed. It may hold a table, in the pool or out, have one set aside, or be promised its blocks. |
//! | Running | Among those that run, by its place. Once it has a table it takes part in steps; it has one but for the moment in which it is let in, or parts from others. At least one token is not computed, but for the moment before its end. |
//! | Kept | By the order of its end, to be extended or branched; not protected, not promised, no rows in the step. Its blocks are taken first; without them it has nothing computed. |
//!
//! In every state `computed <= len <= max_tokens`, and without a table nothing is computed. `tokens[..computed]` are in the
//! cache or, swapped out, in the host pool; what follows is to be computed, and the last token's logits choose the next
//! one. While its rows are in the outstanding step, the table is longer than `computed` by those rows. With a table,
//! `confirmed <= computed`; a branch that waits for its parent's step is confirmed as far as its parent.
//!
//! | what changes | functions |
//! |---|---|
//! | `computed`, upwards | `open`, `share` and `share_all` (what is known already), `commit` and `take_answer` (rows that were committed) |
//! | `computed`, downwards | `make_cut`, `extend` (the last token is computed again), `lose` (blocks that did not arrive), `restart` (all blocks given up) |
//! | place | `add`, `add_branch`, `part` and `extend` (by arrival), `rename` (another sample stands for all); a preempted sequence keeps it |
//! | what is planned | `plan`, undone by `unplan`, done by `commit` |

mod consistency;
mod lengths;
mod results;
mod samples;
mod sequences;
mod sums;

use crate::cache::{KvCache, Namespace, RetainRange};
use crate::ids::{SequenceId, TableId, TokenId};
use crate::schedule::admission::Lacking;
use crate::schedule::request::{PrefixReport, Priority, Request};
use crate::schedule::scheduler::Index;
use crate::schedule::step_plan::LogitRow;
pub(super) use results::{Answers, Committed, Next, Taken};
pub(super) use sequences::Sequences;
use std::sync::Arc;
use sums::Counted;

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
    /// Its key among the pending forks.
    order: u64,
    pub(super) parent: TableId,
    /// Tokens to share.
    pub(super) at: u32,
}

/// What the request of a sequence's current turn asks for.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub(super) namespace: Namespace,
    pub(super) retain: Arc<[RetainRange]>,
    /// Input tokens end here; the rest was generated.
    pub(super) input_len: u32,
    /// Declared maximum length.
    pub(super) max_tokens: u32,
    /// Whether `max_tokens` is the context's limit rather than the request's.
    to_context_end: bool,
    stop_tokens: Arc<[TokenId]>,
    pub(super) keep: bool,
}

/// What a sequence wants of the next step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wants {
    pub(super) computed: u32,
    /// Tokens that are not computed.
    pub(super) known: u32,
    /// Drafts to verify after them: none until the first token is chosen, none beyond the declared maximum.
    pub(super) drafts: u32,
}

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) terms: Terms,
    id: SequenceId,
    /// A preempted sequence keeps rank and arrival, and with them its place.
    rank: u64,
    arrival: u64,
    priority: Priority,
    state: State,
    tokens: Vec<TokenId>,
    /// Committed tokens in the cache or, swapped out, in the host pool.
    computed: u32,
    /// Those that a valid result has confirmed: their full blocks may be found by others.
    confirmed: u32,
    /// Most tokens that were ever computed: what lies below is recomputed after a preemption.
    high_water: u32,
    /// Hashes of its full nodes, as far as they were asked for.
    hashes: Vec<u64>,
    drafts: Vec<TokenId>,
    table: Option<TableId>,
    fork: Option<PendingFork>,
    /// Samples that the first new token is chosen for; empty once it is.
    samples: Vec<u32>,
    /// Those of them to be aborted when the outstanding step ends.
    aborted_samples: Vec<u32>,
    /// To be aborted when the outstanding step ends.
    aborting: bool,
    /// To be cut to this length when the outstanding step ends.
    truncating: Option<u32>,
    /// Rows, and logit rows, in the outstanding plan.
    planned_rows: u32,
    planned_logits: u32,
    /// What the prefix cache had when it was last let in, and how many nodes it took in full.
    pub(super) prefix: PrefixReport,
    pub(super) adopted_nodes: u32,
    /// How often it was preempted in its current turn.
    pub(super) preemptions: u32,
    /// Everything it may still need is reserved, and it is not preempted.
    protected: bool,
    /// Blocks that it and its samples have at their declared maximum, if these are promised (guaranteed admission).
    promise: Option<u64>,
    /// What it lacked when it was last asked, or had no rows in a step.
    pub(super) lacking: Option<Lacking>,
    /// The running sequence that it waits behind in line.
    behind: Option<Index>,
    /// How many were let in before it since it became the first in line.
    pub(super) passed: u32,
    /// It was let in before in its current turn.
    pub(super) was_let_in: bool,
    /// While it is in line or runs, what it adds to the sums over all that do.
    counted: Option<Counted>,
    /// Its number among those that were kept.
    kept_as: u64,
}

/// How a record is read.
impl std::ops::Index<Index> for Sequences {
    type Output = Sequence;

    /// # Panics
    /// For a record that has ended: an index in a queue has one.
    fn index(&self, index: Index) -> &Sequence {
        self.records[index].as_ref().expect("an index in a queue has a record")
    }
}

impl Sequence {
    /// A sequence that waits, and goes on from `prefix` with the request's tokens.
    fn new(id: SequenceId, request: Request, prefix: Vec<TokenId>, max_tokens: u32) -> Self {
        let mut tokens = prefix;
        tokens.extend_from_slice(&request.tokens);
        let terms = Terms {
            namespace: request.namespace,
            retain: request.retain.into(),
            input_len: tokens.len() as u32,
            max_tokens,
            to_context_end: request.max_new_tokens.is_none(),
            stop_tokens: request.stop_tokens.into(),
            keep: request.keep,
        };
        let samples = (0..request.samples).collect();
        Self { samples, ..Self::bare(id, terms, request.priority, tokens) }
    }

    /// A sequence of which nothing is computed or asked.
    fn bare(id: SequenceId, terms: Terms, priority: Priority, tokens: Vec<TokenId>) -> Self {
        Self {
            terms,
            id,
            rank: 0,
            arrival: 0,
            priority,
            state: State::Waiting,
            tokens,
            computed: 0,
            confirmed: 0,
            high_water: 0,
            hashes: Vec::new(),
            drafts: Vec::new(),
            table: None,
            fork: None,
            samples: Vec::new(),
            aborted_samples: Vec::new(),
            aborting: false,
            truncating: None,
            planned_rows: 0,
            planned_logits: 0,
            prefix: PrefixReport::default(),
            adopted_nodes: 0,
            preemptions: 0,
            protected: false,
            promise: None,
            lacking: None,
            behind: None,
            passed: 0,
            was_let_in: false,
            counted: None,
            kept_as: 0,
        }
    }

    pub(super) fn id(&self) -> SequenceId {
        self.id
    }

    pub(super) fn place(&self) -> Place {
        Place { rank: self.rank, arrival: self.arrival, sample: self.id.sample() }
    }

    pub(super) fn priority(&self) -> Priority {
        self.priority
    }

    pub(super) fn state(&self) -> State {
        self.state
    }

    pub(super) fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub(super) fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Its tokens but for those that are cut off when the outstanding step ends.
    pub(super) fn tokens_left(&self) -> &[TokenId] {
        &self.tokens[..self.truncating.map_or(self.tokens.len(), |len| len as usize)]
    }

    /// Its rows of a step: known tokens from `computed` on, then drafts.
    pub(super) fn row_tokens(&self, rows: u32) -> (&[TokenId], &[TokenId]) {
        let start = self.computed as usize;
        let known = (rows as usize).min(self.tokens.len() - start);
        (&self.tokens[start..start + known], &self.drafts[..rows as usize - known])
    }

    /// Asks for the logits of its last known token's row and of those of the drafts behind it, if all that is known is among
    /// its `rows` from `first_row` on and another token is wanted. Returns how many logit rows that are.
    pub(super) fn request_logits(&self, logits: &mut Vec<LogitRow>, first_row: u32, rows: u32) -> u32 {
        let (len, known) = (self.tokens.len() as u32, self.tokens.len() as u32 - self.computed);
        if rows < known || len >= self.terms.max_tokens {
            return 0;
        }
        let row = |sequence, num_rows| LogitRow {
            sequence,
            row: first_row + known - 1,
            num_rows,
            next_position: len,
        };
        if self.samples.is_empty() {
            logits.push(row(self.id, 1 + rows - known));
            return 1;
        }
        logits.extend(self.samples.iter().map(|&sample| row(self.id.request().sample(sample), 1)));
        self.samples.len() as u32
    }

    pub(super) fn hashes(&self) -> &[u64] {
        &self.hashes
    }

    pub(super) fn computed(&self) -> u32 {
        self.computed
    }

    pub(super) fn confirmed(&self) -> u32 {
        self.confirmed
    }

    pub(super) fn high_water(&self) -> u32 {
        self.high_water
    }

    /// Tokens whose keys and values are not in the cache: at least one while it waits or runs.
    pub(super) fn uncomputed(&self) -> u32 {
        self.tokens.len() as u32 - self.computed
    }

    pub(super) fn wants(&self) -> Wants {
        let (len, max) = (self.tokens.len() as u32, self.terms.max_tokens);
        let known = len - self.computed;
        let none = known != 1 || !self.samples.is_empty() || len >= max;
        // Drafts and the token after them fit below the maximum.
        let drafts = if none { 0 } else { (self.drafts.len() as u32).min(max - len - 1) };
        Wants { computed: self.computed, known, drafts }
    }

    /// Whether the last row's logits are wanted.
    pub(super) fn wants_token(&self) -> bool {
        (self.tokens.len() as u32) < self.terms.max_tokens
    }

    pub(super) fn table(&self) -> Option<TableId> {
        self.table
    }

    pub(super) fn fork(&self) -> Option<PendingFork> {
        self.fork
    }

    /// Whether it has blocks, or will share some when the outstanding step ends.
    pub(super) fn has_blocks(&self) -> bool {
        self.table.is_some() || self.fork.is_some()
    }

    /// Whether it has something that others wait for, or will have: a table, one set aside, or a promise.
    pub(super) fn has_claims(&self) -> bool {
        self.table.is_some() || self.fork.is_some() || self.promise.is_some()
    }

    /// Whether its declared maximum is promised.
    pub(super) fn is_promised(&self) -> bool {
        self.promise.is_some()
    }

    pub(super) fn is_protected(&self) -> bool {
        self.protected
    }

    pub(super) fn is_planned(&self) -> bool {
        self.planned_rows > 0
    }

    /// Rows in the outstanding plan.
    pub(super) fn planned_rows(&self) -> u32 {
        self.planned_rows
    }

    pub(super) fn is_aborting(&self) -> bool {
        self.aborting
    }

    /// The length that it is to be cut to.
    pub(super) fn cut(&self) -> Option<u32> {
        self.truncating
    }

    /// Samples that have not parted.
    pub(super) fn samples(&self) -> &[u32] {
        &self.samples
    }

    /// Running sequences that this one stands for: its samples until they part.
    pub(super) fn width(&self) -> u32 {
        (self.samples.len() as u32).max(1)
    }

    /// Growing to the declared maximum reallocates nothing.
    fn reserve(&mut self, cache: &KvCache) {
        let (tokens, nodes) = (self.terms.max_tokens as usize, cache.nodes_of(self.terms.max_tokens));
        self.tokens.reserve(tokens.saturating_sub(self.tokens.len()));
        self.hashes.reserve(nodes.saturating_sub(self.hashes.len()));
    }
}
