//! Small models of random weights, for tests: GGUF files in memory that can be bent out of shape.

use std::io::Cursor;

use candle_core::{
    Device, Tensor,
    quantized::{
        GgmlDType, QTensor,
        gguf_file::{self, Value},
    },
};

use crate::gguf::GgufFile;

/// A model of two layers whose sizes are not multiples of a tile.
pub(crate) struct Synthetic {
    pub(crate) metadata: Vec<(String, Value)>,
    pub(crate) tensors: Vec<(String, QTensor)>,
    state: u32,
}

const EMBEDDING: usize = 40;
const FEED_FORWARD: usize = 72;
const QUERY: usize = 3 * 16;
const KV: usize = 16;
const VOCAB: usize = 257;

impl Synthetic {
    /// A model that loads. `tied` leaves out the output matrix.
    pub(crate) fn new(tied: bool) -> Self {
        let number = |key: &str, value: u32| (key.to_owned(), Value::U32(value));
        let text = |key: &str, value: &str| (key.to_owned(), Value::String(value.to_owned()));
        let metadata = vec![
            text("general.architecture", "llama"),
            number("llama.block_count", 2),
            number("llama.context_length", 64),
            number("llama.embedding_length", EMBEDDING as u32),
            number("llama.feed_forward_length", FEED_FORWARD as u32),
            number("llama.attention.head_count", 3),
            number("llama.attention.head_count_kv", 1),
            number("llama.attention.key_length", 16),
            number("llama.rope.dimension_count", 16),
            ("llama.attention.layer_norm_rms_epsilon".to_owned(), Value::F32(1e-5)),
            number("llama.vocab_size", VOCAB as u32),
            text("tokenizer.ggml.model", "bytes"),
            number("tokenizer.ggml.eos_token_id", 256),
        ];
        let mut model = Self { metadata, tensors: Vec::new(), state: 1 };
        model.push("token_embd.weight", &[VOCAB, EMBEDDING]);
        model.push("output_norm.weight", &[EMBEDDING]);
        if !tied {
            model.push("output.weight", &[VOCAB, EMBEDDING]);
        }
        for layer in 0..2 {
            for (part, shape) in [
                ("attn_norm", &[EMBEDDING][..]),
                ("attn_q", &[QUERY, EMBEDDING]),
                ("attn_k", &[KV, EMBEDDING]),
                ("attn_v", &[KV, EMBEDDING]),
                ("attn_output", &[EMBEDDING, QUERY]),
                ("ffn_norm", &[EMBEDDING]),
                ("ffn_gate", &[FEED_FORWARD, EMBEDDING]),
                ("ffn_up", &[FEED_FORWARD, EMBEDDING]),
                ("ffn_down", &[EMBEDDING, FEED_FORWARD]),
            ] {
                model.push(&format!("blk.{layer}.{part}.weight"), shape);
            }
        }
        model
    }

    /// Adds a tensor of numbers between -1 and 1.
    pub(crate) fn push(&mut self, name: &str, shape: &[usize]) {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.draw()).collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).expect("the shape has as many values");
        let tensor = QTensor::quantize(&tensor, GgmlDType::F32).expect("f32 needs no blocks");
        self.tensors.push((name.to_owned(), tensor));
    }

    fn draw(&mut self) -> f32 {
        self.state = self.state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.state >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Replaces a metadata value.
    pub(crate) fn set(mut self, key: &str, value: Value) -> Self {
        self.metadata.retain(|(name, _)| name != key);
        self.metadata.push((key.to_owned(), value));
        self
    }

    /// Removes a tensor.
    pub(crate) fn without(mut self, tensor: &str) -> Self {
        self.tensors.retain(|(name, _)| name != tensor);
        self
    }

    /// The file's bytes, which live as long as the program.
    pub(crate) fn bytes(&self) -> &'static [u8] {
        let mut file = Cursor::new(Vec::new());
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<_> = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        gguf_file::write(&mut file, &metadata, &tensors).expect("a vector takes all bytes");
        file.into_inner().leak()
    }

    /// The file, opened.
    pub(crate) fn open(&self) -> GgufFile {
        GgufFile::from_bytes("the model", self.bytes()).expect("the header is whole")
    }
}
