// Attention of up to eight queries of one kv head over a span of keys: the part that decode and prefill share.
//
// One workgroup of 64 invocations walks its keys in tiles of 64. In a tile
//   1. the block-table entries of the tile are staged, one load per block;
//   2. one invocation per key computes that key's scores with all queries. Query elements are the same for the whole
//      workgroup, so they cost neither workgroup memory nor vector registers where the hardware has scalar ones;
//   3. the running maximum of each query grows to the tile's, and the weights go to workgroup memory;
//   4. a value row lies over `V_ROW` invocations, `V_KEYS` rows are read at a time, and every element that is read
//      serves all queries.
// Sums of weights stay with their invocation, and rows' sums with their group of invocations, until the end.
//
// Tiles that all queries see entirely have no guards; the others are the same text with `masked` set, which a compiler
// specialises. A key that a query does not see is left out by count, and its value is never multiplied.
//
// A line that contains `_Q` is written once per query, with the query's number in place of the `Q`.
//
// Source: online softmax as in Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), tiled as in
// Dao et al., "FlashAttention" (2022); keys split over workgroups as in "Flash-Decoding" (2023).

struct PerQuery {
    v_Q: f32,
}

// What a workgroup reads; the same for all its invocations.
struct Span {
    kv_head: u32,
    // First word of the sequence's block table.
    table: u32,
    // Keys `first_token..end_token`; `first_token` is a multiple of 64 and starts a block.
    first_token: u32,
    end_token: u32,
    // Keys below this one are seen by all queries.
    unmasked_end: u32,
    // Row of the first query, and its number among the queries of that row and kv head.
    first_row: u32,
    first_query: u32,
    num_queries: u32,
    // Index of the partial result, or DIRECT where the result is final.
    partial: u32,
}

// The queries, the same for all invocations of a workgroup. Those beyond `num_queries` repeat the last one.
struct Queries {
    // First unit of the query in `query`.
    start_Q: u32,
    // Keys that the query sees: `0..visible`.
    visible_Q: u32,
}

struct State {
    maximum_Q: f32,
    sum_Q: f32,
    values_Q: Values,
}

const TILE = WORKGROUP;
const WEIGHT_VECS = (QUERIES + 3u) / 4u;
const SCRATCH_VECS = max(WEIGHT_VECS, V_CHUNK_VECS);
// Value rows read at a time, and whether they use all invocations and divide a tile.
const V_KEYS = WORKGROUP / V_ROW;
const V_STEPS = (TILE + V_KEYS - 1u) / V_KEYS;
const V_EXACT = WORKGROUP % V_ROW == 0u && TILE % V_KEYS == 0u;

// Where the blocks of the tile start (`block_start`).
var<workgroup> tile_blocks: array<u32, TILE>;
// The weights of a tile, `[key][query]`; at the end the parts of a query's result, `[invocation]`.
var<workgroup> scratch: array<vec4<f32>, WORKGROUP * SCRATCH_VECS>;

// Stages the table entries of keys `tile..tile + count`. Blocks larger than a tile are looked up when they are entered.
fn stage_blocks(lane: u32, span: Span, tile: u32, count: u32) {
    let block_size = 1u << layer.block_shift;
    let entries = (count + block_size - 1u) >> layer.block_shift;
    if (lane < entries && slot_in_block(tile) == 0u) {
        tile_blocks[lane] = block_start(load_table_entry(span.table + (tile >> layer.block_shift) + lane));
    }
}

fn attend_tile(
    state: ptr<function, State>,
    invocation: Invocation,
    span: Span,
    queries: Queries,
    tile: u32,
    count: u32,
    masked: bool,
) {
    let lane = invocation.lane;
    stage_blocks(lane, span, tile, count);
    // Makes the tile's block starts visible.
    workgroupBarrier();

    var scores: PerQuery;
    if (!masked || lane < count) {
        let row = tile_blocks[lane >> layer.block_shift] + k_head_start(span.kv_head) + slot_in_block(tile + lane) * K_ROW;
        for (var chunk = 0u; chunk < K_ROW; chunk++) {
            let k = unpack_k(load_k_chunk(row + chunk));
            scores.v_Q = score_chunk(k, queries.start_Q + chunk * K_CHUNK_VECS, scores.v_Q);
        }
    }
    let seen_Q = !masked || tile + lane < queries.visible_Q;
    scores.v_Q = select(NO_LOGIT, scores.v_Q * layer.scale_log2, seen_Q);

    let tile_maximum = workgroup_max(invocation, scores);
    let maximum_Q = max((*state).maximum_Q, tile_maximum.v_Q);
    let decay_Q = exp2((*state).maximum_Q - maximum_Q);
    let weight_Q = select(0.0, exp2(scores.v_Q - maximum_Q), seen_Q);
    (*state).maximum_Q = maximum_Q;
    (*state).sum_Q = fma((*state).sum_Q, decay_Q, weight_Q);
    (*state).values_Q = scale_values((*state).values_Q, decay_Q);
    scratch[lane * WEIGHT_VECS + QUERY_Q / 4u][QUERY_Q % 4u] = weight_Q;
    // Makes the tile's weights visible.
    workgroupBarrier();

    let group = lane / V_ROW;
    let column = v_head_start(span.kv_head) + lane % V_ROW;
    let steps = select(V_STEPS, (count + V_KEYS - 1u) / V_KEYS, masked);
    for (var i = 0u; i < steps; i++) {
        let key = i * V_KEYS + group;
        if ((V_EXACT && !masked) || (group < V_KEYS && key < count)) {
            let row = tile_blocks[key >> layer.block_shift] + slot_in_block(tile + key) * V_ROW;
            let v = unpack_v(load_v_chunk(row + column));
            // One line, so that a query's new sums replace the old ones before the next query's are computed.
            (*state).values_Q = select_values((*state).values_Q, add_weighted((*state).values_Q, scratch[key * WEIGHT_VECS + QUERY_Q / 4u][QUERY_Q % 4u], v), !masked || !CAUSAL || tile + key < queries.visible_Q);
        }
    }
    // Nobody reads this tile's blocks and weights any more.
    workgroupBarrier();
}

// Adds up a query's result over the groups of invocations and writes it.
fn finish_query(lane: u32, span: Span, query: u32, values: Values, maximum: f32, sum: f32) {
    let row = span.first_row + (span.first_query + query) / layer.heads_per_kv_head;
    let head = span.kv_head * layer.heads_per_kv_head + (span.first_query + query) % layer.heads_per_kv_head;
    store_values(lane, values);
    // Makes all parts of the result visible.
    workgroupBarrier();
    if (lane < HEAD_VECS) {
        var total = vec4<f32>(0.0);
        for (var group = 0u; group < V_KEYS; group++) {
            total += scratch[(group * V_ROW + lane / V_CHUNK_VECS) * V_CHUNK_VECS + lane % V_CHUNK_VECS];
        }
        if (span.partial == DIRECT) {
            // A query that saw no key has no sum, and its result is 0.
            let place = row * tensors.output_stride + head * HEAD_VECS;
            output[place + lane] = select(total / sum, vec4<f32>(0.0), sum == 0.0);
        } else {
            partials[(span.partial * layer.num_query_heads + head) * PARTIAL_VECS + lane] = total;
        }
    }
    if (span.partial != DIRECT && lane == 0u) {
        let place = (span.partial * layer.num_query_heads + head) * PARTIAL_VECS;
        partials[place + HEAD_VECS] = vec4<f32>(maximum, sum, 0.0, 0.0);
    }
    // The scratch is free for the next query.
    workgroupBarrier();
}

fn attend(invocation: Invocation, span: Span, queries: Queries) {
    var state: State;
    state.maximum_Q = NO_LOGIT;
    var tile = span.first_token;
    for (; tile + TILE <= span.unmasked_end; tile += TILE) {
        attend_tile(&state, invocation, span, queries, tile, TILE, false);
    }
    for (; tile < span.end_token; tile += TILE) {
        attend_tile(&state, invocation, span, queries, tile, min(TILE, span.end_token - tile), true);
    }
    var sums: PerQuery;
    sums.v_Q = state.sum_Q;
    sums = workgroup_sum(invocation, sums);
    if (QUERY_Q < span.num_queries) { finish_query(invocation.lane, span, QUERY_Q, state.values_Q, state.maximum_Q, sums.v_Q); }
}
