//! The cache's side of a step, on whichever device the model is: one pool, and one call per step.
//!
//! Here model and cache meet. On a GPU, the model's dispatches and the cache's go into one compute pass of one
//! encoder; on the CPU, the twins of the cache's kernels run between the model's products, on two threads or more.
//! Blocks that are swapped move first in either case; what became of them is asked for between steps.

use std::{
    collections::BTreeMap,
    num::NonZero,
    time::{Duration, Instant},
};

use paged_kv::{
    AttentionOptions, BoundTensors, CacheConfig, LayerGroup, LayerTensors, LogitRule, ModelShape,
    PagedAttention, Reach, SplitConfig, StepPlan, TensorSlice, TransferReport, WorkSplit,
    reference::{self, AttentionInputs, CpuCache, Rows, RowsMut},
};

use crate::{
    config::Config,
    cpu::{CpuModel, QueryKeyValue},
    error::RunError,
    gpu::{self, GpuModel, SpanTimer},
};

/// Bytes that are moved, once each way, to learn how fast that is.
const MEASURED_BYTES: u64 = 16 << 20;

/// Tokens that one item of decoding reads: at most 32 items for the longest sequence. Cuts that depend on nothing
/// else keep a sequence's bits independent of what runs beside it. Whole tiles of the kernels, so that the CPU cuts alike.
fn span_tokens(config: &Config) -> u32 {
    config.context_len.div_ceil(32).max(256).next_multiple_of(128)
}

/// What the cache needs to know of the model: the layers that see alike are a group, those that see everything the first.
pub fn shape_of(config: &Config) -> ModelShape {
    if config.windows.iter().all(Option::is_none) {
        let shape =
            ModelShape::new(config.num_layers, config.num_query_heads, config.num_kv_heads, config.head_dim);
        return shape.with_logits(logits_of(config, 0..config.num_layers));
    }
    let mut groups: BTreeMap<Option<u32>, Vec<u32>> = BTreeMap::new();
    for (layer, window) in (0..).zip(&config.windows) {
        groups.entry(*window).or_default().push(layer);
    }
    ModelShape::of_groups(groups.into_iter().map(|(window, layers)| {
        let rule = logits_of(config, layers.iter().copied());
        LayerGroup::new(layers, config.num_query_heads, config.num_kv_heads, config.head_dim)
            .with_reach(window.map_or(Reach::All, |tokens| Reach::Window { tokens, first: 0 }))
            .with_logits(rule)
    }))
}

/// What becomes of the logits of these layers.
fn logits_of(config: &Config, layers: impl IntoIterator<Item = u32>) -> LogitRule {
    let rule = LogitRule::new().with_sinks(layers.into_iter().flat_map(|layer| config.sinks_of(layer)));
    match config.soft_cap {
        Some(cap) => rule.with_soft_cap(cap),
        None => rule,
    }
}

/// The pool of a [`GpuModel`].
pub(crate) struct GpuAttention {
    attention: PagedAttention,
    tensors: BoundTensors,
    timer: Option<SpanTimer>,
    /// What the model has room for.
    rows: u32,
    logit_rows: u32,
    elapsed: Duration,
    row_of_logits: Vec<u32>,
}

impl GpuAttention {
    /// Makes the pool, and room in the model for steps of `rows` rows, `logit_rows` of which need logits.
    pub(crate) fn new(
        model: &mut GpuModel,
        cache: CacheConfig,
        rows: u32,
        logit_rows: u32,
    ) -> Result<Self, RunError> {
        model.reserve(rows, logit_rows)?;
        let (gpu, config) = (model.gpu(), model.config());
        let options = AttentionOptions::default().fixed_span_tokens(span_tokens(config));
        let mut attention = PagedAttention::with_options(&gpu.device, shape_of(config), cache, options)?;
        let tensors = bind(&mut attention, model, rows)?;
        let timer = SpanTimer::new(gpu, config.num_layers)?;
        Ok(Self {
            attention,
            tensors,
            timer,
            rows,
            logit_rows,
            elapsed: Duration::ZERO,
            row_of_logits: Vec::new(),
        })
    }

    /// Goes on with `model`, which was loaded anew after its device was lost: the host pool is kept.
    pub(crate) fn rebuild(&mut self, model: &mut GpuModel) -> Result<(), RunError> {
        model.reserve(self.rows, self.logit_rows)?;
        let gpu = model.gpu();
        self.attention.rebuild(&gpu.device)?;
        self.tensors = bind(&mut self.attention, model, self.rows)?;
        self.timer = SpanTimer::new(gpu, model.config().num_layers)?;
        Ok(())
    }

    /// Runs a step to its end and hands the logits of `plan.logit_rows()[i]` to `take(i, logits)`.
    pub(crate) fn step(
        &mut self,
        model: &mut GpuModel,
        plan: &StepPlan,
        take: impl FnMut(usize, &[f32]),
    ) -> Result<(), RunError> {
        let descriptor = wgpu::CommandEncoderDescriptor { label: Some("llama.step") };
        let mut encoder = model.gpu().device.create_command_encoder(&descriptor);
        let num_logit_rows = self.record(model, plan, &mut encoder)?;
        self.timer.iter().for_each(|timer| timer.record(&mut encoder));
        model.gpu().queue.submit([encoder.finish()]);
        self.timer.iter().for_each(SpanTimer::request);

        let read = model.read_logits(num_logit_rows, self.by_entry(plan, take));
        // Its buffer is given back whether the logits came or not.
        let took = self.timer.as_ref().map(SpanTimer::take).transpose();
        read?;
        self.elapsed += took?.unwrap_or_default();
        Ok(())
    }

    /// Uploads a step's inputs and records all of it, up to the copy of its logits. Returns how many rows of logits that
    /// copy has.
    pub(crate) fn record(
        &mut self,
        model: &mut GpuModel,
        plan: &StepPlan,
        encoder: &mut wgpu::CommandEncoder,
    ) -> Result<u32, RunError> {
        distinct_logit_rows(plan, &mut self.row_of_logits);
        model.write_inputs(plan.token_ids(), plan.positions(), &self.row_of_logits);
        let num_logit_rows = self.row_of_logits.len() as u32;

        let mut step = self.attention.prepare(plan)?;
        self.attention.record_transfers(encoder, &mut step);
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
            label: Some("llama.step"),
            timestamp_writes: None,
        });
        self.attention.record_block_copies(&mut pass, &mut step);
        model.record_layers(&mut pass, plan.num_rows(), |pass, layer| {
            self.timer.iter().for_each(|timer| timer.begin(pass, layer));
            let recorded = self.attention.record_layer(pass, &mut step, layer, &self.tensors);
            self.timer.iter().for_each(|timer| timer.end(pass, layer));
            recorded
        })?;
        model.record_logits(&mut pass, num_logit_rows);
        drop(pass);
        model.record_readback(encoder, num_logit_rows);
        Ok(num_logit_rows)
    }

    /// Hands rows of the recorded step's logits on to `take`, which is asked by entries of `plan.logit_rows()`.
    pub(crate) fn by_entry<'a>(
        &'a self,
        plan: &'a StepPlan,
        mut take: impl FnMut(usize, &[f32]) + 'a,
    ) -> impl FnMut(u32, &[f32]) + 'a {
        move |index, logits| {
            let row = self.row_of_logits[index as usize];
            for (entry, wanted) in plan.logit_rows().iter().enumerate() {
                if wanted.row == row {
                    take(entry, logits);
                }
            }
        }
    }

    /// Takes no times: those of a step that the caller submits could not be asked for.
    pub(crate) fn without_timer(mut self) -> Self {
        self.timer = None;
        self
    }

    /// Time that attention took, writing keys and values included; none where the device has no timestamps.
    pub(crate) fn elapsed(&self) -> Option<Duration> {
        self.timer.as_ref().map(|_| self.elapsed)
    }

    /// What has become of the swaps of earlier steps. Does not wait: a step has polled the device when it read its
    /// logits.
    pub(crate) fn poll_transfers(&mut self) -> Vec<TransferReport> {
        self.attention.poll_transfers()
    }

    /// The same, but waits for everything that was submitted. A program that draws frames polls in each of them instead.
    pub(crate) fn wait_for_transfers(&mut self, model: &GpuModel) -> Result<Vec<TransferReport>, RunError> {
        model.gpu().wait()?;
        Ok(self.attention.poll_transfers())
    }

    /// Bytes per second, one way, that a part of the pool takes to main memory and back.
    pub(crate) fn measure_swap(&self, model: &GpuModel) -> Result<f64, RunError> {
        let arena = &self.attention.arena_buffers()[0];
        Ok(gpu::measure_transfer(model.gpu(), arena, arena.size().min(MEASURED_BYTES))?)
    }
}

/// Binds the model's tensors, and has the pool zeroed before the first step.
fn bind(attention: &mut PagedAttention, model: &GpuModel, rows: u32) -> Result<BoundTensors, RunError> {
    let (gpu, config) = (model.gpu(), model.config());
    let part = |start: u32| TensorSlice {
        buffer: model.query_key_value(),
        offset: u64::from(start) * 4,
        row_stride: config.query_key_value_len(),
        rows,
    };
    let tensors = attention.bind_tensors(&LayerTensors {
        query: part(0),
        key: part(config.key_start()),
        value: part(config.value_start()),
        output: TensorSlice { buffer: model.attended(), offset: 0, row_stride: config.query_len(), rows },
    })?;
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    attention.record_initialization(&mut encoder);
    gpu.queue.submit([encoder.finish()]);
    Ok(tensors)
}

/// The pool of a [`CpuModel`].
pub(crate) struct CpuAttention {
    cache: CpuCache,
    /// How the work of each group of layers is cut, and the current step's.
    splits: Vec<(SplitConfig, WorkSplit)>,
    reports: Vec<TransferReport>,
    partials: Vec<f32>,
    row_of_logits: Vec<u32>,
    num_threads: usize,
    elapsed: Duration,
}

impl CpuAttention {
    /// Makes the pool.
    pub(crate) fn new(model: &CpuModel, cache: CacheConfig) -> Result<Self, RunError> {
        // The twin's memory is allocated where failure ends the program, so it is asked for here first.
        let bytes = cache.bytes_total();
        let fits =
            usize::try_from(bytes).is_ok_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
        if !fits {
            return Err(RunError::PoolExceedsMemory { bytes });
        }
        let num_threads = std::thread::available_parallelism().map_or(1, NonZero::get);
        let shape = shape_of(model.config());
        let cache = CpuCache::new(&shape, &cache);
        // As on a GPU, but that memory for partial results is taken as it is needed.
        let split_config = |layer| SplitConfig {
            fixed_span_tokens: Some(span_tokens(model.config())),
            max_partials: u32::MAX,
            ..cache.split_config(layer, num_threads as u32)
        };
        // Any layer of a group stands for it.
        let layers = shape.groups().filter_map(|group| group.layers().next());
        let splits = layers.map(|layer| (split_config(layer), WorkSplit::default())).collect();
        Ok(Self {
            cache,
            splits,
            reports: Vec::new(),
            partials: Vec::new(),
            row_of_logits: Vec::new(),
            num_threads,
            elapsed: Duration::ZERO,
        })
    }

    /// As [`GpuAttention::step`].
    pub(crate) fn step(
        &mut self,
        model: &CpuModel,
        plan: &StepPlan,
        mut take: impl FnMut(usize, &[f32]),
    ) -> Result<(), RunError> {
        distinct_logit_rows(plan, &mut self.row_of_logits);
        self.cache.apply_table_changes(plan);
        reference::swap_out(&mut self.cache, plan.swap_outs());
        reference::swap_in(&mut self.cache, plan.swap_ins());
        if !plan.swap_outs().is_empty() || !plan.swap_ins().is_empty() {
            self.reports.push(TransferReport { step: plan.step(), complete: true });
        }
        reference::block_copy(&mut self.cache, plan.block_copies());
        for (config, split) in &mut self.splits {
            split.split(plan, config);
        }
        let rows = std::mem::take(&mut self.row_of_logits);
        let logits = model.forward(plan.token_ids(), plan.positions(), &rows, |layer, tensors| {
            let start = Instant::now();
            let attended = self.attend(model.config(), plan, layer, &tensors);
            self.elapsed += start.elapsed();
            attended
        })?;
        self.row_of_logits = rows;
        let vocab_len = model.config().vocab_len as usize;
        for (entry, wanted) in plan.logit_rows().iter().enumerate() {
            if let Some(index) = self.row_of_logits.iter().position(|&row| row == wanted.row) {
                take(entry, &logits[index * vocab_len..][..vocab_len]);
            }
        }
        Ok(())
    }

    /// As [`GpuAttention::elapsed`].
    pub(crate) fn elapsed(&self) -> Duration {
        self.elapsed
    }

    /// As [`GpuAttention::poll_transfers`]; here blocks have arrived as soon as they are moved.
    pub(crate) fn poll_transfers(&mut self) -> Vec<TransferReport> {
        std::mem::take(&mut self.reports)
    }

    /// As [`GpuAttention::measure_swap`].
    pub(crate) fn measure_swap(&mut self) -> f64 {
        let words = self.cache.words_mut();
        let len = words.len().min(MEASURED_BYTES as usize / 4);
        let words = &mut words[..len];
        let mut moved = Vec::new();
        let mut start = Instant::now();
        // The first time, memory is taken.
        for _ in 0..2 {
            start = Instant::now();
            moved.clear();
            moved.extend_from_slice(words);
            words.copy_from_slice(std::hint::black_box(&moved));
        }
        2.0 * 4.0 * len as f64 / start.elapsed().as_secs_f64().max(1e-9)
    }

    fn attend(&mut self, config: &Config, plan: &StepPlan, layer: u32, tensors: &QueryKeyValue) -> Vec<f32> {
        let (query_len, kv_len) = (config.query_len() as usize, config.kv_len() as usize);
        let (key, value) = (Rows::new(&tensors.key, kv_len), Rows::new(&tensors.value, kv_len));
        let place = self.cache.layout().place_of(layer);
        let slot_mapping = plan.stacks()[place.stack as usize].slot_mapping();
        reference::append(&mut self.cache, layer, slot_mapping, key, value);

        let inputs = AttentionInputs::new(&self.cache, plan, layer, Rows::new(&tensors.query, query_len));
        let partial_len = self.cache.partial_len(layer);
        let (_, split) = &self.splits[place.group as usize];
        self.partials.resize(split.num_partials as usize * partial_len, 0.0);
        let mut attended = vec![0.0; plan.num_rows() as usize * query_len];
        let mut output = RowsMut::new(&mut attended, query_len);
        let mut partials = RowsMut::new(&mut self.partials, partial_len);
        let (decode_items, prefill_items) = (&split.decode_items, &split.prefill_items);
        std::thread::scope(|scope| {
            let (output, partials) = (output.reborrow(), partials.reborrow());
            for mut part in reference::decode_parts(&inputs, decode_items, output, partials, self.num_threads)
            {
                scope.spawn(move || {
                    reference::attention_decode(&inputs, part.items, &mut part.output, &mut part.partials);
                });
            }
        });
        std::thread::scope(|scope| {
            let (output, partials) = (output.reborrow(), partials.reborrow());
            for mut part in
                reference::prefill_parts(&inputs, prefill_items, output, partials, self.num_threads)
            {
                scope.spawn(move || {
                    reference::attention_prefill(&inputs, part.items, &mut part.output, &mut part.partials);
                });
            }
        });
        reference::attention_merge(&inputs, &split.merge_items, partials.as_rows(), &mut output);
        attended
    }
}

/// The rows that need logits, each once: samples of one prompt ask for the same row.
fn distinct_logit_rows(plan: &StepPlan, rows: &mut Vec<u32>) {
    rows.clear();
    rows.extend(plan.logit_rows().iter().map(|entry| entry.row));
    rows.dedup();
}
