//! What this library makes of an adapter: what to request, what fits, how fast it reads, and whether its numbers are right.
//!
//! ```text
//! cargo run --release --example device_report
//! cargo run --release --example device_report -- --check --json
//! ```
//!
//! On a device that docs/devices.md does not list as tested, run the first command, or better the second, and post what it
//! prints.

mod adapters;
mod cases;
mod check;
mod models;
mod rates;
mod report;
mod requests;
mod step;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use measure::faults::is_caught;
use measure::gpu::Gpu;

use adapters::AdapterFacts;
use report::{Report, Versions};

/// Reports what the library makes of an adapter; with --check, whether its numbers are right.
///
/// Exit status 1 when a number is wrong or a kernel fails, 2 when there is nothing to report on, 3 when the device was
/// lost, or had too little memory or too low limits for something.
#[derive(Debug, Parser)]
#[command(name = "device_report")]
struct Options {
    /// The adapter whose name contains this, in any case; by default the first one of the list.
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,

    /// Size of the pool that models are fitted into. wgpu does not tell how much memory is free.
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..1 << 24))]
    pool: u64,

    /// Compare the kernels with an attention in f64, for at most about SECONDS, three minutes by default.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "180")]
    check: Option<u64>,

    /// Print one JSON object, for bug reports.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    // wgpu panics where the driver reports a loss while it is waited for. `Gpu::wait` makes an error of it, which is told.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !is_caught(panic) {
            hook(panic);
        }
    }));
    ExitCode::from(run(&options).unwrap_or_else(|message| {
        eprintln!("device_report: {message}");
        2
    }))
}

/// Prints the report; the exit status.
fn run(options: &Options) -> Result<u8, String> {
    let all = adapters::find();
    let facts: Vec<AdapterFacts> = all.iter().map(AdapterFacts::of).collect();
    let chosen = choose(options, &facts)?;
    let gpu =
        Gpu::on(&all[chosen]).map_err(|error| format!("{} gives no device: {error}", facts[chosen].label))?;
    let report = make(options, facts, chosen, &all[chosen], &gpu);
    match options.json {
        true => println!("{}", report.json()),
        false => print!("{}", report.text()),
    }
    if let Some(failure) = report.failure() {
        eprintln!("device_report: {failure}");
    }
    // wgpu 30 panics in it where the driver cannot wait for the queue. By now all has been told, and the status holds.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(gpu)));
    Ok(report.status())
}

/// Index of the adapter to report on.
fn choose(options: &Options, facts: &[AdapterFacts]) -> Result<usize, String> {
    let part = options.adapter.as_deref().unwrap_or_default().to_lowercase();
    let named = |facts: &AdapterFacts| facts.computes && facts.label.to_lowercase().contains(&part);
    facts.iter().position(named).ok_or_else(|| {
        let labels: Vec<_> = facts.iter().map(|facts| facts.label.as_str()).collect();
        match labels.is_empty() {
            true => "no adapter was found; docs/errors.md says what to install".to_owned(),
            false => {
                format!("no adapter that computes has \"{part}\" in its name; found: {}", labels.join(", "))
            }
        }
    })
}

fn make(
    options: &Options,
    adapters: Vec<AdapterFacts>,
    chosen: usize,
    adapter: &wgpu::Adapter,
    gpu: &Gpu,
) -> Report {
    let requests = requests::requests(adapter);
    let max_binding = requests.iter().filter(|request| request.is_limit).map(|request| request.request);
    let max_binding = max_binding.min().unwrap_or(0);
    let pool_bytes = options.pool << 20;
    let (rates, failure) = rates::measure(gpu);
    Report {
        versions: Versions::here(),
        adapters,
        adapter: chosen,
        features: adapter.features().iter_names().map(|(name, _)| name).collect(),
        requests,
        pool_bytes,
        models: models::fits(pool_bytes, max_binding),
        rates,
        rates_are_wrong: failure.as_ref().is_some_and(|failure| !check::is_of_device(failure)),
        rates_failure: failure.map(|failure| failure.to_string()),
        check: options.check.map(|seconds| check::check(gpu, Duration::from_secs(seconds))),
    }
}
