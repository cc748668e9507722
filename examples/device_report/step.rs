//! One case of the self-check: a step as an application would record it.
//!
//! Three rows are decoded, behind no token, behind a block and behind a long context that is split into spans; two chunks
//! of a prompt are computed beside them. Blocks of the sequences lie between one another's, and whatever is in no token's
//! slot is NaN.

use measure::{Failure, gpu::Gpu};
use paged_kv::reference::{CpuCache, DenseInputs, Rows, append, block_copy, compare, dense_attention};
use paged_kv::{
    AttentionOptions, CacheConfig, KvCache, LayerTensors, ModelShape, PagedAttention, StepBuilder, StepPlan,
    TableId, TensorSlice,
};

use super::cases::Case;

/// Largest errors of one case.
pub(crate) struct Errors {
    pub(crate) decode: f64,
    pub(crate) prefill: f64,
    /// Whether keys and values lie in the blocks as the CPU twin stores them.
    pub(crate) stored_exactly: bool,
}

/// Each layer writes and reads its own part of the blocks; the last one's output is looked at.
const NUM_LAYERS: u32 = 2;
const KV_HEADS: u32 = 2;
/// Most rows of a sequence in a step that fills the cache.
const FILL_ROWS: u32 = 64;
/// NaN, as one f32 or as two f16.
const NAN_WORD: u32 = 0x7fff_7fff;

/// A cache on the device beside its twin.
struct Rig<'a> {
    gpu: &'a Gpu,
    shape: ModelShape,
    attention: PagedAttention,
    kv: KvCache,
    twin: CpuCache,
    random: Random,
}

/// Queries, keys and values of a step's rows, the same for all layers.
struct Tensors {
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
}

/// Runs a case.
///
/// # Errors
/// What the library says when it cannot be run.
pub(crate) fn run(gpu: &Gpu, case: &Case) -> Result<Errors, Failure> {
    // Tokens there are, and rows that the step adds.
    let block = case.block_size;
    let sequences = [(0, 1), (block, 1), (case.longest - 1, 1), (0, 19), (75, block.min(16) + 3)];
    let most = sequences.iter().map(|(tokens, rows)| tokens + rows).max().unwrap_or(1);
    let mut rig = Rig::new(gpu, case, most, sequences.len() as u32)?;
    let mut tables = Vec::new();
    for _ in sequences {
        tables.push(rig.kv.create(most)?);
    }
    rig.fill(&tables, &sequences.map(|(tokens, _)| tokens))?;
    gpu.queue.write_buffer(&rig.attention.arena_buffers()[0], 0, bytemuck::cast_slice(rig.twin.words()));

    let mut builder = StepBuilder::new(&mut rig.kv);
    for (&table, (_, rows)) in tables.iter().zip(sequences) {
        builder.push(table, &vec![0; rows as usize])?;
    }
    let plan = builder.finish();
    let tensors = rig.tensors(&plan);
    rig.store(&plan, &tensors);
    let output = rig.attend(&plan, &tensors)?;
    let (mut decode, mut prefill) = (0.0f64, 0.0f64);
    for (index, (_, rows)) in sequences.iter().enumerate() {
        let error = rig.dense_error(&plan, &tensors, &output, index);
        let worst = if *rows == 1 { &mut decode } else { &mut prefill };
        *worst = worst.max(error);
    }
    let stored: Vec<u32> = gpu.read(&rig.attention.arena_buffers()[0])?;
    Ok(Errors { decode, prefill, stored_exactly: stored == rig.twin.words() })
}

impl<'a> Rig<'a> {
    fn new(gpu: &'a Gpu, case: &Case, tokens: u32, sequences: u32) -> Result<Self, Failure> {
        let shape = ModelShape::new(NUM_LAYERS, KV_HEADS * case.ratio, KV_HEADS, case.head_dim);
        // Twice the longest sequence: room for all of them.
        let config = CacheConfig::for_context(tokens, 2, &shape, case.kv_type)?
            .with_block_size(case.block_size)?
            .with_max_sequences(sequences)?;
        // So many workgroups that long rows are split on every adapter.
        let options = AttentionOptions::default().allow_subgroups(case.subgroups).target_workgroups(512);
        let attention = PagedAttention::with_options(&gpu.device, shape.clone(), config.clone(), options)?;
        let mut twin = CpuCache::new(&shape, &config);
        twin.words_mut().fill(NAN_WORD);
        Ok(Self { gpu, shape, attention, kv: KvCache::new(config), twin, random: Random(1) })
    }

    /// Brings the tables to `lengths`, a few blocks of each in turn. Only the twin stores keys and values.
    fn fill(&mut self, tables: &[TableId], lengths: &[u32]) -> Result<(), Failure> {
        loop {
            let mut builder = StepBuilder::new(&mut self.kv);
            for (&table, &length) in tables.iter().zip(lengths) {
                let missing = length - builder.cache().len(table)?;
                if missing > 0 {
                    builder.push(table, &vec![0; missing.min(FILL_ROWS) as usize])?;
                }
            }
            let plan = builder.finish();
            if plan.num_rows() == 0 {
                return Ok(());
            }
            let tensors = self.tensors(&plan);
            self.store(&plan, &tensors);
            let mut step = self.attention.prepare(&plan)?;
            let mut encoder = self.gpu.encoder();
            self.attention.record_transfers(&mut encoder, &mut step);
            step.skip_layers();
            self.gpu.queue.submit([encoder.finish()]);
            self.gpu.wait()?;
            self.kv.commit_step(plan)?;
        }
    }

    fn tensors(&mut self, plan: &StepPlan) -> Tensors {
        let rows = plan.num_rows() as usize;
        let [query_len, kv_len] = self.row_lens();
        let mut numbers =
            |len: usize, most: f32| (0..rows * len).map(|_| most * self.random.unit()).collect();
        // Logits up to about 2 in magnitude: weights that differ, none so small that it does not count.
        Tensors { query: numbers(query_len, 2.0), key: numbers(kv_len, 2.0), value: numbers(kv_len, 1.0) }
    }

    /// Elements of a query's and of a key's row.
    fn row_lens(&self) -> [usize; 2] {
        let shape = &self.shape;
        [shape.num_query_heads(), shape.num_kv_heads()].map(|heads| (heads * shape.head_dim()) as usize)
    }

    /// Table changes, copies and appends of a step, on the twin.
    fn store(&mut self, plan: &StepPlan, tensors: &Tensors) {
        let [_, kv_len] = self.row_lens();
        self.twin.apply_table_changes(plan);
        block_copy(&mut self.twin, plan.block_copies());
        for layer in 0..NUM_LAYERS {
            let (key, value) = (Rows::new(&tensors.key, kv_len), Rows::new(&tensors.value, kv_len));
            append(&mut self.twin, layer, plan.slot_mapping(), key, value);
        }
    }

    /// The step on the device: the last layer's output, `[rows, num_query_heads, head_dim]`.
    fn attend(&mut self, plan: &StepPlan, tensors: &Tensors) -> Result<Vec<f32>, Failure> {
        let gpu = self.gpu;
        let [query_len, kv_len] = self.row_lens();
        let [query, key, value] = [&tensors.query, &tensors.key, &tensors.value].map(|rows| gpu.buffer(rows));
        let output = gpu.buffer(&vec![f32::NAN; tensors.query.len()]);
        let rows = plan.num_rows();
        let slice = |buffer, len: usize| TensorSlice { buffer, offset: 0, row_stride: len as u32, rows };
        let bound = self.attention.bind_tensors(&LayerTensors {
            query: slice(&query, query_len),
            key: slice(&key, kv_len),
            value: slice(&value, kv_len),
            output: slice(&output, query_len),
        })?;
        let mut step = self.attention.prepare(plan)?;
        let mut encoder = gpu.encoder();
        self.attention.record_transfers(&mut encoder, &mut step);
        let mut pass = encoder.begin_compute_pass(&Default::default());
        self.attention.record_block_copies(&mut pass, &mut step);
        for layer in 0..NUM_LAYERS {
            self.attention.record_layer(&mut pass, &mut step, layer, &bound)?;
        }
        drop(pass);
        gpu.queue.submit([encoder.finish()]);
        Ok(gpu.read(&output)?)
    }

    /// Largest error of one sequence's rows against the f64 attention over what the twin holds.
    fn dense_error(&self, plan: &StepPlan, tensors: &Tensors, output: &[f32], sequence: usize) -> f64 {
        let [query_len, _] = self.row_lens();
        let rows = plan.query_starts()[sequence] as usize..plan.query_starts()[sequence + 1] as usize;
        let elements = rows.start * query_len..rows.end * query_len;
        let table_row = plan.table_rows()[sequence];
        let (keys, values) = self.twin.gather(NUM_LAYERS - 1, table_row, plan.context_lens()[sequence]);
        let head_dim = self.shape.head_dim();
        let expected = dense_attention(&DenseInputs {
            query: &tensors.query[elements.clone()],
            keys: &keys,
            values: &values,
            num_query_heads: self.shape.num_query_heads(),
            num_kv_heads: self.shape.num_kv_heads(),
            k_head_dim: head_dim,
            v_head_dim: head_dim,
            reach: self.twin.group(0).reach(),
            logits: self.twin.group(0).logits(),
            layer: NUM_LAYERS - 1,
        });
        // Without a tolerance the worst error is either returned or reported.
        let compared = compare(&output[elements], &expected.output, head_dim as usize, f64::MAX);
        compared.unwrap_or_else(|mismatch| mismatch.error)
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    /// From -1 to 1.
    fn unit(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
