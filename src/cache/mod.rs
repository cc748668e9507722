//! [`KvCache`]: who holds which block. The only door to pool and tables, which it keeps in step.
//!
//! It owns reference counts, block tables and their lengths, copy-on-write, and the prefix cache, the swap ledger,
//! and the undo of a step that was planned but not committed. It knows nothing of requests and policy. Of tokens it
//! knows only that equal ones in a row mean equal content, and of time only the number of steps.
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
//! outstanding step returns if that step is rolled back, which the device may have run. So until the commit no table
//! writes over the tokens that it had there.

mod block_pool;
mod block_state;
mod block_table;
mod consistency;
mod evicting;
mod expiry;
mod forget;
mod holdings;
mod host_pool;
mod keep;
mod lane;
mod node_blocks;
mod prefix_cache;
mod sharing;
mod stats;
mod step;
mod swap;

use crate::config::CacheConfig;
use crate::error::CacheError;
use crate::ids::{BlockId, StepId, TableId};
use block_pool::BlockPool;
pub(crate) use block_pool::PromisedBlocks;
pub use block_state::BlockState;
use block_table::{Aside, BlockTable};
use host_pool::HostPool;
pub(crate) use keep::RetainRange;
use lane::Lane;
use node_blocks::NodeBlocks;
use prefix_cache::PrefixCache;
pub(crate) use prefix_cache::PrefixMatch;
pub use prefix_cache::{MissReason, Namespace, Retention};
pub use stats::CacheStats;
use std::sync::atomic::{AtomicU64, Ordering};
pub(crate) use step::Growth;
use step::Undo;

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

/// Reference-counted blocks behind per-sequence block tables.
///
/// Public for applications with their own scheduler, which grow tables through a [`StepBuilder`](crate::StepBuilder);
/// the [`Scheduler`](crate::Scheduler) owns one and is all that others need.
///
/// ```
/// use paged_kv::{CacheConfig, KvCache, KvType, ModelShape, StepBuilder};
///
/// let shape = ModelShape::new(2, 4, 2, 32);
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
    /// The configuration's, which each plan carries.
    fingerprint: u64,
    lanes: Vec<Lane>,
    /// Whether there is one lane, which keeps everything: then a node of the prefix cache is one block.
    is_plain: bool,
    /// Whether some lane gives blocks back while a sequence lives.
    slides: bool,
    /// Tokens of a node of the prefix cache.
    node_tokens: u32,
    pool: BlockPool,
    prefix: Option<PrefixCache>,
    nodes: NodeBlocks,
    max_cached_blocks: u32,
    rows_at_most: u32,
    host: Option<HostPool>,
    tables: Vec<BlockTable>,
    /// One for each table, or none.
    asides: Vec<Aside>,
    free_rows: Vec<u32>,
    journal: Vec<Undo>,
    step_tables: Vec<TableId>,
    step_outs: Vec<BlockSwap>,
    step_ins: Vec<BlockSwap>,
    step_copies: Vec<BlockCopy>,
    last_step: StepId,
    /// The last committed step that wrote to tables; 0 since a device was forgotten.
    last_committed: StepId,
    outstanding: bool,
    block_copies: u64,
    swapped_out: u64,
    swapped_in: u64,
    evictions: u64,
    /// Nodes that went without a block.
    pruned: u64,
    expirations: u64,
    /// Tables whose return failed after their step was committed.
    broken_tables: Vec<TableId>,
    forgotten_devices: u64,
    poisoned: Option<&'static str>,
    /// Tables, and their slots of the host pool, that were looked at to move blocks: what tests of costs count.
    #[cfg(test)]
    looks: std::cell::Cell<u64>,
}

impl KvCache {
    /// An empty cache: every block free.
    pub fn new(config: CacheConfig) -> Self {
        static INSTANCES: AtomicU64 = AtomicU64::new(1);
        let max_sequences = config.max_sequences();
        let stacks = config.stacks();
        let node_tokens = stacks.iter().map(|stack| stack.block_size).max().unwrap_or(1);
        let lanes = Lane::of(&stacks, node_tokens);
        let is_plain = lanes.len() == 1 && lanes[0].is_whole();
        let num_asides = if is_plain { 0 } else { max_sequences };
        Self {
            nodes: NodeBlocks::new(&lanes, node_tokens),
            is_plain,
            slides: lanes.iter().any(Lane::slides),
            lanes,
            node_tokens,
            instance: INSTANCES.fetch_add(1, Ordering::Relaxed),
            fingerprint: config.fingerprint(),
            pool: BlockPool::new(config.num_blocks()),
            tables: (0..max_sequences).map(|_| BlockTable::default()).collect(),
            asides: (0..num_asides).map(|_| Aside::default()).collect(),
            free_rows: (0..max_sequences).rev().collect(),
            prefix: None,
            max_cached_blocks: 0,
            rows_at_most: u32::MAX,
            host: (config.host_blocks() > 0).then(|| HostPool::new(config.host_blocks())),
            config,
            journal: Vec::new(),
            step_tables: Vec::new(),
            step_outs: Vec::new(),
            step_ins: Vec::new(),
            step_copies: Vec::new(),
            last_step: StepId(0),
            last_committed: StepId(0),
            outstanding: false,
            block_copies: 0,
            swapped_out: 0,
            swapped_in: 0,
            evictions: 0,
            pruned: 0,
            expirations: 0,
            broken_tables: Vec::new(),
            forgotten_devices: 0,
            poisoned: None,
            #[cfg(test)]
            looks: std::cell::Cell::default(),
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

    /// Opens a table for a sequence of at most `max_tokens` tokens: a push beyond them is refused. It holds no block yet.
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
        self.tables[row as usize].open(&self.lanes, max_tokens);
        if let Some(aside) = self.asides.get_mut(row as usize) {
            aside.likely_hits = [0; 2];
        }
        Ok(self.id_of(row as usize))
    }

    /// A second table that shares the first `at` tokens of `parent` and may grow to `max_tokens`.
    ///
    /// Nothing is copied: blocks are shared, and the first table to write into a shared last block copies that one.
    ///
    /// # Errors
    /// [`CacheError::BeyondLength`] when `at` exceeds the parent's length, [`CacheError::BehindWindow`] when a window has
    /// left behind what the next row would see, [`CacheError::InStep`] when the outstanding
    /// step writes through the parent, as [`create`](Self::create), and for the parent as [`len`](Self::len).
    ///
    /// # Complexity
    /// O(blocks shared).
    pub fn fork(&mut self, parent: TableId, at: u32, max_tokens: u32) -> Result<TableId, CacheError> {
        let len = self.idle(parent)?.len;
        if at > len {
            return Err(CacheError::BeyondLength { tokens: at, len });
        }
        if !self.reaches(parent, at) {
            return Err(self.behind_window(parent, at));
        }
        let child = self.create(max_tokens.max(at))?;
        for lane in 0..self.lanes.len() {
            self.share_run(parent.row as usize, child.row as usize, lane, at);
        }
        let registered = self.tables[parent.row as usize].registered.min(self.most_nodes(at));
        if self.nodes.is_anchored() {
            self.tables[child.row as usize].registered = registered;
        } else {
            (0..registered).for_each(|place| {
                self.step_to(child.row as usize, self.node_at(parent.row as usize, place));
            });
        }
        let len = if fault!(ForkKeepsLength) { self.tables[parent.row as usize].len } else { at };
        self.tables[child.row as usize].len = len;
        Ok(child)
    }

    /// A child's run in a lane is that of its parent, as far as `at` tokens reach.
    fn share_run(&mut self, parent: usize, child: usize, lane: usize, at: u32) {
        let end = self.lanes[lane].end_of(at);
        // Taken out, so that the blocks are copied in one piece.
        let mut run = std::mem::take(&mut self.tables[child].runs[lane]);
        let source = &self.tables[parent].runs[lane];
        let in_pool = (end.saturating_sub(source.first) as usize).min(source.blocks.len());
        // Where nothing of the parent's is needed, it may begin later than the child goes on.
        run.first = source.first.min(self.lanes[lane].first_of(at));
        run.blocks.extend_from_slice(&source.blocks[..in_pool]);
        if !fault!(ForkUncounted) {
            self.pool.retain_held(&run.blocks);
        }
        for &slot in source.host.iter().take(end.saturating_sub(source.pool_end()) as usize) {
            run.host.push_back(slot);
            if let Some(host) = &mut self.host {
                host.retain(slot);
            }
        }
        run.borrowed = source.borrowed.filter(|&entry| entry < run.pool_end());
        run.dirty_from = run.first;
        self.tables[child].runs[lane] = run;
    }

    /// Stacks of layers, each with blocks of its own.
    pub(crate) fn num_stacks(&self) -> u32 {
        self.lanes.last().map_or(0, |lane| lane.stack + 1)
    }

    /// Whether a table has everything that rows after its first `len` tokens see: no window has left it behind.
    pub(crate) fn reaches(&self, table: TableId, len: u32) -> bool {
        if fault!(BehindWindowShared) {
            return true;
        }
        let runs = &self.tables[table.row as usize].runs;
        self.lanes.iter().zip(runs.iter()).all(|(lane, run)| {
            let kept = lane.kept(len);
            run.first <= kept.start || kept.is_empty()
        })
    }

    #[cold]
    fn behind_window(&self, table: TableId, tokens: u32) -> CacheError {
        // Where a chunk begins, nothing before it is needed, so the lengths that can be had are no single range.
        let len = self.tables[table.row as usize].len;
        let shortest = (tokens..len).find(|&len| self.reaches(table, len)).unwrap_or(len);
        CacheError::BehindWindow { table, tokens, shortest }
    }

    /// Shortens a table to `len` tokens and gives back the blocks behind them, the last first.
    ///
    /// # Errors
    /// [`CacheError::BeyondLength`] when it is shorter already, [`CacheError::BehindWindow`] when a window has left behind
    /// what the next row would see, [`CacheError::InStep`] while a step writes through it, and
    /// as [`len`](Self::len).
    pub fn truncate(&mut self, table: TableId, len: u32) -> Result<(), CacheError> {
        let current = self.idle(table)?.len;
        if len > current {
            return Err(CacheError::BeyondLength { tokens: len, len: current });
        }
        if !self.reaches(table, len) {
            return Err(self.behind_window(table, len));
        }
        self.tables[table.row as usize].len = len;
        self.shrink(table, len);
        Ok(())
    }

    /// Gives back all blocks of a table, the last first, and the table itself. The id is stale from then on.
    ///
    /// # Errors
    /// [`CacheError::UnknownTable`] when it was released before, [`CacheError::ForeignTable`] for another cache's,
    /// [`CacheError::InStep`] while a step writes through it.
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
        let max_tokens = max_tokens.min(self.config.max_sequence_tokens());
        let table = &mut self.tables[table.row as usize];
        table.max_tokens = max_tokens.max(table.len);
        for (run, lane) in table.runs.iter_mut().zip(&self.lanes) {
            let most = lane.most_blocks(table.max_tokens, 1) as usize;
            run.blocks.reserve(most.saturating_sub(run.blocks.len()));
        }
        Ok(())
    }

    /// Lengths at which others are likely to begin: blocks that a hit at the end of a sequence's input needs are kept.
    pub(crate) fn expect_hits_at(&mut self, table: TableId, len: u32) {
        if let Some(aside) = self.asides.get_mut(table.row as usize) {
            aside.likely_hits[1] = len;
        }
    }

    /// Counts a table's blocks as promised from now on, or not any more.
    ///
    /// # Complexity
    /// O(blocks of the table) where that changes.
    pub(crate) fn set_promised(&mut self, table: TableId, promised: bool) {
        let row = &mut self.tables[table.row as usize];
        if !row.live || std::mem::replace(&mut row.promised, promised) == promised {
            return;
        }
        for (run, lane) in row.runs.iter().zip(&self.lanes) {
            for &block in &run.blocks {
                match promised {
                    true => self.pool.promise(block, lane.slides()),
                    false => self.pool.unpromise(block, lane.slides()),
                }
            }
        }
    }

    /// What promised tables hold.
    pub(crate) fn promised_blocks(&self) -> PromisedBlocks {
        self.pool.promises()
    }

    /// Promised tables that hold `block`.
    pub(crate) fn promised_holders(&self, block: BlockId) -> u32 {
        self.pool.promised_holders(block)
    }

    /// Puts a block at the end of a table's run, which the pool counts as one of its holders already.
    fn push_block(&mut self, row: usize, lane: usize, block: BlockId) {
        self.tables[row].runs[lane].blocks.push(block);
        if self.tables[row].promised {
            self.pool.promise(block, self.lanes[lane].slides());
        }
    }

    /// Takes the last block of a table's run off it; the block is still counted as held.
    fn pop_block(&mut self, row: usize, lane: usize) -> Option<BlockId> {
        let block = self.tables[row].runs[lane].blocks.pop()?;
        if self.tables[row].promised {
            self.pool.unpromise(block, self.lanes[lane].slides());
        }
        Some(block)
    }

    /// Puts another block in the place of one of a table's; both are still counted as held.
    fn replace_block(&mut self, row: usize, lane: usize, entry: u32, block: BlockId) -> BlockId {
        let run = &mut self.tables[row].runs[lane];
        let old = std::mem::replace(&mut run.blocks[(entry - run.first) as usize], block);
        if self.tables[row].promised {
            self.pool.promise(block, self.lanes[lane].slides());
            self.pool.unpromise(old, self.lanes[lane].slides());
        }
        old
    }

    /// Entries of a table's run from `entry` on are gone, or hold other blocks than before.
    fn mark_replaced(&mut self, row: usize, lane: usize, entry: u32) {
        self.tables[row].runs[lane].mark_replaced(entry);
        self.step_back(row, self.nodes.place_of(&self.lanes[lane], entry));
    }

    /// Releases the blocks that `len` tokens do not need, those of the last tokens first.
    fn shrink(&mut self, table: TableId, len: u32) {
        let row = table.row as usize;
        while let Some(lane) = self.longest_run(row, len) {
            if let Some(slot) = self.tables[row].runs[lane].host.pop_back() {
                self.release_slot(slot);
            } else if let Some(block) = self.pop_block(row, lane) {
                self.release_block(block);
                if fault!(ReleasedTwice) {
                    self.release_block(block);
                }
            }
        }
        for (run, lane) in self.tables[row].runs.iter_mut().zip(&self.lanes) {
            run.mark_replaced(lane.end_of(len));
            if run.end() == run.first {
                run.first = lane.first_of(len);
                run.dirty_from = run.dirty_from.max(run.first);
            }
        }
        self.step_back(row, self.most_nodes(len));
        self.trim_cached();
    }

    /// The run of a table whose last block has the latest tokens, of those that reach beyond `len` tokens.
    fn longest_run(&self, row: usize, len: u32) -> Option<usize> {
        let runs = self.tables[row].runs.iter().zip(&self.lanes).enumerate();
        let beyond = runs.filter(|(_, (run, lane))| run.end() > run.first.max(lane.end_of(len)));
        beyond.max_by_key(|(_, (run, lane))| lane.tokens_before(run.end() - 1)).map(|(lane, _)| lane)
    }

    /// A table lets go of a block. The only way to release one.
    fn release_block(&mut self, block: BlockId) {
        if !self.pool.release(block) {
            self.poison("a block was released twice");
        }
        if self.prefix.is_some() {
            self.begin_time(block);
        }
    }

    /// Takes a block for a table: a free one, or the one whose content is cached and was not used for longest.
    fn take_block(&mut self) -> Option<BlockId> {
        if self.pool.num_free() == 0 {
            let oldest = self.pool.oldest_evictable()?;
            self.evict(oldest);
        }
        self.pool.allocate()
    }

    /// Tokens in a table, those of the outstanding step included.
    ///
    /// # Errors
    /// [`CacheError::UnknownTable`] when it was released, [`CacheError::ForeignTable`] for another cache's.
    pub fn len(&self, table: TableId) -> Result<u32, CacheError> {
        Ok(self.live(table)?.len)
    }

    /// The table's blocks, in order, as far as they are in the pool: [those that are swapped out](Self::host_blocks_of)
    /// follow them. Of a table with several stacks of layers, or with first tokens before a window, only the first
    /// run's.
    ///
    /// # Errors
    /// [`CacheError::UnknownTable`] when it was released, [`CacheError::ForeignTable`] for another cache's.
    pub fn block_ids(&self, table: TableId) -> Result<&[BlockId], CacheError> {
        Ok(&self.live(table)?.runs[0].blocks)
    }

    /// How many tables hold `block`: 0 for a free one, and for one that this cache does not have.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        if block.0 < self.pool.num_blocks() { self.pool.ref_count(block) } else { 0 }
    }

    /// Blocks that can be allocated now: free ones, and cached ones that may be evicted.
    pub fn free_blocks(&self) -> u32 {
        self.pool.num_available()
    }

    /// Tables that can be opened now.
    pub fn free_tables(&self) -> u32 {
        self.free_rows.len() as u32
    }

    /// The id of the table that has a row now.
    fn id_of(&self, row: usize) -> TableId {
        TableId { cache: self.instance, row: row as u32, generation: self.tables[row].generation }
    }

    #[inline]
    fn live(&self, table: TableId) -> Result<&BlockTable, CacheError> {
        match self.tables.get(table.row as usize) {
            Some(row) if row.live && row.generation == table.generation && table.cache == self.instance => {
                Ok(row)
            }
            _ => Err(self.refusal(table)),
        }
    }

    #[cold]
    fn refusal(&self, table: TableId) -> CacheError {
        match table.cache == self.instance {
            true => CacheError::UnknownTable { table },
            false => CacheError::ForeignTable { table, cache: self.instance },
        }
    }

    /// A live table that the outstanding step does not write through.
    #[inline]
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
    #[inline]
    pub(crate) fn check_poison(&self) -> Result<(), CacheError> {
        match self.poisoned {
            Some(what) => Err(CacheError::Poisoned {
                what,
                num_blocks: self.pool.num_blocks(),
                free: self.pool.num_available(),
                held: self.pool.num_held(),
            }),
            None => Ok(()),
        }
    }

    /// Slots that last blocks leave unused, summed over tables.
    ///
    /// # Complexity
    /// O(tables).
    pub(crate) fn tail_waste_tokens(&self) -> u64 {
        let mut waste = 0;
        for table in self.tables.iter().filter(|table| table.live) {
            for (lane, run) in self.lanes.iter().zip(table.runs.iter()) {
                waste += lane.slots_before(run.pool_end()).saturating_sub(table.len.into());
            }
        }
        waste
    }

    /// A snapshot of the pool.
    ///
    /// # Complexity
    /// O(tables).
    pub fn stats(&self) -> CacheStats {
        let mut stats = CacheStats {
            num_blocks: self.pool.num_blocks(),
            free_blocks: self.pool.num_free(),
            cached_blocks: self.pool.num_cached(),
            pinned_blocks: self.pool.num_retained(),
            held_blocks: self.pool.num_held(),
            shared_blocks: self.pool.num_shared(),
            in_transfer_blocks: self.pool.num_in_transfer(),
            held_blocks_peak: self.pool.peak_held(),
            shared_blocks_peak: self.pool.peak_shared(),
            block_copies: self.block_copies,
            blocks_swapped_out: self.swapped_out,
            blocks_swapped_in: self.swapped_in,
            evictions: self.evictions,
            expirations: self.num_expirations(),
            ..CacheStats::default()
        };
        if let Some(host) = &self.host {
            stats.host_blocks = host.num_slots();
            stats.host_free_blocks = host.num_free();
            stats.host_held_blocks = host.num_held();
            stats.host_in_transfer_blocks = host.num_in_transfer();
        }
        stats.tail_waste_tokens = self.tail_waste_tokens();
        for table in self.tables.iter().filter(|table| table.live) {
            let mut in_pool = table.len;
            for (run, lane) in table.runs.iter().zip(&self.lanes).filter(|(run, _)| !run.host.is_empty()) {
                in_pool = in_pool.min(lane.tokens_before(run.pool_end()));
            }
            stats.num_tables += 1;
            stats.tokens += u64::from(in_pool);
            stats.host_tokens += u64::from(table.len - in_pool);
        }
        stats
    }
}
