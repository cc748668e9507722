//! The paged twins against the dense f64 attention.
//!
//! The tolerance is 1e-5 relative to the largest element of a head's output: f32 rounds each of a few hundred terms to
//! 6e-8, and errors of random sign grow with the root of their number: the worst case here is 3e-6, and a kernel that
//! misses or repeats a key is off by the key's share.

use crate::rig::{Lens, Rig, Tensors, one_span, spans};
use paged_kv::reference::{AttentionInputs, Rows, RowsMut, attention};
use paged_kv::{KvFormat, KvType, SplitConfig, StepPlan, TableId, WorkSplit};

const TOLERANCE: f64 = 1e-5;

impl Rig {
    /// The twin's attention for every row of a plan.
    pub(crate) fn attend(&self, plan: &StepPlan, tensors: &Tensors, split: &SplitConfig) -> Vec<f32> {
        self.attend_layer(plan, tensors, 0, split)
    }

    /// The twin's attention of a layer for every row of a plan.
    pub(crate) fn attend_layer(
        &self,
        plan: &StepPlan,
        tensors: &Tensors,
        layer: u32,
        split: &SplitConfig,
    ) -> Vec<f32> {
        let Lens { heads, k_len, v_len, .. } = self.lens(layer);
        let mut work = WorkSplit::default();
        work.split(plan, split);
        let inputs = AttentionInputs::new(&self.cpu, plan, layer, Rows::new(&tensors.query, heads * k_len));
        // A row that is not written stays NaN.
        let mut output = vec![f32::NAN; plan.num_rows() as usize * heads * v_len];
        attention(&inputs, &work, &mut RowsMut::new(&mut output, heads * v_len), &mut Vec::new());
        output
    }
}

/// Tables of the given lengths, filled with random keys and values, in blocks handed out in random order.
fn filled(rig: &mut Rig, lens: &[u32]) -> Vec<TableId> {
    rig.shuffle_free_blocks();
    let tables: Vec<TableId> = lens.iter().map(|_| rig.open()).collect();
    let pushes: Vec<(TableId, u32)> =
        tables.iter().copied().zip(lens.iter().copied()).filter(|(_, len)| *len > 0).collect();
    rig.fill(&pushes);
    tables
}

/// One step that decodes after every boundary length, and prefills chunks that end at them.
fn ragged_step(rig: &mut Rig, split: impl Fn(&Rig) -> SplitConfig) {
    let p = rig.kv.config().block_size();
    let lens = [0, 1, p - 1, p, p + 1, 2 * p];
    let tables = filled(rig, &[lens, lens].concat());
    let decodes = tables[..6].iter().map(|&table| (table, 1));
    let chunks = tables[6..].iter().zip([2, p, p + 1, 3, 2 * p, 5]).map(|(&table, rows)| (table, rows));
    // Decode and prefill alternate.
    let pushes: Vec<(TableId, u32)> =
        decodes.zip(chunks).flat_map(|(decode, chunk)| [decode, chunk]).collect();
    let plan = rig.plan(&pushes);
    let tensors = rig.tensors(&plan);
    rig.write(&plan, &tensors);
    let output = rig.attend(&plan, &tensors, &split(rig));
    rig.assert_dense(&plan, &tensors, &output, TOLERANCE);
    rig.commit(plan);
}

#[test]
fn what_is_gathered_through_a_shuffled_table_is_what_was_appended() {
    let mut rig = Rig::new((2, 2, 8), KvType::F32, 4, 16);
    rig.shuffle_free_blocks();
    let (a, b) = (rig.open(), rig.open());
    let plan = rig.plan(&[(a, 9), (b, 14)]);
    let tensors = rig.tensors(&plan);
    rig.write(&plan, &tensors);
    let (mut keys, mut values) = rig.cpu.gather(0, a.row(), 9);
    let rest = rig.cpu.gather(0, b.row(), 14);
    keys.extend(rest.0);
    values.extend(rest.1);
    assert_eq!(keys, tensors.key);
    assert_eq!(values, tensors.value);
}

#[test]
fn every_block_size_and_stored_type_agrees_with_dense_attention() {
    let formats = [
        KvFormat::from(KvType::F32),
        KvFormat::from(KvType::F16),
        KvFormat::new(KvType::F16, KvType::F32),
        KvFormat::new(KvType::F32, KvType::F16).with_v_head_dim(24),
    ];
    for block_size in [1, 4, 16, 64, 256] {
        for format in formats {
            let mut rig = Rig::new((6, 2, 16), format, block_size, 64);
            ragged_step(&mut rig, one_span);
        }
    }
}

#[test]
fn every_head_size_agrees_with_dense_attention() {
    for head_dim in [8, 40, 64, 72, 80, 96, 112, 128, 136, 256] {
        let mut rig = Rig::new((2, 1, head_dim), KvType::F16, 16, 64);
        ragged_step(&mut rig, one_span);
    }
}

#[test]
fn every_head_ratio_agrees_with_dense_attention() {
    for ratio in [1, 3, 5, 7, 8, 16, 71] {
        let mut rig = Rig::new((2 * ratio, 2, 16), KvType::F32, 4, 64);
        ragged_step(&mut rig, one_span);
    }
}

#[test]
fn one_span_to_many_agree_with_dense_attention() {
    for span_tokens in [4, 8, 16, 32, 256] {
        let mut rig = Rig::new((6, 2, 16), KvType::F16, 4, 256);
        let tables = filled(&mut rig, &[0, 3, 4, 15, 130, 500]);
        let plan = rig.plan(&tables.iter().map(|&table| (table, 1)).collect::<Vec<_>>());
        let tensors = rig.tensors(&plan);
        rig.write(&plan, &tensors);
        let output = rig.attend(&plan, &tensors, &spans(&rig, span_tokens));
        rig.assert_dense(&plan, &tensors, &output, TOLERANCE);
    }
}

#[test]
fn chunks_cut_into_spans_agree_with_dense_attention() {
    for prefill_queries in [1, 5, 8] {
        let mut rig = Rig::new((6, 2, 16), KvType::F16, 4, 256);
        let tables = filled(&mut rig, &[0, 3, 20, 130, 250]);
        let plan = rig.plan(&tables.iter().copied().zip([9, 2, 1, 5, 30]).collect::<Vec<_>>());
        let tensors = rig.tensors(&plan);
        rig.write(&plan, &tensors);
        let config = SplitConfig {
            prefill_queries,
            span_quantum: 4,
            target_workgroups: 512,
            workgroups_per_tile: 1,
            max_partials: 4096,
            ..rig.cpu.split_config(0, 1)
        };
        let mut split = WorkSplit::default();
        split.split(&plan, &config);
        assert!(split.prefill_items.iter().any(|item| item.first_token > 0), "nothing is cut");
        let output = rig.attend(&plan, &tensors, &config);
        rig.assert_dense(&plan, &tensors, &output, TOLERANCE);
    }
}

#[test]
fn tiles_of_any_size_agree_with_dense_attention() {
    for prefill_queries in [1, 2, 5, 64] {
        let mut rig = Rig::new((6, 2, 16), KvType::F32, 4, 64);
        ragged_step(&mut rig, |rig| SplitConfig { prefill_queries, ..one_span(rig) });
    }
}

#[test]
fn a_sequence_alone_and_in_a_batch_has_the_same_bits_with_fixed_spans() {
    let outputs = [false, true].map(|alone| {
        let mut rig = Rig::new((6, 2, 16), KvType::F16, 4, 64);
        let tables = filled(&mut rig, &[33, 21]);
        let before = rig.random.0;
        let plan = rig.plan(&[(tables[0], 1), (tables[1], 1)][..if alone { 1 } else { 2 }]);
        let tensors = rig.tensors(&plan);
        // The tensors are drawn query by query; give the first row the same ones in both.
        rig.random.0 = before;
        let mut tensors = tensors;
        for (tensor, len) in [(&mut tensors.query, 96), (&mut tensors.key, 32), (&mut tensors.value, 32)] {
            tensor[..len].iter_mut().for_each(|x| *x = rig.random.unit());
        }
        rig.write(&plan, &tensors);
        rig.attend(&plan, &tensors, &spans(&rig, 8))[..96].to_vec()
    });
    assert_eq!(outputs[0], outputs[1]);
}

#[test]
fn batch_invariant_rows_in_groups_agree_with_dense_attention() {
    for max_partials in [40, 200] {
        let mut rig = Rig::new((6, 2, 16), KvType::F16, 4, 256);
        let tables = filled(&mut rig, &[0, 3, 20, 130, 250]);
        let plan = rig.plan(&tables.iter().copied().zip([9, 2, 1, 5, 30]).collect::<Vec<_>>());
        let tensors = rig.tensors(&plan);
        rig.write(&plan, &tensors);
        let config = SplitConfig { batch_invariant: true, max_partials, ..spans(&rig, 8) };
        let mut split = WorkSplit::default();
        split.split(&plan, &config);
        assert!(split.groups.len() > 1, "{} groups", split.groups.len());
        let output = rig.attend(&plan, &tensors, &config);
        rig.assert_dense(&plan, &tensors, &output, TOLERANCE);
    }
}

#[test]
fn rows_of_padding_stay_as_they_are() {
    let mut rig = Rig::new((2, 1, 8), KvType::F32, 4, 4);
    let table = rig.open();
    let mut step = paged_kv::StepBuilder::new(&mut rig.kv);
    step.push(table, &[1, 2]).expect("room");
    step.pad_to(8).unwrap();
    let plan = step.finish();
    let tensors = rig.tensors(&plan);
    rig.write(&plan, &tensors);
    let output = rig.attend(&plan, &tensors, &one_span(&rig));
    assert!(output[..2 * 16].iter().all(|x| x.is_finite()));
    assert!(output[2 * 16..].iter().all(|x| x.is_nan()), "the rig fills the output with NaN");
}

#[test]
fn a_fork_reads_what_was_copied_before_either_side_wrote() {
    let mut rig = Rig::new((2, 1, 8), KvType::F32, 4, 8);
    let parent = rig.open();
    rig.fill(&[(parent, 6)]);
    let child = rig.kv.fork(parent, 6, 16).expect("a free table");
    let plan = rig.plan(&[(parent, 1), (child, 2)]);
    assert_eq!(plan.block_copies().len(), 1);
    let tensors = rig.tensors(&plan);
    rig.write(&plan, &tensors);
    let output = rig.attend(&plan, &tensors, &one_span(&rig));
    rig.assert_dense(&plan, &tensors, &output, TOLERANCE);
    // Both see the same first six tokens, and their own seventh.
    let (parent_keys, _) = rig.cpu.gather(0, parent.row(), 7);
    let (child_keys, _) = rig.cpu.gather(0, child.row(), 8);
    assert_eq!(parent_keys[..48], child_keys[..48]);
    assert_eq!(parent_keys[48..], tensors.key[..8]);
    assert_eq!(child_keys[48..], tensors.key[8..]);
}
