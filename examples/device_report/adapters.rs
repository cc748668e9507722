//! The adapters of this machine, and what one of them says of itself.

use serde::Serialize;
use wgpu::{Backends, DeviceType, DownlevelFlags, InstanceFlags};

/// All adapters, each once: hardware before software, OpenGL last.
pub(crate) fn find() -> Vec<wgpu::Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    // What an application has by default in a release build; it caps sizes that Metal offers.
    descriptor.flags = InstanceFlags::VALIDATION_INDIRECT_CALL;
    let instance = wgpu::Instance::new(descriptor);
    let mut adapters = pollster::block_on(instance.enumerate_adapters(Backends::all()));
    // A driver may be listed twice, and DX12 repeats its own.
    let mut seen = Vec::new();
    adapters.retain(|adapter| {
        let facts = AdapterFacts::of(adapter);
        let new = !seen.contains(&facts);
        seen.push(facts);
        new
    });
    adapters.sort_by_key(|adapter| {
        let info = adapter.get_info();
        let rank = match info.device_type {
            DeviceType::DiscreteGpu => 0,
            DeviceType::IntegratedGpu => 1,
            DeviceType::VirtualGpu | DeviceType::Other => 2,
            DeviceType::Cpu => 3,
        };
        (info.backend == wgpu::Backend::Gl, rank)
    });
    adapters
}

/// What wgpu tells of an adapter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct AdapterFacts {
    pub(crate) name: String,
    /// The interface: vulkan, metal, dx12, gl.
    pub(crate) backend: String,
    /// Its name and interface, a part of which is what `--adapter` takes.
    pub(crate) label: String,
    pub(crate) device_type: String,
    pub(crate) driver: String,
    pub(crate) driver_info: String,
    /// PCI ids, 0 where they are not known.
    pub(crate) vendor: u32,
    pub(crate) device: u32,
    /// Where it is plugged in; empty where that is not known.
    pub(crate) pci_bus: String,
    /// Smallest and largest subgroup; wgpu's bounds where the driver tells none.
    pub(crate) subgroup_sizes: [u32; 2],
    /// Whether it runs compute shaders at all.
    pub(crate) computes: bool,
}

impl AdapterFacts {
    pub(crate) fn of(adapter: &wgpu::Adapter) -> Self {
        let info = adapter.get_info();
        Self {
            backend: info.backend.to_string(),
            label: format!("{} on {}", info.name, info.backend),
            device_type: format!("{:?}", info.device_type),
            vendor: info.vendor,
            device: info.device,
            pci_bus: info.device_pci_bus_id,
            subgroup_sizes: [info.subgroup_min_size, info.subgroup_max_size],
            computes: adapter.get_downlevel_capabilities().flags.contains(DownlevelFlags::COMPUTE_SHADERS),
            name: info.name,
            driver: info.driver,
            driver_info: info.driver_info,
        }
    }
}
