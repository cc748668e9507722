//! The tokens of a real model, compared with those that another engine chose for the same prompts.
//!
//! `golden/smollm2-greedy.json` says which model, which engine, and up to which position equal tokens are due: to the
//! first near-tie of the two best logits, or to the end of text. A *cell* is one way to run the prompts; each device has
//! its own cells. Those marked `quick` run always; with `PAGED_KV_GOLDEN=all` all of them run, and those that compare
//! answers up to [`FIRST_TOKENS`] by default compare whole ones. A cell that passed leaves a mark in the folder
//! `PAGED_KV_GOLDEN_DONE`, if that is set, and is not run again.
//!
//! - `PAGED_KV_MODEL`: the model; by default `target/models/SmolLM2-135M-Instruct.Q4_1.gguf`. Without it nothing can run,
//!   which fails if adapters are required and is said otherwise.
//! - `PAGED_KV_REQUIRE_ADAPTERS`: adapters without which the tests fail (`lavapipe,swiftshader,gl:llvmpipe`).
#![allow(clippy::unwrap_used)]

use approx::abs_diff_eq;
use example_engine::engine::{Engine, Event, Outcome, Prompt, SessionOptions, SessionStats};
use example_engine::gguf::GgufFile;
use example_engine::gpu::{Adapters, Gpu};
use example_engine::sample::Sampler;
use paged_kv::{
    Admission, CacheConfig, KvType, Preemption, PreemptionMode, PrefixCacheConfig, Rates, SchedulerConfig,
    TokenId, VictimPolicy,
};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

/// How a cell runs its prompts.
#[derive(Clone, Copy)]
struct Setup {
    kv: KvType,
    block_size: u32,
    step_tokens: u32,
    num_blocks: u32,
    /// One prompt after the other instead of all at once.
    alone: bool,
}

/// Tokens of each answer that a default run compares: every sequence grows into another block of 16, and a step takes a
/// second or two on a software adapter.
const FIRST_TOKENS: usize = 20;

const BASE: Setup = Setup { kv: KvType::F32, block_size: 16, step_tokens: 64, num_blocks: 256, alone: false };

/// How a cell runs twelve prompts in a pool that holds about half of them side by side.
#[derive(Clone, Copy)]
struct Pressure {
    num_blocks: u32,
    preemption: PreemptionMode,
    victims: VictimPolicy,
    prefix_cache: bool,
}

const PRESSURE: Pressure = Pressure {
    num_blocks: 24,
    preemption: PreemptionMode::Recompute,
    victims: VictimPolicy::LowestPriority,
    prefix_cache: false,
};
const SWAPPED: Pressure = Pressure { num_blocks: 26, preemption: PreemptionMode::Swap, ..PRESSURE };
const REQUESTER: Pressure = Pressure { num_blocks: 25, victims: VictimPolicy::Requester, ..PRESSURE };
const LEAST_LOST: Pressure = Pressure { num_blocks: 27, victims: VictimPolicy::LeastLost, ..PRESSURE };
const CACHED: Pressure = Pressure { num_blocks: 15, prefix_cache: true, ..PRESSURE };

struct Cell {
    name: &'static str,
    /// Devices on which it always runs.
    quick: &'static [&'static str],
    /// Devices on which it runs with `PAGED_KV_GOLDEN=all`.
    all: &'static [&'static str],
    run: fn(&mut Runner),
}

const GPUS: &[&str] = &["lavapipe", "swiftshader"];
const ALL: &[&str] = &["lavapipe", "swiftshader", "cpu"];

const CELLS: &[Cell] = &[
    Cell {
        name: "f32, P 16, batched",
        quick: &["swiftshader", "cpu"],
        all: &["lavapipe"],
        run: |runner| runner.short(BASE),
    },
    Cell {
        name: "f16, P 16, batched",
        quick: &["lavapipe", "cpu"],
        all: &["swiftshader"],
        run: |runner| runner.short(Setup { kv: KvType::F16, ..BASE }),
    },
    Cell {
        name: "f32, P 8, alone",
        quick: &["cpu"],
        all: GPUS,
        run: |runner| runner.short(Setup { block_size: 8, num_blocks: 64, alone: true, ..BASE }),
    },
    Cell {
        name: "f32, P 32, 7 tokens a step",
        quick: &["cpu"],
        all: GPUS,
        run: |runner| runner.short(Setup { block_size: 32, num_blocks: 64, step_tokens: 7, ..BASE }),
    },
    Cell {
        name: "f16, P 256, batched",
        quick: &["cpu"],
        all: GPUS,
        run: |runner| runner.short(Setup { kv: KvType::F16, block_size: 256, num_blocks: 12, ..BASE }),
    },
    Cell { name: "f32, preempted", quick: &[], all: ALL, run: Runner::preempted },
    Cell {
        name: "f32, preempted by recomputation",
        quick: &["cpu"],
        all: GPUS,
        run: |runner| runner.under_pressure(PRESSURE),
    },
    Cell {
        name: "f32, preempted by swap",
        quick: &["cpu"],
        all: GPUS,
        run: |runner| runner.under_pressure(SWAPPED),
    },
    Cell {
        name: "f32, preempted either way",
        quick: &[],
        all: ALL,
        run: |runner| {
            runner.under_pressure(Pressure { num_blocks: 28, preemption: PreemptionMode::Auto, ..PRESSURE })
        },
    },
    Cell {
        name: "f32, the requester recomputes",
        quick: &[],
        all: ALL,
        run: |runner| runner.under_pressure(REQUESTER),
    },
    Cell {
        name: "f32, the requester is swapped",
        quick: &[],
        all: ALL,
        run: |runner| runner.under_pressure(Pressure { preemption: PreemptionMode::Swap, ..REQUESTER }),
    },
    Cell {
        name: "f32, who loses least recomputes",
        quick: &[],
        all: ALL,
        run: |runner| runner.under_pressure(LEAST_LOST),
    },
    Cell {
        name: "f32, who loses least is swapped",
        quick: &[],
        all: ALL,
        run: |runner| runner.under_pressure(Pressure { preemption: PreemptionMode::Swap, ..LEAST_LOST }),
    },
    Cell { name: "f32, prefix cache", quick: &["cpu"], all: GPUS, run: Runner::prefix_cache },
    Cell {
        name: "f32, prefix cache, preempted by recomputation",
        quick: &[],
        all: ALL,
        run: |runner| runner.under_pressure(CACHED),
    },
    Cell {
        name: "f32, prefix cache, preempted by swap",
        quick: &[],
        all: ALL,
        run: |runner| runner.under_pressure(Pressure { preemption: PreemptionMode::Swap, ..CACHED }),
    },
    Cell { name: "f32, 4 greedy samples", quick: &["cpu"], all: GPUS, run: Runner::greedy_samples },
    Cell { name: "f32, 4 samples at 0.8", quick: &["cpu"], all: GPUS, run: Runner::warm_samples },
    Cell {
        name: "f32, the pair of 660",
        quick: &["cpu"],
        all: GPUS,
        run: |runner| runner.compare(9..11, BASE),
    },
    Cell {
        name: "f32, the pair of 660, prefix cache",
        quick: &["cpu"],
        all: GPUS,
        run: Runner::shared_system_prompt,
    },
    Cell {
        name: "f16, the long one",
        quick: &[],
        all: &["lavapipe", "cpu"],
        run: |runner| runner.compare(11..12, Setup { kv: KvType::F16, ..BASE }),
    },
    Cell {
        name: "f32, smoke",
        quick: &["gl"],
        all: &[],
        run: |runner| runner.compare(1..3, Setup { num_blocks: 16, ..BASE }),
    },
];

#[test]
fn tokens_equal_the_other_engines_on_lavapipe() {
    run_cells("lavapipe", Some("llvmpipe"));
}

#[test]
fn tokens_equal_the_other_engines_on_swiftshader() {
    run_cells("swiftshader", Some("swiftshader"));
}

#[test]
fn tokens_equal_the_other_engines_on_gl() {
    run_cells("gl", Some("on gl"));
}

#[test]
fn tokens_equal_the_other_engines_on_the_cpu_twins() {
    run_cells("cpu", None);
}

/// Runs a device's cells, one device after the other: the weights take half a gigabyte.
fn run_cells(device: &str, adapter: Option<&str>) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let required = std::env::var("PAGED_KV_REQUIRE_ADAPTERS").unwrap_or_default();
    let model = std::env::var_os("PAGED_KV_MODEL").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        PathBuf::from,
    );
    if !model.exists() {
        assert!(required.is_empty(), "{} is missing: run tests/get-model", model.display());
        println!("golden {device}: NOT RUN, {} is missing: run tests/get-model", model.display());
        return;
    }
    let gpu =
        adapter.map(|part| Adapters::find(Some(part)).best().map(|adapter| Gpu::open(adapter).unwrap()));
    if matches!(gpu, Some(None)) {
        assert!(!required.contains(device), "the adapter {device} is missing, and required");
        println!("golden {device}: NOT RUN, there is no such adapter");
        return;
    }
    let gpu = gpu.flatten();
    println!("adapter: {} (golden tokens)", gpu.as_ref().map_or("CPU twins", |gpu| gpu.label.as_str()));
    let everything = std::env::var("PAGED_KV_GOLDEN").is_ok_and(|cells| cells == "all");
    let done = std::env::var_os("PAGED_KV_GOLDEN_DONE").map(PathBuf::from);
    let mark = |cell: &Cell| {
        let name: String =
            cell.name.chars().map(|letter| if letter.is_alphanumeric() { letter } else { '-' }).collect();
        let extent = if everything { "" } else { "-first-tokens" };
        done.as_ref().map(|folder| folder.join(format!("{device}-{name}{extent}")))
    };
    let due: Vec<&Cell> = CELLS
        .iter()
        .filter(|cell| cell.quick.contains(&device) || (everything && cell.all.contains(&device)))
        .filter(|cell| !mark(cell).is_some_and(|mark| mark.exists()))
        .collect();
    let mut file = GgufFile::open(&model).unwrap();
    let mut runner = Runner {
        engine: Engine::load(&mut file, gpu, &mut |_| ()).unwrap(),
        golden: Golden::read(),
        most_tokens: if everything { usize::MAX } else { FIRST_TOKENS },
    };
    for cell in due {
        let start = Instant::now();
        (cell.run)(&mut runner);
        println!("golden {device}: {} passed in {:.1} s", cell.name, start.elapsed().as_secs_f64());
        if let Some(mark) = mark(cell) {
            std::fs::write(mark, "").unwrap();
        }
    }
}

/// The other engine's tokens and logits.
struct Golden {
    prompts: Vec<Value>,
}

impl Golden {
    fn read() -> Self {
        let text = include_str!("golden/smollm2-greedy.json");
        let mut file: Value = serde_json::from_str(text).unwrap();
        let Value::Array(prompts) = file["prompts"].take() else { panic!("prompts are an array") };
        Self { prompts }
    }

    fn ids(&self, prompt: usize, field: &str) -> Vec<TokenId> {
        self.prompts[prompt][field].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    /// Leading tokens that must be equal.
    fn expected(&self, prompt: usize, kv: KvType) -> Vec<TokenId> {
        let (tokens, comparable) = match kv {
            KvType::F32 => ("token_ids_f32", "comparable_f32"),
            _ => ("token_ids_f16", "comparable_f16"),
        };
        let mut tokens = self.ids(prompt, tokens);
        tokens.truncate(self.prompts[prompt][comparable].as_u64().unwrap() as usize);
        if let Ok(end) = usize::try_from(self.prompts[prompt]["first_end_of_text"].as_i64().unwrap()) {
            tokens.truncate(end + 1);
        }
        tokens
    }

    /// At most `most` of the tokens that must be equal.
    fn first(&self, prompt: usize, kv: KvType, most: usize) -> Vec<TokenId> {
        let mut tokens = self.expected(prompt, kv);
        tokens.truncate(most);
        tokens
    }
}

struct Runner {
    engine: Engine,
    golden: Golden,
    /// Of an answer, compared by the cells that do not need all of it.
    most_tokens: usize,
}

impl Runner {
    fn prompt(&self, index: usize, max_new_tokens: usize) -> Prompt {
        Prompt {
            index: index as u32,
            tokens: self.golden.ids(index, "prompt_ids"),
            max_new_tokens: max_new_tokens.max(1) as u32,
            samples: 1,
            ..Prompt::default()
        }
    }

    fn options(&self, setup: Setup, top_logits: usize) -> SessionOptions {
        let shape = example_engine::attention::shape_of(self.engine.config());
        let cache = CacheConfig::for_blocks(setup.num_blocks, &shape, setup.kv).unwrap();
        SessionOptions {
            cache: cache.with_block_size(setup.block_size).unwrap(),
            scheduler: SchedulerConfig {
                step_tokens: setup.step_tokens,
                max_running: Some(12),
                admission: Admission::Overcommitted { watermark_blocks: 0 },
                prefix_cache: None,
                ..SchedulerConfig::default()
            },
            sampler: Sampler { temperature: 0.0, seed: 1 },
            top_logits,
            rates: None,
        }
    }

    fn run(&mut self, prompts: &[Prompt], options: SessionOptions) -> (Vec<Outcome>, SessionStats) {
        self.engine.run(prompts, options).unwrap()
    }

    /// The nine prompts up to 254 tokens.
    fn short(&mut self, setup: Setup) {
        self.compare(0..9, setup);
    }

    /// Leading tokens of an answer that must be equal, [`most_tokens`](Self::most_tokens) at most.
    fn due(&self, prompt: usize, kv: KvType) -> Vec<TokenId> {
        self.golden.first(prompt, kv, self.most_tokens)
    }

    fn compare(&mut self, indices: std::ops::Range<usize>, setup: Setup) {
        let prompts: Vec<Prompt> =
            indices.map(|index| self.prompt(index, self.due(index, setup.kv).len())).collect();
        // The pool holds at least what the prompts need side by side.
        let needed: u32 = prompts
            .iter()
            .map(|prompt| (prompt.tokens.len() as u32 + prompt.max_new_tokens).div_ceil(setup.block_size))
            .sum();
        let options = self.options(Setup { num_blocks: setup.num_blocks.max(needed), ..setup }, 8);
        let outcomes = if setup.alone {
            prompts
                .iter()
                .flat_map(|prompt| self.run(std::slice::from_ref(prompt), options.clone()).0)
                .collect()
        } else {
            self.run(&prompts, options).0
        };
        self.check(&outcomes, setup.kv);
    }

    /// Equal tokens where they are due, and at the first four positions equal logits up to 0.01 with an f32 cache.
    fn check(&self, outcomes: &[Outcome], kv: KvType) {
        for outcome in outcomes {
            let index = outcome.prompt as usize;
            let expected = self.due(index, kv);
            assert_eq!(outcome.tokens[..expected.len()], expected, "tokens of prompt {index}, {kv} cache");
            if kv != KvType::F32 {
                continue;
            }
            let logits = self.golden.prompts[index]["logits_f32"].as_array().unwrap();
            // A position's logits are comparable while the tokens before it are equal.
            for (position, golden) in
                logits.iter().enumerate().take(expected.len().min(outcome.top_logits.len()))
            {
                let ours = &outcome.top_logits[position];
                for pair in golden["top5"].as_array().unwrap() {
                    let (id, logit) = (pair[0].as_u64().unwrap() as u32, pair[1].as_f64().unwrap());
                    let found = ours.top.iter().find(|(token, _)| *token == id);
                    let found =
                        f64::from(found.unwrap_or_else(|| panic!("token {id} is not among the best")).1);
                    assert!(
                        abs_diff_eq!(found, logit, epsilon = 0.01),
                        "logit of {id} at {position} of {index}: {found}, {logit}"
                    );
                }
                for (name, value) in [("logsumexp", ours.logsumexp), ("mean", ours.mean)] {
                    let golden = golden[name].as_f64().unwrap();
                    assert!(
                        abs_diff_eq!(value, golden, epsilon = 0.01),
                        "{name} at {position} of {index}: {value}, {golden}"
                    );
                }
            }
        }
    }

    /// A pool that does not hold the prompts side by side: sequences are preempted, one while its prompt is read.
    fn preempted(&mut self) {
        // Long prompts come after short ones: as those grow, one makes room while it is read, and others while they
        // answer.
        let order = [1, 2, 3, 6, 5, 8, 4, 0];
        let answer = |golden: &Golden, index| golden.first(index, KvType::F32, FIRST_TOKENS);
        let prompts: Vec<Prompt> =
            order.iter().map(|&index| self.prompt(index, answer(&self.golden, index).len())).collect();
        let options = self.options(Setup { num_blocks: 15, step_tokens: 16, ..BASE }, 0);
        let mut session = self.engine.session(options).unwrap();
        let requests: Vec<_> = prompts.iter().map(|prompt| session.add(prompt).unwrap()).collect();
        let mut computed = vec![0; prompts.len()];
        let mut in_mid_prompt = 0;
        let mut tokens = vec![Vec::new(); self.golden.prompts.len()];
        let mut victims = 0;
        let mut events = Vec::new();
        while session.step(&mut events).unwrap() {
            for event in events.drain(..) {
                match event {
                    Event::Token { prompt, token, .. } => tokens[prompt as usize].push(token),
                    Event::Finished { preemptions, .. } => victims += u32::from(preemptions > 0),
                    Event::Preempted { .. } => {}
                }
            }
            for (place, &request) in requests.iter().enumerate() {
                let now = session.scheduler().computed_tokens(request).unwrap_or(computed[place]);
                let within_prompt = (computed[place] as usize) < prompts[place].tokens.len();
                in_mid_prompt += u32::from(now < computed[place] && within_prompt);
                computed[place] = now;
            }
        }
        let preemptions = session.stats().scheduler.preemptions;
        for &index in &order {
            assert_eq!(
                tokens[index],
                answer(&self.golden, index),
                "tokens of prompt {index} with preemptions"
            );
        }
        assert!(preemptions >= 3, "{preemptions} preemptions");
        assert!(victims >= 2, "{victims} different victims");
        assert!(in_mid_prompt >= 1, "nobody was preempted while its prompt was read");
    }

    /// Three prompts, four times each, in a pool that soon is full: at least ten sequences are preempted, each of which
    /// has computed a block of generated tokens or more.
    fn under_pressure(&mut self, pressure: Pressure) {
        const BLOCK: u32 = 8;
        let prompts: Vec<Prompt> = [1, 3, 2]
            .repeat(4)
            .into_iter()
            .zip(0..)
            .map(|(golden, index)| {
                let len = self.golden.expected(golden, KvType::F32).len();
                Prompt { index, ..self.prompt(golden, len) }
            })
            .collect();
        let setup = Setup { block_size: BLOCK, num_blocks: pressure.num_blocks, ..BASE };
        let mut options = self.options(setup, 0);
        options.cache = options.cache.with_host_blocks(64).unwrap();
        options.scheduler.preemption = pressure.preemption;
        options.scheduler.victims = pressure.victims;
        options.scheduler.prefix_cache = pressure.prefix_cache.then(PrefixCacheConfig::default);
        // Blocks out and back take as long as 6.8 tokens a block: a sequence whose last block is nearly empty recomputes.
        let swap_bytes_per_s = 2.0 * options.cache.bytes_per_block() as f64;
        options.rates = Some(Rates { swap_bytes_per_s, prefill_tokens_per_s: 6.8 });
        let mut session = self.engine.session(options).unwrap();
        for prompt in &prompts {
            session.add(prompt).unwrap();
        }
        let mut tokens = vec![Vec::new(); prompts.len()];
        let (mut swapped, mut recomputed, mut victims) = (0, 0, 0);
        let mut events = Vec::new();
        while session.step(&mut events).unwrap() {
            session.scheduler().assert_consistent();
            for event in events.drain(..) {
                match event {
                    Event::Token { prompt, token, .. } => tokens[prompt as usize].push(token),
                    Event::Finished { preemptions, .. } => victims += u32::from(preemptions > 0),
                    Event::Preempted { prompt, how, .. } => {
                        // The last one is not computed yet.
                        let lost = tokens[prompt as usize].len() as u32 - 1;
                        assert!(lost >= BLOCK, "{prompt} loses {lost} generated tokens");
                        match how {
                            Preemption::Swapped { .. } => swapped += 1,
                            _ => recomputed += 1,
                        }
                    }
                }
            }
        }
        let stats = session.stats();
        let scheduler = stats.scheduler;
        println!(
            "golden: {swapped} swapped, {recomputed} recomputed, {victims} victims, {} tokens recomputed, {} found, \
             {} bytes moved, {} steps",
            scheduler.recomputed_tokens, scheduler.prefix_hit_tokens, stats.swap_bytes, scheduler.steps
        );
        for (place, found) in tokens.iter().enumerate() {
            let expected = self.golden.expected([1, 3, 2][place % 3], KvType::F32);
            assert_eq!(found, &expected, "tokens of sequence {place}, preempted");
        }
        let wanted = match pressure.preemption {
            PreemptionMode::Swap => (10, 0),
            PreemptionMode::Recompute => (0, 10),
            PreemptionMode::Auto => (4, 4),
        };
        assert!(swapped >= wanted.0 && recomputed >= wanted.1, "{swapped} swapped, {recomputed} recomputed");
        assert!(swapped + recomputed >= 10 && victims >= 3);
        assert_eq!(swapped + recomputed, scheduler.preemptions);
        // What a sequence in line still shares may leave later than the rest, and return with a sequence that shares
        // it.
        assert!(scheduler.swaps_out >= swapped && (scheduler.swaps_in > 0) == (swapped > 0));
        assert_eq!(stats.swap_bytes > 0, swapped > 0);
        let (left, returned) = (scheduler.cache.blocks_swapped_out, scheduler.cache.blocks_swapped_in);
        // What the prefix cache has need not return.
        assert!(
            returned == left || (pressure.prefix_cache && returned < left),
            "{returned} of {left} returned"
        );
        assert_eq!(scheduler.recomputed_tokens > 0, recomputed > 0);
        assert_eq!(scheduler.prefix_hit_tokens > 0, pressure.prefix_cache);
    }

    /// Prompts of which two begin alike, twice each, all at once: what another one has computed is not computed again.
    fn prefix_cache(&mut self) {
        const BLOCK: u32 = 8;
        let golden = [5, 6, 8, 5, 6, 8];
        let mut options = self.options(Setup { block_size: BLOCK, ..BASE }, 0);
        options.scheduler.prefix_cache = Some(PrefixCacheConfig::default());
        let prompts: Vec<Prompt> = golden
            .into_iter()
            .zip(0..)
            .map(|(golden, index)| Prompt { index, ..self.prompt(golden, 16) })
            .collect();
        let (outcomes, stats) = self.run(&prompts, options);
        for (outcome, golden) in outcomes.iter().zip(golden) {
            assert_eq!(outcome.tokens, self.golden.expected(golden, KvType::F32)[..16], "prompt {golden}");
        }
        let len = |prompt: &Prompt| prompt.tokens.len() as u64;
        let second: u64 = prompts[3..].iter().map(|prompt| (len(prompt) - 1) / 8 * 8).sum();
        let alike = common(&prompts[0], &prompts[1]) / 8 * 8;
        assert!(alike > 0);
        let found = stats.scheduler.prefix_hit_tokens;
        assert!(found >= second + alike, "{found} tokens found, {second} and {alike} expected");
        assert_eq!(stats.scheduler.prompt_tokens + found, prompts.iter().map(len).sum::<u64>());
    }

    /// Two prompts of 660 tokens with one system prompt: it is computed once and held once.
    fn shared_system_prompt(&mut self) {
        let mut options = self.options(BASE, 0);
        options.scheduler.prefix_cache = Some(PrefixCacheConfig::default());
        let prompts = [9, 10].map(|index| self.prompt(index, self.due(index, KvType::F32).len()));
        let (outcomes, stats) = self.run(&prompts, options);
        self.check(&outcomes, KvType::F32);
        let alike = common(&prompts[0], &prompts[1]);
        let new_tokens = u64::from(prompts[0].max_new_tokens);
        let lens = prompts.map(|prompt| prompt.tokens.len() as u64);
        assert!(alike > 600);
        assert_eq!(stats.scheduler.prefix_hit_tokens, alike, "rows of a partly equal block are found, too");
        assert_eq!(stats.scheduler.prompt_tokens, lens[0] + lens[1] - alike);
        let blocks = lens.map(|len| (len + new_tokens - 1).div_ceil(16));
        let held = u64::from(stats.scheduler.cache.held_blocks_peak);
        assert_eq!(held, blocks[0] + blocks[1] - alike / 16);
    }

    /// Samples at temperature 0 are equal, share their prompt's full blocks, and copy its partial one.
    fn greedy_samples(&mut self) {
        // 34 and 54 tokens: two and six more than a whole number of blocks.
        for index in [5, 8] {
            let expected = self.due(index, KvType::F32);
            let prompt = Prompt { samples: 4, ..self.prompt(index, expected.len()) };
            let (outcomes, stats) = self.run(std::slice::from_ref(&prompt), self.options(BASE, 0));
            assert_eq!(outcomes.len(), 4);
            for outcome in &outcomes {
                assert_eq!(outcome.tokens, expected, "sample {} of prompt {index}", outcome.sample);
            }
            let (length, new) = (prompt.tokens.len() as u32, prompt.max_new_tokens);
            let full = length / 16;
            let cache = stats.scheduler.cache;
            assert_eq!(cache.held_blocks_peak, full + 4 * ((length + new - 1).div_ceil(16) - full));
            assert_eq!(cache.block_copies, if length % 16 == 0 { 0 } else { 3 });
        }
    }

    /// A sample at temperature 0.8 is the same among others and alone.
    fn warm_samples(&mut self) {
        let mut options = self.options(BASE, 0);
        options.sampler = Sampler { temperature: 0.8, seed: 7 };
        let prompt = Prompt { samples: 4, ..self.prompt(1, 24) };
        let (together, _) = self.run(std::slice::from_ref(&prompt), options.clone());
        assert_eq!(together.len(), 4);
        let distinct: std::collections::HashSet<_> = together.iter().map(|outcome| &outcome.tokens).collect();
        assert!(distinct.len() > 1, "samples at 0.8 are all equal");
        for outcome in &together {
            let prompt = Prompt { samples: 1, first_sample: outcome.sample, ..prompt.clone() };
            let (alone, _) = self.run(&[prompt], options.clone());
            assert_eq!(alone[0].tokens, outcome.tokens, "sample {} alone", outcome.sample);
        }
    }
}

/// Leading tokens that two prompts have in common.
fn common(first: &Prompt, second: &Prompt) -> u64 {
    first.tokens.iter().zip(&second.tokens).take_while(|(first, second)| first == second).count() as u64
}
