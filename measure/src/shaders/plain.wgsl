// Attention as one writes it first: one invocation per query vector, which walks its keys one by one with an online
// softmax, and reads every key and value for itself.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> arena: array<vec4<u32>>;
// Block ids, `[sequences][table_entries]`.
@group(0) @binding(2) var<storage, read> tables: array<u32>;
// Per row: its sequence, and the keys it sees.
@group(0) @binding(3) var<storage, read> rows: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read> query: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> output: array<vec4<f32>>;

@compute @workgroup_size(64)
fn plain(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) size: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (workgroup.y * size.x + workgroup.x) * 64u + lane;
    if (index >= params.num_items) {
        return;
    }
    let row = rows[index / HEADS];
    let kv_head = (index % HEADS) / (HEADS / KV_HEADS);
    var q: array<vec4<f32>, HEAD_VECS>;
    var sum: array<vec4<f32>, HEAD_VECS>;
    for (var i = 0u; i < HEAD_VECS; i++) {
        q[i] = query[index * HEAD_VECS + i] * params.scale_log2;
    }
    var maximum = -3.0e38;
    var weights = 0.0;
    for (var token = 0u; token < row.y; token++) {
        let block = tables[row.x * params.table_entries + (token >> SHIFT)];
        let start = block * params.block_stride + params.layer_start + (kv_head * ROW << SHIFT);
        let key = start + (token & ((1u << SHIFT) - 1u)) * ROW;
        let value = key + (KV_HEADS * ROW << SHIFT);
        var score = 0.0;
        for (var chunk = 0u; chunk < ROW; chunk++) {
            let words = arena[key + chunk];
            for (var i = 0u; i < CHUNK_VECS; i++) {
                score += dot(chunk_vec(words, i), q[chunk * CHUNK_VECS + i]);
            }
        }
        // Not a factor of 1 at every key: where `exp2(0.0)` is not exactly 1, thousands of them add up.
        if (score > maximum) {
            let decay = exp2(maximum - score);
            maximum = score;
            weights *= decay;
            for (var i = 0u; i < HEAD_VECS; i++) {
                sum[i] *= decay;
            }
        }
        let weight = exp2(score - maximum);
        weights += weight;
        for (var chunk = 0u; chunk < ROW; chunk++) {
            let words = arena[value + chunk];
            for (var i = 0u; i < CHUNK_VECS; i++) {
                let place = chunk * CHUNK_VECS + i;
                sum[place] += chunk_vec(words, i) * weight;
            }
        }
    }
    for (var i = 0u; i < HEAD_VECS; i++) {
        output[index * HEAD_VECS + i] = sum[i] / weights;
    }
}
