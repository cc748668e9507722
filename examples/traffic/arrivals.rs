//! When chats begin, and with which system prompt.

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp};

use crate::parameters::*;

pub(crate) fn steps_per_hour() -> f64 {
    (3600 * STEPS_PER_SECOND) as f64
}

/// Step and system prompt of every chat, in order.
pub(crate) fn draw_arrivals(random: &mut ChaCha8Rng, steps: u64) -> Vec<(u64, usize)> {
    let mut arrivals = Vec::new();
    // A Poisson process at the highest rate, thinned to the rate of the hour.
    for step in poisson(random, CHATS_PER_HOUR * (1.0 + SWING), steps) {
        let hours_from_peak = (step as f64 - steps as f64 / 2.0) / steps_per_hour();
        let phase = (hours_from_peak / 24.0 * std::f64::consts::TAU).cos();
        if random.random_bool((1.0 + SWING * phase) / (1.0 + SWING)) {
            arrivals.push((step, draw_system_prompt(random)));
        }
    }
    for start in poisson(random, 1.0 / HOURS_BETWEEN_BURSTS, steps) {
        let system_prompt = draw_system_prompt(random);
        for _ in 0..BURST_CHATS {
            let step = start + random.random_range(0..BURST_SECONDS * STEPS_PER_SECOND);
            arrivals.push((step.min(steps - 1), system_prompt));
        }
    }
    arrivals.sort_by_key(|&(step, _)| step);
    arrivals
}

/// Steps of a Poisson process.
fn poisson(random: &mut ChaCha8Rng, per_hour: f64, steps: u64) -> Vec<u64> {
    let Ok(gaps) = Exp::new(per_hour / steps_per_hour()) else { return Vec::new() };
    let mut now = 0.0;
    let mut times = Vec::new();
    loop {
        now += gaps.sample(random);
        if now >= steps as f64 {
            return times;
        }
        times.push(now as u64);
    }
}

fn draw_system_prompt(random: &mut ChaCha8Rng) -> usize {
    let mut ticket: u32 = random.random_range(0..100);
    SYSTEM_PROMPTS
        .iter()
        .position(|&(_, share)| {
            let hit = ticket < share;
            ticket = ticket.saturating_sub(share);
            hit
        })
        .unwrap_or(SYSTEM_PROMPTS.len() - 1)
}
