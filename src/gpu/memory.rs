//! The long-lived buffers: arenas, block tables, scratch and layer parameters. All are created with the attention
//! object and never again.

use crate::config::CacheConfig;
use crate::error::DeviceError;
use crate::gpu::capabilities::Capabilities;
use crate::gpu::scope::{Refusal, guarded};
use crate::layout::ArenaLayout;
use std::ops::Range;
use wgpu::{BufferDescriptor, BufferUsages};

/// Creates buffers one after the other and knows how many bytes it has made.
pub(super) struct Allocator<'a> {
    device: &'a wgpu::Device,
    created_bytes: u64,
    num_buffers: u32,
}

impl<'a> Allocator<'a> {
    pub(super) fn new(device: &'a wgpu::Device) -> Self {
        Self { device, created_bytes: 0, num_buffers: 0 }
    }

    pub(super) fn num_buffers(&self) -> u32 {
        self.num_buffers
    }

    fn create(
        &mut self,
        object: &'static str,
        label: &str,
        size: u64,
        usage: BufferUsages,
    ) -> Result<wgpu::Buffer, DeviceError> {
        let descriptor = BufferDescriptor { label: Some(label), size, usage, mapped_at_creation: false };
        let buffer = guarded(self.device, || self.device.create_buffer(&descriptor))
            .map_err(|refusal| device_error(refusal, object, size, self.created_bytes))?;
        self.created_bytes += size;
        self.num_buffers += 1;
        Ok(buffer)
    }
}

/// `refusal` as the error of making `object`.
pub(super) fn device_error(
    refusal: Refusal,
    object: &'static str,
    asked_bytes: u64,
    created_bytes: u64,
) -> DeviceError {
    match refusal {
        Refusal::Lost => DeviceError::DeviceLost,
        Refusal::OutOfMemory => DeviceError::OutOfMemory { object, asked_bytes, created_bytes },
        Refusal::Other(error) => DeviceError::Refused { object, reason: error.to_string() },
    }
}

/// The pool and everything of fixed size around it.
pub(super) struct DeviceMemory {
    /// One buffer each.
    pub(super) arenas: Vec<wgpu::Buffer>,
    /// Block ids, `[max_sequences][table_entries]` for each stack of layers.
    pub(super) tables: wgpu::Buffer,
    /// Where each stack's tables lie in it, in bytes, and the group that the stack is of.
    pub(super) table_windows: Vec<Range<u64>>,
    pub(super) stack_groups: Vec<u32>,
    /// Partial results.
    pub(super) partials: wgpu::Buffer,
    /// Parameters of each layer, `layer_stride` bytes apart.
    pub(super) layers: wgpu::Buffer,
    pub(super) layer_stride: u32,
}

impl DeviceMemory {
    pub(super) fn create(
        allocator: &mut Allocator<'_>,
        cache: &CacheConfig,
        arenas: &ArenaLayout,
        partial_bytes: u64,
        layer_params: &[Vec<u8>],
        capabilities: &Capabilities,
    ) -> Result<Self, DeviceError> {
        let storage = BufferUsages::STORAGE | BufferUsages::COPY_DST | BufferUsages::COPY_SRC;
        let arenas = (0..arenas.num_arenas())
            .map(|arena| {
                let label = format!("paged_kv.arena {arena}");
                allocator.create("arena", &label, arenas.arena_bytes(arena), storage)
            })
            .collect::<Result<_, _>>()?;
        let table_windows = table_windows(cache, capabilities.storage_alignment);
        let table_bytes = table_windows.last().map_or(0, |window| window.end);
        let tables = allocator.create("block tables", "paged_kv.block_tables", table_bytes, storage)?;
        let partials = allocator.create(
            "partial results",
            "paged_kv.partials",
            partial_bytes,
            BufferUsages::STORAGE | BufferUsages::COPY_DST,
        )?;
        let layer_bytes = layer_params.first().map_or(0, Vec::len) as u32;
        let layer_stride = layer_bytes.next_multiple_of(capabilities.uniform_alignment);
        let layers = Self::create_layers(allocator, layer_params, layer_stride)?;
        let stack_groups = cache.stack_groups();
        Ok(Self { arenas, tables, table_windows, stack_groups, partials, layers, layer_stride })
    }

    /// Gives the memory back, even if others hold the buffers.
    pub(super) fn destroy(&self) {
        self.arenas
            .iter()
            .chain([&self.tables, &self.partials, &self.layers])
            .for_each(wgpu::Buffer::destroy);
    }

    fn create_layers(
        allocator: &mut Allocator<'_>,
        layer_params: &[Vec<u8>],
        layer_stride: u32,
    ) -> Result<wgpu::Buffer, DeviceError> {
        let mut bytes = vec![0u8; layer_params.len() * layer_stride as usize];
        for (entry, params) in bytes.chunks_exact_mut(layer_stride as usize).zip(layer_params) {
            entry[..params.len()].copy_from_slice(params);
        }
        create_filled(allocator, "layer parameters", "paged_kv.layers", &bytes)
    }
}

/// Where the tables of each stack lie: one stack's after another's, each where a binding may begin.
fn table_windows(cache: &CacheConfig, storage_alignment: u32) -> Vec<Range<u64>> {
    let mut end = 0u64;
    let windows = cache.stack_table_bytes().into_iter().map(|bytes| {
        let start = end.next_multiple_of(u64::from(storage_alignment));
        end = start + bytes;
        start..end
    });
    windows.collect()
}

/// A uniform buffer that holds `bytes` from the start: no upload goes through the queue.
fn create_filled(
    allocator: &mut Allocator<'_>,
    object: &'static str,
    label: &str,
    bytes: &[u8],
) -> Result<wgpu::Buffer, DeviceError> {
    let size = bytes.len() as u64;
    let buffer = create_uniform(allocator.device, label, bytes)
        .map_err(|refusal| device_error(refusal, object, size, allocator.created_bytes))?;
    allocator.created_bytes += size;
    allocator.num_buffers += 1;
    Ok(buffer)
}

/// A uniform buffer with `bytes`, written while it is mapped at creation.
pub(super) fn create_uniform(
    device: &wgpu::Device,
    label: &str,
    bytes: &[u8],
) -> Result<wgpu::Buffer, Refusal> {
    let descriptor = BufferDescriptor {
        label: Some(label),
        size: bytes.len() as u64,
        usage: BufferUsages::UNIFORM,
        mapped_at_creation: true,
    };
    let created = guarded(device, || {
        let buffer = device.create_buffer(&descriptor);
        // Mapping fails where the creation did, which the scope reports, or on a lost device, of which it knows nothing.
        buffer.get_mapped_range_mut(..).ok()?.copy_from_slice(bytes);
        buffer.unmap();
        Some(buffer)
    });
    created?.ok_or(Refusal::Lost)
}
