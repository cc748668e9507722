//! Which blocks have what a node of the prefix cache means.
//!
//! A node is the same tokens for all stacks, and has a block, or several small ones, in each. What a stack that keeps
//! everything has of it is *essential*: without it the node goes, and what continues it. Blocks of windows come and go
//! by themselves: hits are where enough of them are left.
//!
//! Where a stack keeps everything, a node goes by the number of its block there, and with a single stack there is nothing
//! else to know. Where none does, nodes have numbers of their own, and stay without blocks while tables or other nodes
//! continue them.

use crate::cache::lane::Lane;
use crate::cache::prefix_cache::NodeId;
use crate::ids::BlockId;

const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct NodeBlocks {
    /// Whether a stack keeps everything: the first one.
    anchored: bool,
    /// Of each stack: its first slot of a node, and the logarithm of how many it has.
    slots: Vec<(u32, u32)>,
    num_slots: u32,
    /// Slots of stacks that keep everything; they come first.
    num_essential: u32,
    /// Slot by slot; empty where a node is one block.
    blocks: Vec<u32>,
    node_of: Vec<u32>,
    /// Nodes that there are not, where they have numbers of their own …
    free: Vec<NodeId>,
    /// … and tables that end at each.
    tips: Vec<u32>,
}

impl NodeBlocks {
    pub(super) fn new(lanes: &[Lane], node_tokens: u32) -> Self {
        let (mut slots, mut num_slots, mut num_essential) = (Vec::new(), 0, 0);
        for lane in lanes.iter().filter(|lane| lane.is_last()) {
            let per_node = node_tokens / lane.block_size();
            slots.push((num_slots, per_node.trailing_zeros()));
            num_slots += per_node;
            if lane.is_whole() {
                debug_assert_eq!(num_essential + per_node, num_slots, "whole stacks come first");
                num_essential = num_slots;
            }
        }
        Self {
            anchored: num_essential > 0,
            slots,
            num_slots,
            num_essential,
            blocks: Vec::new(),
            node_of: Vec::new(),
            free: Vec::new(),
            tips: Vec::new(),
        }
    }

    /// Makes room for the nodes of a pool; returns how many.
    pub(super) fn enable(&mut self, num_blocks: u32) -> u32 {
        let max_nodes = match self.anchored {
            true => num_blocks,
            // Without blocks, too, as long as something continues them.
            false => num_blocks.saturating_mul(2).min(i32::MAX as u32),
        };
        if !self.is_simple() {
            self.blocks = vec![NONE; max_nodes as usize * self.num_slots as usize];
            self.node_of = vec![NONE; num_blocks as usize];
        }
        if !self.anchored {
            self.free = (0..max_nodes).rev().map(NodeId).collect();
            self.tips = vec![0; max_nodes as usize];
        }
        max_nodes
    }

    /// Whether a node is one block, and goes by its number.
    pub(super) fn is_simple(&self) -> bool {
        self.anchored && self.num_slots == 1
    }

    /// Whether nodes go by the numbers of blocks.
    pub(super) fn is_anchored(&self) -> bool {
        self.anchored
    }

    /// The node that a logical block belongs to, by its place among a sequence's nodes.
    pub(super) fn place_of(&self, lane: &Lane, entry: u32) -> u32 {
        entry >> self.slots[lane.stack as usize].1
    }

    /// The logical blocks of the node at `place`.
    pub(super) fn entries_at(&self, lane: &Lane, place: u32) -> std::ops::Range<u32> {
        let shift = self.slots[lane.stack as usize].1;
        place << shift..(place + 1) << shift
    }

    /// The logical block of the first stack whose number the node at `place` goes by, if nodes go by numbers of blocks.
    pub(super) fn anchor_of(&self, place: u32) -> Option<u32> {
        self.anchored.then(|| place << self.slots[0].1)
    }

    fn slot_of(&self, lane: &Lane, entry: u32) -> u32 {
        let (first, shift) = self.slots[lane.stack as usize];
        first + (entry & ((1 << shift) - 1))
    }

    /// What a node has for a logical block.
    pub(super) fn block_at(&self, node: NodeId, lane: &Lane, entry: u32) -> Option<BlockId> {
        if self.is_simple() {
            return Some(BlockId(node.0));
        }
        match self.blocks[self.start_of(node) + self.slot_of(lane, entry) as usize] {
            NONE => None,
            block => Some(BlockId(block)),
        }
    }

    /// All blocks of a node, and whether each is essential; those come first.
    pub(super) fn blocks_of(&self, node: NodeId) -> impl Iterator<Item = (BlockId, bool)> {
        let only = self.is_simple().then_some((BlockId(node.0), true));
        let slots = if only.is_some() { &[][..] } else { self.slots_of(node) };
        let essential = self.num_essential;
        let present = (0..).zip(slots).filter(|&(_, &block)| block != NONE);
        only.into_iter().chain(present.map(move |(slot, &block)| (BlockId(block), slot < essential)))
    }

    fn start_of(&self, node: NodeId) -> usize {
        node.0 as usize * self.num_slots as usize
    }

    fn slots_of(&self, node: NodeId) -> &[u32] {
        &self.blocks[self.start_of(node)..][..self.num_slots as usize]
    }

    /// The node that a block belongs to; it is known to the prefix cache.
    pub(super) fn node_of(&self, block: BlockId) -> NodeId {
        match self.is_simple() {
            true => NodeId(block.0),
            false => NodeId(self.node_of[block.0 as usize]),
        }
    }

    /// Whether a block belongs to a node, if the prefix cache knows it.
    pub(super) fn has_node(&self, block: BlockId) -> bool {
        self.is_simple() || self.node_of[block.0 as usize] != NONE
    }

    /// Whether a node goes with this block.
    pub(super) fn is_essential(&self, block: BlockId) -> bool {
        if self.is_simple() {
            return true;
        }
        let slots = self.slots_of(self.node_of(block));
        slots[..self.num_essential as usize].contains(&block.0)
    }

    pub(super) fn attach(&mut self, node: NodeId, lane: &Lane, entry: u32, block: BlockId) {
        if self.is_simple() {
            return;
        }
        let slot = self.start_of(node) + self.slot_of(lane, entry) as usize;
        debug_assert_eq!(self.blocks[slot], NONE, "{node:?} has a block there");
        self.blocks[slot] = block.0;
        self.node_of[block.0 as usize] = node.0;
    }

    /// Takes a block off its node; returns the node.
    pub(super) fn detach(&mut self, block: BlockId) -> NodeId {
        let node = self.node_of(block);
        if !self.is_simple() {
            let start = self.start_of(node);
            let slots = &mut self.blocks[start..][..self.num_slots as usize];
            slots.iter_mut().filter(|slot| **slot == block.0).for_each(|slot| *slot = NONE);
            self.node_of[block.0 as usize] = NONE;
        }
        node
    }

    pub(super) fn num_slots(&self) -> u32 {
        self.num_slots
    }

    /// Takes what a node has in a slot off it.
    pub(super) fn take(&mut self, node: NodeId, slot: u32) -> Option<BlockId> {
        if self.is_simple() {
            return Some(BlockId(node.0));
        }
        let at = self.start_of(node) + slot as usize;
        match std::mem::replace(&mut self.blocks[at], NONE) {
            NONE => None,
            block => {
                self.node_of[block as usize] = NONE;
                Some(BlockId(block))
            }
        }
    }

    // Nodes with numbers of their own.

    /// A number for a new node, if there is one left.
    pub(super) fn take_number(&mut self) -> Option<NodeId> {
        self.free.pop()
    }

    /// A node is gone.
    pub(super) fn give_back_number(&mut self, node: NodeId) {
        if !self.anchored {
            debug_assert!(self.slots_of(node).iter().all(|&block| block == NONE), "{node:?} has blocks");
            self.tips[node.0 as usize] = 0;
            self.free.push(node);
        }
    }

    /// Whether neither a block nor a table needs the node.
    pub(super) fn is_bare(&self, node: NodeId) -> bool {
        self.tips[node.0 as usize] == 0 && self.slots_of(node).iter().all(|&block| block == NONE)
    }

    /// Tables that end at the node.
    pub(super) fn tips(&self, node: NodeId) -> u32 {
        self.tips[node.0 as usize]
    }

    /// A table ends at the node, or no longer does.
    pub(super) fn count_tip(&mut self, node: NodeId, change: i32) {
        let tips = &mut self.tips[node.0 as usize];
        *tips = tips.saturating_add_signed(change);
    }

    /// All nodes are gone.
    pub(super) fn clear(&mut self) {
        self.blocks.fill(NONE);
        self.node_of.fill(NONE);
        if !self.anchored {
            self.free = (0..self.tips.len() as u32).rev().map(NodeId).collect();
            self.tips.fill(0);
        }
    }
}
