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
///
/// # Errors
/// The first that either returns.
pub fn interleaved<E>(
    mut first: impl FnMut() -> Result<f64, E>,
    mut second: impl FnMut() -> Result<f64, E>,
) -> Result<Pair, E> {
    first()?;
    second()?;
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < PAIRS || (times.len() < 4 * PAIRS && start.elapsed().as_secs_f64() < SECONDS) {
        let swapped = times.len() % 2 == 1;
        let late = swapped.then(&mut second);
        let early = first()?;
        times.push((early, late.unwrap_or_else(&mut second)?));
    }
    Ok(Pair {
        first: median(times.iter().map(|pair| pair.0).collect()),
        second: median(times.iter().map(|pair| pair.1).collect()),
        ratio: median(times.iter().map(|pair| pair.0 / pair.1).collect()),
    })
}

/// Median seconds of `run`, once it has been run to warm up.
///
/// # Errors
/// The first that it returns.
pub fn repeated<E>(mut run: impl FnMut() -> Result<f64, E>) -> Result<f64, E> {
    run()?;
    let start = Instant::now();
    let mut times = Vec::new();
    while times.len() < PAIRS || (times.len() < 4 * PAIRS && start.elapsed().as_secs_f64() < SECONDS) {
        times.push(run()?);
    }
    Ok(median(times))
}
