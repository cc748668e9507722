// Rotary position encoding, in place, of the queries and keys of a step's rows.
//
// A row holds its query heads, then its key heads, then its values, all of one size; the first `pairs_per_head` pairs of
// each query and key head are turned, pairs being neighbouring elements (even, odd) as GGUF's llama layout has them. One
// invocation turns one pair: x is the pair among all heads', y the row. Cosines and sines come from the host.
//
// CPU twin: `rotate` in `cpu.rs`.

struct Params {
    // Pairs turned in each head, and pairs from one head to the next.
    pairs_per_head: u32,
    head_stride: u32,
    // Pairs turned in a row: (query heads + key heads) * pairs_per_head.
    pairs_per_row: u32,
    // Pairs from one row to the next.
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
    if id.x < params.pairs_per_row {
        let head = id.x / params.pairs_per_head;
        let pair_in_head = id.x % params.pairs_per_head;
        let turn = rotations[positions[id.y] * params.pairs_per_head + pair_in_head];
        let index = id.y * params.row_stride + head * params.head_stride + pair_in_head;
        let pair = query_key_value[index];
        query_key_value[index] = vec2<f32>(
            pair.x * turn.x - pair.y * turn.y,
            pair.x * turn.y + pair.y * turn.x,
        );
    }
}
