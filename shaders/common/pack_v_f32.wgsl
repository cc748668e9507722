// Sixteen bytes of a value row from the app's value at unit `start`: four f32.
const V_CHUNK_VECS = 1u;

fn pack_v_chunk(start: u32) -> vec4<u32> {
    return bitcast<vec4<u32>>(elements_of(value[start]));
}
