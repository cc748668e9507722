// Packs f32 into f16 with one defined result everywhere: to nearest even, magnitudes beyond 65504 (infinity included)
// become 65504, NaN stays NaN. `pack2x16float` leaves all three to the driver.

fn half_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    // A normal f16: rebias the exponent, then round away 13 bits of mantissa.
    let rebiased = magnitude - 0x38000000u;
    let normal = (rebiased + 0xfffu + ((rebiased >> 13u) & 1u)) >> 13u;
    // Below 2^-14: adding 0.5 leaves multiples of 2^-24 in the low bits, rounded by the addition itself.
    let subnormal = bitcast<u32>(bitcast<f32>(magnitude) + 0.5) - 0x3f000000u;
    var half = select(normal, subnormal, magnitude < 0x38800000u);
    half = select(half, 0x7bffu, magnitude >= 0x477fe000u);
    half = select(half, 0x7e00u, magnitude > 0x7f800000u);
    return sign | half;
}

// Two f16 in a word, the first in its low half.
fn half_pair(x: vec2<f32>) -> u32 {
    return half_bits(x.x) | (half_bits(x.y) << 16u);
}

fn pack_halves(a: vec4<f32>, b: vec4<f32>) -> vec4<u32> {
    return vec4<u32>(half_pair(a.xy), half_pair(a.zw), half_pair(b.xy), half_pair(b.zw));
}
