//! Recording a prepared step into the application's encoder and pass.

use crate::error::RecordError;
use crate::gpu::PagedAttention;
use crate::gpu::lease::{Commands, HeldPasses, Lease};
use crate::gpu::metadata::{GroupRecord, Slot};
use crate::gpu::params::StepParams;
use crate::gpu::tensors::BoundTensors;
use crate::layout::LayerPlace;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use wgpu::{CommandEncoder, ComputePass, ComputePipeline};

/// Units of 16 bytes that one workgroup of `block_copy` copies.
const COPY_UNITS: u64 = 1024;

/// A plan that was checked and uploaded, on its way into the application's commands.
///
/// It holds its place in the library's metadata until it is dropped and every submission of its commands has completed.
#[derive(Debug)]
#[must_use = "a prepared step does nothing until it is recorded and submitted"]
pub struct PreparedStep {
    pub(super) pool: u64,
    pub(super) slot: usize,
    pub(super) lease: Arc<Lease>,
    pub(super) held_passes: HeldPasses,
    pub(super) metadata: wgpu::Buffer,
    pub(super) params: StepParams,
    /// Counts the arrivals of the step's swaps, if it has any; given away when they are recorded.
    pub(super) transfer: Option<Arc<AtomicU32>>,
    pub(super) progress: Progress,
    pub(super) dispatches: u32,
}

/// What of a layer is recorded.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerPart {
    /// All of it.
    Whole,
    /// The step's keys and values are written.
    Append,
    /// The attention of its rows, and the merge.
    Attention,
}

/// How far a step is recorded, and the first mistake that was made.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    transfers: bool,
    block_copies: bool,
    next_layer: u32,
    mistake: Option<RecordError>,
}

impl PreparedStep {
    /// Rows of the step, padding included.
    pub fn rows(&self) -> u32 {
        self.params.num_rows
    }

    /// The buffer that holds the step's arrays, for the application to bind (`STORAGE`) or to copy from (`COPY_SRC`).
    ///
    /// There are at most eight of them over the life of the attention object, until one must grow: bind groups on them
    /// can be kept. What is read must be read after [`record_transfers`](PagedAttention::record_transfers), in the
    /// submission of it or another one that has work of the step.
    pub fn metadata(&self) -> &wgpu::Buffer {
        &self.metadata
    }

    /// First word of the step's input tokens in [`metadata`](Self::metadata), `[rows]` of `u32`.
    pub fn token_ids_start(&self) -> u32 {
        self.params.token_ids
    }

    /// First word of the rows' positions in [`metadata`](Self::metadata), `[rows]` of `u32`.
    pub fn positions_start(&self) -> u32 {
        self.params.positions
    }

    /// Says that no layer need be recorded, after [`record_transfers`](PagedAttention::record_transfers): the step's keys and
    /// values are in [`arena_buffers`](PagedAttention::arena_buffers) by other means, or do not matter. For tools that fill a
    /// cache themselves; without it, a step that is committed before all of its layers are recorded has not run
    /// ([`PrepareError::StepNotExecuted`](crate::PrepareError::StepNotExecuted)).
    pub fn skip_layers(&mut self) {
        match self.progress.transfers {
            true => self.lease.complete(),
            false => self.mistake(RecordError::TransfersMissing),
        }
    }

    fn mistake(&mut self, error: RecordError) {
        self.progress.mistake.get_or_insert(error);
    }
}

impl PagedAttention {
    /// Records what must happen outside of a compute pass: the upload of the step's metadata, the block-table entries that
    /// changed, the blocks that leave for the host pool, then those that return from it.
    ///
    /// Comes first, once per step. A call in the wrong place records nothing, and the next
    /// [`record_layer`](Self::record_layer) returns the mistake.
    ///
    /// It asks wgpu to map the staging buffers of the metadata, and those of the blocks that are swapped, once the commands
    /// have completed (`CommandEncoder::map_buffer_on_submit`); [`poll_transfers`](Self::poll_transfers) then collects the
    /// blocks. Nothing waits for that: the step's own block copies and layers may overwrite a block that leaves.
    pub fn record_transfers(&mut self, encoder: &mut CommandEncoder, step: &mut PreparedStep) {
        if step.pool != self.pool.id {
            return step.mistake(RecordError::ForeignStep);
        }
        if step.progress.transfers || step.progress.next_layer > 0 {
            return step.mistake(RecordError::TransfersOutOfOrder);
        }
        step.progress.transfers = true;
        let commands = Commands::new(&step.lease);
        encoder.on_submitted_work_done(move || commands.completed());
        let slot = self.pool.slots.slot(step.slot);
        slot.record_upload(encoder);
        let record = &slot.record;
        if let Some(arrivals) = step.transfer.take() {
            let stamp = (slot.staging(), u64::from(record.stamp) * 4);
            self.pool.transfers.record(encoder, &self.pool.memory.arenas, stamp, &arrivals);
        }
        self.pool.checker.record_changes(&record.table_changes);
        if step.params.num_rows == 0 && record.num_block_copies == 0 {
            step.lease.complete();
        }
        if record.table_changes.is_empty() {
            return;
        }
        encoder.push_debug_group("paged_kv.table_changes");
        for &(stack, change) in &record.table_changes {
            let entries = self.pool.checker.table_entries(stack);
            let to = u64::from(change.table_row) * u64::from(entries) + u64::from(change.first_entry);
            encoder.copy_buffer_to_buffer(
                slot.staging(),
                u64::from(change.start) * 4,
                &self.pool.memory.tables,
                self.pool.memory.table_windows[stack as usize].start + to * 4,
                u64::from(change.len) * 4,
            );
        }
        encoder.pop_debug_group();
    }

    /// Records the step's block copies (copy-on-write), one dispatch per arena if there are any.
    ///
    /// Comes after [`record_transfers`](Self::record_transfers) and before the first layer, once per step. A call in
    /// the wrong place records nothing, and the next [`record_layer`](Self::record_layer) returns the mistake.
    ///
    /// Changes the pass's pipeline and bind groups 0 to 2.
    pub fn record_block_copies(&mut self, pass: &mut ComputePass<'_>, step: &mut PreparedStep) {
        if step.pool != self.pool.id {
            return step.mistake(RecordError::ForeignStep);
        }
        if !step.progress.transfers {
            return step.mistake(RecordError::TransfersMissing);
        }
        if step.progress.block_copies || step.progress.next_layer > 0 {
            return step.mistake(RecordError::BlockCopiesOutOfOrder);
        }
        step.progress.block_copies = true;
        let slot = self.pool.slots.slot(step.slot);
        let pairs = u64::from(slot.record.num_block_copies);
        if pairs == 0 {
            return;
        }
        step.held_passes.hold(pass, &step.lease);
        pass.push_debug_group("paged_kv.block_copy");
        pass.set_pipeline(&self.pipelines.block_copy);
        for arena in 0..self.pool.arenas.num_arenas() {
            // Any layer in it will do.
            let layer = self.pool.arenas.layer_in(arena);
            pass.set_bind_group(0, &slot.groups[0], &[0, layer * self.pool.memory.layer_stride]);
            pass.set_bind_group(1, &self.pool.groups.written_arenas[arena as usize], &[]);
            let units = self.pool.arenas.block_stride_units(arena);
            step.dispatches += self.dispatch(pass, pairs * units.div_ceil(COPY_UNITS));
        }
        pass.pop_debug_group();
        self.stats.step_dispatches = step.dispatches;
        if step.rows() == 0 {
            step.lease.complete();
        }
    }

    /// Records one layer: writes the step's keys and values into their blocks, and computes the attention of its rows.
    ///
    /// Layers come in order, each once, after [`record_block_copies`](Self::record_block_copies). At most three
    /// dispatches in a step of single rows (append, attention, merge), four in a mixed one, and more only where the
    /// work budget cuts a dispatch, or where [batch-invariant](crate::AttentionOptions::batch_invariant) rows are taken in
    /// groups. A step that is committed although a layer is missing, or although an encoder that has
    /// some of it was dropped, has not run: later plans are
    /// [`PrepareError::StepNotExecuted`](crate::PrepareError::StepNotExecuted).
    ///
    /// Changes the pass's pipeline and bind groups 0 to 2.
    ///
    /// # Errors
    /// [`RecordError`]: a mistake in the order of recording, also one made earlier in the step, objects of another
    /// attention object, or tensors with too few rows. Nothing is recorded then.
    pub fn record_layer(
        &mut self,
        pass: &mut ComputePass<'_>,
        step: &mut PreparedStep,
        layer: u32,
        tensors: &BoundTensors,
    ) -> Result<(), RecordError> {
        self.record_layer_part(pass, step, layer, tensors, LayerPart::Whole)
    }

    /// Records one layer without its attention, in the place of [`record_layer`](Self::record_layer): writes the step's keys
    /// and values into their blocks, and leaves the output as it is. For rows of which only keys and values are wanted (those
    /// of a prompt before its last one in the last layer, say, or ones that were computed elsewhere). Queries are not read.
    ///
    /// # Errors
    /// As `record_layer`.
    pub fn record_append(
        &mut self,
        pass: &mut ComputePass<'_>,
        step: &mut PreparedStep,
        layer: u32,
        tensors: &BoundTensors,
    ) -> Result<(), RecordError> {
        self.record_layer_part(pass, step, layer, tensors, LayerPart::Append)
    }

    /// Records one part of a layer in the place of the whole, so that a bench can time it: as
    /// [`record_layer`](Self::record_layer) in all else. Not part of the stable interface.
    ///
    /// # Errors
    /// As `record_layer`.
    #[doc(hidden)]
    pub fn record_layer_part(
        &mut self,
        pass: &mut ComputePass<'_>,
        step: &mut PreparedStep,
        layer: u32,
        tensors: &BoundTensors,
        part: LayerPart,
    ) -> Result<(), RecordError> {
        self.check_layer(step, layer, tensors)?;
        step.progress.next_layer += 1;
        if step.progress.next_layer == self.shape.num_layers() {
            step.lease.complete();
        }
        if step.rows() == 0 {
            return Ok(());
        }
        step.held_passes.hold(pass, &step.lease);
        let slot = self.pool.slots.slot(step.slot);
        let place = self.pool.arenas.place_of(layer);
        let mut target = LayerPass { slot, layer, place, tensors, header: None };
        if part != LayerPart::Attention {
            step.dispatches += self.append(pass, &mut target);
        }
        if part != LayerPart::Append {
            step.dispatches += self.record_attention(pass, &mut target);
        }
        self.stats.step_dispatches = step.dispatches;
        Ok(())
    }

    fn check_layer(
        &self,
        step: &PreparedStep,
        layer: u32,
        tensors: &BoundTensors,
    ) -> Result<(), RecordError> {
        if step.pool != self.pool.id {
            return Err(RecordError::ForeignStep);
        }
        if let Some(mistake) = step.progress.mistake {
            return Err(mistake);
        }
        if tensors.attention != self.instance {
            return Err(RecordError::ForeignTensors);
        }
        if !step.progress.transfers {
            return Err(RecordError::TransfersMissing);
        }
        if !step.progress.block_copies {
            return Err(RecordError::BlockCopiesMissing);
        }
        let expected = step.progress.next_layer;
        if layer != expected || layer >= self.shape.num_layers() {
            return Err(RecordError::LayerOutOfOrder { layer, expected });
        }
        if tensors.row_lens != self.row_lens(layer) {
            return Err(RecordError::TensorsOfOtherLayer { layer });
        }
        if step.rows() > tensors.rows {
            return Err(RecordError::TooManyRows { rows: step.rows(), capacity: tensors.rows });
        }
        Ok(())
    }

    fn append(&self, pass: &mut ComputePass<'_>, target: &mut LayerPass<'_>) -> u32 {
        let (arena, _) = self.pool.arenas.arena_of(target.layer);
        pass.push_debug_group("paged_kv.append");
        pass.set_pipeline(&self.pipelines.groups[target.place.group as usize].append);
        // Any header will do.
        self.bind_step(pass, target, 0);
        pass.set_bind_group(1, &self.pool.groups.written_arenas[arena as usize], &[]);
        pass.set_bind_group(2, &target.tensors.append, &[]);
        let dispatches = self.dispatch(pass, u64::from(target.slot.record.params.num_rows));
        pass.pop_debug_group();
        dispatches
    }

    /// The attention of all rows, and the merge of those that were split; group after group, if the rows are grouped.
    fn record_attention(&self, pass: &mut ComputePass<'_>, target: &mut LayerPass<'_>) -> u32 {
        let record = target.record();
        if record.row_groups.is_empty() {
            let headers = 0..record.prefill_dispatches.len() as u32;
            return self.record_decode(pass, target)
                + self.record_prefill(pass, target, headers)
                + self.record_merge(pass, target, 0, record.num_merge_items);
        }
        let groups = (0..).zip(&record.row_groups);
        groups
            .map(|(group, (headers, num_merge_items))| {
                self.record_prefill(pass, target, headers.clone())
                    + self.record_merge(pass, target, group, *num_merge_items)
            })
            .sum()
    }

    fn record_decode(&self, pass: &mut ComputePass<'_>, target: &mut LayerPass<'_>) -> u32 {
        let counts = &target.record().decode_dispatches;
        let items = (0..counts.len() as u32).map(|header| (header, counts[header as usize]));
        let group = target.place.group as usize;
        let kernel = ("paged_kv.attention_decode", &self.pipelines.groups[group].attention_decode);
        self.record_items(pass, target, kernel, items, self.pool.split_configs[group].workgroups_per_item)
    }

    fn record_prefill(
        &self,
        pass: &mut ComputePass<'_>,
        target: &mut LayerPass<'_>,
        headers: Range<u32>,
    ) -> u32 {
        let counts = &target.record().prefill_dispatches;
        let items = headers.map(|header| (header, counts[header as usize]));
        let group = target.place.group as usize;
        let kernel = ("paged_kv.attention_prefill", &self.pipelines.groups[group].attention_prefill);
        self.record_items(pass, target, kernel, items, self.pool.split_configs[group].workgroups_per_tile)
    }

    /// One dispatch per header and number of items.
    fn record_items(
        &self,
        pass: &mut ComputePass<'_>,
        target: &mut LayerPass<'_>,
        (label, pipeline): (&str, &ComputePipeline),
        items: impl ExactSizeIterator<Item = (u32, u32)>,
        workgroups_per_item: u32,
    ) -> u32 {
        if items.len() == 0 {
            return 0;
        }
        let (arena, _) = self.pool.arenas.arena_of(target.layer);
        pass.push_debug_group(label);
        pass.set_pipeline(pipeline);
        pass.set_bind_group(1, &self.pool.groups.attention_arenas[arena as usize], &[]);
        pass.set_bind_group(2, &target.tensors.attend, &[]);
        let mut dispatches = 0;
        for (header, items) in items {
            self.bind_step(pass, target, header);
            dispatches += self.dispatch(pass, u64::from(items) * u64::from(workgroups_per_item));
        }
        pass.pop_debug_group();
        dispatches
    }

    /// Merges as many rows as the header says.
    fn record_merge(
        &self,
        pass: &mut ComputePass<'_>,
        target: &mut LayerPass<'_>,
        header: u32,
        num_items: u32,
    ) -> u32 {
        if num_items == 0 {
            return 0;
        }
        pass.push_debug_group("paged_kv.attention_merge");
        pass.set_pipeline(&self.pipelines.groups[target.place.group as usize].attention_merge);
        self.bind_step(pass, target, header);
        pass.set_bind_group(1, &self.pool.groups.merge, &[]);
        // Group 2 has the output.
        let units = u64::from(self.pool.arenas.block_of(target.layer).v_sum_units());
        let per_item = u64::from(self.shape.group(target.place.group).num_query_heads()) * units;
        let dispatches = self.dispatch(pass, (u64::from(num_items) * per_item).div_ceil(64));
        pass.pop_debug_group();
        dispatches
    }

    /// Binds a header of the step, and the layer, unless they are bound: all kernels have them in the same place.
    fn bind_step(&self, pass: &mut ComputePass<'_>, target: &mut LayerPass<'_>, header: u32) {
        if target.header.replace(header) == Some(header) {
            return;
        }
        let header = target.slot.header_of(target.place.stack, header);
        let offsets = [header * self.header_words * 4, target.layer * self.pool.memory.layer_stride];
        pass.set_bind_group(0, &target.slot.groups[target.place.stack as usize], &offsets);
    }

    /// Dispatches `workgroups`, folded over x and y where one dimension does not hold them. The kernels write nothing
    /// for those beyond.
    fn dispatch(&self, pass: &mut ComputePass<'_>, workgroups: u64) -> u32 {
        let fold = u64::from(self.compilation.fold);
        let (x, y) = if workgroups <= fold { (workgroups, 1) } else { (fold, workgroups.div_ceil(fold)) };
        pass.dispatch_workgroups(x as u32, y as u32, 1);
        1
    }
}

/// What the attention of a layer is recorded with.
struct LayerPass<'a> {
    slot: &'a Slot,
    layer: u32,
    place: LayerPlace,
    tensors: &'a BoundTensors,
    /// The header that is bound, with the layer.
    header: Option<u32>,
}

impl<'a> LayerPass<'a> {
    /// The dispatches of the layer's group.
    fn record(&self) -> &'a GroupRecord {
        &self.slot.record.groups[self.place.group as usize]
    }
}
