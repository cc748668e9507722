//! What one step does, as flat `u32` arrays in the order in which the device reads them.
//!
//! A [`StepPlan`] is a value: the scheduler (or a [`StepBuilder`](crate::StepBuilder)) fills it, the device part and the
//! CPU twins read it, `commit` takes it back. It holds no bytes of keys or values and no policy. It can be written down and
//! read back (`Display`, `FromStr`), in another process, too.
//!
//! Rows are the step's new tokens, sequence after sequence; padding rows, if any, come last and belong to no sequence.

use crate::cache::{BlockCopy, BlockSwap};
use crate::ids::{SequenceId, StepId};

/// A run of consecutive block-table entries that changed since the last committed step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableChange {
    /// The table's row on the device, `0..max_sequences`.
    pub table_row: u32,
    /// Index of the first changed entry within the table.
    pub first_entry: u32,
    /// Where the run's entries start in [`StepPlan::changed_entries`].
    pub start: u32,
    /// Number of entries.
    pub len: u32,
}

/// Rows whose logits the application must compute, for one sample.
///
/// Normally one row. When drafts are verified, `num_rows` consecutive rows: the last committed token's, then one per
/// draft. Several samples of one prompt ask for the same row once each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogitRow {
    /// The sequence that the result belongs to.
    pub sequence: SequenceId,
    /// First row, an index into [`StepPlan::token_ids`].
    pub row: u32,
    /// Number of rows.
    pub num_rows: u32,
    /// Position of the token to be chosen after the first row.
    pub next_position: u32,
}

/// One step: which rows are computed, where their keys and values go, and what they attend to.
///
/// | array | length | content |
/// |---|---|---|
/// | `token_ids` | rows | input tokens |
/// | `positions` | rows | position of the token in its sequence, from 0 |
/// | `query_starts` | sequences + 1 | first row of each sequence, then the end of the last |
/// | `context_lens` | sequences | tokens that the sequence's last row sees, itself included |
/// | `table_rows` | sequences | row of the sequence's block table on the device |
/// | `swap_outs`, `swap_ins` | blocks | blocks moved to the host pool, then blocks brought back, before anything is copied |
/// | `block_copies` | copies | blocks copied before anything is written |
/// | `logit_rows` | samples | rows to compute logits for |
/// | `stacks` | stacks of layers | what differs between them: |
/// | `slot_mapping` | rows | `block * P + slot in block`, or [`PADDING_SLOT`](crate::PADDING_SLOT) |
/// | `table_changes`, `changed_entries` | runs, entries | what changed in the tables since the last committed step |
///
/// Blocks are copied and moved whole, whatever stack they belong to, so their lists are the step's.
///
/// Row `i` of a sequence with `n` rows and context `c` sees the keys `0 ..= c - n + i`.
///
/// Its text (`Display`) has every number, and is read back by `FromStr`: a history of plans can be logged, and replayed on
/// another attention object, which `PagedAttention::use_cache` ties to the logged plans'
/// [`cache_instance`](Self::cache_instance). A clone of a plan is as good as the plan, but only one of them can be
/// committed.
///
/// Dropping a plan undoes it: the next `schedule` rolls its growth back. Committing one asserts that its commands were
/// submitted. Where they were not, the device part finds out and says so when the next plan is prepared
/// (`PrepareError::StepNotExecuted`).
#[must_use = "a plan that is not committed is rolled back by the next `schedule`"]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    pub(crate) step: StepId,
    pub(crate) cache_instance: u64,
    pub(crate) fingerprint: u64,
    pub(crate) forgotten_devices: u64,
    pub(crate) last_committed: StepId,
    pub(crate) token_ids: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    pub(crate) query_starts: Vec<u32>,
    pub(crate) context_lens: Vec<u32>,
    pub(crate) table_rows: Vec<u32>,
    pub(crate) swap_outs: Vec<BlockSwap>,
    pub(crate) swap_ins: Vec<BlockSwap>,
    pub(crate) block_copies: Vec<BlockCopy>,
    pub(crate) logit_rows: Vec<LogitRow>,
    pub(crate) stacks: Vec<StackPlan>,
}

/// What a step does in one stack of layers, whose blocks are its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StackPlan {
    pub(crate) slot_mapping: Vec<u32>,
    pub(crate) table_changes: Vec<TableChange>,
    pub(crate) changed_entries: Vec<u32>,
}

impl StackPlan {
    /// Slots that the rows' keys and values are written to, `[rows]`.
    pub fn slot_mapping(&self) -> &[u32] {
        &self.slot_mapping
    }

    /// Runs of changed block-table entries.
    pub fn table_changes(&self) -> &[TableChange] {
        &self.table_changes
    }

    /// The changed entries themselves: block ids, run after run.
    pub fn changed_entries(&self) -> &[u32] {
        &self.changed_entries
    }

    fn clear(&mut self) {
        self.slot_mapping.clear();
        self.table_changes.clear();
        self.changed_entries.clear();
    }
}

impl StepPlan {
    /// Which step this is; every plan has a higher one than the plan before it.
    pub fn step(&self) -> StepId {
        self.step
    }

    /// Identifies the cache object that made the plan, within this process.
    pub fn cache_instance(&self) -> u64 {
        self.cache_instance
    }

    /// [`CacheConfig::fingerprint`](crate::CacheConfig::fingerprint) of the cache that made the plan.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// How many devices the cache had [forgotten](crate::KvCache::forget_device) when the plan was made: it reads nothing
    /// that lay on those.
    pub fn forgotten_devices(&self) -> u64 {
        self.forgotten_devices
    }

    /// The last step before this one that was committed and has rows, since the cache last
    /// [forgot a device](crate::KvCache::forget_device); 0 if there is none. This one relies on what that one and those
    /// before it have written.
    pub fn last_committed(&self) -> StepId {
        self.last_committed
    }

    /// Rows of the step, padding included.
    pub fn num_rows(&self) -> u32 {
        self.token_ids.len() as u32
    }

    /// Sequences that have rows in the step.
    pub fn num_sequences(&self) -> u32 {
        self.context_lens.len() as u32
    }

    /// Input tokens, `[rows]`.
    pub fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// Positions of the input tokens in their sequences, `[rows]`.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// What the step does in each stack of layers, in their order; all of them have the same rows. A model whose layers are
    /// all alike has one.
    pub fn stacks(&self) -> &[StackPlan] {
        &self.stacks
    }

    /// The first stack's [`slot_mapping`](StackPlan::slot_mapping).
    pub fn slot_mapping(&self) -> &[u32] {
        self.stacks.first().map_or(&[], StackPlan::slot_mapping)
    }

    /// First row of each sequence, then the end of the last, `[sequences + 1]`.
    pub fn query_starts(&self) -> &[u32] {
        &self.query_starts
    }

    /// Tokens that each sequence's last row sees, `[sequences]`.
    pub fn context_lens(&self) -> &[u32] {
        &self.context_lens
    }

    /// Each sequence's block-table row on the device, `[sequences]`.
    pub fn table_rows(&self) -> &[u32] {
        &self.table_rows
    }

    /// The first stack's [`table_changes`](StackPlan::table_changes).
    pub fn table_changes(&self) -> &[TableChange] {
        self.stacks.first().map_or(&[], StackPlan::table_changes)
    }

    /// The first stack's [`changed_entries`](StackPlan::changed_entries).
    pub fn changed_entries(&self) -> &[u32] {
        self.stacks.first().map_or(&[], StackPlan::changed_entries)
    }

    /// Blocks to move to the host pool before anything else: the step may give them new content.
    pub fn swap_outs(&self) -> &[BlockSwap] {
        &self.swap_outs
    }

    /// Blocks to bring back from the host pool, after all [`swap_outs`](Self::swap_outs): a block that was moved out may
    /// be the destination of another one's return.
    pub fn swap_ins(&self) -> &[BlockSwap] {
        &self.swap_ins
    }

    /// Blocks to copy before the step writes anything. No block is both source and destination, none is destination
    /// twice.
    pub fn block_copies(&self) -> &[BlockCopy] {
        &self.block_copies
    }

    /// Rows to compute logits for; `commit` takes one result for each, in this order.
    pub fn logit_rows(&self) -> &[LogitRow] {
        &self.logit_rows
    }

    /// Work of the step in (row, key) pairs of one head: the sum over rows of the keys they see.
    pub fn work(&self) -> u64 {
        (0..self.context_lens.len())
            .map(|sequence| {
                let rows = u64::from(self.query_starts[sequence + 1] - self.query_starts[sequence]);
                rows_work(rows, u64::from(self.context_lens[sequence]))
            })
            .sum()
    }

    pub(crate) fn clear(&mut self) {
        self.token_ids.clear();
        self.positions.clear();
        self.query_starts.clear();
        self.context_lens.clear();
        self.table_rows.clear();
        self.swap_outs.clear();
        self.swap_ins.clear();
        self.block_copies.clear();
        self.logit_rows.clear();
        self.stacks.iter_mut().for_each(StackPlan::clear);
    }
}

/// (row, key) pairs of the last `rows` rows of a context of `context` tokens: the sum of the lengths they see.
pub(crate) fn rows_work(rows: u64, context: u64) -> u64 {
    rows * context - rows * rows.saturating_sub(1) / 2
}

/// What became of the swaps of one step, as the device part reports it to
/// [`Scheduler::complete_transfers`](crate::Scheduler::complete_transfers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferReport {
    /// The step whose plan asked for them.
    pub step: StepId,
    /// Whether every block has arrived. When not (the device is lost, say), what was to be saved is computed again.
    pub complete: bool,
}
