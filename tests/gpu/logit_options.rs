//! Windows, first tokens, chunks, soft-cap, ALiBi and learned sinks on the kernels: against another engine's outputs and
//! against the f64 attention, whatever a step is cut into, with NaN in every slot that no row may see.
//!
//! Tolerances as in `kernels.rs`.

use crate::device::{TestAdapter, TestDevice, on_each_adapter};
use crate::device_rig::{DeviceRig, announce_partly_left_out, on_each_adapter_but_gl, open};
use crate::golden_options::{GoldenCase, golden_cases};
use crate::kernels::TOLERANCE;
use crate::models_of_groups::models_of_groups;
use crate::rig::{Poison, Rig, Tensors};
use paged_kv::reference::compare;
use paged_kv::{
    ActivationType, AttentionOptions, CacheConfig, DeviceError, KvFormat, KvType, LogitRule, ModelShape,
    PagedAttention, Reach,
};

/// Ways to cut a step: as the library would for a small device, into as many spans as it has, into fixed ones, and alike
/// for every row.
fn options(cut: usize) -> AttentionOptions {
    let options = AttentionOptions::default();
    match cut % 4 {
        0 => options,
        1 => options.target_workgroups(4096),
        2 => options.fixed_span_tokens(128),
        _ => options.batch_invariant(128),
    }
}

fn rig(shape: ModelShape, format: impl Into<KvFormat>, block_size: u32, num_blocks: u32) -> Rig {
    let config = CacheConfig::for_blocks(num_blocks, &shape, format)
        .and_then(|config| config.with_block_size(block_size))
        .and_then(|config| config.with_max_sequences(num_blocks + 8))
        // Small tables, that arenas may be small, too.
        .and_then(|config| config.with_max_sequence_tokens(600))
        .expect("a valid configuration");
    Rig::of(shape, config)
}

impl DeviceRig<'_> {
    /// One step from plan to commit: its output. Slots that no later row sees hold NaN afterwards.
    fn step(&mut self, tables: &[paged_kv::TableId], rows: &[u32], tensors: Option<Tensors>) -> Vec<f32> {
        let pushes: Vec<_> =
            tables.iter().copied().zip(rows.iter().copied()).filter(|push| push.1 > 0).collect();
        let plan = self.host.plan(&pushes);
        let is_random = tensors.is_none();
        let tensors = tensors.unwrap_or_else(|| self.host.tensors(&plan));
        let output = self.run(&plan, std::slice::from_ref(&tensors)).remove(0);
        self.host.write(&plan, &tensors);
        if is_random {
            self.host.assert_dense(&plan, &tensors, &output, TOLERANCE);
        }
        self.host.commit(plan);
        self.host.poison_unseen(tables, Poison::Nan);
        self.upload_blocks();
        output
    }
}

/// The rows of a golden case, in steps of `chunk` rows, the last ones one by one or together.
fn run_golden(gpu: &TestDevice, case: &GoldenCase, cut: usize, chunk: u32, together: bool) {
    let mut device = DeviceRig::new(gpu, rig(case.shape.clone(), KvType::F32, 16, 32), options(cut));
    device.host.shuffle_free_blocks();
    let table = device.host.open();
    let [query_len, kv_len] = [&case.query, &case.key].map(|tensor| tensor.len() as u32 / case.context);
    let (mut start, mut output) = (0, Vec::new());
    while start < case.context {
        let before = (case.context - case.rows).saturating_sub(start);
        let rows = match before {
            0 if together => case.rows,
            0 => 1,
            before => before.min(chunk),
        };
        let part =
            |tensor: &[f32], len: u32| tensor[(start * len) as usize..][..(rows * len) as usize].to_vec();
        let tensors = Tensors {
            query: part(&case.query, query_len),
            key: part(&case.key, kv_len),
            value: part(&case.value, kv_len),
        };
        output.extend(device.step(&[table], &[rows], Some(tensors)));
        start += rows;
    }
    let last = output.len() - (case.rows * query_len) as usize;
    let compared = compare(&output[last..], &case.output, device.host.v_len, TOLERANCE);
    compared.unwrap_or_else(|mismatch| panic!("{}, cut {cut}: {mismatch}", case.name));
}

#[test]
fn outputs_are_another_engines() {
    on_each_adapter(|adapter| {
        let gpu = open(adapter);
        let cases = golden_cases();
        assert_eq!(cases.len(), 30);
        // On GL, where a kernel takes seconds to compile, one that has a window and one that has not.
        let is_slow = adapter.info().backend == wgpu::Backend::Gl;
        if is_slow {
            announce_partly_left_out(adapter, "28 cases of ");
        }
        for (index, case) in cases.iter().enumerate().filter(|(index, _)| !is_slow || [2, 4].contains(index))
        {
            let chunk = if index % 2 == 0 { 1000 } else { 41 };
            run_golden(&gpu, case, index, chunk, index % 3 == 0);
        }
    });
}

#[derive(Clone, Copy, Debug)]
struct Cell {
    reach: Reach,
    /// Scale, soft-cap, slopes, sinks.
    options: [bool; 4],
    block_size: u32,
    /// Query and kv heads, key and value head size.
    shape: (u32, u32, u32, u32),
    types: (KvType, KvType),
    subgroups: bool,
    cut: usize,
}

impl Cell {
    fn model(&self) -> ModelShape {
        let (heads, kv_heads, head_dim, _) = self.shape;
        let mut rule = LogitRule::new();
        let [scale, soft_cap, slopes, sinks] = self.options;
        if scale {
            rule = rule.with_scale(0.3);
        }
        if soft_cap {
            rule = rule.with_soft_cap(1.5);
        }
        if slopes {
            rule = rule.with_slopes(LogitRule::alibi_slopes(heads));
        }
        if sinks {
            rule = rule.with_sinks((0..heads).map(|head| head as f32 - 1.0));
        }
        ModelShape::new(1, heads, kv_heads, head_dim).with_reach(self.reach).with_logits(rule)
    }

    /// Three sequences that grow by chunks and by single rows.
    fn run(&self, adapter: &TestAdapter) {
        let gpu = open(adapter);
        let (k_type, v_type) = self.types;
        let format = KvFormat::new(k_type, v_type).with_v_head_dim(self.shape.3);
        let host = rig(self.model(), format, self.block_size, (2400 / self.block_size).max(12));
        let options = options(self.cut).allow_subgroups(self.subgroups);
        let mut device = DeviceRig::with_activations(&gpu, host, options, ActivationType::F32);
        device.host.shuffle_free_blocks();
        let tables = [device.host.open(), device.host.open(), device.host.open()];
        for rows in [[300, 1, 9], [1, 1, 140], [17, 64, 0], [1, 1, 1], [2, 0, 131], [1, 1, 1]] {
            device.step(&tables, &rows, None);
        }
    }
}

/// Every reach, block size, shape, pair of types and cut with others of the rest, and every pair of options.
fn cells() -> Vec<Cell> {
    use KvType::{F16, F32};
    let reaches = [
        Reach::Window { tokens: 7, first: 0 },
        Reach::Window { tokens: 130, first: 5 },
        Reach::Chunk { tokens: 100 },
        Reach::Window { tokens: 100, first: 200 },
        Reach::Window { tokens: 1, first: 1 },
        Reach::All,
        Reach::Window { tokens: 1000, first: 4 },
        Reach::Chunk { tokens: 7 },
        Reach::Window { tokens: 256, first: 128 },
    ];
    let options = [
        [false, false, false, false],
        [true, true, false, false],
        [false, false, true, true],
        [false, true, true, false],
        [true, false, false, true],
        [true, true, true, true],
        [false, true, false, true],
        [true, false, true, false],
        [false, false, false, true],
    ];
    let shapes = [
        (6, 2, 64, 64),
        (4, 4, 80, 80),
        (16, 1, 128, 128),
        (14, 2, 192, 128),
        (2, 2, 8, 8),
        (9, 3, 256, 256),
    ];
    let types = [(F32, F32), (F16, F16), (F16, F32), (F32, F16)];
    (0..18)
        .map(|index| Cell {
            reach: reaches[index % 9],
            options: options[(index * 2 + index / 9) % 9],
            block_size: [16, 1, 64, 4, 256][index % 5],
            shape: shapes[index % 6],
            types: types[(index + index / 6) % 4],
            subgroups: index % 3 != 2,
            cut: (index + index / 4) % 4,
        })
        .collect()
}

#[test]
fn every_option_agrees_with_dense_attention() {
    on_each_adapter_but_gl(|adapter| {
        // SwiftShader takes long to run a kernel: every second cell is enough of them.
        let is_slow = adapter.name().contains("swiftshader");
        let step = if is_slow { 2 } else { 1 };
        if is_slow {
            announce_partly_left_out(adapter, "every second cell of ");
        }
        cells().iter().step_by(step).for_each(|cell| cell.run(adapter));
    });
}

#[test]
fn more_query_heads_than_have_room_for_numbers_are_refused() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let shape = ModelShape::new(1, 257, 1, 8).with_logits(LogitRule::new().with_sinks([0.0; 257]));
        let cache = CacheConfig::for_blocks(1, &shape, KvType::F16).expect("a valid configuration");
        let refused = PagedAttention::new(&gpu.device, shape, cache).err();
        assert!(matches!(refused, Some(DeviceError::Config(_))), "{refused:?}");
    });
}

#[test]
fn a_cache_of_another_reach_is_refused() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let shape = ModelShape::new(1, 1, 1, 8);
        let cache = CacheConfig::for_blocks(1, &shape, KvType::F16).expect("a valid configuration");
        let shape = shape.with_reach(Reach::Window { tokens: 3, first: 0 });
        let refused = PagedAttention::new(&gpu.device, shape, cache).err();
        let field = "kind of reach";
        assert_eq!(refused, Some(DeviceError::ShapeMismatch { field, shape: 1, cache: 0 }));
    });
}

/// Every layer of models with several groups, in one arena and in several, with NaN in what no layer may see.
#[test]
fn every_layer_of_every_group_agrees_with_dense_attention() {
    on_each_adapter_but_gl(|adapter| {
        let mut num_cut = 0;
        for (index, shape) in models_of_groups().into_iter().enumerate() {
            let block_size = [4, 8, 16, 8][index];
            let host = rig(shape.clone(), KvType::F32, block_size, 1600 / block_size);
            // Where a block has several layers, they are cut into arenas.
            let limit = host.cpu.layout().arena_bytes(0) * 2 / 3;
            let mut limits = wgpu::Limits::default();
            if host.kv.config().arenas(limit).is_ok() {
                limits.max_storage_buffer_binding_size = limit;
                num_cut += 1;
            }
            let gpu = adapter.request_device(limits, adapter.features() & wgpu::Features::SUBGROUP);
            let gpu = gpu.expect("less than the default limits");
            let mut device = DeviceRig::new(&gpu, host, options(index));
            device.host.shuffle_free_blocks();
            let tables = [device.host.open(), device.host.open(), device.host.open()];
            for rows in [[30, 1, 9], [1, 1, 140], [17, 64, 1], [1, 1, 1], [2, 30, 3], [1, 1, 1]] {
                let pushes: Vec<_> = tables.into_iter().zip(rows).collect();
                let plan = device.host.plan(&pushes);
                let tensors: Vec<Tensors> =
                    (0..shape.num_layers()).map(|layer| device.host.layer_tensors(&plan, layer)).collect();
                let outputs = device.run(&plan, &tensors);
                device.host.begin(&plan);
                for (layer, tensors) in (0..).zip(&tensors) {
                    device.host.append(&plan, tensors, layer);
                    let output = &outputs[layer as usize];
                    device.host.assert_layer_dense(&plan, tensors, layer, output, TOLERANCE);
                }
                device.host.commit(plan);
                if device.attention.arena_layout().num_arenas() == 1 {
                    device.host.poison_unseen(&tables, Poison::Nan);
                    device.upload_blocks();
                }
            }
        }
        assert_eq!(num_cut, 1);
    });
}
