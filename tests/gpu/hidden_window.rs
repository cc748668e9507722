//! An application whose window is minimised: it prepares and records frame after frame, and submits none of them.

use paged_kv::{
    BoundTensors, CacheConfig, KvCache, KvType, LayerTensors, ModelShape, PagedAttention, StepBuilder,
    StepPlan, TableId, TensorSlice,
};
use wgpu::{BufferUsages, Features, Limits};

use crate::counting_allocator::held_bytes;
use crate::device::{TestDevice, noop_device};
use crate::device_rig::{on_each_adapter_but_gl, open};

const SHAPE: ModelShape = ModelShape::new(2, 2, 1, 8);
const MAX_ROWS: u32 = 512;

/// How far a frame gets before it is given up.
#[derive(Clone, Copy, Debug)]
enum Frame {
    Prepared,
    Transfers,
    Recorded,
    Finished,
}

struct App<'a> {
    gpu: &'a TestDevice,
    kv: KvCache,
    attention: PagedAttention,
    tensors: BoundTensors,
    table: TableId,
}

impl<'a> App<'a> {
    fn new(gpu: &'a TestDevice) -> Self {
        let config = CacheConfig::for_blocks(64, &SHAPE, KvType::F16).expect("a valid configuration");
        let mut attention =
            PagedAttention::new(&gpu.device, SHAPE, config.clone()).expect("a device that suffices");
        let buffer = |usage| {
            gpu.device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: u64::from(MAX_ROWS) * 64,
                usage,
                mapped_at_creation: false,
            })
        };
        let [input, output] = [(); 2].map(|()| buffer(BufferUsages::STORAGE));
        let slice = |buffer| TensorSlice { buffer, offset: 0, row_stride: 16, rows: MAX_ROWS };
        let [query, key, value] = [(); 3].map(|()| slice(&input));
        let tensors = attention.bind_tensors(&LayerTensors { query, key, value, output: slice(&output) });
        let mut kv = KvCache::new(config);
        let table = kv.create(1024).expect("a free table");
        Self { gpu, kv, attention, tensors: tensors.expect("valid tensors"), table }
    }

    fn plan(&mut self, rows: u32) -> StepPlan {
        let mut builder = StepBuilder::new(&mut self.kv);
        builder.push(self.table, &vec![7; rows as usize]).expect("room in the pool");
        builder.finish()
    }

    /// A frame that gets as far as `frame`; what it recorded is dropped, or returned for a submission.
    fn frame(&mut self, plan: &StepPlan, frame: Frame) -> Option<wgpu::CommandBuffer> {
        let mut step = self.attention.prepare(plan).expect("a step, however many were dropped");
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        if matches!(frame, Frame::Prepared) {
            return None;
        }
        self.attention.record_transfers(&mut encoder, &mut step);
        if matches!(frame, Frame::Transfers) {
            return None;
        }
        let mut pass = encoder.begin_compute_pass(&Default::default());
        self.attention.record_block_copies(&mut pass, &mut step);
        for layer in 0..SHAPE.num_layers() {
            self.attention.record_layer(&mut pass, &mut step, layer, &self.tensors).expect("the right order");
        }
        drop(pass);
        matches!(frame, Frame::Finished).then(|| encoder.finish())
    }

    /// Buffers and their bytes as wgpu counts them, zeros where a backend does not, and this thread's main memory.
    fn held(&self) -> ([isize; 3], i64) {
        let hal = self.gpu.device.get_internal_counters().hal;
        let counters = [&hal.buffers, &hal.buffer_memory, &hal.bind_groups];
        (counters.map(|counter| counter.read()), held_bytes())
    }
}

#[test]
fn b60_frames_that_are_never_submitted_hold_no_memory_however_many_they_are() {
    check_frames(&noop_device(Limits::default(), Features::SUBGROUP, 8..=8), 6_000);
    on_each_adapter_but_gl(|adapter| check_frames(&open(adapter), 6_000));
}

fn check_frames(gpu: &TestDevice, frames: u32) {
    let mut app = App::new(gpu);
    for rows in [MAX_ROWS, 1] {
        for frame in [Frame::Prepared, Frame::Transfers, Frame::Recorded, Frame::Finished] {
            let mut before = None;
            for index in 0..frames / 4 {
                let plan = app.plan(rows);
                drop(app.frame(&plan, frame));
                if index == 20 {
                    before = Some(app.held());
                }
            }
            let (before, after) = (before.expect("more than 20 frames"), app.held());
            assert_eq!(after.0, before.0, "{rows} rows, {frame:?}");
            // Vectors double now and then; a step of 512 rows has 8 KiB, one of one row 100 bytes.
            let grown = after.1 - before.1;
            assert!(grown < 16_384, "{grown} bytes in {frames} frames of {rows} rows, {frame:?}");
        }
    }
    // The window comes back.
    let plan = app.plan(MAX_ROWS);
    let commands = app.frame(&plan, Frame::Finished);
    gpu.queue.submit(commands);
    app.kv.commit_step(plan).expect("the outstanding plan");
    gpu.device.poll(wgpu::PollType::wait_indefinitely()).expect("a working device");
    let plan = app.plan(1);
    assert!(app.frame(&plan, Frame::Finished).is_some());
}
