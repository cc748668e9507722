//! The windowed toy: what its file says of attention, and that a dense forward pass that does so agrees with its reference.

use approx::assert_abs_diff_eq;
use paged_kv::{CacheConfig, KvType, LogitRule, Reach};
use serde_json::Value;

use crate::{
    attention::shape_of,
    config::Config,
    cpu::{CpuModel, QueryKeyValue},
    gguf::GgufFile,
    sample::TopLogits,
};

/// How far a logit in f32 may be from the reference's in f64.
const TOLERANCE: f32 = 1e-3;

fn open() -> GgufFile {
    let bytes = include_bytes!("../../toy/windowed.gguf");
    GgufFile::from_bytes("the windowed toy", bytes).expect("the file is whole")
}

fn config() -> Config {
    Config::read(&mut open()).expect("the model is whole")
}

#[test]
fn all_layers_but_the_last_see_a_window() {
    let config = config();
    let window = Some(12);
    assert_eq!(config.windows, [window, window, window, window, window, None]);
    assert_eq!((config.num_query_heads, config.num_kv_heads, config.soft_cap), (4, 2, Some(5.0)));
    assert_eq!(config.sinks.len(), 6 * 4);
    // Each head has learned its own.
    let mut sinks = config.sinks.clone();
    sinks.sort_by(f32::total_cmp);
    sinks.dedup();
    assert_eq!(sinks.len(), 6 * 4);
}

#[test]
fn the_shape_has_the_windows_the_cap_and_the_sinks() {
    let config = config();
    let shape = shape_of(&config);
    let groups: Vec<_> = shape.groups().collect();
    let layers: Vec<Vec<u32>> = groups.iter().map(|group| group.layers().collect()).collect();
    assert_eq!(layers, [vec![5], vec![0, 1, 2, 3, 4]]);
    assert_eq!(groups[0].reach(), Reach::All);
    assert_eq!(groups[1].reach(), Reach::Window { tokens: 12, first: 0 });
    let (windowed, whole) = config.sinks.split_at(5 * 4);
    for (group, sinks) in [(groups[0], whole), (groups[1], windowed)] {
        let rule = LogitRule::new().with_soft_cap(5.0).with_sinks(sinks.iter().copied());
        assert_eq!(group.logits(), &rule);
    }
    CacheConfig::for_context(config.context_len, 4, &shape, KvType::F32).expect("the cache takes it");
}

#[test]
fn a_dense_forward_pass_agrees_with_the_reference() {
    let config = config();
    let model = CpuModel::load(&mut open(), config, &mut |_| ()).expect("the model is whole");
    let golden: Value =
        serde_json::from_str(include_str!("../../toy/windowed-golden.json")).expect("the file is JSON");
    let prompts = golden["prompts"].as_array().expect("prompts are a list");
    assert_eq!(prompts.len(), 5);
    for prompt in prompts {
        let (prompt_ids, expected) = (ids(&prompt["prompt_ids"]), ids(&prompt["token_ids_f32"]));
        let gaps = numbers(&prompt["gaps"]);
        let tops = prompt["top5_f32"].as_array().expect("they are a list");
        assert_eq!(prompt["comparable_f32"].as_u64(), Some(expected.len() as u64));
        let last = prompt_ids.len() - 1;
        let tokens = [prompt_ids, expected.clone()].concat();
        let logit_rows: Vec<u32> = (last..tokens.len() - 1).map(|row| row as u32).collect();
        let logits = dense(&model, &tokens, &logit_rows);
        for (step, logits) in logits.chunks_exact(model.config().vocab_len as usize).enumerate() {
            let best = TopLogits::of(logits, 2).top;
            assert_eq!(best[0].0, expected[step], "step {step} of {}", prompt["prompt"]);
            assert_abs_diff_eq!(best[0].1 - best[1].1, gaps[step], epsilon = TOLERANCE);
            for top in tops.get(step).and_then(Value::as_array).into_iter().flatten() {
                let [id, logit] = numbers(top)[..] else { panic!("a token and its logit") };
                assert_abs_diff_eq!(logits[id as usize], logit, epsilon = TOLERANCE);
            }
        }
    }
}

fn ids(list: &Value) -> Vec<u32> {
    numbers(list).into_iter().map(|id| id as u32).collect()
}

fn numbers(list: &Value) -> Vec<f32> {
    let list = list.as_array().expect("it is a list");
    list.iter().map(|number| number.as_f64().expect("it is a number") as f32).collect()
}

/// The logits of some rows of one sequence, which is computed as a whole.
fn dense(model: &CpuModel, tokens: &[u32], logit_rows: &[u32]) -> Vec<f32> {
    let positions: Vec<u32> = (0..tokens.len() as u32).collect();
    let attend = |layer, tensors: QueryKeyValue| attend(model.config(), layer, &tensors);
    model.forward(tokens, &positions, logit_rows, attend).expect("products do not fail")
}

fn attend(config: &Config, layer: u32, tensors: &QueryKeyValue) -> Vec<f32> {
    let head_dim = config.head_dim as usize;
    let (query_heads, kv_heads) = (config.num_query_heads as usize, config.num_kv_heads as usize);
    let sinks: Vec<f32> = config.sinks_of(layer).collect();
    let cap = config.soft_cap.expect("the model has one");
    let mut attended = Vec::with_capacity(tensors.query.len());
    for (index, query) in tensors.query.chunks_exact(head_dim).enumerate() {
        let (row, head) = (index / query_heads, index % query_heads);
        let kv_head = head / (query_heads / kv_heads);
        let first =
            config.windows[layer as usize].map_or(0, |tokens| (row + 1).saturating_sub(tokens as usize));
        let of_key = |heads: &'_ [f32], key: usize| -> Vec<f32> {
            heads[(key * kv_heads + kv_head) * head_dim..][..head_dim].to_vec()
        };
        let mut sum = sinks[head].exp();
        let mut output = vec![0.0; head_dim];
        for key in first..=row {
            let product: f32 = query.iter().zip(of_key(&tensors.key, key)).map(|(q, k)| q * k).sum();
            let logit = cap * (product / (head_dim as f32).sqrt() / cap).tanh();
            sum += logit.exp();
            for (output, value) in output.iter_mut().zip(of_key(&tensors.value, key)) {
                *output += logit.exp() * value;
            }
        }
        attended.extend(output.into_iter().map(|element| element / sum));
    }
    attended
}
