//! The device part: arenas, kernels, uploads and recording, as a guest in an application that owns its device.
//!
//! It reads a [`StepPlan`] and knows nothing of how it came about. The application records:
//!
//! 1. [`prepare`](PagedAttention::prepare) checks the plan, splits its work and packs its metadata, once per step;
//! 2. [`record_transfers`](PagedAttention::record_transfers) on an encoder, which uploads it;
//! 3. [`record_block_copies`](PagedAttention::record_block_copies) in a compute pass;
//! 4. [`record_layer`](PagedAttention::record_layer) for each layer in order, between the application's own dispatches.
//!
//! A step may be cut over several submissions: its encoders are submitted in the order in which it was recorded, and the
//! `PreparedStep` is kept until the last of them is recorded. A driver's watchdog counts submissions, and an application can
//! draw between them.
//!
//! A plan that swaps blocks has one call more: [`poll_transfers`](PagedAttention::poll_transfers), once per step or
//! frame, after the application has polled its device. It collects the bytes that have arrived.
//!
//! When the device is lost, [`prepare`](PagedAttention::prepare) says so, and [`rebuild`](PagedAttention::rebuild) goes on
//! with another one.
//!
//! Nothing here submits, polls or blocks, and nothing goes through the queue: what a step needs is in its own commands,
//! and gone with them when they are dropped. The library asks wgpu for two things that outlive a call: to be told when a
//! submission has completed, so that it knows when a step's metadata may be overwritten; and to map its own staging
//! buffers then.

mod capabilities;
mod check;
#[cfg(test)]
mod gate;
mod groups;
mod host_pool;
mod lease;
mod memory;
mod metadata;
mod options;
mod params;
mod pipelines;
mod pool;
mod rebuild;
mod record;
mod scope;
mod setup;
mod shader;
mod staging;
mod stats;
mod tensors;
mod transfers;
mod use_cache;

pub use capabilities::{recommended_features, recommended_limits, recommended_scheduler_config};
pub use options::{ActivationType, AttentionOptions};
pub use pipelines::ShaderVariant;
pub use record::PreparedStep;
pub use stats::AttentionStats;
pub use tensors::{BoundTensors, LayerTensors, TensorSlice};

use crate::config::CacheConfig;
use crate::error::{BindError, DeviceError, PrepareError};
use crate::layout::ArenaLayout;
use crate::model::ModelShape;
use crate::schedule::{SplitConfig, StepPlan, TransferReport, WorkSplit};
use capabilities::Capabilities;
use lease::HeldPasses;
use params::STEP_PARAMS_WORDS;
use pipelines::{Compilation, GroupKeys, Layouts, Pipelines};
use pool::{Pool, PoolContext, slot_context};
use record::Progress;
use scope::is_lost;
use setup::{QueryTiles, check_shape, layer_bytes, served_groups, variant};
use std::sync::atomic::{AtomicU64, Ordering};
use tensors::{Binder, RowLens};
use wgpu::CommandEncoder;

/// The texts of all shaders, the mirrors of their structs, and the parts of a layer, for tests and benches. Not part of the stable interface.
#[doc(hidden)]
pub mod shaders {
    pub use super::params::{HeadParams, LayerParams, StepParams, TensorParams};
    pub use super::record::LayerPart;
    pub use super::shader::{
        Kernel, MAX_QUERIES, PREFILL_QUERIES, ReachKind, RowRule, TILE, VariantKey, all_variants,
        sample_variants,
    };
}

/// Paged attention on one device: the pool of blocks and the kernels that write and read it.
///
/// ```no_run
/// # use paged_kv::{CacheConfig, KvType, LayerTensors, ModelShape, PagedAttention, StepPlan};
/// # fn run(device: wgpu::Device, queue: wgpu::Queue, tensors: LayerTensors<'_>, plan: StepPlan) -> Result<(), Box<dyn std::error::Error>> {
/// let shape = ModelShape::new(30, 9, 3, 64);
/// let cache = CacheConfig::for_bytes(512 << 20, &shape, KvType::F16)?;
/// let mut attention = PagedAttention::new(&device, shape.clone(), cache)?;
/// let tensors = attention.bind_tensors(&tensors)?;
///
/// let mut step = attention.prepare(&plan)?;
/// let mut encoder = device.create_command_encoder(&Default::default());
/// attention.record_transfers(&mut encoder, &mut step);
/// let mut pass = encoder.begin_compute_pass(&Default::default());
/// attention.record_block_copies(&mut pass, &mut step);
/// for layer in 0..shape.num_layers() {
///     // The application's dispatches that write query, key and value.
///     attention.record_layer(&mut pass, &mut step, layer, &tensors)?;
///     // The application's dispatches that read output.
/// }
/// drop(pass);
/// queue.submit([encoder.finish()]);
/// # Ok(())
/// # }
/// ```
///
/// On native backends it is `Send` and `Sync`, as are [`BoundTensors`] and [`PreparedStep`]: it may be made on one thread
/// and used on another, and several of them, for models and caches of their own, may share a device.
pub struct PagedAttention {
    /// Tells its tensors from those of others, and from those that were bound before a rebuild.
    instance: u64,
    device: wgpu::Device,
    shape: ModelShape,
    options: AttentionOptions,
    /// The pool was given up, and no other one has taken its place.
    is_retired: bool,
    capabilities: Capabilities,
    /// Of each group of layers.
    tiles: Vec<QueryTiles>,
    compilation: Compilation,
    layouts: Layouts,
    pipelines: Pipelines,
    pool: Pool,
    /// Words between headers of a step's dispatches.
    header_words: u32,
    /// Of each group of layers.
    splits: Vec<WorkSplit>,
    stats: AttentionStats,
    /// What was made and counted before this pool.
    made_before: AttentionStats,
}

impl PagedAttention {
    /// Creates the pool and the kernels, with the default options.
    ///
    /// Compiling the kernels takes milliseconds to seconds, by driver. On native backends everything here is `Send`: an
    /// application that draws does this on a thread of its own, unless it draws through GL, where one thread at a time has
    /// the device.
    ///
    /// `shape` and `cache` are those of the scheduler whose plans will be prepared.
    ///
    /// # Errors
    /// [`DeviceError`]: among others when the device has no memory for the pool, when the limits that the application
    /// enabled are too low for it, or when the device is lost. Nothing reaches the application's handler of uncaptured errors.
    pub fn new(device: &wgpu::Device, shape: ModelShape, cache: CacheConfig) -> Result<Self, DeviceError> {
        Self::with_options(device, shape, cache, AttentionOptions::default())
    }

    /// Creates the pool and the kernels.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_options(
        device: &wgpu::Device,
        shape: ModelShape,
        cache: CacheConfig,
        options: AttentionOptions,
    ) -> Result<Self, DeviceError> {
        check_shape(&shape, &cache)?;
        let capabilities = Capabilities::of(device)?;
        let compact = options.compact_shaders.unwrap_or(capabilities.compact_shaders);
        let tiles: Vec<QueryTiles> = shape.groups().map(|group| QueryTiles::of(group, compact)).collect();
        let layouts = Layouts::create(device, layer_bytes(&shape))?;
        let context = PoolContext {
            device,
            layouts: &layouts,
            capabilities: &capabilities,
            options: &options,
            shape: &shape,
            tiles: &tiles,
        };
        let mut stats = AttentionStats::default();
        let pool = Pool::create(&context, cache, &mut stats)?;
        let compilation = Compilation { fold: capabilities.max_workgroups, checked: options.checked_shaders };
        let keys = group_keys(&shape, &pool.cache, &tiles, &capabilities, &options);
        let pipelines = Pipelines::create(device, &layouts, compilation, &options, keys)?;
        stats.pipelines_created = pipelines.count();
        // Kernels take their time to compile, and what a lost device has made looks like any other.
        if is_lost(device) {
            return Err(DeviceError::DeviceLost);
        }
        Ok(Self {
            instance: next_instance(),
            device: device.clone(),
            shape,
            is_retired: false,
            tiles,
            compilation,
            layouts,
            pipelines,
            pool,
            header_words: STEP_PARAMS_WORDS.next_multiple_of(capabilities.uniform_alignment / 4),
            splits: Vec::new(),
            stats,
            made_before: AttentionStats::default(),
            options,
            capabilities,
        })
    }

    /// Records that the pool and the block tables are zero.
    ///
    /// wgpu zeroes a buffer at its first use: without this call, the first step does it, and a pool of gigabytes delays
    /// the first token. Submit it while the model is being loaded. Does nothing once a step has been prepared.
    pub fn record_initialization(&mut self, encoder: &mut CommandEncoder) {
        if self.is_retired || self.pool.checker.has_accepted() {
            return;
        }
        encoder.push_debug_group("paged_kv.initialization");
        for buffer in
            self.pool.memory.arenas.iter().chain([&self.pool.memory.tables, &self.pool.memory.partials])
        {
            encoder.clear_buffer(buffer, 0, None);
        }
        encoder.pop_debug_group();
    }

    /// Checks and binds the tensors that layers read and write; to be kept, not made anew in each step. They serve every
    /// layer whose rows are as long as those of layer 0: all layers of a model whose heads are the same everywhere.
    ///
    /// # Errors
    /// [`BindError`] when a slice does not have the rows it claims, is misaligned, lacks `STORAGE` usage, when the output
    /// shares a buffer with an input, when a buffer is another device's, or when the device is lost.
    pub fn bind_tensors(&mut self, tensors: &LayerTensors<'_>) -> Result<BoundTensors, BindError> {
        self.bind_layer_tensors(0, tensors)
    }

    /// As [`bind_tensors`](Self::bind_tensors), for the layers whose rows are as long as those of `layer`.
    ///
    /// # Errors
    /// As `bind_tensors`, and [`BindError::NoSuchLayer`].
    pub fn bind_layer_tensors(
        &mut self,
        layer: u32,
        tensors: &LayerTensors<'_>,
    ) -> Result<BoundTensors, BindError> {
        if self.is_retired {
            return Err(BindError::DeviceLost);
        }
        let num_layers = self.shape.num_layers();
        if layer >= num_layers {
            return Err(BindError::NoSuchLayer { layer, num_layers });
        }
        let binder = Binder {
            device: &self.device,
            layouts: &self.layouts,
            attention: self.instance,
            row_lens: self.row_lens(layer),
            activations: self.options.activations,
            storage_alignment: self.capabilities.storage_alignment,
            max_tensor_bytes: self.capabilities.max_tensor_bytes,
        };
        let bound = binder.bind(tensors)?;
        self.stats.buffers_created += 1;
        self.stats.bind_groups_created += 2;
        Ok(bound)
    }

    /// Checks every number of a plan, splits its work, and packs its metadata into a mapped buffer, from which
    /// [`record_transfers`](Self::record_transfers) uploads it.
    ///
    /// In steady state this creates no bind group and no buffer, except one of four bytes that is dropped at once: it tells
    /// whether the device is lost. Nothing is submitted. A step that is prepared and dropped, recorded or not, leaves
    /// nothing behind, however many there are without a submission.
    ///
    /// This is where an application learns that its device is lost, besides wgpu's own callback
    /// (`wgpu::Device::set_device_lost_callback`, which the library leaves alone): recording and submitting on a lost
    /// device return as if they had done something.
    ///
    /// A plan that swaps blocks takes staging buffers, new ones where too few are idle, and copies the blocks that return
    /// into them. The slots that its blocks go to are the step's from now on: what they held is lost, whether the step is
    /// submitted or not.
    ///
    /// # Errors
    /// [`PrepareError`]: the plan was not made for this cache, is older than another one that was prepared, or has a
    /// number that no shader must see; too many steps are in flight; a block is to return that is not in the host pool; a
    /// step was committed that never ran; or the device is lost. The plan is to be dropped then, and nothing has changed.
    pub fn prepare(&mut self, plan: &StepPlan) -> Result<PreparedStep, PrepareError> {
        if self.is_retired {
            return Err(PrepareError::DeviceLost);
        }
        self.pool.checker.check_origin(plan)?;
        if let Some(step) = self.pool.ledger.update(plan, &mut self.pool.slots) {
            let lost = is_lost(&self.device);
            return Err(if lost { PrepareError::DeviceLost } else { PrepareError::StepNotExecuted { step } });
        }
        self.pool.checker.check(plan)?;
        self.splits.resize_with(self.pool.split_configs.len(), WorkSplit::default);
        for (split, config) in self.splits.iter_mut().zip(&self.pool.split_configs) {
            split.split(plan, config);
            check_fixed_spans(split, config)?;
        }
        let context = slot_context(&self.device, &self.layouts, &self.pool.memory, &self.capabilities);
        let (slot, lease) = self.pool.slots.pack(&context, plan, &self.splits, self.header_words)?;
        let transfer = self.pool.transfers.prepare(plan)?;
        self.pool.checker.accept(plan);
        self.pool.ledger.prepared(plan, slot);
        let slot_state = self.pool.slots.slot(slot);
        self.stats.step_uploaded_bytes = slot_state.record.bytes;
        self.stats.step_dispatches = 0;
        Ok(PreparedStep {
            pool: self.pool.id,
            slot,
            lease,
            held_passes: HeldPasses::default(),
            metadata: slot_state.buffer.clone(),
            params: slot_state.record.params,
            transfer,
            progress: Progress::default(),
            dispatches: 0,
        })
    }

    /// Collects the swaps that have completed since the last call: copies the blocks that left into the host pool, and
    /// returns one report per step, to be handed to the scheduler.
    ///
    /// Call it once per step or frame. It does not wait, and it does not poll the device: that is up to the application,
    /// and until it has, wgpu does not know that a submission has completed. An application that never calls it cannot
    /// prepare more than eight steps that swap ([`PrepareError::TransfersInFlight`]).
    ///
    /// Every step that was prepared and swaps is reported, once, in the order in which ends become known. A report is not
    /// `complete` when the step will never run (it was dropped without being recorded, or its encoder was dropped; wgpu
    /// refused the submission), when the device is lost, or when main memory is full. The slots that its blocks were to
    /// go to are then empty, unless a later step was given them: bytes that arrive for a slot which has another owner by
    /// now are left out, complete or not.
    ///
    /// Allocates only when there is something to report.
    pub fn poll_transfers(&mut self) -> Vec<TransferReport> {
        self.pool.transfers.poll()
    }

    /// Elements of a layer's rows of queries, keys, values and results.
    fn row_lens(&self, layer: u32) -> RowLens {
        let block = self.pool.arenas.block_of(layer);
        let group = self.shape.group(self.pool.arenas.place_of(layer).group);
        RowLens {
            query: group.num_query_heads() * block.k_head_dim(),
            key: block.num_kv_heads() * block.k_head_dim(),
            value: block.num_kv_heads() * block.v_head_dim(),
            output: group.num_query_heads() * block.v_head_dim(),
        }
    }

    /// The buffers that hold the blocks, for tools that read or write them: `COPY_SRC` and `COPY_DST`.
    ///
    /// Their layout is [`CacheConfig::arenas`], within the limits of the device. [`rebuild`](Self::rebuild) destroys them
    /// and makes others.
    pub fn arena_buffers(&self) -> &[wgpu::Buffer] {
        &self.pool.memory.arenas
    }

    /// How the layers are distributed over [`arena_buffers`](Self::arena_buffers).
    pub fn arena_layout(&self) -> &ArenaLayout {
        &self.pool.arenas
    }

    /// How steps are split into work items on this device, for the first group of layers.
    pub fn split_config(&self) -> &SplitConfig {
        &self.pool.split_configs[0]
    }

    /// The shader variants in use, each once, and how long it took to make.
    pub fn variants(&self) -> &[ShaderVariant] {
        &self.pipelines.variants
    }

    /// Sizes and counts.
    pub fn stats(&self) -> AttentionStats {
        let (slots, before) = (&self.pool.slots, &self.made_before);
        self.pool.transfers.add_to(AttentionStats {
            metadata_bytes: self.pool.slots.bytes(),
            buffers_created: before.buffers_created + self.stats.buffers_created + slots.num_buffers,
            bind_groups_created: before.bind_groups_created
                + self.stats.bind_groups_created
                + slots.num_groups,
            pipelines_created: before.pipelines_created + self.stats.pipelines_created,
            ..self.stats
        })
    }
}

/// With fixed spans, a full scratch buffer must not lead to longer spans.
fn check_fixed_spans(split: &WorkSplit, config: &SplitConfig) -> Result<(), PrepareError> {
    let (needed, available) = (split.num_partials.into(), config.max_partials.into());
    match config.fixed_span_tokens {
        Some(_) if needed > available => Err(PrepareError::ScratchTooSmall { needed, available }),
        _ => Ok(()),
    }
}

/// The kernels that each group of layers takes.
fn group_keys(
    shape: &ModelShape,
    cache: &CacheConfig,
    tiles: &[QueryTiles],
    capabilities: &Capabilities,
    options: &AttentionOptions,
) -> Vec<GroupKeys> {
    let groups = served_groups(shape, cache, tiles);
    Pipelines::keys(groups, |kernel, group| variant(kernel, group, capabilities, options))
}

/// Tells attention objects apart within the process.
fn next_instance() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
