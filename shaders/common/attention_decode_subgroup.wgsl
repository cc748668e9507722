// Entry point for `sum_subgroup.wgsl`. Builtins are arguments of their own, not members of a struct: HLSL has no semantic
// for those of subgroups, and naga computes them there only if one of them is a direct argument.

@compute @workgroup_size(WORKGROUP)
fn attention_decode(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) num_subgroups: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
) {
    decode(workgroup, Invocation(lane, subgroup, num_subgroups, subgroup_lane));
}
