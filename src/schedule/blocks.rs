//! A sequence and its blocks: the one file of this folder that reckons with what a table holds and will hold.
//!
//! Pure questions to a cache about one sequence. Nothing here knows of others, of promises or of policy.

use crate::cache::KvCache;
use crate::ids::{BlockId, TableId};
use crate::schedule::sequence::Sequence;

// What a table holds: none, if there is no table.

/// The blocks of a sequence in the pool, in order.
pub(super) fn of(cache: &KvCache, table: Option<TableId>) -> &[BlockId] {
    table.and_then(|table| cache.block_ids(table).ok()).unwrap_or_default()
}

/// How many blocks of the pool a sequence has.
pub(super) fn held(cache: &KvCache, table: Option<TableId>) -> u32 {
    of(cache, table).len() as u32
}

/// Those that its first `end` tokens lie in.
pub(super) fn held_within(cache: &KvCache, table: Option<TableId>, end: u32) -> u32 {
    let held = held(cache, table);
    let len = table.and_then(|table| cache.len(table).ok()).unwrap_or(0);
    if len <= end { held } else { cache.config().layout().blocks_for(end).min(held) }
}

/// Blocks of a sequence in the host pool.
pub(super) fn returning(cache: &KvCache, table: Option<TableId>) -> u32 {
    table.map_or(0, |table| cache.host_blocks_of(table).unwrap_or(0))
}

/// The partly filled last block of a sequence, when others hold it too: it is copied before the next token is written.
pub(super) fn shared_tail(cache: &KvCache, table: Option<TableId>) -> Option<BlockId> {
    cache.shared_tail_block(table?)
}

/// Whether a sequence's next token goes into a block that holds others already, and that is in other tables or may come to
/// be in them.
pub(super) fn has_open_tail(cache: &KvCache, table: Option<TableId>) -> bool {
    table.is_some_and(|table| cache.has_open_tail(table))
}

/// Blocks that `len` tokens take beyond those that a sequence has, and `found` more.
pub(super) fn beyond(cache: &KvCache, table: Option<TableId>, len: u32, found: u32) -> u32 {
    let held = table.and_then(|table| cache.block_ids(table).ok()).map_or(0, <[_]>::len) as u32;
    cache.config().layout().blocks_for(len).saturating_sub(held + found)
}

/// Free blocks that `rows` more rows take.
pub(super) fn for_rows(cache: &KvCache, table: Option<TableId>, rows: u32) -> u32 {
    table.and_then(|table| cache.blocks_needed(table, rows).ok()).unwrap_or(u32::MAX)
}

// What a sequence will hold.

/// The block that a sequence's next token goes into, if that is partly filled when at most `end` tokens are left.
pub(super) fn tail_within(cache: &KvCache, sequence: &Sequence, end: u32) -> Option<BlockId> {
    let table = sequence.table().filter(|_| sequence.fork().is_none())?;
    let len = cache.len(table).ok()?.min(end);
    let block_size = cache.config().block_size();
    let tail = of(cache, Some(table)).get((len / block_size) as usize).copied();
    tail.filter(|_| !len.is_multiple_of(block_size))
}

/// The full blocks of its parent that a branch shares when the outstanding step ends, of `end` tokens at most.
pub(super) fn to_be_shared<'a>(cache: &'a KvCache, sequence: &Sequence, end: u32) -> &'a [BlockId] {
    let Some(fork) = sequence.fork() else { return &[] };
    let parents = cache.block_ids(fork.parent).unwrap_or_default();
    let full = (fork.at.min(end) / cache.config().block_size()) as usize;
    &parents[..full.min(parents.len())]
}

/// The most rows, up to `rows`, that `free` more blocks hold.
pub(super) fn rows_within(cache: &KvCache, sequence: &Sequence, rows: u32, free: u32) -> u32 {
    let table = sequence.table();
    if table.is_none() {
        return 0;
    }
    let copy = u32::from(shared_tail(cache, table).is_some());
    let Some(free) = free.checked_sub(copy) else { return 0 };
    let room = (held(cache, table) + free) * cache.config().block_size();
    rows.min(room.saturating_sub(sequence.computed()))
}

/// Blocks that a sequence may still need, its own copy of a shared last block included.
pub(super) fn still_needed(cache: &KvCache, sequence: &Sequence) -> u32 {
    let most = cache.config().layout().blocks_for(sequence.terms.max_tokens);
    let copied = |table| cache.shared_tail_block(table).is_some() || cache.is_borrowing(table);
    let copy = sequence.table().is_some_and(copied);
    most.saturating_sub(held(cache, sequence.table())) + u32::from(copy)
}

/// Blocks that a sequence and all its samples hold at their declared maximum, if it is `cut`. Samples share the full blocks
/// of the input, and nothing else.
pub(super) fn at_most(cache: &KvCache, sequence: &Sequence, cut: Option<u32>) -> u64 {
    // Should samples part before the cut is made, the one that is cut computes its last token apart from the others.
    let apart = u32::from(sequence.is_planned());
    let input = cut.map_or(sequence.terms.input_len, |len| (len - apart).min(sequence.terms.input_len));
    side_by_side(cache, input, sequence.terms.max_tokens, sequence.width())
}

/// Blocks that a sequence and all its samples may still need.
pub(super) fn whole_need(cache: &KvCache, sequence: &Sequence) -> u32 {
    let most = u32::try_from(at_most(cache, sequence, None)).unwrap_or(u32::MAX);
    most.saturating_sub(held(cache, sequence.table()))
}

/// Blocks of `samples` sequences of `max_tokens` tokens that share the full blocks of their first `shared`.
pub(super) fn side_by_side(cache: &KvCache, shared: u32, max_tokens: u32, samples: u32) -> u64 {
    let layout = cache.config().layout();
    let (full, most) = (shared / layout.block_size, layout.blocks_for(max_tokens));
    u64::from(full) + u64::from(samples) * u64::from(most - full)
}
