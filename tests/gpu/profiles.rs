//! What devices that nobody here owns would get, from their limits and subgroup sizes: attention kernels, arenas, and how
//! large a pool may be.
//!
//! The devices are wgpu's noop backend with what wgpu tells of the real ones (wgpu-core's own table of limits by kind of
//! adapter, drivers' sources, reports). What an application gets is asked for as it would ask:
//! [`recommended_limits`](paged_kv::recommended_limits) over wgpu's defaults. The table is `profiles.txt`; a change of it is
//! a change of what users get. How finely a step is split goes by the type of device, which the noop backend does not tell:
//! see `a_step_is_split_by_the_type_of_device` in `src/gpu/capabilities.rs`.

use std::fmt::Write as _;
use std::ops::RangeInclusive;

use paged_kv::{
    CacheConfig, DEFAULT_BLOCK_SIZE, KvType, ModelShape, PagedAttention, recommended_features,
    recommended_limits,
};
use wgpu::{Features, Limits};

use crate::device::TestAdapter;

/// 8 billion parameters: 128 KiB per token in f16.
const LLAMA_8B: ModelShape = ModelShape::new(32, 32, 8, 128);

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

struct Profile {
    name: &'static str,
    /// Bytes of a storage binding and of a buffer.
    binding: u64,
    buffer: u64,
    /// Sizes of a subgroup as wgpu reports them; none without subgroup operations.
    subgroups: Option<RangeInclusive<u32>>,
}

const fn profile(
    name: &'static str,
    binding: u64,
    buffer: u64,
    subgroups: Option<RangeInclusive<u32>>,
) -> Profile {
    Profile { name, binding, buffer, subgroups }
}

const PROFILES: &[Profile] = &[
    profile("Apple M1 to M4, Metal", 4 * GIB - 4, 8 * GIB, Some(4..=64)),
    profile("AMD RDNA2, RDNA3, Vulkan, Linux", 2 * GIB - 4, 2 * GIB - 1, Some(32..=64)),
    profile("AMD RDNA2, RDNA3, Vulkan, Windows", 2 * GIB - 4, 1 << 52, Some(32..=64)),
    profile("AMD Vega, Vulkan", 2 * GIB - 4, 2 * GIB - 1, Some(64..=64)),
    profile("AMD, DX12 through FXC", 2 * GIB - 4, 2 * GIB - 1, None),
    profile("Intel Arc, Vulkan", 2 * GIB - 4, 2 * GIB - 1, Some(8..=32)),
    profile("Intel UHD, Iris Xe, Vulkan", 512 * MIB, GIB, Some(8..=32)),
    profile("NVIDIA GTX, RTX, Vulkan", 2 * GIB - 4, 1 << 52, Some(32..=32)),
    profile("NVIDIA RTX, DX12", 2 * GIB - 4, 2 * GIB - 1, Some(32..=32)),
    profile("WARP, DX12", 128 * MIB, 2 * GIB - 1, Some(4..=128)),
    profile("a driver that promises no size", 128 * MIB, GIB, Some(1..=128)),
    profile("the least that WebGPU promises", 128 * MIB, 256 * MIB, None),
];

#[test]
fn well_known_devices_get_what_the_table_says() {
    let mut table = String::from(HEADER);
    let mut kernels = Vec::new();
    for profile in PROFILES {
        let _ = writeln!(table, "{}", row(profile, &mut kernels));
    }
    let _ = writeln!(table, "\nattention kernels");
    for (letter, names) in LETTERS.zip(&kernels) {
        let _ = writeln!(table, "{letter}: {names}");
    }
    let expected = include_str!("profiles.txt").replace("\r\n", "\n");
    assert!(table == expected, "profiles.txt should be\n{table}");
}

const HEADER: &str = "\
Llama 3 8B, 32/8 heads of 128, f16

device                            | storage binding | subgroup operations | attention kernels | arenas for 8,192 tokens | for 32,768 | most tokens of a pool
";

/// Stand for sets of attention kernels.
const LETTERS: RangeInclusive<char> = 'A'..='Z';

/// The row of `profile`; `kernels` are the sets of attention kernels so far.
fn row(profile: &Profile, kernels: &mut Vec<String>) -> String {
    let features = profile.subgroups.as_ref().map_or(Features::empty(), |_| Features::SUBGROUP);
    let sizes = profile.subgroups.clone().unwrap_or(4..=128);
    let offered = Limits {
        max_storage_buffer_binding_size: profile.binding,
        max_buffer_size: profile.buffer,
        ..Limits::default()
    };
    let adapter = TestAdapter::noop(offered, features, sizes);
    let limits = recommended_limits(adapter.adapter(), Limits::default());
    let binding = limits.max_storage_buffer_binding_size;
    let features = recommended_features(adapter.adapter());
    let gpu = adapter.request_device(limits, features).expect("what the adapter offers");

    let small = CacheConfig::for_blocks(4, &LLAMA_8B, KvType::F16).expect("a small pool");
    let attention = PagedAttention::new(&gpu.device, LLAMA_8B, small).expect("a device that suffices");
    let names = attention.variants().iter().map(|variant| variant.name.as_str());
    let names = names.filter(|name| name.starts_with("attention")).collect::<Vec<_>>().join(", ");
    let subgroups = if names.contains("subgroup") { "used" } else { "not used" };
    let set = kernels.iter().position(|known| *known == names).unwrap_or_else(|| {
        kernels.push(names);
        kernels.len() - 1
    });
    let letter = LETTERS.clone().nth(set).expect("a letter");
    let arenas =
        |tokens: u32| pool(tokens).arenas(binding).map(|arenas| arenas.num_arenas()).expect("it fits");
    format!(
        "{:33} | {:11} MiB | {subgroups:19} | {letter:17} | {:23} | {:10} | {}",
        profile.name,
        binding / MIB,
        arenas(8192),
        arenas(32_768),
        most_tokens(binding),
    )
}

fn pool(tokens: u32) -> CacheConfig {
    CacheConfig::for_blocks(tokens / DEFAULT_BLOCK_SIZE, &LLAMA_8B, KvType::F16).expect("a pool")
}

/// Tokens of the largest pool whose arenas a binding holds.
fn most_tokens(binding: u64) -> u32 {
    let fits = |blocks: u32| pool(blocks * DEFAULT_BLOCK_SIZE).arenas(binding).is_ok();
    let (mut fit, mut too_many) = (1, 1 << 20);
    assert!(fits(fit) && !fits(too_many));
    while fit + 1 < too_many {
        let middle = fit.midpoint(too_many);
        *if fits(middle) { &mut fit } else { &mut too_many } = middle;
    }
    fit * DEFAULT_BLOCK_SIZE
}
