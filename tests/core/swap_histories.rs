//! Random steps over an application's own tables, which share blocks, leave for the host pool and return; steps are
//! committed or dropped, transfers end late, in any order, or fail. Every table must read its own tokens, whatever its layers
//! see.

use crate::naive_blocks::num_blocks;
use crate::rig::Random;
use crate::simulated_device::{Device, Known, SimulatedDevice, history, stacks_of};
use paged_kv::{
    CacheConfig, CacheError, KvCache, KvType, LayerGroup, ModelShape, Namespace, Reach, StepBuilder, StepId,
    StepPlan, TableId,
};
use std::collections::HashSet;

const MAX_TOKENS: u32 = 24;
const HISTORIES: u64 = 1000;
const STEPS: u32 = 100;

/// What the histories came to, so that they are not too tame.
#[derive(Debug, Default)]
struct Reached {
    /// Steps after which tables shared a slot of the host pool.
    shared: u32,
    /// Blocks that left, and that came back.
    outs: usize,
    ins: usize,
    /// The same in steps that were dropped.
    dropped_outs: usize,
    dropped_ins: usize,
    /// Transfers that failed.
    failed: u32,
    /// Tables that were read at the end.
    read: u32,
}

struct Table {
    id: TableId,
    tokens: Vec<u32>,
    /// Tokens before the outstanding step, if it writes through the table, and its last row there.
    pushed: Option<(usize, u32)>,
}

struct World {
    cache: KvCache,
    device: SimulatedDevice,
    tables: Vec<Table>,
    /// Has the first row of every step, so that each can run.
    clock: TableId,
    /// Steps that brought blocks back: if they failed, a broken table would look like a sound one.
    returns: HashSet<StepId>,
}

fn below(random: &mut Random, end: usize) -> usize {
    (random.next() % end.max(1) as u64) as usize
}

/// Opens, shares, cuts and gives back tables, and registers what they hold.
fn change(cache: &mut KvCache, tables: &mut Vec<Table>, random: &mut Random, in_step: bool) {
    let (index, kind) = (below(random, tables.len()), below(random, 9));
    let Some(table) = tables.get_mut(index).filter(|_| kind > 1) else {
        let created = cache.create(MAX_TOKENS);
        tables.extend(created.map(|id| Table { id, tokens: Vec::new(), pushed: None }));
        return;
    };
    let (id, len) = (table.id, table.tokens.len());
    let at = if random.next().is_multiple_of(2) { len } else { below(random, len + 1) };
    let child = |id: TableId, len: usize| Table { id, tokens: table.tokens[..len].to_vec(), pushed: None };
    let done = match kind {
        2 | 3 => cache.fork(id, at as u32, MAX_TOKENS).map(|id| Some(child(id, at))),
        4 => cache
            .create_with_prefix(&Namespace::default(), &table.tokens, MAX_TOKENS)
            .map(|(id, found)| Some(child(id, found as usize))),
        5 | 6 if in_step => Ok(None),
        5 | 6 => cache.register_prefix(id, &Namespace::default(), &table.tokens).map(|()| None),
        7 => cache.truncate(id, at as u32).map(|()| {
            table.tokens.truncate(at);
            None
        }),
        _ => cache.release(id).map(|()| {
            tables.swap_remove(index);
            None
        }),
    };
    match done {
        Ok(child) => tables.extend(child),
        Err(error) => {
            let usual = matches!(
                error,
                CacheError::InStep { .. } | CacheError::NoFreeTable { .. } | CacheError::BehindWindow { .. }
            );
            assert!(usual, "{error}");
        }
    }
}

/// Pushes to a table, or swaps it.
fn work(step: &mut StepBuilder<'_>, tables: &mut [Table], random: &mut Random) {
    let (index, kind) = (below(random, tables.len()), below(random, 3));
    let Some(table) = tables.get_mut(index) else { return };
    let tokens: Vec<u32> = (0..1 + below(random, 6)).map(|_| random.next() as u32).collect();
    let done = match kind {
        0 => step.push(table.id, &tokens).map(|rows| {
            table.pushed = Some((table.tokens.len(), rows.end - 1));
            table.tokens.extend(tokens);
        }),
        1 => step.swap_out(table.id).map(drop),
        _ => step.swap_in(table.id),
    };
    assert!(
        matches!(
            done,
            Ok(())
                | Err(CacheError::InStep { .. }
                    | CacheError::NoFreeBlocks { .. }
                    | CacheError::HostPoolFull { .. }
                    | CacheError::SwappedOut { .. }
                    | CacheError::InTransfer { .. }
                    | CacheError::ExceedsTable { .. })
        ),
        "{done:?}"
    );
}

impl World {
    fn new(shape: &ModelShape) -> Self {
        let config = CacheConfig::for_blocks(14, shape, KvType::F32).unwrap().with_block_size(4).unwrap();
        let stacks = stacks_of(&config).len() as u32;
        let config = CacheConfig::for_blocks(14 * stacks, shape, KvType::F32).unwrap();
        let config = config.with_block_size(4).unwrap().with_max_sequences(7).unwrap();
        let config =
            config.with_max_sequence_tokens(MAX_TOKENS).unwrap().with_host_blocks(9 * stacks).unwrap();
        let device = SimulatedDevice::new(&config);
        let mut cache = KvCache::new(config);
        cache.enable_prefix_cache(None).unwrap();
        let clock = cache.create(1).unwrap();
        Self { cache, device, tables: Vec::new(), clock, returns: HashSet::new() }
    }

    fn step(&mut self, random: &mut Random, reached: &mut Reached) {
        self.cache.truncate(self.clock, 0).unwrap();
        let mut step = StepBuilder::new(&mut self.cache);
        if step.push(self.clock, &[0]).is_err() {
            return;
        }
        for _ in 0..1 + below(random, 6) {
            match below(random, 5) {
                0 => change(step.cache_mut(), &mut self.tables, random, true),
                _ => work(&mut step, &mut self.tables, random),
            }
            step.cache().assert_consistent();
        }
        let plan = step.finish();
        let (outs, ins) = (plan.swap_outs().len(), plan.swap_ins().len());
        let drops = below(random, 3) == 0;
        let runs = !drops || below(random, 2) == 0;
        let seen = if runs { self.run(&plan) } else { Vec::new() };
        if ins > 0 {
            self.returns.insert(plan.step());
        }
        if drops {
            drop(plan);
            drop(StepBuilder::new(&mut self.cache));
            reached.dropped_outs += outs;
            reached.dropped_ins += ins;
        } else {
            self.cache.commit_step(plan).unwrap();
            reached.outs += outs;
            reached.ins += ins;
        }
        for table in &mut self.tables {
            match table.pushed.take() {
                Some((len, _)) if drops => table.tokens.truncate(len),
                Some((_, row)) => {
                    assert_eq!(seen[row as usize], history(&table.tokens), "{:?}", table.id)
                }
                None => {}
            }
        }
        self.settle(drops && outs > 0);
        self.device.spoil_free(&self.cache);
    }

    /// Runs a plan, in which the clock has the first row.
    fn run(&mut self, plan: &StepPlan) -> Vec<u64> {
        let before = |row: &u32| {
            let table = self.tables.iter().find(|table| table.id.row() == *row && table.pushed.is_some());
            table.map_or(Vec::new(), |table| table.tokens[..table.pushed.unwrap().0].to_vec())
        };
        let known = plan.table_rows().iter().map(|row| Known { salt: 0, before: before(row) });
        self.device.run_known(plan, &known.collect::<Vec<_>>())
    }

    /// Tables are as long as they should be, or, where blocks were `lost`, at most.
    fn settle(&mut self, lost: bool) {
        self.cache.assert_consistent();
        for table in &mut self.tables {
            let len = self.cache.len(table.id).unwrap() as usize;
            assert!(len == table.tokens.len() || (lost && len < table.tokens.len()), "{:?}: {len}", table.id);
            table.tokens.truncate(len);
        }
    }

    /// A transfer under way ends.
    fn report(&mut self, random: &mut Random, reached: &mut Reached) {
        let Some(report) = self.device.complete(below(random, 8)) else { return };
        let fails = below(random, 6) == 0 && !self.returns.contains(&report.step);
        reached.failed += u32::from(fails);
        self.cache.complete_transfers(report.step, report.complete && !fails);
        self.settle(fails);
    }

    /// Whether tables share a slot of the host pool.
    fn shares_on_host(&self) -> bool {
        let held: u32 = self.tables.iter().map(|table| self.cache.host_blocks_of(table.id).unwrap()).sum();
        let stats = self.cache.stats();
        held > stats.host_blocks - stats.host_free_blocks
    }

    /// Brings back and reads one table after the other, and gives it up: those in the pool first.
    fn finish(mut self, random: &mut Random, reached: &mut Reached) {
        while self.device.num_transfers() > 0 {
            self.report(random, reached);
        }
        self.tables.sort_by_key(|table| std::cmp::Reverse(self.cache.host_blocks_of(table.id).unwrap()));
        while let Some(table) = self.tables.pop() {
            self.cache.truncate(self.clock, 0).unwrap();
            let mut step = StepBuilder::new(&mut self.cache);
            let back = step.swap_in(table.id).and_then(|()| step.push(table.id, &[7]));
            if back.is_ok() {
                let plan = step.finish();
                let seen = self.device.run_known(&plan, &[Known { salt: 0, before: table.tokens.clone() }]);
                self.cache.commit_step(plan).unwrap();
                let len = table.tokens.len() as u32;
                let held = num_blocks(self.cache.config(), len, len + 1);
                assert_eq!(self.cache.stats().num_tables as usize, self.tables.len() + 2);
                assert!(self.cache.stats().held_blocks >= held, "{held} blocks of {:?}", table.id);
                assert_eq!(seen, [history(&[&table.tokens[..], &[7]].concat())], "{:?}", table.id);
                reached.read += 1;
            } else {
                // Rolled back: there is no room, or the table is full.
                drop(StepBuilder::new(&mut self.cache));
            }
            self.cache.release(table.id).unwrap();
            self.report(random, reached);
            self.settle(false);
        }
        self.cache.release(self.clock).unwrap();
        while self.device.num_transfers() > 0 {
            self.report(random, reached);
        }
        let stats = self.cache.stats();
        let free = (self.cache.free_blocks(), stats.host_free_blocks);
        assert_eq!(free, (stats.num_blocks, stats.host_blocks), "I1: leaked blocks");
    }
}

fn history_of(shape: &ModelShape, seed: u64, reached: &mut Reached) {
    let (mut random, mut world) = (Random(seed), World::new(shape));
    for _ in 0..STEPS {
        match below(&mut random, 6) {
            0 => change(&mut world.cache, &mut world.tables, &mut random, false),
            1 | 2 => world.report(&mut random, reached),
            _ => world.step(&mut random, reached),
        }
        world.settle(false);
        reached.shared += u32::from(world.shares_on_host());
    }
    world.finish(&mut random, reached);
}

fn histories(shape: &ModelShape) {
    let mut reached = Reached::default();
    (0..HISTORIES).for_each(|seed| history_of(shape, seed, &mut reached));
    println!("{reached:?}");
    let Reached { shared, outs, ins, dropped_outs, dropped_ins, failed, read } = reached;
    let counts = [shared as usize, outs, ins, dropped_outs, dropped_ins, failed as usize, read as usize];
    assert!(counts.into_iter().all(|count| count >= 100), "the histories are too tame: {reached:?}");
}

#[test]
fn every_history_of_swaps_keeps_each_table_its_own_tokens() {
    histories(&ModelShape::new(1, 2, 1, 8));
}

/// Two layers of the same rows.
fn two_layers(first: Reach, second: Reach) -> ModelShape {
    let group = |layer: u32, reach| LayerGroup::new([layer], 2, 1, 8).with_reach(reach);
    ModelShape::of_groups([group(0, first), group(1, second)])
}

/// One history of tables with a window.
#[cfg(feature = "faults")]
pub(crate) fn window_history(seed: u64) {
    let window = Reach::Window { tokens: 6, first: 0 };
    history_of(&two_layers(Reach::All, window), seed, &mut Reached::default());
}

#[test]
fn every_history_of_swaps_with_windows_keeps_each_table_its_own_tokens() {
    let window = |tokens, first| Reach::Window { tokens, first };
    histories(&two_layers(Reach::All, window(6, 0)));
    histories(&two_layers(window(3, 5), Reach::All));
    histories(&two_layers(window(9, 0), Reach::Chunk { tokens: 6 }));
}
