//! Staging buffers: where blocks lie on their way between the arenas and the host pool.
//!
//! Buffers have one size, and up to four of each kind are kept for the next swap: a new buffer costs several times its
//! copy, for wgpu zeroes what it maps and the system what it gives. Within a step's buffers, ranges lie arena by arena
//! and, within an arena, in the order of the step's list; a range never spans two buffers:
//!
//! ```text
//! buffer 0: │ arena 0: block 3 │ block 4 │ block 9 │ arena 1: block 3 │ block 4 │   (no room for another range)
//! buffer 1: │ arena 1: block 9 │
//! ```
//!
//! Ranges of consecutive blocks that follow each other in one buffer are copied at once.

use crate::error::PrepareError;
use crate::gpu::host_pool::SwappedBlock;
use crate::gpu::scope::{Refusal, guarded};
use crate::layout::ArenaLayout;
use std::ops::Range;
use wgpu::{Buffer, BufferDescriptor, BufferUsages};

/// Bytes that are kept each way where nothing else is asked for: 32 blocks of 16 tokens at 128 KiB.
const DEFAULT_STAGING_BYTES: u64 = 64 << 20;

/// Buffers of a kind that are kept while nothing is swapped: several, so that small swaps take a part of the bytes only.
const MAX_IDLE_BUFFERS: usize = 4;

/// What starts at a multiple of this many bytes may be copied and mapped on every device.
const ALIGNMENT: u64 = 16;

/// One block's range of one arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) arena: usize,
    /// Index in the step's list of swapped blocks.
    pub(super) index: usize,
    pub(super) bytes: u64,
    /// Where it lies among the bytes of its block in the host pool.
    pub(super) host_offset: u64,
    /// The step's staging buffer that it lies in, and where.
    pub(super) buffer: usize,
    pub(super) offset: u64,
}

impl Segment {
    /// The range among the bytes of its block in the host pool.
    pub(super) fn host_range(&self) -> Range<usize> {
        self.host_offset as usize..(self.host_offset + self.bytes) as usize
    }
}

/// Ranges of consecutive blocks of an arena, side by side in a staging buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) arena: usize,
    pub(super) arena_offset: u64,
    pub(super) buffer: usize,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// How swapped blocks are laid out in staging buffers.
#[derive(Debug)]
pub(super) struct StagingLayout {
    /// Bytes of a block in each arena.
    range_bytes: Vec<u64>,
    /// Bytes of each staging buffer.
    pub(super) buffer_bytes: u64,
}

impl StagingLayout {
    /// Buffers of which those that are kept have `staging_bytes`, but never larger than the host pool or the device's
    /// limit, and never too small for the range of one block in one arena, which the limit has room for.
    pub(super) fn new(
        arenas: &ArenaLayout,
        staging_bytes: Option<u64>,
        host_bytes: u64,
        max_bytes: u64,
    ) -> Self {
        let range_bytes: Vec<u64> =
            (0..arenas.num_arenas()).map(|arena| arenas.block_stride_bytes(arena)).collect();
        let largest = range_bytes.iter().copied().max().unwrap_or(0);
        let wanted = staging_bytes.unwrap_or(DEFAULT_STAGING_BYTES) / MAX_IDLE_BUFFERS as u64;
        let bytes = wanted.min(host_bytes).max(largest).min(max_bytes);
        Self { range_bytes, buffer_bytes: bytes / ALIGNMENT * ALIGNMENT }
    }

    /// The ranges of `num_blocks` swapped blocks.
    pub(super) fn segments(&self, num_blocks: usize) -> impl Iterator<Item = Segment> {
        let (mut buffer, mut end) = (0, 0);
        let mut host_end = 0;
        let arenas = self.range_bytes.iter().enumerate().map(move |(arena, &bytes)| {
            host_end += bytes;
            (arena, bytes, host_end - bytes)
        });
        let ranges = arenas.flat_map(move |arena| (0..num_blocks).map(move |index| (arena, index)));
        ranges.map(move |((arena, bytes, host_offset), index)| {
            if end + bytes > self.buffer_bytes {
                (buffer, end) = (buffer + 1, 0);
            }
            end += bytes;
            Segment { arena, index, bytes, host_offset, buffer, offset: end - bytes }
        })
    }

    /// Staging buffers that `num_blocks` swapped blocks take.
    pub(super) fn num_buffers(&self, num_blocks: usize) -> usize {
        self.segments(num_blocks).last().map_or(0, |segment| segment.buffer + 1)
    }

    /// The ranges of `blocks`, those that can be copied at once as one.
    pub(super) fn runs(&self, blocks: &[SwappedBlock]) -> impl Iterator<Item = Run> {
        let arena_offset = |segment: &Segment| u64::from(blocks[segment.index].block) * segment.bytes;
        let mut segments = self.segments(blocks.len()).peekable();
        std::iter::from_fn(move || {
            let first = segments.next()?;
            let Segment { arena, buffer, offset, mut bytes, .. } = first;
            let start = arena_offset(&first);
            let follows = |next: &Segment, bytes| {
                next.arena == arena && next.buffer == buffer && arena_offset(next) == start + bytes
            };
            while let Some(next) = segments.next_if(|next| follows(next, bytes)) {
                bytes += next.bytes;
            }
            Some(Run { arena, arena_offset: start, buffer, offset, bytes })
        })
    }
}

/// Buffers of one kind and size.
#[derive(Debug)]
pub(super) struct StagingBuffers {
    label: &'static str,
    usage: BufferUsages,
    bytes: u64,
    idle: Vec<Buffer>,
    num_held: u64,
    num_created: u32,
}

impl StagingBuffers {
    /// To copy blocks to, unmapped while they are idle.
    pub(super) fn readable(label: &'static str, bytes: u64) -> Self {
        Self::new(label, BufferUsages::MAP_READ | BufferUsages::COPY_DST, bytes)
    }

    /// To copy blocks from, mapped while they are idle.
    pub(super) fn writable(label: &'static str, bytes: u64) -> Self {
        Self::new(label, BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC, bytes)
    }

    fn new(label: &'static str, usage: BufferUsages, bytes: u64) -> Self {
        Self { label, usage, bytes, idle: Vec::new(), num_held: 0, num_created: 0 }
    }

    /// Bytes of all buffers there are, idle or not.
    pub(super) fn held_bytes(&self) -> u64 {
        self.num_held * self.bytes
    }

    pub(super) fn num_created(&self) -> u32 {
        self.num_created
    }

    /// `count` buffers, new ones where too few are idle.
    ///
    /// # Errors
    /// When the device has no memory for one, refuses it, or is lost. None is taken then.
    pub(super) fn take(&mut self, device: &wgpu::Device, count: usize) -> Result<Vec<Buffer>, PrepareError> {
        let mut taken = self.idle.split_off(self.idle.len().saturating_sub(count));
        while taken.len() < count {
            match self.create(device) {
                Ok(buffer) => taken.push(buffer),
                Err(error) => {
                    self.give_back(taken);
                    return Err(error);
                }
            }
        }
        Ok(taken)
    }

    fn create(&mut self, device: &wgpu::Device) -> Result<Buffer, PrepareError> {
        let descriptor = BufferDescriptor {
            label: Some(self.label),
            size: self.bytes,
            usage: self.usage,
            mapped_at_creation: self.usage.contains(BufferUsages::MAP_WRITE),
        };
        let buffer =
            guarded(device, || device.create_buffer(&descriptor)).map_err(|refusal| match refusal {
                Refusal::Lost => PrepareError::DeviceLost,
                _ => PrepareError::StagingOutOfMemory {
                    asked_bytes: self.bytes,
                    held_bytes: self.held_bytes(),
                },
            })?;
        self.num_held += 1;
        self.num_created += 1;
        Ok(buffer)
    }

    /// Keeps buffers that are as idle ones must be, or lets go of them where enough are idle.
    pub(super) fn give_back(&mut self, buffers: Vec<Buffer>) {
        let room = MAX_IDLE_BUFFERS.saturating_sub(self.idle.len());
        self.num_held -= buffers.len().saturating_sub(room) as u64;
        self.idle.extend(buffers.into_iter().take(room));
    }

    /// Begins anew: their device is given up, and all that were taken have been given back or discarded.
    pub(super) fn clear(&mut self) {
        self.idle.clear();
        (self.num_held, self.num_created) = (0, 0);
    }

    /// Lets go of buffers.
    pub(super) fn discard(&mut self, buffers: Vec<Buffer>) {
        self.num_held -= buffers.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CacheConfig;
    use crate::model::{KvType, ModelShape};

    /// Arenas of two layers and one: 512 bytes of a block in the first, 256 in the second.
    fn layout(staging_bytes: u64) -> StagingLayout {
        let shape = ModelShape::new(3, 1, 1, 8);
        let config = CacheConfig::for_blocks(10, &shape, KvType::F32)
            .and_then(|config| config.with_block_size(4))
            .expect("a valid configuration");
        let arenas = config.arenas(2 * 256 * 10).expect("arenas");
        StagingLayout::new(&arenas, Some(staging_bytes), 1 << 20, 1 << 20)
    }

    fn blocks(blocks: &[u32]) -> Vec<SwappedBlock> {
        blocks.iter().map(|&block| SwappedBlock { block, host_slot: 0 }).collect()
    }

    #[test]
    fn ranges_lie_arena_by_arena_and_span_no_two_buffers() {
        let layout = layout(4 * 1500);
        assert_eq!((layout.range_bytes.as_slice(), layout.buffer_bytes), ([512, 256].as_slice(), 1488));
        let found: Vec<_> =
            layout.segments(3).map(|s| (s.arena, s.index, s.host_offset, s.buffer, s.offset)).collect();
        let expected = [
            (0, 0, 0, 0, 0),
            (0, 1, 0, 0, 512),
            (0, 2, 0, 1, 0),
            (1, 0, 512, 1, 512),
            (1, 1, 512, 1, 768),
            (1, 2, 512, 1, 1024),
        ];
        assert_eq!(found, expected);
        assert_eq!([0, 1, 2, 3].map(|blocks| layout.num_buffers(blocks)), [0, 1, 2, 2]);
    }

    #[test]
    fn ranges_of_consecutive_blocks_are_one_copy() {
        let layout = layout(4 * 1500);
        let found: Vec<_> = layout
            .runs(&blocks(&[3, 4, 5, 9]))
            .map(|run| (run.arena, run.arena_offset, run.buffer, run.offset, run.bytes))
            .collect();
        let expected = [
            (0, 3 * 512, 0, 0, 1024),
            (0, 5 * 512, 1, 0, 512),
            (0, 9 * 512, 1, 512, 512),
            (1, 3 * 256, 1, 1024, 256),
            (1, 4 * 256, 2, 0, 512),
            (1, 9 * 256, 2, 512, 256),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_buffer_holds_at_least_one_range_and_at_most_what_the_device_allows() {
        assert_eq!(layout(0).buffer_bytes, 512);
        assert_eq!(layout(u64::MAX).buffer_bytes, 1 << 20);
        assert_eq!(layout(0).num_buffers(3), 5, "two ranges of the second arena fit one buffer");
    }
}
