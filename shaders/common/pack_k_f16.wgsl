// Sixteen bytes of a key row from the app's f32 key at `start`: eight f16.
const K_CHUNK_VECS = 2u;

fn pack_k_chunk(start: u32) -> vec4<u32> {
    return pack_halves(key[start], key[start + 1u]);
}
