//! Contexts from 512 to 32k tokens against the f64 attention: decode, drafts, and a chunk of several tiles.

use paged_kv::{AttentionOptions, KvType, TableId};

use crate::device_rig::{DeviceRig, on_each_adapter_but_gl, open};
use crate::rig::Rig;
use crate::steps::step;

const CONTEXTS: [u32; 4] = [512, 2 << 10, 8 << 10, 32 << 10];

/// Steps behind the contexts, rows of each.
const STEPS: [[u32; 4]; 3] = [[1; 4], [5, 1, 1, 5], [1, 11, 11, 11]];

fn contexts_are_within_tolerance(kv_type: KvType, options: AttentionOptions) {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let num_blocks = CONTEXTS.iter().map(|context| context / 16 + 4).sum();
        let host = Rig::new((8, 2, 64), kv_type, 16, num_blocks);
        let mut rig = DeviceRig::new(&gpu, host, options.clone());
        rig.host.shuffle_free_blocks();
        let tables = CONTEXTS.map(|_| rig.host.open());
        // All but what the first step appends, in pieces for the sake of the tensors' size.
        for (table, context) in tables.into_iter().zip(CONTEXTS) {
            let mut left = context - 1;
            while left > 0 {
                let rows = left.min(4096);
                let plan = rig.host.plan(&[(table, rows)]);
                let tensors = rig.host.tensors(&plan);
                rig.host.write(&plan, &tensors);
                rig.append(&plan, &tensors);
                rig.host.commit(plan);
                left -= rows;
            }
        }
        for rows in STEPS {
            let pushes: Vec<(TableId, u32)> = tables.into_iter().zip(rows).collect();
            step(&mut rig, &pushes);
        }
    });
}

#[test]
fn contexts_to_32k_in_spans_that_fill_the_device() {
    contexts_are_within_tolerance(KvType::F16, AttentionOptions::default());
}

#[test]
fn contexts_to_32k_in_one_span() {
    contexts_are_within_tolerance(KvType::F32, AttentionOptions::default().fixed_span_tokens(u32::MAX));
}
