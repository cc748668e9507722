// Merges the partial results of rows whose keys were split over several workgroups.
//
// Work item: (row, query head); V_HEAD_DIM / 4 invocations each, packed into workgroups of 64. An invocation rescales
// four elements of every partial result to their common maximum and divides by the common sum. Partial results that saw
// no key have no sum and count as nothing; if none saw a key, the result is 0.
//
// Twin: `reference::attention_merge`.

// Partial results, `[partial][query head]`: V_HEAD_DIM weighted sums, then (maximum, sum, 0, 0).
@group(1) @binding(0) var<storage, read> partials: array<vec4<f32>>;
@group(2) @binding(0) var<uniform> tensors: TensorParams;
// Results, `[rows][query heads][V_HEAD_DIM]`, rows `output_stride` apart. Binding 1 is the queries.
@group(2) @binding(2) var<storage, read_write> output: array<Unit>;

const HEAD_VECS = V_HEAD_DIM / 4u;
const PARTIAL_VECS = HEAD_VECS + 1u;

@compute @workgroup_size(WORKGROUP)
fn attention_merge(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = workgroup_index(workgroup) * WORKGROUP + lane;
    let per_item = layer.num_query_heads * HEAD_VECS;
    if (index >= plan.num_merge_items * per_item || plan.num_rows > tensors.num_rows) {
        return;
    }
    let item = plan.merge_items + (index / per_item) * 4u;
    let head = (index % per_item) / HEAD_VECS;
    let column = index % HEAD_VECS;
    let row = metadata[item];
    let first_partial = metadata[item + 1u];
    let num_partials = metadata[item + 2u];

    let stride = layer.num_query_heads * PARTIAL_VECS;
    let first = first_partial * stride + head * PARTIAL_VECS;
    var maximum = NO_LOGIT;
    for (var i = 0u; i < num_partials; i++) {
        let state = partials[first + i * stride + HEAD_VECS];
        maximum = select(max(maximum, state.x), maximum, state.y == 0.0);
    }
    var sum = 0.0;
    var total = vec4<f32>(0.0);
    for (var i = 0u; i < num_partials; i++) {
        let state = partials[first + i * stride + HEAD_VECS];
        let factor = select(exp2(state.x - maximum), 0.0, state.y == 0.0);
        sum = fma(state.y, factor, sum);
        total = fma(partials[first + i * stride + column], vec4<f32>(factor), total);
    }
    let place = row * tensors.output_stride + head * HEAD_VECS + column;
    output[place] = unit_of(normalised(total, head, maximum, sum));
}
