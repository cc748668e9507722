//! Twin of `append`: writes new tokens' keys and values into their slots.

use crate::ids::PADDING_SLOT;
use crate::layout::KvPart;
use crate::reference::{CpuCache, Rows};

/// Writes row `i` of `key` (`[num_kv_heads, k_head_dim]`) and of `value` (`[num_kv_heads, v_head_dim]`) into slot
/// `slot_mapping[i]` of `layer`, rounded to the stored type. The slots are those of the layer's
/// [stack](crate::ArenaLayout::place_of). A row whose slot is [`PADDING_SLOT`] writes nothing.
///
/// A range of rows is a part of [`StepPlan::slot_mapping`](crate::StepPlan::slot_mapping), with
/// [`Rows::from_row`] for the tensors.
///
/// # Panics
/// When a slot lies beyond the pool, there is no such layer, or a tensor has fewer rows than there are slots.
pub fn append(cache: &mut CpuCache, layer: u32, slot_mapping: &[u32], key: Rows<'_>, value: Rows<'_>) {
    let (block, num_blocks) = (*cache.layout().block_of(layer), cache.layout().num_blocks());
    let (k_len, v_len) = (block.k_head_dim() as usize, block.v_head_dim() as usize);
    let num_slots = u64::from(num_blocks) * u64::from(block.block_size());
    for (row, &slot) in slot_mapping.iter().enumerate() {
        if slot == PADDING_SLOT {
            continue;
        }
        assert!(u64::from(slot) < num_slots, "slot {slot} lies beyond the pool's {num_slots}");
        let (block_index, slot_in_block) = (slot / block.block_size(), slot % block.block_size());
        let keys = key.row(row, k_len * block.num_kv_heads() as usize);
        let values = value.row(row, v_len * block.num_kv_heads() as usize);
        for (kv_head, key) in (0..).zip(keys.chunks_exact(k_len)) {
            cache.write_row(layer, KvPart::K, block_index, kv_head, slot_in_block, key);
        }
        for (kv_head, value) in (0..).zip(values.chunks_exact(v_len)) {
            cache.write_row(layer, KvPart::V, block_index, kv_head, slot_in_block, value);
        }
    }
}
