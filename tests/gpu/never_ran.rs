//! Steps that were committed and never ran: an encoder that was dropped, a frame that was skipped. What comes after them
//! would read keys and values that were never written.

use paged_kv::{
    BoundTensors, CacheConfig, KvType, LayerTensors, ModelShape, PagedAttention, PrepareError, PreparedStep,
    Request, RequestId, RowResult, Schedule, Scheduler, SchedulerConfig, StepPlan, TensorSlice, TokenId,
};
use wgpu::{BufferUsages, CommandEncoder, Features, Limits};

use crate::device::{TestDevice, noop_device};
use crate::device_rig::{on_each_adapter_but_gl, open};
use crate::raw::read;
use crate::rig::Random;

const SHAPE: ModelShape = ModelShape::new(2, 1, 1, 8);
/// Rows of a step.
const ROWS: u32 = 4;

/// Chats whose model has one value: a token's number, in every layer. Queries are zero, so the result is a mean.
struct App<'a> {
    gpu: &'a TestDevice,
    scheduler: Scheduler,
    attention: PagedAttention,
    value: wgpu::Buffer,
    output: wgpu::Buffer,
    tensors: BoundTensors,
}

impl<'a> App<'a> {
    fn new(gpu: &'a TestDevice) -> Self {
        let cache = CacheConfig::for_blocks(16, &SHAPE, KvType::F32)
            .and_then(|config| config.with_block_size(4))
            .expect("a valid configuration");
        let config = SchedulerConfig { step_tokens: ROWS, ..Default::default() };
        let scheduler = Scheduler::new(config, cache.clone()).expect("a valid configuration");
        let mut attention = PagedAttention::new(&gpu.device, SHAPE, cache).expect("a device that suffices");
        let [zero, value, output] = [(); 3].map(|()| {
            gpu.device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: u64::from(ROWS) * 32,
                usage: BufferUsages::STORAGE | BufferUsages::COPY_DST | BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            })
        });
        let slice = |buffer| TensorSlice { buffer, offset: 0, row_stride: 8, rows: ROWS };
        let tensors = LayerTensors {
            query: slice(&zero),
            key: slice(&zero),
            value: slice(&value),
            output: slice(&output),
        };
        let tensors = attention.bind_tensors(&tensors).expect("valid tensors");
        Self { gpu, scheduler, attention, value, output, tensors }
    }

    fn add(&mut self, tokens: &[TokenId]) -> RequestId {
        self.scheduler.add(Request::new(tokens).max_new_tokens(40)).expect("a request that fits")
    }

    fn schedule(&mut self) -> Option<StepPlan> {
        match self.scheduler.schedule() {
            Schedule::Step(plan) => Some(plan),
            _ => None,
        }
    }

    /// Records `layers` layers of a step.
    fn record(&mut self, step: &mut PreparedStep, layers: u32) -> CommandEncoder {
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        self.attention.record_transfers(&mut encoder, step);
        let mut pass = encoder.begin_compute_pass(&Default::default());
        self.attention.record_block_copies(&mut pass, step);
        for layer in 0..layers {
            self.attention.record_layer(&mut pass, step, layer, &self.tensors).expect("the right order");
        }
        drop(pass);
        encoder
    }

    fn submit(&mut self, plan: &StepPlan, encoder: CommandEncoder) {
        let values: Vec<f32> = plan.token_ids().iter().flat_map(|&token| [token as f32; 8]).collect();
        self.gpu.queue.write_buffer(&self.value, 0, bytemuck::cast_slice(&values));
        self.gpu.queue.submit([encoder.finish()]);
    }

    fn commit(&mut self, plan: StepPlan) {
        let results = vec![RowResult::Token(9); plan.logit_rows().len()];
        self.scheduler.commit(plan, &results).expect("the outstanding plan");
    }

    /// A step that runs; the results of its rows that were asked for.
    fn step(&mut self) -> Result<Vec<f32>, PrepareError> {
        let plan = self.schedule().expect("something to do");
        let mut step = self.attention.prepare(&plan)?;
        let encoder = self.record(&mut step, SHAPE.num_layers());
        self.submit(&plan, encoder);
        let output: Vec<f32> = read(self.gpu, &self.output);
        let results = plan.logit_rows().iter().map(|logits| output[8 * logits.row as usize]).collect();
        self.commit(plan);
        Ok(results)
    }
}

#[test]
fn b54_a_chunk_whose_encoder_was_dropped_is_computed_again_and_never_counted() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let mut app = App::new(&gpu);
        let first = app.add(&[100; 4]);
        assert_eq!(app.step(), Ok(vec![100.0]));
        assert!(app.scheduler.abort(first).expect("a request of this scheduler"));
        app.add(&[7, 7, 7, 7, 5, 5, 5, 5]);
        let plan = app.schedule().expect("the first chunk");
        let mut step = app.attention.prepare(&plan).expect("a valid plan");
        drop(app.record(&mut step, SHAPE.num_layers()));
        let lost = plan.step().raw();
        app.commit(plan);
        // As long as the step is held, more of it may come.
        drop(step);

        for _ in 0..3 {
            assert_eq!(app.step(), Err(PrepareError::StepNotExecuted { step: lost }));
        }
        app.scheduler.forget_device();
        assert_eq!(app.step(), Ok(vec![]));
        assert_eq!(app.step(), Ok(vec![6.0]));
        // The token that was generated is 9.
        assert_eq!(app.step(), Ok(vec![57.0 / 9.0]));
    });
}

/// Layers in passes of two encoders, the second pass begun when the first one is gone, or both at once.
fn record_in_two(app: &mut App<'_>, step: &mut PreparedStep, at_once: bool) -> [CommandEncoder; 2] {
    let mut encoders = [(); 2].map(|()| app.gpu.device.create_command_encoder(&Default::default()));
    app.attention.record_transfers(&mut encoders[0], step);
    let mut passes = Vec::new();
    for (layer, encoder) in (0..).zip(&mut encoders) {
        if !at_once {
            passes.clear();
        }
        let mut pass = encoder.begin_compute_pass(&Default::default());
        if layer == 0 {
            app.attention.record_block_copies(&mut pass, step);
        }
        app.attention.record_layer(&mut pass, step, layer, &app.tensors).expect("the right order");
        passes.push(pass);
    }
    drop(passes);
    encoders
}

#[test]
fn each_encoder_that_has_a_part_of_a_step_holds_it() {
    assert_eq!(SHAPE.num_layers(), 2, "a layer for each encoder");
    let gpu = noop_device(Limits::default(), Features::empty(), 8..=8);
    let mut app = App::new(&gpu);
    let poll = || gpu.device.poll(wgpu::PollType::wait_indefinitely()).expect("a working device");
    app.add(&[7; 4]);
    app.step().expect("a step that runs");
    for at_once in [false, true] {
        for lost in [None, Some(0), Some(1)] {
            let plan = app.schedule().expect("the next token");
            let mut step = app.attention.prepare(&plan).expect("a valid plan");
            let metadata = step.metadata().clone();
            let [first, second] = record_in_two(&mut app, &mut step, at_once);
            drop(step);
            app.commit(plan);
            let (kept, other) = if lost == Some(0) { (first, second) } else { (second, first) };
            gpu.queue.submit([other.finish()]);
            poll();

            let plan = app.schedule().expect("the next token");
            let step = app.attention.prepare(&plan).expect("the last step may yet run");
            assert_ne!(step.metadata(), &metadata, "{at_once}, {lost:?}: a step's metadata was given away");
            drop((plan, step));
            match lost {
                Some(_) => drop(kept),
                None => _ = gpu.queue.submit([kept.finish()]),
            }
            poll();
            let next = app.step();
            assert_eq!(
                matches!(next, Err(PrepareError::StepNotExecuted { .. })),
                lost.is_some(),
                "{at_once}, {lost:?}: {next:?}"
            );
            if lost.is_some() {
                app.scheduler.forget_device();
                app.step().expect("a step that runs");
            }
        }
    }
}

/// wgpu numbers its passes, so they are told apart; if it no longer did, there would be a callback in every layer.
#[test]
fn wgpu_is_asked_once_in_each_pass_to_say_that_a_step_has_run() {
    let gpu = noop_device(Limits::default(), Features::empty(), 8..=8);
    let mut app = App::new(&gpu);
    app.add(&[7; 4]);
    let plan = app.schedule().expect("a prompt");
    let mut step = app.attention.prepare(&plan).expect("a valid plan");
    let encoder = app.record(&mut step, SHAPE.num_layers());
    let told = format!("{encoder:?}");
    // One for the upload, one for the pass.
    assert!(told.contains("on_submitted_work_done_callbacks.len(): 2"), "{told}");
}

/// What they read then is an earlier step's: here one of more rows than the tensors have.
#[test]
fn layers_that_run_without_their_upload_write_nothing_that_the_tensors_have_no_rows_for() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let mut app = App::new(&gpu);
        app.add(&[7; 4]);
        assert_eq!(app.step(), Ok(vec![7.0]));
        let slice = |buffer| TensorSlice { buffer, offset: 0, row_stride: 8, rows: 1 };
        let zero = gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 32,
            usage: BufferUsages::STORAGE,
            mapped_at_creation: false,
        });
        let [query, key] = [(); 2].map(|()| slice(&zero));
        let tensors = LayerTensors { query, key, value: slice(&app.value), output: slice(&app.output) };
        app.tensors = app.attention.bind_tensors(&tensors).expect("valid tensors");
        gpu.queue.write_buffer(&app.output, 0, bytemuck::cast_slice(&[f32::NAN; 8 * ROWS as usize]));

        let plan = app.schedule().expect("the next token");
        assert_eq!(plan.num_rows(), 1);
        let mut step = app.attention.prepare(&plan).expect("a valid plan");
        let mut upload = gpu.device.create_command_encoder(&Default::default());
        app.attention.record_transfers(&mut upload, &mut step);
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        app.attention.record_block_copies(&mut pass, &mut step);
        for layer in 0..SHAPE.num_layers() {
            app.attention.record_layer(&mut pass, &mut step, layer, &app.tensors).expect("the right order");
        }
        drop((pass, upload));
        app.submit(&plan, encoder);
        let output: Vec<f32> = read(&gpu, &app.output);
        assert!(output.iter().all(|x| x.is_nan()), "{output:?}");
        // With its upload it is computed.
        drop((plan, step));
        assert_eq!(app.step(), Ok(vec![37.0 / 5.0]));
    });
}

/// What becomes of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Submitted,
    /// The encoder is kept, and submitted or dropped some steps later.
    Kept,
    Unprepared,
    Unrecorded,
    LastLayerMissing,
    EncoderDropped,
    CommandsDropped,
}

const FATES: [Fate; 12] = [
    Fate::Submitted,
    Fate::Submitted,
    Fate::Submitted,
    Fate::Submitted,
    Fate::Submitted,
    Fate::Kept,
    Fate::Kept,
    Fate::Unprepared,
    Fate::Unrecorded,
    Fate::LastLayerMissing,
    Fate::EncoderDropped,
    Fate::CommandsDropped,
];

#[test]
fn a_step_that_was_committed_and_never_ran_is_an_error_in_every_order_and_no_other_is() {
    let gpu = noop_device(Limits::default(), Features::empty(), 8..=8);
    let (mut errors, mut runs) = (0, 0);
    for seed in 0..60 {
        let mut random = Random(seed);
        let mut app = App::new(&gpu);
        // Encoders that are kept; those of steps that were committed since the device was forgotten have a number.
        let mut kept: Vec<(CommandEncoder, StepPlanNumber)> = Vec::new();
        let mut missing: Vec<u64> = Vec::new();
        for _ in 0..150 {
            while app.scheduler.stats().running + app.scheduler.stats().waiting < 3 {
                app.add(&vec![3; 1 + (random.next() % 9) as usize]);
            }
            if !kept.is_empty() && (kept.len() == 6 || random.next().is_multiple_of(3)) {
                let (encoder, number) = kept.remove(0);
                match random.next().is_multiple_of(4) {
                    true => {
                        drop(encoder);
                        missing.extend(number);
                    }
                    false => _ = gpu.queue.submit([encoder.finish()]),
                }
            }
            if random.next().is_multiple_of(2) {
                let _ = gpu.device.poll(wgpu::PollType::wait_indefinitely());
            }
            let fate = FATES[random.next() as usize % FATES.len()];
            let commits = !random.next().is_multiple_of(4);
            let plan = app.schedule().expect("chats to answer");
            let number = Some(plan.step().raw()).filter(|_| commits);
            if fate == Fate::Unprepared {
                if commits {
                    app.commit(plan);
                }
                missing.extend(number);
                continue;
            }
            let mut step = match app.attention.prepare(&plan) {
                Ok(step) => step,
                Err(PrepareError::StepNotExecuted { step }) => {
                    assert!(
                        missing.contains(&step),
                        "seed {seed}: step {step} has run, {missing:?} have not"
                    );
                    errors += 1;
                    if random.next().is_multiple_of(2) {
                        app.scheduler.forget_device();
                        missing.clear();
                        kept.iter_mut().for_each(|(_, number)| *number = None);
                    }
                    continue;
                }
                Err(error) => panic!("seed {seed}: {error}"),
            };
            assert_eq!(missing, [], "seed {seed}: nothing was said");
            runs += 1;
            if fate == Fate::Unrecorded {
                drop(step);
                missing.extend(number);
            } else {
                let layers = SHAPE.num_layers() - u32::from(fate == Fate::LastLayerMissing);
                let encoder = app.record(&mut step, layers);
                drop(step);
                match fate {
                    Fate::Kept => kept.push((encoder, number)),
                    Fate::EncoderDropped => drop(encoder),
                    Fate::CommandsDropped => drop(encoder.finish()),
                    _ => app.submit(&plan, encoder),
                }
                if !matches!(fate, Fate::Submitted | Fate::Kept) {
                    // Submitted, the incomplete step holds its slot until the device is polled.
                    let _ = gpu.device.poll(wgpu::PollType::wait_indefinitely());
                    missing.extend(number);
                }
            }
            if commits {
                app.commit(plan);
            }
        }
    }
    assert!(errors > 500 && runs > 1000, "{errors} errors, {runs} runs");
}

/// The number of a committed step.
type StepPlanNumber = Option<u64>;
