// Rotary position encoding, in place, of the queries and keys of a step's rows.
//
// A row holds its query heads, then its key heads, then its values; the first `pairs_per_head` pairs of each query
// and key head are turned, pairs being neighbouring elements (even, odd) as GGUF's llama layout has them. One
// invocation turns one pair: x is the pair among all heads', y the row. Cosines and sines come from the host.
//
// CPU twin: `rope` in `cpu.rs`.

struct Params {
    // Pairs turned in each head, and pairs from one head to the next.
    pairs_per_head: u32,
    head_stride: u32,
    num_query_heads: u32,
    // Query heads and key heads.
    num_heads: u32,
    // Pairs from the start of a row to its keys, and to the next row.
    key_start: u32,
    row_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> positions: array<u32>;
// [positions][pairs_per_head]: cosine, sine
@group(0) @binding(2) var<storage, read> rotations: array<vec2<f32>>;
// [rows][row_stride]
@group(0) @binding(3) var<storage, read_write> query_key_value: array<vec2<f32>>;

@compute @workgroup_size(64)
fn rope(@builtin(global_invocation_id) id: vec3<u32>) {
    let head = id.x / params.pairs_per_head;
    let pair_in_head = id.x % params.pairs_per_head;
    if head < params.num_heads {
        let turn = rotations[positions[id.y] * params.pairs_per_head + pair_in_head];
        let is_key = head >= params.num_query_heads;
        let first_head = select(0u, params.num_query_heads, is_key);
        let part_start = select(0u, params.key_start, is_key);
        let in_row = part_start + (head - first_head) * params.head_stride + pair_in_head;
        let index = id.y * params.row_stride + in_row;
        let pair = query_key_value[index];
        query_key_value[index] = vec2<f32>(
            pair.x * turn.x - pair.y * turn.y,
            pair.x * turn.y + pair.y * turn.x,
        );
    }
}
