//! The host pool: blocks in main memory, and which step's bytes each slot is waiting for.
//!
//! A slot belongs to the step that claimed it last. Bytes that arrive for another step come too late and are left where
//! they are: the scheduler has given the slot away, because it dropped that step's plan or has no more use for the
//! block. Whatever the order in which transfers complete, a slot thus ends with the content that was asked for last.
//!
//! A slot takes memory when its first bytes arrive, and keeps it.

use crate::error::PrepareError;
use crate::ids::StepId;

/// One block on its way to or from the host pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SwappedBlock {
    pub(super) block: u32,
    pub(super) host_slot: u32,
}

/// What a slot's bytes are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Content {
    /// Nothing of use.
    #[default]
    Nothing,
    /// What this step moves out will be.
    Awaited(StepId),
    /// A block.
    Block,
}

#[derive(Debug, Default)]
struct HostSlot {
    content: Content,
    /// A block's ranges of all arenas, one after the other; empty before the first block arrives.
    bytes: Vec<u8>,
}

/// All slots up to the highest that was ever claimed.
#[derive(Debug)]
pub(super) struct HostPool {
    block_bytes: usize,
    slots: Vec<HostSlot>,
}

impl HostPool {
    pub(super) fn new(block_bytes: usize) -> Self {
        Self { block_bytes, slots: Vec::new() }
    }

    /// Bytes of main memory taken.
    pub(super) fn bytes(&self) -> u64 {
        self.slots.iter().map(|slot| slot.bytes.len() as u64).sum()
    }

    /// The block in a slot.
    ///
    /// # Errors
    /// When nothing was moved there, or what was has not arrived.
    pub(super) fn block(&self, host_slot: u32) -> Result<&[u8], PrepareError> {
        let slot = self.slots.get(host_slot as usize);
        match slot.map_or(Content::Nothing, |slot| slot.content) {
            Content::Nothing => Err(PrepareError::HostSlotEmpty { host_slot }),
            Content::Awaited(step) => Err(PrepareError::HostSlotAwaited { host_slot, step: step.raw() }),
            Content::Block => Ok(&self.slots[host_slot as usize].bytes),
        }
    }

    /// Gives the slots of `outs` to `step`. What they held is lost.
    pub(super) fn claim(&mut self, outs: &[SwappedBlock], step: StepId) {
        for out in outs {
            let index = out.host_slot as usize;
            if index >= self.slots.len() {
                self.slots.resize_with(index + 1, HostSlot::default);
            }
            self.slots[index].content = Content::Awaited(step);
        }
    }

    /// Makes sure that the slots which still wait for `step` have memory; whether the machine had enough.
    pub(super) fn reserve(&mut self, outs: &[SwappedBlock], step: StepId) -> bool {
        outs.iter().all(|out| {
            let slot = &mut self.slots[out.host_slot as usize];
            if slot.content != Content::Awaited(step) || !slot.bytes.is_empty() {
                return true;
            }
            let reserved = slot.bytes.try_reserve_exact(self.block_bytes).is_ok();
            if reserved {
                slot.bytes.resize(self.block_bytes, 0);
            }
            reserved
        })
    }

    /// Where `step`'s bytes for a slot go, after [`reserve`](Self::reserve); nowhere if the slot has another owner.
    pub(super) fn awaited(&mut self, host_slot: u32, step: StepId) -> Option<&mut [u8]> {
        let slot = &mut self.slots[host_slot as usize];
        (slot.content == Content::Awaited(step)).then_some(slot.bytes.as_mut_slice())
    }

    /// Ends the wait for `step`: its slots hold their blocks, or nothing if they did not arrive. Returns how many do.
    pub(super) fn settle(&mut self, outs: &[SwappedBlock], step: StepId, arrived: bool) -> u64 {
        let mut settled = 0;
        for out in outs {
            let content = &mut self.slots[out.host_slot as usize].content;
            if *content == Content::Awaited(step) {
                *content = if arrived { Content::Block } else { Content::Nothing };
                settled += u64::from(arrived);
            }
        }
        settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUT: SwappedBlock = SwappedBlock { block: 7, host_slot: 2 };

    /// A pool of blocks of four bytes.
    fn arrive(pool: &mut HostPool, step: u64, byte: u8) -> u64 {
        let step = StepId(step);
        assert!(pool.reserve(&[OUT], step));
        if let Some(bytes) = pool.awaited(OUT.host_slot, step) {
            bytes.fill(byte);
        }
        pool.settle(&[OUT], step, true)
    }

    #[test]
    fn a_slot_ends_with_the_bytes_of_the_step_that_claimed_it_last_in_any_order() {
        for order in [[1, 2, 3], [1, 3, 2], [2, 1, 3], [2, 3, 1], [3, 1, 2], [3, 2, 1]] {
            let mut pool = HostPool::new(4);
            assert_eq!(pool.block(2), Err(PrepareError::HostSlotEmpty { host_slot: 2 }));
            (1..=3).for_each(|step| pool.claim(&[OUT], StepId(step)));
            assert_eq!(pool.block(2), Err(PrepareError::HostSlotAwaited { host_slot: 2, step: 3 }));
            for step in order {
                assert_eq!(arrive(&mut pool, step, step as u8), u64::from(step == 3));
            }
            assert_eq!(pool.block(2), Ok([3; 4].as_slice()), "{order:?}");
        }
    }

    #[test]
    fn what_did_not_arrive_leaves_its_slot_empty_unless_a_later_step_claimed_it() {
        let mut pool = HostPool::new(4);
        pool.claim(&[OUT], StepId(1));
        pool.settle(&[OUT], StepId(1), false);
        assert_eq!(pool.block(2), Err(PrepareError::HostSlotEmpty { host_slot: 2 }));
        pool.claim(&[OUT], StepId(2));
        pool.claim(&[OUT], StepId(3));
        pool.settle(&[OUT], StepId(2), false);
        assert_eq!(pool.block(2), Err(PrepareError::HostSlotAwaited { host_slot: 2, step: 3 }));
        assert_eq!(arrive(&mut pool, 3, 9), 1);
        assert_eq!(pool.block(2), Ok([9; 4].as_slice()));
    }

    #[test]
    fn memory_is_taken_by_blocks_that_arrive_only() {
        let mut pool = HostPool::new(4);
        pool.claim(&[SwappedBlock { block: 0, host_slot: 1000 }], StepId(1));
        assert_eq!(pool.bytes(), 0);
        pool.claim(&[OUT], StepId(2));
        arrive(&mut pool, 2, 1);
        assert_eq!(pool.bytes(), 4);
    }
}
