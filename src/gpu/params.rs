//! Mirrors of the structs in `shaders/common/params.wgsl`. A test compares their offsets with naga's.

use bytemuck::{Pod, Zeroable};

/// Where a step's arrays start in its metadata, in words, and how many items a dispatch has.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct StepParams {
    /// Rows of the step.
    pub num_rows: u32,
    /// First word of the input tokens.
    pub token_ids: u32,
    /// First word of the positions.
    pub positions: u32,
    /// First word of the slots.
    pub slot_mapping: u32,
    /// First word of the sequences' first rows.
    pub query_starts: u32,
    /// First word of the context lengths.
    pub context_lens: u32,
    /// First word of the block-table rows.
    pub table_rows: u32,
    /// First word of the dispatch's decode items.
    pub decode_items: u32,
    /// Decode items of the dispatch.
    pub num_decode_items: u32,
    /// First word of the dispatch's prefill items.
    pub prefill_items: u32,
    /// Prefill items of the dispatch.
    pub num_prefill_items: u32,
    /// First word of the merge items.
    pub merge_items: u32,
    /// Merge items.
    pub num_merge_items: u32,
    /// First word of the block copies.
    pub block_copies: u32,
    /// Block copies.
    pub num_block_copies: u32,
    /// Always 0.
    pub padding: u32,
}

/// Where a layer lies in its arena, in units of 16 bytes, and the shape that is not compiled in.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct LayerParams {
    /// Units between blocks.
    pub block_stride: u32,
    /// First unit of the layer within a block.
    pub layer_start: u32,
    /// Binary logarithm of the block size.
    pub block_shift: u32,
    /// Entries of a block table.
    pub table_entries: u32,
    /// Key and value heads.
    pub num_kv_heads: u32,
    /// Query heads.
    pub num_query_heads: u32,
    /// Query heads per kv head.
    pub heads_per_kv_head: u32,
    /// Tiles that a kv head's query heads are cut into.
    pub head_tiles: u32,
    /// Scale of the logits times log2(e); with a soft-cap, that of twice the logits over the cap.
    pub scale_log2: f32,
    /// The soft-cap times log2(e).
    pub soft_cap_log2: f32,
    /// Keys of a window, or positions of a chunk.
    pub reach_tokens: u32,
    /// Tokens from a sequence's beginning that rows see beside their window.
    pub first_tokens: u32,
}

/// What follows [`LayerParams`]: of two query heads each, slope and learned sink, times log2(e).
pub type HeadParams = [f32; 4];

/// Distances between rows of the application's tensors, in units of four elements, and how many there are.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct TensorParams {
    /// Query rows.
    pub query_stride: u32,
    /// Key rows.
    pub key_stride: u32,
    /// Value rows.
    pub value_stride: u32,
    /// Output rows.
    pub output_stride: u32,
    /// Rows that all of them have.
    pub num_rows: u32,
    /// Always 0.
    pub padding: [u32; 3],
}

/// Words of [`StepParams`].
pub(super) const STEP_PARAMS_WORDS: u32 = 16;

const _: () = assert!(size_of::<StepParams>() == 4 * STEP_PARAMS_WORDS as usize);
const _: () = assert!(size_of::<LayerParams>() == 48);
const _: () = assert!(size_of::<TensorParams>() == 32);
