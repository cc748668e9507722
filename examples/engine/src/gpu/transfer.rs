//! How fast the device and main memory exchange bytes.

use std::time::Instant;

use super::{
    Gpu, GpuError,
    buffers::{allocate, lost},
};

/// Bytes per second, one way: moves the first `bytes` bytes of `buffer` to main memory and back, unchanged, as swapped
/// blocks are. Twice, and the second time counts: the first one pays for new buffers. Waits for the device.
///
/// # Errors
/// [`GpuError::OutOfMemory`] without memory for two more buffers, [`GpuError::Lost`].
pub(crate) fn measure_transfer(gpu: &Gpu, buffer: &wgpu::Buffer, bytes: u64) -> Result<f64, GpuError> {
    use wgpu::{BufferUsages, MapMode};
    let out = allocate(&gpu.device, "transfer out", bytes, BufferUsages::MAP_READ | BufferUsages::COPY_DST)?;
    let back = allocate(&gpu.device, "transfer in", bytes, BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC)?;
    let mut moved = vec![0; bytes as usize];
    let mut start = Instant::now();
    for _ in 0..2 {
        start = Instant::now();
        copy(gpu, buffer, &out, bytes)?;
        map(gpu, &out, MapMode::Read)?;
        moved.copy_from_slice(&out.get_mapped_range(..).map_err(lost)?);
        out.unmap();
        map(gpu, &back, MapMode::Write)?;
        back.get_mapped_range_mut(..).map_err(lost)?.copy_from_slice(&moved);
        back.unmap();
        copy(gpu, &back, buffer, bytes)?;
    }
    Ok(2.0 * bytes as f64 / start.elapsed().as_secs_f64().max(1e-9))
}

fn copy(gpu: &Gpu, source: &wgpu::Buffer, destination: &wgpu::Buffer, bytes: u64) -> Result<(), GpuError> {
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    encoder.copy_buffer_to_buffer(source, 0, destination, 0, bytes);
    gpu.queue.submit([encoder.finish()]);
    gpu.wait()
}

fn map(gpu: &Gpu, buffer: &wgpu::Buffer, mode: wgpu::MapMode) -> Result<(), GpuError> {
    let (sender, receiver) = std::sync::mpsc::channel();
    buffer.map_async(mode, .., move |result| {
        // The receiver is gone only if this function returned early with an error.
        let _ = sender.send(result);
    });
    gpu.wait()?;
    receiver.try_recv().map_err(lost)?.map_err(lost)
}
