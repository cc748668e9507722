//! Lanes: which logical blocks of a sequence a run holds.
//!
//! A *stack* of layers has blocks of its own, and each table has a *run* of consecutive ones in it. Where a window keeps a
//! sequence's first tokens, that would be two runs with a gap between them: so a stack's logical blocks are cut into
//! *lanes*, each of which has one run without a gap.
//!
//! ```text
//!   Reach::All              lane 0:  0 ──────────────────────────▶
//!   Reach::Window, Chunk    lane 0:  · · · · · · first ──────────▶   slides
//!   Window with `first`     lane 0:  0 ─── F
//!                           lane 1:      F · · · first ──────────▶   slides
//! ```
//! It is arithmetic alone.

use crate::reach::{Reach, Stack};
use std::ops::Range;

#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    /// The stack whose blocks these are.
    pub(super) stack: u32,
    /// Logical blocks from this one on are the lane's …
    pub(super) start: u32,
    /// … up to this one.
    end: u32,
    /// Of a lane that slides; otherwise all that it has of a sequence stays.
    reach: Reach,
    slides: bool,
    is_whole: bool,
    block_shift: u32,
}

impl Lane {
    /// The lanes of all stacks, in order. First tokens take whole nodes of `node_tokens` tokens.
    pub(super) fn of(stacks: &[Stack], node_tokens: u32) -> Vec<Self> {
        let mut lanes = Vec::new();
        for (stack, &Stack { reach, block_size }) in (0..).zip(stacks) {
            let block_shift = block_size.trailing_zeros();
            let first = reach.first_blocks(node_tokens) << (node_tokens.trailing_zeros() - block_shift);
            if first > 0 {
                let reach = if fault!(FirstTokensPass) { reach } else { Reach::All };
                lanes.push(Self::new(stack, 0..first, reach, block_shift));
            }
            lanes.push(Self::new(stack, first..u32::MAX, reach, block_shift));
        }
        lanes
    }

    fn new(stack: u32, entries: Range<u32>, reach: Reach, block_shift: u32) -> Self {
        let Range { start, end } = entries;
        let slides = !reach.is_all();
        Self {
            stack,
            start,
            end,
            reach,
            slides,
            is_whole: !slides && start == 0 && end == u32::MAX,
            block_shift,
        }
    }

    /// Whether it gives blocks back while its sequence lives.
    #[inline]
    pub(super) fn slides(&self) -> bool {
        self.slides
    }

    /// Whether it has everything of a sequence, from beginning to end.
    #[inline]
    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Whether it is the last lane of its stack: every stack has one.
    #[inline]
    pub(super) fn is_last(&self) -> bool {
        self.end == u32::MAX
    }

    /// Tokens of a block.
    #[inline]
    pub(super) fn block_size(&self) -> u32 {
        1 << self.block_shift
    }

    /// The logical block that has the token at `position`.
    #[inline]
    pub(super) fn entry_of(&self, position: u32) -> u32 {
        position >> self.block_shift
    }

    /// The first token of a logical block.
    #[inline]
    pub(super) fn tokens_before(&self, entry: u32) -> u32 {
        entry << self.block_shift
    }

    /// Slots of all logical blocks before one.
    #[inline]
    pub(super) fn slots_before(&self, entry: u32) -> u64 {
        u64::from(entry) << self.block_shift
    }

    /// The token after the last one that the lane has a block for.
    #[inline]
    pub(super) fn end_token(&self) -> u32 {
        if self.is_last() { u32::MAX } else { self.tokens_before(self.end) }
    }

    /// Whether a logical block is one of the lane's.
    #[inline]
    pub(super) fn covers(&self, entry: u32) -> bool {
        (self.start..self.end).contains(&entry)
    }

    /// The logical block after the last one that `len` tokens need.
    #[inline]
    pub(super) fn end_of(&self, len: u32) -> u32 {
        let blocks = (len >> self.block_shift) + u32::from(len & (self.block_size() - 1) != 0);
        blocks.max(self.start).min(self.end)
    }

    /// The first logical block that must stay when `len` tokens are computed.
    pub(super) fn first_of(&self, len: u32) -> u32 {
        match self.slides() {
            true => self.reach.kept(len, self.block_size())[1].start.clamp(self.start, self.end),
            false => self.start,
        }
    }

    /// The logical blocks that must stay when `len` tokens are computed.
    pub(super) fn kept(&self, len: u32) -> std::ops::Range<u32> {
        self.first_of(len)..self.end_of(len)
    }

    /// The logical block that the token after `len` others goes into, if that is partly filled.
    #[inline]
    pub(super) fn tail_of(&self, len: u32) -> Option<u32> {
        let entry = self.entry_of(len);
        (len & (self.block_size() - 1) != 0 && self.covers(entry)).then_some(entry)
    }

    /// The most blocks that a sequence holds here on its way to `max_tokens`, with at most `rows` rows in a step.
    pub(super) fn most_blocks(&self, max_tokens: u32, rows: u32) -> u32 {
        let all = self.end_of(max_tokens) - self.start;
        if !self.slides {
            return all;
        }
        match self.reach {
            Reach::Window { tokens, .. } => {
                let window = Reach::Window { tokens, first: 0 };
                window.most_blocks(max_tokens, rows, self.block_size()).min(all)
            }
            reach => reach.most_blocks(max_tokens, rows, self.block_size()).min(all),
        }
    }
}
