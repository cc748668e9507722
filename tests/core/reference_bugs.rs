//! Faults that users of other paged caches reported, each with the smallest input that shows it, on the CPU twins.

use crate::rig::{Random, Rig, Tensors, one_span, spans};
use paged_kv::reference::{AttentionInputs, Rows, RowsMut, attention_decode, log_sum_exp};
use paged_kv::{ArenaLayout, CacheConfig, ConfigError, DecodeItem, KvPart, KvType, ModelShape, TableId};

/// Twice the bits of an f16 NaN, which is also an f32 NaN; then inf, 1e4 and zero.
const POISONS: [(KvType, [u32; 4]); 2] = [
    (KvType::F32, [0x7fc0_0001, 0x7f80_0000, 0x461c_4000, 0]),
    (KvType::F16, [0x7e00_7e00, 0x7c00_7c00, 0x70e2_70e2, 0]),
];

/// Appends `rows` tokens with all-zero queries and keys and the given value of every lane by position.
fn append_values(rig: &mut Rig, table: TableId, rows: u32, value: impl Fn(u32) -> f32) -> Vec<f32> {
    let plan = rig.plan(&[(table, rows)]);
    let mut tensors = rig.tensors(&plan);
    tensors.query.fill(0.0);
    tensors.key.fill(0.0);
    let row_len = rig.shape.num_kv_heads as usize * rig.v_len;
    for (row, position) in tensors.value.chunks_exact_mut(row_len).zip(plan.positions()) {
        row.fill(value(*position));
    }
    rig.write(&plan, &tensors);
    let output = rig.attend(&plan, &tensors, &one_span(rig));
    rig.commit(plan);
    output
}

/// One decode row over exactly the given keys and values, every lane alike: its output, and the first head's natural
/// log-sum-exp.
fn attend_once(rig: &mut Rig, query: f32, keys: &[f32], value: impl Fn(usize) -> f32) -> (Vec<f32>, f32) {
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
        let block = rig.cpu.table(table.row())[(token / block_size) as usize];
        let value = value(token as usize);
        for head in 0..rig.shape.num_kv_heads {
            rig.cpu.write_row(0, KvPart::K, block, head, token % block_size, &vec![*key; rig.k_len]);
            rig.cpu.write_row(0, KvPart::V, block, head, token % block_size, &vec![value; rig.v_len]);
        }
    }
    let output = rig.attend(&plan, &tensors, &one_span(rig));
    let query_len = rig.shape.num_query_heads as usize * rig.k_len;
    let inputs = AttentionInputs::new(&rig.cpu, &plan, 0, Rows::new(&tensors.query, query_len));
    let item = DecodeItem { sequence: 0, first_token: 0, end_token: keys.len() as u32, partial: 0 };
    let mut partial = vec![0.0; rig.cpu.partial_len()];
    let mut partials = RowsMut::new(&mut partial, rig.cpu.partial_len());
    attention_decode(&inputs, &[item], &mut RowsMut::new(&mut [], 1), &mut partials);
    let lse = log_sum_exp(partial[rig.v_len], partial[rig.v_len + 1]);
    rig.commit(plan);
    (output, lse)
}

#[test]
fn b01_unused_slots_of_the_last_block_never_reach_the_output() {
    for (kv_type, poisons) in POISONS {
        for len in [1, 3, 4, 5, 12, 13] {
            let outputs = poisons.map(|poison| {
                let mut rig = Rig::new((1, 1, 8), kv_type, 4, 8);
                rig.order_free_blocks(&[5, 2, 7, 0]);
                let table = rig.open();
                rig.poison_unused(&[], poison);
                if len > 1 {
                    append_values(&mut rig, table, len - 1, |position| position as f32);
                }
                let output = append_values(&mut rig, table, 1, |position| position as f32);
                let blocks = rig.kv.block_ids(table).expect("a table");
                assert_eq!(
                    blocks.last().map(|block| block.index()),
                    [5, 2, 7, 0].get(blocks.len() - 1).copied()
                );
                output.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            });
            assert!(outputs.iter().all(|output| *output == outputs[0]), "{kv_type} at length {len}");
            let mean = (len - 1) as f32 / 2.0;
            // The sum of at most 13 small integers is exact, its product with the rounded 1 / 13 is not.
            assert!(outputs[0].iter().all(|x| (f32::from_bits(*x) - mean).abs() <= mean * f32::EPSILON));
        }
    }
}

#[test]
fn b01_zeroed_unused_slots_do_not_enter_the_denominator() {
    for len in 1..=13 {
        let mut rig = Rig::new((1, 1, 8), KvType::F32, 4, 8);
        let table = rig.open();
        let output = append_values(&mut rig, table, len, |_| 1.0);
        assert!(output.iter().all(|x| (x - 1.0).abs() <= f32::EPSILON), "length {len}");
    }
}

#[test]
fn b03_the_last_slot_of_whole_blocks_is_the_last_of_the_last_block() {
    let mut rig = Rig::new((1, 1, 8), KvType::F32, 4, 16);
    rig.order_free_blocks(&[10, 11, 3]);
    let table = rig.open();
    let before = rig.cpu.clone();
    let plan = rig.plan(&[(table, 8)]);
    assert_eq!(plan.slot_mapping().last(), Some(&47));
    let tensors = rig.tensors(&plan);
    rig.write(&plan, &tensors);
    assert_eq!(rig.cpu.key_row(0, 11, 0, 3), tensors.key[56..]);
    rig.commit(plan);
    let block_words = rig.cpu.layout().block_stride_words(0) as usize;
    for block in (0..16).filter(|block| ![10, 11].contains(block)) {
        let words = block * block_words..(block + 1) * block_words;
        assert_eq!(rig.cpu.words()[words.clone()], before.words()[words], "block {block}");
    }
    let plan = rig.plan(&[(table, 1)]);
    assert_eq!(plan.slot_mapping(), [12], "a new block first");
}

#[test]
fn b03_every_length_around_a_block_boundary_reads_exactly_its_tokens() {
    for block_size in [1, 4, 16] {
        let mut rig = Rig::new((1, 1, 8), KvType::F32, block_size, 32);
        rig.shuffle_free_blocks();
        let table = rig.open();
        for len in 1..=9u32 {
            let output = append_values(&mut rig, table, 1, |position| (position * position) as f32);
            let mean = (0..len).map(|t| t * t).sum::<u32>() as f32 / len as f32;
            assert!(
                output.iter().all(|x| (x - mean).abs() <= mean * f32::EPSILON),
                "P {block_size}, length {len}"
            );
        }
    }
}

#[test]
fn b07_logits_far_below_zero_weigh_as_they_should() {
    // Tolerances of log-sum-exps: half a unit in the last place at their size, times the few roundings on the way.
    let mut rig = Rig::new((16, 1, 128), KvType::F16, 16, 8);
    let keys: Vec<f32> = (0..64).map(|token| if token == 0 { -768.0 } else { -800.0 }).collect();
    let (output, lse) = attend_once(&mut rig, 1.0, &keys, |token| 1.0 + token as f32);
    assert!(output.iter().all(|x| *x == 1.0), "the value of token 0");
    assert!((lse - -8688.93).abs() < 0.01, "{lse}");

    let (output, lse) = attend_once(&mut rig, 1.0, &[-8192.0], |_| 3.0);
    assert!(output.iter().all(|x| *x == 3.0));
    assert!((lse - -92681.9).abs() < 0.1, "{lse}");
}

#[test]
fn b07_a_single_key_returns_its_value_exactly() {
    for block_size in [1, 16] {
        let mut rig = Rig::new((16, 1, 128), KvType::F16, block_size, 4);
        let (output, _) = attend_once(&mut rig, 0.7, &[0.3], |_| 0.625);
        assert!(output.iter().all(|x| *x == 0.625));
    }
}

#[test]
fn b09_products_beyond_the_16_bit_range_stay_finite() {
    let mut rig = Rig::new((1, 1, 128), KvType::F16, 4, 4);
    let (output, _) = attend_once(&mut rig, 32.0, &[32.0, 31.5], |token| [1.5, 9.0][token]);
    assert!(output.iter().all(|x| *x == 1.5), "{output:?}");
    let (output, _) = attend_once(&mut rig, 0.0, &[1.0; 4], |_| 60000.0);
    assert!(output.iter().all(|x| *x == 60000.0), "{output:?}");
}

#[test]
fn b15_every_query_head_reads_its_own_kv_head() {
    for (query_heads, kv_heads) in [(24, 8), (40, 8), (24, 4), (28, 4), (9, 3), (71, 1), (64, 4), (12, 12)] {
        // A chunk of 17 rows, then one row whole, then one row in spans of 4.
        let mut rig = Rig::new((query_heads, kv_heads, 64), KvType::F16, 4, 16);
        let table = rig.open();
        for (rows, span_tokens) in [(17, 1024), (1, 1024), (1, 4)] {
            let plan = rig.plan(&[(table, rows)]);
            let mut tensors = rig.tensors(&plan);
            for (index, value) in tensors.value.chunks_exact_mut(64).enumerate() {
                value.fill((index % kv_heads as usize + 1) as f32);
            }
            rig.write(&plan, &tensors);
            let output = rig.attend(&plan, &tensors, &spans(&rig, span_tokens));
            for (index, head) in output.chunks_exact(64).enumerate() {
                let query_head = index as u32 % query_heads;
                let expected = (query_head / (query_heads / kv_heads) + 1) as f32;
                // Weights that are divided by their own sum: a few roundings.
                assert!(head.iter().all(|x| (x / expected - 1.0).abs() < 1e-6), "{query_heads}/{kv_heads}");
            }
            rig.commit(plan);
        }
    }
}

#[test]
fn b15_heads_that_do_not_divide_are_refused() {
    for (num_query_heads, num_kv_heads) in [(33, 2), (3, 2), (4, 0)] {
        let shape = ModelShape { num_layers: 1, num_query_heads, num_kv_heads, head_dim: 64 };
        let error = CacheConfig::for_blocks(4, &shape, KvType::F16).map(|_| ());
        assert!(matches!(error, Err(ConfigError::HeadRatio { .. } | ConfigError::Zero { .. })));
    }
}

#[test]
fn b17_odd_head_sizes_do_not_bleed_into_the_next_head() {
    for head_dim in [40, 72, 80, 96, 112, 136] {
        for kv_type in [KvType::F32, KvType::F16] {
            let mut rig = Rig::new((2, 2, head_dim), kv_type, 4, 8);
            let table = rig.open();
            let plan = rig.plan(&[(table, 9)]);
            let mut tensors = rig.tensors(&plan);
            tensors.query.fill(0.0);
            for value in tensors.value.chunks_exact_mut(2 * head_dim as usize) {
                let (first, second) = value.split_at_mut(head_dim as usize);
                first.iter_mut().enumerate().for_each(|(lane, x)| *x = lane as f32);
                second.fill(1e4);
            }
            rig.write(&plan, &tensors);
            let output = rig.attend(&plan, &tensors, &one_span(&rig));
            for (lane, x) in
                output.chunks_exact(head_dim as usize).step_by(2).flat_map(|row| row.iter().enumerate())
            {
                assert!(
                    (x - lane as f32).abs() <= lane as f32 * f32::EPSILON,
                    "head size {head_dim}, lane {lane}"
                );
            }
        }
    }
}

#[test]
fn b17_the_scale_is_of_the_real_head_size() {
    let mut rig = Rig::new((1, 1, 72), KvType::F16, 4, 4);
    let (output, _) = attend_once(&mut rig, 1.0, &[0.25, 0.0], |token| [1.0, 0.0][token]);
    assert!(output.iter().all(|x| (x - 0.892958).abs() < 1e-6), "{output:?}");
}

#[test]
fn b21_addresses_do_not_wrap_at_two_to_the_31() {
    // 8 heads of 128 lanes, 16 tokens, keys and values in f16: 16384 words per block.
    let shape = ModelShape { num_layers: 1, num_query_heads: 8, num_kv_heads: 8, head_dim: 128 };
    let config = CacheConfig::for_blocks(1 << 19, &shape, KvType::F16).expect("a valid configuration");
    let layout = ArenaLayout { block: *config.layout(), num_blocks: 1 << 19, layers_per_arena: 1 };
    let first_words =
        [131_071, 131_072, 262_143, 262_144].map(|block| layout.row_word(0, KvPart::K, block, 0, 0));
    assert_eq!(first_words, [2_147_467_264, 2_147_483_648, 4_294_950_912, 4_294_967_296]);
    // An arena that 32 bits cannot address is refused with both numbers.
    assert_eq!(
        config.arenas(u64::MAX),
        Err(ConfigError::LayerExceedsArena {
            layer_bytes: 34_359_738_368,
            max_bytes: 2_147_483_644,
            max_blocks: 32_767
        })
    );
}

#[test]
fn b29_a_sequence_with_nan_changes_no_bit_of_its_neighbour() {
    let run = |poisoned: bool| {
        let mut rig = Rig::new((2, 1, 8), KvType::F32, 4, 4);
        rig.random = Random(7);
        let (a, b) = (rig.open(), rig.open());
        rig.fill(&[(a, 5), (b, 6)]);
        let plan = rig.plan(&[(a, 1), (b, 1)]);
        let tensors = rig.tensors(&plan);
        rig.write(&plan, &tensors);
        if poisoned {
            let block = rig.cpu.table(a.row())[0];
            rig.cpu.write_row(0, KvPart::K, block, 0, 2, &[f32::NAN; 8]);
        }
        let output = rig.attend(&plan, &tensors, &one_span(&rig));
        rig.commit(plan);
        (rig, a, output)
    };
    let (mut rig, a, output) = run(true);
    let (_, _, clean) = run(false);
    assert!(output[..16].iter().all(|x| x.is_nan()));
    assert_eq!(output[16..], clean[16..]);

    // The blocks of the poisoned sequence, all that are free, go to another one, whose last block keeps stale NaN slots.
    rig.poison_unused(&[], f32::NAN.to_bits());
    rig.kv.release(a).expect("a table");
    let d = rig.open();
    let plan = rig.plan(&[(d, 5)]);
    let tensors = rig.tensors(&plan);
    rig.write(&plan, &tensors);
    let output = rig.attend(&plan, &tensors, &one_span(&rig));
    rig.assert_dense(&plan, &tensors, &output, 1e-5);
}

/// Runs a prompt in chunks, unwritten slots poisoned, and returns all rows' outputs.
fn prompt_in_chunks(block_size: u32, chunks: &[u32]) -> (Rig, TableId, Vec<f32>) {
    let mut rig = Rig::new((6, 2, 16), KvType::F32, block_size, 4);
    rig.poison_unused(&[], f32::NAN.to_bits());
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
        output.extend(rig.attend(&plan, &tensors, &one_span(&rig)));
        rig.commit(plan);
        start = end;
    }
    (rig, table, output)
}

#[test]
fn b31_a_prompt_in_chunks_equals_the_prompt_at_once() {
    for (block_size, chunks) in [(4, vec![4, 4, 2]), (16, vec![20, 12]), (16, vec![17, 3])] {
        let (_, _, at_once) = prompt_in_chunks(block_size, &[chunks.iter().sum()]);
        let (_, _, chunked) = prompt_in_chunks(block_size, &chunks);
        let expected: Vec<f64> = at_once.iter().map(|x| f64::from(*x)).collect();
        assert!(at_once.iter().all(|x| x.is_finite()));
        // Both are within rounding of the exact result.
        paged_kv::reference::compare(&chunked, &expected, 16, 1e-6).expect("equal but for rounding");
    }
}

#[test]
fn b31_a_chunk_takes_only_the_blocks_that_it_needs() {
    let (mut rig, table, _) = prompt_in_chunks(16, &[20, 12]);
    assert_eq!(rig.kv.block_ids(table).expect("a table").len(), 2);
    rig.fill(&[(table, 1)]);
    assert_eq!(rig.kv.block_ids(table).expect("a table").len(), 3, "the first decoded token takes the third");
    let (rig, table, _) = prompt_in_chunks(16, &[17, 3]);
    assert_eq!(rig.kv.block_ids(table).expect("a table").len(), 2, "the second chunk takes none");
}
