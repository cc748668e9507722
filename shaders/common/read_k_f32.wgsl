// Keys of f32: sixteen bytes are four elements.
const K_CHUNK_VECS = 1u;

struct KChunk {
    all: vec4<f32>,
}

fn unpack_k(words: vec4<u32>) -> KChunk {
    return KChunk(bitcast<vec4<f32>>(words));
}

// Query elements of the same columns.
struct QueryChunk {
    all: vec4<f32>,
}

fn load_query_chunk(start: u32) -> QueryChunk {
    return QueryChunk(elements_of(query[start]));
}

// `sum` plus the dot product of a chunk with the query's.
fn score_chunk(k: KChunk, q: QueryChunk, sum: f32) -> f32 {
    var result = fma(k.all.x, q.all.x, sum);
    result = fma(k.all.y, q.all.y, result);
    result = fma(k.all.z, q.all.z, result);
    return fma(k.all.w, q.all.w, result);
}
