// Rows of activations times a weight matrix: `output[row] = store(input[row] * weights)`.
//
// This text is completed by `matmul.rs`, which appends a tile of rows by vec4 columns, unrolled, with its way of storing.
// One invocation computes one tile with its sums in registers, running over the inner
// dimension four elements at a time; x numbers the tiles of columns, y the tiles of rows. No workgroup memory and no
// barrier: neighbouring invocations read neighbouring columns, and the input elements are the same for all of them.
//
// Every sum runs over the inner dimension in rising order with one fma an element, whatever the tile: a row's bits do not
// depend on how many rows are computed with it.
//
// Rows past the step's last one are computed too, up to a multiple of ROWS: buffers have room for them, and nobody reads
// them.
//
// CPU twin: `CpuModel::multiply`.

struct Params {
    // vec4 of an input row that are multiplied, and the inner dimension in steps of four.
    inner4: u32,
    // vec4 from one weight row to the next; tiles do not end beyond it.
    columns4: u32,
    // vec4 from one output row to the next, and where in it this matrix's columns begin.
    output_stride4: u32,
    output_offset4: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
// [4 * inner4][columns4]
@group(0) @binding(1) var<storage, read> weights: array<vec4<f32>>;
// [rows][inner4]
@group(0) @binding(2) var<storage, read> input: array<vec4<f32>>;
// [rows][output_stride4]
@group(0) @binding(3) var<storage, read_write> output: array<vec4<f32>>;
