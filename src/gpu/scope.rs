//! Creating objects without ever reaching the application's handler of uncaptured errors.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use wgpu::ErrorFilter;

/// Why an object could not be created.
#[derive(Debug)]
pub(super) enum Refusal {
    OutOfMemory,
    Other(wgpu::Error),
}

/// Runs `create` and returns what it made, unless the device reported an error meanwhile.
pub(super) fn guarded<T>(device: &wgpu::Device, create: impl FnOnce() -> T) -> Result<T, Refusal> {
    let memory = device.push_error_scope(ErrorFilter::OutOfMemory);
    let internal = device.push_error_scope(ErrorFilter::Internal);
    let validation = device.push_error_scope(ErrorFilter::Validation);
    let created = create();
    // Innermost first.
    let validation = now(validation.pop());
    let internal = now(internal.pop());
    let memory = now(memory.pop());
    match (memory, validation.or(internal)) {
        (Some(_), _) => Err(Refusal::OutOfMemory),
        (None, Some(error)) => Err(Refusal::Other(error)),
        (None, None) => Ok(created),
    }
}

/// The error of a popped scope. Native backends know it at once; in a browser it comes later, and is not waited for.
fn now(error: impl Future<Output = Option<wgpu::Error>>) -> Option<wgpu::Error> {
    match pin!(error).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(error) => error,
        Poll::Pending => None,
    }
}
