//! The windowed toy through the library: tokens and logits of its reference, however its sequences are scheduled.
//!
//! Five layers of six see a window of 12 tokens, so the pool has blocks of two groups of layers, and takes those behind
//! the windows back while their sequences grow. The second letters of an answer are told from the prompt, which one layer
//! sees as a whole: a block that went missing, or one of another layer, would change the text.
//!
//! `PAGED_KV_REQUIRE_ADAPTERS`: adapters without which the tests fail.
#![allow(clippy::unwrap_used)]

use approx::assert_abs_diff_eq;
use example_engine::attention::shape_of;
use example_engine::engine::{Engine, Outcome, Prompt, SessionOptions, SessionStats};
use example_engine::gguf::GgufFile;
use example_engine::gpu::{Adapters, Gpu};
use example_engine::sample::Sampler;
use paged_kv::{Admission, CacheConfig, KvType, PreemptionMode, SchedulerConfig};
use serde_json::Value;

/// Tokens of each answer.
const NEW: u32 = 72;
/// How far a logit may be from the reference's, which computes in f64.
const TOLERANCE: f32 = 1e-3;

/// How the prompts are run.
#[derive(Clone, Copy)]
struct Setup {
    block_size: u32,
    num_blocks: u32,
    host_blocks: u32,
    step_tokens: u32,
    preemption: PreemptionMode,
}

const BASE: Setup = Setup {
    block_size: 16,
    num_blocks: 400,
    host_blocks: 0,
    step_tokens: 512,
    preemption: PreemptionMode::Recompute,
};
/// Fewer blocks than the longest sequence alone would fill, if layers with windows kept everything.
const SMALL: Setup = Setup { block_size: 4, num_blocks: 88, step_tokens: 24, ..BASE };

struct Runner {
    engine: Engine,
    golden: Value,
}

impl Runner {
    fn new(gpu: Option<Gpu>) -> Self {
        let bytes = include_bytes!("../toy/windowed.gguf");
        let mut file = GgufFile::from_bytes("the windowed toy", bytes).unwrap();
        Self {
            engine: Engine::load(&mut file, gpu, &mut |_| ()).unwrap(),
            golden: serde_json::from_str(include_str!("../toy/windowed-golden.json")).unwrap(),
        }
    }

    fn prompts(&self) -> Vec<Prompt> {
        let prompts = self.golden["prompts"].as_array().unwrap();
        let prompt = |(index, golden): (u32, &Value)| Prompt {
            index,
            tokens: ids(&golden["prompt_ids"]),
            max_new_tokens: NEW,
            samples: 1,
            ..Prompt::default()
        };
        let prompts: Vec<_> = (0..).zip(prompts).map(prompt).collect();
        assert_eq!(prompts.len(), 5);
        prompts
    }

    fn cache(&self, setup: Setup) -> CacheConfig {
        let shape = shape_of(self.engine.config());
        CacheConfig::for_blocks(setup.num_blocks, &shape, KvType::F32)
            .and_then(|config| config.with_block_size(setup.block_size))
            .and_then(|config| config.with_max_sequence_tokens(self.engine.config().context_len))
            .and_then(|config| config.with_host_blocks(setup.host_blocks))
            .unwrap()
    }

    fn run(&mut self, prompts: &[Prompt], setup: Setup) -> (Vec<Outcome>, SessionStats) {
        let options = SessionOptions {
            cache: self.cache(setup),
            scheduler: SchedulerConfig {
                step_tokens: setup.step_tokens,
                max_running: Some(5),
                admission: Admission::Overcommitted { watermark_blocks: 0 },
                prefix_cache: None,
                preemption: setup.preemption,
                ..SchedulerConfig::default()
            },
            sampler: Sampler { temperature: 0.0, seed: 1 },
            top_logits: 8,
            rates: None,
        };
        self.engine.run(prompts, options).unwrap()
    }

    /// Every token is the reference's, and so are the logits: five where it names them, and the lead of the best one.
    fn check(&self, outcomes: &[Outcome]) {
        for outcome in outcomes {
            let golden = &self.golden["prompts"][outcome.prompt as usize];
            assert_eq!(outcome.tokens, ids(&golden["token_ids_f32"]), "{}", golden["prompt"]);
            assert_eq!(outcome.tokens.len(), NEW as usize);
            let named = golden["top5_f32"].as_array().unwrap();
            assert_eq!(named.len(), 4);
            for (ours, named) in outcome.top_logits.iter().zip(named) {
                for pair in named.as_array().unwrap() {
                    let [id, logit] = numbers(pair)[..] else { panic!("a token and its logit") };
                    let found = ours.top.iter().find(|(token, _)| *token == id as u32);
                    let (_, found) = found.unwrap_or_else(|| panic!("{id} is not among the best"));
                    assert_abs_diff_eq!(*found, logit, epsilon = TOLERANCE);
                }
            }
            let leads = numbers(&golden["gaps"]);
            assert_eq!(outcome.top_logits.len(), leads.len());
            for (ours, lead) in outcome.top_logits.iter().zip(leads) {
                assert_abs_diff_eq!(ours.top[0].1 - ours.top[1].1, lead, epsilon = TOLERANCE);
            }
        }
    }

    /// One prompt after the other, each read in chunks that no block size divides.
    fn alone(&mut self) {
        for prompt in self.prompts() {
            let (outcomes, _) = self.run(&[prompt], Setup { block_size: 8, step_tokens: 7, ..BASE });
            assert_eq!(outcomes.len(), 1);
            self.check(&outcomes);
        }
    }

    /// All prompts side by side, each read in one step.
    fn batched(&mut self) {
        let (outcomes, stats) = self.run(&self.prompts(), BASE);
        assert_eq!((outcomes.len(), stats.scheduler.preemptions), (5, 0));
        self.check(&outcomes);
    }

    /// All prompts in a pool that must take back what lies behind windows, for any of them to come to its end.
    fn in_a_small_pool(&mut self, setup: Setup) {
        // The longest first: while it grows, a short one beside it must make room.
        let mut prompts = self.prompts();
        prompts.reverse();
        let cache = self.cache(setup);
        let longest = prompts.iter().map(|prompt| prompt.tokens.len() as u32 + NEW).max().unwrap();
        let whole: u32 =
            cache.groups().iter().map(|group| group.num_stacks() * group.layout().blocks_for(longest)).sum();
        assert!(whole > cache.num_blocks(), "the longest sequence would fit as a whole: {whole} blocks");
        let (outcomes, stats) = self.run(&prompts, setup);
        assert_eq!(outcomes.len(), 5);
        self.check(&outcomes);
        assert!(stats.scheduler.preemptions > 0, "there was room for all");
        assert_eq!(stats.swap_bytes > 0, setup.preemption == PreemptionMode::Swap);
    }

    fn all(&mut self) {
        self.alone();
        self.batched();
        self.in_a_small_pool(SMALL);
        self.in_a_small_pool(Setup { preemption: PreemptionMode::Swap, host_blocks: 400, ..SMALL });
    }
}

fn ids(list: &Value) -> Vec<u32> {
    numbers(list).into_iter().map(|id| id as u32).collect()
}

fn numbers(list: &Value) -> Vec<f32> {
    list.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

#[test]
fn the_windowed_toy_speaks_as_its_reference_does_on_the_cpu_twins() {
    Runner::new(None).all();
}

#[test]
fn the_windowed_toy_speaks_as_its_reference_does_on_lavapipe() {
    let required = std::env::var("PAGED_KV_REQUIRE_ADAPTERS").unwrap_or_default();
    match Adapters::find(Some("llvmpipe")).best() {
        Some(adapter) => Runner::new(Some(Gpu::open(adapter).unwrap())).all(),
        None => {
            assert!(!required.contains("lavapipe"), "the adapter lavapipe is missing, and required");
            println!("the windowed toy on lavapipe: NOT RUN, there is no such adapter");
        }
    }
}
