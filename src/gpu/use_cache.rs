//! Tying the attention object to a cache, and taking another one.

use crate::config::CacheConfig;
use crate::error::DeviceError;
use crate::gpu::pipelines::Pipelines;
use crate::gpu::pool::{Pool, PoolContext};
use crate::gpu::scope::is_lost;
use crate::gpu::setup::check_shape;
use crate::gpu::{PagedAttention, group_keys, next_instance};

impl PagedAttention {
    /// Ties the object to the cache whose [`KvCache::instance`](crate::KvCache::instance) is `instance`, and gives up what
    /// it had of another one: plans of other caches are
    /// [`PrepareError::CacheInstance`](crate::PrepareError::CacheInstance) from now on. An object that was never tied takes
    /// the cache of the first plan that it prepares.
    ///
    /// A new scheduler for the same model (another conversation, other limits) thus needs no new object: kernels are kept,
    /// except where the new cache stores other types, and tensors stay bound unless the length of a value changes. With the
    /// same configuration the arenas are kept, too; otherwise they are destroyed before new ones are made, so submit or
    /// drop first what was recorded for the old cache. The host pool is empty afterwards, swaps under way are not reported
    /// any more, and steps that were prepared are [`RecordError::ForeignStep`](crate::RecordError::ForeignStep). Does
    /// nothing for the cache that is tied already.
    ///
    /// # Errors
    /// [`DeviceError`], as [`new`](Self::new), with nothing changed where the cache is for another shape. After any other
    /// one the old pool is gone: until another `use_cache` or a [`rebuild`](Self::rebuild) succeeds, `prepare` and
    /// `bind_tensors` say [`DeviceLost`](crate::PrepareError::DeviceLost).
    pub fn use_cache(&mut self, cache: CacheConfig, instance: u64) -> Result<(), DeviceError> {
        check_shape(&self.shape, &cache)?;
        let is_same = !self.is_retired && cache == self.pool.cache;
        match self.pool.checker.cache_instance() {
            Some(tied) if is_same && tied == instance => return Ok(()),
            None if is_same => {}
            _ if is_same => self.restart_pool(),
            _ => self.replace_pool(cache)?,
        }
        self.pool.checker.bind(instance);
        Ok(())
    }

    fn restart_pool(&mut self) {
        self.made_before = self.stats();
        let stats = &mut self.stats;
        (stats.buffers_created, stats.bind_groups_created, stats.pipelines_created) = (0, 0, 0);
        self.pool.slots.restart_counts();
        self.pool.restart();
    }

    fn replace_pool(&mut self, cache: CacheConfig) -> Result<(), DeviceError> {
        self.retire_pool();
        let context = PoolContext {
            device: &self.device,
            layouts: &self.layouts,
            capabilities: &self.capabilities,
            options: &self.options,
            shape: &self.shape,
            tiles: &self.tiles,
        };
        let mut pool = Pool::create(&context, cache, &mut self.stats)?;
        let keys = group_keys(&self.shape, &pool.cache, &self.tiles, &self.capabilities, &self.options);
        if self.pipelines.are_others(&keys) {
            self.pipelines =
                Pipelines::create(&self.device, &self.layouts, self.compilation, &self.options, keys)?;
            self.stats.pipelines_created = self.pipelines.count();
        }
        if is_lost(&self.device) {
            return Err(DeviceError::DeviceLost);
        }
        let v_head_dims = |cache: &CacheConfig| -> Vec<u32> {
            cache.groups().iter().map(|group| group.layout().v_head_dim()).collect()
        };
        if v_head_dims(&pool.cache) != v_head_dims(&self.pool.cache) {
            self.instance = next_instance();
        }
        pool.transfers.count_on(&self.pool.transfers);
        self.pool = pool;
        self.is_retired = false;
        Ok(())
    }
}
