//! What the fuzz targets do with their bytes: histories of a scheduler and of a cache, drawn from them by the strategies
//! of `tests/core`, against the models there. Nothing is written twice.
//!
//! Every four bytes of the fuzzer's seed one choice: the first the machine, each that follows one operation. So what the
//! fuzzer changes, adds, removes or copies are operations, whatever else there is in its input.
#![allow(clippy::unwrap_used)]

#[path = "../../tests/core/support/block_states.rs"]
#[allow(dead_code)]
mod block_states;
#[path = "../../tests/core/support/cache_model.rs"]
#[allow(dead_code)]
mod cache_model;
#[path = "../../tests/core/support/histories.rs"]
#[allow(dead_code)]
mod histories;
#[path = "../../tests/core/support/model.rs"]
#[allow(dead_code)]
mod model;
#[path = "../../tests/core/support/naive_blocks.rs"]
mod naive_blocks;
#[path = "../../tests/core/support/simulated_device.rs"]
#[allow(dead_code)]
mod simulated_device;
mod simulation;

use cache_model::{CacheWorld, cache_operations};
use histories::{apply, caches, grouped_shapes, operations, plain_shapes, schedulers};
use model::World;
use paged_kv::{Admission, ModelShape, PreemptionMode};
use proptest::prop_oneof;
use proptest::strategy::{Just, Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use simulated_device::{Device, SimulatedDevice};
use simulation::fake_model;
use simulation::twin_device::TwinDevice;

/// Most operations of a history.
const MOST: usize = 300;

/// Models of any groups of layers.
fn shapes() -> impl Strategy<Value = ModelShape> {
    prop_oneof![plain_shapes(), grouped_shapes()]
}

/// A scheduler of any configuration, on a device that keeps tokens.
pub fn scheduler(data: &[u8]) {
    run::<SimulatedDevice>(data, shapes(), false);
}

/// A scheduler that swaps, on the CPU twins of the kernels and transfers: keys and values leave and return.
pub fn swap(data: &[u8]) {
    run::<TwinDevice>(data, Just(fake_model::SHAPE), true);
}

/// Tables that an application's own scheduler grows, forks, cuts and releases.
pub fn cache(data: &[u8]) {
    let mut choices = choices(data);
    let Some(config) = choices.next().and_then(|seed| draw(seed, &caches(shapes()))) else { return };
    let mut world = CacheWorld::new(config);
    let strategy = cache_operations();
    for operation in choices.filter_map(|seed| draw(seed, &strategy)) {
        world.apply(&operation);
    }
    world.finish();
}

fn run<D: Device>(data: &[u8], shapes: impl Strategy<Value = ModelShape>, swaps: bool) {
    let mut choices = choices(data);
    let machine = choices.next().and_then(|seed| draw(seed, &schedulers(shapes)));
    let Some((mut config, mut cache)) = machine else { return };
    if swaps {
        config.preemption = PreemptionMode::Swap;
        if config.admission == Admission::Guaranteed {
            config.admission = Admission::Overcommitted { watermark_blocks: 0 };
        }
        let host_blocks = cache.host_blocks().max(4);
        cache = cache.with_host_blocks(host_blocks).unwrap();
    }
    let mut world = World::<D>::new(config, cache);
    let strategy = operations();
    for operation in choices.filter_map(|seed| draw(seed, &strategy)) {
        apply(&mut world, &operation);
        world.check();
    }
    world.finish();
}

/// The seeds of the machine and of its operations.
fn choices(data: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    data.chunks_exact(4).take(MOST + 1).map(|seed| seed.try_into().unwrap())
}

/// The value that a strategy makes of a seed.
fn draw<S: Strategy>(seed: [u8; 4], strategy: &S) -> Option<S::Value> {
    let mut bytes = *b"....paged-kv....";
    bytes[..4].copy_from_slice(&seed);
    let rng = TestRng::from_seed(RngAlgorithm::XorShift, &bytes);
    let config = Config { failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, rng);
    Some(strategy.new_tree(&mut runner).ok()?.current())
}
