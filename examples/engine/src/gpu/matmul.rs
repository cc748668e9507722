//! The text of the matrix product's kernels: `matmul.wgsl` and an unrolled tile.
//!
//! Software adapters are bound by instructions, and a load costs them as much as several multiply-adds; so a kernel
//! for many rows keeps a tall tile of sums in registers, and lower tiles serve steps of few rows. Unrolling is done
//! here because naga turns every loop into one with a guard.
//!
//! lavapipe reaches 22 GFLOP/s on two cores with 16 rows and 4.5 with one; SwiftShader, whose vectors are half as
//! wide, 5.8 with 8 rows and 1.5 with one.

use std::fmt::Write;

/// What happens to a finished sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Store {
    /// It is the output.
    Set,
    /// It is added to the output: the residual stream.
    Add,
    /// Groups of columns alternate: gates, then their partners; `silu(gate) * partner` is the output, half as wide.
    SiluMul,
}

/// One variant of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    /// Rows of one invocation.
    pub(super) rows: u32,
    /// What happens to the sums.
    pub(super) store: Store,
}

/// Columns of a group, which lie together in memory: `GROUP4` of the shader, in elements.
pub(super) const GROUP: usize = 32;
/// Invocations of a workgroup, side by side along the columns.
const LANES: u32 = 32;
/// Rows of every tile there is; activation buffers have a multiple of the last.
pub(super) const TILE_ROWS: [u32; 5] = [1, 2, 4, 8, MAX_TILE_ROWS];
/// Rows of the tallest tile.
pub(super) const MAX_TILE_ROWS: u32 = 16;

impl Tile {
    /// The tile for a product of `rows` rows: the lowest that takes them at once, or the tallest, repeated.
    pub(super) fn for_rows(rows: u32, max_tile_rows: u32, store: Store) -> Self {
        let fits = |&height: &u32| height >= rows || height >= max_tile_rows;
        Self { rows: TILE_ROWS.into_iter().find(fits).unwrap_or(MAX_TILE_ROWS), store }
    }

    /// Workgroups along x for `num_groups` groups of columns.
    pub(super) fn workgroups_x(num_groups: u32) -> u32 {
        (num_groups.div_ceil(2) * GROUP as u32 / 4).div_ceil(LANES)
    }

    /// The kernel's label, with its variant.
    pub(super) fn label(self) -> String {
        format!("llama.matmul {:?} of {} rows", self.store, self.rows)
    }

    /// The kernel's whole text; its entry point is `matmul`.
    pub(super) fn shader(self) -> String {
        let mut text = String::from(include_str!("../shaders/matmul.wgsl"));
        // Writing to a String cannot fail.
        let _ = self.write_main(&mut text);
        text
    }

    fn write_main(self, text: &mut String) -> std::fmt::Result {
        let groups = if self.store == Store::SiluMul { 1 } else { 2 };
        write!(
            text,
            "
@compute @workgroup_size({LANES})
fn matmul(@builtin(global_invocation_id) id: vec3<u32>) {{
    let pair = id.x / GROUP4;
    let lane = id.x % GROUP4;
    let column = pair * {groups}u * GROUP4 + lane;
    if column >= params.columns4 {{
        return;
    }}
    let row = id.y * {}u;
    var at_weight0 = pair * 8u * params.inner4 * GROUP4 + lane;
    var at_weight1 = at_weight0 + 4u * params.inner4 * GROUP4;
",
            self.rows
        )?;
        for row in 0..self.rows {
            writeln!(text, "    var at_input{row} = (row + {row}u) * params.inner4;")?;
            writeln!(text, "    var sum{row}_0 = vec4<f32>(0.0);")?;
            writeln!(text, "    var sum{row}_1 = vec4<f32>(0.0);")?;
        }
        writeln!(text, "    for (var inner = 0u; inner < params.inner4; inner++) {{")?;
        self.write_products(text)?;
        writeln!(text, "    }}")?;
        for row in 0..self.rows {
            self.write_store(text, row)?;
        }
        writeln!(text, "}}")
    }

    /// Four elements of the inner dimension.
    fn write_products(self, text: &mut String) -> std::fmt::Result {
        for group in 0..2 {
            for element in 0..4 {
                writeln!(
                    text,
                    "        let weight{element}_{group} = weights[at_weight{group} + {element}u * GROUP4];"
                )?;
            }
            writeln!(text, "        at_weight{group} += 4u * GROUP4;")?;
        }
        for row in 0..self.rows {
            writeln!(text, "        let in{row} = input[at_input{row}];")?;
            writeln!(text, "        at_input{row} += 1u;")?;
            for (element, name) in ["x", "y", "z", "w"].into_iter().enumerate() {
                for group in 0..2 {
                    let sum = format!("sum{row}_{group}");
                    let input = format!("vec4<f32>(in{row}.{name})");
                    writeln!(text, "        {sum} = fma(weight{element}_{group}, {input}, {sum});")?;
                }
            }
        }
        Ok(())
    }

    fn write_store(self, text: &mut String, row: u32) -> std::fmt::Result {
        writeln!(
            text,
            "    let at{row} = (row + {row}u) * params.output_stride4 + params.output_offset4 + column;"
        )?;
        if self.store == Store::SiluMul {
            return writeln!(
                text,
                "    output[at{row}] = sum{row}_0 / (1.0 + exp(-sum{row}_0)) * sum{row}_1;"
            );
        }
        let operator = if self.store == Store::Set { "=" } else { "+=" };
        writeln!(text, "    output[at{row}] {operator} sum{row}_0;")?;
        writeln!(text, "    if column + GROUP4 < params.columns4 {{")?;
        writeln!(text, "        output[at{row} + GROUP4] {operator} sum{row}_1;")?;
        writeln!(text, "    }}")
    }
}
