//! Append, block copies and swaps.

use std::time::Instant;

use measure::Failure;
use measure::cache::{BenchCache, commit_unwritten};
use measure::cases::Spec;
use measure::gpu::Gpu;
use measure::pairs::{PAIRS, median, repeated};
use measure::row::Row;
use measure::stream::StreamRates;
use measure::twins::Placement;
use paged_kv::shaders::LayerPart::Append;
use paged_kv::{CacheConfig, KvCache, PagedAttention, StepBuilder};

/// New rows into their slots: f32 read, the cache's type written.
pub(crate) fn append(gpu: &Gpu, rates: &StreamRates, spec: &Spec) -> Result<Row, Failure> {
    let case = &spec.case;
    let mut cache = BenchCache::new(gpu, case.clone(), Placement::KeysThenValues)?;
    let seconds = repeated(|| cache.time(Append))?;
    let elements = u64::from(case.rows() * case.num_kv_heads * 2 * case.head_dim);
    let bytes = elements * u64::from(4 + case.kv_type.bits() / 8);
    let mut row = Row::new(spec, rates.copy, bytes, seconds);
    row.dispatches = cache.dispatches();
    Ok(row)
}

/// One block of each sequence copied because a branch writes into it.
pub(crate) fn block_copy(gpu: &Gpu, rates: &StreamRates, spec: &Spec) -> Result<Row, Failure> {
    let case = &spec.case;
    let num_copies = case.sequences.len() as u32;
    let config = CacheConfig::for_blocks(4 * num_copies, &case.shape(), case.kv_type)?
        .with_max_sequences(2 * num_copies)?
        .with_max_sequence_tokens(2 * case.block_size)?;
    let mut attention = PagedAttention::new(&gpu.device, case.shape(), config.clone())?;
    let mut kv = KvCache::new(config);
    let mut branches = Vec::new();
    for _ in 0..num_copies {
        let parent = kv.create(2 * case.block_size)?;
        let mut builder = StepBuilder::new(&mut kv);
        builder.push(parent, &[0; 8])?;
        let plan = builder.finish();
        commit_unwritten(gpu, &mut attention, &mut kv, plan)?;
        branches.push(kv.fork(parent, 8, 2 * case.block_size)?);
    }
    let mut dispatches = 0;
    let seconds = repeated(|| {
        let mut builder = StepBuilder::new(&mut kv);
        for &branch in &branches {
            builder.push(branch, &[0])?;
        }
        let plan = builder.finish();
        assert_eq!(plan.block_copies().len() as u32, num_copies, "every branch copies its block");
        let mut step = attention.prepare(&plan)?;
        let mut encoder = gpu.encoder();
        attention.record_transfers(&mut encoder, &mut step);
        let seconds = gpu.time(encoder, |pass| attention.record_block_copies(pass, &mut step))?;
        dispatches = attention.stats().step_dispatches;
        Ok::<_, Failure>(seconds)
    })?;
    let bytes = 2 * u64::from(num_copies) * kv.config().bytes_per_block();
    let mut row = Row::new(spec, rates.copy, bytes, seconds);
    row.dispatches = dispatches;
    Ok(row)
}

/// A sequence's blocks to the host pool and back, each way from `prepare` until it is known to have arrived.
pub(crate) fn swap(gpu: &Gpu, rates: &StreamRates, spec: &Spec) -> Result<Vec<Row>, Failure> {
    let case = &spec.case;
    let num_blocks = case.sequences.len() as u32;
    let config =
        CacheConfig::for_blocks(num_blocks, &case.shape(), case.kv_type)?.with_host_blocks(num_blocks)?;
    let mut attention = PagedAttention::new(&gpu.device, case.shape(), config.clone())?;
    let mut kv = KvCache::new(config);
    let table = kv.create(num_blocks * case.block_size)?;
    let mut builder = StepBuilder::new(&mut kv);
    builder.push(table, &vec![0; (num_blocks * case.block_size) as usize])?;
    let plan = builder.finish();
    commit_unwritten(gpu, &mut attention, &mut kv, plan)?;
    let (mut outs, mut ins) = (Vec::new(), Vec::new());
    // The first rounds take staging buffers and the host pool's memory.
    for round in 0..PAIRS + 2 {
        for leaves in [true, false] {
            let mut builder = StepBuilder::new(&mut kv);
            if leaves {
                let moved = builder.swap_out(table)?;
                assert_eq!(moved, num_blocks, "all blocks leave");
            } else {
                builder.swap_in(table)?;
            }
            let plan = builder.finish();
            let start = Instant::now();
            let mut step = attention.prepare(&plan)?;
            let mut encoder = gpu.encoder();
            attention.record_transfers(&mut encoder, &mut step);
            gpu.queue.submit([encoder.finish()]);
            gpu.wait()?;
            let reports = attention.poll_transfers();
            let seconds = start.elapsed().as_secs_f64();
            drop(step);
            kv.commit_step(plan)?;
            for report in reports {
                assert!(report.complete, "every block arrives");
                kv.complete_transfers(report.step, report.complete);
            }
            if round >= 2 {
                if leaves { &mut outs } else { &mut ins }.push(seconds);
            }
        }
    }
    let bytes = u64::from(num_blocks) * kv.config().bytes_per_block();
    let row = |kernel, seconds| {
        let mut row = Row::new(spec, rates.copy, bytes, median(seconds));
        row.kernel = kernel;
        row
    };
    Ok(vec![row("swap_out", outs), row("swap_in", ins)])
}
