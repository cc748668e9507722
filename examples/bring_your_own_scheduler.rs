//! Beam search, with a scheduler of its own: `KvCache` knows who holds which block, `StepBuilder` makes the plans.
//!
//! ```sh
//! cargo run --release --example bring_your_own_scheduler
//! ```
//!
//! The four most likely texts are kept at any time. After each step, a text that has two good next tokens is forked,
//! which copies nothing: both hold its blocks, and only a shared last block is copied when one of them writes into it. A
//! text that has none is released, and its blocks return as far as no other text holds them.

use std::error::Error;

use example_engine::{
    attention::shape_of,
    engine::Engine,
    gguf::GgufFile,
    gpu::{Adapters, Gpu},
    pool::Pool,
    sample::TopLogits,
    tokenizer::Tokenizer,
};
use paged_kv::{CacheConfig, KvCache, KvType, RequestId, StepBuilder, TableId, TokenId};

/// Texts that are kept.
const WIDTH: usize = 4;
/// Tokens of each, without the prompt.
const LENGTH: usize = 60;
const PROMPT: &str = "And the king";

/// A text, and the table of its blocks.
struct Beam {
    table: TableId,
    /// The last ones are not in the cache yet: all of the prompt at first, one token from then on.
    tokens: Vec<TokenId>,
    /// Logarithm of its probability.
    score: f64,
}

/// What a text may go on with.
struct Candidate {
    /// Which text.
    parent: usize,
    token: TokenId,
    /// Logarithm of the probability of both.
    score: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut file = GgufFile::from_bytes("the toy model", include_bytes!("toy/toy.gguf"))?;
    let tokenizer = Tokenizer::read(&file)?;
    let gpu = Adapters::find(None).best().map(Gpu::open).transpose()?;
    println!("computing on {}", gpu.as_ref().map_or("the CPU", |gpu| &gpu.label));
    let mut engine = Engine::load(&mut file, gpu, &mut |_| ())?;

    let prompt = tokenizer.encode(PROMPT, true)?;
    let most_tokens = (prompt.len() + LENGTH) as u32;
    // Until the old texts are released, there are twice as many tables.
    let config =
        CacheConfig::for_context(most_tokens, 2 * WIDTH as u32, &shape_of(engine.config()), KvType::F16)?;
    let mut cache = KvCache::new(config.clone());
    let mut pool = engine.pool(config, prompt.len().max(WIDTH) as u32, WIDTH as u32)?;

    let start = prompt.len();
    let mut beams = vec![Beam { table: cache.create(most_tokens)?, tokens: prompt, score: 0.0 }];
    for _ in 0..LENGTH {
        let candidates = compute(&mut cache, &mut pool, &beams)?;
        beams = choose(&mut cache, beams, candidates, most_tokens)?;
    }

    for beam in &beams {
        println!("{:7.2}  {PROMPT}{}", beam.score, tokenizer.decode(&beam.tokens[start..]).escape_debug());
    }
    let stats = cache.stats();
    // The last token of each text is not in the cache.
    let apart = WIDTH as u32 * cache.config().layout().blocks_for(most_tokens - 1);
    println!(
        "{WIDTH} texts of {most_tokens} tokens hold {} blocks of {}, {} of them shared; apart they would hold {apart}. \
         {} blocks were copied on write.",
        stats.held_blocks,
        cache.config().block_size(),
        stats.shared_blocks,
        stats.block_copies
    );
    Ok(())
}

/// One step: the tokens of all texts that are not in the cache yet. Returns what each may go on with.
fn compute(
    cache: &mut KvCache,
    pool: &mut Pool<'_>,
    beams: &[Beam],
) -> Result<Vec<Candidate>, Box<dyn Error>> {
    let mut builder = StepBuilder::new(cache);
    for (beam, id) in beams.iter().zip(0..) {
        let computed = builder.cache().len(beam.table)? as usize;
        let rows = builder.push(beam.table, &beam.tokens[computed..])?;
        builder.request_logits(RequestId::from_raw(id).sample(0), rows.end - 1, 1)?;
    }
    let plan = builder.finish();
    let mut candidates = Vec::new();
    pool.step(&plan, |parent, logits| {
        let best = TopLogits::of(logits, WIDTH);
        candidates.extend(best.top.iter().map(|&(token, logit)| {
            let score = beams[parent].score + f64::from(logit) - best.logsumexp;
            Candidate { parent, token, score }
        }));
    })?;
    // A plan that is dropped instead is rolled back when the next one is begun.
    cache.commit_step(plan)?;
    Ok(candidates)
}

/// The most likely of all texts that are one token longer.
fn choose(
    cache: &mut KvCache,
    beams: Vec<Beam>,
    mut candidates: Vec<Candidate>,
    most_tokens: u32,
) -> Result<Vec<Beam>, Box<dyn Error>> {
    candidates.sort_by(|one, other| other.score.total_cmp(&one.score));
    candidates.truncate(WIDTH);

    // The first heir of a text takes its table, the others share it.
    let mut has_heir = vec![false; beams.len()];
    let mut chosen = Vec::new();
    for Candidate { parent, token, score } in candidates {
        let Beam { table, tokens, .. } = &beams[parent];
        let table = match std::mem::replace(&mut has_heir[parent], true) {
            true => cache.fork(*table, tokens.len() as u32, most_tokens)?,
            false => *table,
        };
        let tokens = tokens.iter().copied().chain([token]).collect();
        chosen.push(Beam { table, tokens, score });
    }
    for (beam, _) in beams.iter().zip(has_heir).filter(|(_, has_heir)| !has_heir) {
        cache.release(beam.table)?;
    }
    Ok(chosen)
}
