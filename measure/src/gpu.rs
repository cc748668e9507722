//! The adapter and its clock.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Instant;

use bytemuck::Pod;
use wgpu::{Backends, BufferUsages, CommandEncoder, ComputePass, Features};

use crate::Failure;
use crate::faults::{Faults, GpuFailure, of_panic, refused};

/// An open device and how passes are timed on it.
///
/// What goes wrong on it (a loss, too little memory, a call that wgpu refuses) is an error of the next wait.
pub struct Gpu {
    /// The device, with the limits and features that the library recommends.
    pub device: wgpu::Device,
    /// Its queue.
    pub queue: wgpu::Queue,
    /// The adapter's name, driver and interface.
    pub name: String,
    /// Whether a CPU does the work.
    pub is_software: bool,
    timestamps: Option<Timestamps>,
    faults: Faults,
}

struct Timestamps {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    readback: wgpu::Buffer,
    nanoseconds: f64,
    trusted: Cell<bool>,
}

impl Gpu {
    /// Opens the adapter whose name contains `part`, hardware before software and OpenGL last.
    ///
    /// # Errors
    /// When there is none, or it gives no device.
    pub fn open(part: Option<&str>) -> Result<Self, Failure> {
        let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
        // Validation layers cost time.
        descriptor.flags = wgpu::InstanceFlags::empty();
        let instance = wgpu::Instance::new(descriptor);
        let mut adapters = pollster::block_on(instance.enumerate_adapters(Backends::PRIMARY | Backends::GL));
        adapters.sort_by_key(|adapter| {
            let info = adapter.get_info();
            let kind = match info.device_type {
                wgpu::DeviceType::DiscreteGpu => 0,
                wgpu::DeviceType::IntegratedGpu => 1,
                wgpu::DeviceType::Cpu => 3,
                _ => 2,
            };
            (kind, info.backend == wgpu::Backend::Gl)
        });
        let wanted = part.unwrap_or_default().to_lowercase();
        let found =
            adapters.iter().find(|adapter| label(&adapter.get_info()).to_lowercase().contains(&wanted));
        let adapter = found.ok_or_else(|| {
            let names: Vec<_> = adapters.iter().map(|adapter| label(&adapter.get_info())).collect();
            format!("no adapter's name contains \"{wanted}\"; found: {}", names.join(", "))
        })?;
        Self::on(adapter)
    }

    /// Opens `adapter` with the limits and features that the library recommends, and timestamps where it has them.
    ///
    /// # Errors
    /// When it gives no device.
    pub fn on(adapter: &wgpu::Adapter) -> Result<Self, Failure> {
        let base = wgpu::Limits::default().or_worse_values_from(&adapter.limits());
        let timestamps = adapter.features() & Features::TIMESTAMP_QUERY;
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("paged_kv benches"),
            required_features: paged_kv::recommended_features(adapter) | timestamps,
            required_limits: paged_kv::recommended_limits(adapter, base),
            ..Default::default()
        };
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor))?;
        let faults = Faults::of(&device);
        let info = adapter.get_info();
        let timestamps = (!timestamps.is_empty()).then(|| Timestamps::new(&device, &queue));
        let is_software = info.device_type == wgpu::DeviceType::Cpu;
        Ok(Self { device, queue, name: label(&info), is_software, timestamps, faults })
    }

    /// How passes are timed, in words.
    pub fn clock(&self) -> &'static str {
        match &self.timestamps {
            Some(timestamps) if timestamps.trusted.get() => "timestamp queries around the pass",
            Some(_) => "wall time around submit and wait (the adapter's timestamps disagree with it)",
            None => "wall time around submit and wait (the adapter has no timestamps)",
        }
    }

    /// Times by the wall from now on.
    pub fn distrust_timestamps(&self) {
        if let Some(timestamps) = &self.timestamps {
            timestamps.trusted.set(false);
        }
    }

    /// An empty encoder.
    pub fn encoder(&self) -> CommandEncoder {
        self.device.create_command_encoder(&Default::default())
    }

    /// Submits `encoder` with a compute pass at its end, waits, and returns the pass's seconds.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn time(
        &self,
        encoder: CommandEncoder,
        record: impl FnOnce(&mut ComputePass<'_>),
    ) -> Result<f64, GpuFailure> {
        let (by_clock, by_wall) = self.time_both(encoder, record)?;
        Ok(match &self.timestamps {
            Some(timestamps) if timestamps.trusted.get() => by_clock,
            _ => by_wall,
        })
    }

    /// The same by the adapter's clock (0 if it has none), and by the wall.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn time_both(
        &self,
        mut encoder: CommandEncoder,
        record: impl FnOnce(&mut ComputePass<'_>),
    ) -> Result<(f64, f64), GpuFailure> {
        let timestamp_writes = self.timestamps.as_ref().map(|timestamps| wgpu::ComputePassTimestampWrites {
            query_set: &timestamps.queries,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        });
        let descriptor = wgpu::ComputePassDescriptor { label: Some("timed"), timestamp_writes };
        let mut pass = encoder.begin_compute_pass(&descriptor);
        record(&mut pass);
        drop(pass);
        if let Some(timestamps) = &self.timestamps {
            encoder.resolve_query_set(&timestamps.queries, 0..2, &timestamps.resolved, 0);
            encoder.copy_buffer_to_buffer(&timestamps.resolved, 0, &timestamps.readback, 0, 16);
        }
        let commands = encoder.finish();
        let start = Instant::now();
        self.queue.submit([commands]);
        self.wait()?;
        let by_wall = start.elapsed().as_secs_f64();
        let by_clock = match &self.timestamps {
            Some(timestamps) => {
                let ticks: Vec<u64> = self.read_mapped(&timestamps.readback)?;
                ticks[1].saturating_sub(ticks[0]) as f64 * timestamps.nanoseconds * 1e-9
            }
            None => 0.0,
        };
        Ok((by_clock, by_wall))
    }

    /// Waits until all that was submitted has run.
    ///
    /// # Errors
    /// The first [`GpuFailure`] since the last one that was returned; from a lost device always that.
    ///
    /// # Panics
    /// As a callback does that is called meanwhile.
    pub fn wait(&self) -> Result<(), GpuFailure> {
        let poll = || self.device.poll(wgpu::PollType::wait_indefinitely());
        match catch_unwind(AssertUnwindSafe(poll)) {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => self.faults.note(refused(&error.to_string())),
            Err(panic) => match of_panic(&*panic) {
                // wgpu's own callback has told more of it already, if it was called.
                Some(_) if self.is_lost() => {}
                Some(loss) => self.faults.note(loss),
                None => resume_unwind(panic),
            },
        }
        self.faults.take().map_or(Ok(()), Err)
    }

    /// `result`, or in its place what the device has to say: the reason, where that is why it is an error.
    ///
    /// # Errors
    /// As [`wait`](Self::wait), or that of `result`.
    pub fn explain<T>(&self, result: Result<T, Failure>) -> Result<T, Failure> {
        self.wait()?;
        result
    }

    /// Whether the device was lost when it was last waited for.
    pub fn is_lost(&self) -> bool {
        self.faults.is_lost()
    }

    /// A storage buffer of `bytes` zeros. If there is no memory for it, the next [`wait`](Self::wait) says so.
    pub fn empty(&self, bytes: u64) -> wgpu::Buffer {
        let usage =
            BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST | BufferUsages::UNIFORM;
        self.create("bench", bytes.max(16), usage)
    }

    fn create(&self, label: &str, size: u64, usage: BufferUsages) -> wgpu::Buffer {
        let memory = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let descriptor =
            wgpu::BufferDescriptor { label: Some(label), size, usage, mapped_at_creation: false };
        let buffer = self.device.create_buffer(&descriptor);
        if pollster::block_on(memory.pop()).is_some() {
            self.faults.note(GpuFailure::OutOfMemory { asked_bytes: size });
        }
        buffer
    }

    /// A storage or uniform buffer with this content.
    pub fn buffer<T: Pod>(&self, content: &[T]) -> wgpu::Buffer {
        let buffer = self.empty(size_of_val(content) as u64);
        self.queue.write_buffer(&buffer, 0, bytemuck::cast_slice(content));
        buffer
    }

    /// A buffer's content, once all that was submitted before has run.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn read<T: Pod>(&self, buffer: &wgpu::Buffer) -> Result<Vec<T>, GpuFailure> {
        let readback =
            self.create("readback", buffer.size(), BufferUsages::MAP_READ | BufferUsages::COPY_DST);
        let mut encoder = self.encoder();
        encoder.copy_buffer_to_buffer(buffer, 0, &readback, 0, None);
        self.queue.submit([encoder.finish()]);
        self.read_mapped(&readback)
    }

    fn read_mapped<T: Pod>(&self, readback: &wgpu::Buffer) -> Result<Vec<T>, GpuFailure> {
        // Why a buffer is not mapped is told by the wait, or by its view.
        readback.map_async(wgpu::MapMode::Read, .., |_| {});
        self.wait()?;
        let view = readback.get_mapped_range(..).map_err(|error| refused(&error.to_string()))?;
        let content = bytemuck::pod_collect_to_vec(&view);
        drop(view);
        readback.unmap();
        Ok(content)
    }
}

impl Timestamps {
    fn new(device: &wgpu::Device, queue: &wgpu::Queue) -> Self {
        let buffer = |usage| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("timestamps"),
                size: 16,
                usage,
                mapped_at_creation: false,
            })
        };
        Self {
            queries: device.create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("timestamps"),
                ty: wgpu::QueryType::Timestamp,
                count: 2,
            }),
            resolved: buffer(BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC),
            readback: buffer(BufferUsages::MAP_READ | BufferUsages::COPY_DST),
            nanoseconds: f64::from(queue.get_timestamp_period()),
            trusted: Cell::new(true),
        }
    }
}

fn label(info: &wgpu::AdapterInfo) -> String {
    let driver = format!("{} {}", info.driver, info.driver_info);
    format!("{} on {} ({})", info.name, info.backend, driver.trim())
}
