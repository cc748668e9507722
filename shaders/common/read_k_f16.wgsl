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

// Query elements of the same columns.
struct QueryChunk {
    low: vec4<f32>,
    high: vec4<f32>,
}

fn load_query_chunk(start: u32) -> QueryChunk {
    return QueryChunk(elements_of(query[start]), elements_of(query[start + 1u]));
}

// `sum` plus the dot product of a chunk with the query's.
fn score_chunk(k: KChunk, q: QueryChunk, sum: f32) -> f32 {
    var result = fma(k.low.x, q.low.x, sum);
    result = fma(k.low.y, q.low.y, result);
    result = fma(k.low.z, q.low.z, result);
    result = fma(k.low.w, q.low.w, result);
    result = fma(k.high.x, q.high.x, result);
    result = fma(k.high.y, q.high.y, result);
    result = fma(k.high.z, q.high.z, result);
    return fma(k.high.w, q.high.w, result);
}
