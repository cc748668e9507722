//! A hostile caller of the device part: every public function with arguments that no application should give it, in any
//! order, with objects of other attention objects, caches and devices, steps that are given up at any point, damaged plans,
//! and devices that are lost. Nothing panics, nothing reaches the application's handler of uncaptured errors, every error
//! that has numbers tells them, and what the documentation advises after an error brings every object on.
//!
//! 100,000 calls on wgpu's noop backend, or what `PAGED_KV_HOSTILE_CALLS` says. Plans are checked on the host, so nothing
//! needs to be computed.

use std::collections::BTreeSet;
use std::fmt::{Debug, Display};
use std::sync::{Arc, Mutex};

use paged_kv::{
    ActivationType, AttentionOptions, BoundTensors, CacheConfig, DeviceError, KvCache, KvType, LayerTensors,
    LogitRule, ModelShape, PagedAttention, PrepareError, PreparedStep, StepBuilder, StepPlan, TableId,
    TensorSlice, recommended_features, recommended_limits, recommended_scheduler_config,
};
use wgpu::{BufferUsages, CommandEncoder, ErrorFilter, Features, Limits};

use crate::device::{TestAdapter, TestDevice};
use crate::rig::Random;

const SHAPE: ModelShape = ModelShape::new(2, 2, 1, 8);
const MAX_ROWS: u32 = 64;
/// Calls of one world.
const LIFE: usize = 1_000;

type Call = fn(&mut World);

/// An attention object, and the cache that its plans should come from.
struct Object {
    attention: PagedAttention,
    device: wgpu::Device,
    queue: wgpu::Queue,
    kv: KvCache,
    tables: Vec<TableId>,
}

impl Object {
    fn new(gpu: &TestDevice, attention: PagedAttention, cache: CacheConfig) -> Self {
        let (device, queue) = (gpu.device.clone(), gpu.queue.clone());
        Self { attention, device, queue, kv: KvCache::new(cache), tables: Vec::new() }
    }

    /// Goes on with another device, or the same.
    fn rebuild(&mut self, gpu: &TestDevice) -> Result<(), DeviceError> {
        self.attention.rebuild(&gpu.device)?;
        // Where that fails, another cache makes it go on where it was.
        (self.device, self.queue) = (gpu.device.clone(), gpu.queue.clone());
        Ok(())
    }
}

/// Commands that are being recorded.
struct Commands {
    device: wgpu::Device,
    encoder: CommandEncoder,
    /// Whether wgpu may have something to say to its application: objects of two devices, or of one that is given up.
    is_mixed: bool,
}

/// What the caller has got hold of.
struct World {
    random: Random,
    adapter: TestAdapter,
    devices: Vec<TestDevice>,
    objects: Vec<Object>,
    plans: Vec<StepPlan>,
    steps: Vec<PreparedStep>,
    commands: Vec<Commands>,
    buffers: Vec<wgpu::Buffer>,
    tensors: Vec<BoundTensors>,
    uncaptured: Arc<Mutex<Vec<String>>>,
    reached: Reached,
}

/// How far objects got in spite of the caller.
#[derive(Clone, Copy, Debug, Default)]
struct Reached {
    steps: u64,
    errors: u64,
    losses: u64,
    damaged: u64,
}

fn config(num_blocks: u32, kv_type: KvType) -> CacheConfig {
    CacheConfig::for_blocks(num_blocks, &SHAPE, kv_type)
        .and_then(|config| config.with_block_size(4))
        .and_then(|config| config.with_max_sequences(6))
        .and_then(|config| config.with_host_blocks(6))
        .expect("a valid configuration")
}

impl World {
    fn new(seed: u64) -> Self {
        let adapter = TestAdapter::noop(Limits::default(), Features::SUBGROUP, 8..=8);
        let mut world = Self {
            random: Random(seed),
            adapter,
            devices: Vec::new(),
            objects: Vec::new(),
            plans: vec![StepPlan::default()],
            steps: Vec::new(),
            commands: Vec::new(),
            buffers: Vec::new(),
            tensors: Vec::new(),
            uncaptured: Arc::default(),
            reached: Reached::default(),
        };
        for _ in 0..2 {
            let device = world.open();
            world.devices.push(device);
        }
        // Two that differ in nothing, and one of another configuration on another device.
        for (device, num_blocks) in [(0, 12), (0, 12), (1, 9)] {
            let cache = config(num_blocks, KvType::F16);
            let gpu = &world.devices[device];
            let attention = PagedAttention::new(&gpu.device, SHAPE, cache.clone()).expect("a noop device");
            let object = Object::new(gpu, attention, cache);
            world.objects.push(object);
        }
        world
    }

    fn open(&self) -> TestDevice {
        let device = self.adapter.request_device(Limits::default(), Features::SUBGROUP).expect("as offered");
        let uncaptured = Arc::clone(&self.uncaptured);
        device.device.on_uncaptured_error(Arc::new(move |error| {
            uncaptured.lock().expect("one thread").push(error.to_string());
        }));
        device
    }

    fn below(&mut self, end: usize) -> usize {
        (self.random.next() >> 8) as usize % end
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// A number that is small, or one of those at which arithmetic breaks.
    fn number(&mut self) -> u32 {
        match self.below(10) {
            0 => u32::MAX,
            1 => u32::MAX - self.below(20) as u32,
            2 => 1 << self.below(32),
            3 => self.random.next() as u32,
            4 | 5 => self.below(3) as u32,
            _ => self.below(70) as u32,
        }
    }

    fn long(&mut self) -> u64 {
        match self.chance(50) {
            true => u64::from(self.number()),
            false => self.random.next() >> self.below(64),
        }
    }

    fn object(&mut self) -> &mut Object {
        let index = self.below(self.objects.len());
        &mut self.objects[index]
    }

    fn device(&mut self) -> wgpu::Device {
        let index = self.below(self.devices.len());
        self.devices[index].device.clone()
    }

    /// Every error says something, and its numbers if it has any.
    fn judge<T, E: Debug + Display>(&mut self, outcome: Result<T, E>) -> Option<T> {
        let error = match outcome {
            Ok(value) => return Some(value),
            Err(error) => error,
        };
        self.reached.errors += 1;
        let (fields, text) = (format!("{error:?}"), error.to_string());
        let has_digit = |text: &str| text.contains(|letter: char| letter.is_ascii_digit());
        assert!(!text.is_empty(), "{fields} says nothing");
        assert!(has_digit(&text) || !has_digit(&fields), "{fields} says `{text}`");
        None
    }

    fn taint(&mut self) {
        self.commands.iter_mut().for_each(|commands| commands.is_mixed = true);
    }

    /// What lies between the library and its application: nothing of what it does is an error there.
    fn assert_quiet(&self) {
        let uncaptured = self.uncaptured.lock().expect("one thread");
        assert!(uncaptured.is_empty(), "reached the application: {uncaptured:?}");
    }
}

/// A plan of an object's cache, of a few tables, some of which move.
fn plan_of(random: &mut Random, object: &mut Object) -> StepPlan {
    let mut below = |end: u64| (random.next() >> 8) % end;
    // A step that is outstanding is given up.
    drop(StepBuilder::new(&mut object.kv));
    if object.tables.len() < 4 {
        object.tables.extend(object.kv.create(24).ok());
    } else if below(8) == 0 {
        let table = object.tables.swap_remove(below(4) as usize);
        object.kv.release(table).expect("a live table");
    }
    let mut step = StepBuilder::new(&mut object.kv);
    for &table in &object.tables {
        // Whatever is refused is left out.
        match below(6) {
            0 => drop(step.swap_out(table)),
            1 => drop(step.swap_in(table).and_then(|()| step.push(table, &[7]))),
            2 => {}
            _ => drop(step.push(table, &vec![7; 1 + below(6) as usize])),
        }
    }
    step.finish()
}

fn plan(world: &mut World) {
    let index = world.below(world.objects.len());
    let plan = plan_of(&mut world.random, &mut world.objects[index]);
    world.plans.push(plan);
    if world.plans.len() > 8 {
        drop(world.plans.remove(0));
    }
}

/// A plan with a digit, or some, that it should not have.
fn damage(world: &mut World) {
    let index = world.below(world.plans.len());
    let text = world.plans[index].to_string();
    let digits: Vec<usize> = text.match_indices(|c: char| c.is_ascii_digit()).map(|(at, _)| at).collect();
    let at = digits[world.below(digits.len())];
    let number = if world.chance(50) { world.number() } else { world.below(10) as u32 };
    let damaged = format!("{}{number}{}", &text[..at], &text[at + 1..]);
    let parsed = damaged.parse();
    if let Some(plan) = world.judge(parsed) {
        world.reached.damaged += 1;
        world.plans[index] = plan;
    }
}

fn commit(world: &mut World) {
    let index = world.below(world.plans.len());
    let plan = if world.chance(50) { world.plans[index].clone() } else { StepPlan::default() };
    let committed = world.object().kv.commit_step(plan);
    world.judge(committed);
}

fn forget_device(world: &mut World) {
    world.object().kv.forget_device();
}

fn prepare(world: &mut World) {
    let (index, last) = (world.below(world.plans.len()), world.plans.len() - 1);
    let index = if world.chance(50) { last } else { index };
    let plan = world.plans[index].clone();
    let prepared = world.object().attention.prepare(&plan);
    if let Some(step) = world.judge(prepared) {
        world.steps.push(step);
    }
    if world.steps.len() > 12 {
        let index = world.below(world.steps.len());
        drop(world.steps.swap_remove(index));
    }
}

fn drop_something(world: &mut World) {
    let World { random, steps, commands, tensors, buffers, .. } = world;
    let len = [steps.len(), commands.len(), tensors.len(), buffers.len()];
    let kind = (random.next() >> 8) as usize % 4;
    let Some(index) = ((random.next() >> 8) as usize).checked_rem(len[kind]) else { return };
    match kind {
        0 => drop(steps.swap_remove(index)),
        1 => drop(commands.swap_remove(index)),
        2 => drop(tensors.swap_remove(index)),
        _ => drop(buffers.swap_remove(index)),
    }
}

/// Records anything into anything.
fn record(world: &mut World) {
    if world.commands.is_empty() || world.chance(20) {
        let device = world.device();
        let encoder = device.create_command_encoder(&Default::default());
        world.commands.push(Commands { device, encoder, is_mixed: false });
    }
    if world.steps.is_empty() {
        return;
    }
    let index = world.below(world.commands.len());
    let mut commands = world.commands.swap_remove(index);
    // An object's own device is not told; what is not known to fit may be mixed.
    commands.is_mixed = true;
    if world.chance(60) {
        let (object, step) = (world.below(world.objects.len()), world.below(world.steps.len()));
        let attention = &mut world.objects[object].attention;
        if world.random.next().is_multiple_of(8) {
            attention.record_initialization(&mut commands.encoder);
        }
        attention.record_transfers(&mut commands.encoder, &mut world.steps[step]);
    }
    let mut pass = commands.encoder.begin_compute_pass(&Default::default());
    for _ in 0..world.below(6) {
        let (object, step) = (world.below(world.objects.len()), world.below(world.steps.len()));
        let layer = if world.chance(80) { world.below(2) as u32 } else { world.number() };
        let (kind, which) = (world.below(3), world.below(world.tensors.len().max(1)));
        let attention = &mut world.objects[object].attention;
        let (step, tensors) = (&mut world.steps[step], world.tensors.get(which));
        let recorded = match (kind, tensors) {
            (1, Some(tensors)) => attention.record_layer(&mut pass, step, layer, tensors),
            (2, Some(tensors)) => attention.record_append(&mut pass, step, layer, tensors),
            _ => {
                attention.record_block_copies(&mut pass, step);
                Ok(())
            }
        };
        world.judge(recorded);
    }
    drop(pass);
    world.commands.push(commands);
}

fn submit(world: &mut World) {
    if world.commands.is_empty() {
        return;
    }
    let index = world.below(world.commands.len());
    let commands = world.commands.swap_remove(index);
    let device = world.below(world.devices.len());
    let TestDevice { device, queue, .. } = &world.devices[device];
    let is_mixed = commands.is_mixed || commands.device != *device;
    // What wgpu has to say is for whoever submits.
    let scopes = [&commands.device, device].map(|device| device.push_error_scope(ErrorFilter::Validation));
    queue.submit([commands.encoder.finish()]);
    let [own, other] = scopes;
    let said = [pollster::block_on(other.pop()), pollster::block_on(own.pop())];
    assert!(is_mixed || said.iter().all(Option::is_none), "{said:?}");
}

fn poll(world: &mut World) {
    let device = world.device();
    let _ = device.poll(wgpu::PollType::Poll);
    let object = world.object();
    for report in object.attention.poll_transfers() {
        object.kv.complete_transfers(report.step, report.complete);
    }
}

fn new_buffer(world: &mut World) {
    let usages = [
        BufferUsages::STORAGE,
        BufferUsages::STORAGE | BufferUsages::COPY_SRC,
        BufferUsages::COPY_DST,
        BufferUsages::UNIFORM,
    ];
    let (device, usage) = (world.device(), usages[world.below(4)]);
    let size = 4 * world.below(3_000) as u64;
    let buffer =
        device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false });
    if world.chance(10) {
        buffer.destroy();
    }
    world.buffers.push(buffer);
    if world.buffers.len() > 30 {
        drop(world.buffers.remove(0));
    }
}

fn bind(world: &mut World) {
    if world.buffers.is_empty() {
        return new_buffer(world);
    }
    let mut slice = || {
        let buffer = world.below(world.buffers.len());
        let buffer = world.buffers[buffer].clone();
        let offset = if world.chance(80) { 256 * (world.below(3) as u64) } else { world.long() };
        let row_stride = if world.chance(80) { 4 * (2 + world.below(4) as u32) } else { world.number() };
        let rows = if world.chance(80) { 1 + world.below(40) as u32 } else { world.number() };
        (buffer, offset, row_stride, rows)
    };
    let slices = [slice(), slice(), slice(), slice()];
    let [query, key, value, output] = slices.each_ref().map(|(buffer, offset, row_stride, rows)| {
        TensorSlice { buffer, offset: *offset, row_stride: *row_stride, rows: *rows }
    });
    let tensors = LayerTensors { query, key, value, output };
    let layer = if world.chance(50) { Some(world.number()) } else { None };
    let bound = match layer {
        Some(layer) => world.object().attention.bind_layer_tensors(layer, &tensors),
        None => world.object().attention.bind_tensors(&tensors),
    };
    if let Some(tensors) = world.judge(bound) {
        assert!(tensors.rows() > 0);
        world.tensors.push(tensors);
    }
    if world.tensors.len() > 12 {
        drop(world.tensors.remove(0));
    }
}

fn look(world: &mut World) {
    let arenas = world.object().attention.arena_layout().num_arenas();
    let attention = &world.object().attention;
    assert!(arenas > 0 && attention.arena_buffers().len() == attention.arena_layout().num_arenas() as usize);
    assert!(attention.split_config().heads_per_kv_head == 2 && !attention.variants().is_empty());
    assert!(attention.stats().staging_bytes <= 2 * (64 << 20));
    let Some(step) = world.steps.last() else { return };
    let rows = u64::from(step.rows());
    let words = step.metadata().size() / 4;
    assert!(u64::from(step.token_ids_start()) + rows <= words);
    assert!(u64::from(step.positions_start()) + rows <= words);
    if world.chance(20) {
        world.steps.last_mut().expect("a step").skip_layers();
    }
}

fn options(world: &mut World) -> AttentionOptions {
    let activations = [ActivationType::F32, ActivationType::F16][world.below(2)];
    assert!(activations.bytes() <= 4);
    let options = AttentionOptions::default()
        .activations(activations)
        .checked_shaders(world.chance(50))
        .compact_shaders(world.chance(50))
        .allow_subgroups(world.chance(50))
        .dispatch_work_budget(world.long())
        .scratch_bytes(world.long())
        .staging_bytes(world.long())
        .target_workgroups(world.number());
    let span = world.number();
    match world.below(3) {
        0 => options.fixed_span_tokens(span),
        1 => options.batch_invariant(span),
        _ => options,
    }
}

/// Rare, because kernels are compiled.
fn new(world: &mut World) {
    if !world.chance(4) {
        return;
    }
    let options = options(world);
    let shape = match world.chance(50) {
        true => {
            let numbers = [f32::NAN, f32::INFINITY, 0.0, -1.0, 0.5];
            let rule = LogitRule::new().with_scale(numbers[world.below(5)]);
            SHAPE.with_logits(rule.with_soft_cap(numbers[world.below(5)]))
        }
        false => ModelShape::new(world.number(), world.number(), world.number(), world.number()),
    };
    let (gpu, cache) = (world.below(world.devices.len()), config(12, KvType::F32));
    let made = PagedAttention::with_options(&world.devices[gpu].device, shape, cache.clone(), options);
    let Some(attention) = world.judge(made) else { return };
    let mut object = Object::new(&world.devices[gpu], attention, cache);
    for _ in 0..4 {
        let plan = plan_of(&mut world.random, &mut object);
        let prepared = object.attention.prepare(&plan);
        world.judge(prepared);
    }
}

fn use_cache(world: &mut World) {
    let same = world.chance(70);
    let (num_blocks, number) = (1 + world.below(20) as u32, world.long());
    let taken = {
        let object = world.object();
        let cache = if same { object.kv.config().clone() } else { config(num_blocks, KvType::F16) };
        object.attention.use_cache(cache, number)
    };
    world.taint();
    world.judge(taken);
}

fn rebuild(world: &mut World) {
    if !world.chance(4) {
        return;
    }
    let (device, object) = (world.below(world.devices.len()), world.below(world.objects.len()));
    let rebuilt = world.objects[object].rebuild(&world.devices[device]);
    world.taint();
    world.judge(rebuilt);
}

fn lose_device(world: &mut World) {
    if !world.chance(4) {
        return;
    }
    let index = world.below(world.devices.len());
    world.devices[index].device.destroy();
    world.reached.losses += 1;
    world.taint();
    // Sometimes it goes on with the lost one.
    if world.chance(70) {
        world.devices[index] = world.open();
    }
}

fn recommend(world: &mut World) {
    let base = Limits {
        max_bind_groups: world.number(),
        max_storage_buffer_binding_size: world.long(),
        max_buffer_size: world.long(),
        ..Limits::downlevel_defaults()
    };
    let limits = recommended_limits(world.adapter.adapter(), base.clone());
    assert!(limits.max_bind_groups >= base.max_bind_groups && limits.max_buffer_size >= base.max_buffer_size);
    assert_eq!(recommended_features(world.adapter.adapter()), Features::SUBGROUP);
    let shape = ModelShape::new(world.number(), world.number(), world.number(), world.number());
    let (device, parameters) = (world.device(), world.long());
    let config = recommended_scheduler_config(&device, &shape, parameters);
    assert!(config.step_tokens > 0 && config.step_work_budget > 0);
}

/// What the documentation advises brings an object on, whatever was done to it: one whole step.
fn honest_step(world: &mut World) {
    let index = world.below(world.objects.len());
    for attempt in 0..10 {
        let object = &mut world.objects[index];
        let plan = plan_of(&mut world.random, object);
        let error = match object.attention.prepare(&plan) {
            Ok(step) => return run(world, index, plan, step),
            Err(error) => error,
        };
        match error {
            PrepareError::StepsInFlight { .. } | PrepareError::TransfersInFlight { .. } => {
                world.steps.clear();
                world.commands.clear();
                for gpu in &world.devices {
                    let _ = gpu.device.poll(wgpu::PollType::wait_indefinitely());
                }
                let object = &mut world.objects[index];
                for report in object.attention.poll_transfers() {
                    object.kv.complete_transfers(report.step, report.complete);
                }
            }
            PrepareError::DeviceLost => {
                world.devices[0] = world.open();
                world.taint();
                let object = &mut world.objects[index];
                object.rebuild(&world.devices[0]).expect("a new device");
                object.kv.forget_device();
            }
            PrepareError::StepNotExecuted { .. } if attempt < 3 => object.kv.forget_device(),
            PrepareError::DeviceNotForgotten { .. } if attempt < 3 => object.kv.forget_device(),
            // A number of a damaged plan was taken at its word: another cache begins anew.
            _ => {
                let cache = config(12, KvType::F16);
                object.kv = KvCache::new(cache.clone());
                object.tables.clear();
                let instance = object.kv.instance();
                let taken = object.attention.use_cache(cache, instance);
                world.taint();
                world.judge(taken);
            }
        }
        world.judge::<(), _>(Err(error));
    }
    panic!("no step, whatever is done");
}

fn run(world: &mut World, index: usize, plan: StepPlan, mut step: PreparedStep) {
    let object = &mut world.objects[index];
    let (device, queue) = (object.device.clone(), object.queue.clone());
    let buffer = || {
        let size = u64::from(MAX_ROWS) * 64;
        device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size,
            usage: BufferUsages::STORAGE,
            mapped_at_creation: false,
        })
    };
    let (input, output) = (buffer(), buffer());
    let slice = |buffer| TensorSlice { buffer, offset: 0, row_stride: 16, rows: MAX_ROWS };
    let [query, key, value] = [(); 3].map(|()| slice(&input));
    let tensors = LayerTensors { query, key, value, output: slice(&output) };
    let tensors = object.attention.bind_tensors(&tensors).expect("tensors of its device");
    let scope = device.push_error_scope(ErrorFilter::Validation);
    let mut encoder = device.create_command_encoder(&Default::default());
    object.attention.record_transfers(&mut encoder, &mut step);
    let mut pass = encoder.begin_compute_pass(&Default::default());
    object.attention.record_block_copies(&mut pass, &mut step);
    for layer in 0..SHAPE.num_layers() {
        object.attention.record_layer(&mut pass, &mut step, layer, &tensors).expect("the right order");
    }
    drop(pass);
    queue.submit([encoder.finish()]);
    let said = pollster::block_on(scope.pop());
    assert!(said.is_none(), "{said:?}");
    drop(step);
    object.kv.commit_step(plan).expect("the outstanding plan");
    let _ = device.poll(wgpu::PollType::wait_indefinitely());
    for report in object.attention.poll_transfers() {
        object.kv.complete_transfers(report.step, report.complete);
    }
    world.reached.steps += 1;
}

/// All calls, by the functions that they call. What brings objects on stands here more than once.
const CALLS: &[(&[&str], Call)] = &[
    (&[], plan),
    (&[], plan),
    (&[], damage),
    (&[], commit),
    (&[], forget_device),
    (&[], drop_something),
    (&[], submit),
    (&[], submit),
    (&[], new_buffer),
    (&[], lose_device),
    (&["prepare"], prepare),
    (&["prepare"], prepare),
    (&["record_initialization", "record_transfers", "record_block_copies"], record),
    (&["record_layer", "record_append"], record),
    (&["poll_transfers"], poll),
    (&["bind_tensors", "bind_layer_tensors"], bind),
    (&["bind_tensors", "bind_layer_tensors"], bind),
    (&["arena_buffers", "arena_layout", "split_config", "variants", "stats"], look),
    (&["rows", "metadata", "token_ids_start", "positions_start", "skip_layers"], look),
    (&["new", "with_options", "activations", "bytes", "checked_shaders", "compact_shaders"], new),
    (&["allow_subgroups", "dispatch_work_budget", "scratch_bytes", "staging_bytes"], new),
    (&["target_workgroups", "fixed_span_tokens", "batch_invariant"], new),
    (&["use_cache"], use_cache),
    (&["rebuild"], rebuild),
    (&["recommended_limits", "recommended_features", "recommended_scheduler_config"], recommend),
    (&["prepare", "record_layer"], honest_step),
    (&["prepare", "record_layer"], honest_step),
    (&["prepare", "record_layer"], honest_step),
];

#[test]
fn a_hostile_caller_of_the_device_part_meets_no_panic_and_errors_with_numbers() {
    let num_calls: usize = match std::env::var("PAGED_KV_HOSTILE_CALLS") {
        Ok(number) => number.parse().expect("PAGED_KV_HOSTILE_CALLS is a number"),
        Err(_) => 100_000,
    };
    struct Where(u64, usize);
    impl Drop for Where {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("world {}, call {}", self.0, self.1);
            }
        }
    }
    let mut reached = Reached::default();
    for seed in 0..num_calls.div_ceil(LIFE) as u64 {
        let mut place = Where(seed, 0);
        let mut world = World::new(seed);
        for number in 0..LIFE {
            place.1 = number;
            let call = CALLS[world.below(CALLS.len())].1;
            call(&mut world);
            world.assert_quiet();
        }
        // Every object can go on.
        for index in 0..world.objects.len() {
            world.objects.swap(0, index);
            honest_step(&mut world);
            world.objects[0].kv.assert_consistent();
        }
        reached.steps += world.reached.steps;
        reached.errors += world.reached.errors;
        reached.losses += world.reached.losses;
        reached.damaged += world.reached.damaged;
    }
    println!("{reached:?}");
    let Reached { steps, errors, losses, damaged } = reached;
    let rarest = steps.min(errors).min(10 * losses).min(damaged) as usize;
    assert!(rarest > num_calls / 100, "the caller is too tame: {reached:?}");
}

/// Public functions of the device part that are neither hidden nor a bench's.
fn public_functions() -> BTreeSet<String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../src/gpu");
    let files = ["mod", "options", "rebuild", "record", "use_cache", "tensors", "capabilities"];
    let mut found = BTreeSet::new();
    for file in files {
        let text = std::fs::read_to_string(format!("{folder}/{file}.rs")).expect("a source of the library");
        let mut is_hidden = false;
        for line in text.lines().map(str::trim_start) {
            is_hidden |= line.starts_with("#[doc(hidden)]");
            let rest = line.strip_prefix("pub fn ").or_else(|| line.strip_prefix("pub const fn "));
            let name = rest.map(|rest| rest.split(['(', '<']).next().unwrap_or_default().to_owned());
            found.extend(name.filter(|_| !is_hidden));
            is_hidden &= line.starts_with("///") || line.starts_with("#[");
        }
    }
    found
}

#[test]
fn the_hostile_caller_calls_every_public_function_of_the_device_part() {
    let called: BTreeSet<String> =
        CALLS.iter().flat_map(|(names, _)| names.iter()).map(|name| (*name).to_owned()).collect();
    let public = public_functions();
    // No other device gives a pipeline cache but those of Vulkan.
    let missing: Vec<_> = public.difference(&called).filter(|name| *name != "pipeline_cache").collect();
    assert!(missing.is_empty(), "not called: {missing:?}");
    let gone: Vec<_> = called.difference(&public).collect();
    assert!(gone.is_empty(), "not public: {gone:?}");
}
