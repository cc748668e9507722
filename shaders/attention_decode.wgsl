// Attention of sequences that compute one row.
//
// Work item: (sequence, kv head, tile of that kv head's query heads, span of keys); one workgroup each, 64 invocations.
// Every element of K and V that is read serves all heads of the tile. A span that is its row's only one writes the
// final result, the others a partial one with its maximum and sum for `attention_merge`.
//
// Twin: `reference::attention_decode`. Algorithm and source: `common/attention_core.wgsl`. The entry point is in
// `common/attention_decode_subgroup.wgsl` or `common/attention_decode_workgroup.wgsl`.

// All queries of a workgroup see the same keys.
const CAUSAL = false;

// End of the keys that a query sees.
fn visible_keys(span: Span, query: u32) -> u32 {
    return span.end_token;
}

// The position of a query's row.
fn position_of(span: Span, query: u32) -> u32 {
    return span.position;
}

// Index of a query's partial result.
fn partial_of(span: Span, query: u32) -> u32 {
    return span.partial;
}

fn decode(workgroup: vec3<u32>, invocation: Invocation) {
    let per_item = layer.num_kv_heads * layer.head_tiles;
    let index = workgroup_index(workgroup);
    if (index >= plan.num_decode_items * per_item || plan.num_rows > tensors.num_rows) {
        return;
    }
    let item = plan.decode_items + (index / per_item) * 4u;
    let sequence = metadata[item];
    let first_token = metadata[item + 1u];
    let end_token = metadata[item + 2u];
    let partial = metadata[item + 3u];
    let row = metadata[plan.query_starts + sequence];

    // Heads of a kv head in tiles of QUERIES, the last one perhaps with fewer.
    let kv_head = (index % per_item) / layer.head_tiles;
    let first_head = (index % layer.head_tiles) * QUERIES;
    let num_queries = min(QUERIES, layer.heads_per_kv_head - first_head);

    var span: Span;
    span.kv_head = kv_head;
    span.table = metadata[plan.table_rows + sequence] * layer.table_entries;
    span.first_token = first_token;
    span.end_token = end_token;
    span.unmasked_end = end_token;
    span.first_row = row;
    span.first_query = first_head;
    span.num_queries = num_queries;
    span.partial = partial;
    span.position = metadata[plan.context_lens + sequence] - 1u;

    let start = row * tensors.query_stride + (kv_head * layer.heads_per_kv_head + first_head) * (K_HEAD_DIM / 4u);
    var queries: Queries;
    queries.start_Q = (start + min(QUERY_Q, num_queries - 1u) * (K_HEAD_DIM / 4u)) & UNIT_MASK;
    attend(invocation, span, queries);
}
