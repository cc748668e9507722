// Sixteen bytes of a key row from the app's key at unit `start`: four f32.
const K_CHUNK_VECS = 1u;

fn pack_k_chunk(start: u32) -> vec4<u32> {
    return bitcast<vec4<u32>>(elements_of(key[start]));
}
