// What the attention kernels bind beside the plan.

// Blocks of the layer's arena, in units of 16 bytes.
@group(1) @binding(0) var<storage, read> arena: array<vec4<u32>>;
// Partial results, `[partial][query head]`: V_HEAD_DIM weighted sums, then (maximum, sum, 0, 0).
@group(1) @binding(1) var<storage, read_write> partials: array<vec4<f32>>;
@group(2) @binding(0) var<uniform> tensors: TensorParams;
// Queries, `[rows][query heads][K_HEAD_DIM]`, rows `query_stride` apart.
@group(2) @binding(1) var<storage, read> query: array<Unit>;
// Results, `[rows][query heads][V_HEAD_DIM]`, rows `output_stride` apart.
@group(2) @binding(2) var<storage, read_write> output: array<Unit>;

const HEAD_VECS = V_HEAD_DIM / 4u;
const PARTIAL_VECS = HEAD_VECS + 1u;
