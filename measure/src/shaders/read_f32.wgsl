const CHUNK_VECS = 1u;
fn chunk_vec(words: vec4<u32>, i: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(words);
}
