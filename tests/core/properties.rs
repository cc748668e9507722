//! Random operations on the scheduler and on the cache alone, against models that keep every token.
//!
//! The number of operations in all is 100,000, or what `PAGED_KV_MODEL_OPERATIONS` says. A failing case is shrunk and
//! printed; proptest's own environment variables (`PROPTEST_RNG_SEED` among them) apply.

use crate::cache_model::{CacheOperation, CacheWorld, cache_operations};
use crate::histories::{apply, caches, operations, schedulers};
use crate::model::{Reached, World};
use crate::simulated_device::SimulatedDevice;
use paged_kv::{CacheConfig, ModelShape};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::cell::Cell;

/// Operations in a random history, on average.
const HISTORY: usize = 100;

const SHAPE: ModelShape = ModelShape { num_layers: 1, num_query_heads: 2, num_kv_heads: 1, head_dim: 8 };

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

#[test]
fn every_history_of_a_scheduler_gives_the_tokens_of_a_naive_one() {
    let histories = (schedulers(SHAPE), prop::collection::vec(operations(), 0..2 * HISTORY));
    let mut runner = runner(total_operations() * 7 / 10);
    let reached = Cell::new(Reached::default());
    let result = runner.run(&histories, |((config, cache), operations)| {
        let mut world = World::<SimulatedDevice>::new(config, cache);
        for operation in &operations {
            apply(&mut world, operation);
            world.check();
        }
        reached.set(reached.get().plus(world.finish()));
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let reached = reached.get();
    println!("{reached:?}");
    if total_operations() >= 100_000 {
        assert!(reached.rarest() >= 30, "the histories are too tame: {reached:?}");
    }
}

#[test]
fn every_history_of_a_cache_keeps_each_table_its_own_tokens() {
    let histories = (caches(SHAPE), prop::collection::vec(cache_operations(), 0..2 * HISTORY));
    let mut runner = runner(total_operations() * 3 / 10);
    let result = runner.run(&histories, |(cache, operations): (CacheConfig, Vec<CacheOperation>)| {
        let mut world = CacheWorld::new(cache);
        for operation in &operations {
            world.apply(operation);
        }
        world.finish();
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
