//! Twin of `block_copy`: copies whole blocks, all layers, before a step writes anything.

use crate::BlockCopy;
use crate::reference::CpuCache;

/// Copies each pair's source block over its destination, all layers, keys and values, bit for bit.
///
/// The kernel runs all pairs at once, so their order must not matter: no block may be the source of one pair and the
/// destination of another, none the destination of two. A pair of one block with itself copies nothing.
///
/// # Panics
/// When a block lies beyond the pool, or the pairs' order would matter.
pub fn block_copy(cache: &mut CpuCache, copies: &[BlockCopy]) {
    let num_blocks = cache.layout().num_blocks() as usize;
    let mut is_destination = vec![false; num_blocks];
    let effective = || copies.iter().filter(|copy| copy.source != copy.destination);
    for copy in effective() {
        let written = std::mem::replace(&mut is_destination[copy.destination as usize], true);
        assert!(!written, "block {} is the destination of two copies", copy.destination);
    }
    for copy in effective() {
        let overwritten = is_destination[copy.source as usize];
        assert!(!overwritten, "block {} is source and destination in one list of copies", copy.source);
    }
    let block_words = cache.block_words();
    for copy in effective() {
        let start = copy.source as usize * block_words;
        cache.words_mut().copy_within(start..start + block_words, copy.destination as usize * block_words);
    }
}
