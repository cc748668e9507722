// Sixteen bytes of a key row from the app's key at unit `start`: eight f16.
const K_CHUNK_VECS = 2u;

fn pack_k_chunk(start: u32) -> vec4<u32> {
    return pack_halves(elements_of(key[start]), elements_of(key[start + 1u]));
}
