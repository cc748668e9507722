//! What a step costs the application's thread: `prepare`, `record_layer` for every layer, and what wgpu does with it.
//!
//! ```text
//! cargo bench --workspace --bench recording_time
//! ```
//!
//! It runs on wgpu's noop backend, so no driver is part of the numbers: they are this library's own work, and wgpu's
//! checks and bookkeeping. The last line tells how much of it is wgpu's: the same commands without the library. wgpu
//! works off what was recorded when the encoder is finished.

use std::time::{Duration, Instant};

use paged_kv::{
    BoundTensors, CacheConfig, KvCache, KvType, LayerTensors, ModelShape, PagedAttention, StepBuilder,
    TableId, TensorSlice,
};
use pollster::FutureExt as _;
use wgpu::{BufferUsages, util::DeviceExt as _};

/// SmolLM2-135M.
const SHAPE: ModelShape = ModelShape::new(30, 9, 3, 64);
const CONTEXT: u32 = 1024;
const WARM_UP: u32 = 50;
const STEPS: u32 = 500;

/// The parts of a step, in the order in which they happen.
const PARTS: [&str; 5] = ["prepare", "record", "end of pass", "finish", "submit"];

fn main() {
    let (device, queue) = noop_device();
    println!("microseconds a step of {} layers, the median of {STEPS}", SHAPE.num_layers());
    println!(
        "{:>28} {}  together  dispatches  a dispatch",
        "",
        PARTS.map(|part| format!("{part:>12}")).join("")
    );
    for sequences in [1, 8, 64] {
        let mut bench = Bench::new(&device, &queue, sequences);
        let mut dispatches = 0;
        let times = (0..WARM_UP + STEPS).map(|_| {
            let times = bench.step();
            dispatches = bench.attention.stats().step_dispatches;
            times
        });
        print(&format!("{sequences} sequences decode"), times.collect(), dispatches);
    }
    let bare = Bare::new(&device);
    let dispatches = 2 * SHAPE.num_layers();
    print("wgpu alone", (0..WARM_UP + STEPS).map(|_| bare.step(&device, &queue)).collect(), dispatches);
}

fn print(what: &str, mut steps: Vec<[Duration; 5]>, dispatches: u32) {
    steps.drain(..WARM_UP as usize);
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() * 1e6
    };
    let parts: String = (0..PARTS.len())
        .map(|part| format!("{:12.1}", median(steps.iter().map(|step| step[part]).collect())))
        .collect();
    let together = median(steps.iter().map(|step| step.iter().sum()).collect());
    let each = together / f64::from(dispatches);
    println!("{what:>28} {parts}{together:10.1}{dispatches:12}{each:12.2}");
}

fn noop_device() -> (wgpu::Device, wgpu::Queue) {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::NOOP;
    descriptor.backend_options.noop.enable = true;
    let adapters = wgpu::Instance::new(descriptor).enumerate_adapters(wgpu::Backends::NOOP).block_on();
    let device = adapters[0].request_device(&wgpu::DeviceDescriptor::default()).block_on();
    device.expect("the noop adapter has the default limits")
}

/// The time from one call to the next.
struct Clock(Instant);

impl Clock {
    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        now - std::mem::replace(&mut self.0, now)
    }
}

/// Sequences in mid-answer.
struct Bench<'a> {
    device: &'a wgpu::Device,
    queue: &'a wgpu::Queue,
    kv: KvCache,
    attention: PagedAttention,
    tensors: BoundTensors,
    tables: Vec<TableId>,
}

impl<'a> Bench<'a> {
    fn new(device: &'a wgpu::Device, queue: &'a wgpu::Queue, sequences: u32) -> Self {
        let config = CacheConfig::for_context(2 * CONTEXT, sequences, &SHAPE, KvType::F16).expect("a shape");
        let mut attention = PagedAttention::new(device, SHAPE, config.clone()).expect("the default limits");
        let buffer = |elements: u32| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: u64::from(CONTEXT * elements) * 4,
                usage: BufferUsages::STORAGE,
                mapped_at_creation: false,
            })
        };
        let (query_len, kv_len) =
            (SHAPE.num_query_heads() * SHAPE.head_dim(), SHAPE.num_kv_heads() * SHAPE.head_dim());
        let [query, key, value, output] = [query_len, kv_len, kv_len, query_len].map(buffer);
        let slice = |buffer, row_stride| TensorSlice { buffer, offset: 0, row_stride, rows: CONTEXT };
        let tensors = attention.bind_tensors(&LayerTensors {
            query: slice(&query, query_len),
            key: slice(&key, kv_len),
            value: slice(&value, kv_len),
            output: slice(&output, query_len),
        });
        let mut kv = KvCache::new(config);
        let tables = (0..sequences).map(|_| kv.create(2 * CONTEXT).expect("a free table")).collect();
        let tensors = tensors.expect("tensors of the right size");
        let mut bench = Self { device, queue, kv, attention, tensors, tables };
        for sequence in 0..sequences {
            // Contexts end at every place within a block.
            bench.run(&[(bench.tables[sequence as usize], CONTEXT - sequence)]);
        }
        bench
    }

    /// One token for each sequence.
    fn step(&mut self) -> [Duration; 5] {
        let pushes: Vec<_> = self.tables.iter().map(|&table| (table, 1)).collect();
        self.run(&pushes)
    }

    fn run(&mut self, pushes: &[(TableId, u32)]) -> [Duration; 5] {
        let mut builder = StepBuilder::new(&mut self.kv);
        for &(table, rows) in pushes {
            builder.push(table, &vec![7; rows as usize]).expect("room in the pool");
        }
        let plan = builder.finish();
        let mut encoder = self.device.create_command_encoder(&Default::default());
        let mut clock = Clock(Instant::now());
        let mut step = self.attention.prepare(&plan).expect("a valid plan");
        let prepare = clock.lap();
        self.attention.record_transfers(&mut encoder, &mut step);
        let mut pass = encoder.begin_compute_pass(&Default::default());
        self.attention.record_block_copies(&mut pass, &mut step);
        for layer in 0..SHAPE.num_layers() {
            self.attention.record_layer(&mut pass, &mut step, layer, &self.tensors).expect("the right order");
        }
        let record = clock.lap();
        drop(pass);
        let end_of_pass = clock.lap();
        let commands = encoder.finish();
        let finish = clock.lap();
        self.queue.submit([commands]);
        let submit = clock.lap();
        drop(step);
        self.device.poll(wgpu::PollType::wait_indefinitely()).expect("a working device");
        self.kv.commit_step(plan).expect("the outstanding plan");
        [prepare, record, end_of_pass, finish, submit]
    }
}

/// A kernel with bind groups like the library's: two, four and two buffers, two of them at dynamic offsets.
const BARE: &str = "
@group(0) @binding(0) var<uniform> a: vec4<u32>;
@group(0) @binding(1) var<uniform> b: vec4<u32>;
@group(0) @binding(2) var<storage, read> c: array<u32>;
@group(1) @binding(0) var<storage, read_write> d: array<u32>;
@group(1) @binding(1) var<storage, read> e: array<u32>;
@group(2) @binding(0) var<storage, read> f: array<u32>;
@group(2) @binding(1) var<storage, read_write> g: array<u32>;
@compute @workgroup_size(64) fn main() { d[0] = a.x + b.x + c[0] + e[0]; g[0] = f[0]; }";

/// As many dispatches as a step of single rows has, two kernels in turn, recorded without the library.
struct Bare {
    pipelines: [wgpu::ComputePipeline; 2],
    groups: [[wgpu::BindGroup; 3]; 2],
}

impl Bare {
    fn new(device: &wgpu::Device) -> Self {
        let entry = |binding, ty, has_dynamic_offset| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset, min_binding_size: None },
            count: None,
        };
        let uniform = wgpu::BufferBindingType::Uniform;
        let [read, write] = [true, false].map(|read_only| wgpu::BufferBindingType::Storage { read_only });
        let layouts = [
            vec![entry(0, uniform, true), entry(1, uniform, true), entry(2, read, false)],
            vec![entry(0, write, false), entry(1, read, false)],
            vec![entry(0, read, false), entry(1, write, false)],
        ]
        .map(|entries| {
            let descriptor = wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries };
            (device.create_bind_group_layout(&descriptor), entries.len() as u32)
        });
        let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: None,
            bind_group_layouts: &layouts.each_ref().map(|(layout, _)| Some(layout)),
            immediate_size: 0,
        });
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: None,
            source: wgpu::ShaderSource::Wgsl(BARE.into()),
        });
        let pipeline = || {
            device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: None,
                layout: Some(&layout),
                module: &module,
                entry_point: Some("main"),
                compilation_options: Default::default(),
                cache: None,
            })
        };
        let group = |(layout, len): &(wgpu::BindGroupLayout, u32)| {
            let buffers: Vec<wgpu::Buffer> = (0..*len)
                .map(|_| {
                    device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
                        label: None,
                        contents: &[0; 1 << 16],
                        usage: BufferUsages::STORAGE | BufferUsages::UNIFORM,
                    })
                })
                .collect();
            let uniforms = buffers.iter().zip(0..).map(|(buffer, binding)| wgpu::BindGroupEntry {
                binding,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer,
                    offset: 0,
                    size: std::num::NonZero::new(256),
                }),
            });
            let entries: Vec<_> = uniforms.collect();
            device.create_bind_group(&wgpu::BindGroupDescriptor { label: None, layout, entries: &entries })
        };
        let groups = || layouts.each_ref().map(group);
        Self { pipelines: [pipeline(), pipeline()], groups: [groups(), groups()] }
    }

    fn step(&self, device: &wgpu::Device, queue: &wgpu::Queue) -> [Duration; 5] {
        let mut encoder = device.create_command_encoder(&Default::default());
        let mut clock = Clock(Instant::now());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for layer in 0..SHAPE.num_layers() {
            for (pipeline, groups) in self.pipelines.iter().zip(&self.groups) {
                pass.push_debug_group("kernel");
                pass.set_pipeline(pipeline);
                pass.set_bind_group(0, &groups[0], &[0, 256 * layer]);
                pass.set_bind_group(1, &groups[1], &[]);
                pass.set_bind_group(2, &groups[2], &[]);
                pass.dispatch_workgroups(64, 1, 1);
                pass.pop_debug_group();
            }
        }
        let record = clock.lap();
        drop(pass);
        let end_of_pass = clock.lap();
        let commands = encoder.finish();
        let finish = clock.lap();
        queue.submit([commands]);
        let submit = clock.lap();
        device.poll(wgpu::PollType::wait_indefinitely()).expect("a working device");
        [Duration::ZERO, record, end_of_pass, finish, submit]
    }
}
