//! Twins of the transfers to and from the host pool, which a device does by copies instead of a kernel.
//!
//! On the CPU they are done when they return, so that an application reports them at once:
//! `TransferReport { step: plan.step(), complete: true }`.

use crate::BlockSwap;
use crate::reference::CpuCache;
use crate::schedule::StepPlan;

/// Moves each block, all layers, to its slot of the host pool, bit for bit. Whatever the slot held is lost.
///
/// Comes first in a step: the blocks may be given a new content by [`swap_in`], by
/// [`block_copy`](crate::reference::block_copy) and by [`append`](crate::reference::append).
///
/// # Panics
/// When a block or a slot lies beyond its pool, or one of them occurs twice.
pub fn swap_out(cache: &mut CpuCache, outs: &[BlockSwap]) {
    check_once(cache, outs);
    for swap in outs {
        let (block, slot) = cache.swapped_block(swap);
        slot.clear();
        slot.extend_from_slice(block);
    }
}

/// Brings each block back from its slot of the host pool, bit for bit. The slot keeps its content.
///
/// Comes after [`swap_out`], so that a block that was moved out may take the content of another one, and before
/// [`block_copy`](crate::reference::block_copy).
///
/// # Panics
/// When a block or a slot lies beyond its pool, one of them occurs twice, or nothing was moved to a slot.
pub fn swap_in(cache: &mut CpuCache, ins: &[BlockSwap]) {
    check_once(cache, ins);
    for swap in ins {
        let (block, slot) = cache.swapped_block(swap);
        assert!(!slot.is_empty(), "nothing was moved to slot {} of the host pool", swap.host_slot);
        block.copy_from_slice(slot);
    }
}

/// Gives a plan the swaps that a test needs. Not part of the stable interface.
#[doc(hidden)]
pub fn set_swaps(plan: &mut StepPlan, outs: Vec<BlockSwap>, ins: Vec<BlockSwap>) {
    plan.swap_outs = outs;
    plan.swap_ins = ins;
}

/// The device moves all blocks of a list in any order, so that none may occur twice.
fn check_once(cache: &CpuCache, swaps: &[BlockSwap]) {
    let mut blocks = vec![false; cache.layout().num_blocks() as usize];
    let mut slots = vec![false; cache.host_blocks() as usize];
    for swap in swaps {
        let seen = std::mem::replace(&mut blocks[swap.block as usize], true);
        assert!(!seen, "block {} is swapped twice", swap.block);
        let seen = std::mem::replace(&mut slots[swap.host_slot as usize], true);
        assert!(!seen, "slot {} of the host pool is used twice", swap.host_slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CacheConfig;
    use crate::model::{KvType, ModelShape};

    /// Four blocks of different content, and three slots.
    fn cache() -> CpuCache {
        let shape = ModelShape::new(2, 2, 1, 8);
        let config = CacheConfig::for_blocks(4, &shape, KvType::F16)
            .and_then(|config| config.with_host_blocks(3))
            .expect("a valid configuration");
        let mut cache = CpuCache::new(&shape, &config);
        let block_words = cache.block_words();
        for (index, word) in cache.words_mut().iter_mut().enumerate() {
            // Among them NaNs with payloads.
            *word = 0x7f80_0000 + index as u32 + ((index / block_words) as u32) * 0x1000;
        }
        cache
    }

    fn block(cache: &CpuCache, block: usize) -> Vec<u32> {
        cache.words()[block * cache.block_words()..][..cache.block_words()].to_vec()
    }

    fn swap(block: u32, host_slot: u32) -> BlockSwap {
        BlockSwap { block, host_slot }
    }

    #[test]
    fn a_block_returns_bit_for_bit_to_any_place() {
        let mut cache = cache();
        let before: Vec<_> = (0..4).map(|index| block(&cache, index)).collect();
        swap_out(&mut cache, &[swap(1, 2), swap(3, 0)]);
        cache.words_mut().fill(0);
        swap_in(&mut cache, &[swap(0, 2), swap(3, 0)]);
        assert_eq!(block(&cache, 0), before[1]);
        assert_eq!(block(&cache, 3), before[3]);
        assert!(block(&cache, 1).iter().chain(&block(&cache, 2)).all(|&word| word == 0));
    }

    #[test]
    fn a_block_may_leave_and_take_the_content_of_another_in_one_step() {
        let mut cache = cache();
        let before: Vec<_> = (0..4).map(|index| block(&cache, index)).collect();
        swap_out(&mut cache, &[swap(0, 0), swap(1, 1)]);
        swap_in(&mut cache, &[swap(1, 0), swap(2, 1)]);
        assert_eq!(block(&cache, 1), before[0]);
        assert_eq!(block(&cache, 2), before[1]);
    }

    #[test]
    fn a_slot_that_is_used_again_holds_the_later_block() {
        let mut cache = cache();
        let last = block(&cache, 2);
        swap_out(&mut cache, &[swap(0, 1)]);
        swap_out(&mut cache, &[swap(2, 1)]);
        swap_in(&mut cache, &[swap(0, 1)]);
        assert_eq!(block(&cache, 0), last);
    }

    #[test]
    #[should_panic(expected = "nothing was moved to slot 1")]
    fn an_empty_slot_has_nothing_to_return() {
        swap_in(&mut cache(), &[swap(0, 1)]);
    }

    #[test]
    #[should_panic(expected = "block 2 is swapped twice")]
    fn a_block_leaves_once() {
        swap_out(&mut cache(), &[swap(2, 0), swap(2, 1)]);
    }

    #[test]
    #[should_panic(expected = "slot 1 of the host pool is used twice")]
    fn a_slot_takes_one_block() {
        swap_out(&mut cache(), &[swap(2, 1), swap(0, 1)]);
    }
}
