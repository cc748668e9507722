//! Creating objects without ever reaching the application's handler of uncaptured errors, and noticing a lost device.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use wgpu::{BufferDescriptor, BufferUsages, ErrorFilter};

/// Why an object could not be created.
#[derive(Debug)]
pub(super) enum Refusal {
    OutOfMemory,
    /// The device is lost.
    Lost,
    Other(wgpu::Error),
}

/// Runs `create` and returns what it made, unless the device reported an error meanwhile.
///
/// A lost device reports none: what it makes is invalid, and says so when it is used. See [`is_lost`].
pub(super) fn guarded<T>(device: &wgpu::Device, create: impl FnOnce() -> T) -> Result<T, Refusal> {
    match captured(device, create) {
        (created, None) => Ok(created),
        (_, Some(wgpu::Error::OutOfMemory { .. })) => Err(Refusal::OutOfMemory),
        // Perhaps only because it was made of something that a lost device had made.
        (_, Some(_)) if is_lost(device) => Err(Refusal::Lost),
        (_, Some(error)) => Err(Refusal::Other(error)),
    }
}

/// Whether the device is lost.
///
/// wgpu says so only to the application's callback: calls on a lost device return as if all was well, and no error
/// scope sees anything. But a buffer that such a device has made cannot be mapped. In a browser it can, and a lost device
/// is not noticed.
pub(super) fn is_lost(device: &wgpu::Device) -> bool {
    let descriptor = BufferDescriptor {
        label: Some("paged_kv.is_lost"),
        size: 4,
        usage: BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC,
        mapped_at_creation: true,
    };
    // No other kind of error can come of it, and every scope costs the step that is being prepared.
    let memory = device.push_error_scope(ErrorFilter::OutOfMemory);
    let mapped = device.create_buffer(&descriptor).get_mapped_range_mut(..).is_ok();
    let error = now(memory.pop());
    !mapped && error.is_none()
}

/// Runs `create` and returns what it made, and the first error that the device reported meanwhile.
fn captured<T>(device: &wgpu::Device, create: impl FnOnce() -> T) -> (T, Option<wgpu::Error>) {
    let memory = device.push_error_scope(ErrorFilter::OutOfMemory);
    let internal = device.push_error_scope(ErrorFilter::Internal);
    let validation = device.push_error_scope(ErrorFilter::Validation);
    let created = create();
    // Innermost first.
    let validation = now(validation.pop());
    let internal = now(internal.pop());
    let memory = now(memory.pop());
    (created, memory.or(validation).or(internal))
}

/// The error of a popped scope. Native backends know it at once; in a browser it comes later, and is not waited for.
fn now(error: impl Future<Output = Option<wgpu::Error>>) -> Option<wgpu::Error> {
    match pin!(error).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(error) => error,
        Poll::Pending => None,
    }
}
