//! Calls of a cache and of its step builder, beside another, larger cache.

use crate::hostile::{Call, World, is_known};
use paged_kv::{
    BlockId, CacheConfig, CacheStats, KvCache, Namespace, RequestId, StepBuilder, StepId, StepPlan, TableId,
};

pub(super) struct Caches {
    own: KvCache,
    other: KvCache,
    tables: Vec<TableId>,
    /// Released ones.
    stale: Vec<TableId>,
    foreign: Vec<TableId>,
    blocks: Vec<BlockId>,
    plans: Vec<StepPlan>,
    foreign_plans: Vec<StepPlan>,
    steps: Vec<StepId>,
}

impl Caches {
    pub(super) fn new(config: CacheConfig) -> Self {
        let more = config.max_sequences() + 3;
        let own = KvCache::new(config.clone());
        let mut other = KvCache::new(config.with_max_sequences(more).unwrap());
        let foreign: Vec<_> = (0..6).map(|_| other.create(1).unwrap()).collect();
        let foreign_plans = vec![StepBuilder::new(&mut other).finish()];
        Self {
            blocks: own.block_states().map(|(block, _)| block).collect(),
            own,
            other,
            tables: Vec::new(),
            stale: Vec::new(),
            foreign,
            plans: Vec::new(),
            foreign_plans,
            steps: vec![StepId::default()],
        }
    }

    pub(super) fn stats(&self) -> CacheStats {
        self.own.stats()
    }

    pub(super) fn check(&self) {
        self.own.assert_consistent();
    }
}

impl World {
    /// A table, and whether it is another cache's.
    fn table(&mut self) -> (TableId, bool) {
        let Caches { tables, stale, foreign, .. } = &self.caches;
        match self.random.below(0..10) {
            0 => (self.random.pick(foreign), true),
            1 if !stale.is_empty() => (self.random.pick(stale), false),
            _ if !tables.is_empty() => (self.random.pick(tables), false),
            _ => (self.random.pick(foreign), true),
        }
    }

    fn block(&mut self) -> BlockId {
        self.random.pick(&self.caches.blocks)
    }
}

fn new(world: &mut World) {
    let config = world.caches.own.config();
    let larger =
        CacheConfig::for_blocks(config.num_blocks() + world.small() + 1, &world.shape, paged_kv::KvType::F16);
    let cache = KvCache::new(larger.unwrap());
    // Blocks of a larger cache: some are beyond this one.
    world.caches.blocks.extend(cache.block_states().map(|(block, _)| block).take(40));
    world.caches.blocks.truncate(200);
    assert_ne!(cache.instance(), world.caches.own.instance());
}

pub(super) fn create(world: &mut World) {
    let max_tokens = if world.random.chance(70) { world.small() } else { world.number() };
    let created = world.caches.own.create(max_tokens);
    let table = world.judge("KvCache::create", created);
    world.caches.tables.extend(table);
}

fn create_with_prefix(world: &mut World) {
    let (tokens, max_tokens) = (world.tokens(), world.number());
    let created = world.caches.own.create_with_prefix(&Namespace::default(), &tokens, max_tokens);
    let created = world.judge("KvCache::create_with_prefix", created);
    world.caches.tables.extend(created.map(|(table, _)| table));
}

fn fork(world: &mut World) {
    let ((table, foreign), at, max_tokens) = (world.table(), world.number(), world.number());
    let forked = world.caches.own.fork(table, at, max_tokens);
    let table = world.judge_foreign("KvCache::fork", foreign, forked);
    world.caches.tables.extend(table);
}

fn truncate(world: &mut World) {
    let ((table, foreign), len) = (world.table(), world.number());
    let cut = world.caches.own.truncate(table, len);
    world.judge_foreign("KvCache::truncate", foreign, cut);
}

fn release(world: &mut World) {
    let (table, foreign) = world.table();
    let released = world.caches.own.release(table);
    if world.judge_foreign("KvCache::release", foreign, released).is_some() {
        world.caches.tables.retain(|&other| other != table);
        world.caches.stale.push(table);
    }
}

fn look_at_table(world: &mut World) {
    let (table, foreign) = world.table();
    let num_tokens = world.number();
    let own = &world.caches.own;
    let len = own.len(table);
    let blocks = own.block_ids(table).map(<[BlockId]>::len);
    let needed = own.blocks_needed(table, num_tokens);
    let host_blocks = own.host_blocks_of(table);
    let block = BlockId::new(num_tokens);
    assert_eq!(own.block_state(block).is_some(), block.index() < own.config().num_blocks());
    world.judge_foreign("KvCache::host_blocks_of", foreign, host_blocks);
    world.judge_foreign("KvCache::len", foreign, len);
    world.judge_foreign("KvCache::block_ids", foreign, blocks);
    world.judge_foreign("KvCache::blocks_needed", foreign, needed);
}

fn look(world: &mut World) {
    let (own, tokens) = (&world.caches.own, [1, 2]);
    let num_blocks = own.config().num_blocks();
    assert_eq!(own.block_states().len(), num_blocks as usize);
    assert!(own.free_blocks() <= num_blocks && own.free_tables() <= own.config().max_sequences());
    assert!(own.find_prefix(&Namespace::default(), &tokens) < 2);
    assert_eq!(own.stats().num_blocks, num_blocks);
    assert_eq!(own.find_prefix(&Namespace::default(), &[]), 0);
    assert!(own.instance() > 0 && own.forgotten_devices() < 100_000);
}

fn ref_count(world: &mut World) {
    let block = world.block();
    world.caches.own.ref_count(block);
}

fn block_state(world: &mut World) {
    let block = world.block();
    world.caches.own.block_state(block);
}

fn enable_prefix_cache(world: &mut World) {
    let most = if world.random.chance(50) { Some(world.number()) } else { None };
    let enabled = world.caches.own.enable_prefix_cache(most);
    world.judge("KvCache::enable_prefix_cache", enabled);
}

fn register_prefix(world: &mut World) {
    let ((table, foreign), tokens) = (world.table(), world.tokens());
    let registered = world.caches.own.register_prefix(table, &Namespace::default(), &tokens);
    world.judge_foreign("KvCache::register_prefix", foreign, registered);
}

fn forget_prefix(world: &mut World) {
    let ((table, foreign), first) = (world.table(), world.number());
    let forgotten = world.caches.own.forget_prefix(table, first);
    world.judge_foreign("KvCache::forget_prefix", foreign, forgotten);
}

pub(super) fn complete_transfers(world: &mut World) {
    let (step, complete) = (world.random.pick(&world.caches.steps), world.random.chance(70));
    world.caches.own.complete_transfers(step, complete);
}

fn forget_device(world: &mut World) {
    if world.random.chance(10) {
        world.caches.own.forget_device();
    }
}

pub(super) fn commit_step(world: &mut World) {
    let choice = world.random.below(0..10);
    let Caches { plans, foreign_plans, other, .. } = &mut world.caches;
    let (plan, foreign) = match choice {
        0 => (foreign_plans.pop(), true),
        1 => (Some(StepPlan::default()), true),
        2 if !plans.is_empty() => (Some(plans.remove(0)), false),
        _ => (plans.pop(), false),
    };
    foreign_plans.push(StepBuilder::new(other).finish());
    let Some(plan) = plan else { return };
    let committed = world.caches.own.commit_step(plan);
    if foreign && committed.is_ok() {
        world.wrong.push("KvCache::commit_step: takes another cache's plan".to_string());
    }
    world.judge("KvCache::commit_step", committed);
}

/// A step of a few tokens for every table that takes them; some leave for the host pool, some return.
pub(super) fn honest_step(world: &mut World) {
    let random = &mut world.random;
    let Caches { own, tables, .. } = &mut world.caches;
    let mut step = StepBuilder::new(own);
    for &table in tables.iter() {
        match random.below(0..4) {
            0 => drop(step.swap_out(table)),
            1 => drop(step.swap_in(table)),
            _ => drop(step.push(table, &[7; 3][..random.below(1..4) as usize])),
        }
    }
    let plan = step.finish();
    let number = plan.step();
    own.commit_step(plan).expect("the outstanding plan");
    world.caches.steps.push(number);
    if world.random.chance(80) {
        world.caches.own.complete_transfers(number, true);
    }
}

/// What is done in a step, with what it needs.
#[derive(Clone, Copy)]
enum Act {
    Push,
    SwapOut,
    SwapIn,
    Logits,
    Pad,
    Cache,
}

/// One act of a step builder: whether it had a table of another cache, and what came of it.
fn act(world: &mut World, step: &mut StepBuilder<'_>, act: Act) {
    let (table, foreign) = world.table();
    match act {
        Act::Push => {
            let tokens = world.tokens();
            let pushed = step.push(table, &tokens);
            world.judge_foreign("StepBuilder::push", foreign, pushed);
        }
        Act::SwapOut => {
            let moved = step.swap_out(table);
            world.judge_foreign("StepBuilder::swap_out", foreign, moved);
        }
        Act::SwapIn => {
            let moved = step.swap_in(table);
            world.judge_foreign("StepBuilder::swap_in", foreign, moved);
        }
        Act::Logits => {
            let (row, num_rows) = (world.number(), world.number());
            let asked = step.request_logits(RequestId::from_raw(1).sample(0), row, num_rows);
            if world.judge("StepBuilder::request_logits", asked).is_some() {
                assert!(row + num_rows <= step.num_rows());
            }
        }
        Act::Pad => {
            let rows = world.number();
            let padded = step.pad_to(rows);
            world.judge("StepBuilder::pad_to", padded);
        }
        Act::Cache => in_mid_step(world, step.cache_mut(), table),
    }
}

/// What may be done to the cache while a step is built.
fn in_mid_step(world: &mut World, cache: &mut KvCache, table: TableId) {
    let number = world.number();
    match world.random.below(0..7) {
        0 => drop(cache.release(table)),
        1 => drop(cache.truncate(table, number)),
        2 => world.caches.tables.extend(cache.create(number)),
        3 => world.caches.tables.extend(cache.fork(table, number % 20, number)),
        4 => drop(cache.forget_prefix(table, number)),
        5 if !is_known("StepBuilder::cache_mut") => cache.forget_device(),
        _ => {
            let (step, complete) = (world.random.pick(&world.caches.steps), world.random.chance(70));
            cache.complete_transfers(step, complete);
        }
    }
}

pub(super) fn push(world: &mut World) {
    build(world, Act::Push);
}

fn build(world: &mut World, last: Act) {
    // The cache is the builder's meanwhile.
    let placeholder = KvCache::new(world.caches.other.config().clone());
    let mut cache = std::mem::replace(&mut world.caches.own, placeholder);
    let mut step = StepBuilder::new(&mut cache);
    for _ in 0..world.random.below(0..5) {
        let next = world.random.pick(&[Act::Push, Act::Push, Act::SwapOut, Act::SwapIn, Act::Logits]);
        act(world, &mut step, next);
    }
    act(world, &mut step, last);
    if world.random.chance(50) {
        act(world, &mut step, Act::Push);
    }
    let finished = if world.random.chance(85) {
        assert_eq!(step.cache().stats().num_blocks, step.cache().config().num_blocks());
        Some(step.finish())
    } else {
        None
    };
    world.caches.own = cache;
    if let Some(plan) = finished {
        world.caches.steps.push(plan.step());
        world.caches.plans.push(plan);
        if world.caches.plans.len() > 6 {
            drop(world.caches.plans.remove(0));
        }
    }
}

pub(super) const CALLS: &[(&str, Call)] = &[
    ("KvCache::new", new),
    ("KvCache::create", create),
    ("KvCache::create", create),
    ("KvCache::create_with_prefix", create_with_prefix),
    ("KvCache::fork", fork),
    ("KvCache::truncate", truncate),
    ("KvCache::release", release),
    ("KvCache::len", look_at_table),
    ("KvCache::block_ids", look_at_table),
    ("KvCache::blocks_needed", look_at_table),
    ("KvCache::host_blocks_of", look_at_table),
    ("KvCache::config", look),
    ("KvCache::instance", look),
    ("KvCache::free_blocks", look),
    ("KvCache::free_tables", look),
    ("KvCache::stats", look),
    ("KvCache::block_states", look),
    ("KvCache::find_prefix", look),
    ("KvCache::forgotten_devices", look),
    ("KvCache::ref_count", ref_count),
    ("KvCache::block_state", block_state),
    ("KvCache::enable_prefix_cache", enable_prefix_cache),
    ("KvCache::register_prefix", register_prefix),
    ("KvCache::forget_prefix", forget_prefix),
    ("KvCache::complete_transfers", complete_transfers),
    ("KvCache::forget_device", forget_device),
    ("KvCache::commit_step", commit_step),
    ("KvCache::commit_step", commit_step),
    ("KvCache::commit_step", commit_step),
    ("StepBuilder::new", push),
    ("StepBuilder::cache", push),
    ("StepBuilder::num_rows", |world| build(world, Act::Logits)),
    ("StepBuilder::finish", push),
    ("StepBuilder::push", push),
    ("StepBuilder::swap_out", |world| build(world, Act::SwapOut)),
    ("StepBuilder::swap_in", |world| build(world, Act::SwapIn)),
    ("StepBuilder::request_logits", |world| build(world, Act::Logits)),
    ("StepBuilder::pad_to", |world| build(world, Act::Pad)),
    ("StepBuilder::cache_mut", |world| build(world, Act::Cache)),
];
