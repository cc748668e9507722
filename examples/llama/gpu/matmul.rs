//! The text of the matrix product's kernels: `matmul.wgsl` and an unrolled tile.
//!
//! Software adapters are bound by instructions, and every load costs them as much as several multiply-adds; so a kernel
//! for many rows keeps a large tile of sums in registers, and smaller tiles serve steps of few rows. Unrolling is done
//! here because naga turns every loop into one with a guard.

use std::fmt::Write;

/// What happens to a finished sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Store {
    /// It is the output.
    Set,
    /// It is added to the output: the residual stream.
    Add,
    /// Columns come in pairs of a gate and its partner; `silu(gate) * partner` is the output, half as wide.
    SiluMul,
}

/// One variant of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    /// Rows of one invocation.
    pub(super) rows: u32,
    /// vec4 columns of one invocation.
    pub(super) columns4: u32,
    /// What happens to the sums.
    pub(super) store: Store,
}

/// Invocations of a workgroup, side by side along the columns.
pub(super) const LANES: u32 = 32;
/// Rows of the tallest tile: activation buffers have a multiple of this many.
pub(super) const MAX_TILE_ROWS: u32 = 16;
/// Weight matrices have a multiple of this many vec4 columns, so that no tile is cut.
pub(super) const COLUMNS4_QUANTUM: u32 = 2;

impl Tile {
    /// The tile for a product of `rows` rows: the smallest that takes them at once, or the tallest, repeated.
    pub(super) fn for_rows(rows: u32, store: Store) -> Self {
        let rows = [1, 2, 4, 8].into_iter().find(|&height| rows <= height).unwrap_or(MAX_TILE_ROWS);
        let columns4 = if rows >= 8 || store == Store::SiluMul { 2 } else { 1 };
        Self { rows, columns4, store }
    }

    /// Workgroups along x for a matrix of `columns4` vec4 columns.
    pub(super) fn workgroups_x(self, columns4: u32) -> u32 {
        columns4.div_ceil(self.columns4 * LANES)
    }

    /// The kernel's label, with its variant.
    pub(super) fn label(self) -> String {
        format!("llama.matmul {:?} {}x{}", self.store, self.rows, self.columns4 * 4)
    }

    /// The kernel's whole text; its entry point is `matmul`.
    pub(super) fn shader(self) -> String {
        let mut text = String::from(include_str!("../shaders/matmul.wgsl"));
        // Writing to a String cannot fail.
        let _ = self.write_main(&mut text);
        text
    }

    fn write_main(self, text: &mut String) -> std::fmt::Result {
        let Self { rows, columns4, .. } = self;
        write!(
            text,
            "
@compute @workgroup_size({LANES})
fn matmul(@builtin(global_invocation_id) id: vec3<u32>) {{
    let column = id.x * {columns4}u;
    if column >= params.columns4 {{
        return;
    }}
    let row = id.y * {rows}u;
    var at_weight = column;
"
        )?;
        for row in 0..rows {
            writeln!(text, "    var at_input{row} = (row + {row}u) * params.inner4;")?;
            for column in 0..columns4 {
                writeln!(text, "    var sum{row}_{column} = vec4<f32>(0.0);")?;
            }
        }
        writeln!(text, "    for (var inner = 0u; inner < params.inner4; inner++) {{")?;
        for element in 0..4 {
            for column in 0..columns4 {
                writeln!(text, "        let weight{element}_{column} = weights[at_weight + {column}u];")?;
            }
            writeln!(text, "        at_weight += params.columns4;")?;
        }
        for row in 0..rows {
            writeln!(text, "        let in{row} = input[at_input{row}];")?;
            writeln!(text, "        at_input{row} += 1u;")?;
            for (element, name) in ["x", "y", "z", "w"].into_iter().enumerate() {
                for column in 0..columns4 {
                    writeln!(
                        text,
                        "        sum{row}_{column} = fma(weight{element}_{column}, vec4<f32>(in{row}.{name}), sum{row}_{column});"
                    )?;
                }
            }
        }
        writeln!(text, "    }}")?;
        for row in 0..rows {
            self.write_store(text, row)?;
        }
        writeln!(text, "}}")
    }

    fn write_store(self, text: &mut String, row: u32) -> std::fmt::Result {
        let at = format!("(row + {row}u) * params.output_stride4 + params.output_offset4");
        match self.store {
            Store::Set | Store::Add => {
                let operator = if self.store == Store::Set { "=" } else { "+=" };
                (0..self.columns4).try_for_each(|column| {
                    writeln!(text, "    output[{at} + column + {column}u] {operator} sum{row}_{column};")
                })
            }
            Store::SiluMul => writeln!(
                text,
                "    output[{at} + column / 2u] = sum{row}_0 / (1.0 + exp(-sum{row}_0)) * sum{row}_1;"
            ),
        }
    }
}
