// Sixteen bytes of a value row from the app's value at unit `start`: eight f16.
const V_CHUNK_VECS = 2u;

fn pack_v_chunk(start: u32) -> vec4<u32> {
    return pack_halves(elements_of(value[start]), elements_of(value[start + 1u]));
}
