//! Measured rates: reading and copying a buffer, and decoding from a paged cache, as `cargo bench --bench attention`
//! measures them.

use measure::{
    Failure,
    cache::{BenchCache, Case, Sequence, placement_ratio},
    gpu::Gpu,
    kernels::CacheKernel,
    pairs::{interleaved, repeated},
    stream::stream_rates,
    twins::{Placement, same_results},
};
use paged_kv::{KvType, shaders::LayerPart::Attention};
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
    /// Null where it could not be measured.
    pub(crate) decode: Option<Decode>,
    /// On hardware only; null also where they could not be measured.
    pub(crate) ratios: Option<Ratios>,
    /// The kernels that decoded, and those beside them; none where the cache that they read could not be made.
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

/// What block tables cost, and what another place for keys would, each run in turn with the library's kernels.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Ratios {
    /// Decode time over that of the same kernels without block tables, over one extent per sequence.
    pub(crate) over_contiguous: Option<f64>,
    /// Decode time with each head's keys by columns within a block, over that with keys by rows, which is the library's.
    pub(crate) key_columns: Option<f64>,
}

/// A shader variant, and how long it took to make.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Variant {
    pub(crate) name: String,
    pub(crate) creation_seconds: f64,
}

/// Measures what can be measured; also why the rest could not be, by the first reason.
pub(crate) fn measure(gpu: &Gpu) -> (Option<Rates>, Option<Failure>) {
    let streams = match gpu.explain(stream_rates(gpu).map_err(Failure::from)) {
        Ok(streams) => streams,
        Err(failure) => return (None, Some(failure)),
    };
    let mut rates = Rates {
        clock: gpu.clock(),
        software: gpu.is_software,
        stream_bytes: streams.bytes,
        read_bytes_per_s: streams.read,
        copy_bytes_per_s: streams.copy,
        decode: None,
        ratios: None,
        variants: Vec::new(),
    };
    let case = decode_case(gpu);
    let mut failure = None;
    let decoded = rates.decode(gpu, &case);
    keep(gpu.explain(decoded), &mut rates.decode, &mut failure);
    if !gpu.is_software && !gpu.is_lost() {
        // 256 MiB of keys and values, twice: there may be memory for them where there was none for the decode.
        let (ratios, reason) = ratios(gpu, &Case { num_layers: 8, ..case });
        rates.ratios = Some(ratios);
        failure = failure.or(reason);
    }
    (Some(rates), failure)
}

/// Keeps what was measured, or the reason if it is the first one.
fn keep<T>(measured: Result<T, Failure>, kept: &mut Option<T>, failure: &mut Option<Failure>) {
    match measured {
        Ok(value) => *kept = Some(value),
        Err(reason) => {
            failure.get_or_insert(reason);
        }
    }
}

fn decode_case(gpu: &Gpu) -> Case {
    // On hardware 1 GiB of keys and values, which no cache of the device holds.
    let (num_layers, context) = if gpu.is_software { (1, 512) } else { (32, 2048) };
    Case {
        num_layers,
        num_query_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
        kv_type: KvType::F16,
        block_size: paged_kv::DEFAULT_BLOCK_SIZE,
        sequences: vec![Sequence { rows: 1, context }; 4],
    }
}

impl Rates {
    /// Notes the kernels as soon as they are made, and times them.
    fn decode(&mut self, gpu: &Gpu, case: &Case) -> Result<Decode, Failure> {
        let mut cache = BenchCache::new(gpu, case.clone(), Placement::KeysThenValues)?;
        let variants = cache.attention.variants().iter().map(|variant| Variant {
            name: variant.name.clone(),
            creation_seconds: variant.creation_time.as_secs_f64(),
        });
        self.variants = variants.collect();
        let layer_seconds = repeated(|| cache.time(Attention))?;
        let rate = case.kv_bytes() as f64 / layer_seconds;
        Ok(Decode {
            sequences: case.sequences.len() as u32,
            context: case.sequences[0].context,
            layers: case.num_layers,
            layer_seconds,
            bytes_per_s: rate,
            share_of_stream_read: rate / self.read_bytes_per_s,
        })
    }
}

/// Those that could be measured, and why another could not.
pub(crate) fn ratios(gpu: &Gpu, case: &Case) -> (Ratios, Option<Failure>) {
    let (mut ratios, mut failure) = (Ratios::default(), None);
    keep(gpu.explain(over_contiguous(gpu, case)), &mut ratios.over_contiguous, &mut failure);
    if !gpu.is_lost() {
        let columns = placement_ratio(gpu, case, Placement::KeyColumns);
        keep(gpu.explain(columns), &mut ratios.key_columns, &mut failure);
    }
    (ratios, failure)
}

fn over_contiguous(gpu: &Gpu, case: &Case) -> Result<f64, Failure> {
    let mut ours = BenchCache::new(gpu, case.clone(), Placement::KeysThenValues)?;
    // Also makes the tables known to the kernel that copies what they name.
    ours.time(Attention)?;
    let mut extents = BenchCache::new(gpu, case.clone(), Placement::Contiguous)?;
    let gather = CacheKernel::gather(gpu, &ours, &extents);
    gpu.time(gpu.encoder(), |pass| (0..case.num_layers).for_each(|layer| gather.record(pass, layer)))?;
    extents.time(Attention)?;
    same_results("the contiguous twin", &ours.results()?, &extents.results()?)?;
    Ok(interleaved(|| ours.time(Attention), || extents.time(Attention))?.ratio)
}
