//! Swapping: tables whose last blocks are in the host pool.
//!
//! A table's blocks that nobody else holds are its last ones, because whoever holds a block holds all before it. Swapping
//! out moves those, last first; what others still hold stays where it is. A block that only swapped tables hold moves
//! once and is shared in the host pool, and when one of them returns, it returns for all of them.

use crate::cache::block_table::BlockTable;
use crate::cache::host_pool::{Ended, HostSlot};
use crate::cache::step::Undo;
use crate::cache::{BlockSwap, KvCache};
use crate::error::CacheError;
use crate::ids::{BlockId, StepId, TableId};

impl KvCache {
    /// Blocks of a table that swapping it out would move, and the pool would have free. What `spared` holds stays.
    pub(crate) fn swappable_blocks(&self, table: TableId, spared: Option<TableId>) -> u32 {
        let Ok(row) = self.live(table) else { return 0 };
        if row.in_step {
            return 0;
        }
        let len = row.blocks.len();
        let moves = (0..len).rev().take_while(|&entry| self.only_swapped_hold(table, entry, spared)).count();
        moves as u32
    }

    /// Whether a block would have no holder if this table, and those swapped out that hold nothing else behind it, let
    /// go of it.
    fn only_swapped_hold(&self, table: TableId, entry: usize, spared: Option<TableId>) -> bool {
        let blocks = &self.tables[table.row as usize].blocks;
        let count = self.pool.ref_count(blocks[entry]);
        let moves_along = |(row, other): &(usize, &BlockTable)| {
            other.live
                && spared.is_none_or(|spared| spared.row as usize != *row)
                && !other.host.is_empty()
                && other.blocks.len() > entry
                && other.blocks.last() == blocks.get(other.blocks.len() - 1)
        };
        !self.pool.is_pinned(blocks[entry])
            && (count == 1 || {
                let this = self.tables[table.row as usize].host.is_empty();
                count as usize
                    == self.tables.iter().enumerate().filter(moves_along).count() + usize::from(this)
            })
    }

    /// Moves a table's last blocks to the host pool, as part of the outstanding step: those that only swapped tables
    /// hold, `spared` not among them. All or nothing; returns how many.
    ///
    /// # Errors
    /// [`CacheError::HostPoolFull`] when the host pool does not hold them.
    pub(crate) fn swap_out(&mut self, table: TableId, spared: Option<TableId>) -> Result<u32, CacheError> {
        debug_assert!(self.outstanding, "blocks are moved only by a step");
        self.idle(table)?;
        let needed = self.swappable_blocks(table, spared);
        let available = self.host.as_ref().map_or(0, |host| host.num_free());
        if needed > available {
            return Err(CacheError::HostPoolFull { needed, available });
        }
        for _ in 0..needed {
            self.send_last_block(table);
        }
        Ok(needed)
    }

    fn send_last_block(&mut self, table: TableId) {
        let Some(&block) = self.tables[table.row as usize].blocks.last() else { return };
        let step = self.last_step;
        let holders = self.pool.ref_count(block);
        let Some(slot) = self.host.as_mut().and_then(|host| host.send(step, holders)) else {
            self.poison("the free list of the host pool is shorter than its count");
            return;
        };
        for row in 0..self.tables.len() {
            let other = &mut self.tables[row];
            let moves = row == table.row as usize || !other.host.is_empty();
            if other.live && moves && other.blocks.last() == Some(&block) {
                other.blocks.pop();
                other.host.push_front(slot);
                other.mark_replaced(other.blocks.len());
                self.release_block(block);
            }
        }
        self.step_outs.push(BlockSwap { block: block.0, host_slot: slot.0 });
    }

    /// Blocks of a table that are in the host pool, or on their way there. They follow those that
    /// [`block_ids`](Self::block_ids) names.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn host_blocks_of(&self, table: TableId) -> Result<u32, CacheError> {
        Ok(self.live(table)?.host.len() as u32)
    }

    /// Whether all of a table's blocks in the host pool have arrived there.
    pub(crate) fn can_return(&self, table: TableId) -> bool {
        match (self.live(table), &self.host) {
            (Ok(_), Some(_)) if fault!(ReturnsBeforeArrival) => true,
            (Ok(row), Some(host)) => row.host.iter().all(|&slot| !host.is_arriving(slot)),
            (row, _) => row.is_ok(),
        }
    }

    /// Brings a table's blocks back from the host pool, as part of the outstanding step. All or nothing.
    ///
    /// # Errors
    /// [`CacheError::NoFreeBlocks`], [`CacheError::InTransfer`] when some have not arrived there yet.
    pub(crate) fn swap_in(&mut self, table: TableId) -> Result<(), CacheError> {
        debug_assert!(self.outstanding, "blocks are moved only by a step");
        let needed = self.idle(table)?.host.len() as u32;
        let available = self.pool.num_available();
        if needed > available {
            return Err(CacheError::NoFreeBlocks { needed, available });
        }
        if !self.can_return(table) {
            return Err(CacheError::InTransfer { table });
        }
        while let Some(&slot) = self.tables[table.row as usize].host.front() {
            let Some(block) = self.take_block() else {
                self.poison("the free list is shorter than its count");
                break;
            };
            self.fetch(slot, block);
            self.journal.push(Undo::Returned { block, slot });
            self.step_ins.push(BlockSwap { block: block.0, host_slot: slot.0 });
        }
        Ok(())
    }

    /// A block, taken for one table, replaces a slot for all that hold it.
    fn fetch(&mut self, slot: HostSlot, block: BlockId) {
        let step = self.last_step;
        let Some(host) = &mut self.host else { return };
        host.fetch(step, slot);
        let mut holders = 0;
        for (index, row) in self.tables.iter_mut().enumerate() {
            if row.live && row.host.front() == Some(&slot) {
                row.host.pop_front();
                row.blocks.push(block);
                row.mark_dirty(row.blocks.len() - 1);
                let (cache, generation) = (self.instance, row.generation);
                host.note_return(step, TableId { cache, row: index as u32, generation });
                holders += 1;
            }
        }
        for _ in 1..holders {
            self.pool.retain(block);
        }
    }

    /// Undoes [`fetch`](Self::fetch): whoever still holds the block holds the slot again.
    pub(super) fn undo_return(&mut self, block: BlockId, slot: HostSlot) {
        let mut holders = 0;
        for row in 0..self.tables.len() {
            let other = &mut self.tables[row];
            if other.live && other.blocks.last() == Some(&block) {
                other.blocks.pop();
                other.host.push_front(slot);
                other.mark_replaced(other.blocks.len());
                self.release_block(block);
                holders += 1;
            }
        }
        if let Some(host) = &mut self.host {
            host.unfetch(slot, holders);
        }
    }

    /// What the outstanding step moved out is lost with it: its tables are cut to what they hold elsewhere.
    pub(super) fn drop_swap_outs(&mut self) {
        let step = self.last_step;
        let lost = match &mut self.host {
            Some(host) if self.outstanding => host.drop_step(step),
            _ => return,
        };
        self.cut_at(&lost);
    }

    /// The device part is done with the transfers of `step`. What did not arrive is cut off its tables. A step that was
    /// dropped, or was reported before, changes nothing.
    pub fn complete_transfers(&mut self, step: StepId, complete: bool) {
        if let Some(ended) = self.host.as_mut().map(|host| host.report(step, complete)) {
            self.settle_transfer(ended);
        }
    }

    pub(super) fn settle_transfer(&mut self, ended: Ended) {
        self.cut_at(&ended.lost);
        self.broken_tables.extend(ended.broken);
    }

    /// Tables whose blocks did not come back, although their step was committed: what they hold means nothing.
    pub(crate) fn take_broken_table(&mut self) -> Option<TableId> {
        self.broken_tables.pop()
    }

    /// Cuts all tables before the first of these slots.
    pub(super) fn cut_at(&mut self, slots: &[HostSlot]) {
        if slots.is_empty() {
            return;
        }
        let block_size = self.config.block_size();
        for row in 0..self.tables.len() {
            let table = &self.tables[row];
            let Some(first) = table.host.iter().position(|slot| slots.contains(slot)) else { continue };
            let keep = (table.blocks.len() + first) as u32;
            self.shrink(self.id_of(row), keep);
            self.tables[row].len = self.tables[row].len.min(keep * block_size);
        }
    }

    pub(super) fn release_slot(&mut self, slot: HostSlot) {
        if self.host.as_mut().is_some_and(|host| !host.release(slot)) {
            self.poison("a slot of the host pool was released twice");
        }
    }

    /// Steps whose transfers have not ended.
    pub(crate) fn num_transfers(&self) -> usize {
        self.host.as_ref().map_or(0, |host| host.num_transfers())
    }

    /// Free blocks of the host pool.
    pub(crate) fn free_host_blocks(&self) -> u32 {
        self.host.as_ref().map_or(0, |host| host.num_free())
    }
}
