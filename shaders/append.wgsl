// Writes the keys and values of the step's new rows into their slots.
//
// Work item: one row; one workgroup each, whose 64 invocations write 16 bytes at a time, all heads' keys and then all
// heads' values. Padding rows write nothing.
//
// Twin: `reference::append`.

// Blocks of the layer's arena, in units of 16 bytes.
@group(1) @binding(0) var<storage, read_write> arena: array<vec4<u32>>;
@group(2) @binding(0) var<uniform> tensors: TensorParams;
// Keys, `[rows][kv heads][K_HEAD_DIM]`, rows `key_stride` apart.
@group(2) @binding(1) var<storage, read> key: array<Unit>;
// Values, `[rows][kv heads][V_HEAD_DIM]`, rows `value_stride` apart.
@group(2) @binding(2) var<storage, read> value: array<Unit>;

@compute @workgroup_size(WORKGROUP)
fn append(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = workgroup_index(workgroup);
    if (row >= plan.num_rows || plan.num_rows > tensors.num_rows) {
        return;
    }
    let slot = metadata[plan.slot_mapping + row];
    if (slot == PADDING_SLOT) {
        return;
    }
    let block = block_start(slot >> layer.block_shift);
    let k_chunks = layer.num_kv_heads * K_ROW;
    for (var i = lane; i < k_chunks; i += WORKGROUP) {
        let target_row = block + k_head_start(i / K_ROW) + slot_in_block(slot) * K_ROW;
        arena[target_row + i % K_ROW] = pack_k_chunk(row * tensors.key_stride + i * K_CHUNK_VECS);
    }
    let v_chunks = layer.num_kv_heads * V_ROW;
    for (var i = lane; i < v_chunks; i += WORKGROUP) {
        let target_row = block + v_head_start(i / V_ROW) + slot_in_block(slot) * V_ROW;
        arena[target_row + i % V_ROW] = pack_v_chunk(row * tensors.value_stride + i * V_CHUNK_VECS);
    }
}
