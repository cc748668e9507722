// Addresses within an arena, in units of 16 bytes: the mirror of `ArenaLayout::row_word`, and the only place in the
// shaders that knows the layout. `K_ROW` and `V_ROW` are the sizes of one head's row.

// First unit of the layer's part of a block.
fn block_start(block: u32) -> u32 {
    return block * layer.block_stride + layer.layer_start;
}

// First unit of one head's keys, counted from `block_start`.
fn k_head_start(kv_head: u32) -> u32 {
    return kv_head * (K_ROW << layer.block_shift);
}

// First unit of one head's values, counted from `block_start`: values follow all heads' keys.
fn v_head_start(kv_head: u32) -> u32 {
    return layer.num_kv_heads * (K_ROW << layer.block_shift) + kv_head * (V_ROW << layer.block_shift);
}

// A token's slot within its block.
fn slot_in_block(token: u32) -> u32 {
    return token & ((1u << layer.block_shift) - 1u);
}
