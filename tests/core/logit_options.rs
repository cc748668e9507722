//! Windows, first tokens, chunks, soft-cap, ALiBi and learned sinks on the twins: against another engine's outputs and
//! against the dense f64 attention, whatever a step is cut into, with poison in every slot that no row may see.

use crate::golden_options::golden_cases;
use crate::models_of_groups::models_of_groups;
use crate::rig::{Poison, Rig, Tensors, one_span, spans};
use paged_kv::reference::compare;
use paged_kv::{CacheConfig, KvType, LogitRule, ModelShape, Reach, SplitConfig, WorkSplit};

/// As in `reference.rs`.
const TOLERANCE: f64 = 1e-5;

const REACHES: [Reach; 8] = [
    Reach::All,
    Reach::Window { tokens: 1, first: 0 },
    Reach::Window { tokens: 7, first: 0 },
    Reach::Window { tokens: 33, first: 5 },
    Reach::Window { tokens: 16, first: 40 },
    Reach::Window { tokens: 500, first: 1 },
    Reach::Chunk { tokens: 10 },
    Reach::Chunk { tokens: 64 },
];

/// Ways to cut a step: rows in one span, in spans, tiles in spans, and batch-invariant.
fn splits(rig: &Rig, layer: u32) -> [SplitConfig; 4] {
    let plain = rig.cpu.split_config(layer, 1);
    let many = SplitConfig {
        prefill_queries: 5,
        span_quantum: 4,
        target_workgroups: 512,
        workgroups_per_tile: 1,
        max_partials: 4096,
        ..plain
    };
    let spans = |tokens| SplitConfig { fixed_span_tokens: Some(tokens), max_partials: 4096, ..plain };
    let invariant = SplitConfig { batch_invariant: true, prefill_queries: 7, ..spans(8) };
    [spans(1 << 20), spans(32), many, invariant]
}

fn rig(shape: ModelShape, block_size: u32, num_blocks: u32) -> Rig {
    let config = CacheConfig::for_blocks(num_blocks, &shape, KvType::F32)
        .and_then(|config| config.with_block_size(block_size))
        .and_then(|config| config.with_max_sequences(num_blocks + 8))
        .unwrap();
    Rig::of(shape, config)
}

/// The rule with all options, for so many query heads.
fn every_option(heads: u32) -> LogitRule {
    LogitRule::new()
        .with_scale(0.3)
        .with_soft_cap(3.0)
        .with_slopes(LogitRule::alibi_slopes(heads))
        .with_sinks((0..heads).map(|head| head as f32 - 1.0))
}

#[test]
fn the_outputs_are_another_engines() {
    let mut compared = 0;
    for case in golden_cases() {
        for cut in 0..4 {
            for chunk in [1000, 41] {
                let mut rig = rig(case.shape.clone(), 16, 32);
                rig.shuffle_free_blocks();
                let (query_len, kv_len) = (case.query.len() as u32, case.key.len() as u32);
                let (query_len, kv_len) = (query_len / case.context, kv_len / case.context);
                let table = rig.open();
                let mut start = 0;
                let mut output = Vec::new();
                while start < case.context {
                    let rows = chunk.min(case.context - start);
                    let part = |tensor: &[f32], len: u32| {
                        tensor[(start * len) as usize..((start + rows) * len) as usize].to_vec()
                    };
                    let tensors = Tensors {
                        query: part(&case.query, query_len),
                        key: part(&case.key, kv_len),
                        value: part(&case.value, kv_len),
                    };
                    let plan = rig.plan(&[(table, rows)]);
                    rig.write(&plan, &tensors);
                    output.extend(rig.attend(&plan, &tensors, &splits(&rig, 0)[cut]));
                    rig.commit(plan);
                    rig.poison_unseen(&[table], Poison::Nan);
                    start += rows;
                }
                let last = output.len() - (case.rows * query_len) as usize;
                let compared_rows = compare(&output[last..], &case.output, rig.v_len, TOLERANCE);
                compared_rows.unwrap_or_else(|mismatch| panic!("{}, cut {cut}: {mismatch}", case.name));
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 30 * 8);
}

/// One history of three sequences that grow by chunks and by single rows, with poison between steps.
fn check_history(shape: &ModelShape, block_size: u32, cut: usize) {
    let mut rig = rig(shape.clone(), block_size, 600 / block_size);
    rig.shuffle_free_blocks();
    let tables = [rig.open(), rig.open(), rig.open()];
    for rows in [[30, 1, 9], [1, 1, 40], [17, 64, 1], [1, 1, 1], [2, 70, 3], [1, 1, 1]] {
        let pushes: Vec<_> = tables.into_iter().zip(rows).collect();
        let plan = rig.plan(&pushes);
        let tensors = rig.tensors(&plan);
        rig.write(&plan, &tensors);
        let output = rig.attend(&plan, &tensors, &splits(&rig, 0)[cut]);
        rig.assert_dense(&plan, &tensors, &output, TOLERANCE);
        rig.commit(plan);
        rig.poison_unseen(&tables, Poison::ALL[cut]);
    }
}

#[test]
fn every_reach_agrees_with_dense_attention_however_it_is_cut() {
    for reach in REACHES {
        for (block_size, cut) in [(1, 0), (4, 1), (4, 2), (4, 3), (16, 2), (16, 3)] {
            check_history(&ModelShape::new(1, 6, 2, 16).with_reach(reach), block_size, cut);
        }
    }
}

#[test]
fn every_option_agrees_with_dense_attention_under_every_reach() {
    let rules = [
        LogitRule::new().with_scale(-0.5),
        LogitRule::new().with_soft_cap(0.5),
        LogitRule::new().with_slopes(LogitRule::alibi_slopes(6)),
        LogitRule::new().with_sinks([3.0, -100.0, 0.0, 50.0, 1.0, -1.0]),
        every_option(6),
    ];
    for reach in REACHES {
        for (index, rule) in rules.iter().enumerate() {
            let shape = ModelShape::new(1, 6, 2, 16).with_reach(reach).with_logits(rule.clone());
            check_history(&shape, 4, index % 4);
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_it_is_computed_with_if_the_split_is_batch_invariant() {
    for reach in REACHES {
        let shape = ModelShape::new(1, 6, 2, 16).with_reach(reach).with_logits(every_option(6));
        let run = |chunks: &[u32], neighbour: u32| {
            let mut rig = rig(shape.clone(), 4, 200);
            let (table, other) = (rig.open(), rig.open());
            let all = draw(&shape, 120);
            let (mut start, mut output) = (0, Vec::new());
            for &rows in chunks {
                let plan = rig.plan(&[(table, rows), (other, neighbour)]);
                let mut tensors = rig.tensors(&plan);
                for (tensor, all, len) in [
                    (&mut tensors.query, &all.query, 96),
                    (&mut tensors.key, &all.key, 32),
                    (&mut tensors.value, &all.value, 32),
                ] {
                    let rows = start * len..(start + rows as usize) * len;
                    tensor[..rows.len()].copy_from_slice(&all[rows]);
                }
                rig.write(&plan, &tensors);
                let split = splits(&rig, 0)[3];
                output.extend_from_slice(&rig.attend(&plan, &tensors, &split)[..rows as usize * 96]);
                start += rows as usize;
                rig.commit(plan);
            }
            output
        };
        let expected = run(&[120], 1);
        assert_eq!(run(&[1; 120], 3), expected, "{reach:?}");
        assert_eq!(run(&[50, 1, 33, 3, 33], 2), expected, "{reach:?}");
    }
}

/// Random tensors of so many rows, which are no step's.
fn draw(shape: &ModelShape, rows: u32) -> Tensors {
    let mut rig = rig(shape.clone(), 4, 200);
    let table = rig.open();
    let plan = rig.plan(&[(table, rows)]);
    rig.tensors(&plan)
}

#[test]
fn a_window_is_walked_and_nothing_before_it() {
    let reach = Reach::Window { tokens: 64, first: 4 };
    let mut rig = rig(ModelShape::new(1, 2, 1, 8).with_reach(reach), 16, 1000);
    let (one, many) = (rig.open(), rig.open());
    rig.fill(&[(one, 9999), (many, 5000)]);
    let plan = rig.plan(&[(one, 1), (many, 100)]);
    for config in [SplitConfig { span_quantum: 16, ..one_span(&rig) }, spans(&rig, 32), splits(&rig, 0)[3]] {
        let mut split = WorkSplit::default();
        split.split(&plan, &config);
        for item in &split.decode_items {
            assert!(item.first_token + 64 + config.span_quantum > 10_000, "{item:?}");
        }
        for item in &split.prefill_items {
            let context = if item.sequence == 0 { 10_000 } else { 5100 };
            let first_row = context - if item.sequence == 0 { 1 } else { 100 } + item.first_query / 2;
            assert!(item.first_token + 64 + config.span_quantum > first_row, "{item:?}");
            let most = 64 + config.span_quantum + item.end_query - item.first_query;
            assert!(item.end_token - item.first_token <= most, "{item:?}");
        }
    }
}

#[test]
fn every_layer_of_every_group_agrees_with_dense_attention() {
    for shape in models_of_groups() {
        for (block_size, cut) in [(4, 0), (8, 1), (4, 2), (4, 3)] {
            let mut rig = rig(shape.clone(), block_size, 1200 / block_size);
            rig.shuffle_free_blocks();
            let tables = [rig.open(), rig.open(), rig.open()];
            for rows in [[30, 1, 9], [1, 1, 40], [17, 64, 1], [1, 1, 1], [2, 30, 3], [1, 1, 1]] {
                let pushes: Vec<_> = tables.into_iter().zip(rows).collect();
                let plan = rig.plan(&pushes);
                rig.begin(&plan);
                for layer in 0..shape.num_layers() {
                    let tensors = rig.layer_tensors(&plan, layer);
                    rig.append(&plan, &tensors, layer);
                    let output = rig.attend_layer(&plan, &tensors, layer, &splits(&rig, layer)[cut]);
                    rig.assert_layer_dense(&plan, &tensors, layer, &output, TOLERANCE);
                }
                rig.commit(plan);
                rig.poison_unseen(&tables, Poison::ALL[cut]);
            }
        }
    }
}
