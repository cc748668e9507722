// The only loads of keys, values and table entries in the attention kernels: tests count them here.

fn load_k_chunk(address: u32) -> vec4<u32> {
    return arena[address];
}

fn load_v_chunk(address: u32) -> vec4<u32> {
    return arena[address];
}

fn load_table_entry(index: u32) -> u32 {
    return block_tables[index];
}
