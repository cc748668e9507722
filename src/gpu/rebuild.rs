//! Losing the device, and going on with another one.
//!
//! Everything that was made on a device goes with it, but for what the host pool has: that lies in main memory. What the
//! object is told apart from devices (shape, cache, options) stays.

use crate::error::DeviceError;
use crate::gpu::{PagedAttention, next_instance};

impl PagedAttention {
    /// Makes arenas, kernels and everything else anew, on `device`: after the old one was lost, or to move to another.
    ///
    /// What stays: the shape, the cache's configuration, the options but for the pipeline cache (an object of the old
    /// device), the host pool with every block that has arrived there, and the counts of [`stats`](Self::stats). The
    /// arenas are new and hold nothing. Steps prepared and tensors bound before are refused
    /// ([`RecordError::ForeignStep`](crate::RecordError::ForeignStep),
    /// [`ForeignTensors`](crate::RecordError::ForeignTensors)): bind the new device's.
    ///
    /// The other half is the scheduler's. Pass it what [`poll_transfers`](Self::poll_transfers) returns now (swaps under way
    /// have failed, and are reported so), and call [`Scheduler::forget_device`](crate::Scheduler::forget_device) or
    /// [`KvCache::forget_device`](crate::KvCache::forget_device); a plan that was made before is
    /// [`PrepareError::DeviceNotForgotten`](crate::PrepareError::DeviceNotForgotten).
    ///
    /// ```no_run
    /// # use paged_kv::{BoundTensors, LayerTensors, PagedAttention, Scheduler};
    /// # fn recover(attention: &mut PagedAttention, scheduler: &mut Scheduler, device: wgpu::Device, tensors: LayerTensors<'_>) -> Result<BoundTensors, Box<dyn std::error::Error>> {
    /// attention.rebuild(&device)?;
    /// scheduler.complete_transfers(&attention.poll_transfers());
    /// scheduler.forget_device();
    /// let tensors = attention.bind_tensors(&tensors)?; // of the new device
    /// # Ok(tensors)
    /// # }
    /// ```
    ///
    /// The old arenas are destroyed before new ones are asked for: to leave a device that works, submit or drop what was
    /// recorded on it first, because a submission that uses a destroyed buffer is an error of the application's. It takes
    /// as long as [`new`](Self::new).
    ///
    /// # Errors
    /// [`DeviceError`], as `new`: the host pool is kept then, and another `rebuild` may follow. Until one succeeds,
    /// `prepare` and `bind_tensors` say [`DeviceLost`](crate::PrepareError::DeviceLost).
    pub fn rebuild(&mut self, device: &wgpu::Device) -> Result<(), DeviceError> {
        self.retire();
        let (shape, cache) = (self.shape.clone(), self.pool.cache.clone());
        let mut rebuilt = Self::with_options(device, shape, cache, self.options.clone())?;
        rebuilt.pool.checker.succeed(&self.pool.checker);
        rebuilt.pool.transfers.succeed(&mut self.pool.transfers);
        rebuilt.made_before = self.stats();
        *self = rebuilt;
        Ok(())
    }

    /// Gives up everything on the device; nothing made before is good for anything from now on.
    fn retire(&mut self) {
        if self.is_retired {
            return;
        }
        self.instance = next_instance();
        self.options.pipeline_cache = None;
        self.retire_pool();
    }

    /// Gives up the pool; kernels stay.
    pub(super) fn retire_pool(&mut self) {
        if self.is_retired {
            return;
        }
        self.is_retired = true;
        self.made_before = self.stats();
        self.pool.retire();
        self.stats = Default::default();
    }
}
