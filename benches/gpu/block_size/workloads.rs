//! What a block size costs the host and the pool, by planning real steps: no device takes part.

use std::time::Instant;

use measure::Failure;
use measure::pairs::median;
use paged_kv::{CacheConfig, KvCache, KvType, ModelShape, StepBuilder, TableId};

/// How sequences come to share blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Workload {
    /// Every sequence has a prompt of its own.
    NoBranches,
    /// Four samples of each prompt, which part at the first token.
    FourSamples,
    /// Four branches of each prompt; every eight tokens one is dropped for a fork of another.
    Diverging,
}

impl Workload {
    pub(crate) const ALL: [Self; 3] = [Self::NoBranches, Self::FourSamples, Self::Diverging];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::NoBranches => "no branches",
            Self::FourSamples => "four samples",
            Self::Diverging => "diverging",
        }
    }
}

/// What a workload came to at one block size.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    /// Tokens generated.
    pub(crate) tokens: u64,
    /// Blocks copied because a shared one was written.
    pub(crate) copies: u64,
    /// Bytes of table entries over bytes of keys and values that the kernels read, summed over the steps: every kv head
    /// of every layer looks its blocks up.
    pub(crate) table_share: f64,
    /// Bytes that copies read and write, over the same.
    pub(crate) copy_share: f64,
    /// Bytes of the pool that hold no token, of those that are held; mean over the steps.
    pub(crate) waste: f64,
    /// Most bytes of blocks held at once.
    pub(crate) peak_bytes: u64,
    /// Seconds of planning and committing per generated token, in the median step.
    pub(crate) host_seconds: f64,
}

/// Prompts, and what is generated per branch.
const PROMPTS: u32 = 4;
const ANSWER: u32 = 256;
/// Tokens between two forks.
const FORK_EVERY: u32 = 8;

/// Lengths of prompts: about a thousand tokens, ending anywhere within a block.
fn prompt_len(prompt: u32) -> u32 {
    700 + prompt * 211
}

pub(crate) fn run(workload: Workload, block_size: u32, shape: &ModelShape) -> Result<Outcome, Failure> {
    let branches = if workload == Workload::NoBranches { 1 } else { 4 };
    let longest = prompt_len(PROMPTS) + ANSWER;
    let config = CacheConfig::for_context(longest, PROMPTS * (branches + 1), shape, KvType::F16)?
        .with_block_size(block_size)?;
    let mut kv = KvCache::new(config.clone());
    let mut families: Vec<Vec<TableId>> = Vec::new();
    for prompt in 0..PROMPTS {
        let table = kv.create(longest)?;
        let mut builder = StepBuilder::new(&mut kv);
        builder.push(table, &vec![0; prompt_len(prompt) as usize])?;
        let plan = builder.finish();
        kv.commit_step(plan)?;
        let mut family = vec![table];
        for _ in 1..branches {
            family.push(kv.fork(table, prompt_len(prompt), longest)?);
        }
        families.push(family);
    }
    let mut outcome = Outcome::default();
    let mut host = Vec::new();
    let (mut table_bytes, mut kv_bytes, mut waste) = (0.0, 0.0, 0.0);
    for token in 0..ANSWER {
        let start = Instant::now();
        if workload == Workload::Diverging && token > 0 && token % FORK_EVERY == 0 {
            for family in &mut families {
                let chosen = (token / FORK_EVERY) as usize % family.len();
                let dropped = (chosen + 1) % family.len();
                let len = kv.len(family[chosen])?;
                kv.release(family[dropped])?;
                family[dropped] = kv.fork(family[chosen], len, longest)?;
            }
        }
        let mut builder = StepBuilder::new(&mut kv);
        for &table in families.iter().flatten() {
            builder.push(table, &[0])?;
        }
        let plan = builder.finish();
        outcome.copies += plan.block_copies().len() as u64;
        outcome.tokens += u64::from(plan.num_rows());
        kv.commit_step(plan)?;
        host.push(start.elapsed().as_secs_f64());
        for &table in families.iter().flatten() {
            let lookups = f64::from(shape.num_layers() * shape.num_kv_heads());
            table_bytes += 4.0 * lookups * kv.block_ids(table)?.len() as f64;
            kv_bytes += config.bytes_per_token() as f64 * f64::from(kv.len(table)?);
        }
        waste += wasted_share(&kv, &families)?;
        let held = u64::from(kv.stats().held_blocks) * config.bytes_per_block();
        outcome.peak_bytes = outcome.peak_bytes.max(held);
    }
    outcome.table_share = table_bytes / kv_bytes;
    outcome.waste = waste / f64::from(ANSWER);
    outcome.copy_share = 2.0 * (outcome.copies * config.bytes_per_block()) as f64 / kv_bytes;
    outcome.host_seconds = median(host) / f64::from(PROMPTS * branches);
    Ok(outcome)
}

/// Slots of held blocks that no holder has filled, over all slots of held blocks.
fn wasted_share(kv: &KvCache, families: &[Vec<TableId>]) -> Result<f64, Failure> {
    let block_size = kv.config().block_size();
    let mut filled = std::collections::HashMap::new();
    for &table in families.iter().flatten() {
        let mut left = kv.len(table)?;
        for block in kv.block_ids(table)? {
            let tokens = left.min(block_size);
            let most = filled.entry(block.index()).or_insert(0);
            *most = tokens.max(*most);
            left -= tokens;
        }
    }
    let used: u32 = filled.values().sum();
    Ok(1.0 - f64::from(used) / (filled.len() as f64 * f64::from(block_size)))
}
