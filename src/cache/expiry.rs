//! Which block's time passes first: a binary heap by the step at which it has passed, with each block's place in it.
//!
//! A block is in the heap at most once, so the heap is never larger than the pool. Its entry is brought up to date when
//! its last holder gives it up, and by nothing else that happens to the block. So what comes out must be looked at: it
//! may be held again, or hold something else. A change costs O(log n), a look at what is due O(1).
//!
//! A timing wheel would make a change O(1), but times to live are any number of 32 bits, and blocks are given up far less
//! often than steps look.

use crate::cache::prefix_cache::NodeId;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The first step that does not find it.
    due: u64,
    block: u32,
}

#[derive(Debug)]
pub(super) struct ExpiryQueue {
    /// No entry is due before the one at half its place.
    heap: Vec<Entry>,
    places: Vec<u32>,
}

impl ExpiryQueue {
    pub(super) fn new(num_nodes: u32) -> Self {
        Self { heap: Vec::new(), places: vec![NONE; num_nodes as usize] }
    }

    /// The block's time has passed at step `due`, whatever was said of it before.
    pub(super) fn set(&mut self, block: NodeId, due: u64) {
        let entry = Entry { due, block: block.0 };
        let place = match self.places[block.0 as usize] {
            NONE => {
                self.heap.push(entry);
                self.heap.len() - 1
            }
            place => place as usize,
        };
        self.settle(place, entry);
    }

    /// Takes out a block whose time had passed at step `now` when it was last given up.
    pub(super) fn pop_due(&mut self, now: u64) -> Option<NodeId> {
        let first = *self.heap.first().filter(|entry| entry.due <= now)?;
        self.places[first.block as usize] = NONE;
        if let Some(last) = self.heap.pop().filter(|last| last.block != first.block) {
            self.settle(0, last);
        }
        Some(NodeId(first.block))
    }

    /// Puts `entry` in order, from `place` on, whose own entry it replaces.
    fn settle(&mut self, mut place: usize, entry: Entry) {
        while place > 0 && self.heap[(place - 1) / 2].due > entry.due {
            self.put(place, self.heap[(place - 1) / 2]);
            place = (place - 1) / 2;
        }
        loop {
            let children = 2 * place + 1..(2 * place + 3).min(self.heap.len());
            match children.min_by_key(|&child| self.heap[child].due) {
                Some(child) if self.heap[child].due < entry.due => {
                    self.put(place, self.heap[child]);
                    place = child;
                }
                _ => break,
            }
        }
        self.put(place, entry);
    }

    fn put(&mut self, place: usize, entry: Entry) {
        self.heap[place] = entry;
        self.places[entry.block as usize] = place as u32;
    }

    /// Panics when order and places disagree.
    pub(super) fn assert_consistent(&self) {
        for (place, entry) in self.heap.iter().enumerate() {
            assert_eq!(self.places[entry.block as usize], place as u32, "block {} is elsewhere", entry.block);
            assert!(self.heap[place.saturating_sub(1) / 2].due <= entry.due, "block {} is late", entry.block);
        }
        let queued = self.places.iter().filter(|&&place| place != NONE).count();
        assert_eq!(queued, self.heap.len(), "a block has a place that is another's");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_out_in_the_order_in_which_their_times_pass_the_last_word_counting() {
        let mut queue = ExpiryQueue::new(64);
        let mut due = [None; 64];
        let mut random = 1u64;
        for now in 0..2000u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (block, ttl) = ((random >> 58) as usize, (random >> 40) % 50);
            queue.set(NodeId(block as u32), now + ttl);
            due[block] = Some(now + ttl);
            queue.assert_consistent();
            while let Some(block) = queue.pop_due(now) {
                let passed = due[block.0 as usize].take();
                assert!(passed.is_some_and(|due| due <= now), "{block:?} at {now}: {passed:?}");
            }
            assert!(due.iter().flatten().all(|&due| due > now), "one is due and did not come at {now}");
        }
    }
}
