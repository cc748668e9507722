//! The variants that figures are kept of.

use paged_kv::shaders::{Kernel, PREFILL_QUERIES, VariantKey};
use paged_kv::{ActivationType, DEFAULT_BLOCK_SIZE, KvType};

use super::structure::TileLoads;
use crate::Failure;

/// One of the library's shader variants; K and V have the same type and head size.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// The kernel.
    pub kernel: Kernel,
    kv_type: KvType,
    head_dim: u32,
    /// Queries per workgroup.
    queries: u32,
    subgroups: bool,
    activations: ActivationType,
}

impl Variant {
    /// All that figures are kept of: attention with subgroups for the head sizes 64, 128 and 256 and the heads of common
    /// models (32/8, 9/3, 28/4, 64/8), attention without subgroups once and with f16 activations once, and the kernels
    /// around it.
    pub fn named() -> Vec<Self> {
        let mut named: Vec<Self> = DECODE
            .iter()
            .map(|&(kv_type, head_dim, queries)| Self {
                kernel: Kernel::AttentionDecode,
                kv_type,
                head_dim,
                queries,
                subgroups: true,
                activations: ActivationType::F32,
            })
            .collect();
        for kv_type in [KvType::F16, KvType::F32] {
            named.extend([64, 128, 256].map(|dim| Self::of(Kernel::AttentionPrefill, kv_type, dim)));
        }
        named.extend([Kernel::AttentionDecode, Kernel::AttentionPrefill].map(|kernel| Self {
            subgroups: false,
            queries: if kernel == Kernel::AttentionDecode { 4 } else { PREFILL_QUERIES },
            ..Self::of(kernel, KvType::F16, 128)
        }));
        named.extend([Kernel::AttentionDecode, Kernel::AttentionPrefill].map(|kernel| Self {
            activations: ActivationType::F16,
            queries: if kernel == Kernel::AttentionDecode { 4 } else { PREFILL_QUERIES },
            ..Self::of(kernel, KvType::F16, 128)
        }));
        named.extend([64, 128, 256].map(|dim| Self::of(Kernel::AttentionMerge, KvType::F16, dim)));
        named.extend([KvType::F16, KvType::F32].map(|kv_type| Self::of(Kernel::Append, kv_type, 128)));
        named.push(Self::of(Kernel::BlockCopy, KvType::F16, 128));
        named
    }

    fn of(kernel: Kernel, kv_type: KvType, head_dim: u32) -> Self {
        Self {
            kernel,
            kv_type,
            head_dim,
            queries: PREFILL_QUERIES,
            subgroups: true,
            activations: ActivationType::F32,
        }
    }

    /// The library's name of it.
    pub fn name(&self) -> String {
        self.key().to_string()
    }

    /// Whether it reads keys and values in a loop of tiles, the instructions of which are counted.
    pub(super) fn is_counted(&self) -> bool {
        self.subgroups && matches!(self.kernel, Kernel::AttentionDecode | Kernel::AttentionPrefill)
    }

    fn key(&self) -> VariantKey {
        let (types, dims) = ((self.kv_type, self.kv_type), (self.head_dim, self.head_dim));
        VariantKey::new(self.kernel, types, dims, self.activations, self.queries, self.subgroups)
    }

    /// Bytes of a key and its value.
    pub(super) fn bytes_per_key(&self) -> u32 {
        2 * self.head_dim * self.kv_type.bits() / 8
    }

    /// The text.
    pub(super) fn wgsl(&self) -> String {
        self.key().wgsl()
    }

    /// The text for a workgroup that is one subgroup.
    pub(super) fn counted_wgsl(&self) -> String {
        as_one_subgroup(&self.wgsl())
    }

    /// The same with the fragments of a twin.
    pub(super) fn twin_wgsl(&self, twin: Vec<(&'static str, String)>) -> String {
        let replaced: Vec<(&str, &str)> = twin.iter().map(|(name, text)| (*name, text.as_str())).collect();
        as_one_subgroup(&self.key().wgsl_with(u32::from(u16::MAX), &replaced))
    }

    /// Loads of 16 bytes a lane that a tile of keys takes, from the constants of the text.
    pub(super) fn tile_loads(&self) -> Result<TileLoads, Failure> {
        let text = self.wgsl();
        let (keys_per_lane, k_row, v_row) =
            (constant(&text, "KEYS")?, constant(&text, "K_ROW")?, constant(&text, "V_ROW")?);
        let lanes = constant(&text, "WORKGROUP")?;
        let keys = keys_per_lane * lanes;
        Ok(TileLoads {
            keys,
            k_loads: keys_per_lane * k_row,
            v_loads: keys.div_ceil(lanes / v_row),
            // As many block-table entries are staged as a tile has keys.
            tiles_per_staging: DEFAULT_BLOCK_SIZE,
        })
    }
}

/// Type, head size and query heads of decode. 32/8 and 64/8 heads are 4 and 8 to a kv head, 9/3 are 3, 28/4 are 7.
const DECODE: [(KvType, u32, u32); 11] = [
    (KvType::F16, 128, 4),
    (KvType::F16, 128, 7),
    (KvType::F16, 128, 8),
    (KvType::F16, 64, 3),
    (KvType::F16, 64, 4),
    (KvType::F16, 64, 8),
    (KvType::F16, 256, 4),
    (KvType::F32, 128, 4),
    (KvType::F32, 128, 8),
    (KvType::F32, 64, 3),
    (KvType::F32, 256, 4),
];

/// # Panics
/// Where the text does not ask for the number of subgroups: then the rule has to be written anew.
fn as_one_subgroup(text: &str) -> String {
    const NUM_SUBGROUPS: &str = "invocation.num_subgroups";
    assert!(text.contains(NUM_SUBGROUPS), "no `{NUM_SUBGROUPS}` in the kernel's text");
    text.replace(NUM_SUBGROUPS, "1u")
}

/// A constant of the text.
fn constant(text: &str, name: &str) -> Result<u32, Failure> {
    let start = format!("const {name} = ");
    let line = text.lines().find_map(|line| line.strip_prefix(start.as_str()));
    let value = line.and_then(|rest| rest.strip_suffix("u;"));
    Ok(value.ok_or_else(|| format!("no constant `{name}` in the kernel's text"))?.parse()?)
}
