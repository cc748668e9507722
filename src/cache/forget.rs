//! Losing the device: everything that lay on it is gone, and the host pool is left.
//!
//! A table that holds blocks of the pool, be it only its first ones, holds nothing afterwards: what it has in the host
//! pool follows tokens that are gone. A table that is in the host pool altogether keeps what had arrived there.

use crate::cache::KvCache;
use crate::cache::prefix_cache::MissReason;
use crate::ids::{BlockId, TableId};

impl KvCache {
    /// Forgets everything that lay on the device: to be called when the device is lost, or with it the arenas.
    ///
    /// - An outstanding step is rolled back; its plan is stale.
    /// - A table that held any block of the pool is empty: its length is 0, and its tokens are to be pushed again. It
    ///   stays open, with the maximum that it was created with.
    /// - A table whose blocks are all in the host pool stays there, cut to what has arrived, and can be
    ///   [swapped in](crate::StepBuilder::swap_in). What has arrived is what was
    ///   [reported](Self::complete_transfers): pass on the device part's last reports first. Later ones change nothing.
    /// - The prefix cache is empty, pinned content included.
    ///
    /// Plans made from then on send the block tables in full, and do not read what the old device held:
    /// `PagedAttention` takes no other after a rebuild.
    ///
    /// # Complexity
    /// O(blocks of the pool + table entries).
    pub fn forget_device(&mut self) {
        self.rollback_step();
        if let Some(lost) = self.host.as_mut().map(|host| host.abandon_transfers()) {
            self.cut_at(&lost);
        }
        // What a failed return left means nothing, be it in the host pool by now.
        for id in std::mem::take(&mut self.broken_tables) {
            let table = &self.tables[id.row as usize];
            if table.live && table.generation == id.generation {
                self.empty(id);
            }
        }
        for row in 0..self.tables.len() {
            let table = &self.tables[row];
            if !table.live || table.blocks.is_empty() {
                continue;
            }
            let id = TableId { row: row as u32, generation: table.generation };
            self.empty(id);
        }
        if !fault!(LostBlocksFound) {
            self.forget_all_prefixes();
        }
        self.forgotten_devices += 1;
    }

    /// How often [`forget_device`](Self::forget_device) was called. Every plan carries it.
    pub fn forgotten_devices(&self) -> u64 {
        self.forgotten_devices
    }

    fn empty(&mut self, table: TableId) {
        self.shrink(table, 0);
        self.tables[table.row as usize].len = 0;
    }

    fn forget_all_prefixes(&mut self) {
        for block in (0..self.config.num_blocks()).map(BlockId) {
            if let Some(prefix) = self.prefix.as_mut().filter(|prefix| prefix.is_registered(block)) {
                prefix.note_eviction(block, MissReason::Evicted);
                self.evictions += 1;
            }
        }
        for block in (0..self.config.num_blocks()).map(BlockId) {
            if self.pool.is_cached(block) {
                self.forget_from(block);
            }
        }
    }
}
