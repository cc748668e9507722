//! Single kernels on arrays that no plan holds: spans without keys, chosen slots, copies and partial results, dispatches
//! beyond 65,535 workgroups; and how often an attention kernel loads what it reads.
//!
//! Where a kernel only moves or rounds, its result is compared with the CPU twin's bit for bit.

use paged_kv::reference::{Rows, append, block_copy};
use paged_kv::shaders::Kernel;
use paged_kv::{
    BlockCopy, CacheConfig, DIRECT, DecodeItem, KvFormat, KvPart, KvType, MergeItem, ModelShape,
    PADDING_SLOT, PrefillItem,
};

use crate::device::on_each_adapter;
use crate::device_rig::{on_each_adapter_but_gl, open};
use crate::raw::{RawKernels, RawStep};
use crate::rig::Rig;

/// A pool of many blocks, whose tables would be too large at their usual size: `max_sequences` of `max_tokens` tokens.
fn large(kv_heads: u32, block_size: u32, num_blocks: u32, max_sequences: u32, max_tokens: u32) -> Rig {
    let shape = ModelShape::new(1, kv_heads, kv_heads, 8);
    let config = CacheConfig::for_blocks(num_blocks, &shape, KvType::F16)
        .and_then(|config| config.with_max_sequences(max_sequences))
        .and_then(|config| config.with_max_sequence_tokens(max_tokens))
        .and_then(|config| config.with_block_size(block_size))
        .expect("a valid configuration");
    Rig::of(shape, config)
}

/// Every slot of the cache holds a random key and value.
fn randomise(rig: &mut Rig) {
    let block = *rig.cpu.layout().block();
    for id in 0..rig.cpu.layout().num_blocks() {
        for head in 0..block.num_kv_heads() {
            for slot in 0..block.block_size() {
                for (part, len) in [(KvPart::K, rig.k_len), (KvPart::V, rig.v_len)] {
                    let row: Vec<f32> = (0..len).map(|_| rig.random.unit()).collect();
                    rig.cpu.write_row(0, part, id, head, slot, &row);
                }
            }
        }
    }
}

const ALL_FORMATS: [(KvType, KvType); 4] = [
    (KvType::F32, KvType::F32),
    (KvType::F16, KvType::F16),
    (KvType::F16, KvType::F32),
    (KvType::F32, KvType::F16),
];

#[test]
fn append_writes_the_twins_words() {
    // Beside random values: halfway between two 16-bit floats on either side of an even one, the edges of the
    // subnormals, what rounds up to the largest finite value and what lies beyond.
    let odd = [
        1.000_488_3,
        1.001_464_8,
        6.1035156e-5,
        6.097_555e-5,
        5.9604645e-8,
        2.9802322e-8,
        8.940697e-8,
        1e-30,
        -0.0,
        65503.9,
        65520.0,
        -1e9,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        0.1,
    ];
    on_each_adapter(|adapter| {
        let gpu = open(adapter);
        let kernels = RawKernels::new(&gpu);
        for (k_type, v_type) in ALL_FORMATS {
            for (block_size, k_dim, v_dim) in [(1, 8, 8), (4, 40, 24), (16, 64, 128)] {
                let format = KvFormat::new(k_type, v_type).with_v_head_dim(v_dim);
                let mut rig = Rig::new((3, 3, k_dim), format, block_size, 64);
                rig.cpu.words_mut().fill(0xdead_beef);
                let raw = kernels.of(&rig);
                let mut slots: Vec<u32> = (0..64 * block_size).collect();
                rig.random.shuffle(&mut slots);
                slots.truncate(24);
                slots.splice(5..5, [PADDING_SLOT; 3]);
                let mut rows = |dim: u32| -> Vec<f32> {
                    (0..slots.len() * 3 * dim as usize)
                        .map(|index| if index % 3 == 0 { odd[index / 3 % 16] } else { rig.random.unit() })
                        .collect()
                };
                let (key, value) = (rows(k_dim), rows(v_dim));
                let step = RawStep { slot_mapping: slots.clone(), ..RawStep::default() };
                let mut buffers = raw.buffers(rig.cpu.words(), &[]);
                (buffers.key, buffers.value) = (raw.buffer(&key), raw.buffer(&value));
                raw.dispatch(Kernel::Append, &step, &buffers);
                let key = Rows::new(&key, 3 * k_dim as usize);
                let value = Rows::new(&value, 3 * v_dim as usize);
                append(&mut rig.cpu, 0, &slots, key, value);
                assert!(
                    raw.read::<u32>(&buffers.arena) == rig.cpu.words(),
                    "{k_type} {v_type} P {block_size}"
                );
            }
        }
    });
}

#[test]
fn block_copy_writes_the_twins_words() {
    on_each_adapter(|adapter| {
        let gpu = open(adapter);
        let kernels = RawKernels::new(&gpu);
        for (k_type, v_type) in ALL_FORMATS {
            // More than the 1024 units of 16 bytes that one workgroup copies, and less.
            for (block_size, head_dim) in [(1, 8), (64, 128)] {
                let mut rig = Rig::new((3, 3, head_dim), KvFormat::new(k_type, v_type), block_size, 16);
                (0..).zip(rig.cpu.words_mut()).for_each(|(index, word)| *word = index);
                let raw = kernels.of(&rig);
                // A fan-out, a copy of a block with itself, the first and the last block.
                let block_copies: Vec<BlockCopy> = [(0, 5), (0, 7), (3, 3), (15, 2), (8, 14)]
                    .map(|(source, destination)| BlockCopy { source, destination })
                    .into();
                let buffers = raw.buffers(rig.cpu.words(), &[]);
                let step = RawStep { block_copies: block_copies.clone(), ..RawStep::default() };
                raw.dispatch(Kernel::BlockCopy, &step, &buffers);
                block_copy(&mut rig.cpu, &block_copies);
                assert!(
                    raw.read::<u32>(&buffers.arena) == rig.cpu.words(),
                    "{k_type} {v_type} P {block_size}"
                );
            }
        }
    });
}

/// One row of a sequence of 100 tokens, seen in the given spans: the kernels' partial results and their merge.
fn merged(kernels: &RawKernels<'_>, rig: &Rig, spans: &[(u32, u32)], query: &[f32]) -> Vec<f32> {
    let raw = kernels.of(rig);
    let decode_items = (0..)
        .zip(spans)
        .map(|(partial, &(first_token, end_token))| DecodeItem {
            sequence: 0,
            first_token,
            end_token,
            partial,
        })
        .collect();
    let step = RawStep {
        query_starts: vec![0, 1],
        context_lens: vec![100],
        table_rows: vec![0],
        decode_items,
        merge_items: vec![MergeItem {
            row: 0,
            first_partial: 0,
            num_partials: spans.len() as u32,
            padding: 0,
        }],
        ..RawStep::default()
    };
    let table: Vec<u32> = (0..rig.kv.config().table_entries()).rev().collect();
    let mut buffers = raw.buffers(rig.cpu.words(), &table);
    let heads = rig.shape.num_query_heads() as usize;
    buffers.query = raw.buffer(query);
    // Whatever was in the scratch must not matter.
    buffers.partials = raw.buffer(&vec![f32::NAN; spans.len() * heads * (rig.v_len + 4)]);
    buffers.output = raw.buffer(&vec![f32::NAN; heads * rig.v_len]);
    raw.dispatch(Kernel::AttentionDecode, &step, &buffers);
    raw.dispatch(Kernel::AttentionMerge, &step, &buffers);
    raw.read(&buffers.output)
}

#[test]
fn b05_spans_without_keys_count_as_nothing_and_rows_without_keys_are_zero() {
    on_each_adapter(|adapter| {
        let gpu = open(adapter);
        let kernels = RawKernels::new(&gpu);
        let mut rig = Rig::new((2, 1, 8), KvType::F32, 4, 32);
        randomise(&mut rig);
        let query: Vec<f32> = (0..16).map(|_| rig.random.unit()).collect();
        let plain = merged(&kernels, &rig, &[(0, 64), (64, 100)], &query);
        let with_empty = merged(&kernels, &rig, &[(0, 0), (0, 64), (64, 64), (64, 100), (0, 0)], &query);
        assert!(plain.iter().all(|x| x.is_finite()));
        assert_eq!(plain, with_empty);
        assert_eq!(merged(&kernels, &rig, &[(0, 0), (64, 64)], &query), [0.0; 16]);

        // A row of its own, of length 0, all keys and values NaN.
        rig.cpu.words_mut().fill(f32::NAN.to_bits());
        let raw = kernels.of(&rig);
        let item = DecodeItem { sequence: 0, first_token: 0, end_token: 0, partial: DIRECT };
        let step = RawStep {
            query_starts: vec![0, 1],
            context_lens: vec![0],
            table_rows: vec![0],
            decode_items: vec![item],
            ..RawStep::default()
        };
        let mut buffers = raw.buffers(rig.cpu.words(), &[0; 32]);
        (buffers.query, buffers.output) = (raw.buffer(&query), raw.buffer(&[f32::NAN; 16]));
        raw.dispatch(Kernel::AttentionDecode, &step, &buffers);
        assert_eq!(raw.read::<f32>(&buffers.output), [0.0; 16]);
    });
}

/// Counts every load that `common/load.wgsl` makes.
const COUNTED_LOADS: &str = "
@group(3) @binding(0) var<storage, read_write> counters: array<atomic<u32>, 4>;

fn load_k_chunk(address: u32) -> vec4<u32> {
    atomicAdd(&counters[0], 1u);
    return arena[address];
}

fn load_v_chunk(address: u32) -> vec4<u32> {
    atomicAdd(&counters[1], 1u);
    return arena[address];
}

fn load_table_entry(index: u32) -> u32 {
    atomicAdd(&counters[2], 1u);
    return block_tables[index];
}
";

/// Loads of keys and values (16 bytes each) and of table entries that `kernel` makes for a step over a zeroed cache.
fn loads(kernels: &RawKernels<'_>, rig: &Rig, kernel: Kernel, step: &RawStep) -> [u32; 3] {
    let raw = kernels.of(rig);
    let tables = vec![0u32; rig.kv.config().table_entries() as usize];
    let mut buffers = raw.buffers(rig.cpu.words(), &tables);
    let rows = *step.query_starts.last().expect("the end of the last sequence") as usize;
    let heads = rig.shape.num_query_heads() as usize;
    buffers.query = raw.buffer(&vec![0f32; rows * heads * rig.k_len]);
    buffers.output = raw.buffer(&vec![0f32; rows * heads * rig.v_len]);
    buffers.partials = raw.buffer(&vec![0f32; step.decode_items.len() * heads * (rig.v_len + 4)]);
    raw.dispatch(kernel, step, &buffers);
    let counters: Vec<u32> = raw.read(&buffers.counters);
    [counters[0], counters[1], counters[2]]
}

#[test]
fn decode_loads_each_key_value_and_table_entry_once_for_all_query_heads() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let kernels = RawKernels::with_load(&gpu, COUNTED_LOADS);
        // The kernels stage 128 table entries at once: all, or every 128 keys, or after 256.
        for block_size in [1, 2, 16, 256] {
            // Three kv heads of 300 tokens, in one span or in two.
            let spans: &[(u32, u32)] = if block_size == 16 { &[(0, 128), (128, 300)] } else { &[(0, 300)] };
            let decode_items: Vec<DecodeItem> = (0..)
                .zip(spans)
                .map(|(partial, &(first_token, end_token))| DecodeItem {
                    sequence: 0,
                    first_token,
                    end_token,
                    partial,
                })
                .collect();
            let step = RawStep {
                query_starts: vec![0, 1],
                context_lens: vec![300],
                table_rows: vec![0],
                decode_items,
                ..RawStep::default()
            };
            // Keys of 80 bytes, values of 128.
            let format = KvFormat::new(KvType::F16, KvType::F32).with_v_head_dim(32);
            let once = [3 * 300 * 5, 3 * 300 * 8, 3 * 300u32.div_ceil(block_size)];
            // More than eight query heads per kv head go in tiles, each of which reads everything once.
            for (ratio, tiles) in [(1, 1), (3, 1), (8, 1), (16, 2), (71, 9)] {
                let rig = Rig::new((3 * ratio, 3, 40), format, block_size, 512);
                let counted = loads(&kernels, &rig, Kernel::AttentionDecode, &step);
                assert_eq!(counted, once.map(|loads| loads * tiles), "P {block_size}, ratio {ratio}");
            }
        }
    });
}

#[test]
fn prefill_loads_each_visible_key_and_value_once_per_tile_of_queries() {
    on_each_adapter_but_gl(|adapter| {
        let gpu = open(adapter);
        let kernels = RawKernels::with_load(&gpu, COUNTED_LOADS);
        // Twelve rows behind 60 tokens.
        for (ratio, block_size) in [(1, 16), (3, 16), (8, 16), (3, 1), (3, 64)] {
            let rig = Rig::new((2 * ratio, 2, 40), KvType::F16, block_size, 128);
            let queries = 12 * ratio;
            let tiles: Vec<(u32, u32)> =
                (0..queries).step_by(8).map(|first| (first, queries.min(first + 8))).collect();
            let prefill_items = tiles
                .iter()
                .map(|&(first_query, end_query)| PrefillItem {
                    sequence: 0,
                    first_query,
                    end_query,
                    first_token: 0,
                    end_token: 60 + (end_query - 1) / ratio + 1,
                    partial: DIRECT,
                    num_spans: 1,
                    guarded_from: 60 + (end_query - 1) / ratio + 1,
                })
                .collect();
            let step = RawStep {
                query_starts: vec![0, 12],
                context_lens: vec![72],
                table_rows: vec![0],
                prefill_items,
                ..RawStep::default()
            };
            // What the last query of each tile sees.
            let ends = || tiles.iter().map(|&(_, end)| 60 + (end - 1) / ratio + 1);
            let keys: u32 = ends().sum();
            let entries: u32 = ends().map(|end| end.div_ceil(block_size)).sum();
            let counted = loads(&kernels, &rig, Kernel::AttentionPrefill, &step);
            assert_eq!(counted, [2 * keys * 5, 2 * keys * 5, 2 * entries], "ratio {ratio}, P {block_size}");
        }
    });
}

#[test]
fn b25_append_reaches_every_row_beyond_65535() {
    on_each_adapter(|adapter| {
        let gpu = open(adapter);
        let kernels = RawKernels::new(&gpu);
        let mut rig = large(1, 16, 4097, 1, 16);
        let raw = kernels.of(&rig);
        let slot_mapping: Vec<u32> = (0..65_537).rev().collect();
        let rows: Vec<f32> = (0..65_537 * 8).map(|index| (index % 2048) as f32).collect();
        let mut buffers = raw.buffers(rig.cpu.words(), &[]);
        (buffers.key, buffers.value) = (raw.buffer(&rows), raw.buffer(&rows));
        append(&mut rig.cpu, 0, &slot_mapping, Rows::new(&rows, 8), Rows::new(&rows, 8));
        raw.dispatch(Kernel::Append, &RawStep { slot_mapping, ..RawStep::default() }, &buffers);
        assert!(raw.read::<u32>(&buffers.arena) == rig.cpu.words());
    });
}

#[test]
fn b25_block_copy_reaches_every_pair_beyond_65535() {
    on_each_adapter(|adapter| {
        let gpu = open(adapter);
        let kernels = RawKernels::new(&gpu);
        let mut rig = large(1, 1, 2 * 65_537, 1, 1);
        (0..).zip(rig.cpu.words_mut()).for_each(|(index, word)| *word = index);
        let raw = kernels.of(&rig);
        let block_copies: Vec<BlockCopy> = (0..65_537)
            .map(|pair| BlockCopy { source: 2 * pair, destination: 2 * (65_536 - pair) + 1 })
            .collect();
        let buffers = raw.buffers(rig.cpu.words(), &[]);
        block_copy(&mut rig.cpu, &block_copies);
        raw.dispatch(Kernel::BlockCopy, &RawStep { block_copies, ..RawStep::default() }, &buffers);
        assert!(raw.read::<u32>(&buffers.arena) == rig.cpu.words());
    });
}

#[test]
fn b25_decode_reaches_every_row_and_head_beyond_65535_workgroups() {
    on_each_adapter(|adapter| {
        let gpu = open(adapter);
        let kernels = RawKernels::new(&gpu);
        // 1640 sequences of one token and 40 kv heads: 65,600 workgroups. The output is each head's value, a small
        // integer that 16 bits hold exactly.
        let mut rig = large(40, 1, 1640, 1640, 1);
        let raw = kernels.of(&rig);
        let value = |block: u32, head: u32| [((block * 40 + head) % 2039) as f32; 8];
        for block in 0..1640 {
            for head in 0..40 {
                rig.cpu.write_row(0, KvPart::V, block, head, 0, &value(block, head));
            }
        }
        let item = |sequence| DecodeItem { sequence, first_token: 0, end_token: 1, partial: DIRECT };
        let step = RawStep {
            query_starts: (0..=1640).collect(),
            context_lens: vec![1; 1640],
            table_rows: (0..1640).collect(),
            decode_items: (0..1640).map(item).collect(),
            ..RawStep::default()
        };
        // Sequence s is row s, and its only block is 1639 - s.
        let tables: Vec<u32> = (0..1640).rev().collect();
        let mut buffers = raw.buffers(rig.cpu.words(), &tables);
        buffers.query = raw.buffer(&vec![0f32; 1640 * 40 * 8]);
        buffers.output = raw.buffer(&vec![f32::NAN; 1640 * 40 * 8]);
        raw.dispatch(Kernel::AttentionDecode, &step, &buffers);
        let output: Vec<f32> = raw.read(&buffers.output);
        let expected: Vec<f32> =
            (0..1640).rev().flat_map(|block| (0..40).flat_map(move |head| value(block, head))).collect();
        assert!(output == expected);
    });
}
