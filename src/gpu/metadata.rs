//! A step's metadata on its way to the device: one packed array of words, one copy, one slot per step in flight.
//!
//! ```text
//! slot: │ header │ (headers of further dispatches) │ token_ids │ positions │ slots │ query_starts │ context_lens │
//!       │ table_rows │ decode items │ prefill items │ merge items │ block copies │ changed entries │ stamp │
//! ```
//!
//! Where a model has several groups of layers, each has items of its own, and each stack of layers its slots, its changed
//! entries and its headers: as many for every stack.
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
use crate::schedule::{PrefillItem, StackPlan, StepPlan, TableChange, WorkSplit};
use std::num::NonZeroU64;
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
    /// First word of each stack's slots.
    slots: Vec<u32>,
    /// Headers of each stack.
    num_headers: u32,
    /// Of each group of layers.
    pub(super) groups: Vec<GroupRecord>,
    /// Changes of the tables of a stack; where the entries start is a word of the slot.
    pub(super) table_changes: Vec<(u32, TableChange)>,
    /// Copies of a block into another one: self-copies are left out.
    pub(super) num_block_copies: u32,
    /// Where the low word of the step's number is, in a step that swaps blocks.
    pub(super) stamp: u32,
}

/// The dispatches of one group of layers.
#[derive(Debug, Default)]
pub(super) struct GroupRecord {
    /// Items of each decode and prefill dispatch; dispatch `i` has header `i`.
    pub(super) decode_dispatches: Vec<u32>,
    pub(super) prefill_dispatches: Vec<u32>,
    /// Groups of rows, if there are any: the headers of a group's prefill dispatches, and how many rows it merges by the
    /// header of its own number.
    pub(super) row_groups: Vec<(Range<u32>, u32)>,
    /// Rows to merge, all of them.
    pub(super) num_merge_items: u32,
    /// First words of the decode, prefill and merge items.
    items: [u32; 3],
}

/// Buffers, bind groups and lease of one step in flight.
pub(super) struct Slot {
    lease: Arc<Lease>,
    capacity_words: u64,
    /// Of each stack.
    num_headers: u32,
    staging: Staging,
    pub(super) buffer: Buffer,
    /// One per stack of layers, with its block tables.
    pub(super) groups: Vec<wgpu::BindGroup>,
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

    /// A header of a stack, among those of all.
    pub(super) fn header_of(&self, stack: u32, header: u32) -> u32 {
        stack * self.record.num_headers + header
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
    /// Where each stack's lie in it.
    pub(super) table_windows: &'a [Range<u64>],
    /// The group of layers of each stack.
    pub(super) stack_groups: &'a [u32],
    pub(super) layers: &'a wgpu::Buffer,
    pub(super) layer_params_bytes: u64,
    pub(super) max_binding_bytes: u64,
}

/// The slots, and the words of the step at hand.
#[derive(Default)]
pub(super) struct MetadataSlots {
    slots: Vec<Slot>,
    words: Vec<u32>,
    /// Headers of each stack in every slot: as many as a step has needed, rounded up to a power of two.
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
        splits: &[WorkSplit],
        header_words: u32,
    ) -> Result<(usize, Arc<Lease>), PrepareError> {
        let num_headers = num_headers(splits).next_power_of_two().max(self.num_headers);
        let headers = Headers { count: num_headers, words: header_words, groups: context.stack_groups };
        let arrays_start = headers.end();
        let words = u64::from(arrays_start) + count_words(plan, splits);
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
        pack(plan, splits, &headers, &mut self.words, &mut slot.record);
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
            self.num_groups += context.table_windows.len() as u32;
        }
        Ok(index)
    }

    fn add_slot(&mut self, context: &SlotContext<'_>, words: u64) -> Result<(), PrepareError> {
        let words = words.next_power_of_two().max(FIRST_SLOT_WORDS).min(context.max_binding_bytes / 4);
        self.slots.push(create_slot(context, words, self.num_headers, StepRecord::default())?);
        self.num_buffers += 2;
        self.num_groups += context.table_windows.len() as u32;
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
        let header_bytes = u64::from(STEP_PARAMS_WORDS) * 4;
        let of_stack = |tables: &Range<u64>| {
            let resources = [
                window(&buffer, &(0..header_bytes)),
                buffer.as_entire_binding(),
                window(context.tables, tables),
                window(context.layers, &(0..context.layer_params_bytes)),
            ];
            let entries: Vec<_> = (0..)
                .zip(resources)
                .map(|(binding, resource)| BindGroupEntry { binding, resource })
                .collect();
            context.device.create_bind_group(&BindGroupDescriptor {
                label: Some("paged_kv.step"),
                layout: &context.layouts.step,
                entries: &entries,
            })
        };
        let groups: Vec<_> = context.table_windows.iter().map(of_stack).collect();
        (buffer, groups)
    };
    let staging = create_staging(context.device, bytes)?;
    let (buffer, groups) =
        guarded(context.device, create).map_err(|refusal| prepare_error(refusal, bytes))?;
    Ok(Slot { lease: Arc::default(), capacity_words, num_headers, staging, buffer, groups, record })
}

/// Some bytes of a buffer.
fn window<'a>(buffer: &'a Buffer, bytes: &Range<u64>) -> BindingResource<'a> {
    let size = NonZeroU64::new(bytes.end - bytes.start);
    BindingResource::Buffer(BufferBinding { buffer, offset: bytes.start, size })
}

/// Headers that each stack needs: one, or as many as the longest list of dispatches of any group (a group of rows has one
/// at least).
pub(super) fn num_headers(splits: &[WorkSplit]) -> u32 {
    let of_split = |split: &WorkSplit| split.decode_dispatches.len().max(split.prefill_dispatches.len());
    splits.iter().map(of_split).max().unwrap_or(0).max(1) as u32
}

/// How a step's headers lie: stack after stack. The arrays follow the last one directly.
pub(super) struct Headers<'a> {
    /// Of each stack.
    pub(super) count: u32,
    /// Words from one to the next.
    pub(super) words: u32,
    /// The group of each stack.
    pub(super) groups: &'a [u32],
}

impl Headers<'_> {
    /// Where the arrays begin.
    pub(super) fn end(&self) -> u32 {
        (self.count * self.groups.len() as u32 - 1) * self.words + STEP_PARAMS_WORDS
    }
}

/// Words of all arrays.
fn count_words(plan: &StepPlan, splits: &[WorkSplit]) -> u64 {
    let items = |split: &WorkSplit| {
        4 * (split.decode_items.len() + split.merge_items.len()) as u64
            + u64::from(PrefillItem::WORDS) * split.prefill_items.len() as u64
    };
    let of_stack = |stack: &StackPlan| (stack.slot_mapping().len() + stack.changed_entries().len()) as u64;
    2 * u64::from(plan.num_rows())
        + plan.query_starts().len() as u64
        + 2 * u64::from(plan.num_sequences())
        + splits.iter().map(items).sum::<u64>()
        + plan.stacks().iter().map(of_stack).sum::<u64>()
        + 2 * plan.block_copies().len() as u64
        + u64::from(has_swaps(plan))
}

/// Whether the plan moves blocks to or from the host pool.
pub(super) fn has_swaps(plan: &StepPlan) -> bool {
    !plan.swap_outs().is_empty() || !plan.swap_ins().is_empty()
}

/// Appends the arrays to `words`, which has room for the headers, and writes those that are needed.
pub(super) fn pack(
    plan: &StepPlan,
    splits: &[WorkSplit],
    headers: &Headers<'_>,
    words: &mut Vec<u32>,
    record: &mut StepRecord,
) {
    let mut append = |array: &mut dyn Iterator<Item = u32>| {
        let start = words.len() as u32;
        words.extend(array);
        start
    };
    let mut params = StepParams {
        num_rows: plan.num_rows(),
        token_ids: append(&mut plan.token_ids().iter().copied()),
        positions: append(&mut plan.positions().iter().copied()),
        ..StepParams::default()
    };
    record.slots.clear();
    for stack in plan.stacks() {
        record.slots.push(append(&mut stack.slot_mapping().iter().copied()));
    }
    params.query_starts = append(&mut plan.query_starts().iter().copied());
    params.context_lens = append(&mut plan.context_lens().iter().copied());
    params.table_rows = append(&mut plan.table_rows().iter().copied());
    record.groups.resize_with(splits.len(), GroupRecord::default);
    for (group, split) in record.groups.iter_mut().zip(splits) {
        let decode_items = split.decode_items.iter();
        let merge_items = split.merge_items.iter();
        group.items = [
            append(
                &mut decode_items
                    .flat_map(|item| [item.sequence, item.first_token, item.end_token, item.partial]),
            ),
            append(&mut split.prefill_items.iter().flat_map(PrefillItem::words)),
            append(&mut merge_items.flat_map(|item| [item.row, item.first_partial, item.num_partials, 0])),
        ];
    }
    let copies = plan.block_copies().iter().filter(|copy| copy.source != copy.destination);
    params.block_copies = append(&mut copies.clone().flat_map(|copy| [copy.source, copy.destination]));
    params.num_block_copies = copies.count() as u32;
    record.num_block_copies = params.num_block_copies;
    record.table_changes.clear();
    for (number, stack) in (0..).zip(plan.stacks()) {
        let start = append(&mut stack.changed_entries().iter().copied());
        let changes = stack.table_changes().iter();
        let changes = changes.map(|change| (number, TableChange { start: start + change.start, ..*change }));
        record.table_changes.extend(changes);
    }
    record.stamp = append(&mut has_swaps(plan).then_some(plan.step().raw() as u32).into_iter());
    record.params = params;
    record.num_headers = headers.count;
    for (group, split) in record.groups.iter_mut().zip(splits) {
        group.note_dispatches(split);
    }
    write_headers(splits, headers, words, record);
}

impl GroupRecord {
    fn note_dispatches(&mut self, split: &WorkSplit) {
        let count = |range: &Range<u32>| range.end - range.start;
        self.decode_dispatches.clear();
        self.decode_dispatches.extend(split.decode_dispatches.iter().map(count));
        self.prefill_dispatches.clear();
        self.prefill_dispatches.extend(split.prefill_dispatches.iter().map(count));
        self.row_groups.clear();
        let row_groups = split.groups.iter();
        self.row_groups
            .extend(row_groups.map(|rows| (rows.prefill_dispatches.clone(), count(&rows.merge_items))));
        self.num_merge_items = split.merge_items.len() as u32;
    }
}

/// Writes one header per stack and dispatch: the same but for the stack's slots and the dispatch's own items.
fn write_headers(splits: &[WorkSplit], headers: &Headers<'_>, words: &mut [u32], record: &StepRecord) {
    for (stack, &group) in headers.groups.iter().enumerate() {
        let (split, group) = (&splits[group as usize], &record.groups[group as usize]);
        let [decode_items, prefill_items, merge_items] = group.items;
        for header in 0..num_headers(splits) as usize {
            let mut params = StepParams {
                // A plan without rows may have no stacks.
                slot_mapping: record.slots.get(stack).copied().unwrap_or(0),
                decode_items,
                prefill_items,
                merge_items,
                num_merge_items: group.num_merge_items,
                ..record.params
            };
            if let Some(range) = split.decode_dispatches.get(header) {
                params.decode_items += 4 * range.start;
                params.num_decode_items = range.end - range.start;
            }
            if let Some(range) = split.prefill_dispatches.get(header) {
                params.prefill_items += PrefillItem::WORDS * range.start;
                params.num_prefill_items = range.end - range.start;
            }
            if let Some(rows) = split.groups.get(header) {
                params.merge_items += 4 * rows.merge_items.start;
                params.num_merge_items = rows.merge_items.end - rows.merge_items.start;
            }
            let start = (stack * headers.count as usize + header) * headers.words as usize;
            words[start..start + STEP_PARAMS_WORDS as usize].copy_from_slice(bytemuck::cast_slice(&[params]));
        }
    }
}
