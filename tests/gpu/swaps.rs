//! Blocks on their way to the host pool and back: bits, order, staging, and transfers that come late, never, or not at
//! all.
//!
//! The model is the CPU twin: `reference::swap_out` and `swap_in` on random words, NaNs with payloads among them.

use std::sync::Arc;

use paged_kv::reference::{set_swaps, swap_in, swap_out};
use paged_kv::{
    AttentionOptions, BlockSwap, CacheConfig, KvFormat, KvType, ModelShape, PagedAttention, PlanFault,
    PrepareError, PreparedStep, StepPlan, TableId, TransferReport,
};
use wgpu::{CommandEncoder, Features, Limits};

use crate::device::{TestAdapter, TestDevice, noop_device, on_each_adapter, open_noop_without_limits};
use crate::device_rig::{DeviceRig, on_each_adapter_but_gl, open};
use crate::rig::{Random, Rig, Tensors};
use crate::steps::step;

fn swap(block: u32, host_slot: u32) -> BlockSwap {
    BlockSwap { block, host_slot }
}

fn swaps(pairs: &[(u32, u32)]) -> Vec<BlockSwap> {
    pairs.iter().map(|&(block, host_slot)| swap(block, host_slot)).collect()
}

fn noop() -> TestDevice {
    noop_device(Limits::default(), Features::empty(), 8..=8)
}

const SHAPE: ModelShape = ModelShape::new(3, 2, 1, 8);

/// A pool of 12 blocks of `block_size` tokens, and 8 slots.
fn rig(format: impl Into<KvFormat>, block_size: u32) -> Rig {
    let config = CacheConfig::for_blocks(12, &SHAPE, format)
        .and_then(|config| config.with_block_size(block_size))
        .and_then(|config| config.with_host_blocks(8))
        .and_then(|config| config.with_max_sequences(4))
        .expect("a valid configuration");
    Rig::of(SHAPE, config)
}

/// Bytes of a block of [`rig`] in f16.
const BLOCK_BYTES: u64 = 3 * 2 * 16 * 8 * 2;

fn setup(gpu: &TestDevice, options: AttentionOptions) -> DeviceRig<'_> {
    DeviceRig::new(gpu, rig(KvType::F16, 16), options)
}

impl DeviceRig<'_> {
    /// Fills the twin's blocks with random words, and the device's with the same.
    fn scramble(&mut self) {
        let random = &mut self.host.random;
        self.host.cpu.words_mut().iter_mut().for_each(|word| *word = random.next() as u32);
        let (arenas, twin) = (self.attention.arena_layout(), self.host.cpu.layout());
        let twin_stride = twin.block_stride_words(0) as usize;
        let layer_words = twin.block().layer_block_words() as usize;
        for (arena, buffer) in (0..).zip(self.attention.arena_buffers()) {
            let stride = arenas.block_stride_words(arena) as usize;
            let first_word = (arena * arenas.layers_per_arena()) as usize * layer_words;
            let blocks = self.host.cpu.words().chunks_exact(twin_stride);
            let words: Vec<u32> =
                blocks.flat_map(|block| &block[first_word..first_word + stride]).copied().collect();
            self.gpu.queue.write_buffer(buffer, 0, bytemuck::cast_slice(&words));
        }
    }

    /// A plan of these swaps and nothing else.
    fn swap_plan(&mut self, outs: &[(u32, u32)], ins: &[(u32, u32)]) -> StepPlan {
        let mut plan = self.host.plan(&[]);
        set_swaps(&mut plan, swaps(outs), swaps(ins));
        plan
    }

    fn prepare(&mut self, plan: &StepPlan) -> Result<PreparedStep, PrepareError> {
        self.attention.prepare(plan)
    }

    /// A swapping step recorded into an encoder of its own.
    fn record(&mut self, outs: &[(u32, u32)], ins: &[(u32, u32)]) -> (StepPlan, CommandEncoder) {
        let plan = self.swap_plan(outs, ins);
        let mut step = self.prepare(&plan).expect("a valid plan");
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        self.attention.record_transfers(&mut encoder, &mut step);
        (plan, encoder)
    }

    /// A swapping step on device and twin, without waiting for it.
    fn submit(&mut self, outs: &[(u32, u32)], ins: &[(u32, u32)]) -> TransferReport {
        let (plan, encoder) = self.record(outs, ins);
        self.gpu.queue.submit([encoder.finish()]);
        swap_out(&mut self.host.cpu, plan.swap_outs());
        swap_in(&mut self.host.cpu, plan.swap_ins());
        let report = TransferReport { step: plan.step(), complete: true };
        self.host.commit(plan);
        report
    }

    fn wait(&self) {
        self.gpu.device.poll(wgpu::PollType::wait_indefinitely()).expect("a working device");
    }

    /// Brings one block back, on the device only.
    fn submit_in(&mut self, block: u32, host_slot: u32) {
        let (plan, encoder) = self.record(&[], &[(block, host_slot)]);
        self.gpu.queue.submit([encoder.finish()]);
        let report = TransferReport { step: plan.step(), complete: true };
        self.host.commit(plan);
        assert_eq!(self.collect(), [report]);
    }

    /// Waits for the device and collects what has arrived.
    fn collect(&mut self) -> Vec<TransferReport> {
        self.wait();
        self.attention.poll_transfers()
    }

    /// A swapping step from plan to report.
    fn swap(&mut self, outs: &[(u32, u32)], ins: &[(u32, u32)]) {
        let report = self.submit(outs, ins);
        assert_eq!(self.collect(), [report]);
    }
}

/// Blocks leave and return in random rounds, several steps in flight, while the arenas change in between.
fn check_random_rounds(adapter: &TestAdapter, format: KvFormat, block_size: u32, options: AttentionOptions) {
    let host = rig(format, block_size);
    // Arenas of two layers and one.
    let layer_bytes = host.cpu.layout().block().layer_block_bytes() * 12;
    let limits = Limits { max_storage_buffer_binding_size: 2 * layer_bytes + 16, ..Limits::default() };
    let gpu = adapter.request_device(limits, Features::empty()).expect("lower limits");
    let mut rig = DeviceRig::new(&gpu, host, options);
    assert_eq!(rig.attention.arena_layout().num_arenas(), 2);
    rig.scramble();
    let mut random = Random(7);
    let (mut claimed, mut arrived) = ([false; 8], [false; 8]);
    for round in 0..12 {
        let mut expected = Vec::new();
        for _ in 0..2 {
            let mut shuffled = |count| {
                let mut numbers: Vec<u32> = (0..count).collect();
                random.shuffle(&mut numbers);
                numbers
            };
            let (leaving, returning, slots) = (shuffled(12), shuffled(12), shuffled(8));
            let (taken, others) = slots.split_at((random.next() % 5) as usize);
            for &slot in taken {
                (claimed[slot as usize], arrived[slot as usize]) = (true, false);
            }
            let given = others.iter().copied().filter(|&slot| arrived[slot as usize]);
            let outs: Vec<_> = leaving.into_iter().zip(taken.iter().copied()).collect();
            let ins: Vec<_> = returning.into_iter().zip(given).collect();
            if !outs.is_empty() || !ins.is_empty() {
                expected.push(rig.submit(&outs, &ins));
            }
        }
        assert_eq!(rig.collect(), expected, "round {round}");
        rig.assert_same_blocks();
        arrived = claimed;
    }
    let stats = rig.attention.stats();
    assert!(stats.swapped_out_blocks > 20 && stats.swapped_in_blocks > 20);
    assert_eq!(stats.swapped_in_bytes, stats.swapped_in_blocks * rig.host.kv.config().bytes_per_block());
}

#[test]
fn blocks_leave_and_return_bit_for_bit_in_every_layout() {
    // Staging for one block's range of an arena, for a few of them, and for all that there is.
    let cells = [
        (KvFormat::from(KvType::F32), 1, 1200),
        (KvFormat::from(KvType::F16), 1, 1 << 24),
        (KvFormat::from(KvType::F32), 16, 0),
        (KvFormat::new(KvType::F16, KvType::F32).with_v_head_dim(24), 16, 40_000),
        (KvFormat::from(KvType::F16), 256, 200_000),
    ];
    for (format, block_size, staging_bytes) in cells {
        on_each_adapter_but_gl(|adapter| {
            let options = AttentionOptions::default().staging_bytes(staging_bytes);
            check_random_rounds(adapter, format, block_size, options);
        });
    }
}

#[test]
fn blocks_leave_and_return_bit_for_bit_on_every_adapter() {
    on_each_adapter(|adapter| {
        check_random_rounds(adapter, KvType::F16.into(), 16, AttentionOptions::default());
    });
}

#[test]
fn a_block_leaves_before_another_returns_into_it() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let mut rig = setup(&gpu, AttentionOptions::default());
        rig.scramble();
        let before = [rig.block_words(3), rig.block_words(5)];
        rig.swap(&[(3, 0)], &[]);
        rig.swap(&[(5, 1)], &[(5, 0)]);
        assert!(rig.block_words(5) == before[0], "block 5 has what block 3 had");
        rig.swap(&[], &[(3, 1)]);
        assert!(rig.block_words(3) == before[1], "slot 1 has what block 5 had before the other one returned");
        rig.assert_same_blocks();
    });
}

#[test]
fn a_block_leaves_and_returns_before_it_is_copied_and_written() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let mut rig = setup(&gpu, AttentionOptions::default());
        let parent = rig.host.open();
        step(&mut rig, &[(parent, 6)]);
        rig.scramble();
        let child = rig.host.kv.fork(parent, 6, 16).expect("a free table");
        let other = 11;
        rig.swap(&[(other, 0)], &[]);
        let mut plan = rig.host.plan(&[(parent, 1), (child, 1)]);
        let copy = plan.block_copies()[0];
        assert!(![copy.source, copy.destination].contains(&other));
        let old = rig.block_words(copy.destination);
        // The copy's source returns, both leave, and both are written to by the step.
        let returning = rig.block_words(other);
        set_swaps(&mut plan, swaps(&[(copy.source, 1), (copy.destination, 2)]), swaps(&[(copy.source, 0)]));
        let layers: Vec<Tensors> = (0..3).map(|_| rig.host.tensors(&plan)).collect();
        swap_out(&mut rig.host.cpu, plan.swap_outs());
        swap_in(&mut rig.host.cpu, plan.swap_ins());
        rig.host.begin(&plan);
        (0..).zip(&layers).for_each(|(layer, tensors)| rig.host.append(&plan, tensors, layer));
        rig.run(&plan, &layers);
        rig.assert_same_blocks();
        assert_ne!(rig.block_words(copy.destination), returning, "written after it was copied");
        assert_eq!(rig.collect(), [TransferReport { step: plan.step(), complete: true }]);
        rig.host.commit(plan);
        rig.swap(&[], &[(other, 2)]);
        assert!(rig.block_words(other) == old, "what the destination had before the step");
        rig.assert_same_blocks();
    });
}

#[test]
fn outputs_are_the_same_bits_before_and_after_a_sequence_was_away() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let mut rig = setup(&gpu, AttentionOptions::default().fixed_span_tokens(128));
        let (away, neighbour) = (rig.host.open(), rig.host.open());
        let run = |rig: &mut DeviceRig<'_>, pushes: &[(TableId, u32)], layers: Option<&[Tensors]>| {
            let plan = rig.host.plan(pushes);
            let layers = layers.map_or_else(
                || (0..3).map(|_| rig.host.tensors(&plan)).collect::<Vec<_>>(),
                |layers| layers.iter().map(copy_of).collect(),
            );
            let output = rig.run(&plan, &layers);
            (plan, layers, output)
        };
        let (prompt, ..) = run(&mut rig, &[(away, 83), (neighbour, 20)], None);
        rig.host.commit(prompt);
        let blocks: Vec<u32> =
            rig.host.kv.block_ids(away).expect("a table").iter().map(|block| block.index()).collect();
        assert_eq!(blocks.len(), 6);
        let (plan, layers, before) = run(&mut rig, &[(away, 1)], None);
        // Planned again below, for the same slot.
        drop(plan);
        let pairs: Vec<(u32, u32)> = blocks.iter().copied().zip([3, 1, 7, 0, 2, 6]).collect();
        rig.swap(&pairs, &[]);
        rig.scramble();
        rig.swap(&[], &pairs);
        let (plan, _, after) = run(&mut rig, &[(away, 1)], Some(&layers));
        rig.host.commit(plan);
        let bits =
            |outputs: &[Vec<f32>]| -> Vec<u32> { outputs.iter().flatten().map(|x| x.to_bits()).collect() };
        assert_eq!(bits(&before), bits(&after));
        assert!(before.iter().flatten().all(|x| x.is_finite()));
    });
}

fn copy_of(tensors: &Tensors) -> Tensors {
    let Tensors { query, key, value } = tensors;
    Tensors { query: query.clone(), key: key.clone(), value: value.clone() }
}

#[test]
fn bytes_that_arrive_late_do_not_replace_those_of_a_later_step() {
    on_each_adapter_but_gl(|adapter| check_late_transfers(&open(adapter)));
    check_late_transfers(&noop());
}

/// Block 0, 1 and 2 go to one slot in three steps, which are submitted and collected in every order.
fn check_late_transfers(gpu: &TestDevice) {
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let mut rig = setup(gpu, AttentionOptions::default());
    for order in orders {
        rig.scramble();
        let mut steps = Vec::new();
        for block in 0..3 {
            let (plan, encoder) = rig.record(&[(block, 4)], &[]);
            steps.push((plan.step(), Some(encoder)));
            rig.host.commit(plan);
        }
        for step in order {
            let (step, encoder) = &mut steps[step];
            let encoder = encoder.take().expect("each is submitted once");
            gpu.queue.submit([encoder.finish()]);
            assert_eq!(rig.collect(), [TransferReport { step: *step, complete: true }]);
        }
        let last = rig.block_words(2);
        rig.submit_in(9, 4);
        assert!(rig.block_words(9) == last, "{order:?}");
    }
}

#[test]
fn a_block_that_has_not_arrived_cannot_return() {
    let gpu = noop();
    let mut rig = setup(&gpu, AttentionOptions::default());
    let refused = |rig: &mut DeviceRig<'_>, outs: &[(u32, u32)], ins: &[(u32, u32)]| {
        let plan = rig.swap_plan(outs, ins);
        rig.prepare(&plan).err()
    };
    let empty = Some(PrepareError::HostSlotEmpty { host_slot: 5 });
    assert_eq!(refused(&mut rig, &[], &[(0, 5)]), empty);
    let report = rig.submit(&[(3, 5)], &[]);
    let awaited = Some(PrepareError::HostSlotAwaited { host_slot: 5, step: report.step.raw() });
    assert_eq!(refused(&mut rig, &[], &[(0, 5)]), awaited);
    rig.wait();
    // It has arrived, but has not been collected.
    assert_eq!(refused(&mut rig, &[], &[(0, 5)]), awaited);
    assert_eq!(rig.attention.poll_transfers(), [report]);
    assert_eq!(rig.attention.poll_transfers(), []);
    assert_eq!(refused(&mut rig, &[], &[(0, 5)]), None);
    // What never runs leaves the slot that it claimed empty, whatever was there.
    let (plan, encoder) = rig.record(&[(3, 5)], &[]);
    drop(encoder);
    assert!(rig.attention.poll_transfers().contains(&TransferReport { step: plan.step(), complete: false }));
    assert_eq!(refused(&mut rig, &[], &[(0, 5)]), empty);
}

#[test]
fn swaps_that_are_out_of_range_or_in_conflict_are_refused_with_the_numbers() {
    let gpu = noop();
    let mut rig = setup(&gpu, AttentionOptions::default());
    rig.swap(&[(0, 0), (1, 1)], &[]);
    type Pairs<'a> = &'a [(u32, u32)];
    let cases: [(Pairs<'_>, Pairs<'_>, PrepareError); 10] = [
        (&[(12, 2)], &[], PlanFault::BlockOutOfRange { block: 12, num_blocks: 12 }.into()),
        (&[], &[(12, 0)], PlanFault::BlockOutOfRange { block: 12, num_blocks: 12 }.into()),
        (&[(0, 8)], &[], PlanFault::HostSlotOutOfRange { host_slot: 8, host_blocks: 8 }.into()),
        (&[], &[(0, 8)], PlanFault::HostSlotOutOfRange { host_slot: 8, host_blocks: 8 }.into()),
        (&[(3, 2), (4, 3), (3, 4)], &[], PlanFault::SwapTwice { block: 3 }.into()),
        (&[], &[(3, 0), (3, 1)], PlanFault::SwapTwice { block: 3 }.into()),
        (&[(3, 2), (4, 3), (5, 2)], &[], PlanFault::HostSlotTwice { host_slot: 2 }.into()),
        (&[], &[(3, 1), (4, 1)], PlanFault::HostSlotTwice { host_slot: 1 }.into()),
        (&[(3, 2), (4, 1)], &[(5, 0), (6, 1)], PlanFault::HostSlotConflict { host_slot: 1 }.into()),
        (&[(3, 2)], &[(3, 0), (4, 7)], PrepareError::HostSlotEmpty { host_slot: 7 }),
    ];
    for (outs, ins, expected) in cases {
        let plan = rig.swap_plan(outs, ins);
        assert_eq!(rig.prepare(&plan).err(), Some(expected));
    }
    // A refused plan has claimed nothing, and whatever it staged is idle again.
    rig.swap(&[(2, 2)], &[(7, 0), (2, 1)]);
    assert_eq!(rig.attention.stats().swapped_out_blocks, 3);
    assert_eq!(rig.attention.stats().host_pool_bytes, 3 * BLOCK_BYTES);
}

#[test]
fn a_step_without_swaps_creates_nothing_and_repeated_swaps_reuse_their_staging() {
    on_each_adapter_but_gl(|adapter| check_reuse(&open(adapter)));
    check_reuse(&noop());
}

fn check_reuse(gpu: &TestDevice) {
    let mut rig = setup(gpu, AttentionOptions::default());
    let created = |rig: &DeviceRig<'_>| (rig.attention.stats().buffers_created, gpu.existing()[0]);
    let without_swaps = |rig: &mut DeviceRig<'_>| {
        let before = created(rig);
        let stats = rig.attention.stats();
        for _ in 0..3 {
            rig.submit(&[], &[]);
            assert_eq!(rig.collect(), []);
        }
        assert_eq!(created(rig), before);
        assert_eq!(rig.attention.stats().staging_bytes, stats.staging_bytes);
    };
    rig.submit(&[], &[]);
    assert_eq!(rig.collect(), []);
    without_swaps(&mut rig);
    assert_eq!(rig.attention.stats().staging_bytes, 0);
    assert_eq!(rig.attention.stats().host_pool_bytes, 0);
    rig.swap(&[(0, 0), (1, 1), (2, 2)], &[]);
    rig.swap(&[(3, 3)], &[(5, 0), (4, 1)]);
    without_swaps(&mut rig);
    let before = created(&rig);
    for _ in 0..20 {
        rig.swap(&[(0, 0), (1, 1), (2, 2)], &[(0, 3)]);
        rig.swap(&[(3, 3)], &[(5, 0), (4, 1)]);
    }
    assert_eq!(created(&rig), before);
    rig.assert_same_blocks();
    let stats = rig.attention.stats();
    // One buffer of the host pool's size each way, and the stamp.
    assert_eq!(stats.staging_bytes, 2 * 8 * BLOCK_BYTES + 4);
    assert_eq!(stats.host_pool_bytes, 4 * BLOCK_BYTES);
    assert_eq!((stats.swapped_out_blocks, stats.swapped_in_blocks), (21 * 4, 20 * 3 + 2));
    assert_eq!(stats.swapped_out_bytes, 21 * 4 * BLOCK_BYTES);
}

#[test]
fn a_large_swap_takes_many_buffers_and_keeps_few() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let mut rig = setup(&gpu, AttentionOptions::default().staging_bytes(4 * BLOCK_BYTES));
        rig.scramble();
        let pairs: Vec<(u32, u32)> = (0..8).map(|slot| (11 - slot, slot)).collect();
        let outs = rig.submit(&pairs, &[]);
        assert_eq!(rig.attention.stats().staging_bytes, 8 * BLOCK_BYTES + 4);
        assert_eq!(rig.collect(), [outs]);
        assert_eq!(rig.attention.stats().staging_bytes, 4 * BLOCK_BYTES + 4);
        rig.host.cpu.words_mut().fill(0);
        let zero = vec![0; rig.host.cpu.words().len() * 4];
        gpu.queue.write_buffer(&rig.attention.arena_buffers()[0], 0, &zero);
        let back: Vec<(u32, u32)> = (0..8).map(|slot| (slot, slot)).collect();
        rig.swap(&[], &back);
        rig.assert_same_blocks();
        assert_eq!(rig.attention.stats().staging_bytes, 8 * BLOCK_BYTES + 4);
    });
}

#[test]
fn a_step_that_is_never_submitted_gives_its_staging_back() {
    let gpu = noop();
    let mut rig = setup(&gpu, AttentionOptions::default());
    rig.swap(&[(0, 0)], &[]);
    let incomplete = |plan: &StepPlan| [TransferReport { step: plan.step(), complete: false }];
    // Prepared only: idle again.
    rig.swap(&[], &[(0, 0)]);
    let created = rig.attention.stats().buffers_created;
    for _ in 0..20 {
        let plan = rig.swap_plan(&[(1, 1)], &[(2, 0)]);
        let step = rig.prepare(&plan).expect("a free slot");
        assert_eq!(rig.attention.poll_transfers(), [], "it may still be recorded");
        drop(step);
        assert_eq!(rig.attention.poll_transfers(), incomplete(&plan));
    }
    assert_eq!(rig.attention.stats().buffers_created, created);
    // Recorded, but the commands are dropped: gone, and made anew.
    for _ in 0..20 {
        let (plan, encoder) = rig.record(&[(1, 1)], &[(2, 0)]);
        let commands = encoder.finish();
        assert_eq!(rig.attention.poll_transfers(), [], "it may still be submitted");
        drop(commands);
        assert_eq!(rig.attention.poll_transfers(), incomplete(&plan));
        assert_eq!(rig.attention.stats().staging_bytes, 0);
    }
    rig.swap(&[(1, 1)], &[(2, 0)]);
}

#[test]
fn steps_that_nobody_collects_are_bounded() {
    let gpu = noop();
    let mut rig = setup(&gpu, AttentionOptions::default());
    let reports: Vec<_> = (0..8)
        .map(|slot| {
            let report = rig.submit(&[(0, slot)], &[]);
            rig.wait();
            report
        })
        .collect();
    let plan = rig.swap_plan(&[(0, 0)], &[]);
    assert_eq!(rig.prepare(&plan).err(), Some(PrepareError::TransfersInFlight { max: 8 }));
    let plan = rig.swap_plan(&[], &[]);
    assert!(rig.prepare(&plan).is_ok(), "a step without swaps is not held up");
    assert_eq!(rig.attention.poll_transfers(), reports);
    rig.swap(&[(0, 0)], &[]);
}

#[test]
fn what_a_refused_submission_did_not_move_has_not_arrived() {
    on_each_adapter_but_gl(|adapter| check_refused_submission(&open(adapter)));
    check_refused_submission(&noop());
}

fn check_refused_submission(gpu: &TestDevice) {
    let mut rig = setup(gpu, AttentionOptions::default());
    rig.swap(&[(0, 0)], &[]);
    let (plan, mut encoder) = rig.record(&[(1, 1)], &[]);
    let scope = gpu.device.push_error_scope(wgpu::ErrorFilter::Validation);
    // The application's own mistake.
    let arena = &rig.attention.arena_buffers()[0];
    encoder.copy_buffer_to_buffer(arena, 0, arena, 0, 16);
    gpu.queue.submit([encoder.finish()]);
    assert!(pollster::block_on(scope.pop()).is_some(), "wgpu refuses copies within a buffer");
    assert_eq!(rig.collect(), [TransferReport { step: plan.step(), complete: false }]);
    let plan = rig.swap_plan(&[], &[(1, 1)]);
    assert_eq!(rig.prepare(&plan).err(), Some(PrepareError::HostSlotEmpty { host_slot: 1 }));
    rig.swap(&[(1, 1)], &[(2, 0)]);
    rig.assert_same_blocks();
}

#[test]
fn a_device_that_is_destroyed_meanwhile_is_no_panic_and_no_error_of_the_application() {
    on_each_adapter_but_gl(|adapter| check_destroyed_device(|| open(adapter)));
    check_destroyed_device(noop);
}

fn check_destroyed_device(open: impl Fn() -> TestDevice) {
    // Whether the step arrives is certain, or not.
    let destroyed = |when: &str, certain: bool, act: &dyn Fn(&mut DeviceRig<'_>) -> Option<StepPlan>| {
        let gpu = open();
        gpu.device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));
        let mut rig = setup(&gpu, AttentionOptions::default());
        rig.swap(&[(0, 0)], &[]);
        let plan = act(&mut rig);
        // The queue of a lost device may have an error to report; the next poll gets it.
        let _ = gpu.device.poll(wgpu::PollType::wait_indefinitely());
        let reports = rig.attention.poll_transfers();
        let steps: Vec<_> = reports.iter().map(|report| report.step).collect();
        assert_eq!(steps, plan.iter().map(StepPlan::step).collect::<Vec<_>>(), "destroyed {when}");
        assert!(!certain || reports.iter().all(|report| !report.complete), "destroyed {when}");
        assert_eq!(rig.attention.poll_transfers(), []);
    };
    destroyed("before the submission", true, &|rig| {
        let (plan, encoder) = rig.record(&[(1, 1)], &[(2, 0)]);
        rig.gpu.device.destroy();
        rig.gpu.queue.submit([encoder.finish()]);
        Some(plan)
    });
    destroyed("before it was recorded", true, &|rig| {
        let plan = rig.swap_plan(&[(1, 1)], &[(2, 0)]);
        let mut step = rig.prepare(&plan).expect("a valid plan");
        rig.gpu.device.destroy();
        let mut encoder = rig.gpu.device.create_command_encoder(&Default::default());
        rig.attention.record_transfers(&mut encoder, &mut step);
        rig.gpu.queue.submit([encoder.finish()]);
        Some(plan)
    });
    destroyed("before it was prepared", true, &|rig| {
        rig.gpu.device.destroy();
        let plan = rig.swap_plan(&[(1, 1)], &[(2, 0)]);
        // Whether it can be prepared depends on what wgpu notices; that it does not arrive is certain.
        let mut step = rig.prepare(&plan).ok()?;
        let mut encoder = rig.gpu.device.create_command_encoder(&Default::default());
        rig.attention.record_transfers(&mut encoder, &mut step);
        rig.gpu.queue.submit([encoder.finish()]);
        Some(plan)
    });
    // What was on the device already may have completed or not.
    destroyed("after the submission", false, &|rig| {
        let (plan, encoder) = rig.record(&[(1, 1)], &[(2, 0)]);
        rig.gpu.queue.submit([encoder.finish()]);
        rig.gpu.device.destroy();
        Some(plan)
    });
    destroyed("after the arrival", false, &|rig| {
        let (plan, encoder) = rig.record(&[(1, 1)], &[(2, 0)]);
        rig.gpu.queue.submit([encoder.finish()]);
        rig.wait();
        rig.gpu.device.destroy();
        Some(plan)
    });
}

#[test]
fn staging_that_cannot_be_had_is_an_error_with_the_bytes_and_costs_nothing() {
    // As in the test of memory for the pool: no machine has 256 TiB.
    let TestDevice { device, .. } = open_noop_without_limits();
    device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));

    let config = CacheConfig::for_blocks(12, &SHAPE, KvType::F16)
        .and_then(|config| config.with_block_size(1024))
        .and_then(|config| config.with_host_blocks(u32::MAX))
        .expect("a valid configuration");
    let options = AttentionOptions::default().staging_bytes(1 << 50);
    let mut attention = PagedAttention::with_options(&device, SHAPE, config.clone(), options)
        .expect("a host pool that is not used costs nothing");
    let mut host = Rig::of(SHAPE, config.with_host_blocks(0).expect("a valid configuration"));
    let before = attention.stats();
    let mut plan = host.plan(&[]);
    set_swaps(&mut plan, swaps(&[(3, u32::MAX - 1)]), Vec::new());
    let asked_bytes = 1 << 48;
    let refused = attention.prepare(&plan).err();
    assert_eq!(refused, Some(PrepareError::StagingOutOfMemory { asked_bytes, held_bytes: 0 }));
    assert_eq!(attention.poll_transfers(), []);
    let after = attention.stats();
    assert_eq!(after.host_pool_bytes, 0);
    // The stamp's buffer is idle.
    assert_eq!((after.staging_bytes, after.buffers_created), (4, before.buffers_created + 1));
    set_swaps(&mut plan, Vec::new(), Vec::new());
    assert!(attention.prepare(&plan).is_ok(), "the refused plan was not prepared");
}
