//! Blocks that leave the pool and come back: the logits of a run whose sequences are swapped out equal, bit for bit, those
//! of a run with room for all, with the toy model.
//!
//! A row's bits must not depend on its neighbours for that, since those differ from run to run: attention's cuts are
//! fixed, and the kernels of the products sum each row by itself. On the CPU, candle's products take another path where
//! they are small, and a row among few differs in its last bits from the same row among many. So there a sequence is
//! compared until a step has fewer than [`FEW_ROWS`] rows, and three others that run longest keep them company.
//!
//! And a device that is lost: the text of a run that goes on with another one is that of a run without the loss.
//!
//! `PAGED_KV_REQUIRE_ADAPTERS`: adapters without which the tests fail.
#![allow(clippy::unwrap_used)]

use example_engine::attention::shape_of;
use example_engine::engine::{Engine, Event, Prompt, Session, SessionOptions, SessionStats};
use example_engine::error::RunError;
use example_engine::gguf::GgufFile;
use example_engine::gpu::{Adapters, Gpu};
use example_engine::pool::Pool;
use example_engine::sample::{Sampler, TopLogits};
use paged_kv::{
    Admission, CacheConfig, KvType, PreemptionMode, PrepareError, Priority, Request, RowResult, Schedule,
    Scheduler, SchedulerConfig, StepPlan, VictimPolicy, WaitReason,
};

const VOCAB: usize = 257;
const BLOCK: u32 = 8;
const NEW: u32 = 64;
/// Prompts at the beginning that run longest, and are not compared.
const COMPANY: usize = 3;
/// Tokens of each of them.
const COMPANY_NEW: u32 = 96;
/// Rows of a step below which the CPU's products may be others.
const FEW_ROWS: usize = 4;
const PROMPTS: [&str; 7] = [
    "In the beginning God created",
    "And it came to pass",
    "The LORD is my",
    "Blessed are",
    "Now therefore hear",
    "And the king said",
    "Who art thou",
];

fn toy() -> GgufFile {
    GgufFile::from_bytes("the toy model", include_bytes!("../toy/toy.gguf")).unwrap()
}

/// Runs `test` on lavapipe. Where there is none this says so, and fails if it is required.
fn on_lavapipe(what: &str, test: impl FnOnce(&wgpu::Adapter)) {
    let required = std::env::var("PAGED_KV_REQUIRE_ADAPTERS").unwrap_or_default();
    match Adapters::find(Some("llvmpipe")).best() {
        Some(adapter) => test(adapter),
        None => {
            assert!(!required.contains("lavapipe"), "the adapter lavapipe is missing, and required");
            println!("{what} on lavapipe: NOT RUN, there is no such adapter");
        }
    }
}

#[test]
fn logits_after_a_swap_are_the_same_bits_on_lavapipe() {
    on_lavapipe("swapped logits", |adapter| compare(Some(Gpu::open(adapter).unwrap())));
}

#[test]
fn the_text_is_the_same_when_the_device_is_lost_in_the_middle_of_it() {
    on_lavapipe("a lost device", |adapter| {
        let undisturbed = texts(adapter, &[]);
        assert!(undisturbed.iter().all(|text| text.len() >= NEW as usize));
        // While prompts are read, with sequences in the host pool, and twice in a row.
        assert_eq!(texts(adapter, &[1, 40, 41]), undisturbed);
    });
}

/// The tokens of every prompt, where the device is lost before these steps.
fn texts(adapter: &wgpu::Adapter, losses: &[usize]) -> Vec<Vec<u32>> {
    let mut file = toy();
    let mut gpu = Gpu::open(adapter).unwrap();
    let mut engine = Engine::load(&mut file, Some(gpu.clone()), &mut |_| ()).unwrap();
    let mut session = session(&mut engine, KvType::F16, 50, VictimPolicy::LowestPriority);
    let mut texts = vec![Vec::new(); PROMPTS.len()];
    let mut events = Vec::new();
    let (mut step, mut swapped) = (0, false);
    loop {
        if losses.contains(&step) {
            swapped |= session.scheduler().stats().cache.host_tokens > 0;
            gpu.device.destroy();
            let error = match session.step(&mut events).unwrap_err() {
                RunError::Attention(error) => error,
                other => panic!("{other}"),
            };
            assert_eq!(error.downcast_ref(), Some(&PrepareError::DeviceLost), "{error}");
            gpu = Gpu::open(adapter).unwrap();
            session.rebuild(&mut file, gpu.clone()).unwrap();
            assert_eq!(session.scheduler().stats().running, 0);
        }
        if !session.step(&mut events).unwrap() {
            break;
        }
        step += 1;
        for event in events.drain(..) {
            if let Event::Token { prompt, token, .. } = event {
                texts[prompt as usize].push(token);
            }
        }
    }
    assert!(losses.is_empty() || swapped, "no device was lost while sequences were in the host pool");
    texts
}

#[test]
fn logits_after_a_swap_are_the_same_bits_on_the_cpu_twins() {
    compare(None);
}

#[test]
fn a_scheduler_that_waits_for_blocks_on_their_way_has_not_ended() {
    let mut file = toy();
    let mut engine = Engine::load(&mut file, None, &mut |_| ()).unwrap();
    let cache = CacheConfig::for_blocks(8, &shape_of(engine.config()), KvType::F32).unwrap();
    let cache = cache.with_block_size(BLOCK).unwrap().with_host_blocks(8).unwrap();
    let config = SchedulerConfig {
        admission: Admission::Overcommitted { watermark_blocks: 0 },
        prefix_cache: None,
        preemption: PreemptionMode::Swap,
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(config, cache.clone()).unwrap();
    for token in [1, 2] {
        scheduler.add(Request::new(vec![token; 3 * BLOCK as usize]).max_new_tokens(3 * BLOCK)).unwrap();
    }
    let compute = |pool: &mut Pool<'_>, scheduler: &mut Scheduler, plan: StepPlan| {
        pool.step(&plan, |_, _| ()).unwrap();
        let results = vec![RowResult::Token(9); plan.logit_rows().len()];
        scheduler.commit(plan, &results).unwrap();
    };
    let mut pool = engine.pool(cache, config.step_tokens, 2).unwrap();
    // What has arrived is not passed on.
    let reason = loop {
        match scheduler.schedule() {
            Schedule::Step(plan) => compute(&mut pool, &mut scheduler, plan),
            Schedule::Waiting(reason) => break reason,
            Schedule::Idle => panic!("nothing was moved out: {:?}", scheduler.stats()),
        }
    };
    assert!(matches!(reason, WaitReason::Transfers { .. }), "{reason:?}");
    while let Some(plan) = pool.next_step(&mut scheduler).unwrap() {
        compute(&mut pool, &mut scheduler, plan);
    }
    let stats = scheduler.stats();
    assert_eq!((stats.generated_tokens, stats.swaps_in), (2 * 3 * u64::from(BLOCK), 1), "{stats:?}");
}

/// What a run made of each prompt.
struct Run {
    logits: Vec<Vec<TopLogits>>,
    /// For each prompt, the first position after its first swap.
    swapped_at: Vec<Option<usize>>,
    /// For each prompt, the first position that was computed in a step of few rows.
    few_rows_at: Vec<Option<usize>>,
    stats: SessionStats,
}

/// All prompts, in a pool of `num_blocks` blocks.
fn session(engine: &mut Engine, kv: KvType, num_blocks: u32, victims: VictimPolicy) -> Session<'_> {
    let cache = CacheConfig::for_blocks(num_blocks, &shape_of(engine.config()), kv).unwrap();
    let cache = cache.with_block_size(BLOCK).unwrap().with_host_blocks(128).unwrap();
    let scheduler = SchedulerConfig {
        // All prompts are read in one step, with room or without.
        step_tokens: 128,
        max_running: Some(8),
        admission: Admission::Overcommitted { watermark_blocks: 0 },
        prefix_cache: None,
        preemption: PreemptionMode::Swap,
        victims,
        ..SchedulerConfig::default()
    };
    let sampler = Sampler { temperature: 0.0, seed: 0 };
    let options = SessionOptions { cache, scheduler, sampler, top_logits: VOCAB, rates: None };
    let mut session = engine.session(options).unwrap();
    for (text, index) in PROMPTS.into_iter().zip(0..) {
        let tokens = text.bytes().map(u32::from).collect();
        let (max_new_tokens, priority) = match index as usize {
            0..COMPANY => (COMPANY_NEW, Priority::Interactive),
            _ => (NEW, Priority::Normal),
        };
        let prompt = Prompt { index, tokens, max_new_tokens, priority, samples: 1, ..Prompt::default() };
        session.add(&prompt).unwrap();
    }
    session
}

fn run(engine: &mut Engine, kv: KvType, num_blocks: u32, victims: VictimPolicy) -> Run {
    let mut session = session(engine, kv, num_blocks, victims);
    let mut logits = vec![Vec::new(); PROMPTS.len()];
    let mut swapped_at = vec![None; PROMPTS.len()];
    let mut few_rows_at = vec![None; PROMPTS.len()];
    let mut events = Vec::new();
    while session.step(&mut events).unwrap() {
        let rows = events.iter().filter(|event| matches!(event, Event::Token { .. })).count();
        for event in events.drain(..) {
            let prompt = event.subject().0 as usize;
            match event {
                Event::Token { top_logits, .. } => {
                    if rows < FEW_ROWS {
                        few_rows_at[prompt].get_or_insert(logits[prompt].len());
                    }
                    logits[prompt].extend(top_logits);
                }
                Event::Preempted { .. } => {
                    swapped_at[prompt].get_or_insert(logits[prompt].len());
                }
                Event::Finished { .. } => {}
            }
        }
    }
    Run { logits, swapped_at, few_rows_at, stats: session.stats() }
}

fn compare(gpu: Option<Gpu>) {
    let label = gpu.as_ref().map_or_else(|| "CPU twins".to_owned(), |gpu| gpu.label.clone());
    println!("adapter: {label} (swapped logits)");
    let few_rows_differ = gpu.is_none();
    let mut file = toy();
    let mut engine = Engine::load(&mut file, gpu, &mut |_| ()).unwrap();
    for kv in [KvType::F32, KvType::F16] {
        let room = run(&mut engine, kv, 128, VictimPolicy::LowestPriority);
        assert_eq!(room.stats.scheduler.preemptions, 0);
        for victims in [VictimPolicy::LowestPriority, VictimPolicy::LeastLost, VictimPolicy::Requester] {
            let swapped = run(&mut engine, kv, 50, victims);
            let scheduler = swapped.stats.scheduler;
            assert!(scheduler.swaps_out >= 3, "{} swaps", scheduler.swaps_out);
            assert_eq!((scheduler.swaps_out, scheduler.recomputed_tokens), (scheduler.preemptions, 0));
            let mut after_a_swap = 0;
            for prompt in COMPANY..PROMPTS.len() {
                let few = [&room, &swapped].map(|run| run.few_rows_at[prompt].filter(|_| few_rows_differ));
                let end = few.into_iter().flatten().min().unwrap_or(NEW as usize);
                assert_eq!(swapped.logits[prompt].len(), NEW as usize);
                for position in 0..end {
                    let [found, expected] = [&swapped, &room].map(|run| bits(&run.logits[prompt][position]));
                    assert_eq!(found, expected, "{label}, {kv} cache, {victims:?}: {prompt} at {position}");
                }
                after_a_swap += swapped.swapped_at[prompt].map_or(0, |swap| end.saturating_sub(swap));
            }
            println!(
                "{label}, {kv} cache, {victims:?}: {after_a_swap} rows after {} swaps",
                scheduler.swaps_out
            );
            assert!(after_a_swap >= 20, "only {after_a_swap} rows after a swap were compared");
        }
    }
}

fn bits(logits: &TopLogits) -> Vec<(u32, u32)> {
    logits.top.iter().map(|&(token, logit)| (token, logit.to_bits())).collect()
}
