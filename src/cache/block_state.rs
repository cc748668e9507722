//! What each block is, seen from outside: for programs that draw or log a pool.

use crate::cache::{KvCache, Retention};
use crate::ids::BlockId;

/// What a block is (I1): exactly one of these.
///
/// Counted over the pool, they are the numbers of [`CacheStats`](crate::CacheStats) of the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockState {
    /// In no table, and its content cannot be asked for.
    Free,
    /// In no table, its content known to the prefix cache.
    Cached {
        /// How long it is kept when others need blocks.
        retention: Retention,
    },
    /// In at least one table.
    Held {
        /// Tables that it is in; from 2 on it is shared.
        tables: u32,
    },
    /// In no table, but the outstanding step still reads it for a copy, or fills it from the host pool. A block that moves
    /// to the host pool is free at once instead: its step reads it before anything is written.
    InTransfer,
}

impl KvCache {
    /// What `block` is; `None` for a block that this cache does not have: one of a larger cache.
    pub fn block_state(&self, block: BlockId) -> Option<BlockState> {
        (block.0 < self.pool.num_blocks()).then(|| self.state_of(block))
    }

    fn state_of(&self, block: BlockId) -> BlockState {
        match self.pool.ref_count(block) {
            0 if self.pool.is_pinned(block) => BlockState::InTransfer,
            0 if self.pool.is_cached(block) => BlockState::Cached { retention: self.pool.retention(block) },
            0 => BlockState::Free,
            tables => BlockState::Held { tables },
        }
    }

    /// Every block of the pool with what it is, by index. Allocates nothing.
    pub fn block_states(&self) -> impl ExactSizeIterator<Item = (BlockId, BlockState)> + '_ {
        (0..self.pool.num_blocks()).map(|index| (BlockId(index), self.state_of(BlockId(index))))
    }
}
