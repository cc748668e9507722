// Reductions over the workgroup by subgroup operations, for subgroups of any size: each subgroup reduces its
// own values and, where there are several, every invocation reduces the subgroups' results. The barriers stand outside
// the conditions, because `num_subgroups` does not pass for uniform; a workgroup of one subgroup pays nothing for them.

struct Invocation {
    lane: u32,
    subgroup: u32,
    num_subgroups: u32,
    subgroup_lane: u32,
}

// Leaves every subgroup's values in `scratch`, `[subgroup][query]`.
fn share(invocation: Invocation, values: PerQuery) {
    if (invocation.num_subgroups > 1u && invocation.subgroup_lane == 0u) {
        scratch[invocation.subgroup * WEIGHT_VECS + QUERY_Q / 4u][QUERY_Q % 4u] = values.v_Q;
    }
    // Makes every subgroup's values visible.
    workgroupBarrier();
}

fn workgroup_max(invocation: Invocation, values: PerQuery) -> PerQuery {
    var result: PerQuery;
    result.v_Q = subgroupMax(values.v_Q);
    share(invocation, result);
    if (invocation.num_subgroups > 1u) {
        for (var i = 0u; i < invocation.num_subgroups; i++) {
            result.v_Q = max(result.v_Q, scratch[i * WEIGHT_VECS + QUERY_Q / 4u][QUERY_Q % 4u]);
        }
    }
    // The scratch is free.
    workgroupBarrier();
    return result;
}

fn workgroup_sum(invocation: Invocation, values: PerQuery) -> PerQuery {
    var result: PerQuery;
    result.v_Q = subgroupAdd(values.v_Q);
    share(invocation, result);
    if (invocation.num_subgroups > 1u) {
        result.v_Q = 0.0;
        for (var i = 0u; i < invocation.num_subgroups; i++) {
            result.v_Q += scratch[i * WEIGHT_VECS + QUERY_Q / 4u][QUERY_Q % 4u];
        }
    }
    // The scratch is free.
    workgroupBarrier();
    return result;
}
