//! What a cache and its steps refuse: ids that are not theirs, and numbers that cannot be.

use paged_kv::reference::CpuCache;
use paged_kv::{
    ArenaLayout, BlockId, CacheConfig, CacheError, CommitError, ConfigError, KvCache, KvPart, KvType,
    ModelShape, Namespace, StepBuilder, TableId,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

const SHAPE: ModelShape = ModelShape::new(1, 2, 1, 8);

/// A pool of blocks of four tokens, with the prefix cache and a host pool of the same size.
fn cache(num_blocks: u32) -> KvCache {
    let config = CacheConfig::for_blocks(num_blocks, &SHAPE, KvType::F32).unwrap();
    let config = config.with_block_size(4).unwrap().with_host_blocks(num_blocks).unwrap();
    let mut cache = KvCache::new(config);
    cache.enable_prefix_cache(None).unwrap();
    cache
}

/// A table with these tokens, committed.
fn table(cache: &mut KvCache, tokens: &[u32]) -> TableId {
    let table = cache.create(cache.config().max_sequence_tokens()).unwrap();
    let mut step = StepBuilder::new(cache);
    step.push(table, tokens).unwrap();
    let plan = step.finish();
    cache.commit_step(plan).unwrap();
    table
}

#[test]
fn a_table_of_another_cache_is_refused_by_every_function_and_nothing_changes() {
    let (mut home, mut other) = (cache(8), cache(8));
    let own = table(&mut home, &[1, 2, 3, 4, 5]);
    let foreign = table(&mut other, &[6, 7, 8, 9, 10]);
    assert_eq!((own.row(), home.len(own)), (foreign.row(), Ok(5)));
    assert_ne!(own, foreign, "they have the same row, and are not the same");
    let before = (home.stats(), home.block_ids(own).unwrap().to_vec());
    let namespace = Namespace::default();

    let refused = CacheError::ForeignTable { table: foreign, cache: home.instance() };
    assert_eq!(home.len(foreign), Err(refused));
    assert_eq!(home.block_ids(foreign), Err(refused));
    assert_eq!(home.host_blocks_of(foreign), Err(refused));
    assert_eq!(home.blocks_needed(foreign, 1), Err(refused));
    assert_eq!(home.fork(foreign, 1, 8), Err(refused));
    assert_eq!(home.truncate(foreign, 1), Err(refused));
    assert_eq!(home.release(foreign), Err(refused));
    assert_eq!(home.register_prefix(foreign, &namespace, &[1, 2, 3, 4]), Err(refused));
    assert_eq!(home.forget_prefix(foreign, 0), Err(refused));
    let mut step = StepBuilder::new(&mut home);
    assert_eq!(step.push(foreign, &[1]), Err(refused));
    assert_eq!(step.swap_out(foreign), Err(refused));
    assert_eq!(step.swap_in(foreign), Err(refused));
    drop(step);

    assert_eq!((home.stats(), home.block_ids(own).unwrap().to_vec()), before);
    home.assert_consistent();
    let message = refused.to_string();
    for cache in [&home, &other] {
        assert!(message.contains(&format!("cache {}", cache.instance())), "{message}");
    }
}

#[test]
fn a_block_that_a_pool_does_not_have_is_in_no_table_and_in_no_state() {
    let mut cache = cache(3);
    let table = table(&mut cache, &[1; 5]);
    let held = BlockId::new(1);
    assert_eq!((held, held.index()), (cache.block_ids(table).unwrap()[1], 1));
    assert_eq!(cache.ref_count(held), 1);
    for index in [3, 4, u32::MAX] {
        assert_eq!(cache.ref_count(BlockId::new(index)), 0);
        assert_eq!(cache.block_state(BlockId::new(index)), None);
    }
    assert_eq!((0..=3).map(BlockId::new).filter(|&block| cache.block_state(block).is_some()).count(), 3);
}

#[test]
fn a_table_says_how_many_of_its_blocks_are_in_the_host_pool() {
    let mut cache = cache(8);
    let long = table(&mut cache, &[1; 10]);
    let child = cache.fork(long, 4, 12).unwrap();
    assert_eq!((cache.host_blocks_of(long), cache.block_ids(long).unwrap().len()), (Ok(0), 3));
    let mut step = StepBuilder::new(&mut cache);
    assert_eq!(step.swap_out(long), Ok(2), "the first block is the child's, too");
    let plan = step.finish();
    assert_eq!((cache.host_blocks_of(long), cache.block_ids(long).unwrap().len()), (Ok(2), 1));
    assert_eq!(cache.host_blocks_of(child), Ok(0));
    cache.commit_step(plan).unwrap();
    cache.release(long).unwrap();
    assert_eq!(cache.host_blocks_of(long), Err(CacheError::UnknownTable { table: long }));
}

#[test]
fn a_push_beyond_the_declared_maximum_is_refused_within_the_last_block_too() {
    let config = cache(8).config().clone();
    // The maximum of the cache, and a lower one of the table; a whole number of blocks, and not.
    for (cap, max_tokens) in [(14, 14), (16, 14), (16, 13), (16, 12), (16, 1)] {
        let mut cache = KvCache::new(config.clone().with_max_sequence_tokens(cap).unwrap());
        let table = cache.create(max_tokens).unwrap();
        let refused = |tokens: u32| CacheError::ExceedsTable { tokens: max_tokens + tokens, max_tokens };
        let mut step = StepBuilder::new(&mut cache);
        assert_eq!(step.push(table, &vec![1; max_tokens as usize + 1]), Err(refused(1)));
        assert_eq!(step.push(table, &vec![1; max_tokens as usize]), Ok(0..max_tokens));
        let plan = step.finish();
        cache.commit_step(plan).unwrap();
        let mut step = StepBuilder::new(&mut cache);
        assert_eq!(step.push(table, &[2, 3]), Err(refused(2)));
        assert_eq!(step.push(table, &[2]), Err(refused(1)));
        drop(step);
        // A fork has a maximum of its own, and holds at least what it shares.
        let larger = cache.fork(table, max_tokens, cap).unwrap();
        let equal = cache.fork(table, max_tokens, 0).unwrap();
        let mut step = StepBuilder::new(&mut cache);
        assert_eq!(step.push(larger, &[2]).is_ok(), cap > max_tokens, "of {max_tokens} and {cap} tokens");
        assert_eq!(step.push(equal, &[2]), Err(refused(1)));
        drop(step);
        cache.assert_consistent();
    }
}

#[test]
fn a_step_that_has_ended_while_it_is_built_is_refused_and_its_plan_is_stale() {
    type End = fn(&mut StepBuilder<'_>);
    let forget: End = |step| step.cache_mut().forget_device();
    let begin_another: End = |step| drop(StepBuilder::new(step.cache_mut()));
    let commit_another: End = |step| {
        let table = step.cache_mut().create(4).unwrap();
        let mut other = StepBuilder::new(step.cache_mut());
        other.push(table, &[1]).unwrap();
        let plan = other.finish();
        step.cache_mut().commit_step(plan).unwrap();
    };
    let replace: End = |step| *step.cache_mut() = cache(8);
    for (kind, end) in [forget, begin_another, commit_another, replace].into_iter().enumerate() {
        let mut cache = cache(8);
        let (first, second) = (table(&mut cache, &[1; 5]), table(&mut cache, &[2; 5]));
        let mut step = StepBuilder::new(&mut cache);
        step.push(first, &[3]).unwrap();
        step.swap_out(second).unwrap();
        end(&mut step);
        let before = step.cache().stats();
        let ended = |refused: Result<(), CacheError>| {
            assert!(matches!(refused, Err(CacheError::StepEnded { .. })), "{kind}: {refused:?}");
        };
        ended(step.push(second, &[4]).map(drop));
        ended(step.swap_out(first).map(drop));
        ended(step.swap_in(second));
        assert_eq!(step.cache().stats(), before);
        let plan = step.finish();
        cache.assert_consistent();
        assert_eq!(plan.swap_outs(), [], "what another step moves is not in the plan");
        let refused = cache.commit_step(plan);
        let stale = matches!(refused, Err(CommitError::StalePlan { .. } | CommitError::ForeignPlan { .. }));
        assert!(stale, "{kind}: {refused:?}");
        // The cache goes on.
        let next = table(&mut cache, &[5; 6]);
        assert_eq!(cache.len(next), Ok(6));
        cache.assert_consistent();
    }
}

#[test]
fn padding_is_bounded() {
    let mut cache = cache(2);
    let mut step = StepBuilder::new(&mut cache);
    let max_rows = StepBuilder::MAX_PADDED_ROWS;
    assert_eq!(step.pad_to(3), Ok(()));
    for rows in [max_rows + 1, u32::MAX] {
        assert_eq!(step.pad_to(rows), Err(CacheError::TooManyRows { rows, max_rows }));
    }
    assert_eq!(step.finish().num_rows(), 3, "a refusal changes nothing");
    let mut step = StepBuilder::new(&mut cache);
    assert_eq!(step.pad_to(max_rows), Ok(()));
    assert_eq!(step.finish().num_rows(), max_rows);
}

#[test]
fn the_bytes_of_a_host_pool_are_checked_whatever_is_changed_last() {
    let shape = ModelShape::new(1 << 20, 1 << 10, 1 << 10, 8);
    let config = CacheConfig::for_blocks(1, &shape, KvType::F32).unwrap().with_block_size(1).unwrap();
    // 2^36 bytes a token; blocks of 2^28 and of 2^27 tokens are 2^64 bytes and half as many.
    assert_eq!(config.bytes_per_block(), 1 << 36);
    let overflow = ConfigError::Overflow { what: "bytes of the host pool" };
    let config = config.with_host_blocks((1 << 28) - 1).unwrap();
    assert_eq!(config.host_bytes(), ((1 << 28) - 1) << 36);
    assert_eq!(config.clone().with_host_blocks(1 << 28).unwrap_err(), overflow);
    assert_eq!(config.clone().with_block_size(2).unwrap_err(), overflow);
    assert_eq!(config.clone().with_max_sequences(2).unwrap().host_bytes(), config.host_bytes());
}

/// The message of a panic.
fn panic_of(work: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(work)).expect_err("it panics");
    panic.downcast_ref::<String>().cloned().unwrap_or_default()
}

#[test]
fn addresses_that_a_layout_does_not_have_are_refused_with_both_numbers() {
    let shape = ModelShape::new(3, 2, 2, 8);
    let config = CacheConfig::for_blocks(5, &shape, KvType::F32).unwrap().with_block_size(4).unwrap();
    let arena = ArenaLayout::new(*config.layout(), 5, 2).unwrap();
    assert_eq!((arena.num_arenas(), arena.layers_in(1), arena.arena_of(2)), (2, 1, (1, 0)));
    let last = arena.row_word(1, KvPart::V, 4, 1, 3);
    assert_eq!(last + 8, arena.arena_bytes(0) / 4, "the last row of the first arena");
    let row =
        |layer, block, kv_head, slot| panic_of(|| _ = arena.row_word(layer, KvPart::K, block, kv_head, slot));
    assert_eq!(row(3, 0, 0, 0), "layer 3 of 3");
    assert_eq!(row(0, 5, 0, 0), "block 5 of 5");
    assert_eq!(row(0, 0, 2, 0), "kv head 2 of 2");
    assert_eq!(row(0, 0, 0, 4), "slot 4 of 4");
    assert_eq!(panic_of(|| _ = arena.layers_in(2)), "arena 2 of 2");
    assert_eq!(panic_of(|| _ = arena.arena_bytes(u32::MAX)), "arena 4294967295 of 2");

    let zero = |field| Err(ConfigError::Zero { field });
    assert_eq!(ArenaLayout::new(*config.layout(), 0, 1), zero("num_blocks"));
    assert_eq!(ArenaLayout::new(*config.layout(), 1, 0), zero("layers_per_arena"));
    // Blocks of 2^40 bytes.
    let large = ModelShape::new(1 << 20, 1 << 10, 1 << 10, 8);
    let block = *CacheConfig::for_blocks(1, &large, KvType::F32).unwrap().layout();
    let overflow = Err(ConfigError::Overflow { what: "bytes of an arena" });
    assert_eq!(ArenaLayout::new(block, u32::MAX, u32::MAX), overflow);

    let mut cpu = CpuCache::new(&shape, &config);
    assert_eq!(panic_of(|| drop(cpu.key_row(0, 0, 2, 0))), "kv head 2 of 2");
    assert_eq!(panic_of(|| drop(cpu.value_row(0, 0, 0, 4))), "slot 4 of 4");
    assert_eq!(panic_of(|| drop(cpu.gather(0, 0, 21))), "21 tokens of a table of 20 slots");
    assert_eq!(panic_of(|| drop(cpu.gather(3, 0, 1))), "layer 3 of 3");
    let long = panic_of(|| cpu.write_row(0, KvPart::K, 0, 0, 0, &[0.0; 9]));
    assert!(long.contains("elements of the row"), "{long}");
}
