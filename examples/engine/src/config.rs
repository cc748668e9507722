//! The numbers of a Llama-architecture model, as its metadata states them.
//!
//! They are checked here once (present, positive, dividing evenly), so that the forward passes can trust them.

use crate::{
    error::LoadError,
    gguf::{GgufFile, bad_value},
};

/// Elements of f32 in 256 bytes, the largest alignment that a device may ask of a storage binding.
const PART_ALIGNMENT: u32 = 64;

/// Sizes and constants of one model. Counts are of elements unless they say otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Transformer layers.
    pub num_layers: u32,
    /// Elements of the residual stream, a multiple of 8.
    pub embedding_len: u32,
    /// Elements between the two halves of a layer's feed-forward part, a multiple of 8.
    pub feed_forward_len: u32,
    /// Query heads of each layer.
    pub num_query_heads: u32,
    /// Key and value heads of each layer; divides `num_query_heads`.
    pub num_kv_heads: u32,
    /// Elements of one head, a multiple of 8.
    pub head_dim: u32,
    /// Elements of a head that are rotated by position, from its start: an even number.
    pub rope_dim: u32,
    /// Base of the rotation's wavelengths.
    pub rope_base: f32,
    /// Added to the mean square before its root in every RMS norm.
    pub rms_epsilon: f32,
    /// Most tokens that a sequence may have.
    pub context_len: u32,
    /// Entries of the vocabulary.
    pub vocab_len: u32,
}

impl Config {
    /// Reads and checks the metadata of `file`.
    ///
    /// # Errors
    /// [`LoadError::Architecture`] for anything but a Llama, [`LoadError::Unsupported`] for its variants with
    /// experts or scaled rotations, and the errors of a metadata lookup.
    pub fn read(file: &GgufFile) -> Result<Self, LoadError> {
        let architecture = file.string("general.architecture")?;
        if architecture != "llama" {
            return Err(LoadError::Architecture { found: architecture.to_owned() });
        }
        refuse_variants(file)?;
        let num_query_heads = positive(file, "llama.attention.head_count")?;
        let embedding_len = positive(file, "llama.embedding_length")?;
        let rope_dimensions = file.optional_u32("llama.rope.dimension_count")?;
        let head_dim = match file.optional_u32("llama.attention.key_length")?.or(rope_dimensions) {
            Some(head_dim) => head_dim,
            None => quotient("embedding length", embedding_len, num_query_heads)?,
        };
        let config = Self {
            num_layers: positive(file, "llama.block_count")?,
            embedding_len,
            feed_forward_len: positive(file, "llama.feed_forward_length")?,
            num_query_heads,
            num_kv_heads: match file.value("llama.attention.head_count_kv") {
                Some(_) => positive(file, "llama.attention.head_count_kv")?,
                None => num_query_heads,
            },
            head_dim,
            rope_dim: rope_dimensions.unwrap_or(head_dim),
            rope_base: match file.value("llama.rope.freq_base") {
                Some(_) => file.f32("llama.rope.freq_base")?,
                None => 10_000.0,
            },
            rms_epsilon: file.f32("llama.attention.layer_norm_rms_epsilon")?,
            context_len: positive(file, "llama.context_length")?,
            vocab_len: match file.value("tokenizer.ggml.tokens") {
                Some(_) => file.strings("tokenizer.ggml.tokens")?.len() as u32,
                None => positive(file, "llama.vocab_size")?,
            },
        };
        config.check(file)?;
        Ok(config)
    }

    fn check(&self, file: &GgufFile) -> Result<(), LoadError> {
        quotient("number of query heads", self.num_query_heads, self.num_kv_heads)?;
        quotient("embedding length", self.embedding_len, 8)?;
        quotient("feed-forward length", self.feed_forward_len, 8)?;
        quotient("head size", self.head_dim, 8)?;
        quotient("number of rotated elements", self.rope_dim, 2)?;
        if self.rope_dim > self.head_dim || self.rope_dim == 0 {
            return Err(bad_value("llama.rope.dimension_count", "between 2 and the head size"));
        }
        if file.optional_u32("llama.attention.value_length")?.is_some_and(|length| length != self.head_dim) {
            return Err(LoadError::Unsupported { what: "values of another size than keys".to_owned() });
        }
        Ok(())
    }

    /// Elements of one token's queries: `num_query_heads * head_dim`.
    pub fn query_len(&self) -> u32 {
        self.num_query_heads * self.head_dim
    }

    /// Elements of one token's keys, and of its values: `num_kv_heads * head_dim`.
    pub fn kv_len(&self) -> u32 {
        self.num_kv_heads * self.head_dim
    }

    /// Where keys begin in a row that holds queries, then keys, then values: each part starts on a multiple of 256
    /// bytes, so that it can be bound by itself on every device.
    pub fn key_start(&self) -> u32 {
        self.query_len().next_multiple_of(PART_ALIGNMENT)
    }

    /// Where values begin in such a row.
    pub fn value_start(&self) -> u32 {
        self.key_start() + self.kv_len().next_multiple_of(PART_ALIGNMENT)
    }

    /// Elements from one such row to the next.
    pub fn query_key_value_len(&self) -> u32 {
        self.value_start() + self.kv_len().next_multiple_of(PART_ALIGNMENT)
    }

    /// Cosine and sine of every rotation, `[num_positions][rope_dim / 2]`: pair `i` of a head turns by
    /// `position * base^(-2 i / rope_dim) / factor_i` (RoFormer, section 3.4.2), worked out in f64.
    ///
    /// `factors` are the divisors that some models store as `rope_freqs.weight`; without them every factor is 1.
    pub fn rotations(&self, num_positions: u32, factors: Option<&[f32]>) -> Vec<[f32; 2]> {
        let num_pairs = self.rope_dim / 2;
        let frequencies: Vec<f64> = (0..num_pairs)
            .map(|pair| {
                let exponent = -2.0 * f64::from(pair) / f64::from(self.rope_dim);
                let factor = factors.map_or(1.0, |factors| f64::from(factors[pair as usize]));
                f64::from(self.rope_base).powf(exponent) / factor
            })
            .collect();
        let turn = |position: u32, frequency: f64| {
            let (sine, cosine) = (f64::from(position) * frequency).sin_cos();
            [cosine as f32, sine as f32]
        };
        (0..num_positions).flat_map(|position| frequencies.iter().map(move |&f| turn(position, f))).collect()
    }
}

fn refuse_variants(file: &GgufFile) -> Result<(), LoadError> {
    if file.optional_u32("llama.expert_count")?.unwrap_or(0) > 0 {
        return Err(LoadError::Unsupported { what: "a choice of experts (llama.expert_count)".to_owned() });
    }
    if let Some(_scaling) = file.value("llama.rope.scaling.type") {
        let scaling = file.string("llama.rope.scaling.type")?;
        if scaling != "none" {
            return Err(LoadError::Unsupported { what: format!("rotations scaled as {scaling:?}") });
        }
    }
    Ok(())
}

fn positive(file: &GgufFile, key: &str) -> Result<u32, LoadError> {
    match file.u32(key)? {
        0 => Err(bad_value(key, "at least 1")),
        number => Ok(number),
    }
}

fn quotient(what: &'static str, value: u32, of: u32) -> Result<u32, LoadError> {
    if of == 0 || !value.is_multiple_of(of) {
        Err(LoadError::NotMultiple { what, value, of })
    } else {
        Ok(value / of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::Synthetic;
    use candle_core::quantized::gguf_file::Value;

    const CONFIG: Config = Config {
        num_layers: 1,
        embedding_len: 24,
        feed_forward_len: 64,
        num_query_heads: 3,
        num_kv_heads: 1,
        head_dim: 8,
        rope_dim: 8,
        rope_base: 10_000.0,
        rms_epsilon: 1e-5,
        context_len: 32,
        vocab_len: 257,
    };

    fn error_of(key: &str, value: Value) -> String {
        let model = Synthetic::new(true).set(key, value);
        Config::read(&model.open()).expect_err("the metadata is refused").to_string()
    }

    #[test]
    fn wrong_metadata_is_refused_with_its_key_and_number() {
        for (key, value, message) in [
            (
                "general.architecture",
                Value::String("mamba".to_owned()),
                "the model's architecture is \"mamba\", only \"llama\" is supported",
            ),
            ("llama.block_count", Value::U32(0), "the model's llama.block_count is not at least 1"),
            (
                "llama.block_count",
                Value::F32(2.0),
                "the model's llama.block_count is not a whole number of 32 bits",
            ),
            (
                "llama.attention.head_count_kv",
                Value::U32(2),
                "the model's number of query heads is 3, which is not a multiple of 2",
            ),
            (
                "llama.embedding_length",
                Value::U32(42),
                "the model's embedding length is 42, which is not a multiple of 8",
            ),
            (
                "llama.rope.scaling.type",
                Value::String("yarn".to_owned()),
                "the model needs rotations scaled as \"yarn\", which is not supported",
            ),
            (
                "llama.expert_count",
                Value::U32(8),
                "the model needs a choice of experts (llama.expert_count), which is not supported",
            ),
        ] {
            assert_eq!(error_of(key, value), message);
        }
        let mut model = Synthetic::new(true);
        model.metadata.retain(|(key, _)| key != "llama.context_length");
        let error = Config::read(&model.open()).expect_err("a key is missing");
        assert_eq!(error.to_string(), "the model's metadata has no llama.context_length");
    }

    #[test]
    fn queries_keys_and_values_of_a_row_can_be_bound_apart() {
        assert_eq!((CONFIG.query_len(), CONFIG.kv_len()), (24, 8));
        assert_eq!((CONFIG.key_start(), CONFIG.value_start(), CONFIG.query_key_value_len()), (64, 128, 192));
    }

    #[test]
    fn a_pair_turns_by_its_position_times_its_frequency() {
        let rotations = CONFIG.rotations(3, None);
        assert_eq!(rotations.len(), 3 * 4);
        assert_eq!(rotations[..4], [[1.0, 0.0]; 4]);
        // Position 2, pair 1: base^(-2 / 8) = 1/10.
        assert_eq!(rotations[2 * 4 + 1], [0.2f64.cos() as f32, 0.2f64.sin() as f32]);
        let factors = [1.0, 2.0, 1.0, 1.0];
        assert_eq!(
            CONFIG.rotations(3, Some(&factors))[2 * 4 + 1],
            [0.1f64.cos() as f32, 0.1f64.sin() as f32]
        );
    }
}
