//! Sizes against numbers worked out by hand, and every way in which a configuration is refused.

use paged_kv::{
    Admission, ArenaLayout, CacheConfig, ConfigError, Error, KvFormat, KvPart, KvType, LayerGroup,
    MAX_ARENA_BYTES, ModelShape, Reach, Request, Schedule, Scheduler, SchedulerConfig,
};

const MIB: u64 = 1 << 20;

fn smollm2() -> ModelShape {
    ModelShape::new(30, 9, 3, 64)
}

fn tiny() -> ModelShape {
    ModelShape::new(1, 1, 1, 8)
}

/// 128 KiB of keys and values per token: 32 layers, 8 heads of 128, half precision.
fn wide() -> ModelShape {
    ModelShape::new(32, 32, 8, 128)
}

fn pool(num_blocks: u32, block_size: u32) -> CacheConfig {
    CacheConfig::for_blocks(num_blocks, &tiny(), KvType::F32).unwrap().with_block_size(block_size).unwrap()
}

#[test]
fn a_table_has_one_entry_per_block_of_the_longest_sequence() {
    for (tokens, block_size, entries) in
        [(4096, 16, 256), (4096, 256, 16), (100_000, 16, 6250), (100_001, 16, 6251), (1, 4096, 1), (7, 1, 7)]
    {
        let config = CacheConfig::for_context(tokens, 1, &tiny(), KvType::F16).unwrap();
        let config = config.with_block_size(block_size).unwrap();
        assert_eq!(config.table_entries(), entries, "{tokens} tokens in blocks of {block_size}");
        assert_eq!(config.num_blocks(), entries);
        assert_eq!(config.table_bytes(), 64 * u64::from(entries) * 4);
    }
}

#[test]
fn a_sequence_stopped_early_holds_only_the_blocks_of_its_tokens() {
    // Declared 4,096 tokens, stopped at 200: 13 blocks of 16 are held, 256 were promised.
    let config = CacheConfig::for_context(4096, 2, &tiny(), KvType::F16).unwrap();
    assert_eq!(config.num_blocks(), 512);
    let guaranteed = SchedulerConfig { admission: Admission::Guaranteed, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(guaranteed, config).unwrap();
    let chat = scheduler.add(Request::new(vec![1; 200]).max_new_tokens(3896)).unwrap();
    scheduler.add(Request::new(vec![2; 1]).max_new_tokens(4095)).unwrap();
    let third = scheduler.add(Request::new(vec![3; 1]).max_new_tokens(1)).unwrap();
    let Schedule::Step(_plan) = scheduler.schedule() else { panic!("a step") };
    let stats = scheduler.stats();
    assert_eq!(stats.cache.held_blocks, 13 + 1);
    // 2 x 256 blocks are promised, so no other is let in although 498 are free.
    assert_eq!((stats.cache.free_blocks, stats.running, stats.waiting), (498, 2, 1));
    scheduler.abort(chat).unwrap();
    let Schedule::Step(plan) = scheduler.schedule() else { panic!("a step") };
    assert_eq!(plan.num_sequences(), 2, "its promise returns with its blocks");
    assert_eq!(scheduler.tokens(third), Some(&[3][..]));
}

#[test]
fn bytes_per_token_and_block_are_those_of_all_layers() {
    let config = CacheConfig::for_blocks(1, &wide(), KvType::F16).unwrap();
    assert_eq!((config.bytes_per_token(), config.bytes_per_block()), (128 << 10, 2 * MIB));
    let config = CacheConfig::for_blocks(1, &smollm2(), KvType::F16).unwrap();
    assert_eq!((config.bytes_per_token(), config.bytes_per_block()), (23_040, 368_640));
    let config = CacheConfig::for_blocks(1, &smollm2(), KvType::F32).unwrap();
    assert_eq!((config.bytes_per_token(), config.bytes_per_block()), (46_080, 737_280));
    // Keys in f32 with 64 elements, values in f16 with 32.
    let format = KvFormat::new(KvType::F32, KvType::F16).with_v_head_dim(32);
    let config = CacheConfig::for_blocks(1, &smollm2(), format).unwrap();
    assert_eq!(config.bytes_per_token(), 30 * 3 * (64 * 4 + 32 * 2));
    assert_eq!(config.bytes_per_block(), 16 * config.bytes_per_token());
}

#[test]
fn a_token_wastes_half_a_block_on_average_and_all_but_one_slot_at_most() {
    for (block_size, expected, worst) in [(1, 0, 0), (16, 8, 15), (256, 128, 255), (4096, 2048, 4095)] {
        let config = pool(1, block_size);
        assert_eq!((config.expected_waste_tokens(), config.worst_waste_tokens()), (expected, worst));
    }
}

#[test]
fn a_cache_of_so_many_bytes_never_takes_more_and_wastes_less_than_a_block() {
    for format in [KvFormat::from(KvType::F32), KvType::F16.into()] {
        for bytes in [368_640 * 2 + 600, MIB, 10 * MIB, 512 * MIB + 1, 80 << 30] {
            for block_size in [1, 16, 256] {
                for tokens in [None, Some(512), Some(100_000)] {
                    let check = |config: &Result<CacheConfig, ConfigError>| {
                        let Ok(config) = config else { return };
                        assert!(config.bytes_total() <= bytes, "{config:?}");
                        let one_more = config.bytes_per_block()
                            + if tokens.is_none() { 4 * u64::from(config.max_sequences()) } else { 0 };
                        assert!(config.bytes_total() + one_more > bytes, "{config:?} wastes a block");
                    };
                    let config = CacheConfig::for_bytes(bytes, &smollm2(), format)
                        .and_then(|config| config.with_block_size(block_size));
                    check(&config);
                    if let Some(tokens) = tokens {
                        check(&config.and_then(|config| config.with_max_sequence_tokens(tokens)));
                    }
                }
            }
        }
    }
    let config = CacheConfig::for_bytes(512 * MIB, &smollm2(), KvType::F16).unwrap();
    // 536,870,912 / (368,640 + 64 x 4) blocks.
    assert_eq!((config.num_blocks(), config.max_sequence_tokens()), (1455, 1455 * 16));
}

#[test]
fn the_bytes_that_are_said_to_be_needed_are_enough_and_no_more() {
    let shape = smollm2();
    let error = CacheConfig::for_bytes(100, &shape, KvType::F16).unwrap_err();
    let ConfigError::TooFewBytes { bytes: 100, needed_bytes } = error else { panic!("{error}") };
    assert_eq!(CacheConfig::for_bytes(needed_bytes, &shape, KvType::F16).unwrap().num_blocks(), 1);
    assert!(CacheConfig::for_bytes(needed_bytes - 1, &shape, KvType::F16).is_err());
    // Tables of a declared size are there from the first block on.
    let config = CacheConfig::for_bytes(needed_bytes, &shape, KvType::F16).unwrap();
    let error = config.with_max_sequence_tokens(4096).unwrap_err();
    let needed_bytes = 368_640 + 64 * 256 * 4;
    assert_eq!(error, ConfigError::TooFewBytes { bytes: 368_640 + 64 * 4, needed_bytes });
    for (bytes, fits) in [(needed_bytes, true), (needed_bytes - 1, false)] {
        let config = CacheConfig::for_bytes(2 * MIB, &shape, KvType::F16).unwrap();
        assert!(config.with_max_sequence_tokens(4096).is_ok());
        let config = CacheConfig::for_bytes(bytes, &shape, KvType::F16).unwrap();
        assert_eq!(config.with_max_sequence_tokens(4096).is_ok(), fits);
    }
}

#[test]
fn options_size_the_pool_again_by_the_same_rule() {
    let config = CacheConfig::for_context(100, 3, &tiny(), KvType::F16).unwrap();
    assert_eq!((config.num_blocks(), config.max_sequences(), config.max_sequence_tokens()), (21, 64, 100));
    let config = config.with_block_size(32).unwrap();
    assert_eq!(config.num_blocks(), 12);
    let config = CacheConfig::for_context(100, 80, &tiny(), KvType::F16).unwrap();
    assert_eq!((config.num_blocks(), config.max_sequences()), (560, 80));
    let config = pool(10, 16).with_max_sequences(3).unwrap().with_block_size(8).unwrap();
    assert_eq!((config.num_blocks(), config.max_sequences(), config.max_sequence_tokens()), (10, 3, 80));
}

#[test]
fn smollm2_at_8192_tokens_fits_arenas_of_128_mib() {
    for (format, layers_per_arena, num_arenas) in [(KvType::F32, 10, 3), (KvType::F16, 15, 2)] {
        let config = CacheConfig::for_context(8192, 1, &smollm2(), format).unwrap();
        let arenas = config.arenas(128 * MIB).unwrap();
        // 8,192 tokens x 3 heads x 2 x 64 elements x 4 bytes are 12 MiB a layer in f32.
        assert_eq!((arenas.layers_per_arena(), arenas.num_arenas()), (layers_per_arena, num_arenas));
        let bytes: u64 = (0..num_arenas).map(|arena| arenas.arena_bytes(arena)).sum();
        assert_eq!(bytes, config.bytes_total() - config.table_bytes());
        assert!((0..num_arenas).all(|arena| arenas.arena_bytes(arena) <= 128 * MIB));
        assert_eq!(arenas.arena_of(29), (num_arenas - 1, layers_per_arena - 1));
    }
    // And much more: one layer of 87,376 tokens in f32 still fits.
    let config = CacheConfig::for_context(87_376, 1, &smollm2(), KvType::F32).unwrap();
    assert_eq!(config.arenas(128 * MIB).unwrap().num_arenas(), 30);
}

#[test]
fn arenas_are_as_few_as_possible_and_evenly_filled() {
    let config = CacheConfig::for_blocks(64, &wide(), KvType::F16).unwrap();
    // 64 blocks of 2 MiB: 128 MiB in all, 4 MiB a layer.
    for (max_bytes, layers) in
        [(u64::MAX, 32), (128 * MIB, 32), (128 * MIB - 1, 16), (64 * MIB, 16), (4 * MIB, 1)]
    {
        let arenas = config.arenas(max_bytes).unwrap();
        assert_eq!(arenas.layers_per_arena(), layers, "within {max_bytes}");
        let layers: u32 = (0..arenas.num_arenas()).map(|arena| arenas.layers_in(arena)).sum();
        assert_eq!(layers, 32);
    }
    // 30 layers in arenas of at most 13: three of 10 rather than 13, 13 and 4.
    let config = CacheConfig::for_context(8192, 1, &smollm2(), KvType::F32).unwrap();
    assert_eq!(config.arenas(13 * 12 * MIB).unwrap().layers_per_arena(), 10);
    let error = CacheConfig::for_blocks(64, &wide(), KvType::F16).unwrap().arenas(4 * MIB - 1).unwrap_err();
    assert_eq!(
        error,
        ConfigError::LayerExceedsArena { layer_bytes: 4 * MIB, max_bytes: 4 * MIB - 1, max_blocks: 63 }
    );
    assert!(CacheConfig::for_blocks(63, &wide(), KvType::F16).unwrap().arenas(4 * MIB - 1).is_ok());
    assert_eq!(MAX_ARENA_BYTES, 2_147_483_644);
}

#[test]
fn sizes_in_words_units_and_bytes_are_those_worked_out_by_hand() {
    let shape = ModelShape::new(5, 4, 2, 24);
    let format = KvFormat::new(KvType::F16, KvType::F32).with_v_head_dim(8);
    let config = CacheConfig::for_blocks(3, &shape, format).unwrap().with_block_size(2).unwrap();
    let block = config.layout();
    // A key row has 48 bytes, a value row 32; two heads of two tokens have 320.
    assert_eq!((block.k_row_words(), block.v_row_words(), block.layer_token_bytes()), (12, 8, 160));
    assert_eq!(
        (block.layer_block_words(), block.layer_block_units(), block.layer_block_bytes()),
        (80, 20, 320)
    );
    assert_eq!((block.block_bytes(), block.v_sum_units()), (1600, 2));
    let arenas = ArenaLayout::new(*block, 3, 2).unwrap();
    let sizes = [0, 2].map(|arena| {
        [
            arenas.block_stride_words(arena),
            arenas.block_stride_units(arena),
            arenas.block_stride_bytes(arena),
            arenas.arena_words(arena),
            arenas.arena_bytes(arena),
        ]
    });
    assert_eq!(sizes, [[160, 40, 640, 480, 1920], [80, 20, 320, 240, 960]]);
    assert_eq!([0, 1, 2, 3, 4].map(|layer| arenas.layer_start_units(layer)), [0, 20, 0, 20, 0]);
}

#[test]
fn every_row_has_its_own_place_and_rows_fill_the_arena() {
    let shape = ModelShape::new(5, 4, 2, 24);
    let format = KvFormat::new(KvType::F16, KvType::F32).with_v_head_dim(8);
    let config = CacheConfig::for_blocks(3, &shape, format).unwrap().with_block_size(2).unwrap();
    let arenas = config.arenas(config.bytes_per_block() / 5 * 3 * 2).unwrap();
    assert_eq!((arenas.layers_per_arena(), arenas.num_arenas(), arenas.layers_in(2)), (2, 3, 1));
    for arena in 0..3 {
        let mut used = vec![false; arenas.arena_bytes(arena) as usize / 4];
        for layer in arena * 2..arena * 2 + arenas.layers_in(arena) {
            for block in 0..3 {
                for (part, words) in
                    [(KvPart::K, arenas.block().k_row_words()), (KvPart::V, arenas.block().v_row_words())]
                {
                    for row in 0..4 {
                        let start = arenas.row_word(layer, part, block, row / 2, row % 2) as usize;
                        for word in &mut used[start..start + words as usize] {
                            assert!(!std::mem::replace(word, true), "two rows share a word");
                        }
                    }
                }
            }
        }
        assert!(used.iter().all(|&used| used), "head sizes that fill 16 bytes leave no gaps");
    }
}

#[test]
fn heads_start_at_multiples_of_16_bytes() {
    // One row of 8 half-precision elements is 16 bytes; 1 x 24 elements are 48.
    for (head_dim, words) in [(8, 4), (24, 12), (40, 20), (256, 128)] {
        let shape = ModelShape::new(1, 1, 1, head_dim);
        let config = CacheConfig::for_blocks(1, &shape, KvType::F16).unwrap().with_block_size(1).unwrap();
        assert_eq!(config.layout().k_head_words(), words);
    }
}

#[test]
fn fingerprints_differ_wherever_bytes_would_mean_something_else() {
    let base = CacheConfig::for_blocks(8, &smollm2(), KvType::F16).unwrap();
    let shape = |num_layers, num_kv_heads, head_dim| {
        ModelShape::new(num_layers, 9 * num_kv_heads, num_kv_heads, head_dim)
    };
    let blocks = |shape: ModelShape| CacheConfig::for_blocks(8, &shape, KvType::F16).unwrap();
    let f16 = KvType::F16;
    let others = [
        blocks(shape(29, 3, 64)),
        blocks(shape(30, 1, 64)),
        blocks(shape(30, 3, 72)),
        CacheConfig::for_blocks(8, &smollm2(), KvFormat::new(KvType::F32, f16)).unwrap(),
        CacheConfig::for_blocks(8, &smollm2(), KvFormat::new(f16, KvType::F32)).unwrap(),
        CacheConfig::for_blocks(8, &smollm2(), KvFormat::from(f16).with_v_head_dim(32)).unwrap(),
        CacheConfig::for_blocks(9, &smollm2(), f16).unwrap(),
        base.clone().with_block_size(32).unwrap(),
        base.clone().with_max_sequences(3).unwrap(),
        base.clone().with_max_sequence_tokens(64).unwrap(),
    ];
    let mut all: Vec<u64> = others.iter().map(CacheConfig::fingerprint).chain([base.fingerprint()]).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), others.len() + 1);
    assert_eq!(base.fingerprint(), CacheConfig::for_blocks(8, &smollm2(), f16).unwrap().fingerprint());
}

#[test]
fn zeros_are_refused_by_name() {
    let zero = |field| ConfigError::Zero { field };
    for (shape, field) in [
        (ModelShape::new(0, 1, 1, 8), "num_layers"),
        (ModelShape::new(1, 0, 1, 8), "num_query_heads"),
        (ModelShape::new(1, 1, 0, 8), "num_kv_heads"),
    ] {
        assert_eq!(CacheConfig::for_blocks(1, &shape, KvType::F32).unwrap_err(), zero(field));
    }
    assert_eq!(CacheConfig::for_blocks(0, &tiny(), KvType::F32).unwrap_err(), zero("num_blocks"));
    assert_eq!(CacheConfig::for_context(0, 1, &tiny(), KvType::F32).unwrap_err(), zero("tokens"));
    assert_eq!(CacheConfig::for_context(1, 0, &tiny(), KvType::F32).unwrap_err(), zero("chats"));
    assert_eq!(pool(1, 1).with_max_sequences(0).unwrap_err(), zero("max_sequences"));
    assert_eq!(pool(1, 1).with_max_sequence_tokens(0).unwrap_err(), zero("max_sequence_tokens"));
    let scheduler = |change: fn(&mut SchedulerConfig)| {
        let mut config = SchedulerConfig::default();
        change(&mut config);
        Scheduler::new(config, pool(4, 4)).unwrap_err()
    };
    assert_eq!(scheduler(|config| config.step_tokens = 0), Error::Config(zero("step_tokens")));
    assert_eq!(scheduler(|config| config.step_work_budget = 0), Error::Config(zero("step_work_budget")));
    assert_eq!(scheduler(|config| config.max_running = Some(0)), Error::Config(zero("max_running")));
    assert_eq!(
        scheduler(|config| config.max_running = Some(65)),
        Error::Config(ConfigError::MaxRunning { max_running: 65, max_sequences: 64 })
    );
    assert_eq!(
        scheduler(|config| config.admission = Admission::Overcommitted { watermark_blocks: 4 }),
        Error::Config(ConfigError::Watermark { watermark_blocks: 4, num_blocks: 4 })
    );
}

/// As in Gemma 4 and, with 576 and 512, DeepSeek's latent rows.
#[test]
fn b65_heads_above_256_are_refused_with_the_limit_and_others_may_differ() {
    let refused = |shape: &ModelShape, v_head_dim| {
        let format = KvFormat::from(KvType::F16).with_v_head_dim(v_head_dim);
        CacheConfig::for_blocks(1, shape, format).err()
    };
    let error = |head_dim| Some(ConfigError::HeadDim { head_dim, max: 256 });
    assert_eq!(refused(&ModelShape::new(1, 8, 1, 512), 512), error(512));
    assert_eq!(refused(&ModelShape::new(1, 8, 1, 576), 512), error(576));
    assert_eq!(refused(&ModelShape::new(1, 8, 1, 256), 512), error(512));
    assert_eq!(refused(&ModelShape::new(1, 8, 1, 192), 128), None);
    let windowed = LayerGroup::new([1], 8, 2, 256).with_reach(Reach::Window { tokens: 1024, first: 0 });
    let mixed = ModelShape::of_groups([LayerGroup::new([0], 8, 1, 512), windowed]);
    assert_eq!(CacheConfig::for_blocks(1, &mixed, KvType::F16).err(), error(512));
}

#[test]
fn shapes_that_no_kernel_supports_are_refused() {
    for (num_query_heads, num_kv_heads) in [(33, 2), (3, 2), (1, 2)] {
        let shape = ModelShape::new(1, num_query_heads, num_kv_heads, 8);
        assert_eq!(
            CacheConfig::for_blocks(1, &shape, KvType::F32).unwrap_err(),
            ConfigError::HeadRatio { num_query_heads, num_kv_heads }
        );
    }
    for head_dim in [0, 4, 12, 65, 264, u32::MAX] {
        let error = ConfigError::HeadDim { head_dim, max: 256 };
        let shape = ModelShape::new(1, 1, 1, head_dim);
        assert_eq!(CacheConfig::for_blocks(1, &shape, KvType::F32).unwrap_err(), error);
        let format = KvFormat::from(KvType::F32).with_v_head_dim(head_dim);
        assert_eq!(CacheConfig::for_blocks(1, &tiny(), format).unwrap_err(), error);
    }
    for block_size in [0, 3, 24, 8192, u32::MAX] {
        assert_eq!(
            pool(1, 1).with_block_size(block_size).unwrap_err(),
            ConfigError::BlockSize { block_size, max: 4096 }
        );
    }
}

#[test]
fn sizes_beyond_64_bits_are_errors() {
    let max = u32::MAX;
    let huge = ModelShape::new(max, max, max, 256);
    for config in [
        CacheConfig::for_blocks(1, &huge, KvType::F32),
        CacheConfig::for_bytes(u64::MAX, &huge, KvType::F32),
        CacheConfig::for_context(1, 1, &huge, KvType::F32),
    ] {
        assert!(matches!(config, Err(ConfigError::Overflow { .. })), "{config:?}");
    }
    // 2^59 bytes a block: 8 blocks fit into 64 bits, 32 do not.
    let wide = ModelShape::new(1 << 20, 1 << 24, 1 << 24, 256);
    let eight = CacheConfig::for_blocks(8, &wide, KvType::F32).unwrap();
    assert_eq!((eight.bytes_per_token(), eight.bytes_per_block()), (1 << 55, 1 << 59));
    let many = CacheConfig::for_blocks(32, &wide, KvType::F32);
    assert!(matches!(many, Err(ConfigError::Overflow { .. })), "{many:?}");
    // Tables: 2^32 of 2^32 entries.
    let tables = CacheConfig::for_bytes(u64::MAX, &tiny(), KvType::F32)
        .or_else(|_| CacheConfig::for_bytes(1 << 32, &tiny(), KvType::F32))
        .and_then(|config| config.with_max_sequence_tokens(max))
        .and_then(|config| config.with_max_sequences(max))
        .and_then(|config| config.with_block_size(1));
    assert!(
        matches!(tables, Err(ConfigError::Overflow { .. } | ConfigError::TooFewBytes { .. })),
        "{tables:?}"
    );
    let chats = CacheConfig::for_context(max, max, &tiny(), KvType::F32);
    assert!(matches!(chats, Err(ConfigError::Overflow { .. })), "{chats:?}");
    let slots = CacheConfig::for_context(max, 1, &tiny(), KvType::F32);
    assert!(matches!(slots, Err(ConfigError::TooManySlots { slots: 4_294_967_296, .. })), "{slots:?}");
}

#[test]
fn every_refusal_says_its_numbers() {
    let errors = [
        (CacheConfig::for_bytes(7, &tiny(), KvType::F32).unwrap_err(), &["7", "1280"][..]),
        (pool(1, 1).with_block_size(24).unwrap_err(), &["24", "4096"]),
        (pool(64, 4096).arenas(1000).unwrap_err(), &["16777216", "1000"]),
    ];
    for (error, numbers) in errors {
        let message = error.to_string();
        assert!(numbers.iter().all(|number| message.contains(number)), "{message}");
        assert!(message.starts_with(|first: char| !first.is_uppercase()) && !message.ends_with('.'));
    }
}
