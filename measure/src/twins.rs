//! Twins of the library's kernels that differ from them in one thing, made from the same text.
//!
//! A twin is checked against the original wherever it is timed, and the rewriting panics when a line that it goes by is
//! no longer there: then its rule has to be written anew.

use std::fmt;

use paged_kv::AttentionOptions;

use crate::Failure;

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
    /// `options` with the texts of this placement, for a pool of `num_blocks` blocks.
    #[allow(unsafe_code)]
    pub fn apply(self, options: AttentionOptions, num_blocks: u32) -> AttentionOptions {
        let replaced = match self {
            Self::KeysThenValues => return options,
            Self::TwoArrays => two_arrays(num_blocks),
            Self::PerToken => per_token(),
            Self::KeyColumns => key_columns(),
            Self::Contiguous => contiguous(),
        };
        // SAFETY: each placement gives every (block, slot, head) or (table, token, head) of the pool a place of its own
        // within the arena; loops are left as they are. The contiguous twin never appends.
        unsafe { options.replaced_fragments(replaced) }
    }
}

/// Kernels that do not give the library's results: figures of them would be worse than none.
#[derive(Clone, Debug, PartialEq)]
pub struct WrongResults {
    /// Whose they are.
    pub what: String,
    /// The largest difference.
    pub error: f32,
    /// The largest element of the library's results.
    pub largest: f32,
}

impl fmt::Display for WrongResults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, error, largest } = self;
        write!(
            f,
            "{what} differs from the library's kernels by {error:e}, and their largest result is {largest:e}"
        )
    }
}

impl std::error::Error for WrongResults {}

/// Checks that `actual` are the library's results, to a thousandth of their largest element: the order of sums differs.
///
/// # Errors
/// [`WrongResults`] when they are not, or when the library's own mean nothing.
pub fn same_results(what: &str, expected: &[f32], actual: &[f32]) -> Result<(), Failure> {
    let largest_of = |numbers: &mut dyn Iterator<Item = f32>| {
        numbers.fold(0.0f32, |most, x| if x.is_nan() { f32::INFINITY } else { most.max(x.abs()) })
    };
    let largest = largest_of(&mut expected.iter().copied());
    let error = largest_of(&mut expected.iter().zip(actual).map(|(a, b)| a - b));
    let is_same = expected.len() == actual.len() && largest > 0.0 && error <= 1e-3 * largest;
    if is_same && largest.is_finite() {
        return Ok(());
    }
    Err(WrongResults { what: what.to_owned(), error, largest }.into())
}

/// The fragments of [`Placement::Contiguous`]: the library's text without block tables and their staging.
pub fn contiguous() -> Vec<(&'static str, String)> {
    let mut core = include_str!("../../shaders/common/attention_core.wgsl").to_owned();
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
        ("attention_decode.wgsl", swap(include_str!("../../shaders/attention_decode.wgsl"), entry, extent)),
        ("attention_prefill.wgsl", swap(include_str!("../../shaders/attention_prefill.wgsl"), entry, extent)),
    ]
}

/// The fragments of another contiguous twin: where a key's value lies needs no look-up, so each reader of a part of it
/// computes the address, and nothing is kept in workgroup memory. It takes fewer instructions in some variants, and
/// more in others.
pub fn contiguous_without_value_rows() -> Vec<(&'static str, String)> {
    let mut fragments = contiguous();
    let (_, core) = &mut fragments[0];
    cut(core, "    value_rows[key_J] =", ";\n");
    let value_row = "span.table + v_head_start(span.kv_head) + (tile + key) * V_ROW";
    *core = swap(core, "value_rows[key]", value_row);
    fragments
}

fn two_arrays(num_blocks: u32) -> Vec<(&'static str, String)> {
    let layout = include_str!("../../shaders/common/layout.wgsl");
    let layout = swap(
        layout,
        "block * layer.block_stride + layer.layer_start",
        "(block * layer.block_stride + layer.layer_start) / 2u",
    );
    // Of the layer's own arena: arenas may hold different numbers of layers.
    let half = format!("layer.block_stride * {num_blocks}u / 2u + kv_head");
    let keys = "layer.num_kv_heads * (K_ROW << layer.block_shift) + kv_head";
    vec![(LAYOUT, swap(&layout, keys, &half))]
}

fn per_token() -> Vec<(&'static str, String)> {
    let layout = include_str!("../../shaders/common/layout.wgsl");
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
        (CORE, strides(include_str!("../../shaders/common/attention_core.wgsl"), "slot_J")),
        (APPEND, strides(include_str!("../../shaders/append.wgsl"), ")")),
    ]
}

/// The fragments of [`Placement::KeyColumns`].
pub fn key_columns() -> Vec<(&'static str, String)> {
    let core = include_str!("../../shaders/common/attention_core.wgsl");
    let core = swap(core, "slot_J * K_ROW", "slot_J");
    let core = swap(&core, "row_J + chunk", "row_J + (chunk << layer.block_shift)");
    let append = include_str!("../../shaders/append.wgsl");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_finds_its_lines_and_changes_them() {
        let original = include_str!("../../shaders/common/attention_core.wgsl");
        for (name, fragments) in [
            ("contiguous", contiguous()),
            ("contiguous without value rows", contiguous_without_value_rows()),
            ("two arrays", two_arrays(7)),
            ("per token", per_token()),
            ("key columns", key_columns()),
        ] {
            assert!(!fragments.is_empty(), "{name}");
            assert!(fragments.iter().all(|(_, text)| text != original), "{name}");
        }
        let core = &contiguous_without_value_rows()[0].1;
        assert!(!core.contains("staged_blocks[") && !core.contains("value_rows["), "{core}");
    }

    #[test]
    fn other_results_are_told_with_their_numbers() {
        assert!(same_results("itself", &[1.0, -2.0], &[1.0, -2.001]).is_ok());
        let wrong = |expected: &[f32], actual: &[f32]| {
            let failure = same_results("a twin", expected, actual).expect_err("wrong results");
            failure.downcast::<WrongResults>().expect("the typed error").error
        };
        assert_eq!(wrong(&[1.0, -2.0], &[1.0, -1.0]), 1.0);
        assert_eq!(wrong(&[1.0], &[f32::NAN]), f32::INFINITY);
        assert_eq!(wrong(&[0.0], &[0.0]), 0.0);
        assert_eq!(wrong(&[1.0, 2.0], &[1.0]), 0.0);
        assert_eq!(wrong(&[f32::INFINITY], &[f32::INFINITY]), f32::INFINITY);
    }
}
