//! Which adapter to use, and opening it.
//!
//! Preference: a hardware adapter, then a software one, native interfaces before OpenGL. Adapters that cannot compute are
//! not offered.

use super::{GpuError, matmul::MAX_TILE_ROWS};

/// What the user asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A hardware adapter, else a software adapter, else the CPU twins.
    #[default]
    Auto,
    /// Any adapter.
    Gpu,
    /// The CPU twins.
    Cpu,
}

/// The adapters of this machine that can compute, best first.
#[derive(Debug)]
pub struct Adapters {
    adapters: Vec<wgpu::Adapter>,
}

impl Adapters {
    /// Asks every backend.
    pub fn find() -> Self {
        let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
        // Validation layers cost time and are not what this program is for.
        descriptor.flags = wgpu::InstanceFlags::empty();
        let instance = wgpu::Instance::new(descriptor);
        let mut adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
        adapters.retain(|adapter| {
            let capabilities = adapter.get_downlevel_capabilities();
            capabilities.flags.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS)
        });
        adapters.sort_by_key(|adapter| {
            let info = adapter.get_info();
            (rank(info.device_type), info.backend == wgpu::Backend::Gl)
        });
        Self { adapters }
    }

    /// The best adapter whose [label](Self::labels) contains `name_part`, upper and lower case being the same; the best of
    /// all if there is no `name_part`.
    pub fn choose(&self, name_part: Option<&str>) -> Option<&wgpu::Adapter> {
        let part = name_part.unwrap_or_default().to_lowercase();
        self.adapters.iter().find(|adapter| label(&adapter.get_info()).to_lowercase().contains(&part))
    }

    /// Names of all adapters, each with its interface: `llvmpipe (LLVM 15.0.6, 256 bits) on Vulkan`.
    pub fn labels(&self) -> Vec<String> {
        self.adapters.iter().map(|adapter| label(&adapter.get_info())).collect()
    }
}

fn rank(device_type: wgpu::DeviceType) -> u32 {
    match device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => 2,
        wgpu::DeviceType::Cpu => 3,
    }
}

fn label(info: &wgpu::AdapterInfo) -> String {
    format!("{} on {}", info.name, info.backend)
}

/// An open device.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// The device.
    pub device: wgpu::Device,
    /// Its queue.
    pub queue: wgpu::Queue,
    /// The adapter's name and interface.
    pub label: String,
    /// Whether the adapter computes on the CPU.
    pub is_software: bool,
    /// Rows of the tallest tile that is worth its registers: adapters with short vectors have few of them.
    pub(super) max_tile_rows: u32,
}

impl Gpu {
    /// Opens `adapter` with the features and limits that the cache recommends for it.
    ///
    /// # Errors
    /// [`GpuError::NoDevice`].
    pub fn open(adapter: &wgpu::Adapter) -> Result<Self, GpuError> {
        let info = adapter.get_info();
        let available = adapter.limits();
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("llama"),
            required_limits: wgpu::Limits {
                max_storage_buffer_binding_size: available.max_storage_buffer_binding_size,
                max_buffer_size: available.max_buffer_size,
                ..wgpu::Limits::default()
            },
            ..Default::default()
        };
        match pollster::block_on(adapter.request_device(&descriptor)) {
            Ok((device, queue)) => {
                let is_software = info.device_type == wgpu::DeviceType::Cpu;
                let max_tile_rows = if info.subgroup_max_size <= 4 { MAX_TILE_ROWS / 2 } else { MAX_TILE_ROWS };
                Ok(Self { device, queue, label: label(&info), is_software, max_tile_rows })
            }
            Err(source) => Err(GpuError::NoDevice { adapter: label(&info), source }),
        }
    }
}
