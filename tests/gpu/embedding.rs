//! What a guest must put up with: other guests on the same device, several threads, objects that are dropped in any order,
//! and a life of many steps.

use std::sync::Arc;

use paged_kv::{
    AttentionStats, BindError, BoundTensors, CacheConfig, DeviceError, KvCache, KvType, LayerTensors,
    ModelShape, PagedAttention, PrepareError, PreparedStep, Scheduler, StepBuilder, StepPlan, TableId,
    TensorSlice, recommended_limits,
};
use wgpu::{BufferDescriptor, BufferUsages, CommandEncoder, Features, Limits};

use crate::counting_allocator::held_bytes;
use crate::device::{TestAdapter, TestDevice, noop_device, small_pool};
use crate::device_rig::{DeviceRig, on_each_adapter_but_gl, open};
use crate::rig::Rig;
use crate::steps::step;

const SHAPE: ModelShape = ModelShape::new(2, 2, 1, 8);
const ROWS: u32 = 16;

fn noop() -> TestDevice {
    let gpu = noop_device(Limits::default(), Features::empty(), 8..=8);
    gpu.device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));
    gpu
}

fn config() -> CacheConfig {
    small_pool(&SHAPE)
}

fn buffer(gpu: &TestDevice) -> wgpu::Buffer {
    gpu.device.create_buffer(&BufferDescriptor {
        label: None,
        size: u64::from(ROWS) * 64,
        usage: BufferUsages::STORAGE,
        mapped_at_creation: false,
    })
}

fn slice(buffer: &wgpu::Buffer) -> TensorSlice<'_> {
    TensorSlice { buffer, offset: 0, row_stride: 16, rows: ROWS }
}

/// A cache, an attention object and tensors for it.
struct Setup {
    kv: KvCache,
    attention: PagedAttention,
    tensors: BoundTensors,
}

impl Setup {
    fn new(gpu: &TestDevice) -> Self {
        let mut attention = PagedAttention::new(&gpu.device, SHAPE, config()).expect("an attention object");
        let [input, output] = [(); 2].map(|()| buffer(gpu));
        let [query, key, value] = [(); 3].map(|()| slice(&input));
        let tensors = LayerTensors { query, key, value, output: slice(&output) };
        let tensors = attention.bind_tensors(&tensors).expect("valid tensors");
        Self { kv: KvCache::new(config()), attention, tensors }
    }

    fn open(&mut self) -> TableId {
        self.kv.create(40).expect("a free table")
    }

    fn plan(&mut self, pushes: &[(TableId, u32)]) -> StepPlan {
        let mut builder = StepBuilder::new(&mut self.kv);
        for &(table, rows) in pushes {
            builder.push(table, &vec![7; rows as usize]).expect("room in the pool");
        }
        builder.finish()
    }

    fn record(&mut self, gpu: &TestDevice, plan: &StepPlan) -> (PreparedStep, CommandEncoder) {
        let mut step = self.attention.prepare(plan).expect("a valid plan");
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        self.attention.record_transfers(&mut encoder, &mut step);
        let mut pass = encoder.begin_compute_pass(&Default::default());
        self.attention.record_block_copies(&mut pass, &mut step);
        for layer in 0..SHAPE.num_layers() {
            self.attention.record_layer(&mut pass, &mut step, layer, &self.tensors).expect("the right order");
        }
        drop(pass);
        (step, encoder)
    }

    fn run(&mut self, gpu: &TestDevice, plan: StepPlan) {
        let (_, encoder) = self.record(gpu, &plan);
        gpu.queue.submit([encoder.finish()]);
        gpu.device.poll(wgpu::PollType::wait_indefinitely()).expect("a working device");
        for report in self.attention.poll_transfers() {
            self.kv.complete_transfers(report.step, report.complete);
        }
        self.kv.commit_step(plan).expect("the outstanding plan");
    }
}

#[test]
fn everything_may_be_sent_and_shared_between_threads() {
    fn check<T: Send + Sync>() {}
    check::<PagedAttention>();
    check::<BoundTensors>();
    check::<PreparedStep>();
    check::<StepPlan>();
    check::<KvCache>();
    check::<Scheduler>();
    check::<DeviceError>();
}

/// Two models of different shapes, each with a cache of its own: a target and its draft, say.
fn two_models() -> [Rig; 2] {
    [(4, 2, 16, KvType::F16), (3, 1, 8, KvType::F32)].map(|(heads, kv_heads, head_dim, kv_type)| {
        let mut rig = Rig::new((heads, kv_heads, head_dim), kv_type, 4, 16);
        rig.shuffle_free_blocks();
        rig
    })
}

#[test]
fn two_models_with_two_caches_share_a_device_step_by_step() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let mut rigs = two_models().map(|host| DeviceRig::new(&gpu, host, Default::default()));
        let tables = [(); 2].map(|()| rigs.each_mut().map(|rig| rig.host.open()));
        for rows in [7, 1, 1, 5] {
            for (index, rig) in rigs.iter_mut().enumerate() {
                step(rig, &[(tables[0][index], rows), (tables[1][index], 1)]);
            }
        }
        // Neither takes the other's plans.
        let [first, second] = &mut rigs;
        let plan = first.host.plan(&[(tables[0][0], 1)]);
        assert!(matches!(second.attention.prepare(&plan), Err(PrepareError::Fingerprint { .. })));
    });
}

#[test]
fn two_threads_decode_on_one_device() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let gpu = &gpu;
        std::thread::scope(|scope| {
            for host in two_models() {
                // Made on this thread, used on the other.
                let mut rig = DeviceRig::new(gpu, host, Default::default());
                scope.spawn(move || {
                    let tables = [(); 2].map(|()| rig.host.open());
                    step(&mut rig, &[(tables[0], 9), (tables[1], 3)]);
                    for _ in 0..8 {
                        step(&mut rig, &[(tables[0], 1), (tables[1], 1)]);
                    }
                });
            }
        });
    });
}

#[test]
fn objects_may_be_dropped_in_any_order() {
    on_each_adapter_but_gl(|adapter| {
        // Some take seconds to compile the kernels.
        [0, 7, 14, 23].into_iter().for_each(|order| check_drops(open(adapter), order));
    });
    (0..24).for_each(|order| check_drops(noop(), order));
}

/// Device, attention object, tensors, and a step that is recorded and not submitted, in the `order`-th of their orders.
fn check_drops(gpu: TestDevice, order: usize) {
    gpu.device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));
    let mut setup = Setup::new(&gpu);
    let table = setup.open();
    let plan = setup.plan(&[(table, 5)]);
    setup.run(&gpu, plan);
    let mut builder = StepBuilder::new(&mut setup.kv);
    builder.swap_out(table).expect("room in the host pool");
    let plan = builder.finish();
    let recorded = setup.record(&gpu, &plan);
    let Setup { attention, tensors, kv } = setup;
    let mut all: Vec<Box<dyn std::any::Any>> =
        vec![Box::new(gpu.device), Box::new(attention), Box::new(tensors), Box::new(recorded)];
    let mut number = order;
    while !all.is_empty() {
        let index = number % all.len();
        number /= all.len();
        drop(all.remove(index));
    }
    drop((gpu.queue, kv, plan));
}

#[test]
fn commands_of_a_dropped_attention_object_can_be_submitted() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        gpu.device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));
        let mut setup = Setup::new(&gpu);
        let table = setup.open();
        let plan = setup.plan(&[(table, 5)]);
        let (step, encoder) = setup.record(&gpu, &plan);
        drop(setup);
        drop(step);
        gpu.queue.submit([encoder.finish()]);
        gpu.device.poll(wgpu::PollType::wait_indefinitely()).expect("a working device");
    });
}

#[test]
fn tensors_whose_buffer_was_destroyed_are_named_as_such() {
    on_each_adapter_but_gl(|adapter| check_destroyed_tensors(&open(adapter)));
    check_destroyed_tensors(&noop());
}

fn check_destroyed_tensors(gpu: &TestDevice) {
    gpu.device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));
    let mut setup = Setup::new(gpu);
    let own: Vec<_> = (0..4).map(|_| buffer(gpu)).collect();
    let destroyed = buffer(gpu);
    destroyed.destroy();
    for (index, tensor) in ["query", "key", "value", "output"].into_iter().enumerate() {
        let buffer = |place: usize| slice(if place == index { &destroyed } else { &own[place] });
        let tensors = LayerTensors { query: buffer(0), key: buffer(1), value: buffer(2), output: buffer(3) };
        assert_eq!(setup.attention.bind_tensors(&tensors).err(), Some(BindError::Destroyed { tensor }));
    }
}

#[test]
fn tensors_of_another_device_are_named() {
    on_each_adapter_but_gl(|adapter| check_foreign_tensors(&open(adapter), &open(adapter)));
    // Of one instance: wgpu itself does not tell the buffers of two instances apart.
    let adapter = TestAdapter::noop(Limits::default(), Features::empty(), 8..=8);
    let [gpu, other] = [(); 2].map(|()| open(&adapter));
    check_foreign_tensors(&gpu, &other);
}

fn check_foreign_tensors(gpu: &TestDevice, other: &TestDevice) {
    gpu.device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));
    let mut setup = Setup::new(gpu);
    let own: Vec<_> = (0..4).map(|_| buffer(gpu)).collect();
    let foreign = buffer(other);
    for (index, tensor) in ["query", "key", "value", "output"].into_iter().enumerate() {
        let buffer = |place: usize| slice(if place == index { &foreign } else { &own[place] });
        let tensors = LayerTensors { query: buffer(0), key: buffer(1), value: buffer(2), output: buffer(3) };
        let refused = setup.attention.bind_tensors(&tensors).err();
        assert_eq!(refused, Some(BindError::Refused { tensor }));
    }
}

#[test]
fn tensors_beyond_a_binding_are_refused_with_both_numbers() {
    let small = Limits { max_storage_buffer_binding_size: 2048, ..Limits::default() };
    let gpu = noop_device(small, Features::empty(), 8..=8);
    let mut setup = Setup::new(&gpu);
    let large = gpu.device.create_buffer(&BufferDescriptor {
        label: None,
        size: 4096,
        usage: BufferUsages::STORAGE,
        mapped_at_creation: false,
    });
    let (own, output) = (buffer(&gpu), buffer(&gpu));
    let tensors = LayerTensors {
        query: TensorSlice { rows: 33, ..slice(&large) },
        key: slice(&own),
        value: slice(&own),
        output: slice(&output),
    };
    let refused = setup.attention.bind_tensors(&tensors).err();
    let bytes = 33 * 64;
    assert_eq!(refused, Some(BindError::TensorTooLarge { tensor: "query", bytes, max_bytes: 2048 }));
}

#[test]
fn a_device_of_another_shape_or_with_low_limits_is_refused_with_the_numbers() {
    let gpu = noop();
    let create = |gpu: &TestDevice, shape| PagedAttention::new(&gpu.device, shape, config()).err();
    for (field, shape, cache, other) in [
        ("num_layers", 3, 2, ModelShape::new(3, 2, 1, 8)),
        ("num_kv_heads", 2, 1, ModelShape::new(2, 2, 2, 8)),
        ("head_dim", 16, 8, ModelShape::new(2, 2, 1, 16)),
    ] {
        assert_eq!(create(&gpu, other), Some(DeviceError::ShapeMismatch { field, shape, cache }));
    }
    let few_buffers = Limits { max_storage_buffers_per_shader_stage: 5, ..Limits::default() };
    let few_threads = Limits { max_compute_invocations_per_workgroup: 32, ..Limits::default() };
    for (limit, needed, actual, limits) in [
        ("max_storage_buffers_per_shader_stage", 6, 5, few_buffers),
        ("max_compute_invocations_per_workgroup", 64, 32, few_threads),
    ] {
        let gpu = noop_device(limits, Features::empty(), 8..=8);
        assert_eq!(
            create(&gpu, SHAPE),
            Some(DeviceError::LimitTooLow { object: "the kernels", limit, needed, actual })
        );
    }
}

#[test]
fn block_tables_beyond_a_binding_are_refused_by_name() {
    let actual = 16 << 10;
    let gpu = noop_device(
        Limits { max_storage_buffer_binding_size: actual, ..Limits::default() },
        Features::empty(),
        8..=8,
    );
    let cache = config().with_max_sequences(2048).expect("a valid configuration");
    let needed = cache.table_bytes();
    let refused = PagedAttention::new(&gpu.device, SHAPE, cache).err();
    let limit = "max_storage_buffer_binding_size";
    let expected = DeviceError::LimitTooLow { object: "the block tables", limit, needed, actual };
    assert_eq!(refused, Some(expected));
}

/// An application of lower limits than the kernels need, as for OpenGL.
#[test]
fn with_the_recommended_limits_an_application_of_low_ones_can_embed_the_library() {
    let adapter = TestAdapter::noop(Limits::default(), Features::empty(), 8..=8);
    for (base, limit, needed, actual) in [
        (Limits::downlevel_defaults(), "max_storage_buffers_per_shader_stage", 6, 4),
        (Limits::downlevel_webgl2_defaults(), "max_storage_buffers_per_shader_stage", 6, 0),
    ] {
        let create = |limits| {
            let gpu = adapter.request_device(limits, Features::empty()).expect("limits that it offers");
            gpu.device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));
            PagedAttention::new(&gpu.device, SHAPE, config()).map(drop)
        };
        assert_eq!(
            create(base.clone()),
            Err(DeviceError::LimitTooLow { object: "the kernels", limit, needed, actual })
        );
        assert_eq!(create(recommended_limits(adapter.adapter(), base)), Ok(()));
    }
    // More than the adapter has is not asked for.
    let offered = Limits { max_storage_buffers_per_shader_stage: 5, ..Limits::default() };
    let adapter = TestAdapter::noop(offered, Features::empty(), 8..=8);
    let limits = recommended_limits(adapter.adapter(), Limits::downlevel_defaults());
    assert_eq!(limits.max_storage_buffers_per_shader_stage, 5);
    let gpu = adapter.request_device(limits, Features::empty()).expect("limits that it offers");
    let created = PagedAttention::new(&gpu.device, SHAPE, config()).map(drop);
    let limit = "max_storage_buffers_per_shader_stage";
    assert_eq!(created, Err(DeviceError::LimitTooLow { object: "the kernels", limit, needed: 6, actual: 5 }));
}

/// Steps with everything in them: prompts, decoding, forks with copies, swaps out and in, sequences that end.
#[test]
fn nothing_grows_over_10_000_steps() {
    let gpu = noop();
    let grown = check_growth(&gpu, 1_250);
    // Vectors double now and then; a byte a step would be 9,200.
    assert!(grown < 4096, "{grown} bytes of main memory in 9,200 steps");
    // Where wgpu counts what there is.
    on_each_adapter_but_gl(|adapter| {
        check_growth(&open(adapter), 150);
    });
}

/// Returns by how many bytes this thread's memory has grown after the first hundred rounds of eight steps.
fn check_growth(gpu: &TestDevice, rounds: u32) -> i64 {
    let mut setup = Setup::new(gpu);
    let mut counted = None;
    for round in 0..rounds {
        let [first, second] = [(); 2].map(|()| setup.open());
        let plan = setup.plan(&[(first, 9), (second, 6)]);
        setup.run(gpu, plan);
        let fork = setup.kv.fork(first, 9, 40).expect("a free table");
        let plan = setup.plan(&[(first, 1), (second, 1), (fork, 1)]);
        assert_eq!(plan.block_copies().len(), 1);
        setup.run(gpu, plan);
        let swap = |setup: &mut Setup, out: bool| {
            let mut builder = StepBuilder::new(&mut setup.kv);
            let swapped = if out { builder.swap_out(second).map(drop) } else { builder.swap_in(second) };
            swapped.expect("room in both pools");
            builder.push(first, &[7]).expect("room in the pool");
            let plan = builder.finish();
            setup.run(gpu, plan);
        };
        swap(&mut setup, true);
        swap(&mut setup, false);
        for _ in 0..4 {
            let plan = setup.plan(&[(first, 1), (second, 1), (fork, 1)]);
            setup.run(gpu, plan);
        }
        // A plan that is dropped, prepared or not.
        let dropped = setup.plan(&[(first, 1)]);
        if round % 2 == 0 {
            drop(setup.attention.prepare(&dropped).expect("a valid plan"));
        }
        drop(dropped);
        drop(StepBuilder::new(&mut setup.kv));
        for table in [first, second, fork] {
            setup.kv.release(table).expect("an open table");
        }
        if round == 101 {
            counted = Some((count(gpu, &setup), held_bytes()));
        }
    }
    let (before, bytes) = counted.expect("more than 100 rounds");
    assert_eq!(count(gpu, &setup), before);
    assert_eq!(setup.kv.free_blocks(), 16);
    held_bytes() - bytes
}

/// What exists, by the library's counts and by wgpu's own.
fn count(gpu: &TestDevice, setup: &Setup) -> (AttentionStats, [usize; 4]) {
    let mut stats = setup.attention.stats();
    // These count on.
    (stats.swapped_out_blocks, stats.swapped_in_blocks) = (0, 0);
    (stats.swapped_out_bytes, stats.swapped_in_bytes) = (0, 0);
    (stats, gpu.existing())
}
