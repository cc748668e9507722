//! What a program that draws a pool sees: the state of every block, and what each sequence is doing.

use paged_kv::{BlockState, KvCache};

/// The states of all blocks, counted, are the pool's own counts (I1).
pub(crate) fn assert_states_sum(cache: &KvCache) {
    let (mut free, mut cached, mut held, mut shared, mut in_transfer) = (0, 0, 0, 0, 0);
    for (place, (block, state)) in cache.block_states().enumerate() {
        assert_eq!(block.index() as usize, place, "blocks come by index");
        assert_eq!(cache.block_state(block), Some(state));
        match state {
            BlockState::Free => free += 1,
            BlockState::Cached { .. } => cached += 1,
            BlockState::Held { tables } => {
                assert_eq!(tables, cache.ref_count(block));
                held += 1;
                shared += u32::from(tables > 1);
            }
            BlockState::InTransfer => in_transfer += 1,
            _ => unreachable!("a state that this test does not know"),
        }
    }
    let stats = cache.stats();
    assert_eq!(
        (free, cached, held, shared, in_transfer),
        (
            stats.free_blocks,
            stats.cached_blocks,
            stats.held_blocks,
            stats.shared_blocks,
            stats.in_transfer_blocks
        ),
        "I1: blocks looked at one by one, and counted: {stats:?}"
    );
}
