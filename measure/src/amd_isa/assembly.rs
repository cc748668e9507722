//! The text of AMD's assembly, cut into blocks of classified instructions.

use super::realign;
use crate::Failure;

/// What an instruction keeps busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Vector arithmetic.
    VectorAlu,
    /// Loads and stores of global memory.
    Global,
    /// Reads and writes of workgroup memory.
    Lds,
    /// Moves between lanes, or between a lane and a scalar register.
    CrossLane,
    /// Scalar arithmetic, scalar loads, branches.
    Scalar,
    /// Waits, barriers and hints.
    Wait,
}

/// An instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Instruction {
    /// Its name.
    pub(super) mnemonic: String,
    /// What it keeps busy.
    pub(super) class: Class,
    /// The label that it may go to.
    pub(super) target: Option<u32>,
}

/// What lies between two labels.
#[derive(Clone, Debug)]
pub(super) struct Block {
    /// The number of its label.
    pub(super) label: u32,
    /// Its instructions.
    pub(super) instructions: Vec<Instruction>,
}

impl Instruction {
    /// # Errors
    /// When the instruction is of no known class.
    fn new(mnemonic: &str, operands: &str) -> Result<Self, Failure> {
        let class = class(mnemonic).ok_or_else(|| format!("unknown instruction `{mnemonic}`"))?;
        let target = match mnemonic.contains("branch") {
            true => {
                let label = operands.trim().strip_prefix("BB");
                Some(label.ok_or_else(|| format!("a branch to `{operands}`, not to a label"))?.parse()?)
            }
            false => None,
        };
        Ok(Self { mnemonic: mnemonic.to_owned(), class, target })
    }

    /// Multiplies and adds.
    pub(super) fn is_multiply_add(&self) -> bool {
        let name = self.mnemonic.strip_prefix("v_").unwrap_or_default();
        let name = name.strip_prefix("pk_").unwrap_or(name);
        ["fma", "mad_f", "mad_mix", "mac_f", "dot"].iter().any(|start| name.starts_with(start))
    }

    /// Bytes that a lane loads from global memory.
    ///
    /// # Errors
    /// When the name does not tell.
    pub(super) fn bytes_loaded(&self) -> Result<u32, Failure> {
        let Some((_, kind)) = self.mnemonic.split_once("_load_") else { return Ok(0) };
        if self.class != Class::Global {
            return Ok(0);
        }
        Ok(match kind {
            "b128" | "dwordx4" => 16,
            "b96" | "dwordx3" => 12,
            "b64" | "dwordx2" => 8,
            "b32" | "dword" => 4,
            "u16" | "ushort" => 2,
            "u8" | "ubyte" => 1,
            _ => return Err(format!("`{}`: of how many bytes?", self.mnemonic).into()),
        })
    }
}

/// Instructions of two at once (`v_dual_…`) have no class: only waves of 32 lanes have them.
fn class(mnemonic: &str) -> Option<Class> {
    let starts = |starts: &[&str]| starts.iter().any(|start| mnemonic.starts_with(start));
    let cross_lane =
        ["ds_bpermute", "ds_permute", "ds_swizzle", "v_readlane", "v_readfirstlane", "v_writelane"];
    let wait = ["s_wait", "s_clause", "s_delay", "s_nop", "s_inst_prefetch", "s_barrier"];
    Some(match () {
        () if starts(&cross_lane) || mnemonic.starts_with("v_permlane") => Class::CrossLane,
        () if starts(&wait) => Class::Wait,
        () if starts(&["buffer_", "global_"]) => Class::Global,
        () if starts(&["ds_"]) => Class::Lds,
        () if starts(&["s_"]) => Class::Scalar,
        () if starts(&["v_"]) && !starts(&["v_dual_"]) => Class::VectorAlu,
        () => return None,
    })
}

/// Cuts `text` into blocks.
///
/// # Errors
/// At a line that is not understood.
pub(super) fn parse(text: &str) -> Result<Vec<Block>, Failure> {
    let mut blocks: Vec<Block> = Vec::new();
    for line in realign::lines(text)? {
        match line {
            realign::Line::Label(label) => blocks.push(Block { label, instructions: Vec::new() }),
            realign::Line::Instruction { mnemonic, operands, .. } => {
                let block = blocks.last_mut().ok_or("an instruction before the first label")?;
                block.instructions.push(Instruction::new(mnemonic, operands)?);
            }
            realign::Line::Invalid { .. } => return Err("an instruction that was not read again".into()),
        }
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction(mnemonic: &str, operands: &str) -> Instruction {
        Instruction::new(mnemonic, operands).expect("a known instruction")
    }

    #[test]
    fn instructions_are_classed_by_name() {
        for (mnemonic, class) in [
            ("v_fma_mix_f32", Class::VectorAlu),
            ("v_max_f32_dpp", Class::VectorAlu),
            ("v_permlanex16_b32", Class::CrossLane),
            ("v_readlane_b32", Class::CrossLane),
            ("ds_bpermute_b32", Class::CrossLane),
            ("ds_load_b128", Class::Lds),
            ("buffer_load_b128", Class::Global),
            ("s_buffer_load_b128", Class::Scalar),
            ("s_cselect_b32", Class::Scalar),
            ("s_waitcnt_depctr", Class::Wait),
        ] {
            assert_eq!(instruction(mnemonic, "").class, class, "{mnemonic}");
        }
    }

    #[test]
    fn unknown_instructions_are_refused() {
        for mnemonic in ["v_dual_fmac_f32", "scratch_load_b32", "image_load", "exp"] {
            assert!(Instruction::new(mnemonic, "").is_err(), "{mnemonic}");
        }
        assert!(Instruction::new("s_branch", "0x40").is_err());
        assert!(instruction("buffer_load_d16_hi_b16", "").bytes_loaded().is_err());
    }

    #[test]
    fn multiply_adds_and_loads_are_told_by_name() {
        for mnemonic in ["v_fma_mix_f32", "v_fmac_f32_e32", "v_mac_f32_e32", "v_mad_f32", "v_pk_fma_f16"] {
            assert!(instruction(mnemonic, "").is_multiply_add(), "{mnemonic}");
        }
        for mnemonic in ["v_mul_f32_e32", "v_mad_u32_u24", "v_max_f32_e32", "s_mul_i32"] {
            assert!(!instruction(mnemonic, "").is_multiply_add(), "{mnemonic}");
        }
        for (mnemonic, bytes) in [
            ("buffer_load_b128", 16),
            ("buffer_load_dwordx4", 16),
            ("global_load_dword", 4),
            ("buffer_load_ushort", 2),
            ("buffer_store_b128", 0),
            ("s_buffer_load_b128", 0),
            ("ds_load_b128", 0),
        ] {
            assert_eq!(instruction(mnemonic, "").bytes_loaded().ok(), Some(bytes), "{mnemonic}");
        }
    }

    #[test]
    fn text_is_cut_at_labels() {
        let text = "BB0:\n\tv_mov_b32_e32 v42, 0     ; 7e540280\n\ts_branch BB2    ; bfa0e9b7\nBB2:\n\ts_endpgm  ; bfb00000\n";
        let blocks = parse(text).expect("an understood text");
        assert_eq!(blocks.iter().map(|block| block.label).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(blocks[0].instructions[1].target, Some(2));
        assert!(parse("\ts_endpgm  ; bfb00000\n").is_err());
        assert!(parse("BB0:\nhello\n").is_err());
    }
}
