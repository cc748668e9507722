//! How much of four well-known models' context fits.

use paged_kv::{CacheConfig, ConfigError, DEFAULT_BLOCK_SIZE, KvType, ModelShape};
use serde::Serialize;

/// Shapes from the models' published `config.json` (`num_hidden_layers`, `num_attention_heads`, `num_key_value_heads`,
/// `head_dim`): HuggingFaceTB/SmolLM2-135M, meta-llama/Llama-3.2-3B, meta-llama/Llama-3.1-8B, Qwen/Qwen2.5-14B.
const MODELS: [(&str, ModelShape); 4] = [
    ("SmolLM2-135M", shape(30, 9, 3, 64)),
    ("Llama-3.2-3B", shape(28, 24, 8, 128)),
    ("Llama-3.1-8B", shape(32, 32, 8, 128)),
    ("Qwen2.5-14B", shape(48, 40, 8, 128)),
];

const fn shape(num_layers: u32, num_query_heads: u32, num_kv_heads: u32, head_dim: u32) -> ModelShape {
    ModelShape::new(num_layers, num_query_heads, num_kv_heads, head_dim)
}

/// A model in a pool of a given size, keys and values in f16.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Fit {
    pub(crate) model: &'static str,
    pub(crate) layers: u32,
    pub(crate) query_heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) bytes_per_token: u64,
    /// What the pool holds, besides block tables; null where it does not hold one block.
    pub(crate) blocks: Option<u32>,
    pub(crate) tokens: Option<u64>,
    /// Storage buffers that hold it; null where the limits do not allow it.
    pub(crate) arenas: Option<u32>,
    /// Tokens of the largest pool that the limits allow, if there were memory for it.
    pub(crate) most_tokens: u64,
    pub(crate) most_bytes: u64,
}

/// The four models in a pool of `bytes`, where a storage binding may have `max_binding` bytes.
pub(crate) fn fits(bytes: u64, max_binding: u64) -> Vec<Fit> {
    MODELS.iter().map(|(name, shape)| fit(name, shape, bytes, max_binding)).collect()
}

fn fit(model: &'static str, shape: &ModelShape, bytes: u64, max_binding: u64) -> Fit {
    let one_block = CacheConfig::for_blocks(1, shape, KvType::F16).expect("a supported shape");
    let most_blocks = most_blocks(shape, max_binding);
    let pool = CacheConfig::for_bytes(bytes, shape, KvType::F16).ok();
    let pool = pool.as_ref();
    Fit {
        model,
        layers: shape.num_layers(),
        query_heads: shape.num_query_heads(),
        kv_heads: shape.num_kv_heads(),
        head_dim: shape.head_dim(),
        bytes_per_token: one_block.bytes_per_token(),
        blocks: pool.map(|pool| pool.num_blocks()),
        tokens: pool.map(|pool| u64::from(pool.num_blocks()) * u64::from(pool.block_size())),
        arenas: pool.and_then(|pool| Some(pool.arenas(max_binding).ok()?.num_arenas())),
        most_tokens: most_blocks * u64::from(DEFAULT_BLOCK_SIZE),
        most_bytes: most_blocks * one_block.bytes_per_block(),
    }
}

/// Blocks of the largest pool whose layers each fit a binding.
fn most_blocks(shape: &ModelShape, max_binding: u64) -> u64 {
    // More than any device binds.
    let huge = CacheConfig::for_blocks(1 << 27, shape, KvType::F16).expect("a supported shape");
    match huge.arenas(max_binding) {
        Err(ConfigError::LayerExceedsArena { max_blocks, .. }) => max_blocks,
        _ => 1 << 27,
    }
}
