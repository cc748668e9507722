// A window: the latest `reach_tokens` keys, the row's own among them.

// The first key that the row at a position sees beside the first tokens.
fn first_seen(position: u32) -> u32 {
    return position + 1u - min(position + 1u, layer.reach_tokens);
}
