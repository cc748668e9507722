//! The adapter and its clock.

use std::cell::Cell;
use std::time::Instant;

use bytemuck::Pod;
use wgpu::{Backends, BufferUsages, CommandEncoder, ComputePass, Features};

use crate::Failure;

/// An open device and how passes are timed on it.
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
        let info = adapter.get_info();
        let timestamps = (!timestamps.is_empty()).then(|| Timestamps::new(&device, &queue));
        let is_software = info.device_type == wgpu::DeviceType::Cpu;
        Ok(Self { device, queue, name: label(&info), is_software, timestamps })
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
    pub fn time(&self, encoder: CommandEncoder, record: impl FnOnce(&mut ComputePass<'_>)) -> f64 {
        let (by_clock, by_wall) = self.time_both(encoder, record);
        match &self.timestamps {
            Some(timestamps) if timestamps.trusted.get() => by_clock,
            _ => by_wall,
        }
    }

    /// The same by the adapter's clock (0 if it has none), and by the wall.
    pub fn time_both(
        &self,
        mut encoder: CommandEncoder,
        record: impl FnOnce(&mut ComputePass<'_>),
    ) -> (f64, f64) {
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
        self.wait();
        let by_wall = start.elapsed().as_secs_f64();
        let by_clock = self.timestamps.as_ref().map_or(0.0, |timestamps| {
            let ticks: Vec<u64> = self.read_mapped(&timestamps.readback);
            ticks[1].saturating_sub(ticks[0]) as f64 * timestamps.nanoseconds * 1e-9
        });
        (by_clock, by_wall)
    }

    /// Waits until all that was submitted has run.
    pub fn wait(&self) {
        self.device.poll(wgpu::PollType::wait_indefinitely()).expect("the device works");
    }

    /// A storage buffer of `bytes` zeros.
    pub fn empty(&self, bytes: u64) -> wgpu::Buffer {
        self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("bench"),
            size: bytes.max(16),
            usage: BufferUsages::STORAGE
                | BufferUsages::COPY_SRC
                | BufferUsages::COPY_DST
                | BufferUsages::UNIFORM,
            mapped_at_creation: false,
        })
    }

    /// A storage or uniform buffer with this content.
    pub fn buffer<T: Pod>(&self, content: &[T]) -> wgpu::Buffer {
        let buffer = self.empty(size_of_val(content) as u64);
        self.queue.write_buffer(&buffer, 0, bytemuck::cast_slice(content));
        buffer
    }

    /// A buffer's content, once all that was submitted before has run.
    pub fn read<T: Pod>(&self, buffer: &wgpu::Buffer) -> Vec<T> {
        let readback = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("readback"),
            size: buffer.size(),
            usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = self.encoder();
        encoder.copy_buffer_to_buffer(buffer, 0, &readback, 0, None);
        self.queue.submit([encoder.finish()]);
        self.read_mapped(&readback)
    }

    fn read_mapped<T: Pod>(&self, readback: &wgpu::Buffer) -> Vec<T> {
        readback.map_async(wgpu::MapMode::Read, .., |result| result.expect("the buffer can be mapped"));
        self.wait();
        let content = {
            let view = readback.get_mapped_range(..).expect("the buffer is mapped");
            bytemuck::pod_collect_to_vec(&view)
        };
        readback.unmap();
        content
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
