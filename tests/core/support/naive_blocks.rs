//! How many blocks sequences have in all stacks of layers, counted from what the groups of a configuration say.

use crate::simulated_device::{Stack, stacks_of};
use paged_kv::{CacheConfig, Reach};
use std::ops::Range;

/// Tokens of the largest block: what the prefix cache finds in full, and first tokens are rounded up to.
pub(crate) fn node_tokens(config: &CacheConfig) -> u32 {
    stacks_of(config).iter().map(|stack| stack.block_size).max().unwrap()
}

/// A stack's reach, first tokens rounded up to what is kept of them: whole nodes.
fn reach_of(stack: &Stack, node_tokens: u32) -> Reach {
    match stack.reach {
        Reach::Window { tokens, first } => {
            Reach::Window { tokens, first: first.next_multiple_of(node_tokens) }
        }
        reach => reach,
    }
}

/// The logical blocks that a table has in each stack when it gave back what it could at `slid_at` tokens, and has had rows
/// up to `len` since: those of first tokens, and the rest.
pub(crate) fn kept_blocks(config: &CacheConfig, slid_at: u32, len: u32) -> Vec<[Range<u32>; 2]> {
    let node_tokens = node_tokens(config);
    let stacks = stacks_of(config);
    let of_stack = |stack: &Stack| {
        let end = len.div_ceil(stack.block_size);
        let start = stack.reach.kept(slid_at, stack.block_size)[1].start;
        let first = match reach_of(stack, node_tokens) {
            Reach::Window { first, .. } => first / stack.block_size,
            _ => 0,
        };
        [0..first.min(end), start.max(first).min(end)..end]
    };
    stacks.iter().map(of_stack).collect()
}

/// Blocks of a table that gave back what it could at `slid_at` tokens, and has had rows up to `len` since.
pub(crate) fn num_blocks(config: &CacheConfig, slid_at: u32, len: u32) -> u32 {
    kept_blocks(config, slid_at, len).iter().flatten().map(|range| range.len() as u32).sum()
}

/// The most blocks of a sequence on its way to `max_tokens`, with at most `rows` rows in a step.
pub(crate) fn most_blocks(config: &CacheConfig, max_tokens: u32, rows: u32) -> u32 {
    let node_tokens = node_tokens(config);
    let of_stack =
        |stack: &Stack| reach_of(stack, node_tokens).most_blocks(max_tokens, rows, stack.block_size);
    stacks_of(config).iter().map(of_stack).sum()
}

/// The most tokens of one sequence that the pool holds with at most `rows` rows in a step.
pub(crate) fn pool_tokens(config: &CacheConfig, rows: u32) -> u32 {
    let most = config.num_blocks() * node_tokens(config);
    (1..=most)
        .take_while(|&tokens| most_blocks(config, tokens, rows) <= config.num_blocks())
        .last()
        .unwrap_or(0)
}
