// What every kernel knows: the step, the layer, and the step's arrays. Mirrors of `src/gpu/params.rs`.

// Where the step's arrays start in `metadata`, in words, and how many items this dispatch has.
// A dispatch that continues a list cut by the work budget has its own copy with later starts.
struct StepParams {
    num_rows: u32,
    token_ids: u32,
    positions: u32,
    slot_mapping: u32,
    query_starts: u32,
    context_lens: u32,
    table_rows: u32,
    decode_items: u32,
    num_decode_items: u32,
    prefill_items: u32,
    num_prefill_items: u32,
    merge_items: u32,
    num_merge_items: u32,
    block_copies: u32,
    num_block_copies: u32,
    padding: u32,
}

// One layer: where it lies in its arena, in units of 16 bytes, and the shape that is not compiled in.
struct LayerParams {
    block_stride: u32,
    layer_start: u32,
    block_shift: u32,
    table_entries: u32,
    num_kv_heads: u32,
    num_query_heads: u32,
    heads_per_kv_head: u32,
    head_tiles: u32,
    // Scale of the logits times log2(e): the softmax is in base 2. With a soft-cap, that of twice the logits over the cap.
    scale_log2: f32,
    // The soft-cap times log2(e).
    soft_cap_log2: f32,
    // Keys of a window, or positions of a chunk.
    reach_tokens: u32,
    // Tokens from a sequence's beginning that rows see beside their window.
    first_tokens: u32,
    // Of two query heads each: slope and learned sink, times log2(e).
    heads: array<vec4<f32>, HEAD_PARAMS>,
}

@group(0) @binding(0) var<uniform> plan: StepParams;
// The step's flat arrays, `[words]`.
@group(0) @binding(1) var<storage, read> metadata: array<u32>;
// Block ids, `[max_sequences][table_entries]`.
@group(0) @binding(2) var<storage, read> block_tables: array<u32>;
@group(0) @binding(3) var<uniform> layer: LayerParams;

// Distances between rows of the app's tensors, in units of four elements, and how many rows they all have. A step that has
// more is not the one that was recorded, whose metadata has not arrived: nothing of it is computed.
struct TensorParams {
    query_stride: u32,
    key_stride: u32,
    value_stride: u32,
    output_stride: u32,
    num_rows: u32,
    padding_0: u32,
    padding_1: u32,
    padding_2: u32,
}

const WORKGROUP = 64u;
// The finite stand-in for "no logit yet": below every real one, and `exp2` of any difference to it is 0.
const NO_LOGIT = -3.0e38;
// Stands in for the first key of a query that sees none.
const NO_KEY = 0xffffffffu;
// Slot of a padding row, and destination of a decode item that is its row's only one.
const PADDING_SLOT = 0xffffffffu;
const DIRECT = 0xffffffffu;

// The flat index of a workgroup in a dispatch that may be folded over x and y.
fn workgroup_index(workgroup: vec3<u32>) -> u32 {
    return workgroup.y * FOLD + workgroup.x;
}
