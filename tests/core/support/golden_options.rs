//! Outputs of another engine's attention with windows, soft-cap and learned sinks, and the inputs that they belong to.

use paged_kv::{LogitRule, ModelShape, Reach};

/// One sequence of `context` tokens, the outputs of whose last rows are known.
pub(crate) struct GoldenCase {
    /// The line that describes it.
    pub(crate) name: String,
    pub(crate) shape: ModelShape,
    pub(crate) context: u32,
    pub(crate) rows: u32,
    /// `[context][query heads][head size]`
    pub(crate) query: Vec<f32>,
    /// `[context][kv heads][head size]`
    pub(crate) key: Vec<f32>,
    pub(crate) value: Vec<f32>,
    /// `[rows][query heads][head size]`
    pub(crate) output: Vec<f64>,
}

/// All of them.
pub(crate) fn golden_cases() -> Vec<GoldenCase> {
    let text = include_str!("../golden/attention_options.txt");
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines.chunks_exact(2).map(|pair| case(pair[0], pair[1])).collect()
}

fn case(numbers: &str, output: &str) -> GoldenCase {
    let number = |name: &str| -> f64 {
        let found = numbers.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        found.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{name} in {numbers}"))
    };
    let count = |name| number(name) as u32;
    let (heads, kv_heads, head_dim) = (count("query_heads"), count("kv_heads"), count("head_dim"));
    let (context, seed, gain) = (count("context"), count("seed"), number("gain"));
    let mut rule = LogitRule::new();
    // 0: the usual scale, no soft-cap, no window.
    if number("scale") != 0.0 {
        rule = rule.with_scale(number("scale") as f32);
    }
    if number("soft_cap") != 0.0 {
        rule = rule.with_soft_cap(number("soft_cap") as f32);
    }
    if number("sinks") != 0.0 {
        rule = rule.with_sinks(fill(seed + 3, 4.0, heads));
    }
    let reach = match count("window") {
        0 => Reach::All,
        tokens => Reach::Window { tokens, first: 0 },
    };
    let output = output.split(' ').map(|word| word.parse().expect("a number")).collect();
    GoldenCase {
        name: numbers.to_owned(),
        shape: ModelShape::new(1, heads, kv_heads, head_dim).with_reach(reach).with_logits(rule),
        context,
        rows: count("rows"),
        query: fill(seed, gain, context * heads * head_dim),
        key: fill(seed + 1, gain, context * kv_heads * head_dim),
        value: fill(seed + 2, 1.0, context * kv_heads * head_dim),
        output,
    }
}

/// Numbers from `-gain` to `gain` that follow from their indices.
fn fill(seed: u32, gain: f64, len: u32) -> Vec<f32> {
    let number = |index: u32| {
        let x = index.wrapping_mul(2_654_435_761).wrapping_add(seed).wrapping_add(0x9e37_79b9);
        let x = (x ^ x >> 16).wrapping_mul(0x85eb_ca6b);
        let x = (x ^ x >> 13).wrapping_mul(0xc2b2_ae35);
        let x = x ^ x >> 16;
        ((f64::from(x >> 8) / f64::from(1 << 23) - 1.0) * gain) as f32
    };
    (0..len).map(number).collect()
}
