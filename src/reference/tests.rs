//! Twins on plans that no builder makes: rows without keys, spans without keys, chosen slots and tables.

use approx::assert_abs_diff_eq;

use super::*;
use crate::{
    BlockCopy, CacheConfig, DIRECT, DecodeItem, KvFormat, KvPart, KvType, MergeItem, ModelShape,
    PADDING_SLOT, PrefillItem, StackPlan, StepPlan, TableChange, WorkSplit,
};

const EIGHT: ModelShape = ModelShape::new(1, 1, 1, 8);

fn cache(shape: &ModelShape, format: impl Into<KvFormat>, block_size: u32, num_blocks: u32) -> CpuCache {
    let config = CacheConfig::for_blocks(num_blocks, shape, format)
        .and_then(|config| config.with_block_size(block_size))
        .expect("a valid configuration");
    CpuCache::new(shape, &config)
}

/// One sequence in table row 0 with `rows` rows, a context of `context` tokens, and the given block table.
fn plan(cache: &CpuCache, rows: u32, context: u32, table: &[u32]) -> StepPlan {
    StepPlan {
        fingerprint: cache.fingerprint,
        token_ids: vec![0; rows as usize],
        query_starts: vec![0, rows],
        context_lens: vec![context],
        table_rows: vec![0],
        stacks: vec![StackPlan {
            table_changes: vec![TableChange {
                table_row: 0,
                first_entry: 0,
                start: 0,
                len: table.len() as u32,
            }],
            changed_entries: table.to_vec(),
            ..StackPlan::default()
        }],
        ..StepPlan::default()
    }
}

fn write_value(cache: &mut CpuCache, token: u32, table: &[u32], value: f32) {
    let block_size = cache.layout().block().block_size();
    let len = cache.layout().block().v_head_dim() as usize;
    let block = table[(token / block_size) as usize];
    cache.write_row(0, KvPart::V, block, 0, token % block_size, &vec![value; len]);
}

#[test]
fn table_changes_set_the_entries_that_they_name_and_no_others() {
    let mut cache = cache(&EIGHT, KvType::F32, 4, 8);
    let first = plan(&cache, 1, 13, &[5, 2, 7, 0]);
    cache.apply_table_changes(&first);
    let mut second = plan(&cache, 1, 17, &[6, 4]);
    second.stacks[0].table_changes[0].first_entry = 3;
    cache.apply_table_changes(&second);
    assert_eq!(cache.table(0, 0)[..6], [5, 2, 7, 6, 4, 0]);
    assert!(cache.tables(0)[cache.table(0, 0).len()..].iter().all(|&entry| entry == 0));
}

#[test]
fn b05a_rows_without_a_visible_key_give_zero() {
    let mut cache = cache(&EIGHT, KvType::F32, 4, 2);
    let plan = plan(&cache, 4, 2, &[1]);
    cache.apply_table_changes(&plan);
    cache.words_mut().fill(f32::NAN.to_bits());
    for (token, value) in [(0, 10.0), (1, 20.0)] {
        cache.write_row(0, KvPart::K, 1, 0, token, &[3.0; 8]);
        write_value(&mut cache, token, &[1], value);
    }
    let query = [0.0; 4 * 8];
    let inputs = AttentionInputs::new(&cache, &plan, 0, Rows::new(&query, 8));
    let mut output = [7.0; 4 * 8];
    let tile = PrefillItem {
        sequence: 0,
        first_query: 0,
        end_query: 4,
        first_token: 0,
        end_token: 2,
        partial: DIRECT,
        num_spans: 1,
        guarded_from: 2,
    };
    attention_prefill(&inputs, &[tile], &mut RowsMut::new(&mut output, 8), &mut RowsMut::new(&mut [], 10));
    let firsts: Vec<f32> = output.chunks(8).map(|row| row[0]).collect();
    assert_eq!(firsts, [0.0, 0.0, 10.0, 15.0]);
}

#[test]
fn b05a_a_span_without_keys_is_empty_and_merges_as_nothing() {
    let mut cache = cache(&EIGHT, KvType::F32, 4, 2);
    let plan = plan(&cache, 1, 2, &[1]);
    cache.apply_table_changes(&plan);
    cache.words_mut().fill(f32::NAN.to_bits());
    for (token, value) in [(0, 10.0), (1, 20.0)] {
        cache.write_row(0, KvPart::K, 1, 0, token, &[3.0; 8]);
        write_value(&mut cache, token, &[1], value);
    }
    let query = [0.0; 8];
    let inputs = AttentionInputs::new(&cache, &plan, 0, Rows::new(&query, 8));
    let mut partials = vec![7.0; 4 * 10];
    let items = [(0, 0, 0), (0, 2, 1), (2, 2, 2), (0, 0, 3)]
        .map(|(first_token, end_token, partial)| DecodeItem { sequence: 0, first_token, end_token, partial });
    let mut nothing = RowsMut::new(&mut [], 8);
    attention_decode(&inputs, &items, &mut nothing, &mut RowsMut::new(&mut partials, 10));
    let lse: Vec<f32> = partials.chunks(10).map(|partial| log_sum_exp(partial[8], partial[9])).collect();
    assert_eq!(lse[0], f32::NEG_INFINITY);
    assert_abs_diff_eq!(lse[1], std::f32::consts::LN_2, epsilon = 1e-7);

    let merge = |first_partial, num_partials| {
        let mut output = [7.0; 8];
        let item = MergeItem { row: 0, first_partial, num_partials, padding: 0 };
        attention_merge(&inputs, &[item], Rows::new(&partials, 10), &mut RowsMut::new(&mut output, 8));
        output
    };
    assert_eq!(merge(0, 3), [15.0; 8]);
    assert_eq!(merge(2, 2), [0.0; 8], "spans that all saw no key");
    let mut output = [7.0; 8];
    let direct = DecodeItem { partial: DIRECT, ..items[0] };
    attention_decode(&inputs, &[direct], &mut RowsMut::new(&mut output, 8), &mut RowsMut::new(&mut [], 10));
    assert_eq!(output, [0.0; 8], "a row of its own without keys");
}

#[test]
fn b23_padding_rows_write_nothing() {
    let mut cache = cache(&EIGHT, KvType::F16, 4, 4);
    cache.words_mut().iter_mut().enumerate().for_each(|(index, word)| *word = index as u32);
    let before = cache.clone();
    let mut rows = [f32::NAN; 4 * 8];
    rows[..8].fill(2.0);
    let rows = Rows::new(&rows, 8);
    append(&mut cache, 0, &[3, PADDING_SLOT, PADDING_SLOT, PADDING_SLOT], rows, rows);
    assert_eq!(cache.key_row(0, 0, 0, 3), [2.0; 8]);
    assert_eq!(cache.value_row(0, 0, 0, 3), [2.0; 8]);
    let changed = cache.words().iter().zip(before.words()).filter(|(now, then)| now != then).count();
    assert_eq!(changed, 2 * 4, "the key and the value of one slot");
}

#[test]
#[should_panic(expected = "slot 16 lies beyond the pool's 16")]
fn b23_a_slot_beyond_the_pool_is_refused() {
    let mut cache = cache(&EIGHT, KvType::F32, 4, 4);
    let rows = [0.0; 8];
    append(&mut cache, 0, &[16], Rows::new(&rows, 8), Rows::new(&rows, 8));
}

#[test]
#[should_panic(expected = "out of range")]
fn b23_fewer_rows_than_slots_are_refused() {
    let mut cache = cache(&EIGHT, KvType::F32, 4, 4);
    let rows = [0.0; 3 * 8];
    append(&mut cache, 0, &[0, 1, 2, 3], Rows::new(&rows, 8), Rows::new(&rows, 8));
}

/// Four blocks of four tokens, block `i` filled with the word `i`.
fn numbered_blocks() -> CpuCache {
    let shape = ModelShape::new(64, 1, 1, 8);
    let mut cache = cache(&shape, KvFormat::new(KvType::F16, KvType::F32), 4, 4);
    let words = cache.block_words();
    cache.words_mut().iter_mut().enumerate().for_each(|(index, word)| *word = (index / words) as u32);
    cache
}

fn blocks_after(pairs: &[(u32, u32)]) -> [u32; 4] {
    let mut cache = numbered_blocks();
    let copies: Vec<BlockCopy> =
        pairs.iter().map(|&(source, destination)| BlockCopy { source, destination }).collect();
    block_copy(&mut cache, &copies);
    let words = cache.block_words();
    std::array::from_fn(|block| {
        let block = &cache.words()[block * words..][..words];
        assert!(block.iter().all(|word| *word == block[0]), "all layers, keys and values");
        block[0]
    })
}

#[test]
fn b41_copies_fan_out_and_a_self_copy_or_an_empty_list_copies_nothing() {
    assert_eq!(blocks_after(&[(0, 1), (0, 2)]), [0, 0, 0, 3]);
    assert_eq!(blocks_after(&[(3, 3)]), [0, 1, 2, 3]);
    assert_eq!(blocks_after(&[]), [0, 1, 2, 3]);
}

#[test]
#[should_panic(expected = "block 1 is source and destination")]
fn b41_a_block_that_is_source_and_destination_is_refused() {
    blocks_after(&[(0, 1), (1, 2)]);
}

#[test]
#[should_panic(expected = "block 2 is the destination of two copies")]
fn b41_two_copies_into_one_block_are_refused() {
    blocks_after(&[(0, 2), (1, 2)]);
}

#[test]
fn parts_share_out_every_item_once_and_write_what_one_pass_writes() {
    for fixed_span_tokens in [None, Some(8)] {
        share_out(fixed_span_tokens);
    }
}

/// With fixed spans decode rows are cut, without them chunks are cut, too.
fn share_out(fixed_span_tokens: Option<u32>) {
    let shape = ModelShape::new(1, 6, 2, 8);
    let mut cache = cache(&shape, KvType::F32, 4, 32);
    cache.words_mut().iter_mut().enumerate().for_each(|(index, word)| {
        *word = ((index as f32 * 0.37).sin()).to_bits();
    });
    // Rows 0..5 a chunk, 5 and 6 decode, 7..16 a chunk; all read the same blocks.
    let plan = StepPlan {
        token_ids: vec![0; 16],
        query_starts: vec![0, 5, 6, 7, 16],
        context_lens: vec![9, 40, 3, 30],
        table_rows: vec![0; 4],
        stacks: vec![StackPlan {
            table_changes: vec![TableChange { table_row: 0, first_entry: 0, start: 0, len: 10 }],
            changed_entries: (0..10).map(|entry| 31 - 3 * entry).collect(),
            ..StackPlan::default()
        }],
        ..self::plan(&cache, 0, 0, &[])
    };
    cache.apply_table_changes(&plan);
    let query: Vec<f32> = (0..16 * 48).map(|index| (index as f32).cos()).collect();
    let inputs = AttentionInputs::new(&cache, &plan, 0, Rows::new(&query, 48));
    // Tiles of four queries start within a row of three.
    let config = crate::SplitConfig {
        prefill_queries: 4,
        span_quantum: 4,
        fixed_span_tokens,
        target_workgroups: 64,
        workgroups_per_tile: 1,
        max_partials: 256,
        ..cache.split_config(0, 8)
    };
    let mut split = WorkSplit::default();
    split.split(&plan, &config);
    assert_eq!(split.prefill_items.iter().any(|item| item.partial != DIRECT), fixed_span_tokens.is_none());
    let mut expected = vec![f32::NAN; 16 * 48];
    attention(&inputs, &split, &mut RowsMut::new(&mut expected, 48), &mut Vec::new());
    assert!(expected.iter().all(|x| x.is_finite()));

    for num_parts in 1..12 {
        let mut output = vec![f32::NAN; 16 * 48];
        let mut partials = vec![f32::NAN; split.num_partials as usize * cache.partial_len(0)];
        let rows = RowsMut::new(&mut output, 48);
        let partial_rows = RowsMut::new(&mut partials, cache.partial_len(0));
        let mut parts = decode_parts(&inputs, &split.decode_items, rows, partial_rows, num_parts);
        assert!(parts.len() <= num_parts);
        assert_eq!(parts.iter().map(|part| part.items.len()).sum::<usize>(), split.decode_items.len());
        for part in &mut parts {
            attention_decode(&inputs, part.items, &mut part.output, &mut part.partials);
        }
        let rows = RowsMut::new(&mut output, 48);
        let partial_rows = RowsMut::new(&mut partials, cache.partial_len(0));
        let mut parts = prefill_parts(&inputs, &split.prefill_items, rows, partial_rows, num_parts);
        assert!(parts.len() <= num_parts);
        assert_eq!(parts.iter().map(|part| part.items.len()).sum::<usize>(), split.prefill_items.len());
        for part in &mut parts {
            attention_prefill(&inputs, part.items, &mut part.output, &mut part.partials);
        }
        let partial_rows = Rows::new(&partials, cache.partial_len(0));
        attention_merge(&inputs, &split.merge_items, partial_rows, &mut RowsMut::new(&mut output, 48));
        assert_eq!(output, expected, "{num_parts} parts");
    }
}
