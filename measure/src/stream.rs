//! The rates that all others are measured by: reading and copying a buffer.

use crate::faults::GpuFailure;
use crate::gpu::Gpu;
use crate::kernels::BenchKernel;
use crate::pairs::repeated;

/// Bytes per second of the adapter's memory, as its shaders see it.
#[derive(Clone, Copy, Debug)]
pub struct StreamRates {
    /// Bytes of the buffer that was read and copied.
    pub bytes: u64,
    /// Bytes read per second.
    pub read: f64,
    /// Bytes read and written per second, both counted.
    pub copy: f64,
}

const WGSL: &str = include_str!("shaders/stream.wgsl");
/// Bytes that one workgroup handles.
const SPAN_BYTES: u64 = 16384;

/// A kernel over a buffer, start to end.
pub struct Stream<'a> {
    gpu: &'a Gpu,
    kernel: BenchKernel,
    group: wgpu::BindGroup,
    workgroups: u64,
}

impl<'a> Stream<'a> {
    /// Reads `bytes`, rounded down to what workgroups read.
    pub fn read(gpu: &'a Gpu, bytes: u64) -> Self {
        Self::new(gpu, "stream_read", bytes, false)
    }

    /// Copies `bytes`, rounded likewise.
    pub fn copy(gpu: &'a Gpu, bytes: u64) -> Self {
        Self::new(gpu, "stream_copy", bytes, true)
    }

    fn new(gpu: &'a Gpu, entry: &str, bytes: u64, copies: bool) -> Self {
        let kernel = BenchKernel::new(gpu, WGSL.to_owned(), entry);
        let workgroups = (bytes / SPAN_BYTES).max(1);
        let bytes = workgroups * SPAN_BYTES;
        let buffers = [gpu.empty(bytes), gpu.empty(if copies { bytes } else { 16 })];
        let group = kernel.bind(gpu, &[&buffers[0], &buffers[1]]);
        Self { gpu, kernel, group, workgroups }
    }

    /// Bytes that a run reads.
    pub fn bytes(&self) -> u64 {
        self.workgroups * SPAN_BYTES
    }

    /// Runs it; seconds.
    ///
    /// # Errors
    /// As [`Gpu::wait`].
    pub fn time(&self) -> Result<f64, GpuFailure> {
        self.gpu.time(self.gpu.encoder(), |pass| self.kernel.record(pass, &self.group, self.workgroups))
    }

    fn check_clock(&self) -> Result<(), GpuFailure> {
        self.time()?;
        let (by_clock, by_wall) = self
            .gpu
            .time_both(self.gpu.encoder(), |pass| self.kernel.record(pass, &self.group, self.workgroups))?;
        if by_clock > by_wall * 1.05 || by_clock < by_wall * 0.5 {
            self.gpu.distrust_timestamps();
        }
        Ok(())
    }
}

/// Measures the rates, and whether the adapter's timestamps can be believed: a pass that takes longer than the wait
/// for it, or less than half of it, cannot.
///
/// # Errors
/// As [`Gpu::wait`].
pub fn stream_rates(gpu: &Gpu) -> Result<StreamRates, GpuFailure> {
    let limits = gpu.device.limits();
    let most = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size).min(1 << 29);
    let bytes = if gpu.is_software { most.min(1 << 25) } else { most };
    let (read, copy) = (Stream::read(gpu, bytes), Stream::copy(gpu, bytes));
    copy.check_clock()?;
    let rate = |stream: &Stream<'_>| Ok(stream.bytes() as f64 / repeated(|| stream.time())?);
    Ok(StreamRates { bytes: read.bytes(), read: rate(&read)?, copy: 2.0 * rate(&copy)? })
}
