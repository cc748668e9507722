//! What the host side of a step costs: `cargo bench -p paged-kv --no-default-features --bench host`.
//!
//! Numbers are of one core. On a machine that others use, the fastest and the median of several runs mean something.

#![allow(clippy::unwrap_used)]

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use paged_kv::{
    CacheConfig, KvCache, KvType, ModelShape, Namespace, Request, RowResult, Schedule, Scheduler,
    SchedulerConfig, StepBuilder, TableId,
};

fn main() {
    divan::main();
}

/// Tokens that a decoding sequence of these benchmarks begins and ends with.
const CONTEXT: u32 = 1024;
const END: u32 = 2048;
/// Tokens of the long prompt.
const LONG: u32 = 8000;

fn shape() -> ModelShape {
    ModelShape::new(30, 9, 3, 64)
}

fn pool(num_blocks: u32, block_size: u32) -> CacheConfig {
    let config = CacheConfig::for_blocks(num_blocks, &shape(), KvType::F16).unwrap();
    config.with_block_size(block_size).unwrap()
}

/// `sequences` sequences that have read prompts of about 1,024 tokens, under the default configuration (with a step of
/// more rows where there are more sequences); `waiting` more stand in line for blocks.
struct Steady {
    scheduler: Scheduler,
    results: Vec<RowResult>,
    sequences: u32,
    block_size: u32,
    waiting: u32,
    /// The longest context.
    longest: u32,
}

impl Steady {
    fn new(sequences: u32, block_size: u32, waiting: u32) -> Self {
        let cache = CacheConfig::for_context(END, sequences, &shape(), KvType::F16).unwrap();
        let cache = cache.with_block_size(block_size).unwrap();
        let cache = cache.with_max_sequences(sequences.max(64)).unwrap();
        let config = SchedulerConfig { step_tokens: sequences.max(256) * 2, ..SchedulerConfig::default() };
        let mut scheduler = Scheduler::new(config, cache).unwrap();
        for sequence in 0..sequences {
            // Blocks fill in different steps.
            let len = CONTEXT - sequence % block_size;
            let prompt: Vec<u32> = (0..len).map(|position| sequence * CONTEXT + position).collect();
            scheduler.add(Request::new(prompt).max_new_tokens(END - len)).unwrap();
        }
        for _ in 0..waiting {
            scheduler.add(Request::new(vec![7; 600]).max_new_tokens(END - 600)).unwrap();
        }
        let mut steady = Self { scheduler, results: Vec::new(), sequences, block_size, waiting, longest: 0 };
        while steady.step() != sequences || steady.results.len() < sequences as usize {}
        steady
    }

    /// One step: rows that it computed.
    fn step(&mut self) -> u32 {
        let Schedule::Step(plan) = self.scheduler.schedule() else { panic!("a step") };
        let rows = plan.num_rows();
        self.results.clear();
        for row in plan.logit_rows() {
            self.longest = self.longest.max(row.next_position);
            self.results.push(RowResult::Token(row.next_position));
        }
        black_box(self.scheduler.commit(plan, &self.results).unwrap());
        rows
    }

    /// A step in which every sequence decodes; when they near their end, others take their place.
    fn decode(&mut self) {
        if self.longest + 2 > END {
            *self = Self::new(self.sequences, self.block_size, self.waiting);
        }
        self.step();
    }
}

/// Schedule and commit of a step in which all sequences decode, at about 1,024 tokens of context.
#[divan::bench(args = [1, 64, 1000], sample_count = 200)]
fn steady_step(bencher: Bencher<'_, '_>, sequences: u32) {
    let mut steady = Steady::new(sequences, 16, 0);
    bencher.counter(ItemsCount::new(sequences)).bench_local(|| steady.decode());
}

/// The same for 64 sequences; items are tokens.
#[divan::bench(args = [8, 16, 32, 64, 128, 256], sample_count = 200)]
fn steady_step_by_block_size(bencher: Bencher<'_, '_>, block_size: u32) {
    let mut steady = Steady::new(64, block_size, 0);
    bencher.counter(ItemsCount::new(64u32)).bench_local(|| steady.decode());
}

/// The same for 64 sequences while others stand in line for blocks.
#[divan::bench(args = [0, 100, 10_000], sample_count = 200)]
fn steady_step_by_queue(bencher: Bencher<'_, '_>, waiting: u32) {
    let mut steady = Steady::new(64, 16, waiting);
    bencher.counter(ItemsCount::new(64u32)).bench_local(|| steady.decode());
}

/// A cache that holds one sequence of 8,000 tokens, registered in the prefix cache.
fn with_long_sequence() -> (KvCache, TableId, Vec<u32>) {
    let mut cache = KvCache::new(pool(2048, 16));
    cache.enable_prefix_cache(None).unwrap();
    let tokens: Vec<u32> = (0..LONG).map(|position| position.wrapping_mul(2_654_435_761) >> 15).collect();
    let table = cache.create(LONG).unwrap();
    let mut builder = StepBuilder::new(&mut cache);
    builder.push(table, &tokens).unwrap();
    let plan = builder.finish();
    cache.commit_step(plan).unwrap();
    cache.register_prefix(table, &Namespace::default(), &tokens).unwrap();
    (cache, table, tokens)
}

/// Hashing a prompt of 8,000 tokens and finding all of it.
#[divan::bench]
fn match_prefix_of_8000_tokens(bencher: Bencher<'_, '_>) {
    let (cache, _table, tokens) = with_long_sequence();
    let namespace = Namespace::default();
    assert_eq!(cache.find_prefix(&namespace, &tokens), LONG - 1);
    bencher.bench_local(|| cache.find_prefix(black_box(&namespace), black_box(&tokens)));
}

/// Sharing all 500 blocks of a sequence of 8,000 tokens; giving them back is timed separately.
#[divan::bench]
fn fork_of_8000_tokens(bencher: Bencher<'_, '_>) {
    let (cache, table, _) = with_long_sequence();
    let cache = std::cell::RefCell::new(cache);
    let child = std::cell::Cell::new(None);
    let release = || {
        if let Some(child) = child.take() {
            cache.borrow_mut().release(child).unwrap();
        }
    };
    bencher.with_inputs(release).bench_local_values(|()| {
        release();
        child.set(Some(cache.borrow_mut().fork(table, LONG, LONG).unwrap()));
    });
}

/// The blocks of a fork given back.
#[divan::bench]
fn release_of_8000_tokens(bencher: Bencher<'_, '_>) {
    let (cache, table, _) = with_long_sequence();
    let cache = std::cell::RefCell::new(cache);
    let fork = || cache.borrow_mut().fork(table, LONG, LONG).unwrap();
    bencher.with_inputs(fork).bench_local_values(|child| cache.borrow_mut().release(child).unwrap());
}

/// A pool of 1,000,000 blocks, with and without the prefix cache.
#[divan::bench(args = [false, true], sample_count = 20)]
fn pool_of_1000000_blocks(prefix_cache: bool) -> KvCache {
    let shape = ModelShape::new(1, 1, 1, 8);
    let config = CacheConfig::for_blocks(1_000_000, &shape, KvType::F16).unwrap();
    let mut cache = KvCache::new(config);
    if prefix_cache {
        cache.enable_prefix_cache(None).unwrap();
    }
    cache
}
