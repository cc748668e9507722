// Reductions over the workgroup through workgroup memory, for devices without subgroup operations: all values are
// written, eight invocations per four queries reduce eight each, and every invocation reduces those eight results.

struct Invocation {
    lane: u32,
}

const PARTS = WORKGROUP / 8u;

// `[part][query]`
var<workgroup> parts: array<vec4<f32>, PARTS * WEIGHT_VECS>;

// Leaves all values in `scratch`, `[invocation][query]`.
fn spread(lane: u32, values: PerQuery) {
    scratch[lane * WEIGHT_VECS + QUERY_Q / 4u][QUERY_Q % 4u] = values.v_Q;
    // Makes all values visible.
    workgroupBarrier();
}

fn workgroup_max(invocation: Invocation, values: PerQuery) -> PerQuery {
    spread(invocation.lane, values);
    if (invocation.lane < PARTS * WEIGHT_VECS) {
        let first = invocation.lane / WEIGHT_VECS * 8u * WEIGHT_VECS + invocation.lane % WEIGHT_VECS;
        var most = scratch[first];
        for (var i = 1u; i < 8u; i++) {
            most = max(most, scratch[first + i * WEIGHT_VECS]);
        }
        parts[invocation.lane] = most;
    }
    // Makes the parts visible, and the scratch is free. The next use lies behind another barrier.
    workgroupBarrier();
    var result = values;
    for (var i = 0u; i < PARTS; i++) {
        result.v_Q = max(result.v_Q, parts[i * WEIGHT_VECS + QUERY_Q / 4u][QUERY_Q % 4u]);
    }
    return result;
}

fn workgroup_sum(invocation: Invocation, values: PerQuery) -> PerQuery {
    spread(invocation.lane, values);
    if (invocation.lane < PARTS * WEIGHT_VECS) {
        let first = invocation.lane / WEIGHT_VECS * 8u * WEIGHT_VECS + invocation.lane % WEIGHT_VECS;
        var total = vec4<f32>(0.0);
        for (var i = 0u; i < 8u; i++) {
            total += scratch[first + i * WEIGHT_VECS];
        }
        parts[invocation.lane] = total;
    }
    // Makes the parts visible, and the scratch is free. The next use lies behind another barrier.
    workgroupBarrier();
    var result: PerQuery;
    for (var i = 0u; i < PARTS; i++) {
        result.v_Q += parts[i * WEIGHT_VECS + QUERY_Q / 4u][QUERY_Q % 4u];
    }
    return result;
}
