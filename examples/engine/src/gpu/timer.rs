//! How long parts of a step take on the device, by timestamps within its compute pass.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::{
    Gpu, GpuError,
    buffers::{allocate, lost},
};

/// What a device needs for it. Not all GPUs have timestamps within a pass.
pub(super) const FEATURES: wgpu::Features =
    wgpu::Features::TIMESTAMP_QUERY.union(wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES);

/// Adds up the times of spans that a step marks: one for each layer.
pub(crate) struct SpanTimer {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    readback: wgpu::Buffer,
    mapped: Arc<AtomicBool>,
    ns_per_tick: f32,
}

impl SpanTimer {
    /// A timer for steps of `spans` spans; none where the device has no timestamps.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`].
    pub(crate) fn new(gpu: &Gpu, spans: u32) -> Result<Option<Self>, GpuError> {
        use wgpu::BufferUsages;
        if !gpu.device.features().contains(FEATURES) || 2 * spans > wgpu::QUERY_SET_MAX_QUERIES {
            return Ok(None);
        }
        let queries = gpu.device.create_query_set(&wgpu::QuerySetDescriptor {
            label: Some("llama.spans"),
            ty: wgpu::QueryType::Timestamp,
            count: 2 * spans,
        });
        let bytes = u64::from(2 * spans) * u64::from(wgpu::QUERY_SIZE);
        let resolved = BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC;
        Ok(Some(Self {
            queries,
            resolved: allocate(&gpu.device, "resolved timestamps", bytes, resolved)?,
            readback: allocate(
                &gpu.device,
                "timestamps",
                bytes,
                BufferUsages::MAP_READ | BufferUsages::COPY_DST,
            )?,
            mapped: Arc::default(),
            ns_per_tick: gpu.queue.get_timestamp_period(),
        }))
    }

    /// Marks where a span begins.
    pub(crate) fn begin(&self, pass: &mut wgpu::ComputePass<'_>, span: u32) {
        pass.write_timestamp(&self.queries, 2 * span);
    }

    /// Marks where it ends.
    pub(crate) fn end(&self, pass: &mut wgpu::ComputePass<'_>, span: u32) {
        pass.write_timestamp(&self.queries, 2 * span + 1);
    }

    /// Records that the times are kept, after the pass that marks all spans.
    pub(crate) fn record(&self, encoder: &mut wgpu::CommandEncoder) {
        encoder.resolve_query_set(&self.queries, 0..self.queries.count(), &self.resolved, 0);
        encoder.copy_buffer_to_buffer(&self.resolved, 0, &self.readback, 0, self.resolved.size());
    }

    /// Asks for the times of what was submitted; [`take`](Self::take) has them once the device has been waited for.
    pub(crate) fn request(&self) {
        let mapped = Arc::clone(&self.mapped);
        self.readback.map_async(wgpu::MapMode::Read, .., move |result| {
            mapped.store(result.is_ok(), Ordering::Relaxed);
        });
    }

    /// The sum of all spans.
    ///
    /// # Errors
    /// [`GpuError::Lost`].
    pub(crate) fn take(&self) -> Result<Duration, GpuError> {
        if !self.mapped.swap(false, Ordering::Relaxed) {
            // A request that is still open is given up.
            self.readback.unmap();
            return Err(lost("its timestamps cannot be read"));
        }
        let view = self.readback.get_mapped_range(..).map_err(lost)?;
        let ticks: &[u64] = bytemuck::cast_slice(&view);
        let sum: u64 = ticks.chunks_exact(2).map(|span| span[1].saturating_sub(span[0])).sum();
        drop(view);
        self.readback.unmap();
        Ok(Duration::from_secs_f64(sum as f64 * f64::from(self.ns_per_tick) * 1e-9))
    }
}
