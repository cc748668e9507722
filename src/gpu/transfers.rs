//! Swaps between the arenas and the host pool: one transfer per prepared step that has any.
//!
//! A block that leaves is copied to a staging buffer in the step's commands, and the buffer is mapped when they have
//! completed; the block's bytes are in the host pool once [`Transfers::poll`] has found it mapped. A block that returns
//! is put into a mapped staging buffer when its step is prepared, and copied to the arenas in the step's commands, behind
//! everything that leaves; never by `Queue::write_buffer`, which would run before all commands of the submission.
//!
//! Every staging buffer of a step counts its arrival in one counter, by the callback of its mapping, which wgpu calls
//! when the submission has completed, or drops with an encoder that is never submitted. A transfer has arrived when all
//! have counted; it never will once no callback holds the counter any more.
//!
//! A submission that wgpu refuses maps its buffers all the same, and they hold what they held before. Therefore the
//! commands end with a copy of the step's number from its metadata, the *stamp*: without it, nothing has arrived.

use crate::config::CacheConfig;
use crate::error::PrepareError;
use crate::gpu::host_pool::{HostPool, SwappedBlock};
use crate::gpu::metadata::{MAX_SLOTS, has_swaps};
use crate::gpu::scope::guarded;
use crate::gpu::staging::{StagingBuffers, StagingLayout};
use crate::gpu::stats::AttentionStats;
use crate::ids::StepId;
use crate::layout::ArenaLayout;
use crate::schedule::{StepPlan, TransferReport};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use wgpu::{Buffer, CommandEncoder, MapMode};

/// Bytes of a stamp.
const STAMP_BYTES: u64 = 4;

/// One step's swaps, from `prepare` until their report.
struct Transfer {
    step: StepId,
    /// Both in the order of their blocks, so that neighbours are copied at once.
    outs: Vec<SwappedBlock>,
    ins: Vec<SwappedBlock>,
    staging: Staging,
    /// Buffers of `staging` that have been mapped since the submission completed.
    arrivals: Arc<AtomicU32>,
    is_recorded: bool,
}

/// A step's staging buffers.
struct Staging {
    /// What leaves, read by the host.
    readable: Vec<Buffer>,
    /// What returns, written by the host; mapped until it is recorded.
    writable: Vec<Buffer>,
    /// One buffer, with the stamp.
    stamp: Vec<Buffer>,
}

impl Transfer {
    /// Whether everything has arrived, as soon as that is certain.
    fn outcome(&mut self) -> Option<bool> {
        // Looked at first: a callback counts, then lets go of the counter.
        let is_abandoned = Arc::get_mut(&mut self.arrivals).is_some();
        let Staging { readable, writable, stamp } = &self.staging;
        let expected = readable.len() + writable.len() + stamp.len();
        let has_arrived = self.arrivals.load(Ordering::Acquire) as usize == expected;
        (has_arrived || is_abandoned).then_some(has_arrived)
    }
}

/// The host pool, the staging buffers, and the transfers in flight.
pub(super) struct Transfers {
    device: wgpu::Device,
    layout: StagingLayout,
    pool: HostPool,
    readable: StagingBuffers,
    writable: StagingBuffers,
    stamps: StagingBuffers,
    in_flight: Vec<Transfer>,
    /// Of transfers that ended with their device.
    ended: Vec<TransferReport>,
    block_bytes: u64,
    blocks_out: u64,
    blocks_in: u64,
}

impl Transfers {
    /// Takes no memory for blocks until some are swapped.
    pub(super) fn new(
        device: &wgpu::Device,
        cache: &CacheConfig,
        arenas: &ArenaLayout,
        staging_bytes: Option<u64>,
        max_buffer_bytes: u64,
    ) -> Self {
        let layout = StagingLayout::new(arenas, staging_bytes, cache.host_bytes(), max_buffer_bytes);
        let block_bytes = (0..arenas.num_arenas()).map(|arena| arenas.block_stride_bytes(arena)).sum();
        Self {
            device: device.clone(),
            pool: HostPool::new(block_bytes as usize),
            readable: StagingBuffers::readable("paged_kv.swap_out", layout.buffer_bytes),
            writable: StagingBuffers::writable("paged_kv.swap_in", layout.buffer_bytes),
            stamps: StagingBuffers::readable("paged_kv.swap_stamp", STAMP_BYTES),
            layout,
            in_flight: Vec::new(),
            ended: Vec::new(),
            block_bytes,
            blocks_out: 0,
            blocks_in: 0,
        }
    }

    /// Claims the slots of what leaves, and stages what returns. The counter goes with the step and from it to
    /// [`record`](Self::record); without swaps there is none.
    ///
    /// # Errors
    /// When a slot holds no block to return, too many transfers have not been collected, or there is no memory for
    /// staging. Nothing is claimed then.
    pub(super) fn prepare(&mut self, plan: &StepPlan) -> Result<Option<Arc<AtomicU32>>, PrepareError> {
        if !has_swaps(plan) {
            return Ok(None);
        }
        if self.in_flight.len() == MAX_SLOTS {
            return Err(PrepareError::TransfersInFlight { max: MAX_SLOTS as u32 });
        }
        let outs = in_order(plan.swap_outs().iter().map(|swap| (swap.block, swap.host_slot)));
        let ins = in_order(plan.swap_ins().iter().map(|swap| (swap.block, swap.host_slot)));
        let staging = self.stage(outs.len(), &ins)?;
        self.pool.claim(&outs, plan.step());
        let arrivals = Arc::<AtomicU32>::default();
        let transfer = Transfer {
            step: plan.step(),
            outs,
            ins,
            staging,
            arrivals: Arc::clone(&arrivals),
            is_recorded: false,
        };
        self.in_flight.push(transfer);
        Ok(Some(arrivals))
    }

    /// Staging for so many blocks that leave, and for `ins` with their bytes.
    fn stage(&mut self, num_outs: usize, ins: &[SwappedBlock]) -> Result<Staging, PrepareError> {
        ins.iter().try_for_each(|swap| self.pool.block(swap.host_slot).map(|_| ()))?;
        let mut staging = Staging { readable: Vec::new(), writable: Vec::new(), stamp: Vec::new() };
        let result = self.take_and_fill(&mut staging, num_outs, ins);
        if let Err(error) = result {
            self.give_back(staging);
            return Err(error);
        }
        Ok(staging)
    }

    fn take_and_fill(
        &mut self,
        staging: &mut Staging,
        num_outs: usize,
        ins: &[SwappedBlock],
    ) -> Result<(), PrepareError> {
        staging.stamp = self.stamps.take(&self.device, 1)?;
        staging.readable = self.readable.take(&self.device, self.layout.num_buffers(num_outs))?;
        staging.writable = self.writable.take(&self.device, self.layout.num_buffers(ins.len()))?;
        for segment in self.layout.segments(ins.len()) {
            let buffer = &staging.writable[segment.buffer];
            let Ok(mut view) = buffer.get_mapped_range_mut(segment.offset..segment.offset + segment.bytes)
            else {
                // Only of a device that is lost can an idle buffer be without its mapping.
                self.writable.discard(std::mem::take(&mut staging.writable));
                return Err(PrepareError::DeviceLost);
            };
            let block = self.pool.block(ins[segment.index].host_slot)?;
            view.copy_from_slice(&block[segment.host_range()]);
        }
        Ok(())
    }

    /// Records what leaves, then what returns, then the stamp, and has all of it mapped after the submission.
    ///
    /// `stamp` is where the step's number lies. The commands hold the counter, until they have completed or are dropped.
    pub(super) fn record(
        &mut self,
        encoder: &mut CommandEncoder,
        arenas: &[Buffer],
        stamp: (&Buffer, u64),
        arrivals: &Arc<AtomicU32>,
    ) {
        let mut in_flight = self.in_flight.iter_mut();
        let Some(transfer) = in_flight.find(|transfer| Arc::ptr_eq(&transfer.arrivals, arrivals)) else {
            return;
        };
        transfer.is_recorded = true;
        let Staging { readable, writable, stamp: stamps } = &transfer.staging;
        encoder.push_debug_group("paged_kv.swap");
        let mut filled_bytes = vec![0; readable.len()];
        for run in self.layout.runs(&transfer.outs) {
            let (arena, buffer) = (&arenas[run.arena], &readable[run.buffer]);
            encoder.copy_buffer_to_buffer(arena, run.arena_offset, buffer, run.offset, run.bytes);
            filled_bytes[run.buffer] = run.offset + run.bytes;
        }
        // What a lost device has to say of it, it says of the submission as well.
        let _ = guarded(&self.device, || writable.iter().for_each(Buffer::unmap));
        for run in self.layout.runs(&transfer.ins) {
            let (arena, buffer) = (&arenas[run.arena], &writable[run.buffer]);
            encoder.copy_buffer_to_buffer(buffer, run.offset, arena, run.arena_offset, run.bytes);
        }
        let (metadata, offset) = stamp;
        for buffer in stamps {
            encoder.copy_buffer_to_buffer(metadata, offset, buffer, 0, STAMP_BYTES);
        }
        encoder.pop_debug_group();
        let map = |buffer: &Buffer, mode, bytes| {
            let arrivals = Arc::clone(arrivals);
            encoder.map_buffer_on_submit(buffer, mode, ..bytes, move |mapped| {
                arrivals.fetch_add(u32::from(mapped.is_ok()), Ordering::Release);
            });
        };
        readable.iter().zip(filled_bytes).for_each(|(buffer, bytes)| map(buffer, MapMode::Read, bytes));
        writable.iter().for_each(|buffer| map(buffer, MapMode::Write, buffer.size()));
        stamps.iter().for_each(|buffer| map(buffer, MapMode::Read, STAMP_BYTES));
    }

    /// Collects the transfers whose end is known, one report for each.
    pub(super) fn poll(&mut self) -> Vec<TransferReport> {
        let mut reports = std::mem::take(&mut self.ended);
        let mut index = 0;
        while let Some(transfer) = self.in_flight.get_mut(index) {
            match transfer.outcome() {
                None => index += 1,
                Some(has_arrived) => {
                    let transfer = self.in_flight.remove(index);
                    reports.push(self.end(transfer, has_arrived));
                }
            }
        }
        reports
    }

    /// Ends all transfers, for the device is given up: what has arrived by now is kept, and the rest never will. The next
    /// [`poll`](Self::poll) reports them.
    pub(super) fn abandon(&mut self) {
        let mut reports = self.poll();
        for transfer in std::mem::take(&mut self.in_flight) {
            reports.push(self.end(transfer, false));
        }
        self.ended = reports;
        for staging in [&mut self.readable, &mut self.writable, &mut self.stamps] {
            staging.clear();
        }
    }

    /// Begins anew for another cache: what is under way ends without a report, and the host pool is empty.
    pub(super) fn restart(&mut self) {
        self.abandon();
        self.ended.clear();
        self.pool = HostPool::new(self.block_bytes as usize);
    }

    /// Counts on from where `old` was.
    pub(super) fn count_on(&mut self, old: &Self) {
        (self.blocks_out, self.blocks_in) = (old.blocks_out, old.blocks_in);
    }

    /// Takes over the host pool, the reports and the counts of `old`, which was abandoned.
    pub(super) fn succeed(&mut self, old: &mut Self) {
        std::mem::swap(&mut self.pool, &mut old.pool);
        std::mem::swap(&mut self.ended, &mut old.ended);
        self.count_on(old);
    }

    fn end(&mut self, transfer: Transfer, has_arrived: bool) -> TransferReport {
        let complete = has_arrived && self.collect(&transfer);
        let Transfer { step, outs, ins, staging, is_recorded, .. } = transfer;
        self.blocks_out += self.pool.settle(&outs, step, complete);
        self.blocks_in += if complete { ins.len() as u64 } else { 0 };
        if has_arrived {
            let readable = staging.readable.iter().chain(&staging.stamp);
            let _ = guarded(&self.device, || readable.for_each(Buffer::unmap));
        }
        if has_arrived || !is_recorded {
            self.give_back(staging);
        } else {
            // Not mapped, and perhaps never to be: not worth the waiting.
            self.readable.discard(staging.readable);
            self.writable.discard(staging.writable);
            self.stamps.discard(staging.stamp);
        }
        TransferReport { step, complete }
    }

    /// Copies what has arrived to the slots that still wait for it; whether everything was there.
    fn collect(&mut self, transfer: &Transfer) -> bool {
        let Transfer { step, outs, staging, .. } = transfer;
        let expected = (step.raw() as u32).to_ne_bytes();
        let has_stamp = |buffer: &Buffer| buffer.get_mapped_range(..).is_ok_and(|view| *view == expected);
        if !staging.stamp.iter().all(has_stamp) || !self.pool.reserve(outs, *step) {
            return false;
        }
        for segment in self.layout.segments(outs.len()) {
            let Some(bytes) = self.pool.awaited(outs[segment.index].host_slot, *step) else {
                continue;
            };
            let buffer = &staging.readable[segment.buffer];
            let Ok(view) = buffer.get_mapped_range(segment.offset..segment.offset + segment.bytes) else {
                return false;
            };
            bytes[segment.host_range()].copy_from_slice(&view);
        }
        true
    }

    fn give_back(&mut self, staging: Staging) {
        self.readable.give_back(staging.readable);
        self.writable.give_back(staging.writable);
        self.stamps.give_back(staging.stamp);
    }

    /// Adds the counts of transfers to `stats`.
    pub(super) fn add_to(&self, stats: AttentionStats) -> AttentionStats {
        let staging = [&self.readable, &self.writable, &self.stamps];
        let created: u32 = staging.iter().map(|buffers| buffers.num_created()).sum();
        AttentionStats {
            buffers_created: stats.buffers_created + created,
            staging_bytes: staging.iter().map(|buffers| buffers.held_bytes()).sum(),
            host_pool_bytes: self.pool.bytes(),
            swapped_out_blocks: self.blocks_out,
            swapped_out_bytes: self.blocks_out * self.block_bytes,
            swapped_in_blocks: self.blocks_in,
            swapped_in_bytes: self.blocks_in * self.block_bytes,
            ..stats
        }
    }
}

fn in_order(swaps: impl Iterator<Item = (u32, u32)>) -> Vec<SwappedBlock> {
    let mut blocks: Vec<_> = swaps.map(|(block, host_slot)| SwappedBlock { block, host_slot }).collect();
    blocks.sort_unstable_by_key(|swap| swap.block);
    blocks
}
