// Rows see the keys from some position on, and perhaps the first tokens: a window, or a chunk. Where it begins for a row,
// `reach_window.wgsl` or `reach_chunk.wgsl` says.
//
// A tile that all queries see entirely has no guards, the others have them at both ends; those that no query sees are not
// walked. The first tokens belong to the span in which a query's window begins, so they are walked once however many spans
// there are.

// Whether a query sees a key: from `begin` on and before `end`, or before `first`.
fn is_seen(begin: u32, first: u32, end: u32, key: u32) -> bool {
    return key < end && (key >= begin || key < first);
}

// Whether a query of the workgroup sees a key that lies before the end of its span. What lies in others may be another
// sequence's by now, or nothing.
fn is_read(span: Span, key: u32) -> bool {
    return key >= span.read_begin || key < layer.first_tokens;
}

fn attend(invocation: Invocation, span: Span, queries: Queries) {
    var state: State;
    state.maximum_Q = NO_LOGIT;
    var visible: Visible;
    set_slopes(&visible, span);
    visible.end_Q = visible_keys(span, QUERY_Q);
    let begin_Q = first_seen(position_of(span, QUERY_Q));
    visible.first_Q = select(0u, layer.first_tokens, begin_Q >= span.first_token && begin_Q < span.end_token);

    var walked = span;
    walked.read_begin = first_seen(position_of(span, 0u));
    let last_begin = first_seen(position_of(span, span.num_queries - 1u));
    // The first tokens that lie before the span.
    visible.begin_Q = NO_KEY;
    let has_first = walked.read_begin < span.end_token && last_begin >= span.first_token;
    walked.first_token = 0u;
    walked.end_token = select(0u, min(layer.first_tokens, span.first_token), has_first);
    walked.unmasked_end = 0u;
    for (var part = 0u; part < 2u; part++) {
        var tile = walked.first_token;
        loop {
            for (; tile >= last_begin && tile + TILE <= walked.unmasked_end; tile += TILE) {
                attend_tile(&state, invocation, walked, queries, visible, tile, TILE, false);
            }
            if (tile >= walked.end_token) {
                break;
            }
            attend_tile(&state, invocation, walked, queries, visible, tile, min(TILE, walked.end_token - tile), true);
            tile += TILE;
        }
        visible.begin_Q = begin_Q;
        walked.first_token = span.first_token;
        walked.end_token = span.end_token;
        walked.unmasked_end = span.unmasked_end;
    }
    finish(invocation, span, state);
}
