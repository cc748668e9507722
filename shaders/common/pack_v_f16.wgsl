// Sixteen bytes of a value row from the app's f32 value at `start`: eight f16.
const V_CHUNK_VECS = 2u;

fn pack_v_chunk(start: u32) -> vec4<u32> {
    return pack_halves(value[start], value[start + 1u]);
}
