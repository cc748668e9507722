//! The self-check: the kernels of this adapter against the f64 attention of [`paged_kv::reference`].
//!
//! Every case must store its keys and values as the CPU twin does, bit for bit, and compute every output within
//! [`TOLERANCE`].

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use measure::{Failure, faults::GpuFailure, gpu::Gpu};
use paged_kv::{BindError, DeviceError, PrepareError};
use serde::Serialize;

use super::cases::{CASES, Case};
use super::step::{Errors, run};

/// Most error, relative to the largest element of a head: f32 rounds each of a few thousand terms to 6e-8, and `exp2`
/// is allowed a few units in the last place. The library's own tests ask for the same.
pub(crate) const TOLERANCE: f64 = 1e-5;

/// What came out.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Check {
    /// Whether every case that was begun was run, and right.
    pub(crate) passed: bool,
    pub(crate) cases_run: usize,
    pub(crate) cases_total: usize,
    pub(crate) seconds: f64,
    pub(crate) tolerance: f64,
    pub(crate) worst_error: f64,
    pub(crate) cases: Vec<CaseResult>,
    /// What ended it before its time; null where nothing did.
    pub(crate) interruption: Option<String>,
}

/// What came out of one case.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CaseResult {
    pub(crate) name: String,
    pub(crate) seconds: f64,
    /// Largest error of the rows that were decoded, and of those that were prefilled; null where the case failed early.
    pub(crate) decode_error: Option<f64>,
    pub(crate) prefill_error: Option<f64>,
    /// What is wrong, if anything is.
    pub(crate) failure: Option<String>,
    /// Why it was not run, where the device had too little memory or too low limits for it: that says nothing about its
    /// numbers.
    pub(crate) not_run: Option<String>,
}

impl Check {
    pub(crate) fn of(cases: Vec<CaseResult>, interruption: Option<String>, took: Duration) -> Self {
        let right = |case: &CaseResult| case.failure.is_none() && case.not_run.is_none();
        let errors = cases.iter().flat_map(|case| [case.decode_error, case.prefill_error]).flatten();
        Self {
            passed: interruption.is_none() && cases.iter().all(right),
            cases_run: cases.iter().filter(|case| case.not_run.is_none()).count(),
            cases_total: CASES.len(),
            seconds: took.as_secs_f64(),
            tolerance: TOLERANCE,
            worst_error: errors.fold(0.0, f64::max),
            cases,
            interruption,
        }
    }

    /// Why less was run than was begun.
    pub(crate) fn shortfall(&self) -> Option<&str> {
        let not_run = || self.cases.iter().find_map(|case| case.not_run.as_deref());
        self.interruption.as_deref().or_else(not_run)
    }
}

/// Runs cases until the next one would probably take longer than what is left of `budget`, or the device is lost; one at
/// least. A case that the device has too little memory or too low limits for is left out.
pub(crate) fn check(gpu: &Gpu, budget: Duration) -> Check {
    let start = Instant::now();
    let bar = ProgressBar::new(CASES.len() as u64);
    bar.set_style(
        ProgressStyle::with_template("checking {bar:24} {pos} of {len}, {elapsed}: {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let mut cases: Vec<CaseResult> = Vec::new();
    let mut interruption = None;
    let mut longest = Duration::ZERO;
    for case in CASES {
        if !cases.is_empty() && start.elapsed() + longest > budget {
            break;
        }
        bar.set_message(case.to_string());
        let begun = Instant::now();
        let errors = gpu.explain(run(gpu, case));
        if gpu.is_lost() {
            // Asked for once more: it may have been lost after the case, which then had no error.
            interruption = gpu.wait().err().map(|loss| loss.to_string());
            break;
        }
        longest = longest.max(begun.elapsed());
        cases.push(judge(case, begun.elapsed(), errors));
        bar.inc(1);
    }
    bar.finish_and_clear();
    Check::of(cases, interruption, start.elapsed())
}

/// The result of a case, from what came out.
pub(crate) fn judge(case: &Case, took: Duration, errors: Result<Errors, Failure>) -> CaseResult {
    let (decode, prefill, failure, not_run) = match errors {
        Ok(Errors { decode, prefill, stored_exactly }) => {
            let failure = if decode > TOLERANCE || prefill > TOLERANCE {
                Some(format!("errors of {decode:.1e} in decode and {prefill:.1e} in prefill"))
            } else if !stored_exactly {
                Some("stored keys or values differ from what was given".to_owned())
            } else {
                None
            };
            (Some(decode), Some(prefill), failure, None)
        }
        Err(failure) if is_unsuitable(&failure) => (None, None, None, Some(failure.to_string())),
        Err(failure) => (None, None, Some(failure.to_string()), None),
    };
    // JSON has no infinity: an output that is no number is told by the failure.
    let finite = |error: Option<f64>| error.filter(|error| error.is_finite());
    CaseResult {
        name: case.to_string(),
        seconds: took.as_secs_f64(),
        decode_error: finite(decode),
        prefill_error: finite(prefill),
        failure,
        not_run,
    }
}

/// Whether a failure is the device's, and no kernel's: it is lost, or not one for what was asked of it.
pub(crate) fn is_of_device(failure: &Failure) -> bool {
    matches!(failure.downcast_ref(), Some(GpuFailure::Lost { .. })) || is_unsuitable(failure)
}

/// Whether the device is not one for it: there was no memory for a buffer, or its limits are too low.
fn is_unsuitable(failure: &Failure) -> bool {
    matches!(failure.downcast_ref(), Some(GpuFailure::OutOfMemory { .. }))
        || matches!(
            failure.downcast_ref(),
            Some(DeviceError::OutOfMemory { .. } | DeviceError::LimitTooLow { .. } | DeviceError::Config(_))
        )
        || matches!(failure.downcast_ref(), Some(BindError::OutOfMemory { .. }))
        || matches!(
            failure.downcast_ref(),
            Some(PrepareError::OutOfMemory { .. } | PrepareError::StagingOutOfMemory { .. })
        )
}
