//! A sequence and its blocks: what its table holds and will hold.
//!
//! Pure questions to a cache about one sequence. Nothing here knows of others, of promises or of policy.

use crate::cache::KvCache;
use crate::ids::{BlockId, TableId};
use crate::schedule::sequence::Sequence;

// What a table holds: nothing, if there is none.

/// The blocks of a sequence in the pool.
pub(super) fn of(cache: &KvCache, table: Option<TableId>) -> impl Iterator<Item = BlockId> {
    table.into_iter().flat_map(|table| cache.blocks_of(table))
}

/// How many blocks of the pool a sequence has.
pub(super) fn held(cache: &KvCache, table: Option<TableId>) -> u32 {
    table.map_or(0, |table| cache.num_held(table))
}

/// Those that last, and that its first `end` tokens do not need.
pub(super) fn lasting_beyond(
    cache: &KvCache,
    table: Option<TableId>,
    end: u32,
) -> impl Iterator<Item = BlockId> {
    table.into_iter().flat_map(move |table| cache.lasting_beyond(table, end))
}

/// Blocks of a sequence in the host pool.
pub(super) fn returning(cache: &KvCache, table: Option<TableId>) -> u32 {
    table.map_or(0, |table| cache.host_blocks_of(table).unwrap_or(0))
}

/// The partly filled last blocks of a sequence that others hold too: they are copied before the next token is written.
pub(super) fn shared_tails(cache: &KvCache, table: Option<TableId>) -> impl Iterator<Item = BlockId> {
    table.into_iter().flat_map(|table| cache.shared_tail_blocks(table))
}

/// Whether a sequence's next token goes into a block that holds others already, and that is in other tables or may come to
/// be in them.
pub(super) fn has_open_tail(cache: &KvCache, table: Option<TableId>) -> bool {
    table.is_some_and(|table| cache.has_open_tail(table))
}

/// Tokens that stay where others hold them when `moved` blocks of a sequence leave: about as many, where there are several
/// stacks.
pub(super) fn tokens_staying(cache: &KvCache, table: Option<TableId>, moved: u32) -> u32 {
    (held(cache, table) - moved) * cache.config().block_size() / cache.num_stacks()
}

// What a sequence will hold.

/// Free blocks that `rows` more rows take, where `reserved` ones are kept for others.
pub(super) fn for_rows(cache: &KvCache, table: Option<TableId>, rows: u32, reserved: u32) -> u32 {
    let spare = cache.free_blocks().saturating_sub(reserved);
    let growth = table.and_then(|table| cache.growth(table, rows, spare).ok());
    growth.map_or(u32::MAX, |growth| growth.needed())
}

/// The most rows, up to `rows`, that `free` more blocks hold.
pub(super) fn rows_within(cache: &KvCache, table: Option<TableId>, rows: u32, free: u32) -> u32 {
    table.map_or(0, |table| cache.rows_within(table, rows, free))
}

/// Blocks that last and that a sequence's next token goes into, if they are partly filled when at most `end` tokens are left.
pub(super) fn tails_within(cache: &KvCache, sequence: &Sequence, end: u32) -> impl Iterator<Item = BlockId> {
    let table = sequence.table().filter(|_| sequence.fork().is_none());
    table.into_iter().flat_map(move |table| cache.lasting_tails(table, end))
}

/// The full blocks of its parent that last, and that a branch shares when the outstanding step ends, of `end` tokens at
/// most.
pub(super) fn to_be_shared(cache: &KvCache, sequence: &Sequence, end: u32) -> impl Iterator<Item = BlockId> {
    let fork = sequence.fork();
    fork.into_iter().flat_map(move |fork| cache.lasting_full(fork.parent, fork.at.min(end)))
}

/// The tokens whose blocks a sequence keeps when it is cut: none, where a window has left behind what comes next.
pub(super) fn end_of_cut(cache: &KvCache, sequence: &Sequence) -> u32 {
    let Some(len) = sequence.cut() else { return u32::MAX };
    let left = sequence.computed().min(len - 1);
    let is_behind = sequence.table().is_some_and(|table| !cache.reaches(table, left));
    if is_behind { 0 } else { len - 1 }
}

/// Blocks that a sequence may still need, its own copies of shared last blocks included.
pub(super) fn still_needed(cache: &KvCache, sequence: &Sequence) -> u32 {
    cache.still_needed(sequence.table(), sequence.terms.max_tokens)
}

/// Blocks that a sequence and all its samples hold at most, if it is `cut`. Samples share what the input fills and what
/// lasts, and nothing else.
pub(super) fn at_most(cache: &KvCache, sequence: &Sequence, cut: Option<u32>) -> u64 {
    // Should samples part before the cut is made, the one that is cut computes its last token by itself.
    let apart = u32::from(sequence.is_planned());
    let input = cut.map_or(sequence.terms.input_len, |len| (len - apart).min(sequence.terms.input_len));
    cache.side_by_side(input, sequence.terms.max_tokens, sequence.width())
}

/// Blocks that a sequence and all its samples may still need.
pub(super) fn whole_need(cache: &KvCache, sequence: &Sequence) -> u32 {
    let most = u32::try_from(at_most(cache, sequence, None)).unwrap_or(u32::MAX);
    most.saturating_sub(held(cache, sequence.table()))
}
