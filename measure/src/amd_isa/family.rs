//! Families of AMD's hardware.

use serde::{Deserialize, Serialize};

/// A family that RADV compiles for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Family {
    /// Vega: GCN, 64 KiB of workgroup memory and 4 SIMDs a compute unit.
    Vega10,
    /// RDNA2.
    Navi21,
    /// RDNA3.
    Gfx1100,
}

impl Family {
    /// All of them, the oldest first.
    pub const ALL: [Self; 3] = [Self::Vega10, Self::Navi21, Self::Gfx1100];

    /// The name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vega10 => "VEGA10",
            Self::Navi21 => "NAVI21",
            Self::Gfx1100 => "GFX1100",
        }
    }

    /// What its hardware is called.
    pub fn generation(self) -> &'static str {
        match self {
            Self::Vega10 => "Vega",
            Self::Navi21 => "RDNA2",
            Self::Gfx1100 => "RDNA3",
        }
    }

    /// The names that it has in `RADV_FORCE_FAMILY`, of one or another version of Mesa.
    pub(super) fn forced_names(self) -> &'static [&'static str] {
        match self {
            Self::Vega10 => &["VEGA10"],
            Self::Navi21 => &["NAVI21"],
            Self::Gfx1100 => &["GFX1100", "NAVI31"],
        }
    }

    /// Waves per SIMD that every variant keeps at least.
    pub fn stated_waves(self) -> u64 {
        match self {
            Self::Vega10 => 2,
            Self::Navi21 | Self::Gfx1100 => 8,
        }
    }

    /// SIMDs of a compute unit; of an RDNA workgroup processor, half of its four.
    pub(super) fn simds_per_compute_unit(self) -> u32 {
        match self {
            Self::Vega10 => 4,
            Self::Navi21 | Self::Gfx1100 => 2,
        }
    }

    /// Clocks for which a vector instruction of 64 lanes takes its SIMD: 16 lanes each on GCN, 32 on RDNA.
    pub(super) fn vector_clocks(self) -> f64 {
        match self {
            Self::Vega10 => 4.0,
            Self::Navi21 | Self::Gfx1100 => 2.0,
        }
    }

    /// Clocks that any other instruction takes from its SIMD's issue: a GCN compute unit turns to each SIMD every fourth.
    pub(super) fn other_clocks(self) -> f64 {
        match self {
            Self::Vega10 => 4.0,
            Self::Navi21 | Self::Gfx1100 => 1.0,
        }
    }
}
