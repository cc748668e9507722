//! Recording: what a step creates, dispatches and uploads, in which order it must be recorded, and what is refused.
//!
//! Most of it runs on wgpu's noop backend, which validates and records but computes nothing.

use paged_kv::{
    ActivationType, AttentionOptions, BindError, BoundTensors, CacheConfig, ConfigError, DeviceError,
    KvCache, KvType, LayerTensors, ModelShape, PagedAttention, PrepareError, RecordError, StepBuilder,
    StepPlan, TableId, TensorSlice,
};
use std::sync::Arc;
use wgpu::{BufferUsages, Features, Limits};

use crate::counting_allocator::without_memory_for;
use crate::device::{TestDevice, noop_device, open_noop_without_limits};
use crate::device_rig::{announce_left_out, on_each_adapter_but_gl, open};

const SHAPE: ModelShape = ModelShape::new(3, 6, 2, 16);
const MAX_ROWS: u32 = 64;

fn noop() -> TestDevice {
    noop_device(Limits::default(), Features::SUBGROUP, 8..=8)
}

fn config() -> CacheConfig {
    CacheConfig::for_blocks(64, &SHAPE, KvType::F16).expect("a valid configuration")
}

/// A cache, an attention object and tensors for it.
struct Setup {
    gpu: TestDevice,
    kv: KvCache,
    attention: PagedAttention,
    tensors: BoundTensors,
}

impl Setup {
    fn new(gpu: TestDevice, config: CacheConfig, options: AttentionOptions) -> Self {
        let mut attention = PagedAttention::with_options(&gpu.device, SHAPE, config.clone(), options)
            .expect("an attention object");
        let tensors = bind(&gpu, &mut attention).expect("valid tensors");
        Self { gpu, kv: KvCache::new(config), attention, tensors }
    }

    fn noop() -> Self {
        Self::new(noop(), config(), AttentionOptions::default())
    }

    fn open(&mut self) -> TableId {
        let max = self.kv.config().max_sequence_tokens();
        self.kv.create(max).expect("a free table")
    }

    fn plan(&mut self, pushes: &[(TableId, u32)]) -> StepPlan {
        let mut step = StepBuilder::new(&mut self.kv);
        for &(table, rows) in pushes {
            step.push(table, &vec![7; rows as usize]).expect("room in the pool");
        }
        step.finish()
    }

    /// Records a plan in the right order and submits it.
    fn run(&mut self, plan: &StepPlan) {
        let mut step = self.attention.prepare(plan).expect("a valid plan");
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        self.attention.record_transfers(&mut encoder, &mut step);
        let mut pass = encoder.begin_compute_pass(&Default::default());
        self.attention.record_block_copies(&mut pass, &mut step);
        for layer in 0..SHAPE.num_layers() {
            self.attention.record_layer(&mut pass, &mut step, layer, &self.tensors).expect("the right order");
        }
        drop(pass);
        self.gpu.queue.submit([encoder.finish()]);
    }

    fn step(&mut self, pushes: &[(TableId, u32)]) {
        let plan = self.plan(pushes);
        self.run(&plan);
        self.kv.commit_step(plan).expect("the outstanding plan");
    }

    fn wait(&self) {
        self.gpu.device.poll(wgpu::PollType::wait_indefinitely()).expect("a working device");
    }
}

fn buffer(gpu: &TestDevice, bytes: u64, usage: BufferUsages) -> wgpu::Buffer {
    gpu.device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: bytes,
        usage,
        mapped_at_creation: false,
    })
}

/// Query, key and value side by side in one buffer, the output in another.
fn bind(gpu: &TestDevice, attention: &mut PagedAttention) -> Result<BoundTensors, BindError> {
    let (query, kv) = (SHAPE.num_query_heads() * SHAPE.head_dim(), SHAPE.num_kv_heads() * SHAPE.head_dim());
    // Each part of a row starts at a multiple of 64 elements, 256 bytes.
    let row_stride = 256;
    assert!(query <= 128 && kv <= 64);
    let packed = buffer(gpu, u64::from(MAX_ROWS * row_stride) * 4, BufferUsages::STORAGE);
    let output = buffer(gpu, u64::from(MAX_ROWS * query) * 4, BufferUsages::STORAGE);
    let slice = |buffer, first_element: u64, row_stride| TensorSlice {
        buffer,
        offset: first_element * 4,
        row_stride,
        rows: MAX_ROWS,
    };
    attention.bind_tensors(&LayerTensors {
        query: slice(&packed, 0, row_stride),
        key: slice(&packed, 128, row_stride),
        value: slice(&packed, 192, row_stride),
        output: slice(&output, 0, query),
    })
}

#[test]
fn a_steady_step_creates_nothing_and_uploads_little() {
    check_steady_steps(&mut Setup::noop());
    on_each_adapter_but_gl(|adapter| {
        check_steady_steps(&mut Setup::new(open(adapter), config(), AttentionOptions::default()));
    });
}

fn check_steady_steps(setup: &mut Setup) {
    let tables: Vec<TableId> = (0..8).map(|_| setup.open()).collect();
    let prompt: Vec<_> = tables.iter().map(|&table| (table, 7)).collect();
    let decode: Vec<_> = tables.iter().map(|&table| (table, 1)).collect();
    setup.step(&prompt);
    setup.step(&decode);
    setup.wait();
    let before = setup.attention.stats();
    let existing = setup.gpu.existing();
    assert!(existing.iter().take(3).all(|&count| count > 0), "wgpu counts what exists: {existing:?}");
    for _ in 0..40 {
        let plan = setup.plan(&decode);
        let changed = plan.changed_entries().len() as u64;
        setup.run(&plan);
        setup.kv.commit_step(plan).expect("the outstanding plan");
        setup.wait();
        let stats = setup.attention.stats();
        // Nothing is split here: append and attention, no merge; 16 bytes per work item.
        assert_eq!(stats.step_dispatches, 2 * SHAPE.num_layers());
        let running = tables.len() as u64;
        assert!(
            stats.step_uploaded_bytes <= 64 + 32 * running + 16 * running + 4 * changed,
            "{} bytes for {running} sequences and {changed} changed entries",
            stats.step_uploaded_bytes
        );
    }
    let after = setup.attention.stats();
    assert_eq!(after.buffers_created, before.buffers_created);
    assert_eq!(after.bind_groups_created, before.bind_groups_created);
    assert_eq!(after.pipelines_created, before.pipelines_created);
    assert_eq!(setup.gpu.existing(), existing);
}

#[test]
fn dispatches_are_append_attention_and_merge_per_layer() {
    let dispatches = |options: AttentionOptions, prompt: u32, rows: &[u32]| {
        let mut setup = Setup::new(noop(), config(), options);
        let tables: Vec<_> = rows.iter().map(|_| setup.open()).collect();
        let mut unread = prompt;
        while unread > 0 {
            let chunk = unread.min(MAX_ROWS / tables.len() as u32);
            setup.step(&tables.iter().map(|&table| (table, chunk)).collect::<Vec<_>>());
            unread -= chunk;
        }
        setup.step(&tables.iter().zip(rows).map(|(&table, &rows)| (table, rows)).collect::<Vec<_>>());
        setup.attention.stats().step_dispatches / SHAPE.num_layers()
    };
    let unsplit = || AttentionOptions::default().target_workgroups(1);
    let split = || AttentionOptions::default().fixed_span_tokens(1);
    assert_eq!(dispatches(unsplit(), 20, &[1]), 2, "decode in one span");
    assert_eq!(dispatches(split(), 128, &[1]), 3, "decode in two spans");
    assert_eq!(dispatches(unsplit(), 20, &[2]), 2, "prefill");
    assert_eq!(dispatches(split(), 20, &[1, 2]), 3, "both, nothing to merge");
    assert_eq!(dispatches(split(), 30, &[1, 30]), 3, "both, nothing to merge");
}

#[test]
fn the_work_budget_cuts_dispatches() {
    let options = AttentionOptions::default().dispatch_work_budget(50).target_workgroups(1);
    let mut setup = Setup::new(noop(), config(), options);
    let tables: Vec<_> = (0..3).map(|_| setup.open()).collect();
    setup.step(&tables.iter().map(|&table| (table, 19)).collect::<Vec<_>>());
    // 20 pairs each: two sequences, then one.
    setup.step(&tables.iter().map(|&table| (table, 1)).collect::<Vec<_>>());
    assert_eq!(setup.attention.stats().step_dispatches, 3 * SHAPE.num_layers());
}

/// Every dispatch has a header of its own; none may be read where something else was.
#[test]
fn a_step_that_is_cut_into_more_dispatches_than_any_before_gets_a_buffer_of_its_own() {
    let options = AttentionOptions::default().dispatch_work_budget(10).target_workgroups(1);
    let mut setup = Setup::new(noop(), config(), options);
    let table = setup.open();
    let mut buffer_of = |rows| {
        let plan = setup.plan(&[(table, rows)]);
        let buffer = setup.attention.prepare(&plan).expect("a valid plan").metadata().clone();
        (buffer, setup.attention.stats().step_uploaded_bytes)
    };
    let (one, few_bytes) = buffer_of(1);
    assert!(buffer_of(1).0 == one && few_bytes < 256);
    let (many, _) = buffer_of(32);
    assert!(many != one);
    let (again, bytes) = buffer_of(1);
    assert!(again == many && bytes > 4 * 256, "headers that are not used are zero: {bytes} bytes");
}

#[test]
fn block_copies_are_one_dispatch_per_arena_and_only_if_there_are_any() {
    let mut setup = Setup::noop();
    let table = setup.open();
    setup.step(&[(table, 5)]);
    let fork = setup.kv.fork(table, 5, 64).expect("a free table");
    let plan = setup.plan(&[(fork, 1)]);
    assert_eq!(plan.block_copies().len(), 1);
    setup.run(&plan);
    assert_eq!(setup.attention.arena_buffers().len(), 1);
    assert_eq!(setup.attention.stats().step_dispatches, 1 + 2 * SHAPE.num_layers());
}

#[test]
fn the_order_of_recording_is_enforced() {
    type Act =
        fn(&mut Setup, &mut wgpu::CommandEncoder, &mut paged_kv::PreparedStep) -> Result<(), RecordError>;
    fn transfers(setup: &mut Setup, encoder: &mut wgpu::CommandEncoder, step: &mut paged_kv::PreparedStep) {
        setup.attention.record_transfers(encoder, step);
    }
    fn copies(setup: &mut Setup, encoder: &mut wgpu::CommandEncoder, step: &mut paged_kv::PreparedStep) {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        setup.attention.record_block_copies(&mut pass, step);
    }
    fn layer(
        setup: &mut Setup,
        encoder: &mut wgpu::CommandEncoder,
        step: &mut paged_kv::PreparedStep,
        layer: u32,
    ) -> Result<(), RecordError> {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        setup.attention.record_layer(&mut pass, step, layer, &setup.tensors)
    }
    let cases: [(Act, RecordError); 9] = [
        (|s, e, p| layer(s, e, p, 0), RecordError::TransfersMissing),
        (
            |s, e, p| {
                transfers(s, e, p);
                layer(s, e, p, 0)
            },
            RecordError::BlockCopiesMissing,
        ),
        (
            |s, e, p| {
                copies(s, e, p);
                transfers(s, e, p);
                layer(s, e, p, 0)
            },
            RecordError::TransfersMissing,
        ),
        (
            |s, e, p| {
                transfers(s, e, p);
                transfers(s, e, p);
                copies(s, e, p);
                layer(s, e, p, 0)
            },
            RecordError::TransfersOutOfOrder,
        ),
        (
            |s, e, p| {
                transfers(s, e, p);
                copies(s, e, p);
                layer(s, e, p, 0)?;
                copies(s, e, p);
                layer(s, e, p, 1)
            },
            RecordError::BlockCopiesOutOfOrder,
        ),
        (
            |s, e, p| {
                transfers(s, e, p);
                copies(s, e, p);
                layer(s, e, p, 1)
            },
            RecordError::LayerOutOfOrder { layer: 1, expected: 0 },
        ),
        (
            |s, e, p| {
                transfers(s, e, p);
                copies(s, e, p);
                layer(s, e, p, 0)?;
                layer(s, e, p, 0)
            },
            RecordError::LayerOutOfOrder { layer: 0, expected: 1 },
        ),
        (
            |s, e, p| {
                transfers(s, e, p);
                copies(s, e, p);
                (0..SHAPE.num_layers()).try_for_each(|i| layer(s, e, p, i))?;
                layer(s, e, p, SHAPE.num_layers())
            },
            RecordError::LayerOutOfOrder { layer: 3, expected: 3 },
        ),
        (
            |s, e, p| {
                transfers(s, e, p);
                copies(s, e, p);
                let mut other = Setup::noop();
                std::mem::swap(&mut s.attention, &mut other.attention);
                let result = layer(s, e, p, 0);
                std::mem::swap(&mut s.attention, &mut other.attention);
                result
            },
            RecordError::ForeignStep,
        ),
    ];
    for (act, expected) in cases {
        let mut setup = Setup::noop();
        let table = setup.open();
        let plan = setup.plan(&[(table, 3)]);
        let mut step = setup.attention.prepare(&plan).expect("a valid plan");
        let mut encoder = setup.gpu.device.create_command_encoder(&Default::default());
        assert_eq!(act(&mut setup, &mut encoder, &mut step), Err(expected));
        // What was recorded is valid all the same.
        setup.gpu.queue.submit([encoder.finish()]);
    }
}

#[test]
fn a_step_needs_tensors_of_its_own_attention_object_with_enough_rows() {
    let mut setup = Setup::noop();
    let table = setup.open();
    let plan = setup.plan(&[(table, MAX_ROWS + 1)]);
    let mut step = setup.attention.prepare(&plan).expect("a valid plan");
    let mut encoder = setup.gpu.device.create_command_encoder(&Default::default());
    setup.attention.record_transfers(&mut encoder, &mut step);
    let mut pass = encoder.begin_compute_pass(&Default::default());
    setup.attention.record_block_copies(&mut pass, &mut step);
    let other = Setup::noop();
    let foreign = setup.attention.record_layer(&mut pass, &mut step, 0, &other.tensors);
    assert_eq!(foreign, Err(RecordError::ForeignTensors));
    let small = setup.attention.record_layer(&mut pass, &mut step, 0, &setup.tensors);
    assert_eq!(small, Err(RecordError::TooManyRows { rows: MAX_ROWS + 1, capacity: MAX_ROWS }));
}

#[test]
fn a_metadata_slot_is_kept_until_its_submission_has_completed() {
    let mut setup = Setup::noop();
    let table = setup.open();
    let mut steps = Vec::new();
    let mut encoders = Vec::new();
    for _ in 0..8 {
        let plan = setup.plan(&[(table, 1)]);
        let mut step = setup.attention.prepare(&plan).expect("a free slot");
        let mut encoder = setup.gpu.device.create_command_encoder(&Default::default());
        setup.attention.record_transfers(&mut encoder, &mut step);
        assert!(!steps.contains(step.metadata()), "a slot that is in use was given out again");
        steps.push(step.metadata().clone());
        encoders.push(encoder);
    }
    let plan = setup.plan(&[(table, 1)]);
    // The steps themselves are gone; their commands are not.
    assert_eq!(setup.attention.prepare(&plan).err(), Some(PrepareError::StepsInFlight { max: 8 }));
    // A dropped encoder gives its slot back, and so does a completed submission.
    drop(encoders.pop());
    let step = setup.attention.prepare(&plan).expect("a free slot");
    assert_eq!(step.metadata(), &steps[7]);
    setup.gpu.queue.submit([encoders.remove(0).finish()]);
    setup.wait();
    let plan = setup.plan(&[(table, 1)]);
    let next = setup.attention.prepare(&plan).expect("a free slot");
    assert_eq!(next.metadata(), &steps[0]);
}

#[test]
fn plans_of_another_cache_and_old_plans_are_refused() {
    let mut setup = Setup::noop();
    let table = setup.open();
    let plan = setup.plan(&[(table, 1)]);
    setup.run(&plan);
    assert!(matches!(setup.attention.prepare(&plan), Err(PrepareError::StepNotNewer { .. })));

    let mut other = Setup::noop();
    let table = other.open();
    let plan = other.plan(&[(table, 1)]);
    assert!(matches!(setup.attention.prepare(&plan), Err(PrepareError::CacheInstance { .. })));

    let mut larger =
        KvCache::new(CacheConfig::for_blocks(65, &SHAPE, KvType::F16).expect("a valid configuration"));
    let table = larger.create(1).expect("a free table");
    let mut step = StepBuilder::new(&mut larger);
    step.push(table, &[1]).expect("a free block");
    assert!(matches!(setup.attention.prepare(&step.finish()), Err(PrepareError::Fingerprint { .. })));
}

#[test]
fn tensors_that_do_not_fit_are_refused_with_the_numbers() {
    let mut setup = Setup::noop();
    let gpu = &setup.gpu;
    let tensor = buffer(gpu, 64 * 96 * 4, BufferUsages::STORAGE);
    let output = buffer(gpu, 64 * 96 * 4, BufferUsages::STORAGE);
    let no_storage = buffer(gpu, 64 * 96 * 4, BufferUsages::COPY_DST);
    let good = |buffer| TensorSlice { buffer, offset: 0, row_stride: 96, rows: 64 };
    let tensors = LayerTensors {
        query: good(&tensor),
        key: good(&tensor),
        value: good(&tensor),
        output: good(&output),
    };
    let attention = &mut setup.attention;
    assert!(attention.bind_tensors(&tensors).is_ok());
    let mut refused =
        |query: TensorSlice<'_>| attention.bind_tensors(&LayerTensors { query, ..tensors }).err();
    let tensor_name = "query";
    assert_eq!(
        refused(TensorSlice { rows: 65, ..tensors.query }),
        Some(BindError::TensorTooSmall {
            tensor: tensor_name,
            needed_bytes: 65 * 96 * 4,
            actual_bytes: 64 * 96 * 4
        })
    );
    // A size beyond 64 bits is no small one.
    let (rows, row_stride) = (u32::MAX, u32::MAX - 3);
    assert_eq!(
        refused(TensorSlice { rows, row_stride, ..tensors.query }),
        Some(BindError::TensorTooSmall {
            tensor: tensor_name,
            needed_bytes: u64::MAX,
            actual_bytes: 64 * 96 * 4
        })
    );
    assert_eq!(
        refused(TensorSlice { offset: 16, rows: 1, ..tensors.query }),
        Some(BindError::MisalignedOffset { tensor: tensor_name, offset: 16, alignment: 256 })
    );
    assert_eq!(
        refused(TensorSlice { row_stride: 92, ..tensors.query }),
        Some(BindError::RowStrideTooSmall { tensor: tensor_name, row_stride: 92, row_elements: 96 })
    );
    assert_eq!(
        refused(TensorSlice { row_stride: 97, ..tensors.query }),
        Some(BindError::RowStrideAlignment { tensor: tensor_name, row_stride: 97 })
    );
    assert_eq!(
        refused(TensorSlice { rows: 0, ..tensors.query }),
        Some(BindError::NoRows { tensor: tensor_name })
    );
    assert_eq!(
        refused(TensorSlice { buffer: &no_storage, ..tensors.query }),
        Some(BindError::MissingStorageUsage { tensor: tensor_name })
    );
    let aliased = attention.bind_tensors(&LayerTensors { output: tensors.query, ..tensors });
    assert_eq!(aliased.err(), Some(BindError::OutputAliases { tensor: tensor_name }));
}

#[test]
fn tensors_of_f16_need_half_the_bytes() {
    let gpu = noop_device(Limits::default(), Features::empty(), 8..=8);
    let config = CacheConfig::for_blocks(8, &SHAPE, KvType::F16).expect("a valid configuration");
    let options = AttentionOptions::default().activations(ActivationType::F16);
    let mut attention =
        PagedAttention::with_options(&gpu.device, SHAPE, config, options).expect("a pool that fits");
    let [tensor, output] = [(); 2].map(|()| buffer(&gpu, 64 * 96 * 2, BufferUsages::STORAGE));
    let good = |buffer| TensorSlice { buffer, offset: 0, row_stride: 96, rows: 64 };
    let tensors = LayerTensors {
        query: good(&tensor),
        key: good(&tensor),
        value: good(&tensor),
        output: good(&output),
    };
    assert!(attention.bind_tensors(&tensors).is_ok());
    let query = TensorSlice { rows: 65, ..tensors.query };
    assert_eq!(
        attention.bind_tensors(&LayerTensors { query, ..tensors }).err(),
        Some(BindError::TensorTooSmall {
            tensor: "query",
            needed_bytes: 65 * 96 * 2,
            actual_bytes: 64 * 96 * 2
        })
    );
}

#[test]
fn a_pool_beyond_the_limits_is_refused_with_both_numbers() {
    let small = Limits { max_storage_buffer_binding_size: 1 << 20, ..Limits::default() };
    let gpu = noop_device(small, Features::empty(), 8..=8);
    // One layer's blocks: 2 heads of (16 + 16) f16 elements, 16 tokens a block, 2 KiB.
    let config = CacheConfig::for_blocks(1000, &SHAPE, KvType::F16).expect("a valid configuration");
    let error = PagedAttention::new(&gpu.device, SHAPE, config).err();
    let Some(DeviceError::Config(error)) = error else { panic!("{error:?}") };
    let expected =
        ConfigError::LayerExceedsArena { layer_bytes: 1000 << 11, max_bytes: 1 << 20, max_blocks: 512 };
    assert_eq!(error, expected);

    // At the largest pool that fits, every layer has an arena of its own.
    let config = CacheConfig::for_blocks(512, &SHAPE, KvType::F16).expect("a valid configuration");
    let attention = PagedAttention::new(&gpu.device, SHAPE, config).expect("a pool that fits");
    assert_eq!(attention.arena_buffers().len(), 3);
}

#[test]
fn out_of_memory_is_an_error_with_the_bytes_and_not_the_applications_problem() {
    // No machine has the 128 TiB that partial results of a million heads would take here.
    let TestDevice { device, .. } = open_noop_without_limits();
    device.on_uncaptured_error(std::sync::Arc::new(|error| panic!("reached the application: {error}")));

    let shape = ModelShape::new(2, 1 << 20, 1, 256);
    let config = CacheConfig::for_blocks(256, &shape, KvType::F16)
        .and_then(|config| config.with_max_sequences(4096))
        .expect("a valid configuration");
    let options = AttentionOptions::default().fixed_span_tokens(128);
    let arena_bytes = config.bytes_total();
    match PagedAttention::with_options(&device, shape, config, options) {
        Err(DeviceError::OutOfMemory { object, asked_bytes, created_bytes }) => {
            // 32 spans for each of 4,096 rows; per head 256 sums, maximum and sum, padded to 16 bytes.
            assert_eq!((object, asked_bytes), ("partial results", (32 << 12) * ((65 * 16) << 20)));
            assert_eq!(created_bytes, arena_bytes);
        }
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("128 TiB were to be had"),
    }
}

/// wgpu's noop device takes its buffers from the process, which can be made to have no memory for them.
#[test]
fn memory_that_an_arena_cannot_have_is_an_error_with_the_bytes_and_a_smaller_pool_can_be_made() {
    let gpu = noop();
    gpu.device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));
    let create = |num_blocks| {
        let config = CacheConfig::for_blocks(num_blocks, &SHAPE, KvType::F16).expect("a valid configuration");
        PagedAttention::new(&gpu.device, SHAPE, config)
    };
    // Three layers of 2 KiB a block, in one arena. Nothing else is nearly as large.
    let asked_bytes = 10_000 * 3 * 2048;
    without_memory_for(asked_bytes as usize, || {
        let refused = create(10_000).err();
        assert_eq!(
            refused,
            Some(DeviceError::OutOfMemory { object: "arena", asked_bytes, created_bytes: 0 })
        );
        assert_eq!(create(5_000).expect("a pool that fits").stats().arena_bytes, asked_bytes / 2);
    });
    assert_eq!(create(10_000).expect("with memory it works").stats().arena_bytes, asked_bytes);
}

/// The same for what a step needs.
#[test]
fn memory_that_a_steps_metadata_cannot_have_is_an_error_with_the_bytes_and_costs_nothing() {
    let config = CacheConfig::for_blocks(160, &SHAPE, KvType::F16).expect("a valid configuration");
    let mut setup = Setup::new(noop(), config, AttentionOptions::default());
    setup.gpu.device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));
    let tables = [(); 2].map(|()| setup.open());
    setup.step(&[(tables[0], 20)]);

    // Three words a row, and eight for every two of them.
    let asked_bytes: u64 = 64 << 10;
    let plan = setup.plan(&[(tables[0], 1), (tables[1], 2048)]);
    let before = setup.attention.stats();
    let refused = without_memory_for(asked_bytes as usize, || setup.attention.prepare(&plan).err());
    assert_eq!(refused, Some(PrepareError::OutOfMemory { asked_bytes }));
    let after = setup.attention.stats();
    assert_eq!(
        (after.metadata_bytes, after.buffers_created),
        (before.metadata_bytes, before.buffers_created)
    );

    // The plan is dropped; a smaller step needs no such memory.
    drop(plan);
    let smaller = setup.plan(&[(tables[0], 1), (tables[1], 30)]);
    without_memory_for(asked_bytes as usize, || setup.run(&smaller));
    setup.kv.commit_step(smaller).expect("the outstanding plan");
    setup.kv.assert_consistent();
    assert_eq!(tables.map(|table| setup.kv.len(table).expect("a live table")), [21, 30]);
    let larger = setup.plan(&[(tables[0], 1), (tables[1], 2048)]);
    assert!(setup.attention.prepare(&larger).is_ok(), "with memory it works");
    assert!(setup.attention.stats().metadata_bytes > before.metadata_bytes);
}

/// An upload through the queue would take as much anew for every step, and wgpu gives the device up where there is none.
#[test]
fn a_steady_step_takes_no_memory_for_its_metadata() {
    let config = CacheConfig::for_blocks(160, &SHAPE, KvType::F16).expect("a valid configuration");
    let mut setup = Setup::new(noop(), config, AttentionOptions::default());
    setup.gpu.device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));
    setup.gpu.device.set_device_lost_callback(|reason, _| panic!("the device is lost: {reason:?}"));
    let table = setup.open();
    // Both slots grow.
    let grown = [(); 2].map(|()| {
        let plan = setup.plan(&[(table, 2048)]);
        setup.attention.prepare(&plan).expect("a slot that grows")
    });
    drop(grown);
    let bytes = setup.attention.stats().step_uploaded_bytes;
    assert!(bytes > 2048 * 12, "{bytes}");

    let plan = setup.plan(&[(table, 2048)]);
    without_memory_for(bytes as usize, || {
        let mut step = setup.attention.prepare(&plan).expect("nothing that it needs memory for");
        let mut encoder = setup.gpu.device.create_command_encoder(&Default::default());
        setup.attention.record_transfers(&mut encoder, &mut step);
        setup.gpu.queue.submit([encoder.finish()]);
    });
}

#[test]
fn every_kernel_says_its_variant_and_how_long_it_took() {
    on_each_adapter_but_gl(|adapter| {
        let setup = Setup::new(open(adapter), config(), AttentionOptions::default());
        let variants = setup.attention.variants();
        assert_eq!(variants.len() as u32, setup.attention.stats().pipelines_created);
        for kernel in ["attention_decode", "attention_prefill", "attention_merge", "append", "block_copy"] {
            let found = variants.iter().filter(|variant| variant.name.starts_with(kernel));
            let times: Vec<_> = found.map(|variant| variant.creation_time).collect();
            assert!(matches!(times[..], [time] if !time.is_zero()), "{kernel}: {times:?}");
        }
    });
}

/// The software adapters take a pipeline cache and keep nothing in it. That it reaches the driver is seen by one of another
/// device, which is refused.
#[test]
#[allow(unsafe_code)]
fn pipelines_are_made_with_the_applications_pipeline_cache() {
    on_each_adapter_but_gl(|adapter| {
        if !adapter.features().contains(Features::PIPELINE_CACHE) {
            announce_left_out(adapter);
            return;
        }
        let open =
            || adapter.request_device(Limits::default(), Features::PIPELINE_CACHE).expect("what it offers");
        let (gpu, other) = (open(), open());
        let cache_of = |gpu: &TestDevice| {
            let descriptor = wgpu::PipelineCacheDescriptor { label: None, data: None, fallback: false };
            // SAFETY: there is no data.
            unsafe { gpu.device.create_pipeline_cache(&descriptor) }
        };
        let create = |cache: wgpu::PipelineCache| {
            let options = AttentionOptions::default().pipeline_cache(cache);
            PagedAttention::with_options(&gpu.device, SHAPE, config(), options).map(drop)
        };
        assert!(create(cache_of(&gpu)).is_ok());
        let refused = create(cache_of(&other));
        assert!(matches!(refused, Err(DeviceError::Refused { .. })), "{refused:?}");
    });
}
