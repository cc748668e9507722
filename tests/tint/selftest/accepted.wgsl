// requires: f16 subgroups

// Sums 64 halves into one float. Tint must accept it: every barrier is in uniform flow.
@group(0) @binding(0) var<storage, read> input: array<f16>;
@group(0) @binding(1) var<storage, read_write> output: array<f32>;

var<workgroup> partials: array<f32, 64>;

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_size) subgroup_size: u32,
) {
    let sum = subgroupAdd(f32(input[lane]));
    if subgroup_lane == 0u {
        partials[lane / subgroup_size] = sum;
    }
    workgroupBarrier();
    if lane == 0u {
        var total = 0.0;
        for (var i = 0u; i < 64u / subgroup_size; i++) {
            total += partials[i];
        }
        output[0] = total;
    }
}
