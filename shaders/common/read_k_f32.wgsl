// Keys of f32: sixteen bytes are four elements.
const K_CHUNK_VECS = 1u;

struct KChunk {
    all: vec4<f32>,
}

fn unpack_k(words: vec4<u32>) -> KChunk {
    return KChunk(bitcast<vec4<f32>>(words));
}

// `sum` plus the dot product of a chunk with the query elements at `start`.
fn score_chunk(k: KChunk, start: u32, sum: f32) -> f32 {
    let elements = query[start];
    var result = fma(k.all.x, elements.x, sum);
    result = fma(k.all.y, elements.y, result);
    result = fma(k.all.z, elements.z, result);
    return fma(k.all.w, elements.w, result);
}
