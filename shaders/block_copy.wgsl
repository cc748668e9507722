// Copies whole blocks within an arena, all of its layers: copy-on-write.
//
// Work item: (source, destination) pair; `ceil(block_stride / COPY_UNITS)` workgroups each, whose 64 invocations copy
// 16 bytes at a time. No block is both source and destination, and none is destination twice, so the order is free.
//
// Twin: `reference::block_copy`.

// Blocks of the arena, in units of 16 bytes.
@group(1) @binding(0) var<storage, read_write> arena: array<vec4<u32>>;

// Units that one workgroup copies.
const COPY_UNITS = 1024u;

@compute @workgroup_size(WORKGROUP)
fn block_copy(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let per_pair = (layer.block_stride + COPY_UNITS - 1u) / COPY_UNITS;
    let index = workgroup_index(workgroup);
    if (index >= plan.num_block_copies * per_pair) {
        return;
    }
    let pair = plan.block_copies + (index / per_pair) * 2u;
    let source = metadata[pair] * layer.block_stride;
    let destination = metadata[pair + 1u] * layer.block_stride;
    let first = (index % per_pair) * COPY_UNITS;
    let end = min(first + COPY_UNITS, layer.block_stride);
    for (var i = first + lane; i < end; i += WORKGROUP) {
        arena[destination + i] = arena[source + i];
    }
}
