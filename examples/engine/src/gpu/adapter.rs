//! Which adapter to use, and opening it.
//!
//! A hardware adapter is preferred to a software one. OpenGL is looked at only when no other interface has what was
//! asked for: its drivers are the last to get computing right. Adapters that cannot compute are not offered.

use super::{GpuError, matmul::MAX_TILE_ROWS, timer};

/// The adapters of this machine that can compute, best first.
#[derive(Debug)]
pub struct Adapters {
    adapters: Vec<wgpu::Adapter>,
}

impl Adapters {
    /// The adapters whose [label](Self::labels) contains `name_part`, upper and lower case being the same; all
    /// adapters if it is `None`.
    pub fn find(name_part: Option<&str>) -> Self {
        let part = name_part.unwrap_or_default().to_lowercase();
        let native = Self::of(wgpu::Backends::all() - wgpu::Backends::GL, &part);
        if native.adapters.is_empty() { Self::of(wgpu::Backends::GL, &part) } else { native }
    }

    fn of(backends: wgpu::Backends, part: &str) -> Self {
        let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
        descriptor.backends = backends;
        // Validation layers cost time and are not what this program is for.
        descriptor.flags = wgpu::InstanceFlags::empty();
        let instance = wgpu::Instance::new(descriptor);
        let mut adapters = pollster::block_on(instance.enumerate_adapters(backends));
        adapters.retain(|adapter| {
            let flags = adapter.get_downlevel_capabilities().flags;
            let named = label(&adapter.get_info()).to_lowercase().contains(part);
            flags.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS) && named
        });
        adapters.sort_by_key(|adapter| rank(adapter.get_info().device_type));
        Self { adapters }
    }

    /// The best of them.
    pub fn best(&self) -> Option<&wgpu::Adapter> {
        self.adapters.first()
    }

    /// All of them.
    pub fn all(&self) -> &[wgpu::Adapter] {
        &self.adapters
    }

    /// Their names, each with its interface: `llvmpipe (LLVM 15.0.6, 256 bits) on vulkan`.
    pub fn labels(&self) -> Vec<String> {
        self.adapters.iter().map(|adapter| label(&adapter.get_info())).collect()
    }
}

/// The adapter to draw and compute on: of those whose name contains `name_part` and that can draw on `surface`, the best
/// by the same order, OpenGL last.
pub fn choose(
    adapters: &[wgpu::Adapter],
    name_part: Option<&str>,
    surface: Option<&wgpu::Surface<'_>>,
) -> Option<wgpu::Adapter> {
    let part = name_part.unwrap_or_default().to_lowercase();
    let fits = |adapter: &&wgpu::Adapter| {
        let flags = adapter.get_downlevel_capabilities().flags;
        flags.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS)
            && label(&adapter.get_info()).to_lowercase().contains(&part)
            && surface.is_none_or(|surface| adapter.is_surface_supported(surface))
    };
    let order = |adapter: &&wgpu::Adapter| {
        let info = adapter.get_info();
        (info.backend == wgpu::Backend::Gl, rank(info.device_type))
    };
    adapters.iter().filter(fits).min_by_key(order).cloned()
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
    /// Opens `adapter` with the features and limits that the cache recommends for it, and timestamps where it has them.
    ///
    /// # Errors
    /// [`GpuError::NoDevice`].
    pub fn open(adapter: &wgpu::Adapter) -> Result<Self, GpuError> {
        match pollster::block_on(adapter.request_device(&Self::device_descriptor(adapter))) {
            Ok((device, queue)) => Ok(Self::from_device(device, queue)),
            Err(error) => {
                Err(GpuError::NoDevice { adapter: label(&adapter.get_info()), source: Box::new(error) })
            }
        }
    }

    /// What to ask `adapter` for, also for an application that opens its device itself.
    pub fn device_descriptor(adapter: &wgpu::Adapter) -> wgpu::DeviceDescriptor<'static> {
        // wgpu's defaults, or less where an interface such as OpenGL offers less.
        let base_limits = wgpu::Limits::default().or_worse_values_from(&adapter.limits());
        wgpu::DeviceDescriptor {
            label: Some("llama"),
            required_features: paged_kv::recommended_features(adapter)
                | (adapter.features() & timer::FEATURES),
            required_limits: paged_kv::recommended_limits(adapter, base_limits),
            ..Default::default()
        }
    }

    /// Waits for everything that was submitted.
    ///
    /// # Errors
    /// [`GpuError::Lost`] if the device did not finish.
    pub fn wait(&self) -> Result<(), GpuError> {
        match self.device.poll(wgpu::PollType::wait_indefinitely()) {
            Ok(_) => Ok(()),
            Err(error) => Err(GpuError::Lost { reason: error.to_string() }),
        }
    }

    /// A device that the application has opened itself.
    pub fn from_device(device: wgpu::Device, queue: wgpu::Queue) -> Self {
        let info = device.adapter_info();
        Self {
            device,
            queue,
            label: label(&info),
            is_software: info.device_type == wgpu::DeviceType::Cpu,
            max_tile_rows: if info.subgroup_max_size <= 4 { MAX_TILE_ROWS / 2 } else { MAX_TILE_ROWS },
        }
    }
}
