// The softmax's denominator is the sum of weights.

// A row's result: 0 where it saw no key, and has no sum.
fn normalised(total: vec4<f32>, head: u32, maximum: f32, sum: f32) -> vec4<f32> {
    return select(total / sum, vec4<f32>(0.0), sum == 0.0);
}
