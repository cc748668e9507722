// `layout.wgsl` of a cache without block tables: one extent per table row, as long as a table may grow. Within a layer
// of an extent, one run of keys per head, then one run of values per head.

fn extent_tokens() -> u32 {
    return layer.table_entries << layer.block_shift;
}

// First unit of the layer's part of an extent.
fn extent_start(table_row: u32) -> u32 {
    return (table_row * layer.block_stride + layer.layer_start) * layer.table_entries;
}

fn block_start(block: u32) -> u32 {
    return extent_start(block / layer.table_entries);
}

fn k_head_start(kv_head: u32) -> u32 {
    return kv_head * K_ROW * extent_tokens();
}

fn v_head_start(kv_head: u32) -> u32 {
    return (layer.num_kv_heads * K_ROW + kv_head * V_ROW) * extent_tokens();
}

fn slot_in_block(token: u32) -> u32 {
    return token;
}
