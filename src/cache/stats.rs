//! What the pool is doing, as numbers that sum.

use std::fmt;

/// A snapshot of the pools. `free_blocks + cached_blocks + held_blocks + in_transfer_blocks == num_blocks`, always, and
/// `host_free_blocks + host_held_blocks + host_in_transfer_blocks == host_blocks`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Blocks in the pool.
    pub num_blocks: u32,
    /// Blocks whose content cannot be asked for.
    pub free_blocks: u32,
    /// Blocks in no table whose content is in the prefix cache: they are taken when no free ones are left.
    pub cached_blocks: u32,
    /// Those of `cached_blocks` that stay although others need blocks ([`Retention::Pinned`](crate::Retention::Pinned)).
    pub pinned_blocks: u32,
    /// Blocks in at least one table.
    pub held_blocks: u32,
    /// Blocks in more than one table; part of `held_blocks`.
    pub shared_blocks: u32,
    /// Blocks in no table that the outstanding step still reads for a copy, or fills from the host pool.
    pub in_transfer_blocks: u32,
    /// Most blocks held at a time.
    pub held_blocks_peak: u32,
    /// Most blocks shared at a time.
    pub shared_blocks_peak: u32,
    /// Block tables in use.
    pub num_tables: u32,
    /// Blocks that every promise together may take, held ones included (guaranteed admission; 0 without a scheduler).
    pub promised_blocks: u32,
    /// Blocks whose content the prefix cache gave up so far, because others needed them or its cap was reached.
    pub evictions: u64,
    /// Blocks whose content went so far because its time to live had passed, or that of what it continues.
    pub expirations: u64,
    /// Blocks of the host pool.
    pub host_blocks: u32,
    /// Blocks of the host pool that are free.
    pub host_free_blocks: u32,
    /// Blocks of the host pool whose content has arrived and is waited for.
    pub host_held_blocks: u32,
    /// Blocks of the host pool whose content is on its way, out or in.
    pub host_in_transfer_blocks: u32,
    /// Blocks moved to the host pool so far.
    pub blocks_swapped_out: u64,
    /// Blocks brought back so far.
    pub blocks_swapped_in: u64,
    /// Tokens in the host pool; shared ones count once per table.
    pub host_tokens: u64,
    /// Tokens in all tables, as far as they are in the pool; shared ones count once per table.
    pub tokens: u64,
    /// Slots that last blocks leave unused, summed over tables.
    pub tail_waste_tokens: u64,
    /// Blocks copied on write so far, rolled-back steps not counted.
    pub block_copies: u64,
}

impl fmt::Display for CacheStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} blocks: {} free, {} cached, {} held ({} shared), {} in transfer; {} tokens in {} tables, \
             {} slots unused in last blocks; {} blocks copied",
            self.num_blocks,
            self.free_blocks,
            self.cached_blocks,
            self.held_blocks,
            self.shared_blocks,
            self.in_transfer_blocks,
            self.tokens,
            self.num_tables,
            self.tail_waste_tokens,
            self.block_copies,
        )?;
        if self.host_blocks > 0 {
            let held = self.host_blocks - self.host_free_blocks;
            write!(f, "; {held} of {} host blocks in use", self.host_blocks)?;
        }
        Ok(())
    }
}
