// requires:

// Tint must refuse this one: only half of the workgroup reaches the barrier, which naga does not notice.
@group(0) @binding(0) var<storage, read_write> output: array<f32>;

var<workgroup> partials: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32) {
    partials[lane] = f32(lane);
    if lane < 32u {
        workgroupBarrier();
        output[lane] = partials[lane + 32u];
    }
}
