//! Buffers, bind groups, and what can go wrong when the device is asked for them.

use std::fmt;

use crate::error::LoadError;

/// Why the model does not run on a device.
#[derive(Debug)]
#[non_exhaustive]
pub enum GpuError {
    /// The model file cannot be used.
    Load(LoadError),
    /// A buffer is larger than the device's limits allow.
    TooLarge {
        /// What it is for.
        what: String,
        /// Bytes it would have.
        bytes: u64,
        /// Bytes that a buffer and its binding may have.
        max_bytes: u64,
    },
    /// The device has no memory left.
    OutOfMemory {
        /// What it was for.
        what: String,
        /// Bytes asked for.
        bytes: u64,
    },
    /// The adapter gave no device.
    NoDevice {
        /// The adapter's name.
        adapter: String,
        /// What it said.
        source: Box<wgpu::RequestDeviceError>,
    },
    /// The device failed while a step ran.
    Lost {
        /// What it said.
        reason: String,
    },
}

impl fmt::Display for GpuError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load(error) => error.fmt(out),
            Self::TooLarge { what, bytes, max_bytes } => {
                write!(out, "the buffer for {what} takes {bytes} bytes but the device allows {max_bytes}")
            }
            Self::OutOfMemory { what, bytes } => {
                write!(out, "the device has no memory left for {what}, which takes {bytes} bytes")
            }
            Self::NoDevice { adapter, source } => write!(out, "{adapter} cannot be opened: {source}"),
            Self::Lost { reason } => write!(out, "the device failed: {reason}"),
        }
    }
}

impl std::error::Error for GpuError {}

impl From<LoadError> for GpuError {
    fn from(error: LoadError) -> Self {
        Self::Load(error)
    }
}

/// A storage buffer with `contents`.
pub(super) fn create(device: &wgpu::Device, label: &str, contents: &[u8]) -> Result<wgpu::Buffer, GpuError> {
    let descriptor = descriptor(label, contents.len() as u64, wgpu::BufferUsages::STORAGE, true);
    let buffer = checked(device, &descriptor)?;
    buffer.get_mapped_range_mut(..).map_err(lost)?.copy_from_slice(contents);
    buffer.unmap();
    Ok(buffer)
}

/// A buffer of zeros.
pub(super) fn allocate(
    device: &wgpu::Device,
    label: &str,
    bytes: u64,
    usage: wgpu::BufferUsages,
) -> Result<wgpu::Buffer, GpuError> {
    checked(device, &descriptor(label, bytes, usage, false))
}

/// A uniform buffer that never changes.
pub(super) fn params(device: &wgpu::Device, label: &str, words: &[u32]) -> Result<wgpu::Buffer, GpuError> {
    let bytes: &[u8] = bytemuck::cast_slice(words);
    // Uniform structs come in steps of 16 bytes.
    let size = bytes.len().next_multiple_of(16) as u64;
    let buffer = checked(device, &descriptor(label, size, wgpu::BufferUsages::UNIFORM, true))?;
    buffer.get_mapped_range_mut(..bytes.len() as u64).map_err(lost)?.copy_from_slice(bytes);
    buffer.unmap();
    Ok(buffer)
}

/// A bind group, its resources in binding order.
pub(super) fn bind(
    device: &wgpu::Device,
    label: &str,
    layout: &wgpu::BindGroupLayout,
    resources: &[wgpu::BindingResource<'_>],
) -> wgpu::BindGroup {
    let entries: Vec<_> = resources
        .iter()
        .zip(0..)
        .map(|(resource, binding)| wgpu::BindGroupEntry { binding, resource: resource.clone() })
        .collect();
    device.create_bind_group(&wgpu::BindGroupDescriptor { label: Some(label), layout, entries: &entries })
}

/// What a device that cannot map a buffer any more says.
pub(super) fn lost(error: impl fmt::Display) -> GpuError {
    GpuError::Lost { reason: error.to_string() }
}

fn descriptor(
    label: &str,
    size: u64,
    usage: wgpu::BufferUsages,
    mapped_at_creation: bool,
) -> wgpu::BufferDescriptor<'_> {
    wgpu::BufferDescriptor { label: Some(label), size, usage, mapped_at_creation }
}

/// Creates a buffer within the device's limits, and asks whether there was memory for it.
fn checked(device: &wgpu::Device, descriptor: &wgpu::BufferDescriptor<'_>) -> Result<wgpu::Buffer, GpuError> {
    let limits = device.limits();
    let max_bytes = if descriptor.usage.contains(wgpu::BufferUsages::STORAGE) {
        limits.max_buffer_size.min(limits.max_storage_buffer_binding_size)
    } else {
        limits.max_buffer_size
    };
    let what = descriptor.label.unwrap_or_default().to_owned();
    if descriptor.size > max_bytes {
        return Err(GpuError::TooLarge { what, bytes: descriptor.size, max_bytes });
    }
    let scope = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let buffer = device.create_buffer(descriptor);
    match pollster::block_on(scope.pop()) {
        Some(_) => Err(GpuError::OutOfMemory { what, bytes: descriptor.size }),
        None => Ok(buffer),
    }
}

/// The bytes of a buffer, read back.
#[cfg(test)]
pub(super) fn bytes_of(gpu: &super::Gpu, buffer: &wgpu::Buffer) -> Vec<u8> {
    let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
    let readback = gpu.device.create_buffer(&descriptor("readback", buffer.size(), usage, false));
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    encoder.copy_buffer_to_buffer(buffer, 0, &readback, 0, buffer.size());
    gpu.queue.submit([encoder.finish()]);
    readback.slice(..).map_async(wgpu::MapMode::Read, |mapped| mapped.expect("it maps"));
    gpu.device.poll(wgpu::PollType::wait_indefinitely()).expect("the device finishes");
    readback.get_mapped_range(..).expect("it is mapped").to_vec()
}
