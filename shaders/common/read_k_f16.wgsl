// Keys of f16: sixteen bytes are eight elements. `unpack2x16float` feeding `fma` needs no `shader-f16`, and compilers
// that have a mixed-precision multiply-add make it one instruction.
const K_CHUNK_VECS = 2u;

struct KChunk {
    low: vec4<f32>,
    high: vec4<f32>,
}

fn unpack_k(words: vec4<u32>) -> KChunk {
    return KChunk(
        vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)),
        vec4<f32>(unpack2x16float(words.z), unpack2x16float(words.w)),
    );
}

// `sum` plus the dot product of a chunk with the query elements at `start`.
fn score_chunk(k: KChunk, start: u32, sum: f32) -> f32 {
    let low = query[start];
    let high = query[start + 1u];
    var result = fma(k.low.x, low.x, sum);
    result = fma(k.low.y, low.y, result);
    result = fma(k.low.z, low.z, result);
    result = fma(k.low.w, low.w, result);
    result = fma(k.high.x, high.x, result);
    result = fma(k.high.y, high.y, result);
    result = fma(k.high.z, high.z, result);
    return fma(k.high.w, high.w, result);
}
