//! From a device's *enabled* limits and features to what the library does with them. The only place that looks at them.
//!
//! What the adapter could do does not count: an application that wants larger caches or subgroup operations enables
//! them when it requests its device, with [`recommended_limits`] and [`recommended_features`].

use crate::error::DeviceError;
use wgpu::{DeviceType, Features, Limits};

/// `base`, raised to what the adapter offers where it pays: the sizes of buffers and storage bindings.
///
/// ```no_run
/// # fn descriptor(adapter: &wgpu::Adapter) -> wgpu::DeviceDescriptor<'static> {
/// wgpu::DeviceDescriptor {
///     required_limits: paged_kv::recommended_limits(adapter, wgpu::Limits::default()),
///     required_features: paged_kv::recommended_features(adapter),
///     ..Default::default()
/// }
/// # }
/// ```
pub fn recommended_limits(adapter: &wgpu::Adapter, base: Limits) -> Limits {
    let offered = adapter.limits();
    Limits {
        max_storage_buffer_binding_size: base
            .max_storage_buffer_binding_size
            .max(offered.max_storage_buffer_binding_size),
        max_buffer_size: base.max_buffer_size.max(offered.max_buffer_size),
        ..base
    }
}

/// The features that the library makes use of, as far as the adapter has them: subgroup operations.
///
/// `SHADER_F16` is not among them: an f16 cache is read without it, and compilers make the same code of both.
pub fn recommended_features(adapter: &wgpu::Adapter) -> Features {
    adapter.features() & Features::SUBGROUP
}

/// What the library needs to know about a device.
#[derive(Clone, Debug)]
pub(super) struct Capabilities {
    /// Most bytes of a storage buffer and its binding.
    pub(super) max_binding_bytes: u64,
    /// Workgroups per dimension of a dispatch.
    pub(super) max_workgroups: u32,
    /// Alignment of dynamic offsets into uniform buffers, and of bound storage slices.
    pub(super) uniform_alignment: u32,
    pub(super) storage_alignment: u32,
    pub(super) subgroups: bool,
    /// Workgroups that fill the device.
    pub(super) target_workgroups: u32,
}

impl Capabilities {
    pub(super) fn of(device: &wgpu::Device) -> Result<Self, DeviceError> {
        let limits = device.limits();
        for (limit, needed, actual) in [
            ("max_bind_groups", 3, u64::from(limits.max_bind_groups)),
            (
                "max_storage_buffers_per_shader_stage",
                6,
                u64::from(limits.max_storage_buffers_per_shader_stage),
            ),
            (
                "max_uniform_buffers_per_shader_stage",
                3,
                u64::from(limits.max_uniform_buffers_per_shader_stage),
            ),
            (
                "max_dynamic_uniform_buffers_per_pipeline_layout",
                2,
                u64::from(limits.max_dynamic_uniform_buffers_per_pipeline_layout),
            ),
            (
                "max_compute_invocations_per_workgroup",
                64,
                u64::from(limits.max_compute_invocations_per_workgroup),
            ),
            ("max_compute_workgroup_size_x", 64, u64::from(limits.max_compute_workgroup_size_x)),
            (
                "max_compute_workgroup_storage_size",
                8192,
                u64::from(limits.max_compute_workgroup_storage_size),
            ),
            (
                "max_compute_workgroups_per_dimension",
                1024,
                u64::from(limits.max_compute_workgroups_per_dimension),
            ),
        ] {
            if actual < needed {
                return Err(DeviceError::LimitTooLow { limit, needed, actual });
            }
        }
        let info = device.adapter_info();
        Ok(Self {
            max_binding_bytes: limits.max_storage_buffer_binding_size.min(limits.max_buffer_size),
            max_workgroups: limits.max_compute_workgroups_per_dimension.min(u32::from(u16::MAX)),
            uniform_alignment: limits.min_uniform_buffer_offset_alignment,
            storage_alignment: limits.min_storage_buffer_offset_alignment,
            // Subgroups of fewer than 4 would need more workgroup memory than the kernels reserve.
            subgroups: device.features().contains(Features::SUBGROUP) && info.subgroup_min_size >= 4,
            target_workgroups: match info.device_type {
                DeviceType::DiscreteGpu => 1024,
                DeviceType::Cpu => 16,
                _ => 256,
            },
        })
    }
}
