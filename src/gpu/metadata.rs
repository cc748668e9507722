//! A step's metadata on its way to the device: one packed array of words, one copy, one slot per step in flight.
//!
//! ```text
//! slot: │ header │ (headers of further dispatches) │ token_ids │ positions │ slots │ query_starts │ context_lens │
//!       │ table_rows │ decode items │ prefill items │ merge items │ block copies │ changed entries │ stamp │
//! ```
//!
//! A slot is leased to a step until every submission that reads it has completed: the step holds a clone of the lease,
//! and so does a callback in every encoder that the step was recorded into, whether it is called or dropped. The next
//! step meanwhile takes another slot.
//!
//! The words are put into a mapped buffer of the slot when the step is prepared, and copied to where the shaders read them
//! by the step's own commands; then the buffer is mapped again. `Queue::write_buffer` would keep every upload until the
//! next submission, and an application that does not draw (its window is hidden, say) may prepare steps for hours without
//! one. What a step that is dropped has taken here is free at once: where its commands unmapped the buffer, the next step
//! that is given the slot makes a new one.
//!
//! An application can submit a step's layers without the copy. They then read what the slot held before, and that must be
//! harmless: every word that a header is read from is a header of an earlier step of the slot or zero, so all slots have
//! as many headers as any step has needed; and an earlier step may have had more rows than the tensors that are bound, so
//! the shaders compare the two.

use crate::error::PrepareError;
use crate::gpu::lease::Lease;
use crate::gpu::params::{STEP_PARAMS_WORDS, StepParams};
use crate::gpu::pipelines::Layouts;
use crate::gpu::scope::{Refusal, guarded, is_lost};
use crate::schedule::{PrefillItem, StepPlan, TableChange, WorkSplit};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use wgpu::{
    BindGroupDescriptor, BindGroupEntry, BindingResource, Buffer, BufferBinding, BufferDescriptor,
    BufferUsages, CommandEncoder, MapMode,
};

/// Most steps that may be prepared or in flight at once.
pub(super) const MAX_SLOTS: usize = 8;

/// Words of a new slot; it grows to a power of two when a step needs more.
const FIRST_SLOT_WORDS: u64 = 4096;

/// What a step needs to be recorded, kept in its slot.
#[derive(Debug, Default)]
pub(super) struct StepRecord {
    pub(super) params: StepParams,
    /// Bytes of all words.
    pub(super) bytes: u64,
    /// Items of each decode and prefill dispatch; dispatch `i` has header `i`.
    pub(super) decode_dispatches: Vec<u32>,
    pub(super) prefill_dispatches: Vec<u32>,
    /// Groups of rows, if there are any: the headers of a group's prefill dispatches, and how many rows it merges by the
    /// header of its own number.
    pub(super) groups: Vec<(Range<u32>, u32)>,
    pub(super) table_changes: Vec<TableChange>,
    /// First word of the changed entries.
    pub(super) changed_entries: u32,
    /// Copies of a block into another one: self-copies are left out.
    pub(super) num_block_copies: u32,
    /// Where the low word of the step's number is, in a step that swaps blocks.
    pub(super) stamp: u32,
}

/// Buffers, bind group and lease of one step in flight.
pub(super) struct Slot {
    lease: Arc<Lease>,
    capacity_words: u64,
    num_headers: u32,
    staging: Staging,
    pub(super) buffer: Buffer,
    pub(super) group: wgpu::BindGroup,
    pub(super) record: StepRecord,
}

/// Where the host writes a step's words.
struct Staging {
    buffer: Buffer,
    is_mapped: Arc<AtomicBool>,
}

impl Slot {
    /// The words on the host's side, in the same order.
    pub(super) fn staging(&self) -> &Buffer {
        &self.staging.buffer
    }

    /// Records the copy of the step's words, and has the host's side mapped again when it has been made.
    pub(super) fn record_upload(&self, encoder: &mut CommandEncoder) {
        let Staging { buffer, is_mapped } = &self.staging;
        is_mapped.store(false, Ordering::Relaxed);
        buffer.unmap();
        encoder.copy_buffer_to_buffer(buffer, 0, &self.buffer, 0, self.record.bytes);
        let is_mapped = Arc::clone(is_mapped);
        encoder.map_buffer_on_submit(buffer, MapMode::Write, .., move |mapped| {
            is_mapped.store(mapped.is_ok(), Ordering::Release);
        });
    }
}

/// What all slots are bound with, and how they are laid out.
pub(super) struct SlotContext<'a> {
    pub(super) device: &'a wgpu::Device,
    pub(super) layouts: &'a Layouts,
    pub(super) tables: &'a wgpu::Buffer,
    pub(super) layers: &'a wgpu::Buffer,
    pub(super) layer_params_bytes: u64,
    pub(super) max_binding_bytes: u64,
}

/// The slots, and the words of the step at hand.
#[derive(Default)]
pub(super) struct MetadataSlots {
    slots: Vec<Slot>,
    words: Vec<u32>,
    /// Headers of every slot: as many as a step has needed, rounded up to a power of two.
    num_headers: u32,
    /// Created so far.
    pub(super) num_buffers: u32,
    pub(super) num_groups: u32,
}

impl MetadataSlots {
    pub(super) fn slot(&self, index: usize) -> &Slot {
        &self.slots[index]
    }

    /// Counts what is created from now on.
    pub(super) fn restart_counts(&mut self) {
        (self.num_buffers, self.num_groups) = (0, 0);
    }

    /// Whether the commands of the step that had a slot last have run, as soon as that is certain.
    pub(super) fn outcome(&mut self, index: usize) -> Option<bool> {
        Lease::outcome(&mut self.slots[index].lease)
    }

    /// Bytes of all slots, on both sides.
    pub(super) fn bytes(&self) -> u64 {
        self.slots.iter().map(|slot| 2 * slot.capacity_words * 4).sum()
    }

    /// Makes two slots, so that a step can be prepared while another is on the device.
    pub(super) fn fill(&mut self, context: &SlotContext<'_>) -> Result<(), PrepareError> {
        self.num_headers = self.num_headers.max(1);
        while self.slots.len() < 2 {
            self.add_slot(context, FIRST_SLOT_WORDS)?;
        }
        Ok(())
    }

    /// Packs the step into a free slot and returns the slot's index and its lease.
    pub(super) fn pack(
        &mut self,
        context: &SlotContext<'_>,
        plan: &StepPlan,
        split: &WorkSplit,
        header_words: u32,
    ) -> Result<(usize, Arc<Lease>), PrepareError> {
        let num_headers = num_headers(split).next_power_of_two().max(self.num_headers);
        let arrays_start = (num_headers - 1) * header_words + STEP_PARAMS_WORDS;
        let words = u64::from(arrays_start) + count_words(plan, split);
        if words * 4 > context.max_binding_bytes {
            return Err(PrepareError::MetadataTooLarge {
                bytes: words * 4,
                max_bytes: context.max_binding_bytes,
            });
        }
        self.num_headers = num_headers;
        let index = self.free_slot(context, words)?;
        let slot = &mut self.slots[index];
        if !slot.staging.is_mapped.load(Ordering::Acquire) {
            slot.staging = create_staging(context.device, slot.capacity_words * 4)?;
            self.num_buffers += 1;
        }
        self.words.clear();
        self.words.resize(arrays_start as usize, 0);
        pack(plan, split, header_words, &mut self.words, &mut slot.record);
        let bytes: &[u8] = bytemuck::cast_slice(&self.words);
        slot.record.bytes = bytes.len() as u64;
        match slot.staging.buffer.get_mapped_range_mut(..slot.record.bytes) {
            // A mapping outlives its device.
            Ok(_) if is_lost(context.device) => Err(PrepareError::DeviceLost),
            Ok(mut view) => {
                view.copy_from_slice(bytes);
                Ok((index, Arc::clone(&slot.lease)))
            }
            // Only of a device that is lost can a mapped buffer be without its mapping.
            Err(_) => Err(PrepareError::DeviceLost),
        }
    }

    /// A slot that no step and no submission holds, with room for `words`.
    fn free_slot(&mut self, context: &SlotContext<'_>, words: u64) -> Result<usize, PrepareError> {
        // `get_mut` also makes sure that the last holder of the lease is done with it.
        let is_free = |slot: &mut Slot| match Arc::get_mut(&mut slot.lease) {
            Some(lease) => {
                *lease = Lease::default();
                true
            }
            None => false,
        };
        let free = self.slots.iter_mut().position(is_free);
        let Some(index) = free else {
            if self.slots.len() == MAX_SLOTS {
                return Err(PrepareError::StepsInFlight { max: MAX_SLOTS as u32 });
            }
            self.add_slot(context, words)?;
            return Ok(self.slots.len() - 1);
        };
        let slot = &mut self.slots[index];
        if slot.capacity_words < words || slot.num_headers < self.num_headers {
            let record = std::mem::take(&mut slot.record);
            let max_words = context.max_binding_bytes / 4;
            let words = words.next_power_of_two().max(slot.capacity_words).min(max_words);
            *slot = create_slot(context, words, self.num_headers, record)?;
            self.num_buffers += 2;
            self.num_groups += 1;
        }
        Ok(index)
    }

    fn add_slot(&mut self, context: &SlotContext<'_>, words: u64) -> Result<(), PrepareError> {
        let words = words.next_power_of_two().max(FIRST_SLOT_WORDS).min(context.max_binding_bytes / 4);
        self.slots.push(create_slot(context, words, self.num_headers, StepRecord::default())?);
        self.num_buffers += 2;
        self.num_groups += 1;
        Ok(())
    }
}

fn create_staging(device: &wgpu::Device, bytes: u64) -> Result<Staging, PrepareError> {
    let descriptor = BufferDescriptor {
        label: Some("paged_kv.metadata_staging"),
        size: bytes,
        usage: BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC,
        mapped_at_creation: true,
    };
    let buffer = guarded(device, || device.create_buffer(&descriptor))
        .map_err(|refusal| prepare_error(refusal, bytes))?;
    Ok(Staging { buffer, is_mapped: Arc::new(AtomicBool::new(true)) })
}

fn prepare_error(refusal: Refusal, asked_bytes: u64) -> PrepareError {
    match refusal {
        Refusal::Lost => PrepareError::DeviceLost,
        _ => PrepareError::OutOfMemory { asked_bytes },
    }
}

fn create_slot(
    context: &SlotContext<'_>,
    capacity_words: u64,
    num_headers: u32,
    record: StepRecord,
) -> Result<Slot, PrepareError> {
    let bytes = capacity_words * 4;
    let descriptor = BufferDescriptor {
        label: Some("paged_kv.metadata"),
        size: bytes,
        usage: BufferUsages::UNIFORM
            | BufferUsages::STORAGE
            | BufferUsages::COPY_DST
            | BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    };
    let create = || {
        let buffer = context.device.create_buffer(&descriptor);
        let window = |buffer, size| BindingResource::Buffer(BufferBinding { buffer, offset: 0, size });
        let header_bytes = u64::from(STEP_PARAMS_WORDS) * 4;
        let resources = [
            window(&buffer, header_bytes.try_into().ok()),
            buffer.as_entire_binding(),
            context.tables.as_entire_binding(),
            window(context.layers, context.layer_params_bytes.try_into().ok()),
        ];
        let entries: Vec<_> =
            (0..).zip(resources).map(|(binding, resource)| BindGroupEntry { binding, resource }).collect();
        let group = context.device.create_bind_group(&BindGroupDescriptor {
            label: Some("paged_kv.step"),
            layout: &context.layouts.step,
            entries: &entries,
        });
        (buffer, group)
    };
    let staging = create_staging(context.device, bytes)?;
    let (buffer, group) = guarded(context.device, create).map_err(|refusal| prepare_error(refusal, bytes))?;
    Ok(Slot { lease: Arc::default(), capacity_words, num_headers, staging, buffer, group, record })
}

/// Headers that the step needs: one, or as many as its longest list of dispatches (a group has one at least). They lie `header_words` apart, and the
/// arrays follow the last one directly.
pub(super) fn num_headers(split: &WorkSplit) -> u32 {
    split.decode_dispatches.len().max(split.prefill_dispatches.len()).max(1) as u32
}

/// Words of all arrays.
fn count_words(plan: &StepPlan, split: &WorkSplit) -> u64 {
    3 * u64::from(plan.num_rows())
        + plan.query_starts().len() as u64
        + 2 * u64::from(plan.num_sequences())
        + 4 * (split.decode_items.len() + split.merge_items.len()) as u64
        + u64::from(PrefillItem::WORDS) * split.prefill_items.len() as u64
        + 2 * plan.block_copies().len() as u64
        + plan.changed_entries().len() as u64
        + u64::from(has_swaps(plan))
}

/// Whether the plan moves blocks to or from the host pool.
pub(super) fn has_swaps(plan: &StepPlan) -> bool {
    !plan.swap_outs().is_empty() || !plan.swap_ins().is_empty()
}

/// Appends the arrays to `words`, which has room for the headers, and writes those that are needed.
pub(super) fn pack(
    plan: &StepPlan,
    split: &WorkSplit,
    header_words: u32,
    words: &mut Vec<u32>,
    record: &mut StepRecord,
) {
    let mut append = |array: &mut dyn Iterator<Item = u32>| {
        let start = words.len() as u32;
        words.extend(array);
        start
    };
    let params = StepParams {
        num_rows: plan.num_rows(),
        token_ids: append(&mut plan.token_ids().iter().copied()),
        positions: append(&mut plan.positions().iter().copied()),
        slot_mapping: append(&mut plan.slot_mapping().iter().copied()),
        query_starts: append(&mut plan.query_starts().iter().copied()),
        context_lens: append(&mut plan.context_lens().iter().copied()),
        table_rows: append(&mut plan.table_rows().iter().copied()),
        decode_items: append(
            &mut split
                .decode_items
                .iter()
                .flat_map(|item| [item.sequence, item.first_token, item.end_token, item.partial]),
        ),
        num_decode_items: 0,
        prefill_items: append(&mut split.prefill_items.iter().flat_map(PrefillItem::words)),
        num_prefill_items: 0,
        merge_items: append(
            &mut split
                .merge_items
                .iter()
                .flat_map(|item| [item.row, item.first_partial, item.num_partials, 0]),
        ),
        num_merge_items: split.merge_items.len() as u32,
        block_copies: 0,
        num_block_copies: 0,
        padding: 0,
    };
    let copies = plan.block_copies().iter().filter(|copy| copy.source != copy.destination);
    let block_copies = append(&mut copies.clone().flat_map(|copy| [copy.source, copy.destination]));
    record.num_block_copies = copies.count() as u32;
    record.changed_entries = append(&mut plan.changed_entries().iter().copied());
    record.stamp = append(&mut has_swaps(plan).then_some(plan.step().raw() as u32).into_iter());
    record.params = StepParams { block_copies, num_block_copies: record.num_block_copies, ..params };
    record.table_changes.clear();
    record.table_changes.extend_from_slice(plan.table_changes());
    write_headers(split, header_words, words, record);
}

/// Writes one header per dispatch: the same but for the dispatch's own items.
fn write_headers(split: &WorkSplit, header_words: u32, words: &mut [u32], record: &mut StepRecord) {
    record.decode_dispatches.clear();
    record.prefill_dispatches.clear();
    record.groups.clear();
    for header in 0..num_headers(split) as usize {
        let mut params = record.params;
        if let Some(range) = split.decode_dispatches.get(header) {
            params.decode_items += 4 * range.start;
            params.num_decode_items = range.end - range.start;
            record.decode_dispatches.push(params.num_decode_items);
        }
        if let Some(range) = split.prefill_dispatches.get(header) {
            params.prefill_items += PrefillItem::WORDS * range.start;
            params.num_prefill_items = range.end - range.start;
            record.prefill_dispatches.push(params.num_prefill_items);
        }
        if let Some(group) = split.groups.get(header) {
            params.merge_items += 4 * group.merge_items.start;
            params.num_merge_items = group.merge_items.end - group.merge_items.start;
            record.groups.push((group.prefill_dispatches.clone(), params.num_merge_items));
        }
        let start = header * header_words as usize;
        words[start..start + STEP_PARAMS_WORDS as usize].copy_from_slice(bytemuck::cast_slice(&[params]));
    }
}
