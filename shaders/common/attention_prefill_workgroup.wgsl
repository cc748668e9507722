// Entry point for `sum_workgroup.wgsl`.

@compute @workgroup_size(WORKGROUP)
fn attention_prefill(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    prefill(workgroup, Invocation(lane));
}
