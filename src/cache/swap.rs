//! Swapping: tables whose last blocks are in the host pool.
//!
//! A table's blocks that no other holds are its last ones, because a holder of a block holds all before it. Swapping
//! out moves those, last first; what others still hold stays where it is. A block that only swapped tables hold moves
//! once and is shared in the host pool, and when one of them returns, it returns for all of them. Tables that share
//! everything leave together: with the first of them nothing moves, with the last one all.
//!
//! Tables that share a block have it at the same entry, and all before it alike. So those that move along with a table
//! are found by one look at each: they end where it has the same block.

use crate::cache::block_table::{BlockTable, Run};
use crate::cache::host_pool::{Ended, HostSlot};
use crate::cache::step::Undo;
use crate::cache::{BlockSwap, KvCache};
use crate::error::CacheError;
use crate::ids::{BlockId, StepId, TableId};
use std::ops::Range;

impl KvCache {
    /// Blocks of a table that swapping it out would move, and the pool would have free. What `spared` holds stays.
    pub(crate) fn swappable_blocks(&self, table: TableId, spared: Option<TableId>) -> u32 {
        match self.live(table) {
            Ok(row) if !row.in_step => (0..self.lanes.len())
                .map(|lane| self.movable_blocks(table, lane, &self.moving_with(table, lane, spared)))
                .sum(),
            _ => 0,
        }
    }

    /// The rows of a table and of those that its blocks of a lane move for, too: they were swapped out, `spared` is not
    /// among them, and their last one in the pool is one of the table's. Those that reach furthest first, the table itself
    /// before all others.
    fn moving_with(&self, table: TableId, lane: usize, spared: Option<TableId>) -> Vec<usize> {
        let own = table.row as usize;
        let spared = spared.map(|spared| spared.row as usize);
        let run = &self.tables[own].runs[lane];
        let mut rows = self.ending_in(lane, &run.blocks, run.first, |row, other| {
            row == own || (other.is_out() && Some(row) != spared)
        });
        if let Some(place) = rows.iter().position(|&row| row == own) {
            rows[..=place].rotate_right(1);
        }
        rows
    }

    /// Rows whose last block in a lane is one of `blocks`, which are a table's from entry `first` on, at its own entry;
    /// those that reach furthest first. O(tables), and the sorting of those found.
    fn ending_in(
        &self,
        lane: usize,
        blocks: &[BlockId],
        first: u32,
        among: impl Fn(usize, &BlockTable) -> bool,
    ) -> Vec<usize> {
        let ends = |(row, table): &(usize, &BlockTable)| {
            self.note_look();
            if !table.live || !among(*row, table) {
                return false;
            }
            let run = &table.runs[lane];
            let entry = run.pool_end().checked_sub(first + 1);
            let same = entry.is_some_and(|entry| blocks.get(entry as usize) == run.blocks.last());
            same && !run.blocks.is_empty()
        };
        let mut rows: Vec<usize> = self.tables.iter().enumerate().filter(ends).map(|(row, _)| row).collect();
        rows.sort_by_key(|&row| std::cmp::Reverse(self.tables[row].runs[lane].pool_end()));
        rows
    }

    /// How many blocks, from a table's last one in a lane on, would have no holder if `rows`, which begin with the table's, let
    /// go.
    fn movable_blocks(&self, table: TableId, lane: usize, rows: &[usize]) -> u32 {
        let run = |row: usize| &self.tables[row].runs[lane];
        let own = run(table.row as usize);
        let mut reaching = 0;
        let moves = |&entry: &u32| {
            let reaches = |&&row: &&usize| run(row).pool_end() > entry;
            reaching += rows[reaching..].iter().take_while(reaches).count();
            let holders = rows[..reaching].iter().filter(|&&row| run(row).first <= entry).count();
            own.block_at(entry).is_some_and(|block| {
                self.pool.ref_count(block) as usize == holders && !self.pool.is_pinned(block)
            })
        };
        (own.first..own.pool_end()).rev().take_while(moves).count() as u32
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
        // What windows have left behind does not move: a block that returns cannot be given away in the step that fills
        // it.
        self.slide(table);
        let lanes = 0..self.lanes.len();
        let moving = |lane| {
            let rows = self.moving_with(table, lane, spared);
            (self.movable_blocks(table, lane, &rows), rows)
        };
        let moves: Vec<(u32, Vec<usize>)> = lanes.map(moving).collect();
        let needed = moves.iter().map(|(blocks, _)| blocks).sum();
        let available = self.host.as_ref().map_or(0, |host| host.num_free());
        if needed > available {
            return Err(CacheError::HostPoolFull { needed, available });
        }
        for (lane, (blocks, rows)) in moves.iter().enumerate() {
            (0..*blocks).for_each(|_| self.send_last_block(lane, rows));
        }
        Ok(needed)
    }

    /// Moves the last block of the first of `rows` in a lane, and of those behind it that end with it.
    fn send_last_block(&mut self, lane: usize, rows: &[usize]) {
        let Some(&block) = self.tables[rows[0]].runs[lane].blocks.last() else { return };
        let end = self.tables[rows[0]].runs[lane].pool_end();
        let ends_here = |row: &usize| {
            let run = &self.tables[*row].runs[lane];
            run.pool_end() == end && !run.blocks.is_empty()
        };
        let reaching = rows.iter().take_while(|&&row| self.tables[row].runs[lane].pool_end() == end);
        let holders: Vec<usize> = reaching.copied().filter(ends_here).collect();
        let step = self.last_step;
        let Some(slot) = self.host.as_mut().and_then(|host| host.send(step, holders.len() as u32)) else {
            self.poison("the free list of the host pool is shorter than its count");
            return;
        };
        self.exchange_last(lane, &holders, block, slot);
        self.step_outs.push(BlockSwap { block: block.0, host_slot: slot.0 });
    }

    /// All of `rows` hold a slot of the host pool where they held a block, their last one in a lane.
    fn exchange_last(&mut self, lane: usize, rows: &[usize], block: BlockId, slot: HostSlot) {
        for &row in rows {
            let last = self.pop_block(row, lane);
            debug_assert_eq!(last, Some(block), "tables that share a block differ before it");
            let run = &mut self.tables[row].runs[lane];
            run.host.push_front(slot);
            let end = run.pool_end();
            self.mark_replaced(row, lane, end);
            self.release_block(block);
        }
    }

    /// Blocks of a table that are in the host pool, or on their way there. They follow those that
    /// [`block_ids`](Self::block_ids) names.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn host_blocks_of(&self, table: TableId) -> Result<u32, CacheError> {
        Ok(self.live(table)?.host_blocks())
    }

    /// Whether all of a table's blocks in the host pool have arrived there.
    pub(crate) fn can_return(&self, table: TableId) -> bool {
        match (self.live(table), &self.host) {
            (Ok(_), Some(_)) if fault!(ReturnsBeforeArrival) => true,
            (Ok(row), Some(host)) => {
                row.runs.iter().all(|run| run.host.iter().all(|&slot| !host.is_moving(slot)))
            }
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
        let (needed, parked) = (row.host_blocks(), row.parked);
        let available = self.pool.num_available();
        if needed > available {
            return Err(CacheError::NoFreeBlocks { needed, available });
        }
        if !self.can_return(table) {
            return Err(CacheError::InTransfer { table });
        }
        self.tables[table.row as usize].parked = false;
        for lane in 0..self.lanes.len() {
            self.return_run(table, lane, parked);
        }
        Ok(())
    }

    fn return_run(&mut self, table: TableId, lane: usize, parked: bool) {
        let row = table.row as usize;
        let run = &self.tables[row].runs[lane];
        let (first_entry, num_blocks) = (run.pool_end(), run.host.len() as u32);
        let first_return = self.step_ins.len() as u32;
        let undo = Undo::Returned { table, parked, lane: lane as u32, first_entry, first_return, num_blocks };
        self.journal.push(undo);
        let mut rows = self.returning_with(row, lane);
        while let Some(&slot) = self.tables[row].runs[lane].host.front() {
            let Some(block) = self.take_block() else {
                self.poison("the free list is shorter than its count");
                break;
            };
            rows.retain(|&row| self.tables[row].runs[lane].host.front() == Some(&slot));
            self.fetch(lane, &rows, slot, block);
        }
    }

    /// Rows that the first of a table's slots of the host pool returns for, its own among them: all that hold it. In a lane
    /// that slides tables may hold the same slots from different ones on, so there each has a copy of its own, and the slot
    /// stays for the others.
    fn returning_with(&mut self, own: usize, lane: usize) -> Vec<usize> {
        let Some(&slot) = self.tables[own].runs[lane].host.front() else { return Vec::new() };
        let rows: Vec<usize> = if self.lanes[lane].slides() {
            vec![own]
        } else {
            let holds = |&row: &usize| {
                self.note_look();
                self.tables[row].live && self.tables[row].runs[lane].host.front() == Some(&slot)
            };
            (0..self.tables.len()).filter(holds).collect()
        };
        for &row in &rows {
            let (step, id) = (self.last_step, self.id_of(row));
            if let Some(host) = &mut self.host {
                host.note_return(step, id);
            }
        }
        rows
    }

    /// A block, taken for one table, replaces a slot for those of `rows`. It is given to no other table in this step, nor moved
    /// out again, because the step fills it.
    fn fetch(&mut self, lane: usize, rows: &[usize], slot: HostSlot, block: BlockId) {
        let step = self.last_step;
        if let Some(host) = &mut self.host {
            let holders = if fault!(ReturnTakesSlots) { host.ref_count(slot) } else { rows.len() as u32 };
            host.fetch(step, slot, holders);
        }
        self.pool.pin(block);
        for &row in rows {
            self.push_block(row, lane, block);
            let run = &mut self.tables[row].runs[lane];
            run.host.pop_front();
            run.mark_dirty(run.pool_end() - 1);
        }
        for _ in 1..rows.len() {
            self.pool.retain(block);
        }
        self.step_ins.push(BlockSwap { block: block.0, host_slot: slot.0 });
    }

    /// Undoes the return of a run: each holder of one of its blocks, which begin at `first_entry`, holds the slot again.
    /// What others could find of them was never there.
    pub(super) fn undo_return(&mut self, lane: usize, first_entry: u32, returns: Range<usize>) {
        let blocks: Vec<BlockId> =
            self.step_ins[returns.clone()].iter().map(|swap| BlockId(swap.block)).collect();
        let slots: Vec<HostSlot> =
            self.step_ins[returns].iter().map(|swap| HostSlot(swap.host_slot)).collect();
        let rows = self.ending_in(lane, &blocks, first_entry, |_, _| true);
        for (index, (&block, &slot)) in blocks.iter().zip(&slots).enumerate().rev() {
            let end = first_entry + index as u32 + 1;
            // What a window has left behind in this step has no holder any more.
            let ends_here = |&&row: &&usize| {
                let run = &self.tables[row].runs[lane];
                run.pool_end() == end && !run.blocks.is_empty()
            };
            let holders = rows.iter().take_while(ends_here).count();
            if self.pool.is_cached(block) {
                self.forget_block(block);
            }
            self.exchange_last(lane, &rows[..holders], block, slot);
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

    /// A step's transfers have ended. Returns whether tables were cut because some of what they moved out is lost.
    pub(super) fn settle_transfer(&mut self, step: StepId, ended: Ended) -> bool {
        if ended.lost {
            self.cut_lost(step);
        }
        self.broken_tables.extend(ended.broken);
        ended.lost
    }

    /// Tables whose blocks did not come back, although their step was committed: what they hold means nothing.
    pub(crate) fn take_broken_table(&mut self) -> Option<TableId> {
        self.broken_tables.pop()
    }

    /// Cuts all tables before the first of their slots that is lost; none was moved out before step `since`. O(what is cut
    /// + tables + what they had moved out since).
    pub(super) fn cut_lost(&mut self, since: StepId) {
        for row in 0..self.tables.len() {
            let lanes = self.lanes.iter().zip(self.tables[row].runs.iter());
            let lost = lanes.filter_map(|(lane, run)| {
                Some(lane.tokens_before(run.pool_end() + self.first_lost(run, since)?))
            });
            let Some(len) = lost.min() else { continue };
            // What is left may not be enough for any row after it.
            let table = self.id_of(row);
            let len = len.min(self.tables[row].len);
            let len = if self.reaches(table, len) { len } else { 0 };
            self.shrink(table, len);
            self.tables[row].len = len;
        }
    }

    /// Which of a run's slots is the first that is lost, of those that were sent since a step.
    fn first_lost(&self, run: &Run, since: StepId) -> Option<u32> {
        let is_recent = |slot: &&HostSlot| {
            self.note_look();
            self.host.as_ref().is_some_and(|host| host.sent(**slot) >= since)
        };
        let is_lost = |slot: &HostSlot| self.host.as_ref().is_some_and(|host| host.is_lost(*slot));
        run.host.iter().take_while(is_recent).position(is_lost).map(|place| place as u32)
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
                cache.grow_by(first, len)?;
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
