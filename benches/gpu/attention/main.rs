//! What the kernels do with the adapter's memory, and what they gain on simpler ones.
//!
//! ```text
//! cargo bench --bench attention -- [--adapter NAME] [--json FILE] [--case SUBSTRING] [--quick]
//! ```
//!
//! First the rates at which shaders read and copy a buffer: the *stream rates*. Then, case by case, attention (without
//! the append, which has cases of its own), append, block copies and swaps. A rate is the bytes that have to be moved
//! once (keys and values once for all query heads) per second; its share is of the stream read for attention, of the
//! stream copy for the others.
//!
//! In the same run, in turn, attention is compared with
//!
//! - *contiguous*: the same kernels over one extent per sequence, their text without block tables. The library's own
//!   blocks of 16 tokens lie in no order, as in a pool that was long in use;
//! - *gather*: the blocks are copied into extents first, and the contiguous kernels read those;
//! - *plain*: one invocation per query vector.
//!
//! All of them must give the results of the library's kernels: a case in which one does not is left out, and the bench
//! fails in the end. It does so on Mesa's llvmpipe, which stops an invocation after some 65,535 loop iterations: the plain
//! kernel exceeds them where context times head size is large.

mod compare;
mod moves;
mod plot;
mod report;

use std::path::PathBuf;

use clap::Parser;
use measure::Failure;
use measure::cases::{self, Spec, What};
use measure::gpu::Gpu;
use measure::row::Row;
use measure::stream::{StreamRates, stream_rates};
use measure::twins::WrongResults;
use report::Report;

#[derive(Parser)]
#[command(about = "Times the attention kernels on an adapter, against simpler ones.")]
struct Options {
    /// Take the adapter whose name contains this.
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
    /// Write the figures to this file, and a plot beside it.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Run only the cases whose name contains this.
    #[arg(long, value_name = "SUBSTRING")]
    case: Option<String>,
    /// A few cases that a software adapter runs in a minute or two.
    #[arg(long)]
    quick: bool,
    /// What cargo passes.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Failure> {
    let options = Options::parse();
    let gpu = Gpu::open(options.adapter.as_deref())?;
    println!("{}", gpu.name);
    let rates = stream_rates(&gpu)?;
    println!("timed by {}", gpu.clock());
    if gpu.is_software {
        println!("a software adapter: only ratios mean anything");
    }
    let mut report = Report::new(&gpu.name, rates);
    let wanted = options.case.as_deref().unwrap_or_default();
    let specs = if options.quick { cases::quick() } else { cases::all() };
    let mut failure = None;
    for mut spec in specs.into_iter().filter(|spec| spec.name().contains(wanted)) {
        spec.case.num_layers = num_layers(&gpu, &spec);
        match gpu.explain(run(&gpu, &rates, &spec, options.quick || options.case.is_some())) {
            Ok(rows) => rows.into_iter().for_each(|row| report.add(row)),
            Err(reason) => {
                report.leave_out(&spec.name(), &reason.to_string());
                if reason.is::<WrongResults>() || gpu.is_lost() {
                    failure = Some(reason);
                }
                if gpu.is_lost() {
                    break;
                }
            }
        }
    }
    // What was measured in other cases, and before a loss, holds.
    report.finish(options.json.as_deref())?;
    failure.map_or(Ok(()), Err)
}

fn run(gpu: &Gpu, rates: &StreamRates, spec: &Spec, patient: bool) -> Result<Vec<Row>, Failure> {
    match spec.what {
        What::Attention(_) => Ok(vec![compare::attention(gpu, rates, spec, patient)?]),
        What::Append => Ok(vec![moves::append(gpu, rates, spec)?]),
        What::BlockCopy => Ok(vec![moves::block_copy(gpu, rates, spec)?]),
        What::Swap => moves::swap(gpu, rates, spec),
    }
}

/// On hardware, so many layers that no cache of the device holds what they read, as in a model.
fn num_layers(gpu: &Gpu, spec: &Spec) -> u32 {
    if gpu.is_software {
        return 1;
    }
    let layer = spec.case.kv_bytes().max(1);
    (1u64 << 30).div_ceil(layer).clamp(1, 32) as u32
}
