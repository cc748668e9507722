//! Faults that users of other paged caches reported, on the CPU twins and on what addresses them.

use crate::bug_cases::{self, Engine, prompt_in_chunks};
use crate::rig::{Rig, Tensors};
use paged_kv::reference::{AttentionInputs, Rows, RowsMut, attention_decode, log_sum_exp};
use paged_kv::{
    ArenaLayout, CacheConfig, ConfigError, DecodeItem, KvPart, KvType, ModelShape, SplitConfig, StepPlan,
};

struct Twins;

impl Engine for Twins {
    fn attend(&self, rig: &Rig, plan: &StepPlan, tensors: &Tensors, split: &SplitConfig) -> Vec<f32> {
        rig.attend(plan, tensors, split)
    }

    fn log_sum_exp(&self, rig: &Rig, plan: &StepPlan, tensors: &Tensors) -> f32 {
        let query = Rows::new(&tensors.query, rig.shape.num_query_heads() as usize * rig.k_len);
        let inputs = AttentionInputs::new(&rig.cpu, plan, 0, query);
        let item = DecodeItem { sequence: 0, first_token: 0, end_token: plan.context_lens()[0], partial: 0 };
        let mut partial = vec![0.0; rig.cpu.partial_len(0)];
        let mut partials = RowsMut::new(&mut partial, rig.cpu.partial_len(0));
        attention_decode(&inputs, &[item], &mut RowsMut::new(&mut [], 1), &mut partials);
        log_sum_exp(partial[rig.v_len], partial[rig.v_len + 1])
    }
}

macro_rules! on_the_twins {
    ($($name:ident),* $(,)?) => {$(
        #[test]
        fn $name() {
            bug_cases::$name(&Twins);
        }
    )*};
}

on_the_twins!(
    b01_unused_slots_of_the_last_block_never_reach_the_output,
    b01_zeroed_unused_slots_do_not_enter_the_denominator,
    b03_every_length_around_a_block_boundary_reads_exactly_its_tokens,
    b07_a_single_key_returns_its_value_exactly,
    b07_logits_far_below_zero_weigh_as_they_should,
    b09_products_beyond_the_16_bit_range_stay_finite,
    b15_every_query_head_reads_its_own_kv_head,
    b17_odd_head_sizes_do_not_bleed_into_the_next_head,
    b17_the_scale_is_of_the_real_head_size,
    b29_a_sequence_with_nan_changes_no_bit_of_its_neighbour,
    b31_a_prompt_in_chunks_equals_the_prompt_at_once,
);

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
fn b15_heads_that_do_not_divide_are_refused() {
    for (num_query_heads, num_kv_heads) in [(33, 2), (3, 2), (4, 0)] {
        let shape = ModelShape::new(1, num_query_heads, num_kv_heads, 64);
        let error = CacheConfig::for_blocks(4, &shape, KvType::F16).map(|_| ());
        assert!(matches!(error, Err(ConfigError::HeadRatio { .. } | ConfigError::Zero { .. })));
    }
}

#[test]
fn b21_addresses_do_not_wrap_at_two_to_the_31() {
    // 8 heads of 128 lanes, 16 tokens, keys and values in f16: 16384 words per block.
    let shape = ModelShape::new(1, 8, 8, 128);
    let config = CacheConfig::for_blocks(1 << 19, &shape, KvType::F16).expect("a valid configuration");
    let layout = ArenaLayout::new(*config.layout(), 1 << 19, 1).unwrap();
    let first_words =
        [131_071, 131_072, 262_143, 262_144].map(|block| layout.row_word(0, KvPart::K, block, 0, 0));
    assert_eq!(first_words, [2_147_467_264, 2_147_483_648, 4_294_950_912, 4_294_967_296]);
    // An arena that 32 bits cannot address is refused with both numbers.
    let refused = ConfigError::LayerExceedsArena {
        layer_bytes: 34_359_738_368,
        max_bytes: 2_147_483_644,
        max_blocks: 32_767,
    };
    assert_eq!(config.arenas(u64::MAX), Err(refused));
}

#[test]
fn b31_a_chunk_takes_only_the_blocks_that_it_needs() {
    let (mut rig, table, _) = prompt_in_chunks(&Twins, 16, &[20, 12]);
    assert_eq!(rig.kv.block_ids(table).expect("a table").len(), 2);
    rig.fill(&[(table, 1)]);
    assert_eq!(rig.kv.block_ids(table).expect("a table").len(), 3, "the first decoded token takes the third");
    let (rig, table, _) = prompt_in_chunks(&Twins, 16, &[17, 3]);
    assert_eq!(rig.kv.block_ids(table).expect("a table").len(), 2, "the second chunk takes none");
}
