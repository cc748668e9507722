//! Attention before and after the loss of a device: what a run computes after it, on a new device with other arenas, is bit
//! for bit what a run without it computes.

use half::f16;
use paged_kv::reference::{swap_in, swap_out};
use paged_kv::{AttentionOptions, CacheConfig, KvType, ModelShape, StepBuilder, TableId};
use wgpu::{Features, Limits};

use crate::device::{TestAdapter, on_each_adapter};
use crate::device_rig::{DeviceRig, open};
use crate::kernels::TOLERANCE;
use crate::rig::{Random, Rig, Tensors};

const SHAPE: ModelShape = ModelShape::new(2, 4, 2, 16);
/// Tokens that the fork shares with its parent.
const SHARED: u32 = 19;

fn rig() -> Rig {
    let config = CacheConfig::for_blocks(24, &SHAPE, KvType::F16)
        .and_then(|config| config.with_block_size(4))
        .and_then(|config| config.with_host_blocks(8))
        // One table for every block, to hold each by itself.
        .and_then(|config| config.with_max_sequences(32))
        .expect("a valid configuration");
    let mut rig = Rig::of(SHAPE, config);
    rig.shuffle_free_blocks();
    rig
}

/// Three sequences: one, another that goes to the host pool and comes back, and a fork of the first.
struct Story<'a> {
    rig: DeviceRig<'a>,
    tables: Vec<TableId>,
    /// The bits of every output.
    outputs: Vec<u32>,
}

impl Story<'_> {
    fn len(&self, table: usize) -> u32 {
        self.rig.host.kv.len(self.tables[table]).expect("an open table")
    }

    /// A token's rows follow from its sequence, position and layer: computed again, they are the same.
    fn tensors(pushes: &[(usize, u32, u32)], layer: u64) -> Tensors {
        let mut tensors = Tensors { query: Vec::new(), key: Vec::new(), value: Vec::new() };
        for &(table, start, rows) in pushes {
            for position in start..start + rows {
                let table = if table == 2 && position < SHARED { 0 } else { table as u64 };
                let mut random = Random((table << 40) + (u64::from(position) << 8) + layer);
                let mut fill = |row: &mut Vec<f32>, len| row.extend((0..len).map(|_| 2.0 * random.unit()));
                fill(&mut tensors.query, 64);
                fill(&mut tensors.key, 32);
                fill(&mut tensors.value, 32);
            }
        }
        tensors
    }

    /// A step on twin and device, checked against the dense attention.
    fn step(&mut self, pushes: &[(usize, u32)], out: Option<usize>, back: Option<usize>) {
        let rows: Vec<_> = pushes.iter().map(|&(table, rows)| (table, self.len(table), rows)).collect();
        let Self { rig, tables, outputs } = self;
        let mut builder = StepBuilder::new(&mut rig.host.kv);
        if let Some(table) = out {
            builder.swap_out(tables[table]).expect("room in the host pool");
        }
        if let Some(table) = back {
            builder.swap_in(tables[table]).expect("room in the pool");
        }
        for &(table, rows) in pushes {
            builder.push(tables[table], &vec![0; rows as usize]).expect("room in the pool");
        }
        let plan = builder.finish();
        swap_out(&mut rig.host.cpu, plan.swap_outs());
        swap_in(&mut rig.host.cpu, plan.swap_ins());
        rig.host.begin(&plan);
        let layers: Vec<Tensors> =
            (0..SHAPE.num_layers()).map(|layer| Self::tensors(&rows, layer.into())).collect();
        (0..).zip(&layers).for_each(|(layer, tensors)| rig.host.append(&plan, tensors, layer));
        outputs.clear();
        for ((layer, tensors), output) in (0..).zip(&layers).zip(rig.run(&plan, &layers)) {
            rig.host.assert_layer_dense(&plan, tensors, layer, &output, TOLERANCE);
            outputs.extend(output.iter().map(|x| x.to_bits()));
        }
        for report in rig.attention.poll_transfers() {
            assert!(report.complete);
            rig.host.kv.complete_transfers(report.step, true);
        }
        rig.host.commit(plan);
    }
}

#[test]
fn outputs_after_a_loss_are_those_of_a_run_without_one() {
    on_each_adapter(|adapter| {
        assert!(run(adapter, true) == run(adapter, false), "the bits differ");
    });
}

/// Outputs of the last steps.
fn run(adapter: &TestAdapter, loses: bool) -> Vec<Vec<u32>> {
    let first = open(adapter);
    // Room for one layer in an arena.
    let limits = Limits { max_storage_buffer_binding_size: 20_480, ..Limits::default() };
    let second = adapter.request_device(limits, Features::empty()).expect("lower limits");
    let options = AttentionOptions::default().fixed_span_tokens(128).allow_subgroups(false);
    let rig = DeviceRig::new(&first, rig(), options);
    let mut story = Story { rig, tables: Vec::new(), outputs: Vec::new() };
    story.tables = (0..2).map(|_| story.rig.host.kv.create(64).expect("a free table")).collect();
    story.step(&[(0, SHARED), (1, 13)], None, None);
    let fork = story.rig.host.kv.fork(story.tables[0], SHARED, 64).expect("a free table");
    story.tables.push(fork);
    story.step(&[(0, 1), (1, 1), (2, 1)], None, None);
    story.step(&[(0, 1)], Some(1), None);
    story.step(&[(2, 1), (0, 1)], None, None);

    if loses {
        let lens = [0, 2].map(|table| (table, story.len(table)));
        first.device.destroy();
        let DeviceRig { host, attention, .. } = &mut story.rig;
        attention.rebuild(&second.device).expect("another device");
        assert_eq!(attention.arena_layout().num_arenas(), 2);
        assert_eq!(attention.poll_transfers(), []);
        host.kv.forget_device();
        // The twin's blocks are gone as well, but for those in its host pool.
        host.cpu.words_mut().fill(u32::from(f16::NAN.to_bits()) * 0x1_0001);
        story.rig.gpu = &second;
        assert_eq!([0, 1, 2].map(|table| story.len(table)), [0, 14, 0]);
        story.step(&lens, None, None);
    }
    let mut outputs = Vec::new();
    story.step(&[(0, 1), (2, 1)], None, Some(1));
    outputs.push(story.outputs.clone());
    for _ in 0..4 {
        story.step(&[(2, 1), (0, 1), (1, 1)], None, None);
        outputs.push(story.outputs.clone());
    }
    outputs
}
