//! How large a block should be.
//!
//! ```text
//! cargo bench --bench block_size -- [--adapter NAME] [--quick]
//! ```
//!
//! The trade: small blocks cost table entries, look-ups and decisions; large ones leave more of their last block unused,
//! and a branch that writes into a shared block copies more. The bench puts numbers to each, for blocks of 8 to 4,096
//! tokens under three workloads, and compares where keys and values lie within a block.

mod device;
mod workloads;

use clap::Parser;
use measure::Failure;
use measure::cache::{BenchCache, placement_ratio};
use measure::gpu::Gpu;
use measure::stream::stream_rates;
use measure::twins::Placement;
use paged_kv::ModelShape;
use workloads::Workload;

#[derive(Parser)]
#[command(about = "Weighs block sizes from 8 to 4,096 tokens against each other.")]
struct Options {
    /// Take the adapter whose name contains this.
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
    /// Every third block size.
    #[arg(long)]
    quick: bool,
    /// What cargo passes.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A model of eight billion parameters: 128 KiB per token in f16.
const SHAPE: ModelShape = ModelShape::new(32, 32, 8, 128);

fn main() -> Result<(), Failure> {
    let options = Options::parse();
    let sizes: Vec<u32> =
        (3..=12).step_by(if options.quick { 3 } else { 1 }).map(|shift| 1 << shift).collect();
    println!("32 layers, 32/8 heads of 128, f16: 128 KiB per token. A copy is one block, all layers.\n");
    for workload in Workload::ALL {
        host_table(workload, &sizes)?;
    }
    let gpu = Gpu::open(options.adapter.as_deref())?;
    println!("{}", gpu.name);
    let rates = stream_rates(&gpu)?;
    println!(
        "timed by {}; stream read {:.2} GB/s, copy {:.2} GB/s\n",
        gpu.clock(),
        rates.read / 1e9,
        rates.copy / 1e9
    );
    let sequence = device::case(&gpu, 16).sequences[0];
    println!("decode over {} tokens, one layer, 32/8 heads of 128, f16", sequence.context);
    println!(
        "{:>6} {:>12} {:>8} {:>11} {:>14} {:>12}",
        "P", "gather GB/s", "stream", "/contiguous", "4 copies, KiB", "copies, us"
    );
    let mut twin = BenchCache::new(&gpu, device::case(&gpu, 16), Placement::Contiguous)?;
    for &block_size in &sizes {
        let reads = device::reads(&gpu, block_size, &mut twin)?;
        // Eight large blocks may be more than the device binds.
        let (bytes, seconds) = match gpu.explain(device::copies(&gpu, block_size)) {
            Ok(copies) => copies,
            Err(reason) if gpu.is_lost() => return Err(reason),
            Err(reason) => {
                println!("{block_size:>6} copies left out: {reason}");
                (0, 0.0)
            }
        };
        println!(
            "{block_size:>6} {:>12.2} {:>7.1}% {:>11.3} {:>14} {:>12.1}",
            reads.gather_rate / 1e9,
            100.0 * reads.gather_share,
            reads.over_contiguous,
            bytes >> 10,
            seconds * 1e6,
        );
    }
    drop(twin);
    println!("\nwithin a block, decode time over that of keys, then values");
    println!("{:>6} {:>12} {:>12} {:>12}", "P", "two arrays", "per token", "key columns");
    for block_size in [16, 64, 256] {
        let ratio = |placement| placement_ratio(&gpu, &device::case(&gpu, block_size), placement);
        let two = ratio(Placement::TwoArrays)?;
        let per_token = ratio(Placement::PerToken)?;
        let columns = ratio(Placement::KeyColumns)?;
        println!("{block_size:>6} {two:>12.3} {per_token:>12.3} {columns:>12.3}");
    }
    Ok(())
}

fn host_table(workload: Workload, sizes: &[u32]) -> Result<(), Failure> {
    println!(
        "{}: 4 prompts of 700 to 1,333 tokens, answers of 256; one past a boundary, slots unused",
        workload.name()
    );
    println!(
        "{:>6} {:>12} {:>11} {:>10} {:>7} {:>14} {:>12} {:>9} {:>8}",
        "P",
        "tables/read",
        "waste mean",
        "one past",
        "copies",
        "copied/token",
        "copies/read",
        "peak MiB",
        "host ns"
    );
    for &block_size in sizes {
        let outcome = workloads::run(workload, block_size, &SHAPE)?;
        let block_bytes = u64::from(block_size) * 131_072;
        println!(
            "{block_size:>6} {:>11.4}% {:>10.1}% {:>10} {:>7} {:>10.1} KiB {:>11.2}% {:>9} {:>8.0}",
            100.0 * outcome.table_share,
            100.0 * outcome.waste,
            block_size - 1,
            outcome.copies,
            (outcome.copies * block_bytes) as f64 / outcome.tokens as f64 / 1024.0,
            100.0 * outcome.copy_share,
            outcome.peak_bytes >> 20,
            outcome.host_seconds * 1e9,
        );
    }
    println!();
    Ok(())
}
