//! The model's weights on the device.
//!
//! A matrix of the file has one row of inputs per output. Here groups of 32 outputs lie one after the other, and
//! each group is `[inputs][32 outputs]`, so that neighbouring invocations, which make neighbouring outputs, read
//! neighbouring elements. The last pair of groups is filled up with zeros. A matrix larger than a binding may be is
//! cut into parts by outputs: 128 MiB, the default limit, suffice for every model whose single pair of groups fits.

use super::{
    buffers::{GpuError, create, params},
    matmul::{GROUP, Store},
};
use crate::{
    config::{Config, sinks_name},
    error::LoadError,
    gguf::GgufFile,
};

/// A matrix, cut by outputs.
pub(super) struct Matrix {
    pub(super) parts: Vec<Part>,
    pub(super) store: Store,
}

/// Consecutive outputs of a matrix in one buffer.
pub(super) struct Part {
    pub(super) buffer: wgpu::Buffer,
    /// The kernel's `Params`.
    pub(super) params: wgpu::Buffer,
    pub(super) num_groups: u32,
    /// Index of the first output, and how many there are.
    pub(super) first_output: u32,
    pub(super) num_outputs: u32,
}

/// One layer's weights.
pub(super) struct Layer {
    pub(super) attention_norm: wgpu::Buffer,
    pub(super) query_key_value: Matrix,
    pub(super) attention_output: Matrix,
    pub(super) feed_forward_norm: wgpu::Buffer,
    pub(super) gate_up: Matrix,
    pub(super) down: Matrix,
}

/// All weights.
pub(super) struct Weights {
    pub(super) embedding: Matrix,
    pub(super) layers: Vec<Layer>,
    pub(super) output_norm: wgpu::Buffer,
    /// `None` where the embedding is also the output matrix.
    pub(super) output: Option<Matrix>,
    /// `[context_len][rope_dim / 2]` pairs of cosine and sine.
    pub(super) rotations: wgpu::Buffer,
}

/// Reads tensors, uploads them, and tells how far it is.
pub(super) struct Uploader<'a> {
    pub(super) device: &'a wgpu::Device,
    pub(super) queue: &'a wgpu::Queue,
    pub(super) file: &'a mut GgufFile,
    /// Called with the bytes of the file that have been loaded so far.
    pub(super) progress: &'a mut dyn FnMut(u64),
    pub(super) loaded_bytes: u64,
}

impl Uploader<'_> {
    pub(super) fn weights(&mut self, config: &Config) -> Result<Weights, GpuError> {
        let [embedding_len, vocab_len] = [config.embedding_len, config.vocab_len].map(|len| len as usize);
        let embedding_rows = self.read("token_embd.weight", &[vocab_len, embedding_len])?;
        let embedding =
            self.matrix("embedding", Store::Set, vocab_len, &rows_of(&embedding_rows, embedding_len))?;
        drop(embedding_rows);
        self.flush()?;
        let mut layers = Vec::new();
        for layer in 0..config.num_layers {
            layers.push(self.layer(config, layer)?);
            self.flush()?;
        }
        let output = if self.file.has_tensor("output.weight") {
            let rows = self.read("output.weight", &[vocab_len, embedding_len])?;
            Some(self.matrix("output", Store::Set, vocab_len, &rows_of(&rows, embedding_len))?)
        } else {
            None
        };
        let factors = match self.file.has_tensor("rope_freqs.weight") {
            true => Some(self.read("rope_freqs.weight", &[config.rope_dim as usize / 2])?),
            false => None,
        };
        let rotations = config.rotations(config.context_len, factors.as_deref());
        let weights = Weights {
            embedding,
            layers,
            output_norm: self.vector("output_norm.weight", embedding_len)?,
            output,
            rotations: create(self.device, "rotations", bytemuck::cast_slice(&rotations))?,
        };
        self.file.check_all_taken()?;
        self.flush()?;
        Ok(weights)
    }

    /// Brings what was uploaded to its place: wgpu keeps a copy of it on the host until a submission has completed.
    fn flush(&self) -> Result<(), GpuError> {
        self.queue.submit([]);
        let done = self.device.poll(wgpu::PollType::wait_indefinitely());
        done.map(drop).map_err(|error| GpuError::Lost { reason: error.to_string() })
    }

    fn layer(&mut self, config: &Config, layer: u32) -> Result<Layer, GpuError> {
        let [embedding, feed_forward, query, kv] =
            [config.embedding_len, config.feed_forward_len, config.query_len(), config.kv_len()]
                .map(|len| len as usize);
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        if !config.sinks.is_empty() {
            // The cache has them, which attends.
            self.read(&sinks_name(layer), &[config.num_query_heads as usize])?;
        }
        let q = self.read(&name("attn_q"), &[query, embedding])?;
        let k = self.read(&name("attn_k"), &[kv, embedding])?;
        let v = self.read(&name("attn_v"), &[kv, embedding])?;
        let padding = vec![0.0; embedding];
        let mut query_key_value = rows_of(&q, embedding);
        query_key_value.resize(config.key_start() as usize, &padding);
        query_key_value.extend(rows_of(&k, embedding));
        query_key_value.resize(config.value_start() as usize, &padding);
        query_key_value.extend(rows_of(&v, embedding));
        let gate = self.read(&name("ffn_gate"), &[feed_forward, embedding])?;
        let up = self.read(&name("ffn_up"), &[feed_forward, embedding])?;
        // A group of gates, then the group of their partners: one tile of the kernel holds both.
        let whole_groups = |rows| {
            let mut rows = rows_of(rows, embedding);
            rows.resize(feed_forward.next_multiple_of(GROUP), &padding);
            rows
        };
        let (gates, partners) = (whole_groups(&gate), whole_groups(&up));
        let gate_up: Vec<&[f32]> =
            gates.chunks(GROUP).zip(partners.chunks(GROUP)).flat_map(|(g, p)| [g, p].concat()).collect();
        let attention_output = self.read(&name("attn_output"), &[embedding, query])?;
        let down = self.read(&name("ffn_down"), &[embedding, feed_forward])?;
        Ok(Layer {
            attention_norm: self.vector(&name("attn_norm"), embedding)?,
            query_key_value: self.matrix(
                "query_key_value",
                Store::Set,
                config.query_key_value_len() as usize,
                &query_key_value,
            )?,
            attention_output: self.matrix(
                "attention_output",
                Store::Add,
                embedding,
                &rows_of(&attention_output, query),
            )?,
            feed_forward_norm: self.vector(&name("ffn_norm"), embedding)?,
            gate_up: self.matrix("gate_up", Store::SiluMul, feed_forward, &gate_up)?,
            down: self.matrix("down", Store::Add, embedding, &rows_of(&down, feed_forward))?,
        })
    }

    fn read(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let values = self.file.tensor(name, shape)?;
        self.loaded_bytes += self.file.bytes_of(name);
        (self.progress)(self.loaded_bytes);
        Ok(values)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<wgpu::Buffer, GpuError> {
        let values = self.read(name, &[len])?;
        create(self.device, name, bytemuck::cast_slice(&values))
    }

    /// Uploads the matrix whose outputs have the weights `outputs`, in whole groups; a row of the activations that it
    /// makes has `output_len` elements.
    fn matrix(
        &self,
        label: &str,
        store: Store,
        output_len: usize,
        outputs: &[&[f32]],
    ) -> Result<Matrix, GpuError> {
        let limits = self.device.limits();
        let max_bytes = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        let inputs = outputs[0].len();
        let pair_bytes = (inputs * 2 * GROUP * 4) as u64;
        let part_outputs = (max_bytes / pair_bytes) as usize * 2 * GROUP;
        if part_outputs == 0 {
            let what = format!("{} outputs of {label}", 2 * GROUP);
            return Err(GpuError::TooLarge { what, bytes: pair_bytes, max_bytes });
        }
        // A gate and its partner make one element.
        let per_output = if store == Store::SiluMul { 2 } else { 1 };
        let parts = outputs.chunks(part_outputs).zip((0..).step_by(part_outputs)).map(|(part, first)| {
            let first_output = first / per_output;
            let num_outputs = (part.len() / per_output).min(output_len - first_output);
            let num_groups = part.len().div_ceil(2 * GROUP) * 2;
            let words = [inputs, num_outputs.div_ceil(4) * 4, stride_of(output_len), first_output];
            Ok(Part {
                buffer: create(self.device, label, bytemuck::cast_slice(&in_groups(part, num_groups)))?,
                params: params(self.device, label, &words.map(|elements| elements as u32 / 4))?,
                num_groups: num_groups as u32,
                first_output: first_output as u32,
                num_outputs: num_outputs as u32,
            })
        });
        Ok(Matrix { parts: parts.collect::<Result<_, GpuError>>()?, store })
    }
}

/// Elements from one row of `len` elements to the next: whole vec4.
pub(super) fn stride_of(len: usize) -> usize {
    len.next_multiple_of(4)
}

fn rows_of(matrix: &[f32], row_len: usize) -> Vec<&[f32]> {
    matrix.chunks_exact(row_len).collect()
}

/// `[outputs][inputs]` to `[num_groups][inputs][GROUP]`, zeros after the last output.
fn in_groups(outputs: &[&[f32]], num_groups: usize) -> Vec<f32> {
    let inputs = outputs[0].len();
    let mut grouped = vec![0.0; num_groups * inputs * GROUP];
    for (outputs, group) in outputs.chunks(GROUP).zip(grouped.chunks_exact_mut(inputs * GROUP)) {
        for (input, line) in group.chunks_exact_mut(GROUP).enumerate() {
            for (element, output) in line.iter_mut().zip(outputs) {
                *element = output[input];
            }
        }
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_lie_in_groups_and_padding_is_zero() {
        let matrix: Vec<f32> = (0..33 * 2).map(|i| i as f32).collect();
        let grouped = in_groups(&rows_of(&matrix, 2), 2);
        assert_eq!(grouped.len(), 2 * 2 * GROUP);
        assert_eq!(grouped[..2], [0.0, 2.0]);
        assert_eq!(grouped[GROUP..GROUP + 2], [1.0, 3.0]);
        assert_eq!([grouped[2 * GROUP], grouped[3 * GROUP]], [64.0, 65.0]);
        assert!(grouped[2 * GROUP + 1..3 * GROUP].iter().all(|&padding| padding == 0.0));
    }
}
