// Gathers blocks: into the extents of a contiguous cache, or only reads them.
//
// Work item: one block of one sequence; one workgroup of 64 each.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> arena: array<vec4<u32>>;
// Block ids, `[sequences][table_entries]`.
@group(0) @binding(2) var<storage, read> tables: array<u32>;
// (sequence, index of the block in it).
@group(0) @binding(3) var<storage, read> items: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read_write> extents: array<vec4<u32>>;

// Units of one head's keys or values in a block; a block has twice as many such runs as kv heads.
const RUN = ROW << SHIFT;
const RUNS = 2u * KV_HEADS;

@compute @workgroup_size(64)
fn gather(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) size: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = workgroup.y * size.x + workgroup.x;
    if (index >= params.num_items) {
        return;
    }
    let item = items[index];
    let source = tables[item.x * params.table_entries + item.y] * params.block_stride + params.layer_start;
    let target_start = (item.x * params.block_stride + params.layer_start) * params.table_entries + item.y * RUN;
    for (var i = lane; i < RUNS * RUN; i += 64u) {
        extents[target_start + (i / RUN) * RUN * params.table_entries + i % RUN] = arena[source + i];
    }
}

// Reads what the block table names, 1,024 units a workgroup whatever the block size. Items are (sequence, first unit of
// the sequence's blocks in order); `num_items` is the units of a sequence.
@compute @workgroup_size(64)
fn gather_read(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) size: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = workgroup.y * size.x + workgroup.x;
    if (index >= arrayLength(&items)) {
        return;
    }
    let item = items[index];
    let table = item.x * params.table_entries;
    var sum = vec4<u32>(0u);
    let end = min(item.y + 1024u, params.num_items);
    for (var unit = item.y + lane; unit < end; unit += 64u) {
        let block = tables[table + unit / (RUNS * RUN)];
        sum ^= arena[block * params.block_stride + params.layer_start + unit % (RUNS * RUN)];
    }
    // Never so with the content that the bench uploads; no compiler knows that.
    if (all(sum == vec4<u32>(0x2468aceu))) {
        extents[0] = sum;
    }
}
