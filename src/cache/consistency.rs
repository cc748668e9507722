//! What must hold between any two operations, checked from the inside.

use crate::cache::KvCache;
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
        let layout = self.config.layout();
        for (row, table) in self.tables.iter().enumerate() {
            assert_eq!(
                !table.live,
                self.free_rows.contains(&(row as u32)),
                "table row {row} is free and live, or neither"
            );
            assert!(table.live || table.num_blocks() == 0, "I1: released table {row} holds blocks");
            let used = layout.blocks_for(table.len);
            assert!(!table.live || used <= table.num_blocks(), "I4: table {row} is longer than its blocks");
            let fits =
                table.num_blocks() <= table.max_blocks && (!table.live || table.len <= table.max_tokens);
            assert!(fits, "I10: table {row} outgrew its declared maximum");
            assert!(
                table.dirty_from as usize <= table.blocks.len(),
                "table {row} has unsent entries beyond its end"
            );
            let mut own = table.blocks.clone();
            own.sort_unstable();
            assert!(own.windows(2).all(|pair| pair[0] != pair[1]), "I1: table {row} lists a block twice");
            for block in &table.blocks {
                counts[block.0 as usize] += 1;
                promised[block.0 as usize] += u32::from(table.promised);
            }
            assert!(
                !table.live || used == table.num_blocks(),
                "I4: table {row} holds blocks beyond its length"
            );
            if let Some(&tail) = table.blocks.last().filter(|_| table.in_step) {
                assert_eq!(self.pool.ref_count(tail), 1, "I3: the step writes into a shared block");
            }
            assert!(!table.is_out() || !table.in_step, "table {row} is swapped out and written");
            let mut sent = table.host.iter().filter_map(|&slot| Some(self.host.as_ref()?.sent(slot)));
            let mut last = sent.next();
            let in_order = sent.all(|sent| last.replace(sent).is_some_and(|last| last >= sent));
            assert!(in_order, "table {row} has a block that was moved out later behind an earlier one");
            for &slot in &table.host {
                slots[slot.0 as usize] += 1;
            }
            let held: Vec<u32> = table.blocks.iter().map(|&block| self.pool.ref_count(block)).collect();
            assert!(
                held.is_sorted_by(|a, b| a >= b),
                "whoever holds a block holds those before it: table {row}"
            );
            self.assert_registered(row);
        }
        self.pool.assert_consistent(&counts, &promised);
        if let Some(host) = &self.host {
            host.assert_consistent(&slots);
        }
        if let Some(prefix) = &self.prefix {
            prefix.assert_consistent();
            for block in (0..self.config.num_blocks()).map(BlockId) {
                assert_eq!(
                    self.pool.is_cached(block),
                    prefix.is_registered(block),
                    "I6: pool and prefix cache disagree about {block:?}"
                );
                if let Some(parent) = prefix.parent(block) {
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
        }
        assert!(self.outstanding || self.journal.is_empty(), "I12: a journal without a step");
        assert!(
            self.outstanding || self.pool.num_in_transfer() == 0,
            "I5: a block is in transfer without a step"
        );
        assert_eq!(self.poisoned, None, "the cache is poisoned");
    }

    /// The first entries of a table are nodes, each the parent of the next.
    fn assert_registered(&self, row: usize) {
        let table = &self.tables[row];
        let Some(prefix) = &self.prefix else { return };
        for entry in 0..table.registered as usize {
            let block = table.blocks[entry];
            assert!(prefix.is_registered(block), "I6: table {row} counts {block:?} as registered");
            let before = entry.checked_sub(1).map(|before| table.blocks[before]);
            assert_eq!(prefix.parent(block), before, "I6: {block:?} continues another block in table {row}");
        }
    }
}
