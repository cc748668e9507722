//! Twins of the library's kernels that differ from them in one thing, made from the same text.
//!
//! A twin is checked against the original wherever it is timed, and the rewriting panics when a line that it goes by is
//! no longer there: then its rule has to be written anew.

use paged_kv::AttentionOptions;

const CORE: &str = "common/attention_core.wgsl";
const LAYOUT: &str = "common/layout.wgsl";
const APPEND: &str = "append.wgsl";

/// Where keys and values lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// In blocks, all heads' keys, then all heads' values: the library's own.
    KeysThenValues,
    /// In blocks, keys in one half of the arena and values in the other.
    TwoArrays,
    /// In blocks, each token's value row behind its key row.
    PerToken,
    /// In blocks, keys before values, but each head's keys by columns: the first 16 bytes of every key, then the next 16
    /// bytes of every key. Neighbouring invocations, which score neighbouring keys, then read neighbouring bytes.
    KeyColumns,
    /// One extent per sequence, and no block table: the kernels compute an address once per sequence and head instead
    /// of looking a block up. Keys and values do not get there by `append` but by [`CacheKernel::gather`].
    ///
    /// [`CacheKernel::gather`]: crate::kernels::CacheKernel::gather
    Contiguous,
}

impl Placement {
    /// `options` with the texts of this placement, for arenas of `arena_units` units of 16 bytes.
    #[allow(unsafe_code)]
    pub fn apply(self, options: AttentionOptions, arena_units: u64) -> AttentionOptions {
        let replaced = match self {
            Self::KeysThenValues => return options,
            Self::TwoArrays => two_arrays(arena_units),
            Self::PerToken => per_token(),
            Self::KeyColumns => key_columns(),
            Self::Contiguous => contiguous(),
        };
        // SAFETY: each placement gives every (block, slot, head) or (table, token, head) of the pool a place of its own
        // within the arena; loops are left as they are. The contiguous twin never appends.
        unsafe { options.replaced_fragments(replaced) }
    }
}

/// The fragments of [`Placement::Contiguous`].
pub fn contiguous() -> Vec<(&'static str, String)> {
    let mut core = include_str!("../../../shaders/common/attention_core.wgsl").to_owned();
    cut(&mut core, "fn stage_blocks(", "\n}\n");
    cut(&mut core, "    stage_blocks(lane,", ";\n");
    // Every look-up of a staged block start becomes the start of the extent.
    while let Some(start) = core.find("staged_blocks[") {
        let end = start + core[start..].find(']').expect("an index ends");
        core.replace_range(start..=end, "span.table");
    }
    let entry = "metadata[plan.table_rows + sequence] * layer.table_entries";
    let extent = "extent_start(metadata[plan.table_rows + sequence])";
    vec![
        (CORE, core),
        (LAYOUT, include_str!("shaders/contiguous_layout.wgsl").to_owned()),
        (
            "attention_decode.wgsl",
            swap(include_str!("../../../shaders/attention_decode.wgsl"), entry, extent),
        ),
        (
            "attention_prefill.wgsl",
            swap(include_str!("../../../shaders/attention_prefill.wgsl"), entry, extent),
        ),
    ]
}

fn two_arrays(arena_units: u64) -> Vec<(&'static str, String)> {
    let layout = include_str!("../../../shaders/common/layout.wgsl");
    let layout = swap(
        layout,
        "block * layer.block_stride + layer.layer_start",
        "(block * layer.block_stride + layer.layer_start) / 2u",
    );
    let half = format!("{}u + kv_head", arena_units / 2);
    let keys = "layer.num_kv_heads * (K_ROW << layer.block_shift) + kv_head";
    vec![(LAYOUT, swap(&layout, keys, &half))]
}

fn per_token() -> Vec<(&'static str, String)> {
    let layout = include_str!("../../../shaders/common/layout.wgsl");
    let head = "kv_head * ((K_ROW + V_ROW) << layer.block_shift)";
    let values = "layer.num_kv_heads * (K_ROW << layer.block_shift) + kv_head * (V_ROW << layer.block_shift)";
    let layout = swap(layout, values, &format!("K_ROW + {head}"));
    let layout = swap(&layout, "return kv_head * (K_ROW << layer.block_shift)", &format!("return {head}"));
    let strides = |text: &str, slot: &str| {
        let rows = |row: &str| format!("{slot} * {row}");
        let both = rows("(K_ROW + V_ROW)");
        swap(&swap(text, &rows("K_ROW"), &both), &rows("V_ROW"), &both)
    };
    vec![
        (LAYOUT, layout),
        (CORE, strides(include_str!("../../../shaders/common/attention_core.wgsl"), "slot_J")),
        (APPEND, strides(include_str!("../../../shaders/append.wgsl"), ")")),
    ]
}

/// The fragments of [`Placement::KeyColumns`].
pub fn key_columns() -> Vec<(&'static str, String)> {
    let core = include_str!("../../../shaders/common/attention_core.wgsl");
    let core = swap(core, "slot_J * K_ROW", "slot_J");
    let core = swap(&core, "row_J + chunk", "row_J + (chunk << layer.block_shift)");
    let append = include_str!("../../../shaders/append.wgsl");
    let append = swap(append, "slot_in_block(slot) * K_ROW", "slot_in_block(slot)");
    let append = swap(&append, "i % K_ROW", "((i % K_ROW) << layer.block_shift)");
    vec![(CORE, core), (APPEND, append)]
}

/// `text` with `new` wherever it has `old`.
fn swap(text: &str, old: &str, new: &str) -> String {
    assert!(text.contains(old), "the twin's rule is out of date: no `{old}` in the kernel's text");
    text.replace(old, new)
}

/// Takes out what lies from `first` to the end of the next `last`.
fn cut(text: &mut String, first: &str, last: &str) {
    let start = text.find(first);
    let start =
        start.unwrap_or_else(|| panic!("the twin's rule is out of date: no `{first}` in the kernel's text"));
    let end = text[start..].find(last).expect("what starts ends") + start + last.len();
    text.replace_range(start..end, "");
}
