//! What the device part gives today for one ordinary group of layers: the metadata words of some histories' steps under
//! three ways to split their work, and the text of every shader variant for it, as FNV-1a hashes in `gate/*.txt`.
//!
//! `PAGED_KV_GATE=write` writes the files anew.

use crate::config::CacheConfig;
use crate::gpu::metadata::{Headers, StepRecord, num_headers, pack};
use crate::gpu::shader::{RowRule, all_variants};
use crate::ids::RequestId;
use crate::model::{KvType, ModelShape};
use crate::reach::Reach;
use crate::schedule::{
    Admission, PreemptionMode, Request, RowResult, Schedule, Scheduler, SchedulerConfig, SplitConfig,
    StepPlan, TransferReport, WorkSplit,
};
use std::fmt::Write as _;
use std::path::PathBuf;

/// FNV-1a, 64 bits.
fn fnv(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Holds a text to what was written down, line by line, or writes it down.
fn hold(name: &str, text: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/gpu/gate").join(name);
    if std::env::var("PAGED_KV_GATE").is_ok_and(|wish| wish == "write") {
        std::fs::write(path, text).expect("the file can be written");
        return;
    }
    let written = std::fs::read_to_string(path).expect("the file is part of the repository");
    let written = written.replace("\r\n", "\n");
    for (written, now) in written.lines().zip(text.lines()) {
        assert_eq!(written, now, "{name}, as it was and as it is");
    }
    assert_eq!(written.lines().count(), text.lines().count(), "lines of {name}");
}

/// SplitMix64.
fn random(state: &mut u64, end: u32) -> u32 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((mixed ^ (mixed >> 31)) % u64::from(end)) as u32
}

/// Plans with prompts, decoding, branches, copies and swaps, and what they are under each of `splits`.
fn history(seed: u64, splits: &[SplitConfig; 3]) -> [Vec<u32>; 3] {
    let mut state = seed;
    let shape = ModelShape::new(2, 4, 2, 8);
    let cache = CacheConfig::for_blocks(24 + random(&mut state, 40), &shape, KvType::F16)
        .and_then(|cache| cache.with_block_size([4, 16][seed as usize % 2]))
        .and_then(|cache| cache.with_host_blocks(16))
        .expect("a valid configuration");
    let config = SchedulerConfig {
        step_tokens: 8 + random(&mut state, 60),
        admission: Admission::Overcommitted { watermark_blocks: 0 },
        preemption: [PreemptionMode::Swap, PreemptionMode::Recompute][seed as usize / 2 % 2],
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(config, cache).expect("a valid configuration");
    let mut requests: Vec<RequestId> = Vec::new();
    let mut packed = [(); 3].map(|()| Vec::new());
    for _ in 0..60 {
        let request = Request::new(vec![random(&mut state, 3); 1 + random(&mut state, 60) as usize]);
        let request = request.max_new_tokens(1 + random(&mut state, 40));
        match random(&mut state, 8) {
            0 | 1 => requests.extend(scheduler.add(request.samples(1 + random(&mut state, 3)))),
            2 => {
                let parent = requests.iter().copied().find(|&id| scheduler.tokens(id).is_some());
                let len = parent.and_then(|id| scheduler.tokens(id)).map_or(0, <[u32]>::len);
                requests.extend(parent.and_then(|parent| scheduler.fork(parent, len, request).ok()));
            }
            _ => {}
        }
        let Schedule::Step(plan) = scheduler.schedule() else { continue };
        for (words, split) in packed.iter_mut().zip(splits) {
            words.extend(words_of(&plan, split));
        }
        let results = vec![RowResult::Token(random(&mut state, 50)); plan.logit_rows().len()];
        let report = TransferReport { step: plan.step(), complete: true };
        scheduler.commit(plan, &results).expect("the outstanding plan");
        scheduler.complete_transfers(&[report]);
    }
    assert!(scheduler.stats().generated_tokens > 0);
    packed
}

/// All that is uploaded for a step, and what is recorded by it.
fn words_of(plan: &StepPlan, config: &SplitConfig) -> Vec<u32> {
    let (mut splits, mut words, mut record) = ([WorkSplit::default()], Vec::new(), StepRecord::default());
    splits[0].split(plan, config);
    // Room for the headers, which lie 64 words apart.
    let headers = Headers { count: num_headers(&splits), words: 64, groups: &[0] };
    words.resize(64 * headers.count as usize, 0);
    pack(plan, &splits, &headers, &mut words, &mut record);
    let group = &record.groups[0];
    words.extend(group.decode_dispatches.iter().chain(&group.prefill_dispatches));
    // Changed entries follow the copies.
    let changed_entries = record.params.block_copies + 2 * record.num_block_copies;
    words.extend([changed_entries, record.num_block_copies, record.stamp, splits[0].num_partials]);
    words
}

#[test]
fn metadata_words_are_what_they_were() {
    let balanced = SplitConfig {
        workgroups_per_item: 2,
        workgroups_per_tile: 2,
        heads_per_kv_head: 2,
        prefill_queries: 8,
        span_quantum: 16,
        target_workgroups: 64,
        max_partials: 256,
        fixed_span_tokens: None,
        batch_invariant: false,
        dispatch_work_budget: 1 << 24,
        reach: Reach::All,
    };
    let splits = [
        balanced,
        SplitConfig { fixed_span_tokens: Some(16), max_partials: 4096, ..balanced },
        SplitConfig { target_workgroups: 1, dispatch_work_budget: 100, prefill_queries: 2, ..balanced },
    ];
    let (mut text, mut num_words) = (String::new(), 0);
    for seed in 0..40 {
        for (number, words) in history(seed, &splits).iter().enumerate() {
            num_words += words.len();
            let hash = fnv(words.iter().flat_map(|word| word.to_le_bytes()));
            let _ = writeln!(text, "history {seed}, split {number}: {} words, {hash:016x}", words.len());
        }
    }
    assert!(num_words > 100_000, "{num_words} words in all");
    hold("metadata.txt", &text);
}

#[test]
fn the_text_of_every_variant_is_what_it_was() {
    let mut text = String::new();
    for variant in all_variants().into_iter().filter(|variant| variant.rule() == RowRule::default()) {
        let _ = writeln!(text, "{variant} {:016x}", fnv(variant.wgsl().bytes()));
    }
    assert!(text.lines().count() > 1000);
    hold("wgsl.txt", &text);
}
