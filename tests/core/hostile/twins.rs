//! Calls of the CPU twins.

use crate::hostile::{Call, World, is_known};
use paged_kv::reference::{
    self, AttentionInputs, CpuCache, DenseInputs, Rows, RowsMut, attention, attention_decode,
    attention_merge, attention_prefill, dense_attention,
};
use paged_kv::{
    BlockCopy, BlockSwap, CacheConfig, DecodeItem, KvCache, KvPart, LogitRule, MergeItem, ModelShape,
    PrefillItem, Reach, SplitConfig, StepBuilder, StepPlan, TableId, WorkSplit,
};

const REACHES: [Reach; 6] = [
    Reach::All,
    Reach::Window { tokens: 0, first: 0 },
    Reach::Window { tokens: 3, first: u32::MAX },
    Reach::Window { tokens: u32::MAX, first: 2 },
    Reach::Chunk { tokens: 0 },
    Reach::Chunk { tokens: 5 },
];

pub(super) struct Twins {
    pub(super) cache: KvCache,
    pub(super) table: TableId,
    cpu: CpuCache,
    plan: StepPlan,
    foreign_plan: StepPlan,
}

impl Twins {
    pub(super) fn new(shape: &ModelShape, config: CacheConfig) -> Self {
        let mut cache = KvCache::new(config.clone());
        let table = cache.create(1).unwrap();
        let mut cpu = CpuCache::new(shape, &config);
        let mut step = StepBuilder::new(&mut cache);
        step.push(table, &[5]).unwrap();
        let plan = step.finish();
        cpu.apply_table_changes(&plan);
        let mut other = KvCache::new(config.with_max_sequences(9).unwrap());
        let foreign_plan = StepBuilder::new(&mut other).finish();
        Self { cache, table, cpu, plan, foreign_plan }
    }
}

impl World {
    fn floats(&mut self) -> Vec<f32> {
        let values = [0.0, 1.0, -1.0, f32::NAN, f32::INFINITY, f32::MAX, f32::MIN_POSITIVE];
        let len = if self.random.chance(20) { 0 } else { self.random.below(1..200) };
        (0..len).map(|_| self.random.pick(&values)).collect()
    }

    fn split_config(&mut self) -> SplitConfig {
        let heads = self.number();
        SplitConfig {
            workgroups_per_item: self.number(),
            workgroups_per_tile: self.number(),
            // Queries are listed one by one.
            heads_per_kv_head: if is_known("WorkSplit::split") { heads % 64 } else { heads },
            prefill_queries: self.number(),
            span_quantum: self.number(),
            target_workgroups: self.number(),
            max_partials: self.number(),
            fixed_span_tokens: if self.random.chance(50) { Some(self.number()) } else { None },
            batch_invariant: self.random.chance(30),
            dispatch_work_budget: self.random.next() >> self.random.below(0..64),
            reach: self.random.pick(&REACHES),
        }
    }

    fn decode_items(&mut self) -> Vec<DecodeItem> {
        let count = self.random.below(0..3);
        (0..count)
            .map(|_| DecodeItem {
                sequence: self.number() % 3,
                first_token: self.number() % 40,
                end_token: self.number() % 40,
                partial: self.number(),
            })
            .collect()
    }

    fn prefill_items(&mut self) -> Vec<PrefillItem> {
        let count = self.random.below(0..3);
        (0..count)
            .map(|_| PrefillItem {
                sequence: self.number() % 3,
                first_query: self.number() % 40,
                end_query: self.number() % 40,
                first_token: self.number() % 40,
                end_token: self.number() % 40,
                partial: self.number(),
                num_spans: self.number() % 40,
                guarded_from: self.number() % 40,
            })
            .collect()
    }
}

fn new(world: &mut World) {
    let config = world.twins.cache.config().clone();
    let shape = ModelShape::new(1 + world.small() % 3, 4, 2, 8);
    let cpu = CpuCache::new(&shape, &config);
    assert_eq!(cpu.layout().block(), config.layout());
}

fn look(world: &mut World) {
    let cpu = &mut world.twins.cpu;
    assert_eq!(cpu.output_len(0) + 2 * cpu.group(0).num_query_heads() as usize, cpu.partial_len(0));
    assert_eq!(
        cpu.group(0).heads_per_kv_head() * cpu.layout().block().num_kv_heads(),
        cpu.group(0).num_query_heads()
    );
    assert!(!cpu.tables(0).is_empty() && cpu.words().len() == cpu.words_mut().len());
    assert!(cpu.host_blocks() < 8);
    assert_eq!(cpu.group(0).num_query_heads(), cpu.group(0).num_query_heads());
}

fn split_config(world: &mut World) {
    let threads = world.number();
    assert!(world.twins.cpu.split_config(0, threads).target_workgroups == threads);
}

fn apply_table_changes(world: &mut World) {
    let foreign = world.random.chance(50);
    let plan = if foreign { &world.twins.foreign_plan } else { &world.twins.plan };
    world.twins.cpu.apply_table_changes(plan);
    if foreign {
        world.wrong.push("CpuCache::apply_table_changes: takes another cache's plan".to_string());
    }
}

fn table(world: &mut World) {
    let row = world.number();
    world.twins.cpu.table(0, row);
}

fn key_row(world: &mut World) {
    let [layer, block, kv_head, slot] = [(); 4].map(|()| world.number());
    world.twins.cpu.key_row(layer, block, kv_head, slot);
    beyond(world, "CpuCache::key_row", layer, block, kv_head, slot);
}

fn value_row(world: &mut World) {
    let [layer, block, kv_head, slot] = [(); 4].map(|()| world.number());
    world.twins.cpu.value_row(layer, block, kv_head, slot);
    beyond(world, "CpuCache::value_row", layer, block, kv_head, slot);
}

fn write_row(world: &mut World) {
    let [layer, block, kv_head, slot] = [(); 4].map(|()| world.number());
    let (row, part) = (world.floats(), world.random.pick(&[KvPart::K, KvPart::V]));
    world.twins.cpu.write_row(layer, part, block, kv_head, slot, &row);
    beyond(world, "CpuCache::write_row", layer, block, kv_head, slot);
}

/// A place that does not exist is read or written somewhere else.
fn beyond(world: &mut World, name: &str, layer: u32, block: u32, kv_head: u32, slot: u32) {
    let layout = world.twins.cpu.layout();
    let exists = layer < layout.block().num_layers()
        && block < layout.num_blocks()
        && kv_head < layout.block().num_kv_heads()
        && slot < layout.block().block_size();
    if !exists {
        world
            .wrong
            .push(format!("{name}: gives what lies elsewhere for {layer}, {block}, {kv_head}, {slot}"));
    }
}

fn gather(world: &mut World) {
    let [layer, row, tokens] = [(); 3].map(|()| world.number());
    let (keys, _) = world.twins.cpu.gather(layer, row, tokens);
    if layer > 1 && tokens > 0 {
        world.wrong.push(format!("CpuCache::gather: gives {} keys of layer {layer} of 2", keys.len()));
    }
}

fn append(world: &mut World) {
    let (layer, slots, data) = (world.number(), [world.number(), u32::MAX], world.floats());
    let stride = world.number() as usize;
    reference::append(&mut world.twins.cpu, layer, &slots, Rows::new(&data, stride), Rows::new(&data, 16));
    if layer > 1 && slots[0] != u32::MAX {
        world.wrong.push(format!("reference::append: writes to layer {layer} of 2"));
    }
}

fn block_copy(world: &mut World) {
    let copy = BlockCopy { source: world.number(), destination: world.number() };
    let again = BlockCopy { source: world.small(), destination: copy.source };
    reference::block_copy(&mut world.twins.cpu, &[copy, again]);
}

fn swap_out(world: &mut World) {
    let swaps = [(); 2].map(|()| BlockSwap { block: world.small(), host_slot: world.number() });
    reference::swap_out(&mut world.twins.cpu, &swaps);
}

fn swap_in(world: &mut World) {
    let swaps = [(); 2].map(|()| BlockSwap { block: world.number(), host_slot: world.small() });
    reference::swap_in(&mut world.twins.cpu, &swaps);
}

fn compare(world: &mut World) {
    let (actual, row_len) = (world.floats(), world.number() as usize);
    let expected: Vec<f64> = actual.iter().map(|&x| f64::from(x) + 0.5).collect();
    let compared = reference::compare(&actual, &expected, row_len, 1e-6);
    world.judge("reference::compare", compared);
}

fn dense(world: &mut World) {
    let [query, keys, values] = [(); 3].map(|()| world.floats());
    let small = |world: &mut World| world.random.below(0..5);
    dense_attention(&DenseInputs {
        query: &query,
        keys: &keys,
        values: &values,
        num_query_heads: small(world),
        num_kv_heads: small(world),
        k_head_dim: small(world),
        v_head_dim: small(world),
        reach: Reach::All,
        logits: &LogitRule::new().with_scale(f32::NAN).with_slopes([1.0]),
        layer: 1,
    });
}

fn halves(world: &mut World) {
    let value = f32::from_bits(world.random.next() as u32);
    let half = reference::f32_to_f16_bits(value);
    let again = reference::f16_bits_to_f32(half);
    assert!(again.is_nan() == value.is_nan() && reference::f32_to_f16_bits(again) == half);
    reference::log_sum_exp(value, again);
}

fn rows(world: &mut World) {
    let (data, stride) = (world.floats(), world.number() as usize);
    let (row, len) = (world.number() as usize, world.number() as usize);
    let rows = Rows::new(&data, stride);
    if world.random.chance(50) {
        rows.from_row(row).row(0, len);
    }
    rows.row(row, len);
}

fn rows_mut(world: &mut World) {
    let (mut data, stride) = (world.floats(), world.number() as usize);
    let (cut, row, len) = (world.number() as usize, world.number() as usize, world.number() as usize);
    let cut = if world.random.chance(10) { usize::MAX } else { cut };
    let (mut before, mut after) = RowsMut::new(&mut data, stride).split_at_row(cut);
    match world.random.below(0..3) {
        0 => drop(before.reborrow().row_mut(row, len)),
        1 => drop(after.row_mut(row, len)),
        _ => drop(after.as_rows()),
    }
}

fn split_at_row(world: &mut World) {
    let (mut data, stride) = (world.floats(), world.number() as usize);
    let rows = [(); 2].map(|()| if world.random.chance(20) { usize::MAX } else { world.number() as usize });
    let (before, after) = RowsMut::new(&mut data, stride).split_at_row(rows[0]);
    before.split_at_row(rows[1]).1.reborrow();
    after.split_at_row(rows[1]).0.reborrow();
}

fn split(world: &mut World) {
    let config = world.split_config();
    let mut work = WorkSplit::default();
    work.split(&world.twins.plan, &config);
    let empty = StepPlan::default();
    work.split(&empty, &config);
    assert!(work.decode_items.is_empty() && work.prefill_items.is_empty());
}

fn item_words(world: &mut World) {
    let items = world.prefill_items();
    assert!(items.iter().all(|item| item.words()[7] == item.guarded_from));
}

fn with_inputs(world: &mut World, run: fn(&mut World, &AttentionInputs<'_>, RowsMut<'_>, RowsMut<'_>)) {
    let (cpu, shape) = (world.twins.cpu.clone(), world.shape.clone());
    let placeholder = StepBuilder::new(&mut KvCache::new(world.twins.cache.config().clone())).finish();
    let plan = std::mem::replace(&mut world.twins.plan, placeholder);
    let (query, mut output, mut partials) = (world.floats(), world.floats(), world.floats());
    let stride = (shape.num_query_heads() * shape.head_dim()) as usize;
    let layer = world.number();
    let inputs = AttentionInputs::new(&cpu, &plan, layer, Rows::new(&query, stride));
    let partial_len = cpu.partial_len(0);
    run(world, &inputs, RowsMut::new(&mut output, stride), RowsMut::new(&mut partials, partial_len));
    world.twins.plan = plan;
}

fn inputs(world: &mut World) {
    with_inputs(world, |_, inputs, _, _| assert!(inputs.cache.group(0).num_query_heads() > 0));
}

fn attend(world: &mut World) {
    with_inputs(world, |world, inputs, mut output, _| {
        let config = world.split_config();
        let mut work = WorkSplit::default();
        work.split(inputs.plan, &config);
        work.num_partials %= 1000;
        attention(inputs, &work, &mut output, &mut Vec::new());
    });
}

fn decode(world: &mut World) {
    with_inputs(world, |world, inputs, mut output, mut partials| {
        attention_decode(inputs, &world.decode_items(), &mut output, &mut partials);
    });
}

fn prefill(world: &mut World) {
    with_inputs(world, |world, inputs, mut output, mut partials| {
        attention_prefill(inputs, &world.prefill_items(), &mut output, &mut partials);
    });
}

fn merge(world: &mut World) {
    with_inputs(world, |world, inputs, mut output, partials| {
        let item = MergeItem {
            row: world.number(),
            first_partial: world.number(),
            num_partials: world.number() % 100,
            padding: 0,
        };
        attention_merge(inputs, &[item], partials.as_rows(), &mut output);
    });
}

fn decode_parts(world: &mut World) {
    with_inputs(world, |world, inputs, output, partials| {
        let (items, parts) = (world.decode_items(), world.number() as usize);
        drop(reference::decode_parts(inputs, &items, output, partials, parts));
    });
}

fn prefill_parts(world: &mut World) {
    with_inputs(world, |world, inputs, output, partials| {
        let (items, parts) = (world.prefill_items(), world.number() as usize);
        drop(reference::prefill_parts(inputs, &items, output, partials, parts));
    });
}

pub(super) const CALLS: &[(&str, Call)] = &[
    ("CpuCache::new", new),
    ("CpuCache::layout", look),
    ("CpuCache::group", look),
    ("CpuCache::output_len", look),
    ("CpuCache::partial_len", look),
    ("CpuCache::tables", look),
    ("CpuCache::words", look),
    ("CpuCache::words_mut", look),
    ("CpuCache::host_blocks", look),
    ("CpuCache::split_config", split_config),
    ("CpuCache::apply_table_changes", apply_table_changes),
    ("CpuCache::table", table),
    ("CpuCache::key_row", key_row),
    ("CpuCache::value_row", value_row),
    ("CpuCache::write_row", write_row),
    ("CpuCache::gather", gather),
    ("AttentionInputs::new", inputs),
    ("reference::append", append),
    ("reference::attention", attend),
    ("reference::attention_decode", decode),
    ("reference::attention_prefill", prefill),
    ("reference::attention_merge", merge),
    ("reference::block_copy", block_copy),
    ("reference::compare", compare),
    ("reference::decode_parts", decode_parts),
    ("reference::dense_attention", dense),
    ("reference::f16_bits_to_f32", halves),
    ("reference::f32_to_f16_bits", halves),
    ("reference::log_sum_exp", halves),
    ("reference::prefill_parts", prefill_parts),
    ("reference::swap_in", swap_in),
    ("reference::swap_out", swap_out),
    ("Rows::new", item_words),
    ("Rows::row", rows),
    ("Rows::from_row", rows),
    ("RowsMut::new", split_at_row),
    ("RowsMut::row_mut", rows_mut),
    ("RowsMut::split_at_row", split_at_row),
    ("RowsMut::reborrow", split_at_row),
    ("RowsMut::as_rows", rows_mut),
    ("PrefillItem::words", item_words),
    ("WorkSplit::split", split),
];
