// Reductions over the workgroup by subgroup operations, for subgroups of any size from 4 up: each subgroup reduces its
// own values, then every invocation reduces the subgroups' results.

struct Invocation {
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) num_subgroups: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
}

// One value per query of each subgroup.
var<workgroup> reduced: array<array<f32, QUERIES>, WORKGROUP / 4u>;

fn share(invocation: Invocation, values: PerQuery) {
    if (invocation.subgroup_lane == 0u) {
        reduced[invocation.subgroup][QUERY_Q] = values.v_Q;
    }
    // Makes every subgroup's values visible. The next use lies behind another barrier of the caller.
    workgroupBarrier();
}

fn workgroup_max(invocation: Invocation, values: PerQuery) -> PerQuery {
    var result: PerQuery;
    result.v_Q = subgroupMax(values.v_Q);
    share(invocation, result);
    for (var i = 0u; i < invocation.num_subgroups; i++) {
        result.v_Q = max(result.v_Q, reduced[i][QUERY_Q]);
    }
    return result;
}

fn workgroup_sum(invocation: Invocation, values: PerQuery) -> PerQuery {
    var result: PerQuery;
    result.v_Q = subgroupAdd(values.v_Q);
    share(invocation, result);
    result.v_Q = 0.0;
    for (var i = 0u; i < invocation.num_subgroups; i++) {
        result.v_Q += reduced[i][QUERY_Q];
    }
    return result;
}
