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
        /// The first line of what it said.
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
    GpuFailure::Refused { reason: first_line(reason) }
}

fn lost(reason: &str) -> GpuFailure {
    GpuFailure::Lost { reason: first_line(reason) }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim_end_matches('.').to_owned()
}

/// What `wgpu::Device::poll` panicked with, as a failure. wgpu 30 panics where the driver reports the loss to it.
pub(crate) fn of_panic(payload: &(dyn Any + Send)) -> GpuFailure {
    lost(panic_text(payload))
}

/// Whether a panic is one that [`Gpu::wait`](crate::gpu::Gpu::wait) catches and returns as an error: a program that wants
/// to say nothing else of it asks this in its panic hook.
pub fn is_caught(panic: &std::panic::PanicHookInfo<'_>) -> bool {
    panic_text(panic.payload()).starts_with("Error in Device::poll")
}

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
        faults.note(of_panic(&String::from("Error in Device::poll: lost.\nmore")));
        faults.note(refused("later"));
        let loss = GpuFailure::Lost { reason: "Error in Device::poll: lost".to_owned() };
        assert!(faults.is_lost());
        assert_eq!((faults.take(), faults.take()), (Some(loss.clone()), Some(loss)));
    }
}
