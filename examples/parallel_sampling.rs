//! Many answers to one prompt: it is computed once, and its blocks are held once.
//!
//! ```sh
//! cargo run --release --example parallel_sampling
//! ```
//!
//! The scheduler lets the samples of a request part after the prompt. Full blocks of the prompt stay shared to the end; a
//! partly filled last one is copied by each sample but the last before it writes its first token.

use std::error::Error;

use example_engine::{
    attention::shape_of,
    engine::Engine,
    gguf::GgufFile,
    gpu::{Adapters, Gpu},
    sample::{SampleKey, Sampler},
    tokenizer::Tokenizer,
};
use paged_kv::{CacheConfig, KvType, Request, RowResult, Scheduler, SchedulerConfig, StepEvent};

const SAMPLES: u32 = 8;
const NEW_TOKENS: u32 = 40;
const PROMPT: &str = "And it came to pass in those days, when the king had spoken unto all the people, that";

fn main() -> Result<(), Box<dyn Error>> {
    let mut file = GgufFile::from_bytes("the toy model", include_bytes!("toy/toy.gguf"))?;
    let tokenizer = Tokenizer::read(&file)?;
    let gpu = Adapters::find(None).best().map(Gpu::open).transpose()?;
    println!("computing on {}", gpu.as_ref().map_or("the CPU", |gpu| &gpu.label));
    let mut engine = Engine::load(&mut file, gpu, &mut |_| ())?;

    let prompt = tokenizer.encode(PROMPT, true)?;
    let prompt_len = prompt.len() as u32;
    let most_tokens = prompt_len + NEW_TOKENS;
    let shape = shape_of(engine.config());
    let cache = CacheConfig::for_context(most_tokens, SAMPLES, &shape, KvType::F16)?;
    let mut scheduler = Scheduler::new(SchedulerConfig::default(), cache.clone())?;
    let mut pool = engine.pool(cache, SchedulerConfig::default().step_tokens, SAMPLES)?;
    let sampler = Sampler { temperature: 0.9, seed: 3 };

    scheduler.add(Request::new(prompt).max_new_tokens(NEW_TOKENS).samples(SAMPLES))?;
    let mut answers = vec![Vec::new(); SAMPLES as usize];
    let mut rows = 0;
    // Where the scheduler waits for blocks to arrive in main memory, it is asked again; see `Pool::next_step`.
    while let Some(plan) = pool.next_step(&mut scheduler)? {
        rows += plan.num_rows();
        let mut results = vec![RowResult::Invalid; plan.logit_rows().len()];
        pool.step(&plan, |entry, logits| {
            let row = &plan.logit_rows()[entry];
            let key = SampleKey { prompt: 0, sample: row.sequence.sample(), position: row.next_position };
            if let Some(token) = sampler.choose(logits, key) {
                results[entry] = RowResult::Token(token);
            }
        })?;
        for event in scheduler.commit(plan, &results)? {
            if let StepEvent::Token { sequence, token } = event {
                answers[sequence.sample() as usize].push(*token);
            }
        }
    }

    println!("{PROMPT} …");
    for answer in &answers {
        println!("  …{}", tokenizer.decode(answer).escape_debug());
    }
    let stats = scheduler.stats().cache;
    // The last token of each answer is not in the cache.
    let apart = SAMPLES * scheduler.cache().config().layout().blocks_for(most_tokens - 1);
    println!(
        "{SAMPLES} answers: {rows} tokens computed, apart it would be {}; {} blocks of {} held, apart it would be {apart}; \
         {} copied on write",
        SAMPLES * (most_tokens - 1),
        stats.held_blocks_peak,
        scheduler.cache().config().block_size(),
        stats.block_copies,
    );
    Ok(())
}
