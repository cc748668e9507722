//! Buffers and bind groups that depend on how many rows a step may have.

use wgpu::BufferUsages;

use super::{
    buffers::{GpuError, allocate, bind, create, params},
    kernels::Kernels,
    matmul::MAX_TILE_ROWS,
    weights::{Matrix, Part, Weights, stride_of},
};
use crate::config::Config;

/// Words between two lists of a step's inputs, so that each can be bound: the largest alignment a device may ask for.
const LIST_ALIGNMENT: u32 = 256 / 4;

/// What a step reads and writes besides the weights.
pub(super) struct Activations {
    /// Rows that a step may have.
    pub(super) rows: u32,
    /// Rows that may need logits.
    pub(super) logit_rows: u32,
    pub(super) inputs: StepInputs,
    pub(super) query_key_value: wgpu::Buffer,
    pub(super) attended: wgpu::Buffer,
    pub(super) logits: wgpu::Buffer,
    pub(super) readback: wgpu::Buffer,
    pub(super) embed: Vec<wgpu::BindGroup>,
    pub(super) rope: wgpu::BindGroup,
    pub(super) layers: Vec<LayerBindings>,
    pub(super) output_norm: wgpu::BindGroup,
    pub(super) output: Vec<wgpu::BindGroup>,
}

/// One layer's bind groups; a matrix has one for each of its parts.
pub(super) struct LayerBindings {
    pub(super) attention_norm: wgpu::BindGroup,
    pub(super) query_key_value: Vec<wgpu::BindGroup>,
    pub(super) attention_output: Vec<wgpu::BindGroup>,
    pub(super) feed_forward_norm: wgpu::BindGroup,
    pub(super) gate_up: Vec<wgpu::BindGroup>,
    pub(super) down: Vec<wgpu::BindGroup>,
}

/// A step's token ids, positions, and rows that need logits, in one buffer and one upload.
pub(super) struct StepInputs {
    buffer: wgpu::Buffer,
    words: Vec<u32>,
    stride: u32,
}

impl StepInputs {
    fn new(device: &wgpu::Device, rows: u32) -> Result<Self, GpuError> {
        let stride = rows.next_multiple_of(LIST_ALIGNMENT);
        let words = vec![0; 3 * stride as usize];
        let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
        let buffer = allocate(device, "llama.inputs", words.len() as u64 * 4, usage)?;
        Ok(Self { buffer, words, stride })
    }

    /// Uploads the three lists; the rest of each keeps valid values of earlier steps.
    pub(super) fn write(&mut self, queue: &wgpu::Queue, lists: [&[u32]; 3]) {
        for (values, list) in lists.into_iter().zip(self.words.chunks_exact_mut(self.stride as usize)) {
            list[..values.len()].copy_from_slice(values);
        }
        queue.write_buffer(&self.buffer, 0, bytemuck::cast_slice(&self.words));
    }

    fn binding(&self, list: u32) -> wgpu::BindingResource<'_> {
        let bytes = u64::from(self.stride) * 4;
        wgpu::BindingResource::Buffer(wgpu::BufferBinding {
            buffer: &self.buffer,
            offset: u64::from(list) * bytes,
            size: wgpu::BufferSize::new(bytes),
        })
    }
}

/// What bind groups are made from.
struct Binder<'a> {
    device: &'a wgpu::Device,
    kernels: &'a Kernels,
    norm_params: wgpu::Buffer,
}

impl Activations {
    /// Buffers for steps of `rows` rows, `logit_rows` of which need logits.
    pub(super) fn new(
        device: &wgpu::Device,
        config: &Config,
        kernels: &Kernels,
        weights: &Weights,
        rows: u32,
        logit_rows: u32,
    ) -> Result<Self, GpuError> {
        let rows = rows.next_multiple_of(MAX_TILE_ROWS);
        let logit_rows = logit_rows.next_multiple_of(MAX_TILE_ROWS);
        let logit_bytes = u64::from(logit_rows) * u64::from(logit_stride(config)) * 4;
        let tensor = |label, rows: u32, len: u32| {
            let bytes = u64::from(rows) * u64::from(len) * 4;
            let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
            allocate(device, label, bytes, usage)
        };
        let inputs = StepInputs::new(device, rows.max(logit_rows))?;
        let every_row: Vec<u32> = (0..rows).collect();
        let every_row = create(device, "llama.every_row", bytemuck::cast_slice(&every_row))?;
        let residual = tensor("llama.residual", rows, config.embedding_len)?;
        let normed = tensor("llama.normed", rows.max(logit_rows), config.embedding_len)?;
        let query_key_value = tensor("llama.query_key_value", rows, config.query_key_value_len())?;
        let attended = tensor("llama.attended", rows, config.query_len())?;
        let hidden = tensor("llama.hidden", rows, config.feed_forward_len)?;
        let logits = tensor("llama.logits", logit_rows, logit_stride(config))?;
        let readback_usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
        let readback = allocate(device, "llama.readback", logit_bytes, readback_usage)?;

        let binder = Binder::new(device, config, kernels)?;
        let layers = weights.layers.iter().map(|layer| LayerBindings {
            attention_norm: binder.norm(
                every_row.as_entire_binding(),
                &layer.attention_norm,
                &residual,
                &normed,
            ),
            query_key_value: binder.matmul(&layer.query_key_value, &normed, &query_key_value),
            attention_output: binder.matmul(&layer.attention_output, &attended, &residual),
            feed_forward_norm: binder.norm(
                every_row.as_entire_binding(),
                &layer.feed_forward_norm,
                &residual,
                &normed,
            ),
            gate_up: binder.matmul(&layer.gate_up, &normed, &hidden),
            down: binder.matmul(&layer.down, &hidden, &residual),
        });
        Ok(Self {
            rows,
            logit_rows,
            embed: binder.embed(config, &weights.embedding, &inputs, &residual)?,
            rope: binder.rope(config, &inputs, &weights.rotations, &query_key_value)?,
            layers: layers.collect(),
            output_norm: binder.norm(inputs.binding(2), &weights.output_norm, &residual, &normed),
            output: binder.matmul(weights.output.as_ref().unwrap_or(&weights.embedding), &normed, &logits),
            inputs,
            query_key_value,
            attended,
            logits,
            readback,
        })
    }
}

impl<'a> Binder<'a> {
    fn new(device: &'a wgpu::Device, config: &Config, kernels: &'a Kernels) -> Result<Self, GpuError> {
        let inverse_len = 1.0 / config.embedding_len as f32;
        let words = [config.embedding_len / 4, inverse_len.to_bits(), config.rms_epsilon.to_bits()];
        Ok(Self { device, kernels, norm_params: params(device, "llama.rms_norm", &words)? })
    }

    fn norm(
        &self,
        source_rows: wgpu::BindingResource<'_>,
        weight: &wgpu::Buffer,
        residual: &wgpu::Buffer,
        normed: &wgpu::Buffer,
    ) -> wgpu::BindGroup {
        let [params, weight, residual, normed] =
            [&self.norm_params, weight, residual, normed].map(wgpu::Buffer::as_entire_binding);
        let resources = [params, source_rows, weight, residual, normed];
        bind(self.device, "llama.rms_norm", &self.kernels.rms_norm.layout, &resources)
    }

    fn matmul(&self, matrix: &Matrix, input: &wgpu::Buffer, output: &wgpu::Buffer) -> Vec<wgpu::BindGroup> {
        let bind_part = |part: &Part| {
            let resources = [&part.params, &part.buffer, input, output].map(wgpu::Buffer::as_entire_binding);
            bind(self.device, "llama.matmul", &self.kernels.matmul_layout, &resources)
        };
        matrix.parts.iter().map(bind_part).collect()
    }

    fn embed(
        &self,
        config: &Config,
        embedding: &Matrix,
        inputs: &StepInputs,
        residual: &wgpu::Buffer,
    ) -> Result<Vec<wgpu::BindGroup>, GpuError> {
        let bind_part = |part: &Part| {
            let words = [config.embedding_len, part.first_output, part.first_output + part.num_outputs];
            let params = params(self.device, "llama.embed", &words)?;
            let [params, table, residual] =
                [&params, &part.buffer, residual].map(wgpu::Buffer::as_entire_binding);
            let resources = [params, inputs.binding(0), table, residual];
            Ok(bind(self.device, "llama.embed", &self.kernels.embed.layout, &resources))
        };
        embedding.parts.iter().map(bind_part).collect()
    }

    fn rope(
        &self,
        config: &Config,
        inputs: &StepInputs,
        rotations: &wgpu::Buffer,
        query_key_value: &wgpu::Buffer,
    ) -> Result<wgpu::BindGroup, GpuError> {
        let words = [
            config.rope_dim / 2,
            config.head_dim / 2,
            config.num_query_heads,
            config.num_query_heads + config.num_kv_heads,
            config.key_start() / 2,
            config.query_key_value_len() / 2,
        ];
        let params = params(self.device, "llama.rope", &words)?;
        let [params, rotations, query_key_value] =
            [&params, rotations, query_key_value].map(wgpu::Buffer::as_entire_binding);
        let resources = [params, inputs.binding(1), rotations, query_key_value];
        Ok(bind(self.device, "llama.rope", &self.kernels.rope.layout, &resources))
    }
}

/// Elements from one row of logits to the next.
pub(super) fn logit_stride(config: &Config) -> u32 {
    stride_of(config.vocab_len as usize) as u32
}

/// Pairs of a row that are rotated: those of its query and key heads.
pub(super) fn rotated_pairs(config: &Config) -> u32 {
    (config.num_query_heads + config.num_kv_heads) * config.rope_dim / 2
}
