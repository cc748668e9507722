//! Measured rates: reading and copying a buffer, and decoding from a paged cache, as `cargo bench --bench attention`
//! measures them.

use bench_support::{
    Failure,
    cache::{BenchCache, Case, Sequence},
    gpu::Gpu,
    pairs::repeated,
    stream::stream_rates,
    twins::Placement,
};
use paged_kv::{KvType, shaders::LayerPart};
use serde::Serialize;

/// What was measured. On a software adapter only ratios mean anything.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Rates {
    pub(crate) clock: &'static str,
    pub(crate) software: bool,
    /// Bytes of the buffer that was read and copied.
    pub(crate) stream_bytes: u64,
    pub(crate) read_bytes_per_s: f64,
    /// Bytes read and bytes written, both counted.
    pub(crate) copy_bytes_per_s: f64,
    pub(crate) decode: Decode,
    /// The kernels that decoded, and those beside them.
    pub(crate) variants: Vec<Variant>,
}

/// One decode step of Llama-3.1-8B's heads: 32 query and 8 kv heads of 128, f16, in scattered blocks of 16 tokens.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Decode {
    pub(crate) sequences: u32,
    pub(crate) context: u32,
    pub(crate) layers: u32,
    /// Attention alone, for one layer.
    pub(crate) layer_seconds: f64,
    /// Keys and values, each counted once.
    pub(crate) bytes_per_s: f64,
    pub(crate) share_of_stream_read: f64,
}

/// A shader variant, and how long it took to make.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Variant {
    pub(crate) name: String,
    pub(crate) creation_seconds: f64,
}

pub(crate) fn measure(gpu: &Gpu) -> Result<Rates, Failure> {
    let streams = stream_rates(gpu)?;
    // On hardware 1 GiB of keys and values, which no cache of the device holds.
    let (num_layers, context) = if gpu.is_software { (1, 512) } else { (32, 2048) };
    let sequences = 4;
    let case = Case {
        num_layers,
        num_query_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
        kv_type: KvType::F16,
        block_size: paged_kv::DEFAULT_BLOCK_SIZE,
        sequences: vec![Sequence { rows: 1, context }; sequences as usize],
    };
    let layer_bytes = case.kv_bytes() as f64;
    let mut cache = BenchCache::new(gpu, case, Placement::KeysThenValues)?;
    let variants = cache.attention.variants().iter().map(|variant| Variant {
        name: variant.name.clone(),
        creation_seconds: variant.creation_time.as_secs_f64(),
    });
    let variants = variants.collect();
    let layer_seconds = repeated(|| cache.time(LayerPart::Attention))?;
    let rate = layer_bytes / layer_seconds;
    Ok(Rates {
        clock: gpu.clock(),
        software: gpu.is_software,
        stream_bytes: streams.bytes,
        read_bytes_per_s: streams.read,
        copy_bytes_per_s: streams.copy,
        decode: Decode {
            sequences,
            context,
            layers: num_layers,
            layer_seconds,
            bytes_per_s: rate,
            share_of_stream_read: rate / streams.read,
        },
        variants,
    })
}
