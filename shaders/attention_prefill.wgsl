// Attention of sequences that compute several rows: a prompt, or a chunk of one that starts anywhere.
//
// Work item: (sequence, kv head, tile of queries, span of keys); one workgroup each, 64 invocations. The queries of a
// sequence and kv head are numbered row by row, and within a row head by head; a tile is QUERIES of them, across rows as
// it comes. Rows are aligned to the end of the context: row `i` of `n` sees keys up to its position, `context - n + i`.
// A tile's only span writes the final result of its queries, others partial ones, a row's `num_spans` of them in a row.
//
// Twin: `reference::attention_prefill`. Algorithm and source: `common/attention_core.wgsl`. The entry point is in
// `common/attention_prefill_subgroup.wgsl` or `common/attention_prefill_workgroup.wgsl`.

// The queries of a workgroup may see different numbers of keys.
const CAUSAL = true;

// End of the keys that a query sees.
fn visible_keys(span: Span, query: u32) -> u32 {
    return span.first_visible + row_in_tile(span, min(query, span.num_queries - 1u));
}

// The position of a query's row.
fn position_of(span: Span, query: u32) -> u32 {
    return visible_keys(span, query) - 1u;
}

// Index of a query's partial result.
fn partial_of(span: Span, query: u32) -> u32 {
    return span.partial + row_in_tile(span, query) * span.num_spans;
}

// Rows from the tile's first query to another one.
fn row_in_tile(span: Span, query: u32) -> u32 {
    let heads = layer.heads_per_kv_head;
    return (span.first_query + query) / heads - span.first_query / heads;
}

fn prefill(workgroup: vec3<u32>, invocation: Invocation) {
    let index = workgroup_index(workgroup);
    if (index >= plan.num_prefill_items * layer.num_kv_heads || plan.num_rows > tensors.num_rows) {
        return;
    }
    let item = plan.prefill_items + (index / layer.num_kv_heads) * ITEM_WORDS;
    let kv_head = index % layer.num_kv_heads;
    let sequence = metadata[item];
    let first_query = metadata[item + 1u];
    let end_query = metadata[item + 2u];
    let first_row = metadata[plan.query_starts + sequence];
    let num_rows = metadata[plan.query_starts + sequence + 1u] - first_row;
    // Keys that the first row sees.
    let visible = metadata[plan.context_lens + sequence] - num_rows + 1u;
    let heads = layer.heads_per_kv_head;

    var span: Span;
    span.kv_head = kv_head;
    span.table = metadata[plan.table_rows + sequence] * layer.table_entries;
    span.first_token = metadata[item + 3u];
    span.end_token = metadata[item + 4u];
    span.first_visible = visible + first_query / heads;
    // At most the end of the span.
    span.unmasked_end = min(span.first_visible, metadata[item + 7u]);
    span.first_row = first_row;
    span.first_query = first_query;
    span.num_queries = end_query - first_query;
    span.partial = metadata[item + 5u];
    span.num_spans = metadata[item + 6u];

    var queries: Queries;
    let query_Q = min(first_query + QUERY_Q, end_query - 1u);
    let row_Q = first_row + query_Q / heads;
    let head_Q = kv_head * heads + query_Q % heads;
    queries.start_Q = (row_Q * tensors.query_stride + head_Q * (K_HEAD_DIM / 4u)) & UNIT_MASK;
    attend(invocation, span, queries);
}
