//! The bind groups of the long-lived buffers, one set per arena.

use crate::error::DeviceError;
use crate::gpu::memory::{DeviceMemory, device_error};
use crate::gpu::pipelines::Layouts;
use crate::gpu::scope::guarded;
use wgpu::{BindGroup, BindGroupDescriptor, BindGroupEntry, BindGroupLayout};

/// Bind groups at index 1.
pub(super) struct ArenaGroups {
    /// Per arena: read by attention, beside the partial results that it writes.
    pub(super) attention_arenas: Vec<BindGroup>,
    /// Per arena: written by append and block copies.
    pub(super) written_arenas: Vec<BindGroup>,
    /// The partial results that merge reads.
    pub(super) merge: BindGroup,
}

impl ArenaGroups {
    pub(super) fn create(
        device: &wgpu::Device,
        layouts: &Layouts,
        memory: &DeviceMemory,
    ) -> Result<Self, DeviceError> {
        let create = || Self {
            attention_arenas: memory
                .arenas
                .iter()
                .map(|arena| {
                    let buffers = [arena, &memory.partials];
                    group(device, "paged_kv.attention_arena", &layouts.attention_arena, &buffers)
                })
                .collect(),
            written_arenas: memory
                .arenas
                .iter()
                .map(|arena| group(device, "paged_kv.written_arena", &layouts.written_arena, &[arena]))
                .collect(),
            merge: group(device, "paged_kv.merge", &layouts.merge, &[&memory.partials]),
        };
        guarded(device, create).map_err(|refusal| device_error(refusal, "bind groups", 0, 0))
    }

    pub(super) fn count(&self) -> u32 {
        (self.attention_arenas.len() + self.written_arenas.len() + 1) as u32
    }
}

fn group(
    device: &wgpu::Device,
    label: &str,
    layout: &BindGroupLayout,
    buffers: &[&wgpu::Buffer],
) -> BindGroup {
    let entries: Vec<_> = (0..)
        .zip(buffers)
        .map(|(binding, buffer)| BindGroupEntry { binding, resource: buffer.as_entire_binding() })
        .collect();
    device.create_bind_group(&BindGroupDescriptor { label: Some(label), layout, entries: &entries })
}
