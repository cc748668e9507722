//! The model's forward pass on the CPU, but for attention.
//!
//! The same arithmetic as the kernels of [`gpu`](crate::gpu) in the same order of operations, for machines without
//! an adapter and to check the kernels by. The large products are `candle-core`'s, on all cores; the rest is plain
//! loops. As on a GPU, the caller attends: nothing here knows a cache.

use candle_core::{Device, Tensor};

use crate::{
    config::{Config, sinks_name},
    error::LoadError,
    gguf::GgufFile,
};

/// A model in host memory.
#[derive(Debug)]
pub struct CpuModel {
    config: Config,
    /// `[vocab_len][embedding_len]`
    embedding: Tensor,
    layers: Vec<Layer>,
    output_norm: Vec<f32>,
    /// The output matrix where it is not the embedding.
    output: Option<Tensor>,
    /// `[context_len][rope_dim / 2]`
    rotations: Vec<[f32; 2]>,
}

/// One layer's weights; matrices are `[outputs][inputs]`.
#[derive(Debug)]
struct Layer {
    attention_norm: Vec<f32>,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_output: Tensor,
    feed_forward_norm: Vec<f32>,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

/// One layer's rotated queries, its rotated keys, and its values, row after row, for the caller's attention.
#[derive(Clone, Debug)]
pub struct QueryKeyValue {
    /// `[rows][query_len]`
    pub query: Vec<f32>,
    /// `[rows][kv_len]`
    pub key: Vec<f32>,
    /// `[rows][kv_len]`
    pub value: Vec<f32>,
}

impl CpuModel {
    /// Loads `file`. `progress` is called with the bytes loaded so far, of [`GgufFile::tensor_bytes`].
    ///
    /// # Errors
    /// [`LoadError`] for a file that is no such model.
    pub fn load(
        file: &mut GgufFile,
        config: Config,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, LoadError> {
        let mut loader = Loader { file, progress, loaded_bytes: 0 };
        let [embedding, vocab] = [config.embedding_len, config.vocab_len].map(|len| len as usize);
        let factors = match loader.file.has_tensor("rope_freqs.weight") {
            true => Some(loader.vector("rope_freqs.weight", config.rope_dim as usize / 2)?),
            false => None,
        };
        let model = Self {
            embedding: loader.matrix("token_embd.weight", vocab, embedding)?,
            layers: (0..config.num_layers)
                .map(|layer| loader.layer(&config, layer))
                .collect::<Result<_, _>>()?,
            output_norm: loader.vector("output_norm.weight", embedding)?,
            output: match loader.file.has_tensor("output.weight") {
                true => Some(loader.matrix("output.weight", vocab, embedding)?),
                false => None,
            },
            rotations: config.rotations(config.context_len, factors.as_deref()),
            config,
        };
        loader.file.check_all_taken()?;
        Ok(model)
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// One step: for each row its token and position, and the rows that need logits, whose logits are returned,
    /// `[logit_rows][vocab_len]`. `attend` is given a layer's index and its queries, keys and values, and returns
    /// attention's output, `[rows][query_len]`.
    ///
    /// # Errors
    /// What `candle-core` says, should a product fail.
    pub fn forward(
        &self,
        token_ids: &[u32],
        positions: &[u32],
        logit_rows: &[u32],
        mut attend: impl FnMut(u32, QueryKeyValue) -> Vec<f32>,
    ) -> candle_core::Result<Vec<f32>> {
        let config = &self.config;
        let embedding_len = config.embedding_len as usize;
        let mut residual = self.embed(token_ids)?;
        for (layer, index) in self.layers.iter().zip(0..) {
            let normed = rms_norm(&residual, &layer.attention_norm, config.rms_epsilon);
            let mut query = multiply(&normed, &layer.query)?;
            let mut key = multiply(&normed, &layer.key)?;
            let value = multiply(&normed, &layer.value)?;
            self.rope(&mut query, config.num_query_heads, positions);
            self.rope(&mut key, config.num_kv_heads, positions);
            let attended = attend(index, QueryKeyValue { query, key, value });
            add(&mut residual, &multiply(&attended, &layer.attention_output)?);
            let normed = rms_norm(&residual, &layer.feed_forward_norm, config.rms_epsilon);
            let mut hidden = multiply(&normed, &layer.gate)?;
            silu_mul(&mut hidden, &multiply(&normed, &layer.up)?);
            add(&mut residual, &multiply(&hidden, &layer.down)?);
        }
        if logit_rows.is_empty() {
            return Ok(Vec::new());
        }
        let rows: Vec<f32> = logit_rows
            .iter()
            .flat_map(|&row| &residual[row as usize * embedding_len..][..embedding_len])
            .copied()
            .collect();
        let normed = rms_norm(&rows, &self.output_norm, config.rms_epsilon);
        multiply(&normed, self.output.as_ref().unwrap_or(&self.embedding))
    }

    fn embed(&self, token_ids: &[u32]) -> candle_core::Result<Vec<f32>> {
        let ids = Tensor::from_slice(token_ids, token_ids.len(), &Device::Cpu)?;
        self.embedding.index_select(&ids, 0)?.flatten_all()?.to_vec1()
    }

    /// Turns the pairs of `heads` (`[rows][num_heads][head_dim]`) by their rows' positions.
    fn rope(&self, heads: &mut [f32], num_heads: u32, positions: &[u32]) {
        let (head_dim, rope_dim) = (self.config.head_dim as usize, self.config.rope_dim as usize);
        let rows = heads.chunks_exact_mut(num_heads as usize * head_dim);
        for (row, &position) in rows.zip(positions) {
            let turns = &self.rotations[position as usize * rope_dim / 2..][..rope_dim / 2];
            for head in row.chunks_exact_mut(head_dim) {
                for (pair, [cosine, sine]) in head.chunks_exact_mut(2).zip(turns) {
                    let [x, y] = [pair[0], pair[1]];
                    pair[0] = x * cosine - y * sine;
                    pair[1] = x * sine + y * cosine;
                }
            }
        }
    }
}

/// Reads tensors and tells how far it is.
struct Loader<'a> {
    file: &'a mut GgufFile,
    progress: &'a mut dyn FnMut(u64),
    loaded_bytes: u64,
}

impl Loader<'_> {
    fn layer(&mut self, config: &Config, layer: u32) -> Result<Layer, LoadError> {
        let [embedding, feed_forward, query, kv] =
            [config.embedding_len, config.feed_forward_len, config.query_len(), config.kv_len()]
                .map(|len| len as usize);
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        if !config.sinks.is_empty() {
            // The caller has them, who attends.
            self.vector(&sinks_name(layer), config.num_query_heads as usize)?;
        }
        Ok(Layer {
            attention_norm: self.vector(&name("attn_norm"), embedding)?,
            query: self.matrix(&name("attn_q"), query, embedding)?,
            key: self.matrix(&name("attn_k"), kv, embedding)?,
            value: self.matrix(&name("attn_v"), kv, embedding)?,
            attention_output: self.matrix(&name("attn_output"), embedding, query)?,
            feed_forward_norm: self.vector(&name("ffn_norm"), embedding)?,
            gate: self.matrix(&name("ffn_gate"), feed_forward, embedding)?,
            up: self.matrix(&name("ffn_up"), feed_forward, embedding)?,
            down: self.matrix(&name("ffn_down"), embedding, feed_forward)?,
        })
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        self.read(name, &[len])
    }

    fn matrix(&mut self, name: &str, outputs: usize, inputs: usize) -> Result<Tensor, LoadError> {
        let values = self.read(name, &[outputs, inputs])?;
        let matrix = Tensor::from_vec(values, (outputs, inputs), &Device::Cpu);
        matrix.map_err(|source| LoadError::Malformed { file: name.to_owned(), source })
    }

    fn read(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let values = self.file.tensor(name, shape)?;
        self.loaded_bytes += self.file.bytes_of(name);
        (self.progress)(self.loaded_bytes);
        Ok(values)
    }
}

/// `rows` (`[rows][inputs]`) times `matrix` (`[outputs][inputs]`), `[rows][outputs]`.
fn multiply(rows: &[f32], matrix: &Tensor) -> candle_core::Result<Vec<f32>> {
    let inputs = matrix.dim(1)?;
    let rows = Tensor::from_slice(rows, (rows.len() / inputs, inputs), &Device::Cpu)?;
    rows.matmul(&matrix.t()?)?.flatten_all()?.to_vec1()
}

fn rms_norm(rows: &[f32], weight: &[f32], epsilon: f32) -> Vec<f32> {
    let mut normed = Vec::with_capacity(rows.len());
    for row in rows.chunks_exact(weight.len()) {
        let sum: f32 = row.iter().map(|x| x * x).sum();
        let factor = 1.0 / (sum / weight.len() as f32 + epsilon).sqrt();
        normed.extend(row.iter().zip(weight).map(|(x, weight)| x * factor * weight));
    }
    normed
}

fn silu_mul(gates: &mut [f32], partners: &[f32]) {
    for (gate, partner) in gates.iter_mut().zip(partners) {
        *gate = *gate / (1.0 + (-*gate).exp()) * partner;
    }
}

fn add(sums: &mut [f32], terms: &[f32]) {
    for (sum, term) in sums.iter_mut().zip(terms) {
        *sum += term;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::Synthetic;

    fn load(model: &Synthetic) -> Result<CpuModel, LoadError> {
        let config = Config::read(&mut model.open())?;
        let mut file = model.open();
        CpuModel::load(&mut file, config, &mut |_| ())
    }

    #[test]
    fn a_model_loads_whole_or_not_at_all() {
        let whole = Synthetic::new(true);
        let mut seen = Vec::new();
        let mut file = whole.open();
        let config = Config::read(&mut file).expect("the model is whole");
        CpuModel::load(&mut file, config, &mut |bytes| seen.push(bytes)).expect("the model is whole");
        assert!(seen.is_sorted());
        assert_eq!(seen.last(), Some(&file.tensor_bytes()));

        let error =
            load(&Synthetic::new(true).without("blk.1.ffn_up.weight")).expect_err("a tensor is missing");
        assert_eq!(error.to_string(), "the model has no tensor blk.1.ffn_up.weight");
        let mut biased = Synthetic::new(true);
        biased.push("blk.0.attn_q.bias", &[48]);
        let error = load(&biased).expect_err("a bias is not supported");
        assert_eq!(error.to_string(), "the model needs the tensor blk.0.attn_q.bias, which is not supported");
    }
}
