//! The model's weights on the device.
//!
//! A matrix of the file has one row of inputs per output. Here it is stored the other way round, `[inputs][outputs]`, so
//! that neighbouring invocations, which make neighbouring outputs, read neighbouring elements. Outputs are padded with
//! zeros to whole tiles, and a matrix larger than a binding may be is cut into parts by outputs: 128 MiB, the default
//! limit, hold any model whose one row of 8 outputs fits.

use super::{
    buffers::{GpuError, create, params},
    matmul::{COLUMNS4_QUANTUM, Store},
};
use crate::{config::Config, error::LoadError, gguf::GgufFile};

/// Outputs that a part has a multiple of.
const QUANTUM: usize = 4 * COLUMNS4_QUANTUM as usize;

/// A matrix, cut by outputs.
pub(super) struct Matrix {
    pub(super) parts: Vec<Part>,
    pub(super) store: Store,
}

/// Consecutive outputs of a matrix in one buffer, `[inputs][4 * columns4]`.
pub(super) struct Part {
    pub(super) buffer: wgpu::Buffer,
    /// The kernel's `Params`.
    pub(super) params: wgpu::Buffer,
    pub(super) columns4: u32,
    pub(super) first_output: u32,
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
        let layers = (0..config.num_layers).map(|layer| self.layer(config, layer)).collect::<Result<_, _>>()?;
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
        Ok(weights)
    }

    fn layer(&mut self, config: &Config, layer: u32) -> Result<Layer, GpuError> {
        let [embedding, feed_forward, query, kv] =
            [config.embedding_len, config.feed_forward_len, config.query_len(), config.kv_len()]
                .map(|len| len as usize);
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let q = self.read(&name("attn_q"), &[query, embedding])?;
        let k = self.read(&name("attn_k"), &[kv, embedding])?;
        let v = self.read(&name("attn_v"), &[kv, embedding])?;
        let query_key_value: Vec<&[f32]> =
            [&q, &k, &v].into_iter().flat_map(|rows| rows_of(rows, embedding)).collect();
        let gate = self.read(&name("ffn_gate"), &[feed_forward, embedding])?;
        let up = self.read(&name("ffn_up"), &[feed_forward, embedding])?;
        // Four gates, then their four partners: one tile of the kernel holds both.
        let gate_up: Vec<&[f32]> = rows_of(&gate, embedding)
            .chunks(4)
            .zip(rows_of(&up, embedding).chunks(4))
            .flat_map(|(gates, partners)| [gates, partners].concat())
            .collect();
        let attention_output = self.read(&name("attn_output"), &[embedding, query])?;
        let down = self.read(&name("ffn_down"), &[embedding, feed_forward])?;
        Ok(Layer {
            attention_norm: self.vector(&name("attn_norm"), embedding)?,
            query_key_value: self.matrix("query_key_value", Store::Set, query + 2 * kv, &query_key_value)?,
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

    /// Uploads the matrix whose outputs have the weights `outputs`; the product of one row with it has `output_len`
    /// elements.
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
        let quantum_bytes = (inputs * QUANTUM * 4) as u64;
        let part_outputs = (max_bytes / quantum_bytes) as usize * QUANTUM;
        if part_outputs == 0 {
            let what = "eight outputs of a matrix".to_owned();
            return Err(GpuError::TooLarge { what, bytes: quantum_bytes, max_bytes });
        }
        let output_stride = output_len.next_multiple_of(QUANTUM);
        let parts = outputs.chunks(part_outputs).zip(0u32..).map(|(part, index)| {
            let columns4 = part.len().next_multiple_of(QUANTUM) as u32 / 4;
            let first_output = index * part_outputs as u32;
            // A gate and its partner make one element.
            let output_offset = if store == Store::SiluMul { first_output / 2 } else { first_output };
            Ok(Part {
                buffer: create(self.device, label, bytemuck::cast_slice(&transpose(part, columns4 as usize * 4)))?,
                params: params(
                    self.device,
                    label,
                    &[inputs as u32 / 4, columns4, output_stride as u32 / 4, output_offset / 4],
                )?,
                columns4,
                first_output,
            })
        });
        Ok(Matrix { parts: parts.collect::<Result<_, GpuError>>()?, store })
    }
}

fn rows_of(matrix: &[f32], row_len: usize) -> Vec<&[f32]> {
    matrix.chunks_exact(row_len).collect()
}

/// `[outputs][inputs]` to `[inputs][stride]`, zeros between the last output and the stride.
fn transpose(outputs: &[&[f32]], stride: usize) -> Vec<f32> {
    let mut transposed = vec![0.0; outputs[0].len() * stride];
    // A few outputs at a time: their rows are read, and the lines they go to written, once.
    for (group, first) in outputs.chunks(16).zip((0..).step_by(16)) {
        for (input, line) in transposed.chunks_exact_mut(stride).enumerate() {
            for (element, output) in line[first..].iter_mut().zip(group) {
                *element = output[input];
            }
        }
    }
    transposed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposing_pads_every_input_with_zeros() {
        let matrix: Vec<f32> = (0..17 * 2).map(|i| i as f32).collect();
        let transposed = transpose(&rows_of(&matrix, 2), 24);
        assert_eq!(transposed.len(), 48);
        assert_eq!([transposed[0], transposed[1], transposed[16]], [0.0, 2.0, 32.0]);
        assert_eq!([transposed[24], transposed[40]], [1.0, 33.0]);
        assert!(transposed[17..24].iter().all(|&padding| padding == 0.0));
    }
}
