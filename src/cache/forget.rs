//! Losing the device: everything that lay on it is gone, and the host pool is left.
//!
//! A table that holds any block of the pool holds nothing afterwards: what it has in the host pool follows tokens that
//! are gone. A table that is entirely in the host pool keeps what had arrived there. One that needs no block for its
//! next row, because its windows begin there, goes on.

use crate::cache::KvCache;
use crate::ids::{BlockId, StepId, TableId};

impl KvCache {
    /// Forgets everything that lay on the device. Call it when the device or the arenas are lost, and when a committed
    /// step never ran there.
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
    /// `PagedAttention` takes no other after a rebuild, and needs none to take these.
    ///
    /// # Complexity
    /// O(blocks of the pool + table entries), however long the chains are that blocks are in.
    pub fn forget_device(&mut self) {
        self.rollback_step();
        if let Some(first) = self.host.as_mut().and_then(|host| host.abandon_transfers()) {
            self.cut_lost(first);
        }
        // What a failed return left means nothing, even if it is in the host pool by now.
        for id in std::mem::take(&mut self.broken_tables) {
            let table = &self.tables[id.row as usize];
            if table.live && table.generation == id.generation {
                self.empty(id);
            }
        }
        for row in 0..self.tables.len() {
            let table = &self.tables[row];
            if table.live && table.pool_blocks() > 0 {
                self.empty(self.id_of(row));
            }
        }
        if !fault!(LostBlocksFound) {
            self.forget_all_prefixes();
        }
        self.forgotten_devices += 1;
        self.last_committed = StepId::default();
    }

    /// How often [`forget_device`](Self::forget_device) was called. Every plan carries it.
    pub fn forgotten_devices(&self) -> u64 {
        self.forgotten_devices
    }

    fn empty(&mut self, table: TableId) {
        self.shrink(table, 0);
        let table = &mut self.tables[table.row as usize];
        (table.len, table.parked) = (0, false);
    }

    fn forget_all_prefixes(&mut self) {
        let Some(prefix) = &mut self.prefix else { return };
        prefix.note_all_evictions();
        for block in (0..self.config.num_blocks()).map(BlockId) {
            if self.pool.is_cached(block) {
                self.pool.set_uncached(block);
                self.evictions += 1;
            }
        }
        prefix.clear();
        self.nodes.clear();
        // Tables that are left have no block in the pool, but may still name nodes that windows have left behind.
        for table in &mut self.tables {
            table.registered = 0;
        }
        self.asides.iter_mut().for_each(|aside| aside.path.clear());
    }
}

#[cfg(test)]
mod tests {
    use crate::cache::{KvCache, Namespace};
    use crate::config::CacheConfig;
    use crate::ids::{TableId, TokenId};
    use crate::model::{KvType, ModelShape};

    const SHAPE: ModelShape = ModelShape::new(1, 1, 1, 8);

    /// One chain of `len` blocks of one token, and half as many again that branch off at its end.
    fn chain(len: u32, max_cached: Option<u32>) -> (KvCache, [TableId; 2]) {
        let config = CacheConfig::for_blocks(2 * len, &SHAPE, KvType::F16)
            .and_then(|config| config.with_block_size(1))
            .expect("a valid configuration");
        let mut cache = KvCache::new(config);
        cache.enable_prefix_cache(max_cached).expect("a small pool");
        let first = cache.create(2 * len).expect("a free table");
        grow(&mut cache, first, &(0..len).collect::<Vec<_>>(), 0);
        let second = cache.fork(first, len, 2 * len).expect("a free table");
        grow(&mut cache, second, &(0..len + len / 2).collect::<Vec<_>>(), len as usize);
        (cache, [first, second])
    }

    /// One step, after which the table holds `tokens`, of which it has the first `from`, and others can find them.
    fn grow(cache: &mut KvCache, table: TableId, tokens: &[TokenId], from: usize) {
        cache.begin_step();
        cache.grow_by(table, (tokens.len() - from) as u32).expect("free blocks");
        cache.finish_step();
        cache.register_prefix(table, &Namespace::default(), tokens).expect("tokens of the table");
    }

    fn release(cache: &mut KvCache, tables: [TableId; 2]) {
        for table in tables {
            cache.release(table).expect("a live table");
        }
    }

    /// Nodes that `forget` visits, for each that is gone then.
    fn visits_for_each(
        len: u32,
        max_cached: Option<u32>,
        forget: impl FnOnce(&mut KvCache, [TableId; 2]),
    ) -> f64 {
        let (mut cache, tables) = chain(len, max_cached);
        let visits = |cache: &KvCache| cache.prefix.as_ref().expect("it is on").visits.get();
        let before = visits(&cache);
        forget(&mut cache, tables);
        // Nothing is promised without a scheduler.
        let num_blocks = cache.config.num_blocks() as usize;
        cache.pool.assert_consistent(&counts(&cache), &vec![0; num_blocks], &vec![false; num_blocks]);
        assert_eq!(cache.find_prefix(&Namespace::default(), &(0..2 * len).collect::<Vec<_>>()), 0);
        (visits(&cache) - before) as f64 / f64::from(len + len / 2)
    }

    fn counts(cache: &KvCache) -> Vec<u32> {
        let mut counts = vec![0; cache.config.num_blocks() as usize];
        for block in cache.tables.iter().flat_map(|table| table.runs.iter()).flat_map(|run| &run.blocks) {
            counts[block.0 as usize] += 1;
        }
        counts
    }

    /// A walk that began at the top for every node would visit 7.5 of them at a length of 10, and 62,500 at 100,000.
    #[test]
    fn forgetting_comes_by_every_node_twice_at_most_however_long_the_chain() {
        for len in [10, 100_000] {
            let device = visits_for_each(len, None, |cache, _| cache.forget_device());
            let prefix = visits_for_each(len, None, |cache, [first, _]| {
                cache.forget_prefix(first, 0).expect("a live table");
            });
            let eviction = visits_for_each(len, None, |cache, tables| {
                release(cache, tables);
                let all = cache.create(2 * len).expect("a free table");
                cache.begin_step();
                cache.grow_by(all, 2 * len).expect("blocks that can be evicted");
            });
            let trim = visits_for_each(len, Some(0), release);
            assert_eq!(device, 0.0, "all at once");
            for (what, visits) in [("prefix", prefix), ("eviction", eviction), ("trim", trim)] {
                assert!((1.0..=2.0).contains(&visits), "{what}: {visits} visits a node, length {len}");
            }
        }
    }
}
