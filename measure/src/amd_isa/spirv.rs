//! From WGSL to the SPIR-V that wgpu gives a Vulkan 1.3 driver for the library's modules: trusted, so without checks.

use std::collections::BTreeMap;

use naga::back::spv;
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, ValidationFlags, Validator};
use naga::{AddressSpace, ShaderStage};

use crate::Failure;

/// A module with one entry point.
pub(super) struct Spirv {
    pub(super) words: Vec<u32>,
    pub(super) entry_point: String,
    /// By group: bindings, and whether each is a uniform buffer rather than a storage buffer.
    pub(super) groups: BTreeMap<u32, Vec<(u32, bool)>>,
}

pub(super) fn translate(wgsl: &str, entry_point: &str) -> Result<Spirv, Failure> {
    let module = naga::front::wgsl::parse_str(wgsl).map_err(|error| error.emit_to_string(wgsl))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map_err(|error| error.emit_to_string(wgsl))?;
    let entry =
        spv::PipelineOptions { shader_stage: ShaderStage::Compute, entry_point: entry_point.to_owned() };
    let words = spv::write_vec(&module, &info, &options(), Some(&entry))?;
    let mut groups: BTreeMap<u32, Vec<(u32, bool)>> = BTreeMap::new();
    for (_, variable) in module.global_variables.iter() {
        if let Some(binding) = variable.binding {
            let is_uniform = variable.space == AddressSpace::Uniform;
            groups.entry(binding.group).or_default().push((binding.binding, is_uniform));
        }
    }
    Ok(Spirv { words, entry_point: entry_point.to_owned(), groups })
}

fn options() -> spv::Options<'static> {
    let unchecked = BoundsCheckPolicy::Unchecked;
    spv::Options {
        lang_version: (1, 6),
        flags: spv::WriterFlags::LABEL_VARYINGS,
        bounds_check_policies: BoundsCheckPolicies {
            index: unchecked,
            buffer: unchecked,
            image_load: unchecked,
            binding_array: unchecked,
        },
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        emit_int_div_checks: false,
        ..spv::Options::default()
    }
}
