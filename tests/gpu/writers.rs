//! The kernels in the languages that drivers take: by naga's writers, with the options that wgpu 30 gives them.
//!
//! wgpu's options are in wgpu-hal: `vulkan/adapter.rs` and `vulkan/device.rs`, `metal/device.rs`, `dx12/device.rs`. The
//! library compiles *unchecked* modules, without bounds checks, loop bounds and zeroed workgroup memory, unless it is
//! asked for *checked* ones.

use naga::back::{hlsl, msl, spv};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, ModuleInfo, SubgroupOperationSet, ValidationFlags, Validator};
use paged_kv::shaders::VariantKey;

/// A variant that naga has accepted.
pub(crate) struct Validated {
    key: VariantKey,
    pub(crate) module: naga::Module,
    info: ModuleInfo,
}

/// Parses and validates a variant.
///
/// # Panics
///
/// With naga's message, if it refuses the variant.
pub(crate) fn validated(key: &VariantKey) -> Validated {
    validated_text(key, &key.wgsl())
}

/// The same with another text for the variant, one with the same entry point.
pub(crate) fn validated_text(key: &VariantKey, text: &str) -> Validated {
    let module = naga::front::wgsl::parse_str(text)
        .unwrap_or_else(|error| panic!("{key}: {}", error.emit_to_string(text)));
    // The first is no feature: every backend but old OpenGL has it, wgpu calls it a downlevel flag.
    let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    capabilities.set(Capabilities::SUBGROUP, key.subgroups());
    let mut validator = Validator::new(ValidationFlags::all(), capabilities);
    validator.subgroup_operations(SubgroupOperationSet::all());
    validator.subgroup_stages(naga::valid::ShaderStages::COMPUTE);
    let info =
        validator.validate(&module).unwrap_or_else(|error| panic!("{key}: {}", error.emit_to_string(text)));
    Validated { key: *key, module, info }
}

impl Validated {
    fn entry_point(&self) -> (naga::ShaderStage, String) {
        (naga::ShaderStage::Compute, self.key.kernel().name().to_owned())
    }

    /// SPIR-V of version (1, 3), which wgpu writes for Vulkan 1.1, up to (1, 6), which it writes for Vulkan 1.3.
    pub(crate) fn spirv(&self, lang_version: (u8, u8), checked: bool) -> Vec<u32> {
        let options = spv::Options {
            lang_version,
            flags: spv::WriterFlags::LABEL_VARYINGS | spv::WriterFlags::FORCE_POINT_SIZE,
            bounds_check_policies: policies(checked),
            zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
            force_loop_bounding: checked,
            emit_int_div_checks: checked,
            // wgpu numbers descriptors anew, within each group; nothing else depends on the numbers.
            fake_missing_bindings: true,
            ..Default::default()
        };
        let (shader_stage, entry_point) = self.entry_point();
        let pipeline = spv::PipelineOptions { shader_stage, entry_point };
        spv::write_vec(&self.module, &self.info, &options, Some(&pipeline))
            .unwrap_or_else(|error| panic!("{}: SPIR-V: {error}", self.key))
    }

    /// The text for Metal, and the entry point's name in it.
    pub(crate) fn msl(&self, checked: bool) -> (String, String) {
        // wgpu's numbering: buffers in the order of groups and bindings, then the sizes of runtime arrays.
        let mut resources = msl::EntryPointResources::default();
        for (slot, binding) in (0..).zip(bindings(&self.module)) {
            let target = msl::BindTarget { buffer: Some(slot), mutable: true, ..Default::default() };
            resources.resources.insert(binding, target);
            resources.sizes_buffer = Some(slot + 1);
        }
        let entry_point = self.entry_point();
        let options = msl::Options {
            lang_version: (2, 4),
            per_entry_point_map: [(entry_point.1.clone(), resources)].into_iter().collect(),
            fake_missing_bindings: false,
            bounds_check_policies: policies(checked),
            zero_initialize_workgroup_memory: false,
            force_loop_bounding: checked,
            emit_int_div_checks: checked,
            ..Default::default()
        };
        let pipeline = msl::PipelineOptions { entry_point: Some(entry_point), ..Default::default() };
        let (text, translation) = msl::write_string(&self.module, &self.info, &options, &pipeline)
            .unwrap_or_else(|error| panic!("{}: MSL: {error}", self.key));
        (text, self.only(translation.entry_point_names))
    }

    /// The text for the lowest shader model that the variant needs on DX12, and the entry point's name in it.
    pub(crate) fn hlsl(&self, checked: bool) -> (String, String) {
        // Without DXC there is no wave intrinsic, and wgpu offers no subgroups.
        let lowest = match self.key.subgroups() {
            true => hlsl::ShaderModel::V6_0,
            false => hlsl::ShaderModel::V5_1,
        };
        self.hlsl_for(lowest, checked)
    }

    /// The text for DX12 with a shader model, and the entry point's name in it.
    pub(crate) fn hlsl_for(&self, shader_model: hlsl::ShaderModel, checked: bool) -> (String, String) {
        // wgpu's numbering: a register class's own count through groups and bindings.
        let mut registers = [0; 3];
        let mut binding_map = hlsl::BindingMap::default();
        for binding in bindings(&self.module) {
            let class = self.register_class(&binding);
            let register = registers[class];
            registers[class] += 1;
            binding_map.insert(binding, hlsl::BindTarget { register, ..Default::default() });
        }
        let options = hlsl::Options {
            shader_model,
            binding_map,
            fake_missing_bindings: false,
            zero_initialize_workgroup_memory: false,
            restrict_indexing: checked,
            force_loop_bounding: checked,
            ..Default::default()
        };
        let pipeline = hlsl::PipelineOptions { entry_point: Some(self.entry_point()) };
        let mut text = String::new();
        let reflection = hlsl::Writer::new(&mut text, &options, &pipeline)
            .write(&self.module, &self.info, None)
            .unwrap_or_else(|error| panic!("{}: HLSL: {error}", self.key));
        (text, self.only(reflection.entry_point_names))
    }

    /// 0: constant buffers, 1: read-only buffers, 2: others.
    fn register_class(&self, binding: &naga::ResourceBinding) -> usize {
        let variables = self.module.global_variables.iter();
        let spaces = variables.filter(|(_, variable)| variable.binding == Some(*binding));
        let mut classes = spaces.map(|(_, variable)| match variable.space {
            naga::AddressSpace::Uniform => 0,
            naga::AddressSpace::Storage { access } if !access.contains(naga::StorageAccess::STORE) => 1,
            _ => 2,
        });
        classes.next().expect("a binding of the module")
    }

    fn only<E: std::fmt::Display>(&self, names: Vec<Result<String, E>>) -> String {
        let [name] =
            <[_; 1]>::try_from(names).unwrap_or_else(|_| panic!("{}: not one entry point", self.key));
        name.unwrap_or_else(|error| panic!("{}: {error}", self.key))
    }
}

fn policies(checked: bool) -> BoundsCheckPolicies {
    let policy = match checked {
        true => BoundsCheckPolicy::Restrict,
        false => BoundsCheckPolicy::Unchecked,
    };
    BoundsCheckPolicies {
        index: policy,
        buffer: policy,
        image_load: policy,
        binding_array: BoundsCheckPolicy::Unchecked,
    }
}

fn bindings(module: &naga::Module) -> Vec<naga::ResourceBinding> {
    let mut bindings: Vec<_> =
        module.global_variables.iter().filter_map(|(_, variable)| variable.binding).collect();
    bindings.sort();
    bindings
}
