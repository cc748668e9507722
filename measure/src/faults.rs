//! What a device complains of, kept until somebody waits for it: errors instead of wgpu's panics.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Why a device gave no result.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GpuFailure {
    /// The device is gone, and nothing will come of it any more.
    Lost {
        /// What wgpu or the driver said of it.
        reason: String,
    },
    /// There was no memory for a buffer.
    OutOfMemory {
        /// Bytes of the buffer.
        asked_bytes: u64,
    },
    /// wgpu refused a call.
    Refused {
        /// What it said, in one line: the call, its label, and what is wrong with it.
        reason: String,
    },
}

impl fmt::Display for GpuFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost { reason } if reason.is_empty() => write!(f, "the device was lost"),
            Self::Lost { reason } => write!(f, "the device was lost: {reason}"),
            Self::OutOfMemory { asked_bytes } => write!(f, "no device memory for {asked_bytes} bytes"),
            Self::Refused { reason } => write!(f, "wgpu refused a call: {reason}"),
        }
    }
}

impl std::error::Error for GpuFailure {}

/// The first failure since the last look.
#[derive(Clone, Default)]
pub(crate) struct Faults(Arc<Mutex<Option<GpuFailure>>>);

impl Faults {
    /// Keeps those of `device` from now on.
    pub(crate) fn of(device: &wgpu::Device) -> Self {
        let faults = Self::default();
        let (on_error, on_loss) = (faults.clone(), faults.clone());
        device.on_uncaptured_error(Arc::new(move |error| on_error.note(refused(&error.to_string()))));
        device.set_device_lost_callback(move |_, reason| on_loss.note(lost(&reason)));
        faults
    }

    /// Keeps `failure`, unless there is one already. A loss takes the place of whatever came of it before it was known.
    pub(crate) fn note(&self, failure: GpuFailure) {
        let mut first = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(failure, GpuFailure::Lost { .. }) {
            *first = Some(failure);
        } else {
            first.get_or_insert(failure);
        }
    }

    /// The first failure, which is then forgotten unless it is a loss.
    pub(crate) fn take(&self) -> Option<GpuFailure> {
        let mut first = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*first, Some(GpuFailure::Lost { .. })) { first.clone() } else { first.take() }
    }

    /// Whether the device is known to be lost.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(*self.0.lock().unwrap_or_else(PoisonError::into_inner), Some(GpuFailure::Lost { .. }))
    }
}

pub(crate) fn refused(reason: &str) -> GpuFailure {
    GpuFailure::Refused { reason: in_one_line(reason) }
}

fn lost(reason: &str) -> GpuFailure {
    GpuFailure::Lost { reason: in_one_line(reason) }
}

/// What wgpu says, as one line. It begins with a heading that is the same for every error; what went wrong stands in the
/// lines after "Caused by:", the call first and each line the reason of the one before. A text without them is told by
/// its first line.
fn in_one_line(text: &str) -> String {
    let lines = |text| str::lines(text).map(|line| line.trim().trim_end_matches(['.', ':']));
    let causes = text.split_once("Caused by:").map_or("", |(_, causes)| causes);
    let causes: Vec<&str> = lines(causes).filter(|line| !line.is_empty()).collect();
    match causes[..] {
        [] => lines(text).next().unwrap_or_default().to_owned(),
        _ => causes.join(": "),
    }
}

/// What `wgpu::Device::poll` panicked with, as a failure, if it is its own panic. wgpu 30 panics where the driver reports
/// the loss to it.
pub(crate) fn of_panic(payload: &(dyn Any + Send)) -> Option<GpuFailure> {
    let text = panic_text(payload);
    text.starts_with(POLL_PANIC).then(|| lost(text))
}

/// Whether a panic is one that [`Gpu::wait`](crate::gpu::Gpu::wait) catches and returns as an error: a program that wants
/// to say nothing else of it asks this in its panic hook.
pub fn is_caught(panic: &std::panic::PanicHookInfo<'_>) -> bool {
    panic_text(panic.payload()).starts_with(POLL_PANIC)
}

/// How wgpu's own panics in `wgpu::Device::poll` begin.
const POLL_PANIC: &str = "Error in Device::poll";

fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let owned = payload.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_counts_once_and_a_loss_for_good() {
        let faults = Faults::default();
        assert_eq!(faults.take(), None);
        faults.note(GpuFailure::OutOfMemory { asked_bytes: 7 });
        faults.note(refused("what came of it"));
        assert_eq!(faults.take(), Some(GpuFailure::OutOfMemory { asked_bytes: 7 }));
        assert_eq!(faults.take(), None);

        faults.note(refused("first"));
        faults.note(lost("gone"));
        faults.note(refused("later"));
        let loss = GpuFailure::Lost { reason: "gone".to_owned() };
        assert!(faults.is_lost());
        assert_eq!((faults.take(), faults.take()), (Some(loss.clone()), Some(loss)));
    }

    #[test]
    fn a_text_is_told_by_its_causes_or_else_by_its_first_line() {
        let causes =
            "Validation Error\n\nCaused by:\n  In a call, label = 'x'\n    It is wrong:\n      very.\n\n";
        assert_eq!(in_one_line(causes), "In a call, label = 'x': It is wrong: very");
        assert_eq!(in_one_line("Device is gone.\nmore"), "Device is gone");
        assert_eq!(in_one_line("A heading\n\nCaused by:\n"), "A heading");
        assert_eq!(in_one_line(""), "");
    }

    #[test]
    fn only_a_panic_of_poll_itself_is_a_loss() {
        let of_poll =
            "Error in Device::poll: Validation Error\n\nCaused by:\n  Parent device is lost\n".to_owned();
        let loss = GpuFailure::Lost { reason: "Parent device is lost".to_owned() };
        assert_eq!(of_panic(&of_poll), Some(loss));
        assert_eq!(of_panic(&"a callback of the application's failed"), None);
        assert_eq!(of_panic(&7), None);
    }
}
