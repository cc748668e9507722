const CHUNK_VECS = 2u;
fn chunk_vec(words: vec4<u32>, i: u32) -> vec4<f32> {
    let pair = select(words.zw, words.xy, i == 0u);
    return vec4<f32>(unpack2x16float(pair.x), unpack2x16float(pair.y));
}
