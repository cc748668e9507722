//! From shapes, options and capabilities to the numbers that stay fixed for the life of an attention object.

use crate::config::CacheConfig;
use crate::error::{ConfigError, DeviceError};
use crate::gpu::capabilities::Capabilities;
use crate::gpu::options::AttentionOptions;
use crate::gpu::params::{HeadParams, LayerParams};
use crate::gpu::shader::{
    COMPACT_QUERIES, HEAD_PARAMS, Kernel, MAX_NUMBERED_HEADS, MAX_QUERIES, PREFILL_QUERIES, RowRule, TILE,
    VariantKey,
};
use crate::layout::{ArenaLayout, BlockLayout, UNIT_BYTES};
use crate::logits::finite;
use crate::model::{LayerGroup, ModelShape};
use crate::schedule::SplitConfig;
use std::f64::consts::LOG2_E;

/// Scratch for partial results where nothing else is asked for, in bytes.
const DEFAULT_SCRATCH_BYTES: u64 = 32 << 20;

/// How queries are cut into tiles, one per workgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueryTiles {
    /// Tiles of a kv head's query heads, of a row that is computed alone.
    pub(super) head_tiles: u32,
    /// Heads of such a tile, as even as possible: 71 heads are 9 tiles of 8. The last one may have fewer.
    decode: u32,
    /// (row, head) pairs of a prefill tile.
    prefill: u32,
}

impl QueryTiles {
    pub(super) fn of(group: &LayerGroup, compact: bool) -> Self {
        let (most, prefill) = match compact {
            true => (COMPACT_QUERIES, COMPACT_QUERIES),
            false => (MAX_QUERIES, PREFILL_QUERIES),
        };
        let heads = group.heads_per_kv_head();
        let decode = heads.div_ceil(heads.div_ceil(most));
        Self { head_tiles: heads.div_ceil(decode), decode, prefill }
    }

    /// Queries of a kernel's workgroup, where it has any.
    fn of_kernel(&self, kernel: Kernel) -> u32 {
        match kernel {
            Kernel::AttentionPrefill => self.prefill,
            _ => self.decode,
        }
    }
}

/// Checks that `cache` was made for `shape`, and that the kernels serve it.
pub(super) fn check_shape(shape: &ModelShape, cache: &CacheConfig) -> Result<(), DeviceError> {
    let (groups, layouts) = (shape.groups(), cache.groups());
    let mismatch = |field, shape, cache| Err(DeviceError::ShapeMismatch { field, shape, cache });
    if groups.len() != layouts.len() {
        return mismatch("groups of layers", groups.len() as u32, layouts.len() as u32);
    }
    for (group, layout) in groups.zip(layouts) {
        let [kind, tokens, first] = group.reach().words();
        let [cache_kind, cache_tokens, cache_first] = layout.reach().words();
        for (field, shape, cache) in [
            ("num_layers", group.num_layers(), layout.num_layers()),
            ("num_kv_heads", group.num_kv_heads(), layout.layout().num_kv_heads()),
            ("head_dim", group.head_dim(), layout.layout().k_head_dim()),
            ("kind of reach", kind, cache_kind),
            ("tokens of the reach", tokens, cache_tokens),
            ("first tokens of the reach", first, cache_first),
        ] {
            if shape != cache {
                return mismatch(field, shape, cache);
            }
        }
        let num_query_heads = group.num_query_heads();
        if RowRule::of(group).has_head_numbers() && num_query_heads > MAX_NUMBERED_HEADS {
            return Err(ConfigError::NumberedHeads { num_query_heads, max: MAX_NUMBERED_HEADS }.into());
        }
    }
    Ok(shape.check()?)
}

/// One group of layers, as the kernels serve it.
#[derive(Clone, Copy, Debug)]
pub(super) struct ServedGroup<'a> {
    pub(super) group: &'a LayerGroup,
    pub(super) block: &'a BlockLayout,
    pub(super) tiles: QueryTiles,
}

impl ServedGroup<'_> {
    /// Bytes of one partial result: per query head the weighted sums, then a unit with maximum and sum.
    pub(super) fn partial_bytes(&self) -> u64 {
        u64::from(self.group.num_query_heads()) * u64::from(self.block.v_sum_units() + 1) * UNIT_BYTES
    }
}

/// All groups of a model.
pub(super) fn served_groups<'a>(
    shape: &'a ModelShape,
    cache: &'a CacheConfig,
    tiles: &'a [QueryTiles],
) -> impl Iterator<Item = ServedGroup<'a>> {
    let groups = shape.groups().zip(cache.groups()).zip(tiles);
    groups.map(|((group, layout), tiles)| ServedGroup { group, block: layout.layout(), tiles: *tiles })
}

pub(super) fn split_config(
    served: ServedGroup<'_>,
    cache: &CacheConfig,
    options: &AttentionOptions,
    capabilities: &Capabilities,
) -> SplitConfig {
    let ServedGroup { group, block, tiles } = served;
    let workgroups_per_item = group.num_kv_heads() * tiles.head_tiles;
    let target_workgroups = options.target_workgroups.unwrap_or(capabilities.scale.target_workgroups).max(1);
    let span_quantum = TILE.max(block.block_size());
    let longest = u32::MAX / span_quantum * span_quantum;
    let span_tokens = options.batch_invariant.or(options.fixed_span_tokens);
    let fixed_span_tokens = span_tokens.map(|tokens| tokens.clamp(1, longest).next_multiple_of(span_quantum));
    let batch_invariant = options.batch_invariant.is_some();
    let spans_of_row = u64::from(cache.max_sequence_tokens().div_ceil(fixed_span_tokens.unwrap_or(u32::MAX)));
    // What a step can need: with fixed spans, every row's; else as many as fill the device, and one more per row or tile.
    let wanted_partials = match fixed_span_tokens {
        Some(_) if batch_invariant => {
            u64::from(cache.num_blocks()) * u64::from(block.block_size()) * spans_of_row
        }
        Some(_) => u64::from(cache.max_sequences()) * spans_of_row,
        None => {
            let decode = 2 * u64::from(target_workgroups.div_ceil(workgroups_per_item));
            let prefill = 2 * u64::from(target_workgroups.div_ceil(group.num_kv_heads()));
            let rows_of_tile = 1 + tiles.prefill.div_ceil(group.heads_per_kv_head());
            decode + u64::from(cache.max_sequences()) + prefill * u64::from(rows_of_tile)
        }
    };
    let default_bytes = match fixed_span_tokens {
        // In groups, as many as there is room for; one row at least.
        Some(_) if batch_invariant => DEFAULT_SCRATCH_BYTES.max(spans_of_row * served.partial_bytes()),
        Some(_) => u64::MAX,
        None => DEFAULT_SCRATCH_BYTES,
    };
    let scratch_bytes = options.scratch_bytes.unwrap_or(default_bytes).min(capabilities.max_binding_bytes);
    let max_partials = (scratch_bytes / served.partial_bytes()).min(wanted_partials).max(1);
    let flop_per_pair =
        2 * u64::from(group.num_query_heads()) * u64::from(block.k_head_dim() + block.v_head_dim());
    let dispatch_flop = capabilities.scale.dispatch_flop;
    SplitConfig {
        workgroups_per_item,
        workgroups_per_tile: group.num_kv_heads(),
        heads_per_kv_head: group.heads_per_kv_head(),
        prefill_queries: tiles.prefill,
        span_quantum,
        target_workgroups,
        max_partials: u32::try_from(max_partials).unwrap_or(u32::MAX),
        fixed_span_tokens,
        batch_invariant,
        dispatch_work_budget: options.dispatch_work_budget.unwrap_or(dispatch_flop / flop_per_pair),
        reach: group.reach(),
    }
}

/// Bytes of a layer's parameters, in any group.
pub(super) fn layer_bytes(shape: &ModelShape) -> u64 {
    let has_numbers = shape.groups().any(|group| RowRule::of(group).has_head_numbers());
    // One unit is always there: WGSL has no empty arrays.
    let units = if has_numbers { HEAD_PARAMS } else { 1 };
    (size_of::<LayerParams>() + units as usize * size_of::<HeadParams>()) as u64
}

/// The parameters of each layer.
pub(super) fn layer_params(
    shape: &ModelShape,
    cache: &CacheConfig,
    arenas: &ArenaLayout,
    tiles: &[QueryTiles],
) -> Vec<Vec<u8>> {
    let (groups, entries): (Vec<_>, _) =
        (served_groups(shape, cache, tiles).collect(), cache.stack_entries());
    let layer_bytes = layer_bytes(shape) as usize;
    let of_layer = |layer| {
        let place = arenas.place_of(layer);
        let ServedGroup { group, block, tiles } = groups[place.group as usize];
        let rule = group.logits();
        let scale = rule.scale(group.head_dim());
        let scale_log2 = match rule.soft_cap() {
            Some(cap) => 2.0 * scale / f64::from(cap) * LOG2_E,
            None => scale * LOG2_E,
        };
        let [_, reach_tokens, first_tokens] = group.reach().words();
        let (arena, _) = arenas.arena_of(layer);
        // An arena has less than 2^31 bytes, so each of these fits.
        let params = LayerParams {
            block_stride: arenas.block_stride_units(arena) as u32,
            layer_start: arenas.layer_start_units(layer) as u32,
            block_shift: block.block_size().trailing_zeros(),
            table_entries: entries[place.stack as usize],
            num_kv_heads: group.num_kv_heads(),
            num_query_heads: group.num_query_heads(),
            heads_per_kv_head: group.heads_per_kv_head(),
            head_tiles: tiles.head_tiles,
            scale_log2: finite(scale_log2),
            soft_cap_log2: rule.soft_cap().map_or(0.0, log2),
            reach_tokens,
            first_tokens,
        };
        let mut bytes = bytemuck::bytes_of(&params).to_vec();
        bytes.extend_from_slice(bytemuck::cast_slice(&head_params(group, group.index_of(layer))));
        bytes.resize(layer_bytes, 0);
        bytes
    };
    (0..shape.num_layers()).map(of_layer).collect()
}

/// The numbers of a layer's query heads, where they have any of their own.
fn head_params(group: &LayerGroup, layer: u32) -> Vec<HeadParams> {
    let rule = group.logits();
    if !RowRule::of(group).has_head_numbers() {
        return Vec::new();
    }
    let heads = group.num_query_heads();
    let numbers: Vec<[f32; 2]> = (0..heads as usize)
        .map(|head| {
            let slope = rule.slopes().nth(head).unwrap_or(0.0);
            let sink = rule.sinks(layer, heads).nth(head).unwrap_or(0.0);
            [log2(slope), log2(sink)]
        })
        .collect();
    let pairs = numbers.chunks(2).map(|pair| {
        let [first, second] = [pair[0], pair.get(1).copied().unwrap_or_default()];
        [first[0], first[1], second[0], second[1]]
    });
    pairs.collect()
}

/// A logit in base 2.
fn log2(logit: f32) -> f32 {
    finite(f64::from(logit) * LOG2_E)
}

/// The variant of `kernel` for a group on this device.
pub(super) fn variant(
    kernel: Kernel,
    served: ServedGroup<'_>,
    capabilities: &Capabilities,
    options: &AttentionOptions,
) -> VariantKey {
    let ServedGroup { group, block, tiles } = served;
    let subgroups = capabilities.subgroups && !options.disallow_subgroups;
    VariantKey::new(
        kernel,
        (block.k_type(), block.v_type()),
        (block.k_head_dim(), block.v_head_dim()),
        options.activations,
        tiles.of_kernel(kernel),
        subgroups,
    )
    .with_rule(RowRule::of(group))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_tiled_as_evenly_as_possible() {
        for (heads, compact, tiles, queries) in [
            (1, false, 1, 1),
            (3, false, 1, 3),
            (8, false, 1, 8),
            (9, false, 2, 5),
            (16, false, 2, 8),
            (71, false, 9, 8),
            (1, true, 1, 1),
            (3, true, 2, 2),
            (8, true, 4, 2),
        ] {
            let shape = ModelShape::new(1, 2 * heads, 2, 8);
            let found = QueryTiles::of(shape.groups().next().expect("a group"), compact);
            assert_eq!((found.head_tiles, found.decode), (tiles, queries), "{heads} heads, {compact}");
        }
    }
}
