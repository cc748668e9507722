//! What an attention object has on its device for one cache: the pool of blocks, and everything that goes by the cache's
//! numbers. Kernels and layouts outlive it.

use crate::config::CacheConfig;
use crate::error::{DeviceError, PrepareError};
use crate::gpu::capabilities::Capabilities;
use crate::gpu::check::PlanChecker;
use crate::gpu::groups::ArenaGroups;
use crate::gpu::lease::Ledger;
use crate::gpu::memory::{Allocator, DeviceMemory};
use crate::gpu::metadata::{MetadataSlots, SlotContext};
use crate::gpu::next_instance;
use crate::gpu::options::AttentionOptions;
use crate::gpu::pipelines::Layouts;
use crate::gpu::setup::{QueryTiles, layer_params, served_groups, split_config};
use crate::gpu::stats::AttentionStats;
use crate::gpu::transfers::Transfers;
use crate::layout::ArenaLayout;
use crate::model::ModelShape;
use crate::schedule::SplitConfig;

/// One cache's memory and state on a device.
pub(super) struct Pool {
    /// Tells steps of this pool from those of others, and from those that were prepared before it was given up.
    pub(super) id: u64,
    pub(super) cache: CacheConfig,
    pub(super) arenas: ArenaLayout,
    pub(super) memory: DeviceMemory,
    pub(super) groups: ArenaGroups,
    pub(super) slots: MetadataSlots,
    pub(super) checker: PlanChecker,
    pub(super) ledger: Ledger,
    /// Of each group of layers.
    pub(super) split_configs: Vec<SplitConfig>,
    pub(super) transfers: Transfers,
}

/// What a pool is made with: facts of the device, the model and the options.
pub(super) struct PoolContext<'a> {
    pub(super) device: &'a wgpu::Device,
    pub(super) layouts: &'a Layouts,
    pub(super) capabilities: &'a Capabilities,
    pub(super) options: &'a AttentionOptions,
    pub(super) shape: &'a ModelShape,
    /// Of each group of layers.
    pub(super) tiles: &'a [QueryTiles],
}

impl Pool {
    /// Makes the pool of `cache`, and counts what it has made in `stats`.
    pub(super) fn create(
        context: &PoolContext<'_>,
        cache: CacheConfig,
        stats: &mut AttentionStats,
    ) -> Result<Self, DeviceError> {
        let &PoolContext { device, layouts, capabilities, options, shape, tiles } = context;
        let max_bytes = capabilities.max_binding_bytes;
        let table_bytes = cache.stack_table_bytes().into_iter().max().unwrap_or(0);
        if table_bytes > max_bytes {
            return Err(DeviceError::LimitTooLow {
                object: "the block tables",
                limit: "max_storage_buffer_binding_size",
                needed: table_bytes,
                actual: max_bytes,
            });
        }
        let arenas = cache.arenas(max_bytes)?;
        let groups: Vec<_> = served_groups(shape, &cache, tiles).collect();
        let split_configs: Vec<SplitConfig> =
            groups.iter().map(|&group| split_config(group, &cache, options, capabilities)).collect();
        let layer_params = layer_params(shape, &cache, &arenas, tiles);
        let mut allocator = Allocator::new(device);
        let scratch = groups.iter().zip(&split_configs);
        let scratch = scratch.map(|(group, split)| u64::from(split.max_partials) * group.partial_bytes());
        let scratch_bytes = scratch.max().unwrap_or(0);
        let memory = DeviceMemory::create(
            &mut allocator,
            &cache,
            &arenas,
            scratch_bytes,
            &layer_params,
            capabilities,
        )?;
        let groups = ArenaGroups::create(device, layouts, &memory)?;
        let transfers = Transfers::new(device, &cache, &arenas, options.staging_bytes, max_bytes);
        let mut pool = Self {
            id: next_instance(),
            arenas,
            memory,
            groups,
            slots: MetadataSlots::default(),
            checker: PlanChecker::new(&cache),
            cache,
            ledger: Ledger::default(),
            split_configs,
            transfers,
        };
        stats.arena_bytes = pool.memory.arenas.iter().map(wgpu::Buffer::size).sum();
        stats.table_bytes = pool.memory.tables.size();
        stats.scratch_bytes = pool.memory.partials.size();
        stats.buffers_created += allocator.num_buffers();
        stats.bind_groups_created += pool.groups.count();
        pool.fill_slots(context, stats)?;
        Ok(pool)
    }

    /// Begins anew with another cache of the same configuration: nothing that the old one had counts any more.
    pub(super) fn restart(&mut self) {
        self.id = next_instance();
        self.checker = PlanChecker::new(&self.cache);
        self.ledger = Ledger::default();
        self.transfers.restart();
    }

    /// Gives the memory up, and refuses what was prepared.
    pub(super) fn retire(&mut self) {
        self.id = next_instance();
        self.transfers.abandon();
        // A holder of a clone of a buffer does not keep its memory.
        self.memory.destroy();
        self.slots = MetadataSlots::default();
    }

    fn fill_slots(&mut self, context: &PoolContext<'_>, stats: &AttentionStats) -> Result<(), DeviceError> {
        let slots = slot_context(context.device, context.layouts, &self.memory, context.capabilities);
        self.slots.fill(&slots).map_err(|error| match error {
            PrepareError::OutOfMemory { asked_bytes } => DeviceError::OutOfMemory {
                object: "step metadata",
                asked_bytes,
                created_bytes: stats.arena_bytes + stats.table_bytes + stats.scratch_bytes,
            },
            PrepareError::DeviceLost => DeviceError::DeviceLost,
            error => DeviceError::Refused { object: "step metadata", reason: error.to_string() },
        })
    }
}

/// What a pool's metadata slots are bound with.
pub(super) fn slot_context<'a>(
    device: &'a wgpu::Device,
    layouts: &'a Layouts,
    memory: &'a DeviceMemory,
    capabilities: &Capabilities,
) -> SlotContext<'a> {
    SlotContext {
        device,
        layouts,
        tables: &memory.tables,
        table_windows: &memory.table_windows,
        stack_groups: &memory.stack_groups,
        layers: &memory.layers,
        layer_params_bytes: layouts.layer_bytes,
        max_binding_bytes: capabilities.max_binding_bytes,
    }
}
