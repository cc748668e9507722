//! The device is lost, at every point of a step, and another one takes its place.
//!
//! A device is lost here by `wgpu::Device::destroy`. What wgpu does then is the first test's subject: everything rests on
//! it. An error that reaches the application's handler fails any of these tests.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use paged_kv::{
    AttentionOptions, BindError, BoundTensors, CacheConfig, ConfigError, DeviceError, KvCache, KvType,
    LayerTensors, ModelShape, PagedAttention, PrepareError, RecordError, StepBuilder, StepPlan, TableId,
    TensorSlice, TransferReport,
};
use wgpu::{BufferDescriptor, BufferUsages, Features, Limits};

use crate::device::{TestDevice, noop_device, on_each_adapter, open_noop_without_limits, small_pool};
use crate::device_rig::{on_each_adapter_but_gl, open};

const SHAPE: ModelShape = ModelShape::new(2, 2, 1, 8);
const ROWS: u32 = 32;

fn noop() -> TestDevice {
    noop_device(Limits::default(), Features::empty(), 8..=8)
}

fn config() -> CacheConfig {
    small_pool(&SHAPE)
}

fn forbid_uncaptured(gpu: &TestDevice) {
    gpu.device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));
}

fn buffer(gpu: &TestDevice, usage: BufferUsages, mapped_at_creation: bool) -> wgpu::Buffer {
    let size = u64::from(ROWS) * 256;
    gpu.device.create_buffer(&BufferDescriptor { label: None, size, usage, mapped_at_creation })
}

fn bind(gpu: &TestDevice, attention: &mut PagedAttention) -> Result<BoundTensors, BindError> {
    let [packed, output] = [(); 2].map(|()| buffer(gpu, BufferUsages::STORAGE, false));
    let slice = |buffer| TensorSlice { buffer, offset: 0, row_stride: 16, rows: ROWS };
    let [query, key, value] = [(); 3].map(|()| slice(&packed));
    attention.bind_tensors(&LayerTensors { query, key, value, output: slice(&output) })
}

#[test]
fn wgpu_tells_of_a_lost_device_by_its_callback_and_by_what_cannot_be_written() {
    on_each_adapter(|adapter| check_what_wgpu_does(&open(adapter)));
    check_what_wgpu_does(&noop());
}

fn check_what_wgpu_does(gpu: &TestDevice) {
    let TestDevice { device, queue, .. } = gpu;
    let (errors, losses) = (Arc::<AtomicU32>::default(), Arc::<Mutex<Vec<_>>>::default());
    let (counted, noted) = (Arc::clone(&errors), Arc::clone(&losses));
    device.on_uncaptured_error(Arc::new(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
    }));
    device.set_device_lost_callback(move |reason, _| noted.lock().expect("one thread").push(reason));
    let before = buffer(gpu, BufferUsages::COPY_DST, false);
    assert!(queue.write_buffer_with(&before, 0, 4.try_into().expect("not zero")).is_some());
    device.destroy();

    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let after = buffer(gpu, BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC, true);
    queue.write_buffer(&before, 0, &[0; 4]);
    let mut encoder = device.create_command_encoder(&Default::default());
    encoder.clear_buffer(&before, 0, None);
    queue.submit([encoder.finish()]);
    assert!(pollster::block_on(scope.pop()).is_none(), "wgpu reports no error");
    assert_eq!(errors.load(Ordering::Relaxed), 0);
    // These are what the library goes by.
    assert!(after.get_mapped_range_mut(..).is_err());
    assert!(queue.write_buffer_with(&before, 0, 4.try_into().expect("not zero")).is_none());
    let _ = device.poll(wgpu::PollType::wait_indefinitely());
    assert_eq!(*losses.lock().expect("one thread"), [wgpu::DeviceLostReason::Destroyed]);
}

/// Where in a step the device is lost.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
enum Point {
    Prepare,
    Encoder,
    Transfers,
    Copies,
    Layers,
    Finish,
    Submit,
    Commit,
    After,
}

const POINTS: [Point; 9] = [
    Point::Prepare,
    Point::Encoder,
    Point::Transfers,
    Point::Copies,
    Point::Layers,
    Point::Finish,
    Point::Submit,
    Point::Commit,
    Point::After,
];

/// A cache with two tables, one of them in the host pool and on its way back, on a device.
struct Setup {
    kv: KvCache,
    attention: PagedAttention,
    tables: [TableId; 3],
}

impl Setup {
    fn new(gpu: &TestDevice) -> Self {
        forbid_uncaptured(gpu);
        let attention = PagedAttention::new(&gpu.device, SHAPE, config()).expect("a device");
        let mut kv = KvCache::new(config());
        let tables = [(); 3].map(|()| kv.create(24).expect("a free table"));
        Self { kv, attention, tables }
    }

    fn plan(&mut self, pushes: &[(usize, u32)], out: Option<usize>, back: Option<usize>) -> StepPlan {
        let mut builder = StepBuilder::new(&mut self.kv);
        if let Some(table) = out {
            builder.swap_out(self.tables[table]).expect("room in the host pool");
        }
        if let Some(table) = back {
            builder.swap_in(self.tables[table]).expect("room in the pool");
        }
        for &(table, rows) in pushes {
            builder.push(self.tables[table], &vec![7; rows as usize]).expect("room in the pool");
        }
        builder.finish()
    }

    /// All that an application does for a step, whatever the device does. The device is lost at `point`.
    fn step(&mut self, gpu: &TestDevice, plan: StepPlan, point: Option<Point>) -> Result<(), PrepareError> {
        let lose = |here| {
            if point == Some(here) {
                gpu.device.destroy();
            }
        };
        let tensors = bind(gpu, &mut self.attention).expect("a working device");
        lose(Point::Prepare);
        let mut step = self.attention.prepare(&plan)?;
        lose(Point::Encoder);
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        lose(Point::Transfers);
        self.attention.record_transfers(&mut encoder, &mut step);
        let mut pass = encoder.begin_compute_pass(&Default::default());
        lose(Point::Copies);
        self.attention.record_block_copies(&mut pass, &mut step);
        for layer in 0..SHAPE.num_layers() {
            lose(Point::Layers);
            let recorded = self.attention.record_layer(&mut pass, &mut step, layer, &tensors);
            assert_eq!(recorded, Ok(()), "the order is right, whatever the device is");
        }
        drop(pass);
        lose(Point::Finish);
        let commands = encoder.finish();
        lose(Point::Submit);
        gpu.queue.submit([commands]);
        lose(Point::Commit);
        let _ = gpu.device.poll(wgpu::PollType::wait_indefinitely());
        // An application that reads logits finds out here; this one believes in them.
        self.kv.commit_step(plan).expect("the outstanding plan");
        lose(Point::After);
        Ok(())
    }

    fn collect(&mut self) -> Vec<TransferReport> {
        let reports = self.attention.poll_transfers();
        for report in &reports {
            self.kv.complete_transfers(report.step, report.complete);
        }
        reports
    }
}

#[test]
fn a_device_lost_at_any_point_is_a_typed_error_and_the_next_one_goes_on() {
    on_each_adapter_but_gl(|adapter| {
        // Some take seconds to compile the kernels.
        let points = [Point::Prepare, Point::Transfers, Point::Layers, Point::Submit, Point::Commit];
        points.into_iter().for_each(|at| check_loss(at, || open(adapter)));
    });
    POINTS.iter().for_each(|&at| check_loss(at, noop));
}

fn check_loss(point: Point, open: impl Fn() -> TestDevice) {
    let gpu = open();
    let mut setup = Setup::new(&gpu);
    let [_, away, late] = setup.tables;
    // One table goes to the host pool and arrives; one returns and one leaves in the step at hand; one shares a last block.
    let plan = setup.plan(&[(0, 6), (1, 5), (2, 9)], None, None);
    setup.step(&gpu, plan, None).expect("a working device");
    let plan = setup.plan(&[(0, 1)], Some(1), None);
    setup.step(&gpu, plan, None).expect("a working device");
    assert!(setup.collect().iter().all(|report| report.complete));
    setup.tables[1] = setup.kv.fork(setup.tables[0], 6, 24).expect("a free table");
    let plan = setup.plan(&[(0, 1), (1, 1)], Some(2), None);
    assert_eq!((plan.block_copies().len(), plan.swap_outs().len()), (2, 3));
    let last = plan.step();
    let before = setup.attention.stats();
    let stepped = setup.step(&gpu, plan, Some(point));
    let expected = if point == Point::Prepare { Err(PrepareError::DeviceLost) } else { Ok(()) };
    assert_eq!(stepped, expected, "{point:?}");

    // Whatever is asked of the lost device says so.
    let plan = setup.plan(&[(0, 1)], None, None);
    assert_eq!(setup.attention.prepare(&plan).err(), Some(PrepareError::DeviceLost), "{point:?}");
    assert_eq!(bind(&gpu, &mut setup.attention).err(), Some(BindError::DeviceLost));
    let another = PagedAttention::new(&gpu.device, SHAPE, config()).err();
    assert_eq!(another, Some(DeviceError::DeviceLost));
    assert_eq!(setup.attention.rebuild(&gpu.device), Err(DeviceError::DeviceLost));

    // The reports come before or after the rebuild that failed, and before or after one that succeeds, but once.
    let new = open();
    forbid_uncaptured(&new);
    setup.attention.rebuild(&new.device).expect("another device");
    let reports = setup.collect();
    let expected = if point == Point::Prepare { vec![] } else { vec![last] };
    assert_eq!(reports.iter().map(|report| report.step).collect::<Vec<_>>(), expected, "{point:?}");
    assert!(point >= Point::Commit || reports.iter().all(|report| !report.complete), "{point:?}");
    assert_eq!(setup.collect(), []);
    let stale = setup.plan(&[(0, 1)], None, None);
    let not_forgotten = PrepareError::DeviceNotForgotten { forgotten: 0, needed: 1 };
    assert_eq!(setup.attention.prepare(&stale).err(), Some(not_forgotten));
    setup.kv.forget_device();
    setup.kv.assert_consistent();
    drop(stale);

    // What was in the host pool altogether is there still; the others begin again.
    let len = |setup: &Setup, table| setup.kv.len(table).expect("an open table");
    assert_eq!(len(&setup, away), 5, "{point:?}");
    assert_eq!(len(&setup, setup.tables[0]), 0);
    let arrived = reports.iter().any(|report| report.complete);
    assert_eq!(len(&setup, late), if arrived { 9 } else { 0 }, "{point:?}");
    setup.tables[1] = away;
    let plan = setup.plan(&[(0, 9)], None, Some(1));
    assert!(plan.table_changes().iter().all(|change| change.first_entry == 0));
    setup.step(&new, plan, None).expect("a working device");
    assert!(setup.collect().iter().all(|report| report.complete));
    let plan = setup.plan(&[(0, 1), (1, 1)], None, None);
    setup.step(&new, plan, None).expect("a working device");
    let after = setup.attention.stats();
    assert!(after.buffers_created > before.buffers_created && after.pipelines_created == 10, "{after:?}");
    assert_eq!(after.host_pool_bytes, before.host_pool_bytes + if arrived { 3 } else { 0 } * 256);
}

#[test]
fn what_was_made_on_the_old_device_is_refused_on_the_new_one() {
    let (old, new) = (noop(), noop());
    let mut setup = Setup::new(&old);
    let tensors = bind(&old, &mut setup.attention).expect("a working device");
    let plan = setup.plan(&[(0, 3)], None, None);
    let mut step = setup.attention.prepare(&plan).expect("a working device");
    setup.attention.rebuild(&new.device).expect("another device");

    let mut encoder = new.device.create_command_encoder(&Default::default());
    setup.attention.record_transfers(&mut encoder, &mut step);
    let mut pass = encoder.begin_compute_pass(&Default::default());
    setup.attention.record_block_copies(&mut pass, &mut step);
    let recorded = setup.attention.record_layer(&mut pass, &mut step, 0, &tensors);
    assert_eq!(recorded, Err(RecordError::ForeignStep));
    drop(pass);
    setup.kv.forget_device();
    let plan = setup.plan(&[(0, 3)], None, None);
    let mut step = setup.attention.prepare(&plan).expect("a working device");
    setup.attention.record_transfers(&mut encoder, &mut step);
    let mut pass = encoder.begin_compute_pass(&Default::default());
    setup.attention.record_block_copies(&mut pass, &mut step);
    let recorded = setup.attention.record_layer(&mut pass, &mut step, 0, &tensors);
    assert_eq!(recorded, Err(RecordError::ForeignTensors));
    drop(pass);
    // What was recorded belongs to the new device.
    forbid_uncaptured(&new);
    new.queue.submit([encoder.finish()]);
}

#[test]
fn a_rebuild_that_fails_costs_nothing_and_another_one_succeeds() {
    let gpu = noop();
    let options = AttentionOptions::default().fixed_span_tokens(256);
    let attention = PagedAttention::with_options(&gpu.device, SHAPE, config(), options).expect("a device");
    let split = *attention.split_config();
    let mut setup = Setup { attention, ..Setup::new(&gpu) };
    let plan = setup.plan(&[(0, 6)], None, None);
    setup.step(&gpu, plan, None).expect("a working device");
    let plan = setup.plan(&[(1, 1)], Some(0), None);
    setup.step(&gpu, plan, None).expect("a working device");
    assert!(setup.collect().iter().all(|report| report.complete));
    let before = setup.attention.stats();
    assert!(before.arena_bytes > 0 && before.host_pool_bytes > 0);

    // A layer takes 2 KiB; this device binds 1 KiB.
    let small = Limits { max_storage_buffer_binding_size: 1024, ..Limits::default() };
    let too_small = noop_device(small, Features::empty(), 8..=8);
    forbid_uncaptured(&too_small);
    let refused = setup.attention.rebuild(&too_small.device);
    let expected = ConfigError::LayerExceedsArena { layer_bytes: 16 * 128, max_bytes: 1024, max_blocks: 8 };
    assert_eq!(refused, Err(DeviceError::Config(expected)));
    let no_groups = Limits { max_bind_groups: 2, ..Limits::default() };
    let no_groups = noop_device(no_groups, Features::empty(), 8..=8);
    let refused = setup.attention.rebuild(&no_groups.device);
    let expected =
        DeviceError::LimitTooLow { object: "the kernels", limit: "max_bind_groups", needed: 3, actual: 2 };
    assert_eq!(refused, Err(expected));

    // The device that it was on works, but the arenas there are given back.
    let plan = setup.plan(&[(1, 1)], None, None);
    assert_eq!(setup.attention.prepare(&plan).err(), Some(PrepareError::DeviceLost));
    assert_eq!(bind(&gpu, &mut setup.attention).err(), Some(BindError::DeviceLost));
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    setup.attention.record_initialization(&mut encoder);
    gpu.queue.submit([encoder.finish()]);
    let meanwhile = setup.attention.stats();
    assert_eq!((meanwhile.arena_bytes, meanwhile.metadata_bytes, meanwhile.staging_bytes), (0, 0, 0));
    assert_eq!(meanwhile.host_pool_bytes, before.host_pool_bytes);
    assert_eq!(meanwhile.buffers_created, before.buffers_created);

    setup.attention.rebuild(&gpu.device).expect("the same device again");
    setup.kv.forget_device();
    assert_eq!(*setup.attention.split_config(), split, "the options are kept");
    let plan = setup.plan(&[(1, 3)], None, Some(0));
    setup.step(&gpu, plan, None).expect("a working device");
    let after = setup.attention.stats();
    assert_eq!(after.arena_bytes, before.arena_bytes);
    assert_eq!(after.swapped_in_blocks, 0, "not collected yet");
    assert!(setup.collect().iter().all(|report| report.complete));
    assert_eq!(setup.attention.stats().swapped_in_blocks, 2);
}

#[test]
fn memory_that_a_rebuild_cannot_have_is_an_error_with_the_bytes() {
    let shape = ModelShape::new(2, 1 << 16, 1, 256);
    let config = CacheConfig::for_blocks(256, &shape, KvType::F16)
        .and_then(|config| config.with_max_sequences(1 << 16))
        .expect("a valid configuration");
    // Within the usual limits, partial results take as much as those allow; without limits, 130 TiB.
    let gpu = noop();
    forbid_uncaptured(&gpu);
    let options = AttentionOptions::default().fixed_span_tokens(128);
    let arena_bytes = config.bytes_total();
    let mut attention = PagedAttention::with_options(&gpu.device, shape, config, options).expect("a device");
    let scratch_bytes = attention.stats().scratch_bytes;
    let larger = open_noop_without_limits();
    forbid_uncaptured(&larger);
    match attention.rebuild(&larger.device) {
        Err(DeviceError::OutOfMemory { object, created_bytes, .. }) => {
            assert_eq!((object, created_bytes), ("partial results", arena_bytes));
        }
        other => panic!("{other:?}"),
    }
    attention.rebuild(&gpu.device).expect("the usual limits");
    assert_eq!(attention.stats().scratch_bytes, scratch_bytes);
}
