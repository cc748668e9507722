//! What leaves the prefix cache: because others need its blocks, because its time has passed, because it is to be forgotten.

use crate::cache::KvCache;
use crate::cache::prefix_cache::{MissReason, NodeId};
use crate::error::CacheError;
use crate::ids::{BlockId, TableId};

impl KvCache {
    /// Forgets all of a table's prefix from its `first`-th full block on (that of the stack with the largest blocks), and
    /// whatever continues it: no request finds that any more.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    ///
    /// # Complexity
    /// O(blocks forgotten + tables + entries of tables that are found no more).
    pub fn forget_prefix(&mut self, table: TableId, first: u32) -> Result<(), CacheError> {
        let registered = self.live(table)?.registered;
        if first < registered {
            self.forget_from(self.node_at(table.row as usize, first));
        }
        self.step_back_to_nodes();
        Ok(())
    }

    /// Whether a block stays in the prefix cache although others need blocks.
    pub(crate) fn is_retained(&self, block: BlockId) -> bool {
        self.pool.is_pinned_content(block)
    }

    /// Blocks of pinned content that no table holds.
    pub(crate) fn num_pinned(&self) -> u32 {
        self.pool.num_retained()
    }

    /// Changes whenever something that could be found is not found any more.
    pub(crate) fn num_evictions(&self) -> u64 {
        self.evictions + self.pruned
    }

    /// Grows whenever blocks become available because their time has passed.
    pub(crate) fn num_expirations(&self) -> u64 {
        self.expirations
    }

    /// Takes a block that no table holds out of the prefix cache; it is free then. Its node goes with it, and what continues
    /// that, unless it is a window's: then hits that need it do.
    pub(super) fn evict(&mut self, block: BlockId) {
        if self.nodes.is_essential(block) {
            let node = self.nodes.node_of(block);
            if let Some(prefix) = &mut self.prefix {
                prefix.note_eviction(node, MissReason::Evicted);
            }
            self.evictions += u64::from(self.forget_from(node));
            return;
        }
        let node = self.nodes.detach(block);
        self.pool.set_uncached(block);
        self.evictions += 1;
        self.prune(node);
    }

    /// Removes a node that has no block, no table and nothing that continues it, then those before it of which the same
    /// is true.
    pub(super) fn prune(&mut self, node: NodeId) {
        let mut at = Some(node).filter(|_| !self.nodes.is_anchored());
        while let (Some(node), Some(prefix)) = (at, &mut self.prefix) {
            if prefix.has_children(node) || !self.nodes.is_bare(node) {
                return;
            }
            at = prefix.parent(node);
            prefix.note_eviction(node, MissReason::Evicted);
            prefix.remove(node);
            self.nodes.give_back_number(node);
            self.pruned += 1;
        }
    }

    /// Removes a node and whatever continues it, the last first. Returns how many blocks that were. O(that many): the walk
    /// goes on from the parent of what it has removed.
    pub(super) fn forget_from(&mut self, node: NodeId) -> u32 {
        let Some(prefix) = &mut self.prefix else { return 0 };
        let before = prefix.parent(node);
        let mut removed = 0;
        let mut at = Some(node);
        while let Some(below) = at {
            let last = prefix.last_descendant(below);
            at = prefix.parent(last).filter(|_| last != node);
            prefix.remove(last);
            for slot in 0..self.nodes.num_slots() {
                let Some(block) = self.nodes.take(last, slot) else { continue };
                self.pool.set_uncached(block);
                removed += 1;
            }
            self.nodes.give_back_number(last);
        }
        if !self.nodes.is_anchored() {
            self.step_back_to_nodes();
            before.into_iter().for_each(|before| self.prune(before));
        }
        removed
    }

    /// The prefix cache forgets a block whose content changes, or never came.
    pub(super) fn forget_block(&mut self, block: BlockId) {
        if self.nodes.is_essential(block) {
            self.forget_from(self.nodes.node_of(block));
        } else {
            let node = self.nodes.detach(block);
            self.pool.set_uncached(block);
            self.prune(node);
        }
    }

    /// Keeps within the cap.
    pub(super) fn trim_cached(&mut self) {
        while self.pool.num_cached() > self.max_cached_blocks {
            let oldest = self.pool.oldest_evictable().or_else(|| self.pool.oldest_retained());
            match oldest {
                Some(oldest) if self.prefix.is_some() => self.evict(oldest),
                _ => return,
            }
        }
    }

    /// The last holder gave a block up: its content's time to live begins.
    pub(super) fn begin_time(&mut self, block: BlockId) {
        if !self.pool.is_idle(block) {
            return;
        }
        let node = self.nodes.node_of(block);
        if let Some(prefix) = self.prefix.as_mut().filter(|_| !self.nodes.is_anchored() || node.0 == block.0)
        {
            prefix.begin_time(node, self.last_step.0);
        }
    }

    /// Forgets what no table has held for its time to live, and what continues it. O(1) while nothing is due.
    pub(super) fn evict_expired(&mut self) {
        let now = self.last_step.0;
        while let Some(node) = self.prefix.as_mut().and_then(|prefix| prefix.pop_due(now)) {
            let Some(prefix) = self.prefix.as_mut().filter(|prefix| prefix.is_limited_node(node)) else {
                continue;
            };
            if self.nodes.is_anchored() {
                if !self.pool.is_idle(BlockId(node.0)) {
                    continue;
                }
            } else if prefix.any_below(node, |node| self.nodes.tips(node) > 0) {
                // A table goes on from it, perhaps without holding any of its blocks.
                prefix.begin_time(node, now);
                continue;
            }
            prefix.note_eviction(node, MissReason::Expired);
            self.expirations += u64::from(self.forget_from(node));
        }
    }

    /// Gives up pinned content until `needed` blocks are available, or none is left: first what is pinned for a limited
    /// time. Returns how often some was given up.
    pub(crate) fn give_up_pins(&mut self, needed: u32) -> u32 {
        let mut given_up = 0;
        while self.pool.num_available() < needed {
            let Some(oldest) = self.pool.oldest_retained() else { break };
            self.evict(oldest);
            given_up += 1;
        }
        given_up
    }
}
