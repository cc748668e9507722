//! The automatic choice between moving a victim's blocks and computing its tokens again.
//!
//! The machine: a step takes 1 ms, and besides one over the prefill rate for each of its rows, and one over the swap rate
//! for each byte that it moves, either way. The application reports the rates as they are. The work: requests of very
//! different lengths in a pool that holds about a quarter of them. What counts is the time until all are done.

use super::{Served, cache, overcommitted, prompt};
use crate::rig::Random;
use paged_kv::{PreemptionMode, PreemptionReason, Rates, SchedulerConfig};

#[derive(Clone, Copy)]
struct Machine {
    name: &'static str,
    /// Rates by the number of steps that were taken.
    rates: fn(u32) -> Rates,
    prefix_cache: bool,
    /// Tokens with which all prompts begin.
    system: u32,
}

fn rates(swap_bytes_per_s: f64, prefill_tokens_per_s: f64) -> Rates {
    Rates { swap_bytes_per_s, prefill_tokens_per_s }
}

struct Outcome {
    seconds: f64,
    preemptions: u64,
    swaps: u64,
}

fn serve(machine: Machine, preemption: PreemptionMode, seed: u64) -> Outcome {
    let prefix_cache = machine.prefix_cache.then(Default::default);
    let config = SchedulerConfig { preemption, prefix_cache, ..overcommitted() };
    let mut served = Served::new(config, cache(100, 16).with_host_blocks(400).unwrap());
    let mut random = Random(seed);
    for request in 0..24 {
        // From 20 to about 400 tokens, most of them short.
        let len = (20.0 * 20f64.powf(f64::from(random.unit() + 1.0) / 2.0)) as u32;
        let tokens = [prompt(900, machine.system), prompt(request + 1, len)].concat();
        let new = 60 + (random.next() % 200) as u32;
        served.add(&tokens, |request| request.max_new_tokens(new));
    }
    let bytes_per_block = served.scheduler.cache().config().bytes_per_block() as f64;
    let mut seconds = 0.0;
    while served.ends.len() < 24 {
        let rates = (machine.rates)(served.steps);
        served.scheduler.set_rates(rates);
        let step = served.step();
        for (_, _, why) in step.preempted() {
            let told = matches!(
                why,
                PreemptionReason::Rates { .. }
                    | PreemptionReason::Configured
                    | PreemptionReason::NothingToMove
            );
            assert!(told, "{why:?}");
        }
        let bytes = (step.outs.len() + step.ins.len()) as f64 * bytes_per_block;
        seconds += 1e-3 + f64::from(step.rows) / rates.prefill_tokens_per_s + bytes / rates.swap_bytes_per_s;
    }
    let stats = served.scheduler.stats();
    Outcome { seconds, preemptions: stats.preemptions, swaps: stats.swaps_out }
}

/// A token takes 64 bytes: at 128 bytes there and back per token computed, both cost the same.
const MACHINES: [Machine; 6] = [
    Machine { name: "swap cheap", rates: |_| rates(64e6, 5e3), prefix_cache: false, system: 0 },
    Machine { name: "recomputation cheap", rates: |_| rates(64e3, 20e3), prefix_cache: false, system: 0 },
    Machine {
        name: "mixed: the bus is busy every other 50 steps",
        rates: |steps| if steps / 50 % 2 == 0 { rates(64e6, 5e3) } else { rates(64e3, 5e3) },
        prefix_cache: false,
        system: 0,
    },
    Machine { name: "even", rates: |_| rates(128.0 * 5e3, 5e3), prefix_cache: false, system: 0 },
    Machine {
        name: "even, shared beginnings found",
        rates: |_| rates(128.0 * 5e3, 5e3),
        prefix_cache: true,
        system: 200,
    },
    Machine {
        name: "even, shared beginnings not found",
        rates: |_| rates(128.0 * 5e3, 5e3),
        prefix_cache: false,
        system: 200,
    },
];

#[test]
fn the_automatic_choice_is_within_5_percent_of_the_better_fixed_one() {
    for machine in MACHINES {
        for seed in 0..2 {
            let [recompute, swap, auto] =
                [PreemptionMode::Recompute, PreemptionMode::Swap, PreemptionMode::Auto]
                    .map(|mode| serve(machine, mode, seed));
            println!(
                "{} ({seed}): recompute {:.2} s, swap {:.2} s, auto {:.2} s; {} preemptions, {} by swap",
                machine.name, recompute.seconds, swap.seconds, auto.seconds, auto.preemptions, auto.swaps
            );
            assert!(recompute.preemptions >= 10, "{}: {} preemptions", machine.name, recompute.preemptions);
            let better = recompute.seconds.min(swap.seconds);
            assert!(auto.seconds <= 1.05 * better, "{}: {} s, {better} s", machine.name, auto.seconds);
        }
    }
}

#[test]
fn without_rates_tokens_are_kept() {
    let config = SchedulerConfig { preemption: PreemptionMode::Auto, ..overcommitted() };
    for unknown in [None, Some(rates(0.0, 1.0)), Some(rates(1.0, -1.0)), Some(rates(f64::NAN, 1.0))] {
        let mut served = Served::new(config, super::pool(6, 8));
        if let Some(unknown) = unknown {
            served.scheduler.set_rates(unknown);
        }
        for seed in 1..3 {
            served.add(&prompt(seed, 8), |request| request.max_new_tokens(8));
        }
        let step = served.steps_until(|_, step| !step.preempted().is_empty());
        assert_eq!(step.preempted()[0].2, PreemptionReason::NoRates);
        served.finish();
    }
}

#[test]
fn the_choice_is_told_with_both_costs() {
    // Three blocks of 256 bytes there and back, or 12 tokens again.
    let config = SchedulerConfig { preemption: PreemptionMode::Auto, prefix_cache: None, ..overcommitted() };
    for (swap_rate, swaps) in [(1536.0, true), (768.0, false)] {
        let mut served = Served::new(config, super::pool(6, 8));
        served.scheduler.set_rates(rates(swap_rate, 8.0));
        for seed in 1..3 {
            served.add(&prompt(seed, 8), |request| request.max_new_tokens(8));
        }
        let step = served.steps_until(|_, step| !step.preempted().is_empty());
        let expected = PreemptionReason::Rates { swap_s: 1536.0 / swap_rate, recompute_s: 1.5 };
        assert_eq!(step.preempted()[0].2, expected);
        assert_eq!(!step.outs.is_empty(), swaps);
        served.finish();
    }
}
