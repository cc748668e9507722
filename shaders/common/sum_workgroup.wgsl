// Reductions over the workgroup through workgroup memory, for devices without subgroup operations: all values are
// written, eight invocations per query reduce eight each, and one per query reduces those.

struct Invocation {
    @builtin(local_invocation_index) lane: u32,
}

const PARTS = WORKGROUP / 8u;

var<workgroup> spread: array<array<f32, QUERIES>, WORKGROUP>;
var<workgroup> parts: array<array<f32, QUERIES>, PARTS>;
var<workgroup> reduced: array<f32, QUERIES>;

fn workgroup_max(invocation: Invocation, values: PerQuery) -> PerQuery {
    let query_of_lane = invocation.lane % 8u;
    let part = invocation.lane / 8u;
    spread[invocation.lane][QUERY_Q] = values.v_Q;
    // Makes all values visible.
    workgroupBarrier();
    if (query_of_lane < QUERIES) {
        var most = spread[part * 8u][query_of_lane];
        for (var i = 1u; i < 8u; i++) {
            most = max(most, spread[part * 8u + i][query_of_lane]);
        }
        parts[part][query_of_lane] = most;
    }
    // Makes the parts visible.
    workgroupBarrier();
    if (invocation.lane < QUERIES) {
        var most = parts[0][invocation.lane];
        for (var i = 1u; i < PARTS; i++) {
            most = max(most, parts[i][invocation.lane]);
        }
        reduced[invocation.lane] = most;
    }
    // Makes the results visible. The next use lies behind another barrier of the caller.
    workgroupBarrier();
    var result: PerQuery;
    result.v_Q = reduced[QUERY_Q];
    return result;
}

fn workgroup_sum(invocation: Invocation, values: PerQuery) -> PerQuery {
    let query_of_lane = invocation.lane % 8u;
    let part = invocation.lane / 8u;
    spread[invocation.lane][QUERY_Q] = values.v_Q;
    // Makes all values visible.
    workgroupBarrier();
    if (query_of_lane < QUERIES) {
        var total = 0.0;
        for (var i = 0u; i < 8u; i++) {
            total += spread[part * 8u + i][query_of_lane];
        }
        parts[part][query_of_lane] = total;
    }
    // Makes the parts visible.
    workgroupBarrier();
    if (invocation.lane < QUERIES) {
        var total = 0.0;
        for (var i = 0u; i < PARTS; i++) {
            total += parts[i][invocation.lane];
        }
        reduced[invocation.lane] = total;
    }
    // Makes the results visible. The next use lies behind another barrier of the caller.
    workgroupBarrier();
    var result: PerQuery;
    result.v_Q = reduced[QUERY_Q];
    return result;
}
