//! What a block size costs the device: reads through the table, attention, copies.

use measure::Failure;
use measure::cache::{BenchCache, Case, Sequence, commit_unwritten};
use measure::gpu::Gpu;
use measure::kernels::CacheKernel;
use measure::pairs::{interleaved, repeated};
use measure::stream::Stream;
use measure::twins::{Placement, same_results};
use paged_kv::shaders::LayerPart::Attention;
use paged_kv::{CacheConfig, KvCache, KvType, PagedAttention, StepBuilder};

/// A decode step that every block size and placement is timed on: on hardware over 512 MiB of keys and values, which no
/// cache of the device holds. At most three times as much memory is in use at once.
pub(crate) fn case(gpu: &Gpu, block_size: u32) -> Case {
    let (context, batch, num_layers) = if gpu.is_software { (4096, 1, 1) } else { (8192, 8, 2) };
    let sequences = vec![Sequence { rows: 1, context }; batch];
    Case {
        num_layers,
        num_query_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
        kv_type: KvType::F16,
        block_size,
        sequences,
    }
}

/// Times at one block size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reads {
    /// Bytes per second of a kernel that only reads through the table.
    pub(crate) gather_rate: f64,
    /// The same, as a share of a stream read's of as many bytes, run in turn.
    pub(crate) gather_share: f64,
    /// Our decode time over that of the contiguous twin.
    pub(crate) over_contiguous: f64,
}

pub(crate) fn reads(gpu: &Gpu, block_size: u32, twin: &mut BenchCache<'_>) -> Result<Reads, Failure> {
    let case = case(gpu, block_size);
    let layers = case.num_layers;
    let bytes = case.kv_bytes() * u64::from(layers);
    let mut ours = BenchCache::new(gpu, case, Placement::KeysThenValues)?;
    let gather = CacheKernel::gather_read(gpu, &ours);
    // Also makes the tables known to the bench's kernels.
    ours.time(Attention)?;
    let extents = CacheKernel::gather(gpu, &ours, twin);
    gpu.time(gpu.encoder(), |pass| (0..layers).for_each(|layer| extents.record(pass, layer)))?;
    twin.time(Attention)?;
    same_results("the contiguous twin", &ours.results()?, &twin.results()?)?;
    let stream = Stream::read(gpu, bytes.min(gpu.device.limits().max_storage_buffer_binding_size));
    let pair = interleaved(
        || gpu.time(gpu.encoder(), |pass| (0..layers).for_each(|layer| gather.record(pass, layer))),
        || stream.time(),
    )?;
    let over_contiguous = interleaved(|| ours.time(Attention), || twin.time(Attention))?.ratio;
    let gather_rate = bytes as f64 / pair.first;
    let gather_share = bytes as f64 / stream.bytes() as f64 / pair.ratio;
    Ok(Reads { gather_rate, gather_share, over_contiguous })
}

/// Bytes that a step copies, and seconds of the kernel, when four sequences write into shared blocks at once.
pub(crate) fn copies(gpu: &Gpu, block_size: u32) -> Result<(u64, f64), Failure> {
    let case = case(gpu, block_size);
    let max_tokens = 2 * block_size;
    let config = CacheConfig::for_blocks(8, &case.shape(), case.kv_type)?
        .with_block_size(block_size)?
        .with_max_sequences(8)?
        .with_max_sequence_tokens(max_tokens)?;
    let mut attention = PagedAttention::new(&gpu.device, case.shape(), config.clone())?;
    let mut kv = KvCache::new(config);
    let mut branches = Vec::new();
    for _ in 0..4 {
        let parent = kv.create(max_tokens)?;
        let mut builder = StepBuilder::new(&mut kv);
        builder.push(parent, &vec![0; block_size as usize / 2])?;
        let plan = builder.finish();
        commit_unwritten(gpu, &mut attention, &mut kv, plan)?;
        branches.push(kv.fork(parent, block_size / 2, max_tokens)?);
    }
    let seconds = repeated(|| {
        let mut builder = StepBuilder::new(&mut kv);
        for &branch in &branches {
            builder.push(branch, &[0])?;
        }
        let plan = builder.finish();
        let mut step = attention.prepare(&plan)?;
        let mut encoder = gpu.encoder();
        attention.record_transfers(&mut encoder, &mut step);
        Ok::<_, Failure>(gpu.time(encoder, |pass| attention.record_block_copies(pass, &mut step))?)
    })?;
    Ok((4 * kv.config().bytes_per_block(), seconds))
}
