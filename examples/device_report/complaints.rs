//! What wgpu complains of, kept instead of ending the program.

use std::sync::{Arc, Mutex, PoisonError};

use bench_support::gpu::Gpu;

/// The first complaint since the last look.
#[derive(Clone, Default)]
pub(crate) struct Complaints(Arc<Mutex<Option<String>>>);

impl Complaints {
    /// Keeps those of `gpu` from now on.
    pub(crate) fn of(gpu: &Gpu) -> Self {
        let complaints = Self::default();
        let kept = complaints.clone();
        gpu.device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            let mut first = kept.0.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert_with(|| error.to_string().lines().next().unwrap_or_default().to_owned());
        }));
        complaints
    }

    /// The first line of the first complaint, which is then forgotten.
    pub(crate) fn take(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
