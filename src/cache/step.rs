//! The outstanding step: growth, copy-on-write, and the journal that undoes them.

use crate::cache::block_table::{BlockTable, Run};
use crate::cache::{BlockCopy, BlockSwap, KvCache, Retention};
use crate::error::{CacheError, CommitError};
use crate::ids::{BlockId, StepId, TableId};

/// One change of the outstanding step, with what undoes it. Entries of tables released since are skipped.
#[derive(Clone, Copy, Debug)]
pub(super) enum Undo {
    /// `len` tokens were in the table: those in `source` must outlive the step.
    Copied {
        table: TableId,
        lane: u32,
        entry: u32,
        source: BlockId,
        len: u32,
        registered: u32,
        borrowed: Option<u32>,
    },
    Grown {
        table: TableId,
        len: u32,
        parked: bool,
    },
    /// The table was swapped out; what that moved is undone separately.
    Parked {
        table: TableId,
    },
    /// The table came back: `num_blocks` of the step's returns, from the `first_return`-th on, are its entries from
    /// `first_entry` on, and those of all that share them.
    Returned {
        table: TableId,
        parked: bool,
        lane: u32,
        first_entry: u32,
        first_return: u32,
        num_blocks: u32,
    },
}

/// What it takes for a table to hold more tokens: computed once, then [grown](KvCache::grow) by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Growth {
    pub(crate) table: TableId,
    /// Tokens that the table has, and that come after them.
    pub(crate) start: u32,
    pub(crate) num_tokens: u32,
    /// New blocks.
    new: u32,
    /// Blocks for copies of last blocks that others hold, too.
    copies: u32,
    /// Blocks for copies of last blocks that the prefix cache has lent, where there are enough: otherwise they are written
    /// in place, and forgotten.
    lent: u32,
    /// Blocks for what comes back from the host pool before.
    returning: u32,
}

/// What a plan says of the cache that it is made over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    pub(crate) instance: u64,
    pub(crate) fingerprint: u64,
    pub(crate) forgotten_devices: u64,
    /// The last step that was committed and wrote to tables, since the last device was forgotten.
    pub(crate) last_committed: StepId,
    pub(crate) num_stacks: u32,
}

/// What the outstanding step does with blocks before it writes rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepMoves<'a> {
    /// To the host pool.
    pub(crate) swap_outs: &'a [BlockSwap],
    /// Back from it.
    pub(crate) swap_ins: &'a [BlockSwap],
    pub(crate) copies: &'a [BlockCopy],
}

impl Growth {
    /// Free blocks that it takes.
    pub(crate) fn needed(&self) -> u32 {
        self.new.saturating_add(self.copies).saturating_add(self.lent).saturating_add(self.returning)
    }
}

impl KvCache {
    /// Free blocks that `num_tokens` more tokens in `table` would take: new blocks, and one for the copy of a shared last
    /// block. Of a table that is swapped out, those that bring it back, too: what
    /// [`swap_in`](crate::StepBuilder::swap_in) and the push need together.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn blocks_needed(&self, table: TableId, num_tokens: u32) -> Result<u32, CacheError> {
        Ok(self.count_growth(self.live(table)?, table, num_tokens, self.free_blocks()).needed())
    }

    /// What `num_tokens` more tokens of a table that can grow take. Copies that can be done without take at most
    /// `spare` blocks in all.
    pub(crate) fn growth(&self, table: TableId, num_tokens: u32, spare: u32) -> Result<Growth, CacheError> {
        let row = self.idle(table)?;
        let tokens = row.len.saturating_add(num_tokens);
        let max_tokens = row.max_tokens;
        if row.is_swapped() {
            return Err(CacheError::SwappedOut { table, blocks: row.host_blocks() });
        }
        if tokens > max_tokens {
            return Err(CacheError::ExceedsTable { tokens, max_tokens });
        }
        Ok(self.count_growth(row, table, num_tokens, spare))
    }

    #[inline]
    fn count_growth(&self, table: &BlockTable, id: TableId, num_tokens: u32, spare: u32) -> Growth {
        let len = table.len.saturating_add(num_tokens);
        let mut growth =
            Growth { table: id, start: table.len, num_tokens, new: 0, copies: 0, lent: 0, returning: 0 };
        for (index, (run, lane)) in table.runs.iter().zip(&self.lanes).enumerate() {
            growth.new += lane.end_of(len).saturating_sub(run.end());
            growth.returning += run.host.len() as u32;
            let Some(entry) = lane.tail_of(table.len).filter(|_| num_tokens > 0) else { continue };
            let shared_on_host = || !run.host.is_empty() && self.shares_tail_in_host_pool(table, index);
            if self.is_shared_tail(run, entry, table.len) || shared_on_host() {
                growth.copies += 1;
            } else if run.borrowed.is_some() {
                growth.lent += 1;
            }
        }
        if growth.needed() > spare {
            growth.lent = 0;
        }
        growth
    }

    /// Whether others hold the partly filled last block of a table that is swapped out: it returns for all of them.
    fn shares_tail_in_host_pool(&self, table: &BlockTable, lane: usize) -> bool {
        let run = &table.runs[lane];
        let slot = self.lanes[lane]
            .tail_of(table.len)
            .and_then(|entry| run.host.get(entry.checked_sub(run.pool_end())? as usize));
        slot.is_some_and(|&slot| self.host.as_ref().is_some_and(|host| host.ref_count(slot) > 1))
    }

    /// The entry of the block that the next token is written into, if it is partly filled and not this table's to write.
    pub(super) fn shared_tail(&self, table: &BlockTable, lane: usize) -> Option<u32> {
        let entry = self.lanes[lane].tail_of(table.len)?;
        self.is_shared_tail(&table.runs[lane], entry, table.len).then_some(entry)
    }

    /// Whether a partly filled block is not its table's to write: others hold it too, or would after a rollback and have
    /// more tokens in it than `len`.
    #[inline]
    pub(super) fn is_shared_tail(&self, run: &Run, entry: u32, len: u32) -> bool {
        let Some(block) = run.block_at(entry) else { return false };
        let shared = self.pool.ref_count(block) > u32::from(!fault!(LastHolderCopies));
        shared && !fault!(SharedBlockWritten) || self.is_left_longer(block, len)
    }

    /// Whether a table with more than `len` tokens left `block` by a copy of the outstanding step.
    fn is_left_longer(&self, block: BlockId, len: u32) -> bool {
        self.pool.is_pinned(block)
            && self.journal.iter().any(|undo| {
                matches!(*undo, Undo::Copied { source, len: left, .. } if source == block && left > len)
            })
    }

    /// The partly filled last blocks of a table that others hold too: one of each lane at most.
    pub(crate) fn shared_tail_blocks(&self, table: TableId) -> impl Iterator<Item = BlockId> {
        let table = self.live(table).ok();
        table.into_iter().flat_map(move |table| {
            (0..table.runs.len()).filter_map(move |lane| {
                self.shared_tail(table, lane).and_then(|entry| table.runs[lane].block_at(entry))
            })
        })
    }

    /// Whether a table's next token goes into a block that holds others already, and that is in other tables or may come to
    /// be in them.
    pub(crate) fn has_open_tail(&self, table: TableId) -> bool {
        let Ok(table) = self.live(table) else { return false };
        table.runs.iter().zip(&self.lanes).any(|(run, lane)| {
            let tail = lane.tail_of(table.len).and_then(|entry| run.block_at(entry));
            tail.is_some_and(|tail| self.pool.ref_count(tail) > 1 || self.pool.is_cached(tail))
        })
    }

    /// Whether the last block of one of a table's runs is the prefix cache's.
    pub(crate) fn is_borrowing(&self, table: TableId) -> bool {
        self.live(table).is_ok_and(|table| table.runs.iter().any(|run| run.borrowed.is_some()))
    }

    /// Whether the outstanding step copies `block` into another one.
    pub(crate) fn is_copy_source(&self, block: BlockId) -> bool {
        self.pool.is_pinned(block) && self.step_copies.iter().any(|copy| copy.source == block.0)
    }

    /// Whether a copy of the outstanding step still reads `block`.
    pub(crate) fn is_pinned(&self, block: BlockId) -> bool {
        self.pool.is_pinned(block)
    }

    // The outstanding step.

    /// Starts a step; one that is outstanding is rolled back first.
    pub(crate) fn begin_step(&mut self) -> StepId {
        if self.outstanding {
            self.rollback_step();
        }
        self.last_step = StepId(self.last_step.0 + 1);
        self.outstanding = true;
        self.evict_expired();
        self.last_step
    }

    /// Gives back what the rows after a table's tokens do not see any more: blocks behind windows, on the length that is
    /// committed. A rollback does not bring them back: nothing needs them at that length.
    pub(crate) fn slide(&mut self, table: TableId) {
        let row = table.row as usize;
        for lane in 0..self.lanes.len() {
            if self.lanes[lane].slides() {
                self.slide_run(row, lane);
            }
        }
    }

    /// A fault: windows move on as if all that was planned had been committed.
    fn slide_planned(&mut self) {
        for table in self.step_tables.clone() {
            if self.live(table).is_ok() {
                self.tables[table.row as usize].in_step = false;
                self.slide(table);
            }
        }
    }

    fn slide_run(&mut self, row: usize, lane: usize) {
        let table = &self.tables[row];
        if table.in_step || !table.runs[lane].host.is_empty() {
            return;
        }
        let first = table.runs[lane].first;
        let kept_from = self.lanes[lane].first_of(table.len);
        let has_more = kept_from + 1 < table.runs[lane].pool_end();
        let kept_from = kept_from + u32::from(fault!(WindowGivesTooMuch) && has_more);
        let kept_from = if fault!(WindowKeepsAll) { first } else { kept_from };
        let passed = (kept_from.saturating_sub(first) as usize).min(table.runs[lane].blocks.len());
        for index in 0..passed {
            let block = self.tables[row].runs[lane].blocks[index];
            self.leave_behind(row, lane, first + index as u32, block);
        }
        let run = &mut self.tables[row].runs[lane];
        run.blocks.drain(..passed);
        run.first = run.first.max(kept_from);
        run.dirty_from = run.dirty_from.max(run.first);
        self.trim_cached();
    }

    /// A table lets go of a block behind its window. Where no likely hit needs it, it is the first to be evicted.
    fn leave_behind(&mut self, row: usize, lane: usize, entry: u32, block: BlockId) {
        let table = &self.tables[row];
        let lane = &self.lanes[lane];
        let is_likely =
            |&len: &u32| (lane.first_of(len - len % self.node_tokens)..lane.end_of(len)).contains(&entry);
        let is_plain = self.pool.retention(block) <= Retention::Normal;
        if is_plain && self.pool.ref_count(block) == 1 && !self.asides[row].likely_hits.iter().any(is_likely)
        {
            self.pool.set_loose(block, true);
        }
        if table.promised {
            self.pool.unpromise(block, true);
        }
        self.release_block(block);
    }

    /// Makes room for more tokens, as [`growth`](Self::growth) has it, and counts them in. All or nothing.
    pub(crate) fn grow(&mut self, growth: Growth) -> Result<(), CacheError> {
        debug_assert!(self.outstanding, "a table grows only inside a step");
        let Growth { table, start: len, num_tokens, .. } = growth;
        let (needed, available) = (growth.needed(), self.pool.num_available());
        if needed > available {
            return Err(CacheError::NoFreeBlocks { needed, available });
        }
        debug_assert_eq!(self.len(table), Ok(len), "{table:?} has changed since its growth was reckoned");
        let (tokens, parked) = (len + num_tokens, self.tables[table.row as usize].parked);
        let row = table.row as usize;
        for lane in 0..self.lanes.len() {
            if growth.num_tokens > 0 {
                self.make_tail_writable(growth, lane);
            }
        }
        self.step_back(row, len / self.node_tokens);
        for lane in (0..self.lanes.len()).filter(|_| growth.new > 0) {
            for _ in self.tables[row].runs[lane].end()..self.lanes[lane].end_of(tokens) {
                let Some(block) = self.take_block() else {
                    self.poison("the free list is shorter than its count");
                    break;
                };
                self.push_block(row, lane, block);
            }
        }
        self.journal.push(Undo::Grown { table, len, parked });
        let row = &mut self.tables[row];
        row.len = tokens;
        (row.in_step, row.parked) = (true, false);
        self.step_tables.push(table);
        Ok(())
    }

    /// What a step does with `num_tokens` tokens of a table.
    #[cfg(test)]
    pub(super) fn grow_by(&mut self, table: TableId, num_tokens: u32) -> Result<(), CacheError> {
        self.grow(self.growth(table, num_tokens, self.free_blocks())?)
    }

    /// Makes the block that the next token is written into this table's alone.
    fn make_tail_writable(&mut self, growth: Growth, lane: usize) {
        let Growth { table, start, copies, lent, .. } = growth;
        let Some(entry) = self.lanes[lane].tail_of(start) else { return };
        let row = table.row as usize;
        let run = &self.tables[row].runs[lane];
        let is_lent = lent > 0 && run.borrowed.is_some();
        if is_lent || copies > 0 && self.shared_tail(&self.tables[row], lane).is_some() {
            return self.copy_on_write(table, lane, entry);
        }
        if let Some(tail) = run.block_at(entry).filter(|&tail| self.pool.is_cached(tail)) {
            self.forget_block(tail);
            self.mark_replaced(row, lane, entry);
        }
        // What was lent in this lane may have been forgotten with another one's.
        self.tables[row].runs[lane].borrowed = None;
    }

    fn copy_on_write(&mut self, table: TableId, lane: usize, entry: u32) {
        let row = table.row as usize;
        let &BlockTable { ref runs, len, registered, .. } = &self.tables[row];
        let borrowed = runs[lane].borrowed;
        let source = runs[lane].block_at(entry);
        let (Some(source), Some(destination)) = (source, self.take_block()) else {
            self.poison("the free list is shorter than its count");
            return;
        };
        if !fault!(CopySourceNotHeld) {
            self.pool.pin(source);
        }
        self.release_block(source);
        self.replace_block(row, lane, entry, destination);
        self.mark_replaced(row, lane, entry);
        self.step_copies.push(BlockCopy { source: source.0, destination: destination.0 });
        let lane = lane as u32;
        self.journal.push(Undo::Copied { table, lane, entry, source, len, registered, borrowed });
    }

    /// Blocks that the outstanding step moves and copies.
    pub(crate) fn step_moves(&self) -> StepMoves<'_> {
        StepMoves { swap_outs: &self.step_outs, swap_ins: &self.step_ins, copies: &self.step_copies }
    }

    /// What a plan says of the cache that it is made over.
    pub(crate) fn origin(&self) -> Origin {
        Origin {
            instance: self.instance,
            fingerprint: self.fingerprint,
            forgotten_devices: self.forgotten_devices,
            last_committed: self.last_committed,
            num_stacks: self.lanes.last().map_or(0, |lane| lane.stack + 1),
        }
    }

    /// Whether a step is outstanding.
    pub(crate) fn has_step(&self) -> bool {
        self.outstanding
    }

    /// Whether `step` is the one outstanding.
    pub(crate) fn is_outstanding(&self, step: StepId) -> bool {
        self.outstanding && self.last_step == step
    }

    /// Fails unless `step`, of the cache that is told from others by `instance`, is the one outstanding here.
    pub(crate) fn check_step(&self, instance: u64, step: StepId) -> Result<(), CommitError> {
        self.check_poison()?;
        if instance != self.instance {
            return Err(CommitError::ForeignPlan { plan: instance, cache: self.instance });
        }
        if !self.outstanding || step != self.last_step {
            return Err(CommitError::StalePlan { step });
        }
        Ok(())
    }

    /// Accepts the outstanding step: its growth stands, and the device has its tables. Returns whether tables were cut because
    /// blocks that it moved out are known to be lost.
    pub(crate) fn finish_step(&mut self) -> bool {
        if !self.step_tables.is_empty() {
            self.last_committed = self.last_step;
        }
        if fault!(WindowOfPlannedLength) {
            self.slide_planned();
        }
        self.block_copies += self.step_copies.len() as u64;
        self.swapped_out += self.step_outs.len() as u64;
        self.swapped_in += self.step_ins.len() as u64;
        let step = self.last_step;
        let ended = self.host.as_mut().map(|host| host.commit(step));
        let is_cut = ended.is_some_and(|ended| self.settle_transfer(step, ended));
        self.end_step();
        for table in self.step_tables.drain(..) {
            let row = &mut self.tables[table.row as usize];
            if row.live && row.generation == table.generation {
                row.commit();
            }
        }
        is_cut
    }

    /// Undoes the outstanding step, if there is one (I12).
    pub(crate) fn rollback_step(&mut self) {
        if fault!(DroppedEntriesNotSent) {
            for table in &self.step_tables {
                let row = &mut self.tables[table.row as usize];
                row.runs.iter_mut().for_each(|run| run.dirty_from = run.pool_end());
            }
        }
        if fault!(WindowOfPlannedLength) {
            self.slide_planned();
        }
        while let Some(undo) = self.journal.pop() {
            match undo {
                Undo::Copied { table, lane, entry, source, registered, borrowed, .. }
                    if self.live(table).is_ok() && !fault!(RollbackKeepsCopy) =>
                {
                    self.undo_copy(table.row as usize, lane as usize, entry, source, (registered, borrowed));
                }
                Undo::Grown { table, len, parked } if self.live(table).is_ok() => {
                    self.shrink(table, len);
                    let row = &mut self.tables[table.row as usize];
                    if !fault!(RollbackKeepsLength) {
                        row.len = len;
                    }
                    (row.in_step, row.parked) = (false, parked);
                }
                Undo::Parked { table } if self.live(table).is_ok() => {
                    self.tables[table.row as usize].parked = false;
                }
                Undo::Returned { table, parked, lane, first_entry, first_return, num_blocks } => {
                    let returns = first_return as usize..(first_return + num_blocks) as usize;
                    self.undo_return(lane as usize, first_entry, returns);
                    if self.live(table).is_ok() {
                        self.tables[table.row as usize].parked = parked;
                    }
                }
                _ => {}
            }
        }
        self.step_tables.clear();
        self.drop_swap_outs();
        self.end_step();
    }

    fn undo_copy(
        &mut self,
        row: usize,
        lane: usize,
        entry: u32,
        source: BlockId,
        (registered, borrowed): (u32, Option<u32>),
    ) {
        self.pool.retain(source);
        let copy = self.replace_block(row, lane, entry, source);
        if self.pool.is_cached(source) {
            self.tables[row].runs[lane].borrowed = borrowed;
            if !self.nodes.is_anchored() && registered == self.tables[row].registered + 1 {
                self.step_to(row, self.nodes.node_of(source));
            } else if self.nodes.is_anchored() && lane == 0 {
                self.tables[row].registered = registered;
            }
        }
        self.release_block(copy);
    }

    fn end_step(&mut self) {
        self.journal.clear();
        self.step_copies.clear();
        self.step_outs.clear();
        self.step_ins.clear();
        self.pool.unpin_all();
        self.outstanding = false;
        if self.pool.num_cached() > self.max_cached_blocks {
            self.trim_cached();
        }
    }
}
