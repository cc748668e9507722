// Rows see every key up to their own.

// Whether a query sees a key.
fn is_seen(begin: u32, first: u32, end: u32, key: u32) -> bool {
    return key < end;
}

// Whether a query of the workgroup sees a key that lies before the end of its span.
fn is_read(span: Span, key: u32) -> bool {
    return true;
}

fn attend(invocation: Invocation, span: Span, queries: Queries) {
    var state: State;
    state.maximum_Q = NO_LOGIT;
    var visible: Visible;
    set_slopes(&visible, span);
    var tile = span.first_token;
    for (; tile + TILE <= span.unmasked_end; tile += TILE) {
        attend_tile(&state, invocation, span, queries, visible, tile, TILE, false);
    }
    // Only now, not to hold registers in the loop above.
    visible.end_Q = visible_keys(span, QUERY_Q);
    for (; tile < span.end_token; tile += TILE) {
        attend_tile(&state, invocation, span, queries, visible, tile, min(TILE, span.end_token - tile), true);
    }
    finish(invocation, span, state);
}
