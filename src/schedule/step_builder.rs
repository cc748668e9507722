//! [`StepBuilder`]: turns pushes of tokens into the flat arrays of a [`StepPlan`], over a [`KvCache`].
//!
//! The scheduler and applications with a scheduler of their own build their steps here; nothing else writes a plan.

use crate::cache::{Growth, KvCache};
use crate::error::{CacheError, CommitError};
use crate::ids::{PADDING_SLOT, SequenceId, TableId, TokenId};
use crate::schedule::step_plan::{LogitRow, StackPlan, StepPlan, TableChange};
use std::ops::Range;

/// Builds one step over a cache. Dropped unfinished, it leaves a step that the next one rolls back.
#[derive(Debug)]
pub struct StepBuilder<'a> {
    cache: &'a mut KvCache,
    plan: StepPlan,
    /// The fewest rows that the plan is to have.
    padded_rows: u32,
}

/// Starts a step of `cache` in `plan`'s arrays.
pub(super) fn begin_plan(cache: &mut KvCache, plan: &mut StepPlan) {
    plan.clear();
    plan.step = cache.begin_step();
    let origin = cache.origin();
    plan.cache_instance = origin.instance;
    plan.fingerprint = origin.fingerprint;
    plan.forgotten_devices = origin.forgotten_devices;
    plan.last_committed = origin.last_committed;
    plan.query_starts.push(0);
    plan.stacks.resize_with(origin.num_stacks as usize, StackPlan::default);
}

/// Appends `tokens`, then `drafts`, to the table that `growth` is for and plans one row for each. Returns the first row. All
/// or nothing.
pub(super) fn push_rows(
    cache: &mut KvCache,
    plan: &mut StepPlan,
    growth: Growth,
    tokens: &[TokenId],
    drafts: &[TokenId],
) -> Result<u32, CacheError> {
    cache.grow(growth)?;
    let (table, start, end) = (growth.table, growth.start, growth.start + growth.num_tokens);
    debug_assert_eq!(growth.num_tokens as usize, tokens.len() + drafts.len());
    let first_row = plan.num_rows();
    plan.token_ids.extend_from_slice(tokens);
    if !drafts.is_empty() {
        plan.token_ids.extend_from_slice(drafts);
    }
    plan.positions.extend(start..end);
    plan.query_starts.push(first_row + growth.num_tokens);
    plan.context_lens.push(end);
    plan.table_rows.push(table.row());
    for run in cache.runs(table) {
        let stack = &mut plan.stacks[run.stack as usize];
        let slot_of = |position: u32| {
            let slot = position & (run.block_size - 1);
            let slot = if fault!(SlotShared) { slot & !1 } else { slot };
            let block = run.blocks[((position >> run.block_shift) - run.first_entry) as usize];
            (block.index() << run.block_shift) + slot
        };
        match run.first_token.max(start)..run.end_token.min(end) {
            one if one.len() == 1 => stack.slot_mapping.push(slot_of(one.start)),
            positions => stack.slot_mapping.extend(positions.map(slot_of)),
        }
        let unchanged = run.dirty_from - run.first_entry;
        let changed = &run.blocks[unchanged as usize..];
        let stack = if fault!(OtherStacksTable) { &mut plan.stacks[0] } else { stack };
        if !changed.is_empty() {
            stack.table_changes.push(TableChange {
                table_row: table.row(),
                first_entry: run.dirty_from,
                start: stack.changed_entries.len() as u32,
                len: changed.len() as u32,
            });
            stack.changed_entries.extend(changed.iter().map(|block| block.index()));
        }
    }
    Ok(first_row)
}

/// Hands over the copies and swaps that the step has asked for.
pub(super) fn finish_plan(cache: &KvCache, plan: &mut StepPlan) {
    let moves = cache.step_moves();
    plan.swap_outs.extend_from_slice(moves.swap_outs);
    plan.swap_ins.extend_from_slice(moves.swap_ins);
    plan.block_copies.extend_from_slice(moves.copies);
}

impl<'a> StepBuilder<'a> {
    /// Rows that a step is [padded](Self::pad_to) to at most.
    pub const MAX_PADDED_ROWS: u32 = 1 << 20;

    /// Starts a step. A step of `cache` that is neither committed nor rolled back is rolled back first.
    pub fn new(cache: &'a mut KvCache) -> Self {
        let mut plan = StepPlan::default();
        begin_plan(cache, &mut plan);
        Self { cache, plan, padded_rows: 0 }
    }

    /// The cache under the step.
    pub fn cache(&self) -> &KvCache {
        self.cache
    }

    /// The cache under the step, to open and release tables while it is built. What ends the step, or begins another one
    /// ([`KvCache::forget_device`], a second builder), or puts another cache in the place of this one, ends this builder's
    /// work: pushes and swaps are [`CacheError::StepEnded`] then, and the plan is stale.
    pub fn cache_mut(&mut self) -> &mut KvCache {
        self.cache
    }

    fn check_outstanding(&self) -> Result<(), CacheError> {
        if self.is_outstanding() { Ok(()) } else { Err(CacheError::StepEnded { step: self.plan.step }) }
    }

    fn is_outstanding(&self) -> bool {
        self.plan.cache_instance == self.cache.instance() && self.cache.is_outstanding(self.plan.step)
    }

    /// Appends `tokens` to `table` and plans one row for each; returns the rows.
    ///
    /// # Errors
    /// [`CacheError::NoFreeBlocks`] when the pool cannot hold them and [`CacheError::ExceedsTable`] when the table
    /// cannot: nothing has changed then. [`CacheError::InStep`] when the table has rows in this step already,
    /// [`CacheError::NoTokens`] for an empty push, [`CacheError::UnknownTable`], [`CacheError::ForeignTable`],
    /// [`CacheError::StepEnded`].
    pub fn push(&mut self, table: TableId, tokens: &[TokenId]) -> Result<Range<u32>, CacheError> {
        if tokens.is_empty() {
            return Err(CacheError::NoTokens { table });
        }
        self.check_outstanding()?;
        let num_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        if self.cache.slides() {
            self.cache.len(table)?;
            self.cache.slide(table);
        }
        let growth = self.cache.growth(table, num_tokens, self.cache.free_blocks())?;
        let first_row = push_rows(self.cache, &mut self.plan, growth, tokens, &[])?;
        Ok(first_row..self.plan.num_rows())
    }

    /// Moves a table's blocks to the host pool, except those that others hold in the pool; returns how many. Blocks that
    /// become free may be used by this very step.
    ///
    /// The table cannot grow until it is swapped in, and not before the step's transfers are
    /// [reported](KvCache::complete_transfers). What others hold stays in the pool until they are swapped out, too: with
    /// the last of them it leaves, once, for all. Where they are released instead, swapping this table out again moves
    /// what is its alone by then. While no block of it has left, the table may grow: that brings it back.
    ///
    /// A step that is dropped takes what it moved with it: the tables that it moved blocks of are cut to what they hold
    /// elsewhere.
    ///
    /// # Errors
    /// [`CacheError::HostPoolFull`], [`CacheError::InStep`], [`CacheError::UnknownTable`],
    /// [`CacheError::ForeignTable`], [`CacheError::StepEnded`]. Nothing has changed then.
    ///
    /// # Complexity
    /// O(tables + blocks moved, times the tables that share them).
    pub fn swap_out(&mut self, table: TableId) -> Result<u32, CacheError> {
        self.check_outstanding()?;
        self.cache.park(table)
    }

    /// Brings a table's blocks back from the host pool, bit for bit, and with them those of other tables that share them.
    /// They stay where they are for the rest of the step. It takes [`KvCache::host_blocks_of`] free blocks;
    /// [`KvCache::blocks_needed`] says what it takes together with a push.
    ///
    /// # Errors
    /// [`CacheError::NoFreeBlocks`], [`CacheError::InTransfer`], [`CacheError::InStep`], [`CacheError::UnknownTable`],
    /// [`CacheError::ForeignTable`], [`CacheError::StepEnded`]. Nothing has changed then.
    ///
    /// # Complexity
    /// As [`swap_out`](Self::swap_out).
    pub fn swap_in(&mut self, table: TableId) -> Result<(), CacheError> {
        self.check_outstanding()?;
        self.cache.swap_in(table)
    }

    /// Asks for the logits of `num_rows` rows from `row` on, for `sequence`.
    ///
    /// # Errors
    /// [`CacheError::NoSuchRow`] when the step does not have them, or when they belong to more than one table.
    pub fn request_logits(
        &mut self,
        sequence: SequenceId,
        row: u32,
        num_rows: u32,
    ) -> Result<(), CacheError> {
        let starts = &self.plan.query_starts;
        let end_of_table = starts[starts.partition_point(|&start| start <= row).min(starts.len() - 1)];
        match row.checked_add(num_rows) {
            Some(end) if num_rows > 0 && end <= end_of_table => {
                let next_position = self.plan.positions[row as usize] + 1;
                self.plan.logit_rows.push(LogitRow { sequence, row, num_rows, next_position });
                Ok(())
            }
            _ => Err(CacheError::NoSuchRow { row, num_rows, rows: self.num_rows() }),
        }
    }

    /// Adds padding rows to the finished plan until it has `rows`: they come last, write nothing, attend to nothing and
    /// belong to no sequence.
    ///
    /// For an application whose own kernels want a fixed number of rows.
    ///
    /// # Errors
    /// [`CacheError::TooManyRows`] beyond [`MAX_PADDED_ROWS`](Self::MAX_PADDED_ROWS).
    pub fn pad_to(&mut self, rows: u32) -> Result<(), CacheError> {
        let max_rows = Self::MAX_PADDED_ROWS;
        if rows > max_rows {
            return Err(CacheError::TooManyRows { rows, max_rows });
        }
        self.padded_rows = rows;
        Ok(())
    }

    /// Rows so far, without padding.
    pub fn num_rows(&self) -> u32 {
        self.plan.num_rows()
    }

    /// The finished plan: a stale one, if the step has ended in the meantime.
    pub fn finish(mut self) -> StepPlan {
        let rows = self.num_rows().max(self.padded_rows) as usize;
        self.plan.token_ids.resize(rows, 0);
        self.plan.positions.resize(rows, 0);
        for stack in &mut self.plan.stacks {
            stack.slot_mapping.resize(rows, PADDING_SLOT);
        }
        if self.is_outstanding() {
            finish_plan(self.cache, &mut self.plan);
        }
        self.plan
    }
}

impl KvCache {
    /// Accepts a step whose commands were submitted: its tokens are in the cache from now on.
    ///
    /// # Errors
    /// [`CommitError::StalePlan`] when the plan is not the outstanding one, [`CommitError::ForeignPlan`] when another
    /// cache made it.
    pub fn commit_step(&mut self, plan: StepPlan) -> Result<(), CommitError> {
        self.check_step(plan.cache_instance, plan.step)?;
        self.finish_step();
        Ok(())
    }
}
