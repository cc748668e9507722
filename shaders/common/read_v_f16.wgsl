// Values of f16: a lane's sixteen bytes are eight elements.
const V_CHUNK_VECS = 2u;

struct Values {
    low: vec4<f32>,
    high: vec4<f32>,
}

fn unpack_v(words: vec4<u32>) -> Values {
    return Values(
        vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)),
        vec4<f32>(unpack2x16float(words.z), unpack2x16float(words.w)),
    );
}

fn scale_values(values: Values, factor: f32) -> Values {
    return Values(values.low * factor, values.high * factor);
}

fn add_weighted(sum: Values, weight: f32, v: Values) -> Values {
    return Values(
        vec4<f32>(
            fma(v.low.x, weight, sum.low.x),
            fma(v.low.y, weight, sum.low.y),
            fma(v.low.z, weight, sum.low.z),
            fma(v.low.w, weight, sum.low.w),
        ),
        vec4<f32>(
            fma(v.high.x, weight, sum.high.x),
            fma(v.high.y, weight, sum.high.y),
            fma(v.high.z, weight, sum.high.z),
            fma(v.high.w, weight, sum.high.w),
        ),
    );
}

fn select_values(otherwise: Values, chosen: Values, condition: bool) -> Values {
    return Values(
        select(otherwise.low, chosen.low, condition),
        select(otherwise.high, chosen.high, condition),
    );
}

fn store_values(lane: u32, values: Values) {
    scratch[lane * 2u] = values.low;
    scratch[lane * 2u + 1u] = values.high;
}
