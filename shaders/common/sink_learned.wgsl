// The softmax's denominator has the weight of a learned sink, once per row and query head, and that has no value.

// A row's result: 0 where it saw no key, and has no sum.
fn normalised(total: vec4<f32>, head: u32, maximum: f32, sum: f32) -> vec4<f32> {
    let sink = head_numbers(head).y;
    let most = max(maximum, sink);
    let shrink = exp2(maximum - most);
    let factor = shrink / fma(sum, shrink, exp2(sink - most));
    return select(total * factor, vec4<f32>(0.0), sum == 0.0);
}
