//! The outstanding step: growth, copy-on-write, and the journal that undoes them.

use crate::cache::block_table::BlockTable;
use crate::cache::{BlockCopy, BlockSwap, KvCache};
use crate::error::CacheError;
use crate::ids::{BlockId, StepId, TableId};

/// One change of the outstanding step, with what undoes it. Entries of tables released since are skipped.
#[derive(Clone, Copy, Debug)]
pub(super) enum Undo {
    /// `len` tokens were in the table: those in `source` must outlive the step.
    Copied {
        table: TableId,
        entry: u32,
        source: BlockId,
        len: u32,
        registered: u32,
        borrowed: Option<u32>,
    },
    Grown {
        table: TableId,
        num_blocks: u32,
        len: u32,
        parked: bool,
    },
    /// The table was swapped out; what that moved is undone by itself.
    Parked {
        table: TableId,
    },
    /// The table came back: `num_blocks` of the step's returns, from the `first_return`-th on, are its entries from
    /// `first_entry` on, and those of all that share them.
    Returned {
        table: TableId,
        parked: bool,
        first_entry: u32,
        first_return: u32,
        num_blocks: u32,
    },
}

/// How a table grows: asked for once, and carried out by [`KvCache::grow_by`] while nothing else has changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    pub(crate) table: TableId,
    /// Tokens that the table has, and that come after them.
    pub(crate) start: u32,
    pub(crate) num_tokens: u32,
    /// Blocks at its end.
    new: u32,
    /// The entry of its last block, where that is copied before it is written.
    copied: Option<u32>,
}

impl Growth {
    /// Free blocks that it takes.
    pub(crate) fn needed(self) -> u32 {
        self.new + u32::from(self.copied.is_some())
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
        let table = self.live(table)?;
        let new = self.new_blocks(table, num_tokens);
        let copied = num_tokens > 0
            && (self.copied_tail(table, new).is_some()
                || (!table.host.is_empty() && self.shares_tail_in_host_pool(table)));
        Ok(new.saturating_add(table.host.len() as u32).saturating_add(u32::from(copied)))
    }

    /// Whether others hold the partly filled last block of a table that is swapped out: it returns for all of them.
    fn shares_tail_in_host_pool(&self, table: &BlockTable) -> bool {
        let slot = self
            .partial_tail(table)
            .and_then(|entry| table.host.get((entry as usize).checked_sub(table.blocks.len())?));
        slot.is_some_and(|&slot| self.host.as_ref().is_some_and(|host| host.ref_count(slot) > 1))
    }

    fn new_blocks(&self, table: &BlockTable, num_tokens: u32) -> u32 {
        let len = table.len.saturating_add(num_tokens);
        self.config.layout().blocks_for(len).saturating_sub(table.num_blocks())
    }

    /// The entry of the block that the next token is written into, if it is partly filled.
    fn partial_tail(&self, table: &BlockTable) -> Option<u32> {
        let block_size = self.config.block_size();
        (!table.len.is_multiple_of(block_size)).then_some(table.len / block_size)
    }

    /// The same, when that block is not this table's to write: others hold it too, or would after a rollback and have
    /// more tokens in it.
    fn shared_tail(&self, table: &BlockTable) -> Option<u32> {
        let entry = self.partial_tail(table)?;
        let block = *table.blocks.get(entry as usize)?;
        let shared = self.pool.ref_count(block) > u32::from(!fault!(LastHolderCopies));
        (shared && !fault!(SharedBlockWritten) || self.is_left_longer(block, table.len)).then_some(entry)
    }

    /// The same, when the block is copied before the next token is written, as the table grows by `new` blocks. What the
    /// prefix cache lent is copied, too, while a block is left for it: otherwise it is written in place, and forgotten.
    fn copied_tail(&self, table: &BlockTable, new: u32) -> Option<u32> {
        let spare = self.pool.num_available().saturating_sub(self.reserved);
        let lent = || table.borrowed.filter(|_| spare > new);
        self.shared_tail(table).or_else(lent)
    }

    /// Whether a table with more than `len` tokens left `block` by a copy of the outstanding step.
    fn is_left_longer(&self, block: BlockId, len: u32) -> bool {
        self.pool.is_pinned(block)
            && self.journal.iter().any(|undo| {
                matches!(*undo, Undo::Copied { source, len: left, .. } if source == block && left > len)
            })
    }

    /// The partly filled last block of a table, when others hold it too.
    pub(crate) fn shared_tail_block(&self, table: TableId) -> Option<BlockId> {
        let table = self.live(table).ok()?;
        self.shared_tail(table).map(|entry| table.blocks[entry as usize])
    }

    /// Whether a table's next token goes into a block that holds others already, and that is in other tables or may come to
    /// be in them.
    pub(crate) fn has_open_tail(&self, table: TableId) -> bool {
        let Ok(table) = self.live(table) else { return false };
        let tail = self.partial_tail(table).and_then(|entry| table.blocks.get(entry as usize));
        tail.is_some_and(|&tail| self.pool.ref_count(tail) > 1 || self.pool.is_cached(tail))
    }

    /// Whether a table's last block is the prefix cache's.
    pub(crate) fn is_borrowing(&self, table: TableId) -> bool {
        self.live(table).is_ok_and(|row| row.borrowed.is_some())
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

    /// Makes room for `num_tokens` more tokens and counts them in. All or nothing.
    #[cfg(test)]
    pub(crate) fn grow(&mut self, table: TableId, num_tokens: u32) -> Result<(), CacheError> {
        self.grow_by(self.growth(table, num_tokens)?)
    }

    /// What `num_tokens` more tokens in a table take.
    pub(crate) fn growth(&self, table: TableId, num_tokens: u32) -> Result<Growth, CacheError> {
        let row = self.live(table)?;
        self.check_poison()?;
        if row.in_step {
            return Err(CacheError::InStep { table, step: self.last_step });
        }
        if !row.host.is_empty() {
            return Err(CacheError::SwappedOut { table, blocks: row.host.len() as u32 });
        }
        let (start, max_tokens) = (row.len, row.max_tokens);
        let tokens = start.saturating_add(num_tokens);
        if tokens > max_tokens {
            return Err(CacheError::ExceedsTable { tokens, max_tokens });
        }
        let new = self.new_blocks(row, num_tokens);
        let copied = if num_tokens > 0 { self.copied_tail(row, new) } else { None };
        Ok(Growth { table, start, num_tokens, new, copied })
    }

    /// Makes room for more tokens and counts them in. All or nothing.
    pub(crate) fn grow_by(&mut self, growth: Growth) -> Result<(), CacheError> {
        debug_assert!(self.outstanding, "a table grows only inside a step");
        let Growth { table, start, num_tokens, new, copied } = growth;
        let (needed, available) = (growth.needed(), self.pool.num_available());
        if needed > available {
            return Err(CacheError::NoFreeBlocks { needed, available });
        }
        let row = &self.tables[table.row as usize];
        let (num_blocks, parked) = (row.num_blocks(), row.parked);
        if num_tokens > 0 {
            self.make_tail_writable(table, copied);
        }
        for _ in 0..new {
            let Some(block) = self.take_block() else {
                self.poison("the free list is shorter than its count");
                break;
            };
            self.push_block(table.row as usize, block);
        }
        self.journal.push(Undo::Grown { table, num_blocks, len: start, parked });
        let row = &mut self.tables[table.row as usize];
        row.len += num_tokens;
        (row.in_step, row.parked) = (true, false);
        self.step_tables.push(table);
        Ok(())
    }

    /// Sees to it that the block that the next token is written into is this table's alone: a copy of it where it is
    /// `copied`, and otherwise the block itself, forgotten by the prefix cache.
    fn make_tail_writable(&mut self, table: TableId, copied: Option<u32>) {
        let row = &self.tables[table.row as usize];
        if let Some(entry) = copied {
            self.copy_on_write(table, entry);
        } else if let Some(entry) = self.partial_tail(row) {
            let tail = row.blocks[entry as usize];
            if self.pool.is_cached(tail) {
                self.forget_from(tail);
                self.tables[table.row as usize].mark_replaced(entry as usize);
            }
        }
    }

    fn copy_on_write(&mut self, table: TableId, entry: u32) {
        let &BlockTable { ref blocks, len, registered, borrowed, .. } = &self.tables[table.row as usize];
        let source = blocks[entry as usize];
        let Some(destination) = self.take_block() else {
            self.poison("the free list is shorter than its count");
            return;
        };
        if !fault!(CopySourceNotHeld) {
            self.pool.pin(source);
        }
        self.release_block(source);
        self.replace_block(table.row as usize, entry, destination);
        self.tables[table.row as usize].mark_replaced(entry as usize);
        self.step_copies.push(BlockCopy { source: source.0, destination: destination.0 });
        self.journal.push(Undo::Copied { table, entry, source, len, registered, borrowed });
    }

    /// Available blocks that are not to be spent on sparing the prefix cache's.
    pub(crate) fn set_reserved(&mut self, blocks: u32) {
        self.reserved = blocks;
    }

    /// Blocks that the outstanding step moves to the host pool.
    pub(crate) fn step_swap_outs(&self) -> &[BlockSwap] {
        &self.step_outs
    }

    /// Blocks that the outstanding step brings back.
    pub(crate) fn step_swap_ins(&self) -> &[BlockSwap] {
        &self.step_ins
    }

    /// Copies that the outstanding step has asked for.
    pub(crate) fn step_copies(&self) -> &[BlockCopy] {
        &self.step_copies
    }

    /// Entries that the device may not have: from this one to the end.
    pub(crate) fn dirty_from(&self, table: TableId) -> u32 {
        self.tables[table.row as usize].dirty_from
    }

    /// The last step that was committed and wrote to tables, since the last device was forgotten.
    pub(crate) fn last_committed(&self) -> StepId {
        self.last_committed
    }

    /// Whether a step is outstanding.
    pub(crate) fn has_step(&self) -> bool {
        self.outstanding
    }

    /// Whether `step` is the one outstanding.
    pub(crate) fn is_outstanding(&self, step: StepId) -> bool {
        self.outstanding && self.last_step == step
    }

    /// Accepts the outstanding step: its growth stands, and the device has its tables. Returns whether tables were cut because
    /// blocks that it moved out are known to be lost.
    pub(crate) fn finish_step(&mut self) -> bool {
        if !self.step_tables.is_empty() {
            self.last_committed = self.last_step;
        }
        for table in self.step_tables.drain(..) {
            let row = &mut self.tables[table.row as usize];
            if row.live && row.generation == table.generation {
                row.in_step = false;
                row.dirty_from = row.blocks.len() as u32;
            }
        }
        self.block_copies += self.step_copies.len() as u64;
        self.swapped_out += self.step_outs.len() as u64;
        self.swapped_in += self.step_ins.len() as u64;
        let step = self.last_step;
        let ended = self.host.as_mut().map(|host| host.commit(step)).unwrap_or_default();
        let is_cut = ended.lost;
        self.settle_transfer(step, ended);
        self.end_step();
        is_cut
    }

    /// Undoes the outstanding step, if there is one (I12).
    pub(crate) fn rollback_step(&mut self) {
        if fault!(DroppedEntriesNotSent) {
            for table in &self.step_tables {
                let row = &mut self.tables[table.row as usize];
                row.dirty_from = row.blocks.len() as u32;
            }
        }
        while let Some(undo) = self.journal.pop() {
            match undo {
                Undo::Copied { table, entry, source, registered, borrowed, .. }
                    if self.live(table).is_ok() && !fault!(RollbackKeepsCopy) =>
                {
                    self.pool.retain(source);
                    let copy = self.replace_block(table.row as usize, entry, source);
                    let row = &mut self.tables[table.row as usize];
                    if self.pool.is_cached(source) {
                        (row.registered, row.borrowed) = (registered, borrowed);
                    }
                    self.release_block(copy);
                }
                Undo::Grown { table, num_blocks, len, parked } if self.live(table).is_ok() => {
                    self.shrink(table, num_blocks);
                    let row = &mut self.tables[table.row as usize];
                    if !fault!(RollbackKeepsLength) {
                        row.len = len;
                    }
                    (row.in_step, row.parked) = (false, parked);
                }
                Undo::Parked { table } if self.live(table).is_ok() => {
                    self.tables[table.row as usize].parked = false;
                }
                Undo::Returned { table, parked, first_entry, first_return, num_blocks } => {
                    self.undo_return(first_entry as usize, first_return as usize, num_blocks as usize);
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

    fn end_step(&mut self) {
        self.journal.clear();
        self.step_copies.clear();
        self.step_outs.clear();
        self.step_ins.clear();
        self.pool.unpin_all();
        self.outstanding = false;
        self.trim_cached();
    }
}
