//! A day of chat traffic, served by one pool laid out in different ways: extents, blocks, and blocks shared
//! through the prefix cache.
//!
//! ```text
//! cargo run --release --example traffic
//! cargo run --release --example traffic -- --hours 4 --blocks 1024 --json
//! ```
//!
//! There is no model and no device: a step takes its time and brings the tokens that the traffic says. What is real is
//! everything that decides who gets memory: the scheduler for the paged pool, and a first-fit allocator for the others.

mod arrivals;
mod chart;
mod contiguous;
mod extents;
mod generator;
mod ledger;
mod measure;
mod paging;
mod parameters;
mod report;
mod serve;
mod systems;

use std::{error::Error, path::PathBuf, process::ExitCode};

use clap::Parser;
use paged_kv::{CacheConfig, KvType, ModelShape};

use generator::Traffic;
use parameters::{CONTEXT, MAX_ANSWERS, MAX_SEQUENCES, POOL_TOKENS};

/// The model that the pool is for, Llama 3 8B: it gives the bytes their size, and nothing else.
const SHAPE: ModelShape = ModelShape::new(32, 32, 8, 128);

/// Serves a day of made-up chat traffic from one pool of keys and values, laid out in extents, in blocks, and in shared blocks.
#[derive(Debug, Parser)]
#[command(name = "traffic")]
struct Options {
    /// Another day: the same parameters, drawn anew.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// How much of the day, around its busiest hour.
    #[arg(long, value_name = "H", default_value_t = 24.0, value_parser = hours)]
    hours: f64,

    /// Blocks in the pool; as many as hold 32,768 tokens unless given.
    #[arg(long, value_name = "N")]
    blocks: Option<u32>,

    /// Tokens per block: a power of two.
    #[arg(long, value_name = "P", default_value_t = paged_kv::DEFAULT_BLOCK_SIZE)]
    block_size: u32,

    /// Where the picture of the pool over the day is written.
    #[arg(long, value_name = "FILE", default_value = "target/traffic.svg")]
    svg: PathBuf,

    /// Print one JSON object per layout and policy instead of the tables.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("traffic: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let cache = pool(options)?;
    let traffic = Traffic::generate(options.seed, options.hours);
    if !options.json {
        println!("{}\n", report::stated(options.seed, options.hours, &traffic, &cache));
    }
    let systems = systems::all(&cache);
    let with_documents = Traffic::generate(options.seed, options.hours).with_documents(options.seed);
    let records = systems::serve_all(&traffic, &with_documents, &cache, &systems)?;
    if options.json {
        report::print_json(&systems, &records);
    } else {
        println!("{}", report::tables(&systems, &records, cache.expected_waste_tokens()));
    }
    chart::draw(&options.svg, options.hours, &systems, &records)?;
    if !options.json {
        println!("\nthe pool over the day: {}", options.svg.display());
    }
    Ok(())
}

fn pool(options: &Options) -> Result<CacheConfig, Box<dyn Error>> {
    let blocks = options.blocks.unwrap_or(POOL_TOKENS / options.block_size.max(1));
    let cache = CacheConfig::for_blocks(blocks, &SHAPE, KvType::F16)?
        .with_block_size(options.block_size)?
        .with_max_sequences(MAX_SEQUENCES)?
        .with_max_sequence_tokens(CONTEXT)?;
    let (tokens, needed) =
        (u64::from(blocks) * u64::from(options.block_size), u64::from(CONTEXT * MAX_ANSWERS));
    if tokens < needed {
        return Err(format!("the largest request may need {needed} tokens, and the pool has {tokens}").into());
    }
    Ok(cache)
}

fn hours(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(hours) if (0.1..=24.0).contains(&hours) => Ok(hours),
        _ => Err("from 0.1 to 24 hours".to_owned()),
    }
}
