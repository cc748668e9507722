//! Block records: reference counts, the lists of blocks that no table holds, and pins.
//!
//! A block is in exactly one state: *free* (on the free list), *cached* (no holder, but its content may be asked for
//! again: on a list of its retention), *held* (count of at least one), or *in transfer* (count zero, but pinned because a
//! recorded copy still reads or fills it; it is shelved when the step ends). Every operation is O(1).
//!
//! For guaranteed admission it also counts the *promised* tables that hold each block, and all blocks that a promised
//! table holds or that are pinned content. These counts are kept block by block, so no admission walks the pool.
//!
//! Lists are intrusive: a block is on one at most. Free blocks are reused in the order of their release, oldest first:
//! a released block keeps its content as long as possible. So are cached ones, those of the lowest retention first.

use crate::cache::prefix_cache::Retention;
use crate::ids::BlockId;

const NONE: u32 = u32::MAX;
/// One list per retention, that of pinned content for what is pinned for a limited time; then what is pinned for ever,
/// what no likely hit needs, and the free list.
const NUM_LISTS: usize = Retention::COUNT + 3;
const RETAINED: usize = Retention::Pinned as usize;
const FOR_EVER: usize = Retention::COUNT;
const LOOSE_CONTENT: usize = Retention::COUNT + 1;
/// After all that the prefix cache knows.
const FREE: usize = Retention::COUNT + 2;
/// Set in a block's flags while a copy of the outstanding step reads it, or a return fills it.
const PINNED: u8 = 1 << 7;
/// Set while the prefix cache knows the block; the lower bits are its retention then.
const CACHED: u8 = 1 << 6;
/// Set while the block is on a list.
const SHELVED: u8 = 1 << 5;
/// Set while the prefix cache knows the block and keeps it for a limited time.
const LIMITED: u8 = 1 << 4;
/// Set while no likely hit needs a block that the prefix cache knows.
const LOOSE: u8 = 1 << 3;
const RETENTION: u8 = LOOSE - 1;
/// What a block that the prefix cache keeps although others need blocks has of the two.
const PINNED_CONTENT: u8 = CACHED | Retention::Pinned as u8;

#[derive(Clone, Copy, Debug)]
struct Links {
    older: u32,
    newer: u32,
}

#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
    len: u32,
}

/// Counts of the pool, see [`CacheStats`](crate::CacheStats).
#[derive(Debug)]
pub(super) struct BlockPool {
    ref_counts: Vec<u32>,
    /// Promised tables that hold each block; empty until the first promise.
    promised: Vec<u32>,
    flags: Vec<u8>,
    links: Vec<Links>,
    lists: [List; NUM_LISTS],
    /// Blocks with `PINNED` set, in pinning order.
    pins: Vec<BlockId>,
    num_held: u32,
    num_shared: u32,
    peak_held: u32,
    peak_shared: u32,
    promises: PromisedBlocks,
}

/// What promised tables hold, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PromisedBlocks {
    /// Entries of promised tables: a block counts once for each of them.
    pub(crate) entries: u64,
    /// Blocks that a promised table holds.
    pub(crate) held: u32,
    /// Pinned content that no promised table holds.
    pub(crate) pinned: u32,
}

impl BlockPool {
    pub(super) fn new(num_blocks: u32) -> Self {
        let mut pool = Self {
            ref_counts: vec![0; num_blocks as usize],
            promised: Vec::new(),
            flags: vec![0; num_blocks as usize],
            links: vec![Links { older: NONE, newer: NONE }; num_blocks as usize],
            lists: [List { oldest: NONE, newest: NONE, len: 0 }; NUM_LISTS],
            pins: Vec::new(),
            num_held: 0,
            num_shared: 0,
            peak_held: 0,
            peak_shared: 0,
            promises: PromisedBlocks::default(),
        };
        for block in 0..num_blocks {
            pool.shelve(BlockId(block));
        }
        pool
    }

    pub(super) fn num_blocks(&self) -> u32 {
        self.ref_counts.len() as u32
    }

    /// Blocks whose content cannot be asked for.
    #[inline]
    pub(super) fn num_free(&self) -> u32 {
        self.lists[FREE].len
    }

    /// Blocks without a holder that the prefix cache knows, except pinned content.
    pub(super) fn num_evictable(&self) -> u32 {
        self.lists[LOOSE_CONTENT].len + self.lists[..RETAINED].iter().map(|list| list.len).sum::<u32>()
    }

    /// Blocks without a holder that are kept although others need blocks.
    pub(super) fn num_retained(&self) -> u32 {
        self.lists[RETAINED].len + self.lists[FOR_EVER].len
    }

    /// Blocks without a holder that the prefix cache knows.
    pub(super) fn num_cached(&self) -> u32 {
        self.lists[..FREE].iter().map(|list| list.len).sum()
    }

    /// Blocks that can be had: free ones, and cached ones that may be evicted.
    #[inline]
    pub(super) fn num_available(&self) -> u32 {
        self.num_free() + self.num_evictable()
    }

    pub(super) fn num_held(&self) -> u32 {
        self.num_held
    }

    pub(super) fn num_shared(&self) -> u32 {
        self.num_shared
    }

    pub(super) fn num_in_transfer(&self) -> u32 {
        self.num_blocks() - self.num_available() - self.num_retained() - self.num_held
    }

    pub(super) fn peak_held(&self) -> u32 {
        self.peak_held
    }

    pub(super) fn peak_shared(&self) -> u32 {
        self.peak_shared
    }

    #[inline]
    pub(super) fn ref_count(&self, block: BlockId) -> u32 {
        self.ref_counts[block.0 as usize]
    }

    #[inline]
    pub(super) fn is_pinned(&self, block: BlockId) -> bool {
        self.flags[block.0 as usize] & PINNED != 0
    }

    /// Takes the free block that was released longest ago.
    pub(super) fn allocate(&mut self) -> Option<BlockId> {
        let block = self.oldest(FREE)?;
        debug_assert_eq!(self.ref_count(block), 0, "{block:?} is on the free list with a holder");
        self.unshelve(block);
        self.ref_counts[block.0 as usize] = 1;
        self.num_held += 1;
        self.peak_held = self.peak_held.max(self.num_held);
        Some(block)
    }

    /// One holder more. The block is held, or cached, or pinned and just given up by its last holder.
    pub(super) fn retain(&mut self, block: BlockId) {
        let flags = self.flags[block.0 as usize];
        if flags & SHELVED != 0 {
            debug_assert!(flags & CACHED != 0, "{block:?} is retained while free");
            self.unshelve(block);
        }
        let count = &mut self.ref_counts[block.0 as usize];
        *count += 1;
        match *count {
            1 => self.num_held += 1,
            2 => self.num_shared += 1,
            _ => {}
        }
        self.peak_held = self.peak_held.max(self.num_held);
        self.peak_shared = self.peak_shared.max(self.num_shared);
    }

    /// One holder more for each of `blocks`, all of which are held.
    pub(super) fn retain_held(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            let count = &mut self.ref_counts[block.0 as usize];
            debug_assert!(*count > 0, "{block:?} is not held");
            *count += 1;
            self.num_shared += u32::from(*count == 2);
        }
        self.peak_shared = self.peak_shared.max(self.num_shared);
    }

    /// One holder less; the last one shelves the block, or leaves it in transfer while it is pinned.
    ///
    /// Returns false, and changes nothing, when the block has no holder: a broken invariant.
    #[must_use]
    pub(super) fn release(&mut self, block: BlockId) -> bool {
        let count = &mut self.ref_counts[block.0 as usize];
        debug_assert!(*count > 0, "{block:?} is released twice");
        if *count == 0 {
            return false;
        }
        *count -= 1;
        match *count {
            0 => {
                self.num_held -= 1;
                if !self.is_pinned(block) && !fault!(BlockLeaked) {
                    self.shelve(block);
                }
            }
            1 => self.num_shared -= 1,
            _ => {}
        }
        true
    }

    /// Keeps a block off the lists until [`unpin_all`](Self::unpin_all).
    pub(super) fn pin(&mut self, block: BlockId) {
        if !self.is_pinned(block) {
            self.flags[block.0 as usize] |= PINNED;
            self.pins.push(block);
        }
    }

    /// Ends all pins; blocks without a holder are shelved.
    pub(super) fn unpin_all(&mut self) {
        while let Some(block) = self.pins.pop() {
            self.flags[block.0 as usize] &= !PINNED;
            if self.ref_count(block) == 0 {
                self.shelve(block);
            }
        }
    }

    // Promises.

    pub(super) fn promises(&self) -> PromisedBlocks {
        self.promises
    }

    /// Promised tables that hold `block`.
    pub(super) fn promised_holders(&self, block: BlockId) -> u32 {
        self.promised.get(block.0 as usize).copied().unwrap_or(0)
    }

    /// A promised table holds `block` from now on. A block that it holds `alone` is promised to it whether others hold
    /// it or not: windows move on.
    pub(super) fn promise(&mut self, block: BlockId, alone: bool) {
        if self.promised.is_empty() {
            self.promised.resize(self.ref_counts.len(), 0);
        }
        let alone = alone && !fault!(WindowSharingPromised);
        let count = &mut self.promised[block.0 as usize];
        *count += 1;
        self.promises.entries += u64::from(!alone);
        if *count == 1 {
            self.promises.held += u32::from(!alone);
            self.promises.pinned -= u32::from(self.is_pinned_content(block));
        }
    }

    /// A promised table does not hold `block` any more.
    pub(super) fn unpromise(&mut self, block: BlockId, alone: bool) {
        let alone = alone && !fault!(WindowSharingPromised);
        let count = &mut self.promised[block.0 as usize];
        debug_assert!(*count > 0, "{block:?} is promised to no table");
        *count = count.saturating_sub(1);
        self.promises.entries -= u64::from(!alone);
        if *count == 0 {
            self.promises.held -= u32::from(!alone);
            self.promises.pinned += u32::from(self.is_pinned_content(block));
        }
    }

    /// Whether the prefix cache keeps the block although others need blocks.
    pub(super) fn is_pinned_content(&self, block: BlockId) -> bool {
        self.flags[block.0 as usize] & (CACHED | RETENTION) == PINNED_CONTENT
    }

    // What the prefix cache knows.

    #[inline]
    pub(super) fn is_cached(&self, block: BlockId) -> bool {
        self.flags[block.0 as usize] & CACHED != 0
    }

    /// Whether the prefix cache knows the block, and no table holds it.
    pub(super) fn is_idle(&self, block: BlockId) -> bool {
        self.is_cached(block) && self.ref_count(block) == 0
    }

    pub(super) fn retention(&self, block: BlockId) -> Retention {
        Retention::from_index(self.flags[block.0 as usize] & RETENTION)
    }

    /// The prefix cache knows the block from now on, and keeps it for a `limited` time or for ever; a block on a list moves
    /// to the one of its retention.
    pub(super) fn set_cached(&mut self, block: BlockId, retention: Retention, limited: bool) {
        let limited = if limited { LIMITED } else { 0 };
        let replaced = RETENTION | LIMITED | if retention == Retention::Pinned { LOOSE } else { 0 };
        self.reshelve(block, |flags| (flags & !replaced) | CACHED | limited | retention as u8);
    }

    /// The prefix cache has forgotten the block: without a holder it is free.
    pub(super) fn set_uncached(&mut self, block: BlockId) {
        self.reshelve(block, |flags| flags & !(RETENTION | LOOSE | LIMITED | CACHED));
    }

    /// Whether a block that the prefix cache knows is to go before all others: no likely hit needs it. What is pinned is
    /// never loose.
    pub(super) fn set_loose(&mut self, block: BlockId, loose: bool) {
        let flags = self.flags[block.0 as usize];
        let loose = loose && self.is_cached(block) && !self.is_pinned_content(block);
        if loose != (flags & LOOSE != 0) {
            self.reshelve(block, |flags| if loose { flags | LOOSE } else { flags & !LOOSE });
        }
    }

    /// The block to give up next, if pinned content must go: what is pinned for a limited time, the oldest first.
    pub(super) fn oldest_retained(&self) -> Option<BlockId> {
        self.oldest(RETAINED).or_else(|| self.oldest(FOR_EVER))
    }

    /// The block to evict next, except pinned content.
    pub(super) fn oldest_evictable(&self) -> Option<BlockId> {
        self.oldest(LOOSE_CONTENT).or_else(|| (0..RETAINED).find_map(|list| self.oldest(list)))
    }

    // Lists.

    fn oldest(&self, list: usize) -> Option<BlockId> {
        let block = self.lists[list].oldest;
        (block != NONE).then_some(BlockId(block))
    }

    fn list_of(&self, block: BlockId) -> usize {
        let flags = self.flags[block.0 as usize];
        match usize::from(flags & RETENTION) {
            _ if flags & CACHED == 0 => FREE,
            _ if flags & LOOSE != 0 => LOOSE_CONTENT,
            RETAINED if flags & LIMITED == 0 => FOR_EVER,
            retention => retention,
        }
    }

    /// Puts a block without a holder at the newest end of its list.
    fn shelve(&mut self, block: BlockId) {
        let list = self.list_of(block);
        let newest = std::mem::replace(&mut self.lists[list].newest, block.0);
        self.links[block.0 as usize] = Links { older: newest, newer: NONE };
        match newest {
            NONE => self.lists[list].oldest = block.0,
            newest => self.links[newest as usize].newer = block.0,
        }
        self.lists[list].len += 1;
        self.flags[block.0 as usize] |= SHELVED;
    }

    fn unshelve(&mut self, block: BlockId) {
        let list = self.list_of(block);
        let Links { older, newer } = self.links[block.0 as usize];
        match older {
            NONE => self.lists[list].oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => self.lists[list].newest = older,
            newer => self.links[newer as usize].older = older,
        }
        self.lists[list].len -= 1;
        self.flags[block.0 as usize] &= !SHELVED;
    }

    fn reshelve(&mut self, block: BlockId, change: impl FnOnce(u8) -> u8) {
        let shelved = self.flags[block.0 as usize] & SHELVED != 0;
        if shelved {
            self.unshelve(block);
        }
        let flags = &mut self.flags[block.0 as usize];
        let before = std::mem::replace(flags, change(*flags));
        let pins = [before, *flags].map(|flags| u32::from(flags & (CACHED | RETENTION) == PINNED_CONTENT));
        if pins[0] != pins[1] && self.promised_holders(block) == 0 {
            self.promises.pinned = self.promises.pinned - pins[0] + pins[1];
        }
        if shelved {
            self.shelve(block);
        }
    }

    /// Panics when counts, lists and pins disagree; `expected` are the reference counts that the tables imply, `promised`
    /// those of promised tables, and of which blocks each holder is promised its own.
    pub(super) fn assert_consistent(&self, expected: &[u32], promised: &[u32], alone: &[bool]) {
        assert_eq!(self.ref_counts, expected, "I2: reference counts differ from the number of tables");
        let counted: Vec<u32> =
            (0..self.num_blocks()).map(|block| self.promised_holders(BlockId(block))).collect();
        assert_eq!(counted, promised, "I8: promised holders differ from the number of promised tables");
        let pinned = |&block: &u32| promised[block as usize] == 0 && self.is_pinned_content(BlockId(block));
        let shared = || promised.iter().zip(alone).filter(|&(_, &alone)| !alone);
        let counted = PromisedBlocks {
            entries: shared().map(|(&count, _)| u64::from(count)).sum(),
            held: shared().filter(|&(&count, _)| count > 0).count() as u32,
            pinned: (0..self.num_blocks()).filter(pinned).count() as u32,
        };
        assert_eq!(self.promises, counted, "I8: what promised tables hold is miscounted");
        let mut listed = vec![false; self.ref_counts.len()];
        for (index, list) in self.lists.iter().enumerate() {
            let (mut block, mut older, mut len) = (list.oldest, NONE, 0);
            while block != NONE {
                assert!(!listed[block as usize], "I1: block {block} is on a list twice");
                listed[block as usize] = true;
                assert_eq!(
                    self.links[block as usize].older, older,
                    "I1: the links of block {block} disagree"
                );
                assert_eq!(self.list_of(BlockId(block)), index, "I1: block {block} is on a wrong list");
                (older, block) = (block, self.links[block as usize].newer);
                len += 1;
            }
            assert_eq!((len, older), (list.len, list.newest), "I1: a list is miscounted");
        }
        let mut in_transfer = 0;
        for (index, &count) in self.ref_counts.iter().enumerate() {
            let fenced = count == 0 && self.is_pinned(BlockId(index as u32));
            in_transfer += u32::from(fenced);
            assert_eq!(listed[index], count == 0 && !fenced, "I1: block {index} is in two states or none");
            assert_eq!(
                listed[index],
                self.flags[index] & SHELVED != 0,
                "I1: block {index} is marked as on a list, or is not"
            );
        }
        let held = self.ref_counts.iter().filter(|&&count| count > 0).count() as u32;
        let shared = self.ref_counts.iter().filter(|&&count| count > 1).count() as u32;
        assert_eq!(self.num_held, held, "I1: held blocks are miscounted");
        assert_eq!(self.num_shared, shared, "I1: shared blocks are miscounted");
        assert_eq!(
            self.num_in_transfer(),
            in_transfer,
            "I1: free, cached, held and in transfer do not sum to the pool"
        );
        let pins = self.flags.iter().filter(|&&flags| flags & PINNED != 0).count();
        assert_eq!(self.pins.len(), pins, "I5: pinned blocks are miscounted");
    }
}
