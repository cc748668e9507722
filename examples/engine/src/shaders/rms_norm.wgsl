// Root-mean-square norm (Zhang and Sennrich, 2019) of rows of the residual stream:
// `normed[row] = source / sqrt(mean(source^2) + epsilon) * weight`, with `source = residual[source_rows[row]]`.
//
// One workgroup per row; its invocations stride over the row four elements at a time. Partial sums are added in the
// order of the invocations by each of them alike, so a row's bits do not depend on the batch.
//
// CPU twin: `rms_norm` in `cpu.rs`.

const LANES: u32 = 32u;

struct Params {
    // vec4 of a row.
    len4: u32,
    // 1 / elements of a row.
    inverse_len: f32,
    epsilon: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> source_rows: array<u32>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;
// [rows][len4]
@group(0) @binding(3) var<storage, read> residual: array<vec4<f32>>;
// [rows][len4]
@group(0) @binding(4) var<storage, read_write> normed: array<vec4<f32>>;

var<workgroup> partial_sums: array<f32, LANES>;

@compute @workgroup_size(LANES)
fn rms_norm(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let source = source_rows[group.x] * params.len4;
    let destination = group.x * params.len4;
    var squares = vec4<f32>(0.0);
    for (var i = lane; i < params.len4; i += LANES) {
        let value = residual[source + i];
        squares = fma(value, value, squares);
    }
    partial_sums[lane] = squares.x + squares.y + squares.z + squares.w;
    // Makes every lane's partial sum visible to all.
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i < LANES; i++) {
        sum += partial_sums[i];
    }
    let factor = 1.0 / sqrt(sum * params.inverse_len + params.epsilon);
    for (var i = lane; i < params.len4; i += LANES) {
        normed[destination + i] = residual[source + i] * factor * weight[i];
    }
}
