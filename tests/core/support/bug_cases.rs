//! Faults that users of other paged caches reported, each with the smallest input that shows it: bodies of tests, run
//! on the CPU twins by the core tests and on the kernels by the device tests.
//!
//! `ROUNDING` is what a weighted mean of a few exact numbers may be off by: the division by the sum of weights (2.5 units
//! in the last place in WGSL) and the roundings of a dozen additions.

use approx::abs_diff_eq;

use crate::rig::{Poison, Random, Rig, Tensors, one_span, spans};
use paged_kv::reference::compare;
use paged_kv::{KvPart, KvType, SplitConfig, StepPlan, TableId};

const ROUNDING: f32 = 1e-6;

/// What computes attention over a rig's cache: the twins, or the kernels on an adapter.
pub(crate) trait Engine {
    /// The attention of every row of `plan`; what is not written is NaN.
    fn attend(&self, rig: &Rig, plan: &StepPlan, tensors: &Tensors, split: &SplitConfig) -> Vec<f32>;

    /// The natural log-sum-exp of the first head in the first row.
    fn log_sum_exp(&self, rig: &Rig, plan: &StepPlan, tensors: &Tensors) -> f32;
}

fn is_near(actual: f32, expected: f32) -> bool {
    abs_diff_eq!(actual, expected, epsilon = ROUNDING * expected.abs())
}

/// Appends `rows` tokens with all-zero queries and keys and the given value of every lane by position.
fn append_values(
    engine: &impl Engine,
    rig: &mut Rig,
    table: TableId,
    rows: u32,
    value: impl Fn(u32) -> f32,
) -> Vec<f32> {
    let plan = rig.plan(&[(table, rows)]);
    let mut tensors = rig.tensors(&plan);
    tensors.query.fill(0.0);
    tensors.key.fill(0.0);
    let row_len = rig.shape.num_kv_heads() as usize * rig.v_len;
    for (row, position) in tensors.value.chunks_exact_mut(row_len).zip(plan.positions()) {
        row.fill(value(*position));
    }
    rig.write(&plan, &tensors);
    let output = engine.attend(rig, &plan, &tensors, &one_span(rig));
    rig.commit(plan);
    output
}

/// One decode row over exactly the given keys and values, every lane alike: its output, and the first head's natural
/// log-sum-exp.
fn attend_once(
    engine: &impl Engine,
    rig: &mut Rig,
    query: f32,
    keys: &[f32],
    value: impl Fn(usize) -> f32,
) -> (Vec<f32>, f32) {
    let table = rig.open();
    if keys.len() > 1 {
        rig.fill(&[(table, keys.len() as u32 - 1)]);
    }
    let plan = rig.plan(&[(table, 1)]);
    let mut tensors = rig.tensors(&plan);
    tensors.query.fill(query);
    rig.write(&plan, &tensors);
    let block_size = rig.kv.config().block_size();
    for (token, key) in (0..).zip(keys) {
        let block = rig.cpu.table(0, table.row())[(token / block_size) as usize];
        let value = value(token as usize);
        for head in 0..rig.shape.num_kv_heads() {
            rig.cpu.write_row(0, KvPart::K, block, head, token % block_size, &vec![*key; rig.k_len]);
            rig.cpu.write_row(0, KvPart::V, block, head, token % block_size, &vec![value; rig.v_len]);
        }
    }
    let output = engine.attend(rig, &plan, &tensors, &one_span(rig));
    let lse = engine.log_sum_exp(rig, &plan, &tensors);
    rig.commit(plan);
    (output, lse)
}

pub(crate) fn b01_unused_slots_of_the_last_block_never_reach_the_output(engine: &impl Engine) {
    for kv_type in [KvType::F32, KvType::F16] {
        for len in [1, 3, 4, 5, 12, 13] {
            let outputs = Poison::ALL.map(|poison| {
                let mut rig = Rig::new((1, 1, 8), kv_type, 4, 8);
                rig.order_free_blocks(&[5, 2, 7, 0]);
                let table = rig.open();
                rig.poison_unused(&[], poison);
                if len > 1 {
                    let chunk = append_values(engine, &mut rig, table, len - 1, |position| position as f32);
                    assert!(chunk.iter().all(|x| x.is_finite()));
                }
                let output = append_values(engine, &mut rig, table, 1, |position| position as f32);
                let blocks = rig.kv.block_ids(table).expect("a table");
                assert!(blocks.iter().zip([5, 2, 7, 0]).all(|(block, wanted)| block.index() == wanted));
                output
            });
            let bits =
                outputs.each_ref().map(|output| output.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
            assert!(bits.iter().all(|other| *other == bits[0]), "{kv_type} at length {len}");
            let mean = (len - 1) as f32 / 2.0;
            assert!(
                outputs[0].iter().all(|x| is_near(*x, mean)),
                "{kv_type} at length {len}: {:?}",
                outputs[0]
            );
        }
    }
}

pub(crate) fn b01_zeroed_unused_slots_do_not_enter_the_denominator(engine: &impl Engine) {
    for len in 1..=13 {
        let mut rig = Rig::new((1, 1, 8), KvType::F32, 4, 8);
        let table = rig.open();
        let output = append_values(engine, &mut rig, table, len, |_| 1.0);
        assert!(output.iter().all(|x| is_near(*x, 1.0)), "length {len}");
    }
}

pub(crate) fn b03_every_length_around_a_block_boundary_reads_exactly_its_tokens(engine: &impl Engine) {
    for block_size in [1, 4, 16] {
        let mut rig = Rig::new((1, 1, 8), KvType::F32, block_size, 32);
        rig.shuffle_free_blocks();
        let table = rig.open();
        for len in 1..=9u32 {
            let output = append_values(engine, &mut rig, table, 1, |position| (position * position) as f32);
            let mean = (0..len).map(|t| t * t).sum::<u32>() as f32 / len as f32;
            assert!(output.iter().all(|x| is_near(*x, mean)), "P {block_size}, length {len}");
        }
    }
}

pub(crate) fn b07_logits_far_below_zero_weigh_as_they_should(engine: &impl Engine) {
    let mut rig = Rig::new((16, 1, 128), KvType::F16, 16, 8);
    let keys: Vec<f32> = (0..64).map(|token| if token == 0 { -768.0 } else { -800.0 }).collect();
    let (output, lse) = attend_once(engine, &mut rig, 1.0, &keys, |token| 1.0 + token as f32);
    assert!(output.iter().all(|x| *x == 1.0), "the value of token 0: {output:?}");
    // A few roundings of 2^-24 each, at this size.
    assert!(abs_diff_eq!(lse, -8688.93, epsilon = 0.01), "{lse}");

    let (output, lse) = attend_once(engine, &mut rig, 1.0, &[-8192.0], |_| 3.0);
    assert!(output.iter().all(|x| *x == 3.0), "{output:?}");
    assert!(abs_diff_eq!(lse, -92681.9, epsilon = 0.1), "{lse}");
}

pub(crate) fn b07_a_single_key_returns_its_value_exactly(engine: &impl Engine) {
    for block_size in [1, 16] {
        let mut rig = Rig::new((16, 1, 128), KvType::F16, block_size, 4);
        let (output, _) = attend_once(engine, &mut rig, 0.7, &[0.3], |_| 0.625);
        assert!(output.iter().all(|x| *x == 0.625), "P {block_size}: {output:?}");
    }
}

pub(crate) fn b09_products_beyond_the_16_bit_range_stay_finite(engine: &impl Engine) {
    let mut rig = Rig::new((1, 1, 128), KvType::F16, 4, 4);
    let (output, _) = attend_once(engine, &mut rig, 32.0, &[32.0, 31.5], |token| [1.5, 9.0][token]);
    assert!(output.iter().all(|x| *x == 1.5), "{output:?}");
    let (output, _) = attend_once(engine, &mut rig, 0.0, &[1.0; 4], |_| 60000.0);
    assert!(output.iter().all(|x| is_near(*x, 60000.0)), "{output:?}");
}

pub(crate) fn b15_every_query_head_reads_its_own_kv_head(engine: &impl Engine) {
    for (query_heads, kv_heads) in [(24, 8), (40, 8), (24, 4), (28, 4), (9, 3), (71, 1), (64, 4), (12, 12)] {
        // A chunk of 17 rows, one row whole, a chunk up to 130 tokens, one row in three spans.
        let mut rig = Rig::new((query_heads, kv_heads, 64), KvType::F16, 16, 16);
        let table = rig.open();
        for (rows, span_tokens) in [(17, 1024), (1, 1024), (112, 1024), (1, 64)] {
            let plan = rig.plan(&[(table, rows)]);
            let mut tensors = rig.tensors(&plan);
            for (index, value) in tensors.value.chunks_exact_mut(64).enumerate() {
                value.fill((index % kv_heads as usize + 1) as f32);
            }
            rig.write(&plan, &tensors);
            // The long chunk is there for its keys.
            if rows < 100 {
                let output = engine.attend(&rig, &plan, &tensors, &spans(&rig, span_tokens));
                for (index, head) in output.chunks_exact(64).enumerate() {
                    let query_head = index as u32 % query_heads;
                    let expected = (query_head / (query_heads / kv_heads) + 1) as f32;
                    // Up to 131 weights, added in different orders above and below the line.
                    let is_right =
                        head.iter().all(|x| abs_diff_eq!(x / expected, 1.0, epsilon = 3.0 * ROUNDING));
                    assert!(is_right, "{query_heads}/{kv_heads}, {rows} rows, head {query_head}: {head:?}");
                }
            }
            rig.commit(plan);
        }
    }
}

pub(crate) fn b17_odd_head_sizes_do_not_bleed_into_the_next_head(engine: &impl Engine) {
    // Both stored types for the first and the last; the others in turn, since an adapter compiles each for seconds.
    let (f32, f16) = (KvType::F32, KvType::F16);
    for (head_dim, kv_types) in [
        (40, [f32, f16].as_slice()),
        (72, &[f16]),
        (80, &[f32]),
        (96, &[f16]),
        (112, &[f32]),
        (136, &[f32, f16]),
    ] {
        for &kv_type in kv_types {
            let mut rig = Rig::new((2, 2, head_dim), kv_type, 4, 8);
            let table = rig.open();
            rig.fill(&[(table, 8)]);
            let plan = rig.plan(&[(table, 1)]);
            let mut tensors = rig.tensors(&plan);
            tensors.query.fill(0.0);
            rig.write(&plan, &tensors);
            let lanes: Vec<f32> = (0..head_dim).map(|lane| lane as f32).collect();
            for token in 0..9 {
                let block = rig.cpu.table(0, table.row())[token as usize / 4];
                rig.cpu.write_row(0, KvPart::V, block, 0, token % 4, &lanes);
                rig.cpu.write_row(0, KvPart::V, block, 1, token % 4, &vec![1e4; head_dim as usize]);
            }
            let output = engine.attend(&rig, &plan, &tensors, &one_span(&rig));
            let (first, second) = output.split_at(head_dim as usize);
            assert!(
                first.iter().zip(&lanes).all(|(x, lane)| is_near(*x, *lane)),
                "{kv_type} {head_dim}: {first:?}"
            );
            assert!(second.iter().all(|x| is_near(*x, 1e4)), "{kv_type} {head_dim}: {second:?}");
        }
    }
}

pub(crate) fn b17_the_scale_is_of_the_real_head_size(engine: &impl Engine) {
    let mut rig = Rig::new((1, 1, 72), KvType::F16, 4, 4);
    let (output, _) = attend_once(engine, &mut rig, 1.0, &[0.25, 0.0], |token| [1.0, 0.0][token]);
    // The six digits that are given.
    assert!(output.iter().all(|x| abs_diff_eq!(*x, 0.892958, epsilon = 2e-6)), "{output:?}");
}

pub(crate) fn b29_a_sequence_with_nan_changes_no_bit_of_its_neighbour(engine: &impl Engine) {
    let run = |poisoned: bool| {
        let mut rig = Rig::new((2, 1, 8), KvType::F32, 4, 4);
        rig.random = Random(7);
        let (a, b) = (rig.open(), rig.open());
        rig.fill(&[(a, 5), (b, 6)]);
        let plan = rig.plan(&[(a, 1), (b, 1)]);
        let tensors = rig.tensors(&plan);
        rig.write(&plan, &tensors);
        if poisoned {
            let block = rig.cpu.table(0, a.row())[0];
            rig.cpu.write_row(0, KvPart::K, block, 0, 2, &[f32::NAN; 8]);
        }
        let output = engine.attend(&rig, &plan, &tensors, &one_span(&rig));
        rig.commit(plan);
        (rig, a, output)
    };
    let (mut rig, a, output) = run(true);
    let (_, _, clean) = run(false);
    assert!(clean.iter().all(|x| x.is_finite()));
    assert_eq!(output[16..], clean[16..]);

    // The blocks of the poisoned sequence, all that are free, go to another one, whose last block keeps stale NaN slots.
    rig.poison_unused(&[], Poison::Nan);
    rig.kv.release(a).expect("a table");
    let d = rig.open();
    let plan = rig.plan(&[(d, 5)]);
    let tensors = rig.tensors(&plan);
    rig.write(&plan, &tensors);
    let output = engine.attend(&rig, &plan, &tensors, &one_span(&rig));
    rig.assert_dense(&plan, &tensors, &output, 1e-5);
}

/// Runs a prompt in chunks, unwritten slots poisoned, and returns all rows' outputs.
pub(crate) fn prompt_in_chunks(
    engine: &impl Engine,
    block_size: u32,
    chunks: &[u32],
) -> (Rig, TableId, Vec<f32>) {
    let mut rig = Rig::new((6, 2, 16), KvType::F32, block_size, 4);
    rig.poison_unused(&[], Poison::Nan);
    let total: u32 = chunks.iter().sum();
    let mut random = Random(3);
    let mut draw = |len: usize| (0..total as usize * len).map(|_| random.unit()).collect::<Vec<f32>>();
    let (query, key, value) = (draw(96), draw(32), draw(32));
    let table = rig.open();
    let mut output = Vec::new();
    let mut start = 0;
    for &chunk in chunks {
        let plan = rig.plan(&[(table, chunk)]);
        let end = start + chunk as usize;
        assert_eq!(plan.context_lens(), [end as u32], "the end of the chunk, not of the prompt");
        let tensors = Tensors {
            query: query[start * 96..end * 96].to_vec(),
            key: key[start * 32..end * 32].to_vec(),
            value: value[start * 32..end * 32].to_vec(),
        };
        rig.write(&plan, &tensors);
        output.extend(engine.attend(&rig, &plan, &tensors, &one_span(&rig)));
        rig.commit(plan);
        start = end;
    }
    (rig, table, output)
}

pub(crate) fn b31_a_prompt_in_chunks_equals_the_prompt_at_once(engine: &impl Engine) {
    for (block_size, chunks) in [(4, vec![4, 4, 2]), (16, vec![20, 12]), (16, vec![17, 3])] {
        let (_, _, at_once) = prompt_in_chunks(engine, block_size, &[chunks.iter().sum()]);
        let (_, _, chunked) = prompt_in_chunks(engine, block_size, &chunks);
        let expected: Vec<f64> = at_once.iter().map(|x| f64::from(*x)).collect();
        assert!(at_once.iter().all(|x| x.is_finite()));
        // Both are within 1e-5 of the exact result.
        compare(&chunked, &expected, 16, 2e-5).expect("equal but for rounding");
    }
}
