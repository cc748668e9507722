//! Swapping: tables whose last blocks are in the host pool.
//!
//! A table's blocks that nobody else holds are its last ones, because whoever holds a block holds all before it. Swapping
//! out moves those, last first; what others still hold stays where it is. A block that only swapped tables hold moves
//! once and is shared in the host pool, and when one of them returns, it returns for all of them. Tables that share
//! everything leave together: with the first of them nothing moves, with the last one all.
//!
//! Tables that share a block have it at the same entry, and all before it alike. So those that move along with a table
//! are found by one look at each: they end where it has the same block.

use crate::cache::block_table::BlockTable;
use crate::cache::host_pool::{Ended, HostSlot};
use crate::cache::step::Undo;
use crate::cache::{BlockSwap, KvCache};
use crate::error::CacheError;
use crate::ids::{BlockId, StepId, TableId};

impl KvCache {
    /// Blocks of a table that swapping it out would move, and the pool would have free. What `spared` holds stays.
    pub(crate) fn swappable_blocks(&self, table: TableId, spared: Option<TableId>) -> u32 {
        match self.live(table) {
            Ok(row) if !row.in_step => self.movable_blocks(table, &self.moving_with(table, spared)),
            _ => 0,
        }
    }

    /// The rows of a table and of those that its blocks move for, too: they were swapped out, `spared` is not among them,
    /// and hold nothing of the pool that the table does not. Longest first, the table itself before all others.
    fn moving_with(&self, table: TableId, spared: Option<TableId>) -> Vec<usize> {
        let own = table.row as usize;
        let spared = spared.map(|spared| spared.row as usize);
        let mut rows = self.ending_in(&self.tables[own].blocks, 0, |row, other| {
            row == own || (other.is_out() && Some(row) != spared)
        });
        if let Some(place) = rows.iter().position(|&row| row == own) {
            rows[..=place].rotate_right(1);
        }
        rows
    }

    /// Rows whose last block is one of `blocks`, which are a table's from entry `first` on, at its own entry; longest
    /// first. O(tables), and the sorting of those found.
    fn ending_in(
        &self,
        blocks: &[BlockId],
        first: usize,
        among: impl Fn(usize, &BlockTable) -> bool,
    ) -> Vec<usize> {
        let ends = |(row, table): &(usize, &BlockTable)| {
            self.note_look();
            let entry = table.blocks.len().checked_sub(first + 1);
            let same = entry.is_some_and(|entry| blocks.get(entry) == table.blocks.last());
            same && table.live && among(*row, table)
        };
        let mut rows: Vec<usize> = self.tables.iter().enumerate().filter(ends).map(|(row, _)| row).collect();
        rows.sort_by_key(|&row| std::cmp::Reverse(self.tables[row].blocks.len()));
        rows
    }

    /// How many blocks, from a table's last one on, nobody would hold if `rows`, which begin with the table's, let go.
    fn movable_blocks(&self, table: TableId, rows: &[usize]) -> u32 {
        let blocks = &self.tables[table.row as usize].blocks;
        let mut holders = 0;
        let moves = |&entry: &usize| {
            let longer = |&&row: &&usize| self.tables[row].blocks.len() > entry;
            holders += rows[holders..].iter().take_while(longer).count();
            let block = blocks[entry];
            self.pool.ref_count(block) as usize == holders && !self.pool.is_pinned(block)
        };
        (0..blocks.len()).rev().take_while(moves).count() as u32
    }

    /// Swaps a table out, as part of the outstanding step, until it is swapped in or grows: what stays in the pool because
    /// others hold it moves as soon as only tables like this one do. All or nothing; returns how many blocks move now.
    ///
    /// # Errors
    /// As [`swap_out`](Self::swap_out).
    pub(crate) fn park(&mut self, table: TableId) -> Result<u32, CacheError> {
        let moved = self.swap_out(table, None)?;
        if !std::mem::replace(&mut self.tables[table.row as usize].parked, true) {
            self.journal.push(Undo::Parked { table });
        }
        Ok(moved)
    }

    /// Moves a table's last blocks to the host pool, as part of the outstanding step: those that only swapped tables
    /// hold, `spared` not among them. All or nothing; returns how many. O(entries of tables that change + tables).
    ///
    /// # Errors
    /// [`CacheError::HostPoolFull`] when the host pool does not hold them.
    pub(crate) fn swap_out(&mut self, table: TableId, spared: Option<TableId>) -> Result<u32, CacheError> {
        debug_assert!(self.outstanding, "blocks are moved only by a step");
        self.idle(table)?;
        let rows = self.moving_with(table, spared);
        let needed = self.movable_blocks(table, &rows);
        let available = self.host.as_ref().map_or(0, |host| host.num_free());
        if needed > available {
            return Err(CacheError::HostPoolFull { needed, available });
        }
        for _ in 0..needed {
            self.send_last_block(&rows);
        }
        Ok(needed)
    }

    /// Moves the last block of the first of `rows`, and of those behind it that are as long.
    fn send_last_block(&mut self, rows: &[usize]) {
        let len = self.tables[rows[0]].blocks.len();
        let holders = rows.iter().take_while(|&&row| self.tables[row].blocks.len() == len).count();
        let Some(&block) = self.tables[rows[0]].blocks.last() else { return };
        let step = self.last_step;
        let Some(slot) = self.host.as_mut().and_then(|host| host.send(step, holders as u32)) else {
            self.poison("the free list of the host pool is shorter than its count");
            return;
        };
        self.exchange_last(&rows[..holders], block, slot);
        self.step_outs.push(BlockSwap { block: block.0, host_slot: slot.0 });
    }

    /// All of `rows` hold a slot of the host pool where they held a block, their last one.
    fn exchange_last(&mut self, rows: &[usize], block: BlockId, slot: HostSlot) {
        for &row in rows {
            let last = self.pop_block(row);
            debug_assert_eq!(last, Some(block), "tables that share a block differ before it");
            let table = &mut self.tables[row];
            table.host.push_front(slot);
            table.mark_replaced(table.blocks.len());
            self.release_block(block);
        }
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

    /// Brings a table's blocks back from the host pool, as part of the outstanding step. All or nothing. O(entries of
    /// tables that change + tables).
    ///
    /// # Errors
    /// [`CacheError::NoFreeBlocks`], [`CacheError::InTransfer`] when some have not arrived there yet.
    pub(crate) fn swap_in(&mut self, table: TableId) -> Result<(), CacheError> {
        debug_assert!(self.outstanding, "blocks are moved only by a step");
        let row = self.idle(table)?;
        let (needed, parked, first_entry) = (row.host.len() as u32, row.parked, row.blocks.len() as u32);
        let available = self.pool.num_available();
        if needed > available {
            return Err(CacheError::NoFreeBlocks { needed, available });
        }
        if !self.can_return(table) {
            return Err(CacheError::InTransfer { table });
        }
        let first_return = self.step_ins.len() as u32;
        self.tables[table.row as usize].parked = false;
        self.journal.push(Undo::Returned { table, parked, first_entry, first_return, num_blocks: needed });
        let mut rows = self.returning_with(table);
        while let Some(&slot) = self.tables[table.row as usize].host.front() {
            let Some(block) = self.take_block() else {
                self.poison("the free list is shorter than its count");
                break;
            };
            rows.retain(|&row| self.tables[row].host.front() == Some(&slot));
            self.fetch(&rows, slot, block);
        }
        Ok(())
    }

    /// Rows that hold the first of a table's slots of the host pool, the table's own among them.
    fn returning_with(&mut self, table: TableId) -> Vec<usize> {
        let Some(&slot) = self.tables[table.row as usize].host.front() else { return Vec::new() };
        let holds = |&row: &usize| {
            self.note_look();
            self.tables[row].live && self.tables[row].host.front() == Some(&slot)
        };
        let rows: Vec<usize> = (0..self.tables.len()).filter(holds).collect();
        for &row in &rows {
            let (step, id) = (self.last_step, self.id_of(row));
            if let Some(host) = &mut self.host {
                host.note_return(step, id);
            }
        }
        rows
    }

    /// A block, taken for one table, replaces a slot for all that hold it: those of `rows`. It is given to nobody else in
    /// this step, nor moved out again, for the step fills it.
    fn fetch(&mut self, rows: &[usize], slot: HostSlot, block: BlockId) {
        let step = self.last_step;
        if let Some(host) = &mut self.host {
            host.fetch(step, slot);
        }
        self.pool.pin(block);
        for &row in rows {
            self.push_block(row, block);
            let table = &mut self.tables[row];
            table.host.pop_front();
            table.mark_dirty(table.blocks.len() - 1);
        }
        for _ in 1..rows.len() {
            self.pool.retain(block);
        }
        self.step_ins.push(BlockSwap { block: block.0, host_slot: slot.0 });
    }

    /// Undoes a [`swap_in`](Self::swap_in): whoever still holds one of its blocks holds the slot again. What others could
    /// find of them was never there.
    pub(super) fn undo_return(&mut self, first_entry: usize, first_return: usize, num_blocks: usize) {
        let returns = self.step_ins.split_off(first_return);
        let blocks: Vec<BlockId> = returns.iter().take(num_blocks).map(|swap| BlockId(swap.block)).collect();
        let rows = self.ending_in(&blocks, first_entry, |_, _| true);
        for (index, (&block, swap)) in blocks.iter().zip(&returns).enumerate().rev() {
            let ends_here = |&&row: &&usize| self.tables[row].blocks.len() == first_entry + index + 1;
            let holders = rows.iter().take_while(ends_here).count();
            if self.pool.is_cached(block) {
                self.forget_from(block);
            }
            let slot = HostSlot(swap.host_slot);
            self.exchange_last(&rows[..holders], block, slot);
            if let Some(host) = &mut self.host {
                host.unfetch(slot, holders as u32);
            }
        }
    }

    /// What the outstanding step moved out is lost with it: its tables are cut to what they hold elsewhere.
    pub(super) fn drop_swap_outs(&mut self) {
        let step = self.last_step;
        let lost = self.outstanding && self.host.as_mut().is_some_and(|host| host.drop_step(step));
        if lost {
            self.cut_lost(step);
        }
    }

    /// The device part is done with the transfers of `step`. What did not arrive is cut off its tables. A step that was
    /// dropped, or was reported before, changes nothing.
    pub fn complete_transfers(&mut self, step: StepId, complete: bool) {
        if let Some(ended) = self.host.as_mut().map(|host| host.report(step, complete)) {
            self.settle_transfer(step, ended);
        }
    }

    pub(super) fn settle_transfer(&mut self, step: StepId, ended: Ended) {
        if ended.lost {
            self.cut_lost(step);
        }
        self.broken_tables.extend(ended.broken);
    }

    /// Tables whose blocks did not come back, although their step was committed: what they hold means nothing.
    pub(crate) fn take_broken_table(&mut self) -> Option<TableId> {
        self.broken_tables.pop()
    }

    /// Cuts all tables before the first of their slots that is lost; none was moved out before step `since`. O(what is cut
    /// + tables + what they had moved out since).
    pub(super) fn cut_lost(&mut self, since: StepId) {
        let block_size = self.config.block_size();
        for row in 0..self.tables.len() {
            let (table, host) = (&self.tables[row], &self.host);
            let is_recent = |slot: &&HostSlot| {
                self.note_look();
                host.as_ref().is_some_and(|host| host.sent(**slot) >= since)
            };
            let is_lost = |slot: &HostSlot| host.as_ref().is_some_and(|host| host.is_lost(*slot));
            let Some(first) = table.host.iter().take_while(is_recent).position(is_lost) else { continue };
            let keep = (table.blocks.len() + first) as u32;
            self.shrink(self.id_of(row), keep);
            self.tables[row].len = self.tables[row].len.min(keep * block_size);
        }
    }

    fn note_look(&self) {
        #[cfg(test)]
        self.looks.set(self.looks.get() + 1);
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

#[cfg(test)]
mod tests {
    use crate::cache::KvCache;
    use crate::config::CacheConfig;
    use crate::error::CacheError;
    use crate::model::{KvType, ModelShape};

    const SHAPE: ModelShape = ModelShape::new(1, 1, 1, 8);
    const TABLES: u32 = 64;

    /// What `work` looks at.
    fn looks(cache: &mut KvCache, work: impl FnOnce(&mut KvCache) -> Result<(), CacheError>) -> u64 {
        let before = cache.looks.get();
        work(cache).expect("it is possible");
        cache.looks.get() - before
    }

    #[test]
    fn moving_blocks_looks_at_every_table_a_few_times_however_many_blocks_move() {
        for len in [10, 100_000] {
            let config = CacheConfig::for_blocks(len, &SHAPE, KvType::F16)
                .and_then(|config| config.with_block_size(1))
                .and_then(|config| config.with_max_sequences(TABLES))
                .and_then(|config| config.with_host_blocks(len))
                .expect("a valid configuration");
            let mut cache = KvCache::new(config);
            let first = cache.create(len).expect("a free table");
            let grow = |cache: &mut KvCache| -> Result<(), CacheError> {
                cache.begin_step();
                cache.grow(first, len)?;
                cache.finish_step();
                Ok(())
            };
            grow(&mut cache).expect("free blocks");
            let second = cache.fork(first, len, len).expect("a free table");
            let swap_out = |cache: &mut KvCache| -> Result<(), CacheError> {
                cache.begin_step();
                assert_eq!((cache.park(first)?, cache.park(second)?), (0, len));
                Ok(())
            };
            let out = looks(&mut cache, swap_out);
            let dropped = looks(&mut cache, |cache| {
                cache.rollback_step();
                assert_eq!((cache.len(first)?, cache.len(second)?), (0, 0));
                Ok(())
            });
            cache.release(second).expect("a live table");
            grow(&mut cache).expect("free blocks");
            let second = cache.fork(first, len, len).expect("a free table");
            cache.begin_step();
            cache.park(first).expect("room in the host pool");
            cache.park(second).expect("room in the host pool");
            let step = cache.last_step;
            cache.finish_step();
            cache.complete_transfers(step, true);
            let back = looks(&mut cache, |cache| {
                cache.begin_step();
                cache.swap_in(first)
            });
            let undone = looks(&mut cache, |cache| {
                cache.rollback_step();
                assert_eq!((cache.host_blocks_of(first)?, cache.host_blocks_of(second)?), (len, len));
                Ok(())
            });
            for (what, looks) in [("out", out), ("dropped", dropped), ("back", back), ("undone", undone)] {
                let most = u64::from(2 * TABLES + 8);
                assert!((1..=most).contains(&looks), "{what}: {looks} looks for {len} blocks");
            }
        }
    }
}
