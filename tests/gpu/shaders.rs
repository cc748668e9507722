//! Every shader variant through naga: validation, the writers that wgpu uses, and the layout of shared structs.
//!
//! A pairwise sample by default; all variants with `PAGED_KV_MATRIX=1`. With `PAGED_KV_WGSL_DIR` set, the texts are
//! also written there for `tests/tint`, one file per variant.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::mem::offset_of;

use naga::back::{hlsl, msl, spv};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, ModuleInfo, SubgroupOperationSet, ValidationFlags, Validator};
use paged_kv::shaders::{LayerParams, StepParams, TensorParams, VariantKey, all_variants, sample_variants};

/// Names and offsets of fields.
macro_rules! offsets {
    ($ty:ident: $($field:ident),+) => { vec![$((stringify!($field), offset_of!($ty, $field))),+] };
}

fn variants() -> Vec<VariantKey> {
    match std::env::var("PAGED_KV_MATRIX").as_deref() {
        Ok("1") => all_variants(),
        _ => sample_variants(),
    }
}

fn validated(key: &VariantKey) -> (naga::Module, ModuleInfo) {
    let text = key.wgsl();
    let module = naga::front::wgsl::parse_str(&text)
        .unwrap_or_else(|error| panic!("{key}: {}", error.emit_to_string(&text)));
    // The first is no feature: every backend but old OpenGL has it, wgpu calls it a downlevel flag.
    let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    capabilities.set(Capabilities::SUBGROUP, key.subgroups());
    let mut validator = Validator::new(ValidationFlags::all(), capabilities);
    validator.subgroup_operations(SubgroupOperationSet::all());
    validator.subgroup_stages(naga::valid::ShaderStages::COMPUTE);
    let info =
        validator.validate(&module).unwrap_or_else(|error| panic!("{key}: {}", error.emit_to_string(&text)));
    (module, info)
}

#[test]
fn every_variant_passes_naga_and_its_writers() {
    let variants = variants();
    for key in &variants {
        let (module, info) = validated(key);
        for checked in [false, true] {
            write_spirv(key, &module, &info, checked);
            write_msl(key, &module, &info, checked);
            write_hlsl(key, &module, &info, checked);
        }
    }
    let all = all_variants().len();
    // Past the capture of test output, as the adapters are announced.
    let _ =
        std::io::stderr().write_all(format!("shaders: {} of {all} variants\n", variants.len()).as_bytes());
}

fn policies(policy: BoundsCheckPolicy) -> BoundsCheckPolicies {
    BoundsCheckPolicies {
        index: policy,
        buffer: policy,
        image_load: policy,
        binding_array: BoundsCheckPolicy::Unchecked,
    }
}

fn policy(checked: bool) -> BoundsCheckPolicy {
    match checked {
        true => BoundsCheckPolicy::Restrict,
        false => BoundsCheckPolicy::Unchecked,
    }
}

fn write_spirv(key: &VariantKey, module: &naga::Module, info: &ModuleInfo, checked: bool) {
    // Vulkan 1.1 is the least that wgpu needs for subgroup operations.
    let options = spv::Options {
        lang_version: (1, 3),
        flags: spv::WriterFlags::empty(),
        bounds_check_policies: policies(policy(checked)),
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: checked,
        emit_int_div_checks: checked,
        fake_missing_bindings: true,
        ..Default::default()
    };
    let pipeline = spv::PipelineOptions {
        shader_stage: naga::ShaderStage::Compute,
        entry_point: key.kernel().name().to_owned(),
    };
    let words = spv::write_vec(module, info, &options, Some(&pipeline))
        .unwrap_or_else(|error| panic!("{key}: SPIR-V: {error}"));
    assert_eq!(words[0], 0x0723_0203);
}

fn write_msl(key: &VariantKey, module: &naga::Module, info: &ModuleInfo, checked: bool) {
    // wgpu's numbering: buffers in the order of groups and bindings, then the sizes of runtime arrays.
    let mut resources = msl::EntryPointResources::default();
    for (slot, binding) in (0..).zip(bindings(module)) {
        let target = msl::BindTarget { buffer: Some(slot), mutable: true, ..Default::default() };
        resources.resources.insert(binding, target);
        resources.sizes_buffer = Some(slot + 1);
    }
    let options = msl::Options {
        lang_version: (2, 4),
        per_entry_point_map: [(key.kernel().name().to_owned(), resources)].into_iter().collect(),
        fake_missing_bindings: false,
        bounds_check_policies: policies(policy(checked)),
        zero_initialize_workgroup_memory: false,
        force_loop_bounding: checked,
        emit_int_div_checks: checked,
        ..Default::default()
    };
    let pipeline = msl::PipelineOptions {
        entry_point: Some((naga::ShaderStage::Compute, key.kernel().name().to_owned())),
        ..Default::default()
    };
    let (text, translation) = msl::write_string(module, info, &options, &pipeline)
        .unwrap_or_else(|error| panic!("{key}: MSL: {error}"));
    for name in translation.entry_point_names {
        let name = name.unwrap_or_else(|error| panic!("{key}: MSL: {error}"));
        assert!(text.contains(&name), "{key}");
    }
}

fn write_hlsl(key: &VariantKey, module: &naga::Module, info: &ModuleInfo, checked: bool) {
    let options = hlsl::Options {
        // Without DXC there is no wave intrinsic, and wgpu offers no subgroups.
        shader_model: match key.subgroups() {
            true => hlsl::ShaderModel::V6_0,
            false => hlsl::ShaderModel::V5_1,
        },
        zero_initialize_workgroup_memory: false,
        restrict_indexing: checked,
        force_loop_bounding: checked,
        ..Default::default()
    };
    let pipeline = hlsl::PipelineOptions {
        entry_point: Some((naga::ShaderStage::Compute, key.kernel().name().to_owned())),
    };
    let mut text = String::new();
    let reflection = hlsl::Writer::new(&mut text, &options, &pipeline)
        .write(module, info, None)
        .unwrap_or_else(|error| panic!("{key}: HLSL: {error}"));
    for name in reflection.entry_point_names {
        let name = name.unwrap_or_else(|error| panic!("{key}: HLSL: {error}"));
        assert!(text.contains(&name), "{key}");
    }
}

fn bindings(module: &naga::Module) -> Vec<naga::ResourceBinding> {
    let mut bindings: Vec<_> =
        module.global_variables.iter().filter_map(|(_, variable)| variable.binding).collect();
    bindings.sort();
    bindings
}

#[test]
fn no_variant_needs_more_than_the_default_limits() {
    let limits = wgpu::Limits::default();
    for key in variants() {
        let (module, _) = validated(&key);
        let mut storage = 0;
        let mut workgroup_bytes = 0;
        for (_, variable) in module.global_variables.iter() {
            match variable.space {
                naga::AddressSpace::Storage { .. } => storage += 1,
                naga::AddressSpace::WorkGroup => {
                    workgroup_bytes += module.types[variable.ty].inner.size(module.to_ctx());
                }
                _ => {}
            }
        }
        assert!(
            storage <= limits.max_storage_buffers_per_shader_stage.min(6),
            "{key}: {storage} storage buffers"
        );
        // Little enough for a dozen workgroups on a core with 64 KiB.
        assert!(workgroup_bytes <= 64 * 1024 / 12, "{key}: {workgroup_bytes} bytes of workgroup memory");
    }
}

#[test]
fn host_structs_have_the_offsets_of_the_shaders() {
    /// Size and field offsets of a struct.
    type Layout = (usize, Vec<(&'static str, usize)>);
    let expected: BTreeMap<&str, Layout> = [
        (
            "StepParams",
            (
                size_of::<StepParams>(),
                offsets! { StepParams: num_rows, token_ids, positions, slot_mapping, query_starts, context_lens,
                    table_rows, decode_items, num_decode_items, prefill_items, num_prefill_items, merge_items,
                    num_merge_items, block_copies, num_block_copies, padding },
            ),
        ),
        (
            "LayerParams",
            (
                size_of::<LayerParams>(),
                offsets! { LayerParams: block_stride, layer_start, block_shift, table_entries, num_kv_heads,
                    num_query_heads, heads_per_kv_head, head_tiles, scale_log2 },
            ),
        ),
        (
            "TensorParams",
            (
                size_of::<TensorParams>(),
                offsets! { TensorParams: query_stride, key_stride, value_stride, output_stride },
            ),
        ),
    ]
    .into_iter()
    .collect();

    for key in sample_variants() {
        let (module, _) = validated(&key);
        for (_, ty) in module.types.iter() {
            let Some((size, fields)) = ty.name.as_deref().and_then(|name| expected.get(name)) else {
                continue;
            };
            let naga::TypeInner::Struct { members, span } = &ty.inner else { panic!("{ty:?} is no struct") };
            assert_eq!(*span as usize, *size, "{key}: {:?}", ty.name);
            let found: Vec<_> = members
                .iter()
                .map(|member| (member.name.as_deref().expect("members have names"), member.offset as usize))
                .filter(|(name, _)| !name.starts_with("padding_"))
                .collect();
            assert_eq!(&found, fields, "{key}: {:?}", ty.name);
        }
    }
}

#[test]
fn texts_are_written_for_tint_where_asked() {
    let Some(folder) = std::env::var_os("PAGED_KV_WGSL_DIR") else { return };
    let folder = std::path::PathBuf::from(folder);
    std::fs::create_dir_all(&folder).expect("the folder for shader texts can be made");
    for key in variants() {
        // The checker adds the directives that Tint wants and naga refuses.
        let extensions = if key.subgroups() { "subgroups" } else { "" };
        let text = format!("// requires: {extensions}\n{}", key.wgsl());
        std::fs::write(folder.join(format!("{key}.wgsl")), text).expect("a shader text can be written");
    }
}
