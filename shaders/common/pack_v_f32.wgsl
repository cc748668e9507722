// Sixteen bytes of a value row from the app's f32 value at `start`: four f32.
const V_CHUNK_VECS = 1u;

fn pack_v_chunk(start: u32) -> vec4<u32> {
    return bitcast<vec4<u32>>(value[start]);
}
