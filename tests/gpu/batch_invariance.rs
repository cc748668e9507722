//! A sequence's bits, alone and among others: through the scheduler, with random neighbours, chunks, preemptions, swaps and
//! prefix hits.

use std::collections::HashMap;

use paged_kv::{
    Admission, AttentionOptions, BoundTensors, CacheConfig, KvType, LayerTensors, ModelShape, PagedAttention,
    PreemptionMode, PrepareError, Request, RequestId, RowResult, Schedule, Scheduler, SchedulerConfig,
    StepPlan, TensorSlice, TokenId,
};
use wgpu::BufferUsages;

use crate::device::{TestDevice, on_each_adapter};
use crate::device_rig::{on_each_adapter_but_gl, open};
use crate::raw::read;
use crate::rig::Random;

/// Three query heads to a kv head: tiles begin within a row.
const SHAPE: ModelShape = ModelShape::new(2, 6, 2, 16);
const MAX_ROWS: u32 = 64;
const QUERY: usize = 96;
const KV: usize = 32;

/// The bits of every row of a sequence, layer after layer, by position; and its tokens.
#[derive(Default)]
struct Sequence {
    rows: HashMap<u32, Vec<u32>>,
    tokens: Vec<TokenId>,
}

/// A model whose rows follow from token and position, and whose next token follows from the bits of the last row.
struct App<'a> {
    gpu: &'a TestDevice,
    scheduler: Scheduler,
    attention: PagedAttention,
    buffers: Vec<[wgpu::Buffer; 4]>,
    tensors: Vec<BoundTensors>,
    sequences: HashMap<RequestId, Sequence>,
    most_groups: u32,
}

fn row(token: TokenId, position: u32, layer: u32, kind: u64, len: usize) -> impl Iterator<Item = f32> {
    let seed = u64::from(token) << 40 | u64::from(position) << 16 | u64::from(layer) << 8 | kind;
    let mut random = Random(seed);
    (0..len).map(move |_| 2.0 * random.unit())
}

impl<'a> App<'a> {
    fn new(gpu: &'a TestDevice, options: AttentionOptions, num_blocks: u32, mode: PreemptionMode) -> Self {
        let cache = CacheConfig::for_blocks(num_blocks, &SHAPE, KvType::F16)
            .and_then(|config| config.with_block_size(8))
            .and_then(|config| config.with_host_blocks(64))
            .and_then(|config| config.with_max_sequences(8))
            .and_then(|config| config.with_max_sequence_tokens(480))
            .expect("a valid configuration");
        let config = SchedulerConfig {
            step_tokens: MAX_ROWS,
            admission: Admission::Overcommitted { watermark_blocks: 1 },
            preemption: mode,
            max_preemptions: 20,
            ..Default::default()
        };
        let scheduler = Scheduler::new(config, cache.clone()).expect("a valid configuration");
        let mut attention =
            PagedAttention::with_options(&gpu.device, SHAPE, cache, options).expect("a device that suffices");
        let buffer = |len: usize| {
            gpu.device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: u64::from(MAX_ROWS) * len as u64 * 4,
                usage: BufferUsages::STORAGE | BufferUsages::COPY_DST | BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            })
        };
        let buffers: Vec<_> = (0..SHAPE.num_layers()).map(|_| [QUERY, KV, KV, QUERY].map(buffer)).collect();
        let slice =
            |buffer, len: usize| TensorSlice { buffer, offset: 0, row_stride: len as u32, rows: MAX_ROWS };
        let tensors = buffers
            .iter()
            .map(|[query, key, value, output]| {
                let tensors = LayerTensors {
                    query: slice(query, QUERY),
                    key: slice(key, KV),
                    value: slice(value, KV),
                    output: slice(output, QUERY),
                };
                attention.bind_tensors(&tensors).expect("valid tensors")
            })
            .collect();
        let sequences = HashMap::new();
        Self { gpu, scheduler, attention, buffers, tensors, sequences, most_groups: 0 }
    }

    fn add(&mut self, tokens: &[TokenId], max_new_tokens: u32) -> RequestId {
        let request = Request::new(tokens).max_new_tokens(max_new_tokens);
        let id = self.scheduler.add(request).expect("a request that fits");
        self.sequences.insert(id, Sequence::default());
        id
    }

    fn upload(&self, plan: &StepPlan) {
        for (layer, buffers) in (0..).zip(&self.buffers) {
            for (kind, (buffer, len)) in (0..).zip(buffers.iter().zip([QUERY, KV, KV])) {
                let rows = plan.token_ids().iter().zip(plan.positions());
                let content: Vec<f32> =
                    rows.flat_map(|(&token, &position)| row(token, position, layer, kind, len)).collect();
                self.gpu.queue.write_buffer(buffer, 0, bytemuck::cast_slice(&content));
            }
        }
    }

    /// One step; false when nothing is left to do.
    fn step(&mut self) -> bool {
        let plan = match self.scheduler.schedule() {
            Schedule::Step(plan) => plan,
            Schedule::Waiting(_) => {
                self.collect();
                return true;
            }
            Schedule::Idle => return false,
        };
        self.upload(&plan);
        let mut step = self.attention.prepare(&plan).expect("a valid plan");
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        self.attention.record_transfers(&mut encoder, &mut step);
        let mut pass = encoder.begin_compute_pass(&Default::default());
        self.attention.record_block_copies(&mut pass, &mut step);
        for (layer, tensors) in (0..).zip(&self.tensors) {
            self.attention.record_layer(&mut pass, &mut step, layer, tensors).expect("the right order");
        }
        drop(pass);
        self.gpu.queue.submit([encoder.finish()]);
        self.most_groups =
            self.most_groups.max(self.attention.stats().step_dispatches / SHAPE.num_layers() / 2);
        let layers: Vec<Vec<u32>> = self.buffers.iter().map(|[.., output]| read(self.gpu, output)).collect();
        let bits = |row: u32| -> Vec<u32> {
            let range = row as usize * QUERY..(row as usize + 1) * QUERY;
            layers.iter().flat_map(|layer| layer[range.clone()].iter().copied()).collect()
        };
        let planned: Vec<_> = self.scheduler.planned_sequences().collect();
        for (index, sequence) in planned.into_iter().enumerate() {
            let rows = &mut self.sequences.get_mut(&sequence.request()).expect("a known request").rows;
            for row in plan.query_starts()[index]..plan.query_starts()[index + 1] {
                let bits = bits(row);
                let before = rows.insert(plan.positions()[row as usize], bits.clone());
                assert!(before.is_none_or(|before| before == bits), "computed again, with other bits");
            }
        }
        let results: Vec<_> = plan
            .logit_rows()
            .iter()
            .map(|logits| {
                let token =
                    bits(logits.row).iter().fold(7u32, |hash, bits| (hash ^ bits).wrapping_mul(16_777_619));
                let token = 100 + token % 50;
                let request = logits.sequence.request();
                self.sequences.get_mut(&request).expect("a known request").tokens.push(token);
                RowResult::Token(token)
            })
            .collect();
        self.scheduler.commit(plan, &results).expect("the outstanding plan");
        self.collect();
        true
    }

    fn collect(&mut self) {
        let _ = self.gpu.device.poll(wgpu::PollType::wait_indefinitely());
        self.scheduler.complete_transfers(&self.attention.poll_transfers());
    }
}

/// Prompts of which some share their beginning.
fn prompts(random: &mut Random) -> Vec<(Vec<TokenId>, u32)> {
    let shared: Vec<TokenId> = (0..150).map(|_| (random.next() % 90) as u32).collect();
    [(0, 40), (100, 61), (150, 120), (150, 1), (37, 200), (0, 3)]
        .into_iter()
        .map(|(common, own)| {
            let mut tokens = shared[..common].to_vec();
            tokens.extend((0..own).map(|_| (random.next() % 90) as u32));
            (tokens, 20 + (random.next() % 20) as u32)
        })
        .collect()
}

fn alone(gpu: &TestDevice, options: AttentionOptions, prompt: &(Vec<TokenId>, u32)) -> Sequence {
    let mut app = App::new(gpu, options, 128, PreemptionMode::Recompute);
    let id = app.add(&prompt.0, prompt.1);
    while app.step() {}
    app.sequences.remove(&id).expect("a known request")
}

fn check(gpu: &TestDevice, options: AttentionOptions, seeds: u64) {
    let mut random = Random(1);
    let prompts = prompts(&mut random);
    let expected: Vec<Sequence> = prompts.iter().map(|prompt| alone(gpu, options.clone(), prompt)).collect();
    let (mut preemptions, mut hits, mut groups) = (0, 0, 0);
    for seed in 0..seeds {
        let mut random = Random(1000 + seed);
        // Hardly room for two of them.
        let mode = [PreemptionMode::Recompute, PreemptionMode::Swap][(seed % 2) as usize];
        let mut app = App::new(gpu, options.clone(), 42, mode);
        let mut waiting: Vec<usize> = (0..prompts.len()).collect();
        random.shuffle(&mut waiting);
        let mut ids = Vec::new();
        let mut is_busy = true;
        while is_busy || !waiting.is_empty() {
            if !waiting.is_empty() && (!is_busy || random.next().is_multiple_of(3)) {
                let index = waiting.remove(0);
                ids.push((index, app.add(&prompts[index].0, prompts[index].1)));
            }
            let rows = 1 + (random.next() % u64::from(MAX_ROWS)) as u32;
            app.scheduler.set_step_budgets(rows, 1 << 24).expect("valid budgets");
            is_busy = app.step();
        }
        for (index, id) in ids {
            let (found, expected) = (&app.sequences[&id], &expected[index]);
            assert_eq!(found.tokens, expected.tokens, "seed {seed}, prompt {index}");
            for (position, bits) in &found.rows {
                assert!(bits == &expected.rows[position], "seed {seed}, prompt {index}, position {position}");
            }
        }
        let stats = app.scheduler.stats();
        preemptions += stats.preemptions;
        hits += stats.prefix_hit_tokens;
        groups = groups.max(app.most_groups);
    }
    assert!(
        preemptions > 0 && hits > 100 && groups > 3,
        "{preemptions} preemptions, {hits} hits, {groups} groups"
    );
}

/// Scratch for a dozen partial results: 6 heads of 16 sums and a state of four.
fn options() -> AttentionOptions {
    AttentionOptions::default().batch_invariant(128).scratch_bytes(12 * 6 * 80)
}

#[test]
fn a_sequence_has_the_bits_that_it_has_alone_whatever_is_computed_beside_it() {
    on_each_adapter_but_gl(|adapter| check(&open(adapter), options(), 4));
}

#[test]
fn it_has_on_every_adapter() {
    on_each_adapter(|adapter| check(&open(adapter), options(), 1));
}

#[test]
fn scratch_that_does_not_hold_one_row_is_refused_with_both_numbers() {
    let gpu = crate::device::noop_device(wgpu::Limits::default(), wgpu::Features::empty(), 8..=8);
    let mut app = App::new(
        &gpu,
        AttentionOptions::default().batch_invariant(1).scratch_bytes(2 * 6 * 80),
        64,
        PreemptionMode::Swap,
    );
    app.add(&[5; 300], 1);
    let mut refused = None;
    while refused.is_none() {
        let Schedule::Step(plan) = app.scheduler.schedule() else { panic!("nothing was refused") };
        match app.attention.prepare(&plan) {
            Err(error) => refused = Some(error),
            Ok(mut step) => {
                let mut encoder = gpu.device.create_command_encoder(&Default::default());
                app.attention.record_transfers(&mut encoder, &mut step);
                let mut pass = encoder.begin_compute_pass(&Default::default());
                app.attention.record_block_copies(&mut pass, &mut step);
                for (layer, tensors) in (0..).zip(&app.tensors) {
                    app.attention
                        .record_layer(&mut pass, &mut step, layer, tensors)
                        .expect("the right order");
                }
                drop(pass);
                gpu.queue.submit([encoder.finish()]);
                app.scheduler.commit(plan, &[]).expect("no logits yet");
            }
        }
    }
    assert_eq!(refused, Some(PrepareError::ScratchTooSmall { needed: 3, available: 2 }));
}
