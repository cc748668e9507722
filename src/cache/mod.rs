//! [`KvCache`]: who holds which block. The only door to pool and tables, which it keeps in step.
//!
//! It owns reference counts, block tables and their lengths, copy-on-write, and the undo of a step that was planned but
//! not committed. It knows nothing of tokens, requests, time, or what is in a block.
//!
//! # A step
//! Growth happens only inside a step: [`begin_step`](crate::StepBuilder::new) → growth → commit or rollback. Every change
//! that a step makes is written to a journal; rolling back undoes it in reverse. Tables released during a step stay
//! released. Between planning and commit, a table that the step writes through cannot be forked, truncated or released.
//!
//! # Writing into a shared block
//! Only a sequence's next position is ever written, so only its last block can be both written and shared. The first
//! writer takes a fresh block and the step carries the pair to copy; the last holder writes in place. The source stays
//! off the free list until the step ends, even when its last holder lets go of it. A holder that left by a copy of the
//! outstanding step returns if that step is rolled back, and the device may have run it: until the commit nobody writes
//! over the tokens that it had there.

mod block_pool;
mod block_table;
mod stats;

use crate::config::CacheConfig;
use crate::error::CacheError;
use crate::ids::{BlockId, StepId, TableId};
use block_pool::BlockPool;
use block_table::BlockTable;
pub use stats::CacheStats;
use std::sync::atomic::{AtomicU64, Ordering};

/// One block copied into another, all layers: a copy-on-write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct BlockCopy {
    /// Block read.
    pub source: u32,
    /// Block written.
    pub destination: u32,
}

/// One block moved between the pool and the host pool, all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct BlockSwap {
    /// Block of the pool.
    pub block: u32,
    /// Block of the host pool, `0..host_blocks`.
    pub host_slot: u32,
}

/// One change of the outstanding step, with what undoes it. Entries of tables released since are skipped.
#[derive(Clone, Copy, Debug)]
enum Undo {
    /// `len` tokens were in the table: those in `source` must outlive the step.
    Copied {
        table: TableId,
        entry: u32,
        source: BlockId,
        len: u32,
    },
    Grown {
        table: TableId,
        num_blocks: u32,
        len: u32,
    },
}

/// Reference-counted blocks behind per-sequence block tables.
///
/// Public for applications with their own scheduler, which grow tables through a [`StepBuilder`](crate::StepBuilder);
/// the [`Scheduler`](crate::Scheduler) owns one and is all that others need.
///
/// ```
/// use paged_kv::{CacheConfig, KvCache, KvType, ModelShape, StepBuilder};
///
/// let shape = ModelShape { num_layers: 2, num_query_heads: 4, num_kv_heads: 2, head_dim: 32 };
/// let mut cache = KvCache::new(CacheConfig::for_blocks(8, &shape, KvType::F16)?.with_block_size(4)?);
/// let table = cache.create(20)?;
///
/// let mut builder = StepBuilder::new(&mut cache);
/// builder.push(table, &[11, 12, 13, 14, 15, 16])?;
/// let plan = builder.finish();
/// assert_eq!(plan.slot_mapping(), [0, 1, 2, 3, 4, 5]); // blocks 0 and 1
/// // … record and submit the step …
/// cache.commit_step(plan)?;
///
/// let branch = cache.fork(table, 6, 20)?; // shares both blocks, copies nothing
/// assert_eq!(cache.stats().shared_blocks, 2);
/// # let _ = branch;
/// # Ok::<(), paged_kv::Error>(())
/// ```
#[derive(Debug)]
pub struct KvCache {
    config: CacheConfig,
    instance: u64,
    pool: BlockPool,
    tables: Vec<BlockTable>,
    free_rows: Vec<u32>,
    journal: Vec<Undo>,
    step_tables: Vec<TableId>,
    step_copies: Vec<BlockCopy>,
    last_step: StepId,
    outstanding: bool,
    block_copies: u64,
    poisoned: Option<&'static str>,
}

impl KvCache {
    /// An empty cache: every block free.
    pub fn new(config: CacheConfig) -> Self {
        static INSTANCES: AtomicU64 = AtomicU64::new(1);
        let max_sequences = config.max_sequences();
        Self {
            config,
            instance: INSTANCES.fetch_add(1, Ordering::Relaxed),
            pool: BlockPool::new(config.num_blocks()),
            tables: (0..max_sequences).map(|_| BlockTable::default()).collect(),
            free_rows: (0..max_sequences).rev().collect(),
            journal: Vec::new(),
            step_tables: Vec::new(),
            step_copies: Vec::new(),
            last_step: StepId(0),
            outstanding: false,
            block_copies: 0,
            poisoned: None,
        }
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Tells this cache from every other one in the process.
    pub fn instance(&self) -> u64 {
        self.instance
    }

    /// Opens a table for a sequence of at most `max_tokens` tokens. It holds no block yet.
    ///
    /// # Errors
    /// [`CacheError::ExceedsTable`] when a table cannot hold that many, [`CacheError::NoFreeTable`] when all are taken.
    ///
    /// # Complexity
    /// O(1), and one reservation of the table's entries.
    pub fn create(&mut self, max_tokens: u32) -> Result<TableId, CacheError> {
        self.check_poison()?;
        let max = self.config.max_sequence_tokens();
        if max_tokens > max {
            return Err(CacheError::ExceedsTable { tokens: max_tokens, max_tokens: max });
        }
        let no_free = CacheError::NoFreeTable { max_sequences: self.config.max_sequences() };
        let row = self.free_rows.pop().ok_or(no_free)?;
        let table = &mut self.tables[row as usize];
        table.open(self.config.layout().blocks_for(max_tokens));
        Ok(TableId { row, generation: table.generation })
    }

    /// A second table that shares the first `at` tokens of `parent` and may grow to `max_tokens`.
    ///
    /// Nothing is copied: blocks are shared, and whoever first writes into a shared last block copies that one.
    ///
    /// # Errors
    /// [`CacheError::BeyondLength`] when `at` exceeds the parent's length, [`CacheError::InStep`] when the outstanding
    /// step writes through the parent, and as [`create`](Self::create).
    ///
    /// # Complexity
    /// O(blocks shared).
    pub fn fork(&mut self, parent: TableId, at: u32, max_tokens: u32) -> Result<TableId, CacheError> {
        let len = self.idle(parent)?.len;
        if at > len {
            return Err(CacheError::BeyondLength { tokens: at, len });
        }
        let child = self.create(max_tokens.max(at))?;
        let shared = self.config.layout().blocks_for(at) as usize;
        for entry in 0..shared {
            let block = self.tables[parent.row as usize].blocks[entry];
            self.pool.retain(block);
            self.tables[child.row as usize].blocks.push(block);
        }
        self.tables[child.row as usize].len = at;
        Ok(child)
    }

    /// Shortens a table to `len` tokens and gives back the blocks behind them, the last first.
    ///
    /// # Errors
    /// [`CacheError::BeyondLength`] when it is shorter already, [`CacheError::InStep`] while a step writes through it.
    pub fn truncate(&mut self, table: TableId, len: u32) -> Result<(), CacheError> {
        let current = self.idle(table)?.len;
        if len > current {
            return Err(CacheError::BeyondLength { tokens: len, len: current });
        }
        self.tables[table.row as usize].len = len;
        self.shrink(table, self.config.layout().blocks_for(len));
        Ok(())
    }

    /// Gives back all blocks of a table, the last first, and the table itself. The id is stale from then on.
    ///
    /// # Errors
    /// [`CacheError::UnknownTable`] when it was released before, [`CacheError::InStep`] while a step writes through it.
    pub fn release(&mut self, table: TableId) -> Result<(), CacheError> {
        self.idle(table)?;
        self.close(table);
        Ok(())
    }

    fn close(&mut self, table: TableId) {
        self.shrink(table, 0);
        self.tables[table.row as usize].close();
        self.free_rows.push(table.row);
    }

    /// Changes what a table may grow to.
    pub(crate) fn set_max_tokens(&mut self, table: TableId, max_tokens: u32) -> Result<(), CacheError> {
        self.live(table)?;
        let max_blocks = self.config.layout().blocks_for(max_tokens.min(self.config.max_sequence_tokens()));
        let table = &mut self.tables[table.row as usize];
        table.max_blocks = max_blocks.max(table.blocks.len() as u32);
        table.blocks.reserve((table.max_blocks as usize).saturating_sub(table.blocks.len()));
        Ok(())
    }

    /// Releases the blocks from `num_blocks` on, the last first.
    fn shrink(&mut self, table: TableId, num_blocks: u32) {
        let table = &mut self.tables[table.row as usize];
        let mut sound = true;
        while table.blocks.len() > num_blocks as usize {
            if let Some(block) = table.blocks.pop() {
                sound &= self.pool.release(block);
            }
        }
        table.mark_dirty(num_blocks as usize);
        if !sound {
            self.poison("a block was released twice");
        }
    }

    /// Tokens in a table, those of the outstanding step included.
    ///
    /// # Errors
    /// [`CacheError::UnknownTable`] when it was released.
    pub fn len(&self, table: TableId) -> Result<u32, CacheError> {
        Ok(self.live(table)?.len)
    }

    /// The table's blocks, in order.
    ///
    /// # Errors
    /// [`CacheError::UnknownTable`] when it was released.
    pub fn block_ids(&self, table: TableId) -> Result<&[BlockId], CacheError> {
        Ok(&self.live(table)?.blocks)
    }

    /// How many tables hold `block`; 0 for a free one.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.pool.ref_count(block)
    }

    /// Blocks that can be allocated now.
    pub fn free_blocks(&self) -> u32 {
        self.pool.num_free()
    }

    /// Tables that can be opened now.
    pub fn free_tables(&self) -> u32 {
        self.free_rows.len() as u32
    }

    /// Free blocks that `num_tokens` more tokens in `table` would take, and `lookahead` beyond them (capped at what the
    /// table may grow to): new blocks, and one for the copy of a shared last block.
    ///
    /// # Errors
    /// [`CacheError::UnknownTable`] when it was released.
    pub fn blocks_needed(&self, table: TableId, num_tokens: u32, lookahead: u32) -> Result<u32, CacheError> {
        let table = self.live(table)?;
        Ok(self.target_blocks(table, num_tokens, lookahead).saturating_sub(table.blocks.len() as u32)
            + u32::from(num_tokens > 0 && self.shared_tail(table).is_some()))
    }

    fn target_blocks(&self, table: &BlockTable, num_tokens: u32, lookahead: u32) -> u32 {
        let layout = self.config.layout();
        let len = table.len.saturating_add(num_tokens);
        let written = layout.blocks_for(len);
        let ahead = layout.blocks_for(len.saturating_add(lookahead));
        written.max(ahead.min(table.max_blocks))
    }

    /// The entry of the block that the next token is written into, when that block is not this table's to write: others
    /// hold it too, or would after a rollback and have more tokens in it.
    fn shared_tail(&self, table: &BlockTable) -> Option<u32> {
        let block_size = self.config.block_size();
        if table.len.is_multiple_of(block_size) {
            return None;
        }
        let entry = table.len / block_size;
        let block = table.blocks[entry as usize];
        (self.pool.ref_count(block) > 1 || self.is_left_longer(block, table.len)).then_some(entry)
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

    /// Whether a copy of the outstanding step still reads `block`.
    pub(crate) fn is_pinned(&self, block: BlockId) -> bool {
        self.pool.is_pinned(block)
    }

    // The outstanding step.

    /// Starts a step; one that is outstanding is rolled back first.
    pub(crate) fn begin_step(&mut self) -> StepId {
        self.rollback_step();
        self.last_step = StepId(self.last_step.0 + 1);
        self.outstanding = true;
        self.last_step
    }

    /// Makes room for `num_tokens` more tokens and `lookahead` beyond them, and counts the tokens in. All or nothing.
    pub(crate) fn grow(&mut self, table: TableId, num_tokens: u32, lookahead: u32) -> Result<(), CacheError> {
        debug_assert!(self.outstanding, "a table grows only inside a step");
        let before = self.idle(table)?;
        let (len, num_blocks) = (before.len, before.blocks.len() as u32);
        if self.config.layout().blocks_for(len.saturating_add(num_tokens)) > before.max_blocks {
            let max_tokens = before.max_blocks * self.config.block_size();
            return Err(CacheError::ExceedsTable { tokens: len.saturating_add(num_tokens), max_tokens });
        }
        let needed = self.blocks_needed(table, num_tokens, lookahead)?;
        let available = self.pool.num_free();
        if needed > available {
            return Err(CacheError::NoFreeBlocks { needed, available });
        }
        if num_tokens > 0 {
            self.copy_on_write(table);
        }
        let row = &self.tables[table.row as usize];
        for _ in num_blocks..self.target_blocks(row, num_tokens, lookahead) {
            let Some(block) = self.pool.allocate() else {
                self.poison("the free list is shorter than its count");
                break;
            };
            self.tables[table.row as usize].blocks.push(block);
        }
        self.journal.push(Undo::Grown { table, num_blocks, len });
        let row = &mut self.tables[table.row as usize];
        row.len += num_tokens;
        row.in_step = true;
        self.step_tables.push(table);
        Ok(())
    }

    fn copy_on_write(&mut self, table: TableId) {
        let Some(entry) = self.shared_tail(&self.tables[table.row as usize]) else { return };
        let row = &self.tables[table.row as usize];
        let (source, len) = (row.blocks[entry as usize], row.len);
        let Some(destination) = self.pool.allocate() else {
            self.poison("the free list is shorter than its count");
            return;
        };
        self.pool.pin(source);
        if !self.pool.release(source) {
            self.poison("the source of a copy has no holder");
        }
        self.tables[table.row as usize].blocks[entry as usize] = destination;
        self.tables[table.row as usize].mark_dirty(entry as usize);
        self.step_copies.push(BlockCopy { source: source.0, destination: destination.0 });
        self.journal.push(Undo::Copied { table, entry, source, len });
    }

    /// Copies that the outstanding step has asked for.
    pub(crate) fn step_copies(&self) -> &[BlockCopy] {
        &self.step_copies
    }

    /// Entries that the device may not have: from this one to the end.
    pub(crate) fn dirty_from(&self, table: TableId) -> u32 {
        self.tables[table.row as usize].dirty_from
    }

    /// Whether `step` is the one outstanding.
    pub(crate) fn is_outstanding(&self, step: StepId) -> bool {
        self.outstanding && self.last_step == step
    }

    /// Accepts the outstanding step: its growth stands, and the device has its tables.
    pub(crate) fn finish_step(&mut self) {
        for table in self.step_tables.drain(..) {
            let row = &mut self.tables[table.row as usize];
            if row.live && row.generation == table.generation {
                row.in_step = false;
                row.dirty_from = row.blocks.len() as u32;
            }
        }
        self.block_copies += self.step_copies.len() as u64;
        self.end_step();
    }

    /// Undoes the outstanding step, if there is one (I12).
    pub(crate) fn rollback_step(&mut self) {
        while let Some(undo) = self.journal.pop() {
            match undo {
                Undo::Copied { table, entry, source, .. } if self.live(table).is_ok() => {
                    self.pool.retain(source);
                    let row = &mut self.tables[table.row as usize];
                    let copy = std::mem::replace(&mut row.blocks[entry as usize], source);
                    if !self.pool.release(copy) {
                        self.poison("the copy of a block was released twice");
                    }
                }
                Undo::Grown { table, num_blocks, len } if self.live(table).is_ok() => {
                    self.shrink(table, num_blocks);
                    let row = &mut self.tables[table.row as usize];
                    row.len = len;
                    row.in_step = false;
                }
                _ => {}
            }
        }
        self.step_tables.clear();
        self.end_step();
    }

    fn end_step(&mut self) {
        self.journal.clear();
        self.step_copies.clear();
        self.pool.unpin_all();
        self.outstanding = false;
    }

    fn live(&self, table: TableId) -> Result<&BlockTable, CacheError> {
        match self.tables.get(table.row as usize) {
            Some(row) if row.live && row.generation == table.generation => Ok(row),
            _ => Err(CacheError::UnknownTable { table }),
        }
    }

    /// A live table that the outstanding step does not write through.
    fn idle(&self, table: TableId) -> Result<&BlockTable, CacheError> {
        self.check_poison()?;
        let row = self.live(table)?;
        if row.in_step { Err(CacheError::InStep { table, step: self.last_step }) } else { Ok(row) }
    }

    fn poison(&mut self, what: &'static str) {
        debug_assert!(false, "broken invariant: {what}");
        self.poisoned.get_or_insert(what);
    }

    /// Fails when an invariant was found broken: nothing that this cache says can be relied on.
    pub(crate) fn check_poison(&self) -> Result<(), CacheError> {
        match self.poisoned {
            Some(what) => Err(CacheError::Poisoned {
                what,
                num_blocks: self.pool.num_blocks(),
                free: self.pool.num_free(),
                held: self.pool.num_held(),
            }),
            None => Ok(()),
        }
    }

    /// A snapshot of the pool.
    ///
    /// # Complexity
    /// O(tables).
    pub fn stats(&self) -> CacheStats {
        let layout = self.config.layout();
        let block_size = u64::from(layout.block_size);
        let mut stats = CacheStats {
            num_blocks: self.pool.num_blocks(),
            free_blocks: self.pool.num_free(),
            held_blocks: self.pool.num_held(),
            shared_blocks: self.pool.num_shared(),
            in_transfer_blocks: self.pool.num_in_transfer(),
            held_blocks_peak: self.pool.peak_held(),
            shared_blocks_peak: self.pool.peak_shared(),
            block_copies: self.block_copies,
            ..CacheStats::default()
        };
        for table in self.tables.iter().filter(|table| table.live) {
            let used = layout.blocks_for(table.len);
            stats.num_tables += 1;
            stats.tokens += u64::from(table.len);
            stats.tail_waste_tokens += u64::from(used) * block_size - u64::from(table.len);
            stats.lookahead_tokens += u64::from(table.blocks.len() as u32 - used) * block_size;
        }
        stats
    }

    /// Panics with the invariant's number when pool and tables disagree. For tests: O(blocks + table entries).
    pub fn assert_consistent(&self) {
        let mut counts = vec![0; self.config.num_blocks() as usize];
        let layout = self.config.layout();
        for (row, table) in self.tables.iter().enumerate() {
            assert_eq!(
                !table.live,
                self.free_rows.contains(&(row as u32)),
                "table row {row} is free and live, or neither"
            );
            assert!(table.live || table.blocks.is_empty(), "I1: released table {row} holds blocks");
            let used = layout.blocks_for(table.len);
            assert!(
                !table.live || used as usize <= table.blocks.len(),
                "I4: table {row} is longer than its blocks"
            );
            assert!(
                table.blocks.len() as u32 <= table.max_blocks,
                "I10: table {row} outgrew its declared maximum"
            );
            assert!(
                table.dirty_from as usize <= table.blocks.len(),
                "table {row} has unsent entries beyond its end"
            );
            let mut own = table.blocks.clone();
            own.sort_unstable();
            assert!(own.windows(2).all(|pair| pair[0] != pair[1]), "I1: table {row} lists a block twice");
            for block in &table.blocks {
                counts[block.0 as usize] += 1;
            }
            for &block in &table.blocks[used as usize * usize::from(table.live)..] {
                assert_eq!(self.pool.ref_count(block), 1, "I3: a block reserved ahead is shared");
            }
        }
        self.pool.assert_consistent(&counts);
        assert!(self.outstanding || self.journal.is_empty(), "I12: a journal without a step");
        assert!(
            self.outstanding || self.pool.num_in_transfer() == 0,
            "I5: a block is in transfer without a step"
        );
        assert_eq!(self.poisoned, None, "the cache is poisoned");
    }
}
