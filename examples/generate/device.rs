//! Choosing and announcing the device.

use example_engine::{
    error::RunError,
    gpu::{Adapters, Gpu},
};

use crate::{Failure, options::Device};

/// How to get a Vulkan that needs no GPU.
const SOFTWARE_VULKAN: &str = "a software Vulkan is in mesa-vulkan-drivers and libvulkan1 (Debian, Ubuntu), \
                               mesa-vulkan-drivers and vulkan-loader (Fedora), vulkan-swrast (Arch)";

/// Opens the device that was asked for, `None` being the CPU, and says on standard error which it is.
pub(crate) fn open(device: Device, name_part: Option<&str>) -> Result<Option<Gpu>, Failure> {
    if device == Device::Cpu {
        return match name_part {
            Some(_) => Err(Failure::input("--adapter has no meaning with --device cpu")),
            None => {
                eprintln!("computing on the CPU");
                Ok(None)
            }
        };
    }
    let adapters = Adapters::find(name_part);
    let Some(adapter) = adapters.best() else {
        return none_found(device, name_part);
    };
    let gpu = Gpu::open(adapter).map_err(RunError::from)?;
    let kind = match gpu.is_software {
        true => "a software adapter, which may take a minute over the kernels when it first sees them",
        false => "a hardware adapter",
    };
    eprintln!("computing on {}, {kind}", gpu.label);
    // With a name, OpenGL may be what was asked for.
    if name_part.is_none() && gpu.is_software && adapter.get_info().backend == wgpu::Backend::Gl {
        eprintln!("no Vulkan was found: {SOFTWARE_VULKAN}");
    }
    Ok(Some(gpu))
}

fn none_found(device: Device, name_part: Option<&str>) -> Result<Option<Gpu>, Failure> {
    if let Some(part) = name_part {
        let labels = Adapters::find(None).labels();
        let found = if labels.is_empty() { "there is none".to_owned() } else { labels.join(", ") };
        return Err(Failure::input(format!("no adapter's name contains \"{part}\"; found: {found}")));
    }
    if device == Device::Gpu {
        return Err(Failure::input(format!("no adapter was found; {SOFTWARE_VULKAN}")));
    }
    eprintln!("no adapter was found, computing on the CPU; {SOFTWARE_VULKAN}");
    Ok(None)
}
