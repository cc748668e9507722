// Rows of activations times a weight matrix: `output[row] = store(input[row] * weights)`.
//
// `matmul.rs` completes this text with one variant's entry point, unrolled: a tile of some rows by two vec4 columns
// for each invocation, its sums in registers, and what is done with them. The weights lie in groups of GROUP4 vec4
// columns, group after group, so that neighbouring invocations read neighbouring memory and each workgroup reads
// its own stretch of it from start to end. An invocation takes the same column of two consecutive groups. x numbers
// the columns of pairs of groups, y the tiles of rows. No workgroup memory and no barrier: the input elements are
// the same for all invocations side by side.
//
// Every sum runs over the inner dimension in rising order with one fma an element, whatever the tile: a row's bits
// do not depend on how many rows are computed with it.
//
// Rows past the step's last one are computed too, up to a whole tile: buffers have room for them, and nobody reads
// them.
//
// CPU twin: `multiply` in `cpu.rs`.

// vec4 columns of a group.
const GROUP4: u32 = 8u;

struct Params {
    // vec4 of an input row: the inner dimension in steps of four.
    inner4: u32,
    // vec4 that this matrix, or this part of it, makes of each row.
    columns4: u32,
    // vec4 from one output row to the next, and where in it this part's columns begin.
    output_stride4: u32,
    output_offset4: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
// [groups][4 * inner4][GROUP4]
@group(0) @binding(1) var<storage, read> weights: array<vec4<f32>>;
// [rows][inner4]
@group(0) @binding(2) var<storage, read> input: array<vec4<f32>>;
// [rows][output_stride4]
@group(0) @binding(3) var<storage, read_write> output: array<vec4<f32>>;
