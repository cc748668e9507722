//! Compute pipelines on RADV's hardware that is not there, with what the compiler tells about them.
//!
//! This is the one module of `unsafe` calls: wgpu opens no device that cannot run anything, so Vulkan is called itself.
//! What is created is destroyed unless a call fails; then the process that serves ends.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};

use ash::khr::pipeline_executable_properties as executable;
use ash::{Entry, vk};

use super::spirv::Spirv;
use crate::Failure;

/// A device without hardware, of the family in `RADV_FORCE_FAMILY`.
pub(super) struct Radv {
    device: ash::Device,
    executables: executable::Device,
    pub(super) mesa: String,
    // Dropped last: it keeps the loader, whose functions all of the above call.
    _entry: Entry,
}

/// What RADV tells about a compute pipeline.
pub(super) struct Pipeline {
    pub(super) statistics: BTreeMap<String, u64>,
    pub(super) subgroup_size: u32,
    /// Where it was asked for.
    pub(super) assembly: Option<String>,
}

impl Radv {
    pub(super) fn open() -> Result<Self, Failure> {
        let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_3);
        let instance_info = vk::InstanceCreateInfo::default().application_info(&application);
        let queues = [vk::DeviceQueueCreateInfo::default().queue_priorities(&[1.0])];
        let extensions = [executable::NAME.as_ptr()];
        let mut feature = vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::default()
            .pipeline_executable_info(true);
        let device_info = vk::DeviceCreateInfo::default()
            .queue_create_infos(&queues)
            .enabled_extension_names(&extensions)
            .push_next(&mut feature);
        // SAFETY: the loader is the system's own; every structure is complete and outlives the call that reads it. The
        // instance and the device live as long as the process.
        unsafe {
            let entry = Entry::load()?;
            let instance = entry.create_instance(&instance_info, None)?;
            let devices = instance.enumerate_physical_devices()?;
            let &physical = devices.first().ok_or("RADV offers no device")?;
            let mut driver = vk::PhysicalDeviceDriverProperties::default();
            let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut driver);
            instance.get_physical_device_properties2(physical, &mut properties);
            if driver.driver_id != vk::DriverId::MESA_RADV {
                return Err("the device is not RADV's".into());
            }
            let mesa = text(&driver.driver_info);
            let device = instance.create_device(physical, &device_info, None)?;
            let executables = executable::Device::new(&instance, &device);
            Ok(Self { device, executables, mesa, _entry: entry })
        }
    }

    pub(super) fn compile(&self, module: &Spirv, with_assembly: bool) -> Result<Pipeline, Failure> {
        let (sets, layout) = self.layout(module)?;
        let name = CString::new(module.entry_point.as_str())?;
        let mut flags = vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR;
        if with_assembly {
            flags |= vk::PipelineCreateFlags::CAPTURE_INTERNAL_REPRESENTATIONS_KHR;
        }
        // SAFETY: naga has validated the module, whose bindings are all in the layout; handles are the device's own, and
        // none is used after it is destroyed.
        unsafe {
            let code = vk::ShaderModuleCreateInfo::default().code(&module.words);
            let shader = self.device.create_shader_module(&code, None)?;
            let stage = vk::PipelineShaderStageCreateInfo::default()
                .stage(vk::ShaderStageFlags::COMPUTE)
                .module(shader)
                .name(&name);
            let info = vk::ComputePipelineCreateInfo::default().flags(flags).stage(stage).layout(layout);
            let pipelines = self.device.create_compute_pipelines(vk::PipelineCache::null(), &[info], None);
            let pipeline = pipelines.map_err(|(_, error)| error)?[0];
            let told = self.told(pipeline, with_assembly);
            self.device.destroy_pipeline(pipeline, None);
            self.device.destroy_shader_module(shader, None);
            self.device.destroy_pipeline_layout(layout, None);
            sets.into_iter().for_each(|set| self.device.destroy_descriptor_set_layout(set, None));
            told
        }
    }

    fn layout(&self, module: &Spirv) -> Result<(Vec<vk::DescriptorSetLayout>, vk::PipelineLayout), Failure> {
        let last_group = module.groups.keys().next_back().copied().unwrap_or(0);
        let mut sets = Vec::new();
        for group in 0..=last_group {
            let bindings = module.groups.get(&group).map_or(&[][..], Vec::as_slice);
            let bindings: Vec<_> = bindings.iter().map(|&binding| layout_binding(binding)).collect();
            let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
            // SAFETY: the structure is complete and outlives the call.
            sets.push(unsafe { self.device.create_descriptor_set_layout(&info, None)? });
        }
        let info = vk::PipelineLayoutCreateInfo::default().set_layouts(&sets);
        // SAFETY: likewise; the sets are the device's own.
        let layout = unsafe { self.device.create_pipeline_layout(&info, None)? };
        Ok((sets, layout))
    }

    /// # Safety
    /// `pipeline` must be this device's, made to be asked for statistics, and for its assembly if that is wanted.
    unsafe fn told(&self, pipeline: vk::Pipeline, with_assembly: bool) -> Result<Pipeline, Failure> {
        let of_pipeline = vk::PipelineInfoKHR::default().pipeline(pipeline);
        let of_executable = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline);
        // SAFETY: a compute pipeline has one executable, number 0. A statistic is read as what it says it is.
        unsafe {
            let properties = self.executables.get_pipeline_executable_properties(&of_pipeline)?;
            let statistics = self.executables.get_pipeline_executable_statistics(&of_executable)?;
            let numbers = statistics
                .iter()
                .filter(|one| one.format == vk::PipelineExecutableStatisticFormatKHR::UINT64);
            let statistics = numbers.map(|one| (text(&one.name), one.value.u64)).collect();
            let assembly = if with_assembly { Some(self.assembly(&of_executable)?) } else { None };
            Ok(Pipeline { statistics, subgroup_size: properties[0].subgroup_size, assembly })
        }
    }

    /// # Safety
    /// The executable must be of this device, made with its representations captured.
    unsafe fn assembly(&self, executable: &vk::PipelineExecutableInfoKHR<'_>) -> Result<String, Failure> {
        let get = self.executables.fp().get_pipeline_executable_internal_representations_khr;
        let handle = self.device.handle();
        // SAFETY: the first call tells how many representations there are, the second how long each is, and the third
        // fills as many bytes as the buffers have.
        unsafe {
            let mut count = 0;
            get(handle, executable, &mut count, std::ptr::null_mut()).result()?;
            let mut found = vec![vk::PipelineExecutableInternalRepresentationKHR::default(); count as usize];
            get(handle, executable, &mut count, found.as_mut_ptr()).result()?;
            let mut buffers: Vec<Vec<u8>> = found.iter().map(|one| vec![0; one.data_size]).collect();
            for (one, buffer) in found.iter_mut().zip(&mut buffers) {
                one.p_data = buffer.as_mut_ptr().cast();
            }
            get(handle, executable, &mut count, found.as_mut_ptr()).result()?;
            let named = found.iter().zip(buffers).find(|(one, _)| text(&one.name) == "Assembly");
            let (_, bytes) = named.ok_or("RADV shows no assembly")?;
            Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned())
        }
    }
}

fn layout_binding((binding, is_uniform): (u32, bool)) -> vk::DescriptorSetLayoutBinding<'static> {
    let kind = match is_uniform {
        true => vk::DescriptorType::UNIFORM_BUFFER,
        false => vk::DescriptorType::STORAGE_BUFFER,
    };
    vk::DescriptorSetLayoutBinding::default()
        .binding(binding)
        .descriptor_type(kind)
        .descriptor_count(1)
        .stage_flags(vk::ShaderStageFlags::COMPUTE)
}

/// Text that Vulkan leaves in an array, up to its terminator.
fn text(array: &[c_char]) -> String {
    let bytes: Vec<u8> = array.iter().map(|&letter| letter as u8).collect();
    CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_string_lossy().into_owned()
}
