//! Attention, against what it is compared with.

use measure::Failure;
use measure::cache::BenchCache;
use measure::cases::Spec;
use measure::gpu::Gpu;
use measure::kernels::CacheKernel;
use measure::pairs::interleaved;
use measure::row::Row;
use measure::stream::StreamRates;
use measure::twins::{Placement, same_results};
use paged_kv::shaders::LayerPart::Attention;

/// Most seconds that one run of a case may take, unless it was asked for by name.
const PATIENCE: f64 = 3.0;
/// Most bytes of a pool on a software adapter.
const SOFTWARE_BYTES: u64 = 1 << 30;

pub(crate) fn attention(gpu: &Gpu, rates: &StreamRates, spec: &Spec, patient: bool) -> Result<Row, Failure> {
    let case = &spec.case;
    let config = case.config()?;
    if gpu.is_software && config.bytes_total() > SOFTWARE_BYTES {
        let mib = config.bytes_total() >> 20;
        return Err(format!("a pool of {mib} MiB on a software adapter, twice").into());
    }
    let mut ours = BenchCache::new(gpu, case.clone(), Placement::KeysThenValues)?;
    let mut twin = BenchCache::new(gpu, case.clone(), Placement::Contiguous)?;
    let gather = CacheKernel::gather(gpu, &ours, &twin);
    let plain = CacheKernel::plain(gpu, &ours);
    let first = ours.time(Attention)? * f64::from(case.num_layers);
    if first > PATIENCE && !patient {
        return Err(format!("one run takes {first:.1} s here; --case with its name runs it").into());
    }
    let plain_seconds = verify(gpu, &mut ours, &mut twin, &gather, &plain, spec.with_rivals)?;

    let over_contiguous = interleaved(|| ours.time(Attention), || twin.time(Attention))?;
    let mut row = Row::new(spec, rates.read, case.kv_bytes(), over_contiguous.first);
    row.dispatches = ours.dispatches();
    row.kv_bytes_loaded = Some(ours.bytes_loaded());
    row.plain_kv_bytes_loaded = Some(plain_bytes(spec));
    row.over_contiguous = Some(over_contiguous.ratio);
    if spec.with_rivals {
        let gathered = interleaved(|| gather_then_dense(gpu, &gather, &mut twin), || ours.time(Attention))?;
        row.gather_over_ours = Some(gathered.ratio);
        if plain_seconds < PATIENCE || patient {
            let layers = case.num_layers;
            let plain = interleaved(|| run_plain(gpu, &plain, layers), || ours.time(Attention))?;
            row.plain_over_ours = Some(plain.ratio);
        }
    }
    Ok(row)
}

fn gather_then_dense(gpu: &Gpu, gather: &CacheKernel, twin: &mut BenchCache<'_>) -> Result<f64, Failure> {
    let mut step = twin.prepare()?;
    let mut encoder = gpu.encoder();
    twin.attention.record_transfers(&mut encoder, &mut step);
    let layers = twin.case.num_layers;
    let seconds = gpu.time(encoder, |pass| {
        for layer in 0..layers {
            gather.record(pass, layer);
            twin.record_layer(pass, &mut step, layer, Attention);
        }
    })?;
    Ok(seconds / f64::from(layers))
}

fn run_plain(gpu: &Gpu, plain: &CacheKernel, layers: u32) -> Result<f64, Failure> {
    let seconds = gpu.time(gpu.encoder(), |pass| (0..layers).for_each(|layer| plain.record(pass, layer)))?;
    Ok(seconds / f64::from(layers))
}

/// Checks that all give our results, on the same blocks; the seconds that the plain kernel took.
fn verify(
    gpu: &Gpu,
    ours: &mut BenchCache<'_>,
    twin: &mut BenchCache<'_>,
    gather: &CacheKernel,
    plain: &CacheKernel,
    with_plain: bool,
) -> Result<f64, Failure> {
    ours.time(Attention)?;
    let expected = ours.results()?;
    gather_then_dense(gpu, gather, twin)?;
    same_results("the contiguous twin", &expected, &twin.results()?)?;
    if !with_plain {
        return Ok(0.0);
    }
    // Into our own output, which must therefore be read before.
    let seconds = run_plain(gpu, plain, ours.case.num_layers)? * f64::from(ours.case.num_layers);
    same_results("the plain kernel", &expected, &ours.results()?)?;
    Ok(seconds)
}

/// Bytes of keys and values that the plain kernel loads: every query head its own.
fn plain_bytes(spec: &Spec) -> u64 {
    let keys: u64 = spec
        .case
        .sequences
        .iter()
        .map(|sequence| {
            let past = u64::from(sequence.context - sequence.rows);
            let rows = u64::from(sequence.rows);
            rows * past + rows * (rows + 1) / 2
        })
        .sum();
    keys * u64::from(spec.case.num_query_heads) * spec.case.row_bytes()
}
