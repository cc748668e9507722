//! Every shader variant through naga: validation, the writers that wgpu uses, and the layout of shared structs.
//!
//! A pairwise sample by default; all variants with `PAGED_KV_MATRIX=1`. With `PAGED_KV_WGSL_DIR` set, the texts are
//! also written there for `tests/tint`, one file per variant.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::mem::offset_of;

use paged_kv::shaders::{LayerParams, StepParams, TensorParams, VariantKey, all_variants, sample_variants};

use crate::writers::validated;

/// Names and offsets of fields.
macro_rules! offsets {
    ($ty:ident: $($field:ident),+) => { vec![$((stringify!($field), offset_of!($ty, $field))),+] };
}

/// The variants that a run covers.
pub(crate) fn variants() -> Vec<VariantKey> {
    match std::env::var("PAGED_KV_MATRIX").as_deref() {
        Ok("1") => all_variants(),
        _ => sample_variants(),
    }
}

#[test]
fn every_variant_passes_naga_and_its_writers() {
    let variants = variants();
    for key in &variants {
        let variant = validated(key);
        for checked in [false, true] {
            assert_eq!(variant.spirv((1, 3), checked)[0], 0x0723_0203, "{key}");
            for (text, entry_point) in [variant.msl(checked), variant.hlsl(checked)] {
                assert!(text.contains(&entry_point), "{key}");
            }
        }
    }
    let all = all_variants().len();
    // Past the capture of test output, as the adapters are announced.
    let _ =
        std::io::stderr().write_all(format!("shaders: {} of {all} variants\n", variants.len()).as_bytes());
}

#[test]
fn no_variant_needs_more_than_the_default_limits() {
    let limits = wgpu::Limits::default();
    for key in variants() {
        let module = validated(&key).module;
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
                    num_query_heads, heads_per_kv_head, head_tiles, scale_log2, soft_cap_log2,
                    reach_tokens, first_tokens },
            ),
        ),
        (
            "TensorParams",
            (
                size_of::<TensorParams>(),
                offsets! { TensorParams: query_stride, key_stride, value_stride, output_stride, num_rows },
            ),
        ),
    ]
    .into_iter()
    .collect();

    for key in sample_variants() {
        let module = validated(&key).module;
        for (_, ty) in module.types.iter() {
            let Some((size, fields)) = ty.name.as_deref().and_then(|name| expected.get(name)) else {
                continue;
            };
            let naga::TypeInner::Struct { members, span } = &ty.inner else { panic!("{ty:?} is no struct") };
            // What follows the layer's parameters is not of a fixed size.
            let (heads, members): (Vec<_>, Vec<_>) =
                members.iter().partition(|member| member.name.as_deref() == Some("heads"));
            let end = heads.first().map_or(*span, |heads| heads.offset);
            assert_eq!(end as usize, *size, "{key}: {:?}", ty.name);
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
