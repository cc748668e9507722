//! The numbers of a Llama-architecture model, as its metadata states them, and those of its attention that are tensors.
//!
//! They are checked here once (present, positive, dividing evenly), so that the forward passes can trust them.
//!
//! What layers see is said as in other models' files: `attention.sliding_window` is the number of tokens, and
//! `attention.sliding_window_pattern` says of which layers. It is a number, and then every so-manieth layer sees
//! everything, or a list that says of each layer whether it sees a window. Without it, all do.

use candle_core::quantized::gguf_file::Value;

use crate::{
    error::LoadError,
    gguf::{GgufFile, bad_value},
};

/// A Llama, and one whose attention may have windows, a soft-cap and learned sinks: the tests' own. They differ in no more,
/// but a reader that knows Llamas alone would talk nonsense with the latter.
const ARCHITECTURES: [&str; 2] = ["llama", "windowed-llama"];

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
    /// Tokens that a row of each layer sees, its own among them; `None` where it sees everything. `[num_layers]`
    pub windows: Vec<Option<u32>>,
    /// What a logit of attention `x` is capped by: it becomes `cap * tanh(x / cap)`.
    pub soft_cap: Option<f32>,
    /// Of each query head the logit of its learned sink, `[num_layers][num_query_heads]`; empty without sinks.
    pub sinks: Vec<f32>,
}

impl Config {
    /// Reads and checks the metadata of `file`, and its learned sinks.
    ///
    /// # Errors
    /// [`LoadError::Architecture`] for anything but a Llama, [`LoadError::Unsupported`] for its variants with
    /// experts or scaled rotations, and the errors of a metadata or tensor lookup.
    pub fn read(file: &mut GgufFile) -> Result<Self, LoadError> {
        let name = file.string("general.architecture")?;
        let Some(architecture) = ARCHITECTURES.into_iter().find(|&known| known == name) else {
            return Err(LoadError::Architecture { found: name.to_owned(), known: &ARCHITECTURES });
        };
        let mut config = Metadata { file, architecture }.config()?;
        config.sinks = sinks(file, &config)?;
        Ok(config)
    }

    /// The learned sinks of a layer, `[num_query_heads]`; none of a model without them.
    pub fn sinks_of(&self, layer: u32) -> impl Iterator<Item = f32> {
        let heads = self.num_query_heads as usize;
        self.sinks.iter().skip(layer as usize * heads).take(heads).copied()
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

/// The metadata of a model: keys that begin with its architecture.
struct Metadata<'a> {
    file: &'a GgufFile,
    architecture: &'static str,
}

impl Metadata<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn value(&self, name: &str) -> Option<&Value> {
        self.file.value(&self.key(name))
    }

    fn optional_u32(&self, name: &str) -> Result<Option<u32>, LoadError> {
        self.file.optional_u32(&self.key(name))
    }

    fn optional_f32(&self, name: &str) -> Result<Option<f32>, LoadError> {
        self.value(name).map(|_| self.file.f32(&self.key(name))).transpose()
    }

    fn positive(&self, name: &str) -> Result<u32, LoadError> {
        let key = self.key(name);
        match self.file.u32(&key)? {
            0 => Err(bad_value(&key, "at least 1")),
            number => Ok(number),
        }
    }

    fn config(&self) -> Result<Config, LoadError> {
        self.refuse_variants()?;
        let num_query_heads = self.positive("attention.head_count")?;
        let embedding_len = self.positive("embedding_length")?;
        let rope_dimensions = self.optional_u32("rope.dimension_count")?;
        let head_dim = match self.optional_u32("attention.key_length")?.or(rope_dimensions) {
            Some(head_dim) => head_dim,
            None => quotient("embedding length", embedding_len, num_query_heads)?,
        };
        let num_layers = self.positive("block_count")?;
        let config = Config {
            num_layers,
            embedding_len,
            feed_forward_len: self.positive("feed_forward_length")?,
            num_query_heads,
            num_kv_heads: match self.value("attention.head_count_kv") {
                Some(_) => self.positive("attention.head_count_kv")?,
                None => num_query_heads,
            },
            head_dim,
            rope_dim: rope_dimensions.unwrap_or(head_dim),
            rope_base: self.optional_f32("rope.freq_base")?.unwrap_or(10_000.0),
            rms_epsilon: self.file.f32(&self.key("attention.layer_norm_rms_epsilon"))?,
            context_len: self.positive("context_length")?,
            vocab_len: match self.file.value("tokenizer.ggml.tokens") {
                Some(_) => self.file.strings("tokenizer.ggml.tokens")?.len() as u32,
                None => self.positive("vocab_size")?,
            },
            windows: self.windows(num_layers)?,
            soft_cap: self.soft_cap()?,
            sinks: Vec::new(),
        };
        self.check(&config)?;
        Ok(config)
    }

    fn check(&self, config: &Config) -> Result<(), LoadError> {
        quotient("number of query heads", config.num_query_heads, config.num_kv_heads)?;
        quotient("embedding length", config.embedding_len, 8)?;
        quotient("feed-forward length", config.feed_forward_len, 8)?;
        quotient("head size", config.head_dim, 8)?;
        quotient("number of rotated elements", config.rope_dim, 2)?;
        if config.rope_dim > config.head_dim || config.rope_dim == 0 {
            return Err(bad_value(&self.key("rope.dimension_count"), "between 2 and the head size"));
        }
        if self.optional_u32("attention.value_length")?.is_some_and(|length| length != config.head_dim) {
            return Err(LoadError::Unsupported { what: "values of another size than keys".to_owned() });
        }
        Ok(())
    }

    fn windows(&self, num_layers: u32) -> Result<Vec<Option<u32>>, LoadError> {
        // Some files say so of a model without a window.
        let window = self.optional_u32("attention.sliding_window")?.filter(|&tokens| tokens > 0);
        let key = self.key("attention.sliding_window_pattern");
        let windowed: Vec<bool> = match self.file.value(&key) {
            None => vec![true; num_layers as usize],
            Some(Value::Array(values)) if values.len() == num_layers as usize => values
                .iter()
                .map(|value| match value {
                    Value::Bool(windowed) => Ok(*windowed),
                    _ => Err(bad_value(&key, "a number, or true or false for each layer")),
                })
                .collect::<Result<_, _>>()?,
            Some(Value::Array(_)) => {
                return Err(bad_value(&key, "a number, or true or false for each layer"));
            }
            Some(_) => {
                let pattern = self.positive("attention.sliding_window_pattern")?;
                (1..=num_layers).map(|nth| !nth.is_multiple_of(pattern)).collect()
            }
        };
        Ok(windowed.into_iter().map(|windowed| window.filter(|_| windowed)).collect())
    }

    fn soft_cap(&self) -> Result<Option<f32>, LoadError> {
        // Some files say so of a model without a cap.
        let cap = self.optional_f32("attn_logit_softcapping")?.filter(|&cap| cap != 0.0);
        match cap {
            Some(cap) if !(cap > 0.0 && cap.is_finite()) => {
                Err(bad_value(&self.key("attn_logit_softcapping"), "a finite number from 0 on"))
            }
            cap => Ok(cap),
        }
    }

    fn refuse_variants(&self) -> Result<(), LoadError> {
        if self.optional_u32("expert_count")?.unwrap_or(0) > 0 {
            let what = format!("a choice of experts ({})", self.key("expert_count"));
            return Err(LoadError::Unsupported { what });
        }
        if let Some(_scaling) = self.value("rope.scaling.type") {
            let scaling = self.file.string(&self.key("rope.scaling.type"))?;
            if scaling != "none" {
                return Err(LoadError::Unsupported { what: format!("rotations scaled as {scaling:?}") });
            }
        }
        Ok(())
    }
}

/// The logits of the learned sinks: all layers have them, or none.
fn sinks(file: &mut GgufFile, config: &Config) -> Result<Vec<f32>, LoadError> {
    let names: Vec<String> = (0..config.num_layers).map(sinks_name).collect();
    let mut sinks = Vec::new();
    if names.iter().any(|name| file.has_tensor(name)) {
        for name in names {
            sinks.extend(file.tensor(&name, &[config.num_query_heads as usize])?);
        }
    }
    Ok(sinks)
}

/// The tensor of a layer's learned sinks.
pub(crate) fn sinks_name(layer: u32) -> String {
    format!("blk.{layer}.attn_sinks.weight")
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
        windows: Vec::new(),
        soft_cap: None,
        sinks: Vec::new(),
    };

    fn error_of(key: &str, value: Value) -> String {
        let model = Synthetic::new(true).set(key, value);
        Config::read(&mut model.open()).expect_err("the metadata is refused").to_string()
    }

    #[test]
    fn wrong_metadata_is_refused_with_its_key_and_number() {
        for (key, value, message) in [
            (
                "general.architecture",
                Value::String("mamba".to_owned()),
                "the model's architecture is \"mamba\", only \"llama\" and \"windowed-llama\" are supported",
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
        let error = Config::read(&mut model.open()).expect_err("a key is missing");
        assert_eq!(error.to_string(), "the model's metadata has no llama.context_length");
    }

    fn windows_of(model: Synthetic) -> Vec<Option<u32>> {
        Config::read(&mut model.open()).expect("the metadata is right").windows
    }

    #[test]
    fn a_pattern_says_which_layers_see_a_window() {
        let window = || Synthetic::new(true).set("llama.attention.sliding_window", Value::U32(7));
        let with_pattern = |value| windows_of(window().set("llama.attention.sliding_window_pattern", value));
        assert_eq!(windows_of(Synthetic::new(true)), [None, None]);
        assert_eq!(windows_of(window()), [Some(7), Some(7)]);
        assert_eq!(with_pattern(Value::U32(2)), [Some(7), None]);
        assert_eq!(with_pattern(Value::U32(3)), [Some(7), Some(7)]);
        assert_eq!(with_pattern(Value::U32(1)), [None, None]);
        let list = |layers: [bool; 2]| Value::Array(layers.map(Value::Bool).to_vec());
        assert_eq!(with_pattern(list([false, true])), [None, Some(7)]);
        let none = Synthetic::new(true).set("llama.attention.sliding_window", Value::U32(0));
        assert_eq!(windows_of(none), [None, None]);

        let key = "llama.attention.sliding_window_pattern";
        for wrong in [Value::Array(vec![Value::Bool(true); 3]), Value::Array(vec![Value::U32(1); 2])] {
            let message = "is not a number, or true or false for each layer";
            assert_eq!(error_of(key, wrong), format!("the model's {key} {message}"));
        }
        assert_eq!(error_of(key, Value::U32(0)), format!("the model's {key} is not at least 1"));
    }

    #[test]
    fn a_cap_is_positive_and_zero_is_none() {
        let key = "llama.attn_logit_softcapping";
        let cap_of = |cap| {
            let model = Synthetic::new(true).set(key, Value::F32(cap));
            Config::read(&mut model.open()).expect("the metadata is right").soft_cap
        };
        assert_eq!((cap_of(50.0), cap_of(0.0)), (Some(50.0), None));
        for wrong in [-1.0, f32::NAN, f32::INFINITY] {
            assert_eq!(
                error_of(key, Value::F32(wrong)),
                format!("the model's {key} is not a finite number from 0 on")
            );
        }
    }

    #[test]
    fn all_layers_have_sinks_or_none() {
        let mut model = Synthetic::new(true);
        model.push("blk.0.attn_sinks.weight", &[3]);
        let error = Config::read(&mut model.open()).expect_err("the second layer has none");
        assert_eq!(error.to_string(), "the model has no tensor blk.1.attn_sinks.weight");
        model.push("blk.1.attn_sinks.weight", &[3]);
        let config = Config::read(&mut model.open()).expect("both layers have them");
        assert_eq!(config.sinks.len(), 6);
        let of = |layer| config.sinks_of(layer).collect::<Vec<f32>>();
        assert_eq!((of(0), of(1), of(2)), (config.sinks[..3].to_vec(), config.sinks[3..].to_vec(), vec![]));
        assert!(CONFIG.sinks_of(0).next().is_none());
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
