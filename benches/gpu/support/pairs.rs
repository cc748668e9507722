//! Medians, and things that are run in turn.

use std::time::Instant;

/// Pairs that every comparison has at least.
pub const PAIRS: usize = 15;
/// Short runs are repeated until they have taken this long, or four times as many pairs.
const SECONDS: f64 = 1.0;

/// The median of `values`, which is not empty.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What two things took, run in turn.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// Median seconds of the first.
    pub first: f64,
    /// Median seconds of the second.
    pub second: f64,
    /// Median of the pairs' ratios, first over second.
    pub ratio: f64,
}

/// Runs `first` and `second` in turn; each returns its seconds, once it has been run to warm up. Which of them comes
/// first alternates.
pub fn interleaved(mut first: impl FnMut() -> f64, mut second: impl FnMut() -> f64) -> Pair {
    first();
    second();
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < PAIRS || (times.len() < 4 * PAIRS && start.elapsed().as_secs_f64() < SECONDS) {
        let swapped = times.len() % 2 == 1;
        let late = swapped.then(&mut second);
        let early = first();
        times.push((early, late.unwrap_or_else(&mut second)));
    }
    Pair {
        first: median(times.iter().map(|pair| pair.0).collect()),
        second: median(times.iter().map(|pair| pair.1).collect()),
        ratio: median(times.iter().map(|pair| pair.0 / pair.1).collect()),
    }
}

/// Median seconds of `run`, once it has been run to warm up.
pub fn repeated(mut run: impl FnMut() -> f64) -> f64 {
    run();
    let start = Instant::now();
    let mut times = Vec::new();
    while times.len() < PAIRS || (times.len() < 4 * PAIRS && start.elapsed().as_secs_f64() < SECONDS) {
        times.push(run());
    }
    median(times)
}
