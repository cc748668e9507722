//! A cache full of keys and values on a device, and steps over it that can be run again and again.

use paged_kv::shaders::LayerPart;
use paged_kv::{
    AttentionOptions, BoundTensors, CacheConfig, KvCache, KvType, LayerTensors, ModelShape, PagedAttention,
    PrepareError, PreparedStep, StepBuilder, StepPlan, TableId, TensorSlice, WorkSplit,
};
use wgpu::ComputePass;

use crate::Failure;
use crate::faults::GpuFailure;
use crate::gpu::Gpu;
use crate::pairs::interleaved;
use crate::twins::{Placement, same_results};

/// One sequence of a case.
#[derive(Clone, Copy, Debug)]
pub struct Sequence {
    /// Rows that the step computes.
    pub rows: u32,
    /// Tokens that the last of them sees, itself included.
    pub context: u32,
}

/// A step and the cache under it.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Case {
    pub num_layers: u32,
    pub num_query_heads: u32,
    pub num_kv_heads: u32,
    pub head_dim: u32,
    pub kv_type: KvType,
    pub block_size: u32,
    pub sequences: Vec<Sequence>,
}

impl Case {
    /// The shape.
    pub fn shape(&self) -> ModelShape {
        ModelShape::new(self.num_layers, self.num_query_heads, self.num_kv_heads, self.head_dim)
    }

    /// Rows of the step.
    pub fn rows(&self) -> u32 {
        self.sequences.iter().map(|sequence| sequence.rows).sum()
    }

    /// Bytes of one token's keys and values of one kv head.
    pub fn row_bytes(&self) -> u64 {
        u64::from(2 * self.head_dim * self.kv_type.bits() / 8)
    }

    /// Bytes of the keys and values of a layer that the step must read once.
    pub fn kv_bytes(&self) -> u64 {
        let tokens: u64 = self.sequences.iter().map(|sequence| u64::from(sequence.context)).sum();
        tokens * u64::from(self.num_kv_heads) * self.row_bytes()
    }

    /// A pool that holds the sequences, each with a table as long as the longest.
    ///
    /// # Errors
    /// When the pool has more blocks or slots than a cache may have.
    pub fn config(&self) -> Result<CacheConfig, Failure> {
        let longest = self.sequences.iter().map(|sequence| sequence.context).max().unwrap_or(1);
        let config = CacheConfig::for_context(
            longest.next_multiple_of(self.block_size),
            self.sequences.len() as u32,
            &self.shape(),
            self.kv_type,
        )?;
        Ok(config
            .with_block_size(self.block_size)?
            .with_max_sequences(self.sequences.len() as u32 + DECKS)?)
    }
}

/// Tables among which blocks are dealt to shuffle them.
const DECKS: u32 = 16;

/// A [`Case`] on a device.
pub struct BenchCache<'a> {
    gpu: &'a Gpu,
    /// The case.
    pub case: Case,
    /// Its tables.
    pub kv: KvCache,
    /// Its kernels and blocks.
    pub attention: PagedAttention,
    /// The step's queries, `[rows, num_query_heads, head_dim]`.
    pub query: wgpu::Buffer,
    /// The step's results, of the layer that was recorded last.
    pub output: wgpu::Buffer,
    /// Block ids of the step prepared last, `[sequences][table_entries]`.
    pub tables_buffer: wgpu::Buffer,
    tensors: BoundTensors,
    tables: Vec<TableId>,
    work: WorkSplit,
}

impl<'a> BenchCache<'a> {
    /// Makes the cache, its tables and its kernels; blocks are those of a long-used pool, in no order, unless
    /// `placement` is contiguous. Keys and values are zero.
    ///
    /// # Errors
    /// What the library says when the device cannot hold it.
    pub fn new(gpu: &'a Gpu, case: Case, placement: Placement) -> Result<Self, Failure> {
        let config = case.config()?;
        let options = placement.apply(AttentionOptions::default(), config.num_blocks());
        let mut attention = PagedAttention::with_options(&gpu.device, case.shape(), config.clone(), options)?;
        let rows = case.rows().max(FILL_ROWS);
        let (query_len, kv_len) = (case.num_query_heads * case.head_dim, case.num_kv_heads * case.head_dim);
        let [query, key, value] = [(query_len, 1), (kv_len, 2), (kv_len, 3)]
            .map(|(len, seed)| gpu.buffer(&random(rows as usize * len as usize, seed)));
        let output = gpu.empty(u64::from(rows * query_len) * 4);
        let slice = |buffer, row_stride, rows| TensorSlice { buffer, offset: 0, row_stride, rows };
        let tensors = attention.bind_tensors(&LayerTensors {
            query: slice(&query, query_len, rows),
            key: slice(&key, kv_len, rows),
            value: slice(&value, kv_len, rows),
            output: slice(&output, query_len, rows),
        })?;
        let entries = u64::from(config.table_entries());
        let tables_buffer = gpu.empty(entries * case.sequences.len() as u64 * 4);
        let mut kv = KvCache::new(config);
        if placement != Placement::Contiguous {
            shuffle(&mut kv)?;
        }
        let max_tokens = kv.config().max_sequence_tokens();
        let tables = case.sequences.iter().map(|_| kv.create(max_tokens));
        let tables = tables.collect::<Result<Vec<_>, _>>()?;
        let work = WorkSplit::default();
        let mut cache =
            Self { gpu, case, kv, attention, query, output, tables_buffer, tensors, tables, work };
        cache.grow_tables(placement)?;
        if placement != Placement::Contiguous {
            // Dropped steps take their blocks in one order or its reverse.
            cache.time(LayerPart::Append)?;
            cache.time(LayerPart::Append)?;
        }
        Ok(cache)
    }

    /// Brings every sequence to where the step begins.
    fn grow_tables(&mut self, placement: Placement) -> Result<(), Failure> {
        loop {
            let mut builder = StepBuilder::new(&mut self.kv);
            for (&table, sequence) in self.tables.iter().zip(&self.case.sequences) {
                let missing = sequence.context - sequence.rows - builder.cache().len(table)?;
                let rows = missing.min(FILL_ROWS - builder.num_rows());
                if rows > 0 {
                    builder.push(table, &vec![0; rows as usize])?;
                }
            }
            let plan = builder.finish();
            if plan.num_rows() == 0 {
                return Ok(());
            }
            let mut step = self.attention.prepare(&plan)?;
            let mut encoder = self.gpu.encoder();
            self.attention.record_transfers(&mut encoder, &mut step);
            step.skip_layers();
            let gpu = self.gpu;
            gpu.time(encoder, |pass| {
                if placement != Placement::Contiguous {
                    self.record(pass, &mut step, LayerPart::Append);
                }
            })?;
            drop(step);
            self.kv.commit_step(plan)?;
        }
    }

    /// Builds and uploads the step once more: the same rows on the same context.
    ///
    /// # Errors
    /// [`PrepareError`] when the device is lost or has no memory.
    pub fn prepare(&mut self) -> Result<PreparedStep, PrepareError> {
        let plan = self.plan();
        self.work.split(&plan, self.attention.split_config());
        let step = self.attention.prepare(&plan)?;
        let entries = self.kv.config().table_entries() as usize;
        for (index, &table) in self.tables.iter().enumerate() {
            let blocks: Vec<u32> =
                self.kv.block_ids(table).expect("a live table").iter().map(|block| block.index()).collect();
            let place = (index * entries * 4) as u64;
            self.gpu.queue.write_buffer(&self.tables_buffer, place, bytemuck::cast_slice(&blocks));
        }
        Ok(step)
    }

    /// The step's plan. It is never committed, so that the next one is the same.
    fn plan(&mut self) -> StepPlan {
        let mut builder = StepBuilder::new(&mut self.kv);
        for (&table, sequence) in self.tables.iter().zip(&self.case.sequences) {
            builder.push(table, &vec![0; sequence.rows as usize]).expect("room in the pool");
        }
        builder.finish()
    }

    /// Records one part of every layer.
    pub fn record(&mut self, pass: &mut ComputePass<'_>, step: &mut PreparedStep, part: LayerPart) {
        for layer in 0..self.case.num_layers {
            self.record_layer(pass, step, layer, part);
        }
    }

    /// Records one part of one layer.
    pub fn record_layer(
        &mut self,
        pass: &mut ComputePass<'_>,
        step: &mut PreparedStep,
        layer: u32,
        part: LayerPart,
    ) {
        if layer == 0 {
            self.attention.record_block_copies(pass, step);
        }
        let recorded = self.attention.record_layer_part(pass, step, layer, &self.tensors, part);
        recorded.expect("layers in order");
    }

    /// Runs one part of the step; seconds per layer.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare) and [`Gpu::wait`].
    pub fn time(&mut self, part: LayerPart) -> Result<f64, Failure> {
        let mut step = self.prepare()?;
        let mut encoder = self.gpu.encoder();
        self.attention.record_transfers(&mut encoder, &mut step);
        let gpu = self.gpu;
        let seconds = gpu.time(encoder, |pass| self.record(pass, &mut step, part))?;
        Ok(seconds / f64::from(self.case.num_layers))
    }

    /// Dispatches per layer of the step recorded last.
    pub fn dispatches(&self) -> u32 {
        self.attention.stats().step_dispatches / self.case.num_layers
    }

    /// Bytes of keys and values that a layer's attention kernels load, by the work items of the step prepared last.
    pub fn bytes_loaded(&self) -> u64 {
        let split = self.attention.split_config();
        let decode = self
            .work
            .decode_items
            .iter()
            .map(|item| u64::from(item.end_token - item.first_token))
            .sum::<u64>();
        let prefill = self.work.prefill_items.iter().map(|item| u64::from(item.end_token - item.first_token));
        let keys = decode * u64::from(split.workgroups_per_item)
            + prefill.sum::<u64>() * u64::from(self.case.num_kv_heads);
        keys * self.case.row_bytes()
    }

    /// The results of the layer that was recorded last.
    ///
    /// # Errors
    /// As [`Gpu::wait`].
    pub fn results(&self) -> Result<Vec<f32>, GpuFailure> {
        let len = self.case.rows() * self.case.num_query_heads * self.case.head_dim;
        let mut results = self.gpu.read(&self.output)?;
        results.truncate(len as usize);
        Ok(results)
    }

    /// The buffer that holds a layer's blocks.
    pub fn arena(&self, layer: u32) -> &wgpu::Buffer {
        let (arena, _) = self.attention.arena_layout().arena_of(layer);
        &self.attention.arena_buffers()[arena as usize]
    }
}

/// The time of a case's attention with keys and values at `placement`, within blocks, over that with the library's own
/// placement; median of pairs that are run in turn.
///
/// # Errors
/// As [`BenchCache::new`] and [`BenchCache::time`], and
/// [`WrongResults`](crate::twins::WrongResults) when the two differ.
pub fn placement_ratio(gpu: &Gpu, case: &Case, placement: Placement) -> Result<f64, Failure> {
    let mut ours = BenchCache::new(gpu, case.clone(), Placement::KeysThenValues)?;
    let mut other = BenchCache::new(gpu, case.clone(), placement)?;
    ours.time(LayerPart::Attention)?;
    other.time(LayerPart::Attention)?;
    same_results(&format!("{placement:?}"), &ours.results()?, &other.results()?)?;
    Ok(interleaved(|| other.time(LayerPart::Attention), || ours.time(LayerPart::Attention))?.ratio)
}

/// Rows of a step that fills the cache.
const FILL_ROWS: u32 = 512;

/// Puts the free blocks of an unused cache in no order: they are dealt to tables at random and given back, four times,
/// as a sort by a random number would.
fn shuffle(kv: &mut KvCache) -> Result<(), Failure> {
    let mut random = 0x2545_f491_4f6c_dd1du64;
    let block_size = kv.config().block_size() as usize;
    let tokens = kv.config().max_sequence_tokens();
    let block = vec![0; block_size];
    for _ in 0..4 {
        let all = (0..kv.free_tables()).map(|_| kv.create(tokens)).collect::<Result<Vec<_>, _>>()?;
        let mut decks = all.clone();
        while kv.free_blocks() > 0 && !decks.is_empty() {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let deck = (random >> 33) as usize % decks.len();
            let mut builder = StepBuilder::new(kv);
            // A deck that is full is left aside.
            let pushed = builder.push(decks[deck], &block).is_ok();
            let plan = builder.finish();
            kv.commit_step(plan)?;
            if !pushed {
                decks.swap_remove(deck);
            }
        }
        all.into_iter().try_for_each(|deck| kv.release(deck))?;
    }
    // No device has run these steps.
    kv.forget_device();
    Ok(())
}

/// Commits a plan whose keys and values do not matter: the device has its block tables.
///
/// # Errors
/// What the library says, or the device.
pub fn commit_unwritten(
    gpu: &Gpu,
    attention: &mut PagedAttention,
    kv: &mut KvCache,
    plan: StepPlan,
) -> Result<(), Failure> {
    let mut step = attention.prepare(&plan)?;
    let mut encoder = gpu.encoder();
    attention.record_transfers(&mut encoder, &mut step);
    step.skip_layers();
    gpu.queue.submit([encoder.finish()]);
    gpu.wait()?;
    kv.commit_step(plan)?;
    Ok(())
}

/// Numbers between -1 and 1.
pub fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}
