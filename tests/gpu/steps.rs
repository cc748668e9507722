//! Whole steps on a device: layers in several arenas, copy-on-write, padding, neighbours in the batch, folded dispatches,
//! and the last block of the largest pool.

use paged_kv::{
    AttentionOptions, CacheConfig, KvFormat, KvType, MAX_ARENA_BYTES, ModelShape, PagedAttention,
    StepBuilder, StepPlan, TableId,
};
use wgpu::{Features, Limits};

use crate::device::on_each_adapter;
use crate::device_rig::{DeviceRig, on_each_adapter_but_gl, open};
use crate::kernels::TOLERANCE;
use crate::rig::{Random, Rig, Tensors};

/// One step of all layers, checked against the f64 attention and the twin's words, and committed.
pub(crate) fn step(rig: &mut DeviceRig<'_>, pushes: &[(TableId, u32)]) {
    let plan = rig.host.plan(pushes);
    let layers: Vec<Tensors> = (0..rig.host.shape.num_layers()).map(|_| rig.host.tensors(&plan)).collect();
    rig.host.begin(&plan);
    (0..).zip(&layers).for_each(|(layer, tensors)| rig.host.append(&plan, tensors, layer));
    let outputs = rig.run(&plan, &layers);
    rig.assert_same_blocks();
    for ((layer, tensors), output) in (0..).zip(&layers).zip(&outputs) {
        rig.host.assert_layer_dense(&plan, tensors, layer, output, TOLERANCE);
    }
    rig.host.commit(plan);
}

/// Each layer in a submission of its own, waited for, as an application does whose submissions must be short.
#[test]
fn b63_a_step_may_be_cut_over_several_submissions() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let shape = ModelShape::new(6, 2, 1, 8);
        let config = CacheConfig::for_blocks(16, &shape, KvType::F32).expect("a valid configuration");
        let mut rig = DeviceRig::new(&gpu, Rig::of(shape, config), AttentionOptions::default());
        let parent = rig.host.open();
        step(&mut rig, &[(parent, 7)]);
        let child = rig.host.kv.fork(parent, 7, 40).expect("a free table");

        let plan = rig.host.plan(&[(parent, 1), (child, 3)]);
        let layers: Vec<Tensors> = (0..6).map(|_| rig.host.tensors(&plan)).collect();
        rig.host.begin(&plan);
        (0..).zip(&layers).for_each(|(layer, tensors)| rig.host.append(&plan, tensors, layer));
        let bound: Vec<_> = layers.iter().map(|tensors| rig.bind(&plan, tensors)).collect();
        let submit = |encoder: wgpu::CommandEncoder| {
            gpu.queue.submit([encoder.finish()]);
            gpu.device.poll(wgpu::PollType::wait_indefinitely()).expect("a working device");
        };
        let mut prepared = rig.attention.prepare(&plan).expect("a valid plan");
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        rig.attention.record_transfers(&mut encoder, &mut prepared);
        submit(encoder);
        for (layer, (tensors, _)) in (0..).zip(&bound) {
            let mut encoder = gpu.device.create_command_encoder(&Default::default());
            let mut pass = encoder.begin_compute_pass(&Default::default());
            if layer == 0 {
                rig.attention.record_block_copies(&mut pass, &mut prepared);
            }
            rig.attention.record_layer(&mut pass, &mut prepared, layer, tensors).expect("the right order");
            drop(pass);
            submit(encoder);
        }
        drop(prepared);
        rig.assert_same_blocks();
        for ((layer, tensors), (_, output)) in (0..).zip(&layers).zip(&bound) {
            rig.host.assert_layer_dense(&plan, tensors, layer, &rig.output(output), TOLERANCE);
        }
        rig.host.commit(plan);
        step(&mut rig, &[(parent, 1), (child, 1)]);
    });
}

/// A log of plans is all that another process needs, beside the tensors.
#[test]
fn a_history_of_plans_that_was_written_down_is_replayed_to_the_same_bits() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let host = || {
            let mut host = Rig::new((4, 2, 16), KvType::F16, 4, 24);
            host.shuffle_free_blocks();
            host
        };
        let mut rig = DeviceRig::new(&gpu, host(), AttentionOptions::default());
        let (first, second) = (rig.host.open(), rig.host.open());
        let (mut log, mut outputs) = (Vec::new(), Vec::new());
        let run = |rig: &mut DeviceRig<'_>, plan: &StepPlan| {
            rig.host.random = Random(plan.step().raw());
            let tensors = rig.host.tensors(plan);
            let output = rig.run(plan, std::slice::from_ref(&tensors)).swap_remove(0);
            output.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let mut tables = vec![first, second];
        for rows in [9, 1, 6, 1] {
            let pushes: Vec<_> = tables.iter().map(|&table| (table, rows)).collect();
            let plan = rig.host.plan(&pushes);
            outputs.push(run(&mut rig, &plan));
            log.push(plan.to_string());
            rig.host.commit(plan);
            if rows == 6 {
                tables.push(rig.host.kv.fork(first, 14, 32).expect("a free table"));
            }
        }
        assert!(log.last().expect("four plans").contains("block_copies "), "{log:?}");

        let mut replayed = DeviceRig::new(&gpu, host(), AttentionOptions::default());
        let instance = rig.host.kv.instance();
        replayed.attention.use_cache(rig.host.kv.config().clone(), instance).expect("the same configuration");
        for (text, output) in log.iter().zip(&outputs) {
            let plan: StepPlan = text.parse().expect("a plan's text");
            assert!(run(&mut replayed, &plan) == *output, "{text}");
        }
    });
}

#[test]
fn b41_copy_on_write_copies_every_layer_of_every_arena_before_the_step_writes() {
    on_each_adapter(|adapter| {
        let shape = ModelShape::new(64, 2, 1, 8);
        let config = CacheConfig::for_blocks(16, &shape, KvFormat::new(KvType::F16, KvType::F32))
            .and_then(|config| config.with_block_size(4))
            .expect("a valid configuration");
        // 3072 bytes per layer: arenas of 22, 22 and 20 layers.
        let limits = Limits { max_storage_buffer_binding_size: 72_000, ..Limits::default() };
        let gpu = adapter.request_device(limits, Features::empty()).expect("lower limits");
        let mut rig = DeviceRig::new(&gpu, Rig::of(shape, config), AttentionOptions::default());
        assert_eq!(rig.attention.arena_layout().num_arenas(), 3);
        let parent = rig.host.open();
        step(&mut rig, &[(parent, 6)]);
        let child = rig.host.kv.fork(parent, 6, 16).expect("a free table");
        let plan = rig.host.plan(&[(parent, 1), (child, 1)]);
        assert_eq!(plan.block_copies().len(), 1, "whoever writes first takes the copy");
        // Dropped, and planned again by the step.
        drop(plan);
        step(&mut rig, &[(parent, 1), (child, 1)]);
        step(&mut rig, &[(child, 3), (parent, 2)]);
    });
}

#[test]
fn rows_of_padding_write_neither_blocks_nor_output() {
    on_each_adapter(|adapter| {
        let gpu = open(adapter);
        let host = Rig::new((2, 1, 8), KvType::F16, 4, 4);
        let mut rig = DeviceRig::new(&gpu, host, AttentionOptions::default());
        let (one, several) = (rig.host.open(), rig.host.open());
        let mut builder = StepBuilder::new(&mut rig.host.kv);
        builder.push(one, &[1]).expect("room");
        builder.push(several, &[1, 2, 3]).expect("room");
        builder.pad_to(9).expect("few rows");
        let plan = builder.finish();
        let tensors = rig.host.tensors(&plan);
        rig.host.write(&plan, &tensors);
        let output = rig.run(&plan, std::slice::from_ref(&tensors)).swap_remove(0);
        rig.assert_same_blocks();
        rig.host.assert_dense(&plan, &tensors, &output[..4 * 16], TOLERANCE);
        assert!(output[4 * 16..].iter().all(|x| x.is_nan()), "the rig fills the output with NaN");
        rig.host.commit(plan);
    });
}

#[test]
fn with_fixed_spans_a_row_has_the_same_bits_alone_and_in_any_batch() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let host = Rig::new((4, 2, 16), KvType::F16, 16, 64);
        let mut rig = DeviceRig::new(&gpu, host, AttentionOptions::default().fixed_span_tokens(128));
        rig.host.shuffle_free_blocks();
        let tables: Vec<TableId> = (0..4).map(|_| rig.host.open()).collect();
        step(&mut rig, &[(tables[0], 299), (tables[1], 100), (tables[2], 5), (tables[3], 64)]);
        // The same query, key and value for the first sequence's row, wherever that row is.
        let first = {
            let plan = rig.host.plan(&[(tables[0], 1)]);
            rig.host.tensors(&plan)
        };
        let mut outputs = Vec::new();
        for batch in [vec![(0, 1)], vec![(1, 1), (0, 1), (2, 1), (3, 1)], vec![(3, 7), (2, 1), (0, 1)]] {
            let pushes: Vec<(TableId, u32)> =
                batch.iter().map(|&(table, rows)| (tables[table], rows)).collect();
            let plan = rig.host.plan(&pushes);
            let mut tensors = rig.host.tensors(&plan);
            let sequence = batch.iter().position(|&(table, _)| table == 0).expect("in every batch");
            let row = plan.query_starts()[sequence] as usize;
            tensors.query[row * 64..][..64].copy_from_slice(&first.query);
            tensors.key[row * 32..][..32].copy_from_slice(&first.key);
            tensors.value[row * 32..][..32].copy_from_slice(&first.value);
            rig.host.write(&plan, &tensors);
            let output = rig.run(&plan, std::slice::from_ref(&tensors)).swap_remove(0);
            rig.host.assert_dense(&plan, &tensors, &output, TOLERANCE);
            outputs.push(output[row * 64..][..64].to_vec());
        }
        assert_eq!(outputs[0], outputs[1]);
        assert_eq!(outputs[0], outputs[2]);
    });
}

#[test]
fn b25_dispatches_fold_at_the_limit_that_the_device_has_enabled() {
    on_each_adapter_but_gl(|adapter| {
        // 1100 sequences with two kv heads are 2200 workgroups: three rows of 1024.
        let shape = ModelShape::new(1, 2, 2, 8);
        let config = CacheConfig::for_context(4, 1100, &shape, KvType::F16)
            .and_then(|config| config.with_block_size(4))
            .expect("a valid configuration");
        let limits = Limits { max_compute_workgroups_per_dimension: 1024, ..Limits::default() };
        let gpu = adapter.request_device(limits, Features::empty()).expect("lower limits");
        let mut rig = DeviceRig::new(&gpu, Rig::of(shape, config), AttentionOptions::default());
        let tables: Vec<TableId> = (0..1100).map(|_| rig.host.kv.create(4).expect("a free table")).collect();
        let pushes: Vec<(TableId, u32)> = tables.into_iter().map(|table| (table, 1)).collect();
        step(&mut rig, &pushes);
        step(&mut rig, &pushes);
    });
}

#[test]
fn b21_the_first_and_the_last_block_of_the_largest_pool_are_apart() {
    on_each_adapter_but_gl(|adapter| {
        // The largest binding that the adapter has; 128 MiB by default, up to 2 GiB - 4.
        let offered = adapter.limits();
        let limits = Limits {
            max_storage_buffer_binding_size: offered.max_storage_buffer_binding_size,
            max_buffer_size: offered.max_buffer_size,
            ..Limits::default()
        };
        let arena_bytes =
            offered.max_storage_buffer_binding_size.min(offered.max_buffer_size).min(MAX_ARENA_BYTES);
        let gpu = adapter.request_device(limits, Features::empty()).expect("the adapter's limits");
        // 64 KiB per block of 16 tokens.
        let shape = ModelShape::new(1, 8, 8, 128);
        let config = |bytes: u64| {
            let num_blocks = (bytes / (64 << 10)) as u32;
            CacheConfig::for_blocks(num_blocks, &shape, KvType::F16).expect("a valid configuration")
        };
        // A driver may refuse one allocation of all that it offers, as SwiftShader does: then half of it.
        let config = match PagedAttention::new(&gpu.device, shape.clone(), config(arena_bytes)) {
            Ok(_) => config(arena_bytes),
            Err(_) => config(arena_bytes / 2),
        };
        let num_blocks = config.num_blocks();
        let mut rig = DeviceRig::new(&gpu, Rig::of(shape, config), AttentionOptions::default());
        // Hold the first block and everything between it and the last; then give back the first.
        let (first, between) = (rig.host.open(), rig.host.open());
        rig.hold_blocks(first, 1);
        let mut missing = (num_blocks - 2) * 16;
        while missing > 0 {
            let rows = missing.min(4096);
            rig.hold_blocks(between, rows);
            missing -= rows;
        }
        rig.host.kv.release(first).expect("a table");

        let table = rig.host.open();
        let plan = rig.host.plan(&[(table, 20)]);
        let blocks: Vec<u32> = plan.changed_entries().to_vec();
        assert_eq!(blocks, [num_blocks - 1, 0]);
        let tensors = rig.host.tensors(&plan);
        rig.host.write(&plan, &tensors);
        let output = rig.run(&plan, std::slice::from_ref(&tensors)).swap_remove(0);
        rig.host.assert_dense(&plan, &tensors, &output, TOLERANCE);
        // The two blocks, and their neighbours, which were never written.
        for block in [0, 1, num_blocks - 2, num_blocks - 1] {
            let words = rig.block_words(block);
            let start = block as usize * words.len();
            assert!(words == rig.host.cpu.words()[start..start + words.len()], "block {block}");
        }
        rig.host.commit(plan);
    });
}
