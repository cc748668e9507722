// A query head's slope and learned sink, times log2(e).
fn head_numbers(head: u32) -> vec2<f32> {
    let pair = layer.heads[head / 2u];
    return select(pair.xy, pair.zw, head % 2u == 1u);
}
