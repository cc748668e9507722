// Attention of up to eight queries of one kv head over a span of keys: the part that decode and prefill share.
//
// One workgroup of 64 invocations walks its keys in tiles of 128. In a tile
//   1. the block-table entries of the next 128 blocks are staged when none is left, one load per block;
//   2. an invocation computes the scores of two keys, 64 apart, with all queries. Query elements are the same for the
//      whole workgroup, so they cost neither workgroup memory nor vector registers where the hardware has scalar ones,
//      and one load of them serves both keys. Where the keys' values lie goes to workgroup memory;
//   3. the running maximum of each query grows to the tile's, and the weights go to workgroup memory;
//   4. a value row lies over `V_ROW` invocations, `V_KEYS` rows are read at a time, and every element that is read
//      serves all queries.
// Sums of weights stay with their invocation, and rows' sums with their group of invocations, until the end.
//
// Tiles that all queries see entirely have no guards; the others are the same text with `masked` set, which a compiler
// specialises. A key that a query does not see is left out by its index, and its value is never multiplied. Which tiles are
// walked, and what a query sees, is in `reach_all.wgsl` or `reach_part.wgsl`; what becomes of products in `logit_*.wgsl` and
// `distance_*.wgsl`, of sums in `sink_*.wgsl`.
//
// A line that contains `_Q` is written once per query, with the query's number in place of the `Q`, and one that contains
// `_J` once per key of an invocation.
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
    // Keys `first_token..end_token`; `first_token` starts a block. Blocks are counted from there.
    first_token: u32,
    end_token: u32,
    // Keys below this one are seen by all queries.
    unmasked_end: u32,
    // Row of the first query, and its number among the queries of that row and kv head.
    first_row: u32,
    first_query: u32,
    num_queries: u32,
    // Index of the first row's partial result, or DIRECT where the result is final.
    partial: u32,
    // For queries of several rows: keys that the first row sees, and from a row's partial result to the next row's.
    first_visible: u32,
    num_spans: u32,
    // Position of the only row, where the queries are one row's.
    position: u32,
    // The first key that a query sees, where rows do not see everything before them.
    read_begin: u32,
}

// The queries, the same for all invocations of a workgroup. Those beyond `num_queries` repeat the last one.
struct Queries {
    // First unit of the query in `query`.
    start_Q: u32,
}

// The keys that each query sees: those before `end`; of them, where rows do not see everything, those from `begin` on and
// those before `first`. And what a key loses by its distance from the query's position.
struct Visible {
    end_Q: u32,
    begin_Q: u32,
    first_Q: u32,
    position_Q: u32,
    slope_Q: f32,
}

struct State {
    maximum_Q: f32,
    sum_Q: f32,
    values_Q: Values,
}

const TILE = WORKGROUP * KEYS;
const WEIGHT_VECS = (QUERIES + 3u) / 4u;
const SCRATCH_VECS = WORKGROUP * max(KEYS * WEIGHT_VECS, V_CHUNK_VECS);
// Value rows read at a time, and whether they use all invocations and divide a tile.
const V_KEYS = WORKGROUP / V_ROW;
const V_STEPS = (TILE + V_KEYS - 1u) / V_KEYS;
const V_EXACT = WORKGROUP % V_ROW == 0u && TILE % V_KEYS == 0u;

// Where the blocks of a stretch of the span start (`block_start`), by their number in the span modulo TILE.
var<workgroup> staged_blocks: array<u32, TILE>;
// Where the value rows of a tile's keys start.
var<workgroup> value_rows: array<u32, TILE>;
// The weights of a tile, `[key][query]`; at the end the parts of a query's result, `[invocation]`.
var<workgroup> scratch: array<vec4<f32>, SCRATCH_VECS>;

// Stages where the next TILE blocks start, once per so many blocks. A tile is whole blocks or lies in one, because spans
// start at a block: the first key of a tile that needs new blocks is the first of a block.
fn stage_blocks(lane: u32, span: Span, tile: u32) {
    let block = (tile - span.first_token) >> layer.block_shift;
    if (block % TILE == 0u && slot_in_block(tile) == 0u) {
        let entry_J = (tile >> layer.block_shift) + KEY_J * WORKGROUP + lane;
        // One line, to be written once per key. No entry behind the span's last is read.
        if ((entry_J << layer.block_shift) < span.end_token) { staged_blocks[KEY_J * WORKGROUP + lane] = block_start(load_table_entry(span.table + entry_J)); }
        // Makes the block starts visible.
        workgroupBarrier();
    }
}

fn attend_tile(
    state: ptr<function, State>,
    invocation: Invocation,
    span: Span,
    queries: Queries,
    visible: Visible,
    tile: u32,
    count: u32,
    masked: bool,
) {
    let lane = invocation.lane;
    stage_blocks(lane, span, tile);

    var scores_J: PerQuery;
    let key_J = KEY_J * WORKGROUP + lane;
    let slot_J = slot_in_block(tile + key_J);
    let block_J = staged_blocks[((tile - span.first_token + key_J) >> layer.block_shift) % TILE];
    let row_J = block_J + k_head_start(span.kv_head) + slot_J * K_ROW;
    value_rows[key_J] = block_J + v_head_start(span.kv_head) + slot_J * V_ROW;
    if (!masked || lane < count) {
        for (var chunk = 0u; chunk < K_ROW; chunk++) {
            var words_J: vec4<u32>;
            if (!masked || (key_J < count && is_read(span, tile + key_J))) { words_J = load_k_chunk(row_J + chunk); }
            let k_J = unpack_k(words_J);
            scores_J.v_Q = score_chunk(k_J, load_query_chunk(queries.start_Q + chunk * K_CHUNK_VECS), scores_J.v_Q);
        }
    }
    let seen_Q_J = !masked || is_seen(visible.begin_Q, visible.first_Q, visible.end_Q, tile + key_J);
    scores_J.v_Q = select(NO_LOGIT, with_distance(logit_of(scores_J.v_Q), visible.slope_Q, visible.position_Q, tile + key_J), seen_Q_J);

    var most = scores_0;
    most.v_Q = max(most.v_Q, scores_J.v_Q);
    most = workgroup_max(invocation, most);
    let maximum_Q = max((*state).maximum_Q, most.v_Q);
    let decay_Q = exp2((*state).maximum_Q - maximum_Q);
    (*state).maximum_Q = maximum_Q;
    (*state).sum_Q *= decay_Q;
    (*state).values_Q = scale_values((*state).values_Q, decay_Q);
    let weight_Q_J = select(0.0, exp2(scores_J.v_Q - maximum_Q), seen_Q_J);
    (*state).sum_Q += weight_Q_J;
    scratch[key_J * WEIGHT_VECS + QUERY_Q / 4u][QUERY_Q % 4u] = weight_Q_J;
    // Makes the tile's weights and value rows visible.
    workgroupBarrier();

    let group = lane / V_ROW;
    let column = lane % V_ROW;
    let steps = select(V_STEPS, (count + V_KEYS - 1u) / V_KEYS, masked);
    for (var i = 0u; i < steps; i++) {
        let key = i * V_KEYS + group;
        if ((V_EXACT && !masked) || (group < V_KEYS && key < count && (!masked || is_read(span, tile + key)))) {
            let v = unpack_v(load_v_chunk(value_rows[key] + column));
            // One line, so that a query's new sums replace the old ones before the next query's are computed.
            (*state).values_Q = select_values((*state).values_Q, add_weighted((*state).values_Q, scratch[key * WEIGHT_VECS + QUERY_Q / 4u][QUERY_Q % 4u], v), !masked || !CAUSAL || is_seen(visible.begin_Q, visible.first_Q, visible.end_Q, tile + key));
        }
    }
    // Nobody reads this tile's blocks, value rows and weights any more.
    workgroupBarrier();
}

// A query's head, of all query heads.
fn head_of(span: Span, query: u32) -> u32 {
    return span.kv_head * layer.heads_per_kv_head + (span.first_query + query) % layer.heads_per_kv_head;
}

// Adds up a query's result over the groups of invocations and writes it.
fn finish_query(lane: u32, span: Span, query: u32, values: Values, maximum: f32, sum: f32) {
    let row = span.first_row + (span.first_query + query) / layer.heads_per_kv_head;
    let head = head_of(span, query);
    store_values(lane, values);
    // Makes all parts of the result visible.
    workgroupBarrier();
    if (lane < HEAD_VECS) {
        var total = vec4<f32>(0.0);
        for (var group = 0u; group < V_KEYS; group++) {
            total += scratch[(group * V_ROW + lane / V_CHUNK_VECS) * V_CHUNK_VECS + lane % V_CHUNK_VECS];
        }
        if (span.partial == DIRECT) {
            let place = row * tensors.output_stride + head * HEAD_VECS;
            output[place + lane] = unit_of(normalised(total, head, maximum, sum));
        } else {
            partials[(partial_of(span, query) * layer.num_query_heads + head) * PARTIAL_VECS + lane] = total;
        }
    }
    if (span.partial != DIRECT && lane == 0u) {
        let place = (partial_of(span, query) * layer.num_query_heads + head) * PARTIAL_VECS;
        partials[place + HEAD_VECS] = vec4<f32>(maximum, sum, 0.0, 0.0);
    }
    // The scratch is free for the next query.
    workgroupBarrier();
}

fn finish(invocation: Invocation, span: Span, state: State) {
    var sums: PerQuery;
    sums.v_Q = state.sum_Q;
    sums = workgroup_sum(invocation, sums);
    if (QUERY_Q < span.num_queries) { finish_query(invocation.lane, span, QUERY_Q, state.values_Q, state.maximum_Q, sums.v_Q); }
}
