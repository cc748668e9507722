//! Random operations on the scheduler and on the cache alone, against models that keep every token.
//!
//! The number of operations in all is 100,000, or what `PAGED_KV_MODEL_OPERATIONS` says. A failing case is shrunk and
//! printed; proptest's own environment variables (`PROPTEST_RNG_SEED` among them) apply.

use crate::cache_model::{CacheOperation, CacheReached, CacheWorld, cache_operations};
use crate::histories::{self, Kind, Operation, apply, caches, grouped_shapes, plain_shapes, schedulers};
use crate::model::{Reached, Slid, Turn, World};
use crate::simulated_device::SimulatedDevice;
use paged_kv::{Admission, CacheConfig, KvType, ModelShape, PreemptionMode, Priority, SchedulerConfig};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Operations in a random history, on average.
const HISTORY: usize = 100;

const SHAPE: ModelShape = ModelShape::new(1, 2, 1, 8);

fn total_operations() -> usize {
    match std::env::var("PAGED_KV_MODEL_OPERATIONS") {
        Ok(number) => number.parse().expect("PAGED_KV_MODEL_OPERATIONS is a number"),
        Err(_) => 100_000,
    }
}

fn runner(operations: usize) -> TestRunner {
    let cases = operations.div_ceil(HISTORY) as u32;
    TestRunner::new(Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..Config::default()
    })
}

/// Random histories of schedulers over models of `shapes`: of each kind how many, and what they came to.
fn schedule(
    shapes: impl Strategy<Value = ModelShape>,
    operations: usize,
) -> BTreeMap<Kind, (u64, Reached, Slid)> {
    let histories = (schedulers(shapes), prop::collection::vec(histories::operations(), 0..2 * HISTORY));
    let all: RefCell<BTreeMap<Kind, (u64, Reached, Slid)>> = RefCell::default();
    let result = runner(operations).run(&histories, |((config, cache), operations)| {
        let kinds = Kind::of(&cache);
        let mut world = World::<SimulatedDevice>::new(config, cache);
        for operation in &operations {
            apply(&mut world, operation);
            world.check();
        }
        let (reached, slid) = world.finish();
        for kind in kinds {
            let mut all = all.borrow_mut();
            let of_kind = all.entry(kind).or_default();
            *of_kind = (of_kind.0 + 1, of_kind.1.plus(reached), of_kind.2.plus(slid));
        }
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    all.into_inner()
}

#[test]
fn every_history_of_a_scheduler_gives_the_tokens_of_a_naive_one() {
    let (_, reached, _) = schedule(plain_shapes(), total_operations() * 7 / 10)[&Kind::Plain];
    println!("{reached:?}");
    if total_operations() >= 100_000 {
        assert!(reached.rarest() >= 30, "the histories are too tame: {reached:?}");
    }
}

#[test]
fn every_history_of_a_scheduler_with_groups_of_layers_gives_them_too() {
    let all = schedule(grouped_shapes(), total_operations() * 2);
    for kind in Kind::GROUPED {
        let (histories, reached, slid) = all.get(&kind).copied().unwrap_or_default();
        println!("{kind:?}: {histories} histories, {reached:?}, {slid:?}");
        if total_operations() >= 100_000 {
            assert!(histories >= 200, "too few histories with {kind:?}");
            let rarest = reached.rarest().min(slid.rarest());
            assert!(rarest >= 10, "histories with {kind:?} are too tame: {reached:?}, {slid:?}");
        }
    }
}

/// A branch and its kept parent are in the host pool altogether and come back together. The branch then writes into a block
/// that both hold, and no block is left for a copy: the parent gives way.
#[test]
fn a_branch_that_returns_with_its_kept_parent_goes_on_in_a_pool_that_holds_them_once() {
    let cache = CacheConfig::for_blocks(2, &SHAPE, KvType::F32)
        .and_then(|cache| cache.with_block_size(16))
        .and_then(|cache| cache.with_max_sequences(2))
        .and_then(|cache| cache.with_host_blocks(2))
        .unwrap();
    let config = SchedulerConfig {
        step_tokens: 23,
        admission: Admission::Guaranteed,
        prefix_cache: None,
        preemption: PreemptionMode::Swap,
        ageing_steps: 1,
        ..SchedulerConfig::default()
    };
    let turn = |len, max_new, keep, priority| Turn {
        len,
        seed: 0,
        max_new,
        samples: 1,
        keep,
        stops: !keep,
        priority,
        salt: 0,
        system: 0,
        system_seed: 0,
        retain: None,
    };
    let mut world = World::<SimulatedDevice>::new(config, cache);
    for operation in [
        Operation::Add(turn(2, None, false, Priority::Normal)),
        Operation::Add(turn(18, Some(1), true, Priority::Interactive)),
        Operation::Step { choice: 0, drafts: 0 },
        Operation::Step { choice: 0, drafts: 0 },
        Operation::Fork {
            parent: 0,
            at: 4_273_250_146_401_008_489,
            turn: turn(1, None, false, Priority::Normal),
        },
    ] {
        apply(&mut world, &operation);
        world.check();
    }
    world.finish();
}

/// Random histories of caches over models of `shapes`: of each kind how many, and what they came to.
fn grow(shapes: impl Strategy<Value = ModelShape>, operations: usize) -> BTreeMap<Kind, (u64, CacheReached)> {
    let histories = (caches(shapes), prop::collection::vec(cache_operations(), 0..2 * HISTORY));
    let all: RefCell<BTreeMap<Kind, (u64, CacheReached)>> = RefCell::default();
    let result =
        runner(operations).run(&histories, |(cache, operations): (CacheConfig, Vec<CacheOperation>)| {
            let kinds = Kind::of(&cache);
            let mut world = CacheWorld::new(cache);
            for operation in &operations {
                world.apply(operation);
            }
            let reached = world.finish();
            for kind in kinds {
                let mut all = all.borrow_mut();
                let of_kind = all.entry(kind).or_default();
                *of_kind = (of_kind.0 + 1, of_kind.1.plus(reached));
            }
            Ok(())
        });
    if let Err(error) = result {
        panic!("{error}");
    }
    all.into_inner()
}

#[test]
fn every_history_of_a_cache_keeps_each_table_its_own_tokens() {
    let (_, reached) = grow(plain_shapes(), total_operations() * 3 / 10)[&Kind::Plain];
    println!("{reached:?}");
    if total_operations() >= 100_000 {
        assert!(reached.rarest(false) >= 30, "the histories are too tame: {reached:?}");
    }
}

#[test]
fn every_history_of_a_cache_with_groups_of_layers_keeps_them_too() {
    let all = grow(grouped_shapes(), total_operations());
    for kind in Kind::GROUPED {
        let (histories, reached) = all.get(&kind).copied().unwrap_or_default();
        println!("{kind:?}: {histories} histories, {reached:?}");
        if total_operations() >= 100_000 {
            assert!(histories >= 100, "too few histories with {kind:?}");
            assert!(reached.rarest(true) >= 10, "histories with {kind:?} are too tame: {reached:?}");
        }
    }
}
