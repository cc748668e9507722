//! Faults that users of other paged caches reported, on the attention kernels. `tests/core/support/bug_cases.rs` has the inputs,
//! which also run on the CPU twins. The kernels read the twin's words, and append is compared with the twin elsewhere.

use paged_kv::reference::log_sum_exp;
use paged_kv::shaders::{Kernel, PREFILL_QUERIES};
use paged_kv::{BlockCopy, DecodeItem, KvType, PADDING_SLOT, SplitConfig, StepPlan, WorkSplit};

use crate::bug_cases::{self, Engine};
use crate::device::on_each_adapter;
use crate::device_rig::{on_each_adapter_but_gl, open};
use crate::raw::{RawKernels, RawStep};
use crate::rig::{Rig, Tensors, one_span};

impl Engine for RawKernels<'_> {
    fn attend(&self, rig: &Rig, plan: &StepPlan, tensors: &Tensors, split: &SplitConfig) -> Vec<f32> {
        let mut work = WorkSplit::default();
        // The most queries that a workgroup of the kernel takes.
        work.split(plan, &SplitConfig { prefill_queries: PREFILL_QUERIES, ..*split });
        let raw = self.of(rig);
        let step = RawStep::of(plan, &work);
        let heads = rig.shape.num_query_heads() as usize;
        let mut buffers = raw.buffers(rig.cpu.words(), rig.cpu.tables(0));
        buffers.query = raw.buffer(&tensors.query);
        buffers.output = raw.buffer(&vec![f32::NAN; plan.num_rows() as usize * heads * rig.v_len]);
        buffers.partials = raw.buffer(&vec![f32::NAN; work.num_partials as usize * heads * (rig.v_len + 4)]);
        for (kernel, is_needed) in [
            (Kernel::AttentionDecode, !work.decode_items.is_empty()),
            (Kernel::AttentionPrefill, !work.prefill_items.is_empty()),
            (Kernel::AttentionMerge, !work.merge_items.is_empty()),
        ] {
            if is_needed {
                raw.dispatch(kernel, &step, &buffers);
            }
        }
        raw.read(&buffers.output)
    }

    fn log_sum_exp(&self, rig: &Rig, plan: &StepPlan, tensors: &Tensors) -> f32 {
        let raw = self.of(rig);
        let item = DecodeItem { sequence: 0, first_token: 0, end_token: plan.context_lens()[0], partial: 0 };
        let step = RawStep { decode_items: vec![item], ..RawStep::of(plan, &WorkSplit::default()) };
        let heads = rig.shape.num_query_heads() as usize;
        let mut buffers = raw.buffers(rig.cpu.words(), rig.cpu.tables(0));
        buffers.query = raw.buffer(&tensors.query);
        buffers.partials = raw.buffer(&vec![f32::NAN; heads * (rig.v_len + 4)]);
        raw.dispatch(Kernel::AttentionDecode, &step, &buffers);
        let partial: Vec<f32> = raw.read(&buffers.partials);
        log_sum_exp(partial[rig.v_len], partial[rig.v_len + 1])
    }
}

macro_rules! on_the_kernels {
    ($($on:ident: $($name:ident),*;)*) => {$($(
        #[test]
        fn $name() {
            $on(|adapter| bug_cases::$name(&RawKernels::new(&open(adapter))));
        }
    )*)*};
}

on_the_kernels! {
    on_each_adapter:
        b01_zeroed_unused_slots_do_not_enter_the_denominator,
        b03_every_length_around_a_block_boundary_reads_exactly_its_tokens,
        b29_a_sequence_with_nan_changes_no_bit_of_its_neighbour;
    on_each_adapter_but_gl:
        b01_unused_slots_of_the_last_block_never_reach_the_output,
        b07_a_single_key_returns_its_value_exactly,
        b07_logits_far_below_zero_weigh_as_they_should,
        b09_products_beyond_the_16_bit_range_stay_finite,
        b15_every_query_head_reads_its_own_kv_head,
        b17_odd_head_sizes_do_not_bleed_into_the_next_head,
        b17_the_scale_is_of_the_real_head_size,
        b31_a_prompt_in_chunks_equals_the_prompt_at_once;
}

/// A fork whose tail block is copied, and then written through both tables: the output of the step, with the kernels run
/// in the given order, and the twin's.
fn fork_step(kernels: &RawKernels<'_>, order: &[Kernel]) -> (Rig, StepPlan, Tensors, Vec<f32>) {
    let mut rig = Rig::new((2, 1, 8), KvType::F32, 4, 8);
    let parent = rig.open();
    rig.fill(&[(parent, 6)]);
    let child = rig.kv.fork(parent, 6, 16).expect("a free table");
    let before = rig.cpu.clone();
    let plan = rig.plan(&[(parent, 1), (child, 1)]);
    assert_eq!(plan.block_copies().len(), 1);
    let tensors = rig.tensors(&plan);
    rig.write(&plan, &tensors);
    let mut work = WorkSplit::default();
    work.split(&plan, &one_span(&rig));
    let raw = kernels.of(&rig);
    let step = RawStep::of(&plan, &work);
    let mut buffers = raw.buffers(before.words(), rig.cpu.tables(0));
    buffers.query = raw.buffer(&tensors.query);
    (buffers.key, buffers.value) = (raw.buffer(&tensors.key), raw.buffer(&tensors.value));
    buffers.output = raw.buffer(&[f32::NAN; 32]);
    order.iter().for_each(|&kernel| raw.dispatch(kernel, &step, &buffers));
    let output = raw.read(&buffers.output);
    (rig, plan, tensors, output)
}

#[test]
fn b41_copies_recorded_before_the_append_keep_its_token_and_copies_recorded_last_do_not() {
    on_each_adapter(|adapter| {
        let gpu = open(adapter);
        let kernels = RawKernels::new(&gpu);
        let order = [Kernel::BlockCopy, Kernel::Append, Kernel::AttentionDecode];
        let (rig, plan, tensors, right) = fork_step(&kernels, &order);
        rig.assert_dense(&plan, &tensors, &right, 1e-5);
        let (_, _, _, wrong) =
            fork_step(&kernels, &[Kernel::Append, Kernel::AttentionDecode, Kernel::BlockCopy]);
        assert_ne!(right, wrong, "the writer of the copy read a block that had not been copied");
        let (_, _, _, wrong) =
            fork_step(&kernels, &[Kernel::Append, Kernel::BlockCopy, Kernel::AttentionDecode]);
        assert_ne!(right, wrong, "the copy went over the appended token");
    });
}

#[test]
fn b23_padding_rows_leave_every_word_as_it_was() {
    on_each_adapter(|adapter| {
        let gpu = open(adapter);
        let kernels = RawKernels::new(&gpu);
        let rig = Rig::new((1, 1, 8), KvType::F16, 4, 4);
        let raw = kernels.of(&rig);
        let before: Vec<u32> = (0..rig.cpu.words().len() as u32).collect();
        let mut rows = [f32::NAN; 4 * 8];
        rows[..8].fill(2.0);
        let slot_mapping = vec![3, PADDING_SLOT, PADDING_SLOT, PADDING_SLOT];
        let mut buffers = raw.buffers(&before, &[]);
        (buffers.key, buffers.value) = (raw.buffer(&rows), raw.buffer(&rows));
        raw.dispatch(Kernel::Append, &RawStep { slot_mapping, ..RawStep::default() }, &buffers);
        let after: Vec<u32> = raw.read(&buffers.arena);
        let changed: Vec<u32> = (0..after.len() as u32).filter(|&i| after[i as usize] != i).collect();
        // Slot 3 of block 0: four words of its key, and of its value behind the keys of four slots.
        assert_eq!(changed, [12, 13, 14, 15, 28, 29, 30, 31]);
        assert!(changed.iter().all(|&i| after[i as usize] == 0x4000_4000));
    });
}

#[test]
fn b41_one_source_may_have_several_copies_and_a_block_copied_onto_itself_stays() {
    on_each_adapter(|adapter| {
        let gpu = open(adapter);
        let kernels = RawKernels::new(&gpu);
        let rig = Rig::new((1, 1, 8), KvType::F16, 4, 4);
        let raw = kernels.of(&rig);
        let block_words = rig.cpu.layout().block_stride_words(0) as u32;
        let numbered: Vec<u32> = (0..4 * block_words).map(|word| word / block_words).collect();
        for (pairs, expected) in [(vec![(0, 1), (0, 2)], [0, 0, 0, 3]), (vec![(3, 3)], [0, 1, 2, 3])] {
            let block_copies =
                pairs.iter().map(|&(source, destination)| BlockCopy { source, destination }).collect();
            let buffers = raw.buffers(&numbered, &[]);
            raw.dispatch(Kernel::BlockCopy, &RawStep { block_copies, ..RawStep::default() }, &buffers);
            let after: Vec<u32> = raw.read(&buffers.arena);
            let wanted: Vec<u32> =
                (0..4 * block_words).map(|word| expected[(word / block_words) as usize]).collect();
            assert_eq!(after, wanted, "{pairs:?}");
        }
    });
}
