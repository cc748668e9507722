//! What the self-check runs, the most telling first: a slow adapter gets through some of it only.

use std::fmt;

use paged_kv::KvType;

/// Shapes, types and contexts of one attention object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    /// Query heads per kv head, of which there are two.
    pub(crate) ratio: u32,
    pub(crate) head_dim: u32,
    pub(crate) kv_type: KvType,
    pub(crate) block_size: u32,
    /// Tokens that the longest sequence holds.
    pub(crate) longest: u32,
    /// Whether the kernels may use subgroup operations where the device has them.
    pub(crate) subgroups: bool,
}

const fn case(
    ratio: u32,
    head_dim: u32,
    kv_type: KvType,
    block_size: u32,
    longest: u32,
    subgroups: bool,
) -> Case {
    Case { ratio, head_dim, kv_type, block_size, longest, subgroups }
}

use KvType::{F16, F32};

/// Every head size of a well-known model, head ratios from 1 to 71, block sizes from 1 to 256.
#[rustfmt::skip]
pub(crate) const CASES: &[Case] = &[
    // Ratio, head size, type, block size, longest context, subgroup operations.
    case( 4, 128, F16,  16,   700, true),
    case( 3,  64, F32,  16,   700, true),
    case( 4, 128, F16,  16,   700, false),
    case( 3,  64, F16,   4,   700, false),
    case( 1,  80, F16,   4,   700, true),
    case( 5, 128, F32,  64,   700, true),
    case( 7, 128, F16,  16,   700, true),
    case( 8, 128, F16,  32,  4096, true),
    case( 4,  64, F16,  16, 16384, true),
    case( 1, 256, F16,  16,   700, true),
    case(16,  96, F32,   8,   700, true),
    case( 8, 128, F32, 256,  1500, false),
    case( 2, 112, F16,   2,   300, true),
    case( 6,  72, F16, 128,   900, true),
    case(71,  64, F16,  16,   700, true),
    case( 1,   8, F32,   1,   300, true),
    case( 2, 256, F32,  64,   700, false),
    case( 1, 136, F16,  16,   700, true),
];

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ratio, head_dim, kv_type, block_size, longest, subgroups } = self;
        let reduction = if *subgroups { "" } else { ", no subgroups" };
        write!(
            f,
            "{}/2 heads of {head_dim}, {kv_type}, blocks of {block_size}, context {longest}{reduction}",
            2 * ratio
        )
    }
}
