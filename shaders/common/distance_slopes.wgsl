// ALiBi: a key loses by its distance from the row. Press et al., "Train Short, Test Long" (2022).

fn set_slopes(visible: ptr<function, Visible>, span: Span) {
    (*visible).position_Q = position_of(span, QUERY_Q);
    (*visible).slope_Q = head_numbers(head_of(span, QUERY_Q)).x;
}

fn with_distance(logit: f32, slope: f32, position: u32, key: u32) -> f32 {
    return fma(-slope, f32(i32(position) - i32(key)), logit);
}
