//! The figures and their file.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::family::Family;
use super::per_key::PerKey;
use crate::Failure;

/// What AMD's compiler made of all named variants.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Mesa's version; another one compiles otherwise.
    pub mesa: String,
    /// A row per family and variant.
    pub rows: Vec<Row>,
}

/// A variant for a family.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The family.
    pub family: Family,
    /// The kernel's name.
    pub kernel: String,
    /// The variant's name.
    pub variant: String,
    /// Vector registers.
    pub vgprs: u64,
    /// Scalar registers, as the hardware hands them out.
    pub sgprs: u64,
    /// Vector registers that were spilled.
    pub spilled_vgprs: u64,
    /// Scalar registers that were spilled.
    pub spilled_sgprs: u64,
    /// Workgroup memory.
    pub lds_bytes: u64,
    /// Waves that a SIMD holds at a time.
    pub waves_per_simd: u64,
    /// Code.
    pub code_bytes: u64,
    /// What a key costs, where that is counted.
    pub per_key: Option<PerKey>,
    /// The contiguous twin, where it was compiled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contiguous: Option<Contiguous>,
    /// Instructions per key with keys in columns, over those of the kernel itself, where they were counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_columns: Option<f64>,
}

/// The same kernel over one extent per sequence.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Contiguous {
    /// Its instructions per key and kv head.
    pub instructions: f64,
    /// Those of the paged kernel over its own.
    pub paged_over_contiguous: f64,
}

impl Contiguous {
    pub(super) fn new(paged: &PerKey, contiguous: &PerKey) -> Self {
        Self {
            instructions: contiguous.instructions,
            paged_over_contiguous: thousandths(paged.instructions / contiguous.instructions),
        }
    }
}

pub(super) fn thousandths(ratio: f64) -> f64 {
    (ratio * 1000.0).round() / 1000.0
}

impl Row {
    /// Registers that were spilled, of both kinds.
    pub fn spills(&self) -> u64 {
        self.spilled_vgprs + self.spilled_sgprs
    }
}

impl Figures {
    /// The committed file.
    pub fn path() -> PathBuf {
        benches().join("amd_isa.json")
    }

    /// The committed file of results for people.
    pub fn results_path() -> PathBuf {
        benches().join("RESULTS.md")
    }

    /// The committed figures.
    ///
    /// # Errors
    /// When they are not there, or not figures.
    pub fn committed() -> Result<Self, Failure> {
        Ok(serde_json::from_str(&std::fs::read_to_string(Self::path())?)?)
    }

    /// The figures as JSON, a row a line.
    ///
    /// # Errors
    /// None that is known.
    pub fn to_json(&self) -> Result<String, Failure> {
        let rows = self.rows.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
        let mesa = serde_json::to_string(&self.mesa)?;
        Ok(format!("{{\n  \"mesa\": {mesa},\n  \"rows\": [\n    {}\n  ]\n}}\n", rows.join(",\n    ")))
    }

    /// The row of a family and variant.
    pub fn row(&self, family: Family, variant: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.family == family && row.variant == variant)
    }
}

fn benches() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../benches")
}
