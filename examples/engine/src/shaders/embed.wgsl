// Token ids to the rows of the residual stream.
//
// One invocation copies one element: x is the element, y the row. The table is stored as the output matrix needs it
// (see `weights.rs`), so that a model with tied embeddings holds it once; where it is split into parts, each part's
// dispatch writes the rows whose token it holds.
//
// CPU twin: `CpuModel::embed` in `cpu.rs`.

// Tokens of one group.
const GROUP: u32 = 32u;

struct Params {
    embedding_len: u32,
    // Tokens that this part holds.
    first_token: u32,
    end_token: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> token_ids: array<u32>;
// [groups][embedding_len][GROUP]
@group(0) @binding(2) var<storage, read> table_part: array<f32>;
// [rows][embedding_len]
@group(0) @binding(3) var<storage, read_write> residual: array<f32>;

@compute @workgroup_size(64)
fn embed(@builtin(global_invocation_id) id: vec3<u32>) {
    let token = token_ids[id.y];
    if id.x < params.embedding_len && token >= params.first_token && token < params.end_token {
        let in_part = token - params.first_token;
        let line = in_part / GROUP * params.embedding_len + id.x;
        residual[id.y * params.embedding_len + id.x] = table_part[line * GROUP + in_part % GROUP];
    }
}
