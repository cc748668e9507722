//! What a key costs in the loop over full tiles.

use serde::{Deserialize, Serialize};

use super::assembly::{Block, Class};
use super::structure::{Structure, TileLoads};
use crate::Failure;

/// Instructions per key and kv head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PerKey {
    /// All of them.
    pub instructions: f64,
    /// Vector arithmetic.
    pub vector_alu: f64,
    /// Of which multiply-adds.
    pub multiply_adds: f64,
    /// Loads and stores of global memory.
    pub global: f64,
    /// Bytes that they load, of all 64 lanes.
    pub global_bytes: f64,
    /// Reads and writes of workgroup memory.
    pub lds: f64,
    /// Moves between lanes.
    pub cross_lane: f64,
    /// Scalar arithmetic, scalar loads, branches.
    pub scalar: f64,
    /// Waits, barriers and hints.
    pub waits: f64,
}

/// Lanes of a wave.
const LANES: u32 = 64;

/// What a key costs in the loop over full tiles.
///
/// # Errors
/// When the loops are not those of the method that [`amd_isa`](super) describes.
pub(super) fn per_key(blocks: &[Block], loads: TileLoads) -> Result<PerKey, Failure> {
    let structure = Structure::new(blocks)?;
    let full = structure.full_tiles()?;
    let trips = structure.trips(full, loads)?;
    let staging = structure.staging(full)?;
    let mut sum = PerKey::default();
    for (index, block) in blocks.iter().enumerate().filter(|(index, _)| full.has(*index)) {
        let inner = trips.iter().find(|(inner, _)| inner.has(index));
        let times = match staging {
            Some(staging) if staging.has(index) => 1.0 / f64::from(loads.tiles_per_staging),
            _ => f64::from(inner.map_or(1, |(_, trips)| *trips)),
        };
        add(&mut sum, block, times)?;
    }
    Ok(sum.over(loads.keys))
}

fn add(sum: &mut PerKey, block: &Block, times: f64) -> Result<(), Failure> {
    for instruction in &block.instructions {
        sum.instructions += times;
        *match instruction.class {
            Class::VectorAlu => &mut sum.vector_alu,
            Class::Global => &mut sum.global,
            Class::Lds => &mut sum.lds,
            Class::CrossLane => &mut sum.cross_lane,
            Class::Scalar => &mut sum.scalar,
            Class::Wait => &mut sum.waits,
        } += times;
        sum.global_bytes += times * f64::from(instruction.bytes_loaded()? * LANES);
        if instruction.is_multiply_add() {
            sum.multiply_adds += times;
        }
    }
    Ok(())
}

impl PerKey {
    /// The sum over `keys`, to three decimals.
    fn over(self, keys: u32) -> Self {
        let over = |sum: f64| (sum / f64::from(keys) * 1000.0).round() / 1000.0;
        Self {
            instructions: over(self.instructions),
            vector_alu: over(self.vector_alu),
            multiply_adds: over(self.multiply_adds),
            global: over(self.global),
            global_bytes: over(self.global_bytes),
            lds: over(self.lds),
            cross_lane: over(self.cross_lane),
            scalar: over(self.scalar),
            waits: over(self.waits),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::assembly::parse;
    use super::*;

    const LOADS: TileLoads = TileLoads { keys: 4, k_loads: 4, v_loads: 6, tiles_per_staging: 8 };

    /// A text of blocks, instructions separated by commas.
    fn counted(blocks: &[(u32, &str)]) -> Result<PerKey, Failure> {
        let mut text = String::new();
        for (label, instructions) in blocks {
            text += &format!("BB{label}:\n");
            for instruction in instructions.split(", ") {
                text += &format!("\t{instruction} ; bf800000\n");
            }
        }
        per_key(&parse(&text)?, LOADS)
    }

    const RAGGED: (u32, &str) = (8, "buffer_load_b128 v0, s_cbranch_scc1 BB8");
    const END: (u32, &str) = (9, "s_endpgm");

    #[test]
    fn inner_loops_count_as_often_as_their_loads_need() {
        let sum = counted(&[
            (0, "s_mov_b32 s0"),
            (1, "s_cmp_eq_u32 s0, s_cbranch_scc1 BB7"),
            (2, "buffer_load_b128 v0, buffer_load_b128 v1, v_fma_f32 v0, s_cbranch_scc1 BB2"),
            (3, "v_exp_f32_e32 v0, ds_load_b128 v0"),
            (4, "buffer_load_b128 v0, v_mul_f32_e32 v0, s_waitcnt 0, s_cbranch_scc1 BB4"),
            (5, "v_readlane_b32 s0, s_branch BB1"),
            (7, "s_nop 0"),
            RAGGED,
            END,
        ]);
        // Two trips over keys, six over values.
        let expected = PerKey {
            instructions: 2.0 + 2.0 * 4.0 + 2.0 + 6.0 * 4.0 + 2.0,
            vector_alu: 2.0 + 1.0 + 6.0,
            multiply_adds: 2.0,
            global: 4.0 + 6.0,
            global_bytes: 64.0 * 16.0 * 10.0,
            lds: 1.0,
            cross_lane: 1.0,
            scalar: 2.0 + 2.0 + 6.0 + 1.0,
            waits: 6.0,
        };
        assert_eq!(sum.ok(), Some(expected.over(4)));
    }

    #[test]
    fn one_inner_loop_takes_what_lies_not_outside() {
        let four = ["buffer_load_dwordx4 v0"; 4].join(", ");
        let sum = counted(&[
            (1, &four),
            (2, "buffer_load_dwordx4 v0, s_cbranch_scc1 BB2"),
            (3, "s_cbranch_scc1 BB1"),
            RAGGED,
            END,
        ]);
        assert_eq!(sum.map(|sum| sum.instructions).ok(), Some((4.0 + 6.0 * 2.0 + 1.0) / 4.0));
    }

    #[test]
    fn no_inner_loop_means_all_loads_are_there() {
        let text = |count| vec!["buffer_load_b128 v0"; count].join(", ") + ", s_cbranch_scc1 BB1";
        assert_eq!(counted(&[(1, &text(10)), RAGGED, END]).map(|sum| sum.global).ok(), Some(2.5));
        for count in [9, 11] {
            assert!(counted(&[(1, &text(count)), RAGGED, END]).is_err());
        }
    }

    #[test]
    fn staging_counts_for_one_tile_of_some() {
        let full = ["buffer_load_b128 v0"; 10].join(", ");
        let staged = |past: &str| {
            counted(&[
                (1, past),
                (2, "v_mov_b32_e32 v0, s_cbranch_execz BB4"),
                (3, "buffer_load_b32 v0"),
                (4, "ds_store_b32 v0"),
                (5, &(full.clone() + ", s_cbranch_scc1 BB1")),
                RAGGED,
                END,
            ])
        };
        let expected = 1.0 + 4.0 / 8.0 + 11.0;
        assert_eq!(staged("s_cbranch_scc0 BB5").map(|sum| sum.instructions).ok(), Some(expected / 4.0));
        // Past lanes only, past too little, past too much.
        for past in ["s_cbranch_execz BB5", "s_cbranch_scc0 BB3", "s_cbranch_scc0 BB8"] {
            assert!(staged(past).is_err(), "{past}");
        }
    }

    #[test]
    fn other_structures_are_refused() {
        let full = ["buffer_load_b128 v0"; 10].join(", ");
        let part = ["buffer_load_b128 v0"; 4].join(", ");
        let wrong: [(&str, &[(u32, &str)]); 8] = [
            ("one tile loop", &[(1, &full), (2, "s_cbranch_scc1 BB1"), END]),
            (
                "three",
                &[(1, &full), (2, "s_cbranch_scc1 BB1"), (3, &full), (4, "s_cbranch_scc1 BB3"), RAGGED, END],
            ),
            ("no label", &[(1, &full), (2, "s_cbranch_scc1 BB5"), RAGGED, END]),
            (
                "entered in the middle",
                &[(0, "s_branch BB2"), (1, &full), (2, "s_cbranch_scc1 BB1"), RAGGED, END],
            ),
            (
                "a loop without loads",
                &[(1, &full), (2, "s_cbranch_scc1 BB2"), (3, "s_cbranch_scc1 BB1"), RAGGED, END],
            ),
            (
                "loads outside of two loops",
                &[
                    (1, "buffer_load_b128 v0"),
                    (2, "buffer_load_b128 v0, s_cbranch_scc1 BB2"),
                    (3, "buffer_load_b128 v0, s_cbranch_scc1 BB3"),
                    (4, "s_cbranch_scc1 BB1"),
                    RAGGED,
                    END,
                ],
            ),
            (
                "nested",
                &[
                    (1, &part),
                    (2, "s_nop 0"),
                    (3, "buffer_load_b128 v0, s_cbranch_scc1 BB3"),
                    (4, "s_cbranch_scc1 BB2"),
                    (5, "s_cbranch_scc1 BB1"),
                    RAGGED,
                    END,
                ],
            ),
            (
                "crossing",
                &[
                    (1, &full),
                    (2, "s_nop 0"),
                    (3, "s_cbranch_scc1 BB1"),
                    (4, "s_cbranch_scc1 BB2"),
                    RAGGED,
                    END,
                ],
            ),
        ];
        for (name, blocks) in wrong {
            assert!(counted(blocks).is_err(), "{name}");
        }
    }
}
