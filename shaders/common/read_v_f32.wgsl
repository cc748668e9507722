// Values of f32: a lane's sixteen bytes are four elements.
const V_CHUNK_VECS = 1u;

struct Values {
    all: vec4<f32>,
}

fn unpack_v(words: vec4<u32>) -> Values {
    return Values(bitcast<vec4<f32>>(words));
}

fn scale_values(values: Values, factor: f32) -> Values {
    return Values(values.all * factor);
}

fn add_weighted(sum: Values, weight: f32, v: Values) -> Values {
    return Values(
        vec4<f32>(
            fma(v.all.x, weight, sum.all.x),
            fma(v.all.y, weight, sum.all.y),
            fma(v.all.z, weight, sum.all.z),
            fma(v.all.w, weight, sum.all.w),
        ),
    );
}

fn select_values(otherwise: Values, chosen: Values, condition: bool) -> Values {
    return Values(select(otherwise.all, chosen.all, condition));
}

fn store_values(lane: u32, values: Values) {
    scratch[lane] = values.all;
}
