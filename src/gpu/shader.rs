//! From a variant's key to its WGSL text: a generated header, then fragments.
//!
//! There is no preprocessor. What differs between variants is a constant of the header, or a fragment that another one
//! with equal function names replaces (subgroup or workgroup reductions and their entry points, f16 or f32 rows). Two
//! things are unrolled by text, because register arrays with a loop over them are at the mercy of four shader compilers:
//! a line that contains `_Q` is written once per query of the workgroup, with the query's number in place of the `Q`, and
//! one that contains `_J` once per key of an invocation.
//!
//! The set of keys is finite: [`all_variants`] names them all, [`sample_variants`] a part that has every pair of choices.

use crate::gpu::options::ActivationType;
use crate::layout::row_units;
use crate::model::{KvType, LayerGroup, MAX_HEAD_DIM};
use crate::reach::Reach;
use crate::schedule::PrefillItem;
use std::collections::HashSet;
use std::fmt::{self, Write as _};

/// Most query heads that one workgroup serves: kv heads with more have them in tiles, as even as possible.
pub const MAX_QUERIES: u32 = 8;

/// (row, head) pairs of a prefill workgroup, where its text is not to be short.
pub const PREFILL_QUERIES: u32 = 8;

/// Queries of an attention workgroup where the text is to be short.
pub(super) const COMPACT_QUERIES: u32 = 2;

/// Invocations of every workgroup: `WORKGROUP` in the shaders.
const WORKGROUP: u32 = 64;

/// Keys of a tile whose scores one invocation computes.
const KEYS: u32 = 2;

/// Query heads that may have numbers of their own, in one layer.
pub(super) const MAX_NUMBERED_HEADS: u32 = 256;

/// Units of 16 bytes that their numbers take.
pub(super) const HEAD_PARAMS: u32 = MAX_NUMBERED_HEADS / 2;

/// A part of a text: its name, by which it can be replaced, and its lines.
type Fragment = (&'static str, &'static str);

macro_rules! fragment {
    ($name:literal) => {
        ($name, include_str!(concat!("../../shaders/", $name)))
    };
}

/// Keys of a tile of the attention kernels. Spans of keys start at multiples of it.
pub const TILE: u32 = WORKGROUP * KEYS;

/// The kernels. A kernel's name is that of its file, its entry point, its labels and its CPU twin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Writes new rows of K and V into their slots.
    Append,
    /// Copies whole blocks.
    BlockCopy,
    /// Attention of sequences with one row.
    AttentionDecode,
    /// Attention of sequences with several rows.
    AttentionPrefill,
    /// Merges partial results.
    AttentionMerge,
}

impl Kernel {
    /// The kernel's name, also that of its entry point.
    pub fn name(self) -> &'static str {
        match self {
            Self::Append => "append",
            Self::BlockCopy => "block_copy",
            Self::AttentionDecode => "attention_decode",
            Self::AttentionPrefill => "attention_prefill",
            Self::AttentionMerge => "attention_merge",
        }
    }

    fn is_attention(self) -> bool {
        matches!(self, Self::AttentionDecode | Self::AttentionPrefill)
    }
}

/// What a shader's text depends on. Choices that a kernel does not have are at their defaults (f32, 8, 1, no subgroups),
/// so that equal texts have equal keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VariantKey {
    kernel: Kernel,
    k_type: KvType,
    v_type: KvType,
    k_head_dim: u32,
    v_head_dim: u32,
    activations: ActivationType,
    queries: u32,
    subgroups: bool,
    rule: RowRule,
}

/// What of a group's reach and rule of logits is compiled in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RowRule {
    /// Which keys rows see.
    pub reach: ReachKind,
    /// Logits are capped.
    pub soft_cap: bool,
    /// Keys lose by their distance.
    pub slopes: bool,
    /// Learned sinks.
    pub sinks: bool,
}

/// A [`Reach`] without its numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReachKind {
    /// Everything.
    #[default]
    All,
    /// A window, perhaps with first tokens.
    Window,
    /// The row's chunk.
    Chunk,
}

impl RowRule {
    /// That of a group.
    pub fn of(group: &LayerGroup) -> Self {
        let logits = group.logits();
        Self {
            reach: match group.reach() {
                Reach::All => ReachKind::All,
                Reach::Window { .. } => ReachKind::Window,
                Reach::Chunk { .. } => ReachKind::Chunk,
            },
            soft_cap: logits.soft_cap().is_some(),
            slopes: logits.has_slopes(),
            sinks: logits.has_sinks(),
        }
    }

    /// Whether query heads have numbers of their own.
    pub fn has_head_numbers(&self) -> bool {
        self.slopes || self.sinks
    }
}

impl VariantKey {
    /// The variant of `kernel` for a cache of these types and head sizes, tensors of `activations`, and `queries` queries
    /// per workgroup.
    pub fn new(
        kernel: Kernel,
        (k_type, v_type): (KvType, KvType),
        (k_head_dim, v_head_dim): (u32, u32),
        activations: ActivationType,
        queries: u32,
        subgroups: bool,
    ) -> Self {
        let attention = kernel.is_attention();
        let reads_kv = attention || kernel == Kernel::Append;
        Self {
            kernel,
            k_type: if reads_kv { k_type } else { KvType::F32 },
            v_type: if reads_kv { v_type } else { KvType::F32 },
            k_head_dim: if reads_kv { k_head_dim } else { 8 },
            v_head_dim: if reads_kv || kernel == Kernel::AttentionMerge { v_head_dim } else { 8 },
            activations: match kernel {
                Kernel::BlockCopy => ActivationType::F32,
                _ => activations,
            },
            queries: match kernel {
                Kernel::AttentionDecode | Kernel::AttentionPrefill => queries,
                _ => 1,
            },
            subgroups: attention && subgroups,
            rule: RowRule::default(),
        }
    }

    /// The variant of `block_copy`, which there is one of.
    pub fn block_copy() -> Self {
        Self::new(Kernel::BlockCopy, (KvType::F32, KvType::F32), (8, 8), ActivationType::F32, 1, false)
    }

    /// The same with another rule for rows, as far as the kernel has one.
    pub fn with_rule(mut self, rule: RowRule) -> Self {
        self.rule = match self.kernel {
            Kernel::AttentionDecode | Kernel::AttentionPrefill => rule,
            Kernel::AttentionMerge => RowRule { sinks: rule.sinks, ..RowRule::default() },
            Kernel::Append | Kernel::BlockCopy => RowRule::default(),
        };
        self
    }

    /// The kernel.
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// What of a group's rule for rows the text has.
    pub fn rule(&self) -> RowRule {
        self.rule
    }

    /// Whether the text uses subgroup operations.
    pub fn subgroups(&self) -> bool {
        self.subgroups
    }

    /// The WGSL text, for devices with the default limit of workgroups per dimension.
    pub fn wgsl(&self) -> String {
        self.wgsl_with(u32::from(u16::MAX), &[])
    }

    /// The WGSL text for dispatches folded at `fold` workgroups per dimension, with some fragments replaced: pairs of a
    /// fragment's name (`common/load.wgsl`) and the text to take instead.
    pub fn wgsl_with(&self, fold: u32, replaced: &[(&str, &str)]) -> String {
        let mut text = self.header(fold);
        for (name, fragment) in self.fragments() {
            let fragment =
                replaced.iter().find(|(other, _)| *other == name).map_or(fragment, |(_, text)| *text);
            let _ = write!(text, "\n// {name}\n");
            unroll(fragment, self.queries, &mut text);
        }
        text
    }

    fn header(&self, fold: u32) -> String {
        let mut text = format!("// {self}\nconst FOLD = {fold}u;\n");
        let head_params = if self.rule.has_head_numbers() { HEAD_PARAMS } else { 1 };
        let _ = writeln!(text, "const HEAD_PARAMS = {head_params}u;");
        let attention = self.kernel.is_attention();
        if attention || self.kernel == Kernel::Append {
            let _ = write!(
                text,
                "const K_HEAD_DIM = {}u;\nconst K_ROW = {}u;\nconst V_ROW = {}u;\n",
                self.k_head_dim,
                row_units(self.k_head_dim, self.k_type),
                row_units(self.v_head_dim, self.v_type),
            );
        }
        if attention || self.kernel == Kernel::AttentionMerge {
            let _ = writeln!(text, "const V_HEAD_DIM = {}u;", self.v_head_dim);
        }
        if attention {
            let _ = writeln!(text, "const QUERIES = {}u;", self.queries);
            for query in 0..self.queries {
                let _ = writeln!(text, "const QUERY_{query} = {query}u;");
            }
            let _ = writeln!(text, "const KEYS = {KEYS}u;");
            for key in 0..KEYS {
                let _ = writeln!(text, "const KEY_{key} = {key}u;");
            }
        }
        if self.kernel == Kernel::AttentionPrefill {
            let _ = writeln!(text, "const ITEM_WORDS = {}u;", PrefillItem::WORDS);
        }
        text
    }

    fn sink_fragments(&self) -> Vec<Fragment> {
        let numbers = self.rule.has_head_numbers().then_some(fragment!("common/head_numbers.wgsl"));
        let sink = match self.rule.sinks {
            true => fragment!("common/sink_learned.wgsl"),
            false => fragment!("common/sink_none.wgsl"),
        };
        numbers.into_iter().chain([sink]).collect()
    }

    fn fragments(&self) -> Vec<Fragment> {
        let mut fragments = vec![fragment!("common/params.wgsl")];
        if self.kernel != Kernel::BlockCopy {
            fragments.push(match self.activations {
                ActivationType::F32 => fragment!("common/activations_f32.wgsl"),
                ActivationType::F16 => fragment!("common/activations_f16.wgsl"),
            });
        }
        if self.packs_halves() {
            fragments.push(fragment!("common/half.wgsl"));
        }
        match self.kernel {
            Kernel::Append => {
                fragments.push(fragment!("common/layout.wgsl"));
                fragments.push(match self.k_type {
                    KvType::F32 => fragment!("common/pack_k_f32.wgsl"),
                    KvType::F16 => fragment!("common/pack_k_f16.wgsl"),
                });
                fragments.push(match self.v_type {
                    KvType::F32 => fragment!("common/pack_v_f32.wgsl"),
                    KvType::F16 => fragment!("common/pack_v_f16.wgsl"),
                });
                fragments.push(fragment!("append.wgsl"));
            }
            Kernel::BlockCopy => fragments.push(fragment!("block_copy.wgsl")),
            Kernel::AttentionMerge => {
                fragments.extend(self.sink_fragments());
                fragments.push(fragment!("attention_merge.wgsl"));
            }
            Kernel::AttentionDecode | Kernel::AttentionPrefill => {
                fragments.push(fragment!("common/attention_bindings.wgsl"));
                fragments.push(fragment!("common/layout.wgsl"));
                fragments.push(fragment!("common/load.wgsl"));
                fragments.push(match self.k_type {
                    KvType::F32 => fragment!("common/read_k_f32.wgsl"),
                    KvType::F16 => fragment!("common/read_k_f16.wgsl"),
                });
                fragments.push(match self.v_type {
                    KvType::F32 => fragment!("common/read_v_f32.wgsl"),
                    KvType::F16 => fragment!("common/read_v_f16.wgsl"),
                });
                fragments.push(match self.subgroups {
                    true => fragment!("common/sum_subgroup.wgsl"),
                    false => fragment!("common/sum_workgroup.wgsl"),
                });
                fragments.extend(self.sink_fragments());
                fragments.push(match self.rule.soft_cap {
                    true => fragment!("common/logit_soft_cap.wgsl"),
                    false => fragment!("common/logit_plain.wgsl"),
                });
                fragments.push(match self.rule.slopes {
                    true => fragment!("common/distance_slopes.wgsl"),
                    false => fragment!("common/distance_none.wgsl"),
                });
                fragments.push(fragment!("common/attention_core.wgsl"));
                fragments.extend(match self.rule.reach {
                    ReachKind::All => vec![fragment!("common/reach_all.wgsl")],
                    ReachKind::Window => {
                        vec![fragment!("common/reach_window.wgsl"), fragment!("common/reach_part.wgsl")]
                    }
                    ReachKind::Chunk => {
                        vec![fragment!("common/reach_chunk.wgsl"), fragment!("common/reach_part.wgsl")]
                    }
                });
                fragments.push(match self.kernel {
                    Kernel::AttentionDecode => fragment!("attention_decode.wgsl"),
                    _ => fragment!("attention_prefill.wgsl"),
                });
                fragments.push(match (self.kernel, self.subgroups) {
                    (Kernel::AttentionDecode, true) => fragment!("common/attention_decode_subgroup.wgsl"),
                    (Kernel::AttentionDecode, false) => fragment!("common/attention_decode_workgroup.wgsl"),
                    (_, true) => fragment!("common/attention_prefill_subgroup.wgsl"),
                    (_, false) => fragment!("common/attention_prefill_workgroup.wgsl"),
                });
            }
        }
        fragments
    }

    fn packs_halves(&self) -> bool {
        let stores_halves = self.k_type == KvType::F16 || self.v_type == KvType::F16;
        self.activations == ActivationType::F16 || (self.kernel == Kernel::Append && stores_halves)
    }
}

impl fmt::Display for VariantKey {
    /// A stable name: the kernel, then the choices that it has.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kernel.name())?;
        match self.kernel {
            Kernel::BlockCopy => return Ok(()),
            Kernel::AttentionMerge => {
                write!(f, ".d{}", self.v_head_dim)?;
                self.fmt_rule(f)?;
                return self.fmt_activations(f);
            }
            _ => {}
        }
        if self.k_type == self.v_type {
            write!(f, ".{}", self.k_type)?;
        } else {
            write!(f, ".k_{}_v_{}", self.k_type, self.v_type)?;
        }
        if self.k_head_dim == self.v_head_dim {
            write!(f, ".d{}", self.k_head_dim)?;
        } else {
            write!(f, ".d{}_{}", self.k_head_dim, self.v_head_dim)?;
        }
        if self.kernel == Kernel::AttentionDecode || self.has_compact_tiles() {
            write!(f, ".q{}", self.queries)?;
        }
        self.fmt_rule(f)?;
        if self.kernel.is_attention() {
            f.write_str(if self.subgroups { ".subgroup" } else { ".workgroup" })?;
        }
        self.fmt_activations(f)
    }
}

impl VariantKey {
    fn has_compact_tiles(&self) -> bool {
        self.kernel == Kernel::AttentionPrefill && self.queries != PREFILL_QUERIES
    }

    /// What of the rule is not the usual.
    fn fmt_rule(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.rule.reach {
            ReachKind::All => "",
            ReachKind::Window => ".window",
            ReachKind::Chunk => ".chunk",
        })?;
        let RowRule { soft_cap, slopes, sinks, .. } = self.rule;
        for (option, name) in [(soft_cap, ".cap"), (slopes, ".alibi"), (sinks, ".sinks")] {
            f.write_str(if option { name } else { "" })?;
        }
        Ok(())
    }

    /// Other activations than f32, at the end of the name.
    fn fmt_activations(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.activations {
            ActivationType::F32 => Ok(()),
            activations => write!(f, ".act_{activations}"),
        }
    }
}

/// Writes `fragment` to `text`, each line that contains `_Q` once per query, and each that contains `_J` once per key of
/// an invocation. Comment lines are left alone.
fn unroll(fragment: &str, queries: u32, text: &mut String) {
    for line in fragment.lines() {
        if line.trim_start().starts_with("//") {
            let _ = writeln!(text, "{line}");
            continue;
        }
        let copies = |marker, count| if line.contains(marker) { count } else { 1 };
        for query in 0..copies("_Q", queries) {
            for key in 0..copies("_J", KEYS) {
                let copy = line.replace("_Q", &format!("_{query}")).replace("_J", &format!("_{key}"));
                let _ = writeln!(text, "{copy}");
            }
        }
    }
}

/// Every variant: equal head sizes of K and V from 8 to 256, and three pairs of unequal ones; of some of them, every rule
/// for rows.
pub fn all_variants() -> Vec<VariantKey> {
    let kernels = [
        Kernel::AttentionDecode,
        Kernel::AttentionPrefill,
        Kernel::Append,
        Kernel::AttentionMerge,
        Kernel::BlockCopy,
    ];
    let types = [KvType::F32, KvType::F16];
    let mut dims: Vec<(u32, u32)> = (8..=MAX_HEAD_DIM).step_by(8).map(|dim| (dim, dim)).collect();
    dims.extend([(192, 128), (64, 128), (256, 8)]);
    let mut seen = HashSet::new();
    let mut variants = Vec::new();
    for kernel in kernels {
        for &dims in &dims {
            for k_type in types {
                for v_type in types {
                    for activations in [ActivationType::F32, ActivationType::F16] {
                        for queries in queries_of(kernel) {
                            for subgroups in [false, true] {
                                let types = (k_type, v_type);
                                let key =
                                    VariantKey::new(kernel, types, dims, activations, queries, subgroups);
                                let has_rules = dims == (64, 64) || dims == (256, 8);
                                let rules = if has_rules { all_rules() } else { vec![RowRule::default()] };
                                let keys = rules.into_iter().map(|rule| key.with_rule(rule));
                                variants.extend(keys.filter(|key| seen.insert(*key)));
                            }
                        }
                    }
                }
            }
        }
    }
    variants
}

fn all_rules() -> Vec<RowRule> {
    let mut rules = Vec::new();
    for reach in [ReachKind::All, ReachKind::Window, ReachKind::Chunk] {
        for options in 0..8 {
            let has = |option: u32| options & option != 0;
            rules.push(RowRule { reach, soft_cap: has(1), slopes: has(2), sinks: has(4) });
        }
    }
    rules
}

/// Queries of a workgroup that a kernel's texts are made for.
fn queries_of(kernel: Kernel) -> Vec<u32> {
    match kernel {
        Kernel::AttentionDecode => (1..=MAX_QUERIES).collect(),
        Kernel::AttentionPrefill => vec![COMPACT_QUERIES, PREFILL_QUERIES],
        _ => vec![1],
    }
}

/// Variants in which every pair of choices of [`all_variants`] occurs, in the same order.
pub fn sample_variants() -> Vec<VariantKey> {
    let mut covered = HashSet::new();
    let choices = |key: &VariantKey| {
        [
            key.kernel as u32,
            key.k_type.bits(),
            key.v_type.bits(),
            key.k_head_dim * 1000 + key.v_head_dim,
            key.activations.bytes(),
            key.queries,
            u32::from(key.subgroups),
            key.rule.reach as u32,
            u32::from(key.rule.soft_cap),
            u32::from(key.rule.slopes),
            u32::from(key.rule.sinks),
        ]
    };
    // Neighbours differ in one choice: taken in a scattered order, a key has more pairs that are new.
    let mut all: Vec<(u32, VariantKey)> = (0..).zip(all_variants()).collect();
    all.sort_by_key(|(index, _)| index.wrapping_mul(2_654_435_761));
    all.retain(|(_, key)| {
        let choices = choices(key);
        let mut is_new = false;
        for a in 0..choices.len() {
            for b in a + 1..choices.len() {
                is_new |= covered.insert((a, choices[a], b, choices[b]));
            }
        }
        is_new
    });
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, key)| key).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_lines_are_written_once_per_query_and_key() {
        let mut text = String::new();
        unroll("// a comment on _Q and _J\nlet a_Q = b_Q;\nplain\nc_J.v_Q\n", 2, &mut text);
        assert_eq!(
            text,
            "// a comment on _Q and _J\nlet a_0 = b_0;\nlet a_1 = b_1;\nplain\n\
             c_0.v_0\nc_1.v_0\nc_0.v_1\nc_1.v_1\n"
        );
    }

    #[test]
    fn variants_have_distinct_names_and_the_sample_is_a_part_of_them() {
        let all = all_variants();
        let names: HashSet<String> = all.iter().map(ToString::to_string).collect();
        assert_eq!(names.len(), all.len());
        let sample = sample_variants();
        assert!(sample.len() * 4 < all.len(), "{} of {}", sample.len(), all.len());
        assert!(sample.iter().all(|key| all.contains(key)));
    }

    #[test]
    fn no_text_keeps_a_marker() {
        for key in sample_variants() {
            let text = key.wgsl();
            let is_marked = |line: &&str| line.contains("_Q") || line.contains("_J");
            let marked = text.lines().find(|line| is_marked(line) && !line.trim_start().starts_with("//"));
            assert_eq!(marked, None, "{key}");
        }
    }
}
