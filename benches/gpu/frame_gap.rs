//! A window that draws at 60 Hz while a prompt of 16k tokens is read, on the same device: how long its frames are held up.
//!
//! ```text
//! cargo bench --workspace --bench frame_gap -- [ADAPTER]
//! ```
//!
//! It runs on every adapter whose name contains ADAPTER, but for those on GL.
//!
//! The budget of a step is meant as a time: the (row, key) pairs that the device computes in it. They are measured by
//! reading the prompt without drawing, in steps of about that size: short ones take longer per pair. Every frame is one
//! submission, as in an application: what is drawn, and a step if none is on its way. Printed is the longest time from
//! the end of a frame to the end of the next one; an attempt holds where that is at most twice the budget's time.
//! Whatever else the machine does can only make frames later, so the program fails where none of three attempts holds,
//! and where there is no adapter to try.

use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paged_kv::{
    BoundTensors, CacheConfig, KvType, LayerTensors, ModelShape, PagedAttention, Request, RowResult,
    Schedule, Scheduler, SchedulerConfig, StepPlan, TensorSlice,
};
use pollster::FutureExt as _;
use wgpu::{Adapter, Backends, BufferUsages, CommandEncoder, Device, Queue};

const SHAPE: ModelShape = ModelShape::new(1, 1, 1, 8);
const PROMPT: u32 = 16 << 10;
const STEP_TOKENS: u32 = 512;
/// A frame at 60 Hz.
const FRAME: Duration = Duration::from_micros(16_667);
/// What a step may take: long beside a frame, so that the frames' own rhythm does not count.
const BUDGET: Duration = Duration::from_millis(60);

struct Gpu {
    device: Device,
    queue: Queue,
}

/// A scheduler that has one long prompt to read, and the device part.
struct Reader<'a> {
    gpu: &'a Gpu,
    scheduler: Scheduler,
    attention: PagedAttention,
    tensors: BoundTensors,
}

impl<'a> Reader<'a> {
    fn new(gpu: &'a Gpu, step_work_budget: u64) -> Self {
        let cache = CacheConfig::for_context(PROMPT + 16, 1, &SHAPE, KvType::F16).expect("a pool");
        let config =
            SchedulerConfig { step_tokens: STEP_TOKENS, step_work_budget, ..SchedulerConfig::default() };
        let mut scheduler = Scheduler::new(config, cache.clone()).expect("budgets above zero");
        scheduler.add(Request::new(vec![1; PROMPT as usize]).max_new_tokens(1)).expect("a prompt that fits");
        let mut attention = PagedAttention::new(&gpu.device, SHAPE, cache).expect("a pool that fits");
        let bytes = u64::from(STEP_TOKENS * SHAPE.head_dim()) * 4;
        let [input, output] = [(); 2].map(|()| buffer(gpu, bytes));
        let slice =
            |buffer| TensorSlice { buffer, offset: 0, row_stride: SHAPE.head_dim(), rows: STEP_TOKENS };
        let tensors = attention
            .bind_tensors(&LayerTensors {
                query: slice(&input),
                key: slice(&input),
                value: slice(&input),
                output: slice(&output),
            })
            .expect("tensors of the right size");
        Self { gpu, scheduler, attention, tensors }
    }

    /// Records the next step, if there is one.
    fn record(&mut self, encoder: &mut CommandEncoder) -> Option<StepPlan> {
        let plan = match self.scheduler.schedule() {
            Schedule::Step(plan) => plan,
            Schedule::Idle => return None,
            Schedule::Waiting(reason) => panic!("the one request waits: {reason:?}"),
        };
        let mut step = self.attention.prepare(&plan).expect("a plan of this cache");
        self.attention.record_transfers(encoder, &mut step);
        let mut pass = encoder.begin_compute_pass(&Default::default());
        self.attention.record_block_copies(&mut pass, &mut step);
        self.attention.record_layer(&mut pass, &mut step, 0, &self.tensors).expect("the right order");
        drop(pass);
        Some(plan)
    }

    fn commit(&mut self, plan: StepPlan) {
        let results = vec![RowResult::Token(1); plan.logit_rows().len()];
        self.scheduler.commit(plan, &results).expect("the outstanding plan");
    }

    /// Reads the prompt, and waits for each step: pairs per second.
    fn measure(mut self) -> f64 {
        let (mut pairs, mut seconds) = (0, 0.0);
        loop {
            let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
            let Some(plan) = self.record(&mut encoder) else { return pairs as f64 / seconds };
            let start = Instant::now();
            self.gpu.queue.submit([encoder.finish()]);
            self.gpu.device.poll(wgpu::PollType::wait_indefinitely()).expect("a step that ends");
            // The first one compiles kernels.
            if plan.positions()[0] > 0 {
                seconds += start.elapsed().as_secs_f64();
                pairs += plan.work();
            }
            self.commit(plan);
        }
    }

    /// Reads the prompt beside frames: the longest time from one frame's end to the next one's, and the frames.
    fn draw(mut self) -> (Duration, usize) {
        let target = buffer(self.gpu, 1 << 20);
        let ends = Arc::new(Mutex::new(Vec::new()));
        let ended = || ends.lock().expect("no panic").len();
        let mut submitted = 0;
        let mut in_flight: Option<(usize, StepPlan)> = None;
        loop {
            let start = Instant::now();
            if let Some((_, plan)) = in_flight.take_if(|(frame, _)| ended() > *frame) {
                self.commit(plan);
            }
            // As a window does that has two pictures.
            if submitted - ended() < 2 {
                let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
                encoder.clear_buffer(&target, 0, None);
                if in_flight.is_none() {
                    let Some(plan) = self.record(&mut encoder) else { break };
                    in_flight = Some((submitted, plan));
                }
                let ends = Arc::clone(&ends);
                encoder.on_submitted_work_done(move || {
                    ends.lock().expect("no panic").push(Instant::now());
                });
                self.gpu.queue.submit([encoder.finish()]);
                submitted += 1;
            }
            while start.elapsed() < FRAME {
                self.gpu.device.poll(wgpu::PollType::Poll).expect("a device that is not lost");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let ends = ends.lock().expect("no panic");
        let longest = ends.windows(2).map(|pair| pair[1] - pair[0]).max().expect("two frames");
        (longest, ends.len())
    }
}

fn buffer(gpu: &Gpu, size: u64) -> wgpu::Buffer {
    gpu.device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size,
        usage: BufferUsages::STORAGE | BufferUsages::COPY_DST,
        mapped_at_creation: false,
    })
}

/// Whether frames come in time on one attempt of three.
fn keeps_frames(gpu: &Gpu) -> bool {
    let mut budget = 1 << 20;
    (0..3).any(|_| {
        // The second time with steps of about the size that they will have.
        for _ in 0..2 {
            let rate = Reader::new(gpu, budget).measure();
            budget = ((rate * BUDGET.as_secs_f64()) as u64).max(1);
        }
        let (gap, frames) = Reader::new(gpu, budget).draw();
        println!(
            "  a budget of {} ms is {budget} pairs; {frames} frames, the longest gap {} ms",
            BUDGET.as_millis(),
            gap.as_millis()
        );
        gap <= 2 * BUDGET
    })
}

fn main() -> ExitCode {
    // cargo passes `--bench`.
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapters = instance.enumerate_adapters(Backends::PRIMARY).block_on();
    let is_wanted =
        |adapter: &&Adapter| adapter.get_info().name.to_lowercase().contains(&wanted.to_lowercase());
    let chosen: Vec<_> = adapters.iter().filter(is_wanted).collect();
    if chosen.is_empty() {
        let names: Vec<_> = adapters.iter().map(|adapter| adapter.get_info().name).collect();
        let found = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        eprintln!("no adapter has \"{wanted}\" in its name; found, without those on GL: {found}");
        return ExitCode::FAILURE;
    }
    let mut all_keep = true;
    for adapter in chosen {
        let info = adapter.get_info();
        println!("{} on {}", info.name, info.backend);
        let descriptor = wgpu::DeviceDescriptor {
            required_features: paged_kv::recommended_features(adapter),
            ..Default::default()
        };
        let (device, queue) =
            adapter.request_device(&descriptor).block_on().expect("a device with the default limits");
        all_keep &= keeps_frames(&Gpu { device, queue });
    }
    if all_keep { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
