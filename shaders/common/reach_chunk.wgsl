// A chunk: positions are cut into chunks of `reach_tokens`, and a row sees its own.

// The first key that the row at a position sees.
fn first_seen(position: u32) -> u32 {
    return position - position % layer.reach_tokens;
}
