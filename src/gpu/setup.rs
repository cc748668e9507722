//! From shapes, options and capabilities to the numbers that stay fixed for the life of an attention object.

use crate::config::CacheConfig;
use crate::error::{ConfigError, DeviceError};
use crate::gpu::capabilities::Capabilities;
use crate::gpu::options::AttentionOptions;
use crate::gpu::params::LayerParams;
use crate::gpu::shader::{COMPACT_QUERIES, Kernel, MAX_QUERIES, PREFILL_QUERIES, TILE, VariantKey};
use crate::layout::{ArenaLayout, UNIT_BYTES};
use crate::model::ModelShape;
use crate::schedule::SplitConfig;

/// Scratch for partial results where nothing else is asked for, in bytes.
const DEFAULT_SCRATCH_BYTES: u64 = 32 << 20;

/// How queries are cut into tiles, one per workgroup.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueryTiles {
    /// Tiles of a kv head's query heads, of a row that is computed alone.
    pub(super) head_tiles: u32,
    /// Heads of such a tile, as even as possible: 71 heads are 9 tiles of 8. The last one may have fewer.
    decode: u32,
    /// (row, head) pairs of a prefill tile.
    prefill: u32,
}

impl QueryTiles {
    pub(super) fn of(shape: &ModelShape, compact: bool) -> Self {
        let (most, prefill) = match compact {
            true => (COMPACT_QUERIES, COMPACT_QUERIES),
            false => (MAX_QUERIES, PREFILL_QUERIES),
        };
        let heads = shape.heads_per_kv_head();
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

/// Checks that `cache` was made for `shape`.
pub(super) fn check_shape(shape: &ModelShape, cache: &CacheConfig) -> Result<(), DeviceError> {
    let layout = cache.layout();
    for (field, shape, cache) in [
        ("num_layers", shape.num_layers(), layout.num_layers()),
        ("num_kv_heads", shape.num_kv_heads(), layout.num_kv_heads()),
        ("head_dim", shape.head_dim(), layout.k_head_dim()),
    ] {
        if shape != cache {
            return Err(DeviceError::ShapeMismatch { field, shape, cache });
        }
    }
    let (num_query_heads, num_kv_heads) = (shape.num_query_heads(), shape.num_kv_heads());
    if num_query_heads == 0 {
        return Err(ConfigError::Zero { field: "num_query_heads" }.into());
    }
    if num_query_heads % num_kv_heads != 0 {
        return Err(ConfigError::HeadRatio { num_query_heads, num_kv_heads }.into());
    }
    Ok(())
}

/// Bytes of one partial result: per query head the weighted sums, then a unit with maximum and sum.
pub(super) fn partial_bytes(shape: &ModelShape, cache: &CacheConfig) -> u64 {
    u64::from(shape.num_query_heads()) * u64::from(cache.layout().v_sum_units() + 1) * UNIT_BYTES
}

pub(super) fn split_config(
    shape: &ModelShape,
    cache: &CacheConfig,
    options: &AttentionOptions,
    capabilities: &Capabilities,
    tiles: QueryTiles,
) -> SplitConfig {
    let workgroups_per_item = shape.num_kv_heads() * tiles.head_tiles;
    let target_workgroups = options.target_workgroups.unwrap_or(capabilities.scale.target_workgroups).max(1);
    let span_quantum = TILE.max(cache.block_size());
    let longest = u32::MAX / span_quantum * span_quantum;
    let span_tokens = options.batch_invariant.or(options.fixed_span_tokens);
    let fixed_span_tokens = span_tokens.map(|tokens| tokens.clamp(1, longest).next_multiple_of(span_quantum));
    let batch_invariant = options.batch_invariant.is_some();
    let spans_of_row = u64::from(cache.max_sequence_tokens().div_ceil(fixed_span_tokens.unwrap_or(u32::MAX)));
    // What a step can need: with fixed spans, every row's; else as many as fill the device, and one more per row or tile.
    let wanted_partials = match fixed_span_tokens {
        Some(_) if batch_invariant => {
            u64::from(cache.num_blocks()) * u64::from(cache.block_size()) * spans_of_row
        }
        Some(_) => u64::from(cache.max_sequences()) * spans_of_row,
        None => {
            let decode = 2 * u64::from(target_workgroups.div_ceil(workgroups_per_item));
            let prefill = 2 * u64::from(target_workgroups.div_ceil(shape.num_kv_heads()));
            let rows_of_tile = 1 + tiles.prefill.div_ceil(shape.heads_per_kv_head());
            decode + u64::from(cache.max_sequences()) + prefill * u64::from(rows_of_tile)
        }
    };
    let default_bytes = match fixed_span_tokens {
        // In groups, as many as there is room for; one row at least.
        Some(_) if batch_invariant => DEFAULT_SCRATCH_BYTES.max(spans_of_row * partial_bytes(shape, cache)),
        Some(_) => u64::MAX,
        None => DEFAULT_SCRATCH_BYTES,
    };
    let scratch_bytes = options.scratch_bytes.unwrap_or(default_bytes).min(capabilities.max_binding_bytes);
    let max_partials = (scratch_bytes / partial_bytes(shape, cache)).min(wanted_partials).max(1);
    let flop_per_pair = 2
        * u64::from(shape.num_query_heads())
        * u64::from(cache.layout().k_head_dim() + cache.layout().v_head_dim());
    let dispatch_flop = capabilities.scale.dispatch_flop;
    SplitConfig {
        workgroups_per_item,
        workgroups_per_tile: shape.num_kv_heads(),
        heads_per_kv_head: shape.heads_per_kv_head(),
        prefill_queries: tiles.prefill,
        span_quantum,
        target_workgroups,
        max_partials: u32::try_from(max_partials).unwrap_or(u32::MAX),
        fixed_span_tokens,
        batch_invariant,
        dispatch_work_budget: options.dispatch_work_budget.unwrap_or(dispatch_flop / flop_per_pair),
    }
}

pub(super) fn layer_params(
    shape: &ModelShape,
    cache: &CacheConfig,
    arenas: &ArenaLayout,
    options: &AttentionOptions,
    tiles: QueryTiles,
) -> Vec<LayerParams> {
    let scale = options.scale.unwrap_or_else(|| 1.0 / (shape.head_dim() as f32).sqrt());
    (0..shape.num_layers())
        .map(|layer| {
            let (arena, _) = arenas.arena_of(layer);
            // An arena has less than 2^31 bytes, so each of these fits.
            LayerParams {
                block_stride: arenas.block_stride_units(arena) as u32,
                layer_start: arenas.layer_start_units(layer) as u32,
                block_shift: cache.block_size().trailing_zeros(),
                table_entries: cache.table_entries(),
                num_kv_heads: shape.num_kv_heads(),
                num_query_heads: shape.num_query_heads(),
                heads_per_kv_head: shape.heads_per_kv_head(),
                head_tiles: tiles.head_tiles,
                scale_log2: scale * std::f32::consts::LOG2_E,
                padding: [0; 3],
            }
        })
        .collect()
}

/// The variant of `kernel` for this cache on this device.
pub(super) fn variant(
    kernel: Kernel,
    cache: &CacheConfig,
    tiles: QueryTiles,
    capabilities: &Capabilities,
    options: &AttentionOptions,
) -> VariantKey {
    let layout = cache.layout();
    let subgroups = capabilities.subgroups && !options.disallow_subgroups;
    VariantKey::new(
        kernel,
        (layout.k_type(), layout.v_type()),
        (layout.k_head_dim(), layout.v_head_dim()),
        options.activations,
        tiles.of_kernel(kernel),
        subgroups,
    )
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
            let found = QueryTiles::of(&shape, compact);
            assert_eq!((found.head_tiles, found.decode), (tiles, queries), "{heads} heads, {compact}");
        }
    }
}
