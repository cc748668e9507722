//! What must hold between any two operations, checked from the inside.

use crate::cache::KvCache;
use crate::cache::prefix_cache::PrefixCache;
use crate::ids::BlockId;

impl KvCache {
    /// Checks pool and tables against each other. For tests: O(blocks + table entries).
    ///
    /// # Panics
    /// With the invariant's number when they disagree.
    pub fn assert_consistent(&self) {
        let mut counts = vec![0; self.config.num_blocks() as usize];
        let mut promised = counts.clone();
        let mut slots = vec![0; self.config.host_blocks() as usize];
        // Whether a block is behind a window one day, where each holder is promised its own.
        let mut alone = vec![false; counts.len()];
        for (row, table) in self.tables.iter().enumerate() {
            assert_eq!(
                !table.live,
                self.free_rows.contains(&(row as u32)),
                "table row {row} is free and live, or neither"
            );
            assert!(table.live || table.num_blocks() == 0, "I1: released table {row} holds blocks");
            assert!(
                !table.live || table.len <= table.max_tokens,
                "I10: table {row} outgrew its declared maximum"
            );
            for (lane, run) in table.runs.iter().enumerate() {
                for block in &run.blocks {
                    counts[block.0 as usize] += 1;
                    promised[block.0 as usize] += u32::from(table.promised);
                    alone[block.0 as usize] = self.lanes[lane].slides();
                }
                for &slot in &run.host {
                    slots[slot.0 as usize] += 1;
                }
                self.assert_run(row, lane);
            }
            assert!(!table.is_out() || !table.in_step, "table {row} is swapped out and written");
            let mut own: Vec<BlockId> =
                table.runs.iter().flat_map(|run| run.blocks.iter().copied()).collect();
            own.sort_unstable();
            assert!(own.windows(2).all(|pair| pair[0] != pair[1]), "I1: table {row} lists a block twice");
            self.assert_registered(row);
        }
        self.pool.assert_consistent(&counts, &promised, &alone);
        if let Some(host) = &self.host {
            host.assert_consistent(&slots);
        }
        if let Some(prefix) = &self.prefix {
            prefix.assert_consistent();
            for block in (0..self.config.num_blocks()).map(BlockId) {
                let known = self.nodes.has_node(block) && prefix.is_node(self.nodes.node_of(block));
                assert_eq!(
                    self.pool.is_cached(block),
                    known,
                    "I6: pool and prefix cache disagree about {block:?}"
                );
                let parent = if known { prefix.parent(self.nodes.node_of(block)) } else { None };
                if let Some(parent) = parent.filter(|_| self.nodes.is_essential(block)) {
                    let parent = BlockId(parent.0);
                    assert!(
                        self.pool.ref_count(parent) >= self.pool.ref_count(block),
                        "I6: {block:?} is held without its parent"
                    );
                    assert!(
                        self.pool.retention(parent) >= self.pool.retention(block),
                        "I6: {block:?} is kept better than its parent"
                    );
                }
            }
            self.assert_nodes(prefix);
        }
        assert_eq!(self.is_plain, self.nodes.is_simple(), "I6: only a plain cache has nodes of one block");
        assert!(self.outstanding || self.journal.is_empty(), "I12: a journal without a step");
        assert!(
            self.outstanding || self.pool.num_in_transfer() == 0,
            "I5: a block is in transfer without a step"
        );
        assert_eq!(self.poisoned, None, "the cache is poisoned");
    }

    /// A run has what its lane needs of the table's tokens, and no more.
    fn assert_run(&self, row: usize, lane: usize) {
        let (table, lane_of) = (&self.tables[row], &self.lanes[lane]);
        let run = &table.runs[lane];
        if !table.live {
            assert_eq!(run.first, run.end(), "I1: released table {row} holds blocks");
            return;
        }
        let used = lane_of.end_of(table.len);
        assert!(used <= run.end(), "I4: table {row} is longer than its blocks");
        assert!(used == run.end(), "I4: table {row} holds blocks beyond its length");
        // Until the next step is planned, a run may begin earlier.
        assert!(run.first <= lane_of.first_of(table.len), "I15: table {row} lacks what its next row sees");
        assert!(lane_of.start <= run.first, "I15: table {row} has a block that is another lane's");
        assert!(run.dirty_from <= run.pool_end(), "table {row} has unsent entries beyond its end");
        // In a lane that ends before the last token, nothing is written.
        let is_written = table.in_step && lane_of.covers(lane_of.entry_of(table.len.saturating_sub(1)));
        if let Some(&tail) = run.blocks.last().filter(|_| is_written) {
            assert_eq!(self.pool.ref_count(tail), 1, "I3: the step writes into a shared block");
        }
        let mut sent = run.host.iter().filter_map(|&slot| Some(self.host.as_ref()?.sent(slot)));
        let mut last = sent.next();
        let in_order = sent.all(|sent| last.replace(sent).is_some_and(|last| last >= sent));
        assert!(in_order, "table {row} has a block that was moved out later behind an earlier one");
        if !lane_of.slides() {
            let held: Vec<u32> = run.blocks.iter().map(|&block| self.pool.ref_count(block)).collect();
            assert!(
                held.is_sorted_by(|a, b| a >= b),
                "I2: a holder lacks what comes before a block: table {row}"
            );
        }
    }

    /// Nodes have blocks that know them, and those without are continued.
    fn assert_nodes(&self, prefix: &PrefixCache) {
        for node in prefix.all_nodes() {
            let mut num_blocks = 0;
            for (block, _) in self.nodes.blocks_of(node) {
                num_blocks += 1;
                assert_eq!(self.nodes.node_of(block), node, "I6: {block:?} is another node's");
            }
            if self.nodes.is_anchored() {
                let has_own = self.nodes.blocks_of(node).any(|(block, _)| block.0 == node.0);
                assert!(has_own, "I6: {node:?} is without its own block");
            } else {
                let ends = self.asides.iter().filter(|aside| aside.path.last() == Some(&node)).count() as u32;
                assert_eq!(self.nodes.tips(node), ends, "I6: tables that end at {node:?} are miscounted");
                let continued = ends > 0 || prefix.has_children(node);
                assert!(continued || num_blocks > 0, "I6: nothing needs {node:?}");
            }
        }
    }

    /// The first tokens of a table are nodes, each the parent of the next.
    fn assert_registered(&self, row: usize) {
        let table = &self.tables[row];
        let Some(prefix) = &self.prefix else { return };
        for place in 0..table.registered {
            let node = self.node_at(row, place);
            assert!(prefix.is_node(node), "I6: table {row} counts {node:?} as registered");
            let before = place.checked_sub(1).map(|before| self.node_at(row, before));
            assert_eq!(prefix.parent(node), before, "I6: {node:?} continues another node in table {row}");
        }
    }
}
