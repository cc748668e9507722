//! Tables that leave for the host pool and come back, under an application's own scheduler: what they share leaves with
//! the last of them, and every one comes back with its own tokens.

use crate::simulated_device::{SimulatedDevice, history};
use paged_kv::{
    CacheConfig, CacheError, KvCache, KvType, ModelShape, Namespace, StepBuilder, StepPlan, TableId,
};
use std::collections::{HashMap, HashSet};

/// Tokens per block.
const SIZE: u32 = 4;

/// A cache with the prefix cache and a host pool, its device, and what every table should hold.
struct Tables {
    cache: KvCache,
    device: SimulatedDevice,
    tokens: HashMap<TableId, Vec<u32>>,
    /// Has one row in every step, so that each can run, and holds nothing between them.
    clock: TableId,
}

impl Tables {
    /// `num_blocks` blocks, and one for the clock.
    fn new(num_blocks: u32, host_blocks: u32) -> Self {
        let shape = ModelShape::new(1, 2, 1, 8);
        let config = CacheConfig::for_blocks(num_blocks + 1, &shape, KvType::F32).unwrap();
        let config = config.with_block_size(SIZE).unwrap().with_host_blocks(host_blocks).unwrap();
        let device = SimulatedDevice::new(&config);
        let mut cache = KvCache::new(config);
        cache.enable_prefix_cache(None).unwrap();
        let clock = cache.create(1).unwrap();
        Self { cache, device, tokens: HashMap::new(), clock }
    }

    fn create(&mut self, tokens: &[u32]) -> TableId {
        let table = self.cache.create(self.cache.config().max_sequence_tokens()).unwrap();
        self.tokens.insert(table, Vec::new());
        self.append(table, tokens);
        table
    }

    fn fork(&mut self, parent: TableId, at: u32) -> TableId {
        let child = self.cache.fork(parent, at, self.cache.config().max_sequence_tokens()).unwrap();
        self.tokens.insert(child, self.tokens[&parent][..at as usize].to_vec());
        child
    }

    fn plan<T>(&mut self, work: impl FnOnce(&mut StepBuilder<'_>) -> T) -> (StepPlan, T) {
        let mut step = StepBuilder::new(&mut self.cache);
        let done = work(&mut step);
        step.push(self.clock, &[0]).unwrap();
        let plan = step.finish();
        self.cache.assert_consistent();
        (plan, done)
    }

    /// Runs and commits a plan, whose transfers end at once. Returns what its rows have seen.
    fn commit(&mut self, plan: StepPlan) -> Vec<u64> {
        let seen = self.device.run(&plan);
        self.cache.commit_step(plan).unwrap();
        self.cache.truncate(self.clock, 0).unwrap();
        while let Some(report) = self.device.complete(0) {
            self.cache.complete_transfers(report.step, report.complete);
        }
        self.cache.assert_consistent();
        seen
    }

    /// The plan is given up, before or after the device ran it.
    fn give_up(&mut self, plan: StepPlan, ran: bool) {
        if ran {
            self.device.run(&plan);
            while let Some(report) = self.device.complete(0) {
                self.cache.complete_transfers(report.step, report.complete);
            }
        }
        drop(plan);
        drop(StepBuilder::new(&mut self.cache));
        self.cache.truncate(self.clock, 0).unwrap();
        self.cache.assert_consistent();
    }

    /// One step of a table, which reads all that it holds.
    fn append(&mut self, table: TableId, tokens: &[u32]) {
        let (plan, rows) = self.plan(|step| step.push(table, tokens).unwrap());
        self.tokens.get_mut(&table).unwrap().extend(tokens);
        let seen = self.commit(plan);
        assert_eq!(seen[rows.end as usize - 1], history(&self.tokens[&table]), "{table:?}");
    }

    fn swap_out(&mut self, table: TableId) -> u32 {
        let (plan, moved) = self.plan(|step| step.swap_out(table).unwrap());
        self.commit(plan);
        moved
    }

    fn swap_in(&mut self, table: TableId) {
        let (plan, ()) = self.plan(|step| step.swap_in(table).unwrap());
        self.commit(plan);
    }

    /// Blocks that tables hold in the pool and in the host pool.
    fn held(&self) -> (u32, u32) {
        let stats = self.cache.stats();
        (stats.held_blocks, stats.host_held_blocks)
    }

    fn host_blocks(&self, tables: &[TableId]) -> Vec<u32> {
        tables.iter().map(|&table| self.cache.host_blocks_of(table).unwrap()).collect()
    }

    fn release_all(mut self) {
        for table in self.tokens.into_keys() {
            self.cache.release(table).unwrap();
            self.cache.assert_consistent();
        }
        let (num_blocks, host_blocks) = (self.cache.config().num_blocks(), self.cache.config().host_blocks());
        let stats = self.cache.stats();
        assert_eq!((self.cache.free_blocks(), stats.host_free_blocks), (num_blocks, host_blocks), "leaked");
    }
}

fn orders() -> Vec<[usize; 3]> {
    let all = (0..27usize).map(|code| [code / 9, code / 3 % 3, code % 3]);
    all.filter(|order| order.iter().collect::<HashSet<_>>().len() == 3).collect()
}

#[test]
fn tables_that_share_everything_leave_with_the_last_of_them_and_come_back_right() {
    for (one_step, first_back) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
        let mut tables = Tables::new(8, 8);
        let parent = tables.create(&(0..10).collect::<Vec<_>>());
        let both = [parent, tables.fork(parent, 10)];
        if one_step {
            let (plan, moved) = tables.plan(|step| both.map(|table| step.swap_out(table).unwrap()));
            assert_eq!((moved, plan.swap_outs().len()), ([0, 3], 3));
            tables.commit(plan);
        } else {
            assert_eq!((tables.swap_out(both[0]), tables.swap_out(both[1])), (0, 3));
        }
        assert_eq!((tables.held(), tables.host_blocks(&both)), ((0, 3), vec![3, 3]), "stored once");
        // Others write over what they had in the pool.
        let other = tables.create(&[99; 32]);
        tables.cache.release(other).unwrap();
        tables.tokens.remove(&other);

        tables.swap_in(both[first_back]);
        assert_eq!((tables.held(), tables.host_blocks(&both)), ((3, 0), vec![0, 0]));
        tables.append(both[first_back], &[100, 101, 102]);
        tables.swap_in(both[1 - first_back]);
        tables.append(both[1 - first_back], &[200]);
        tables.append(both[first_back], &[103]);
        tables.release_all();
    }
}

#[test]
fn three_tables_that_share_in_part_leave_and_return_in_any_order() {
    for out in orders() {
        for back in orders() {
            let mut tables = Tables::new(16, 16);
            let a = tables.create(&(0..10).collect::<Vec<_>>());
            let all = [a, tables.fork(a, 10), tables.fork(a, 6)];
            // The third one shares one block whole and leaves the second by a copy.
            tables.append(all[2], &[50, 51, 52]);
            assert_eq!(tables.held(), (5, 0));
            let moved: u32 = out.iter().map(|&index| tables.swap_out(all[index])).sum();
            assert_eq!(moved, 5, "{out:?}");
            assert_eq!((tables.held(), tables.host_blocks(&all)), ((0, 5), vec![3, 3, 3]), "{out:?}");
            for (step, &index) in (0..).zip(&back) {
                tables.swap_in(all[index]);
                assert_eq!(tables.cache.host_blocks_of(all[index]), Ok(0));
                // One goes on, and leaves again, before the others return.
                tables.append(all[index], &[60 + step, 61]);
                tables.swap_out(all[index]);
                tables.swap_in(all[index]);
                tables.append(all[index], &[70 + step]);
            }
            for &index in &out {
                tables.append(all[index], &[80]);
            }
            tables.release_all();
        }
    }
}

#[test]
fn a_dropped_step_of_any_kind_leaves_tables_that_share_everything_sound() {
    for ran in [false, true] {
        let mut tables = Tables::new(8, 8);
        let parent = tables.create(&(0..10).collect::<Vec<_>>());
        let both = [parent, tables.fork(parent, 10)];
        // The step of the first one moved nothing, and is as if it had not been.
        let (plan, moved) = tables.plan(|step| step.swap_out(both[0]));
        assert_eq!(moved, Ok(0));
        tables.give_up(plan, ran);
        assert_eq!(tables.swap_out(both[1]), 0, "the first one is not out");
        // The step of the last one takes what it moved with it, of both.
        let (plan, moved) = tables.plan(|step| step.swap_out(both[0]));
        assert_eq!(moved, Ok(3));
        tables.give_up(plan, ran);
        assert_eq!((tables.held(), tables.cache.stats().host_free_blocks), ((0, 0), 8));
        for table in both {
            assert_eq!(tables.cache.len(table), Ok(0));
            tables.tokens.insert(table, Vec::new());
            tables.append(table, &[7; 6]);
        }
        // The step of a return leaves both where they were.
        let fork = tables.fork(both[0], 6);
        tables.cache.release(both[1]).unwrap();
        tables.tokens.remove(&both[1]);
        let both = [both[0], fork];
        assert_eq!(both.map(|table| tables.swap_out(table)), [0, 2]);
        let (plan, back) = tables.plan(|step| {
            step.swap_in(both[0])?;
            step.push(both[0], &[1, 2, 3]).map(drop)
        });
        assert_eq!(back, Ok(()));
        tables.give_up(plan, ran);
        assert_eq!((tables.held(), tables.host_blocks(&both)), ((0, 2), vec![2, 2]));
        for table in both {
            tables.swap_in(table);
            tables.append(table, &[8]);
        }
        tables.release_all();
    }
}

#[test]
fn a_table_that_grows_before_anything_has_left_is_back() {
    for dropped in [false, true] {
        let mut tables = Tables::new(8, 8);
        let parent = tables.create(&[3; 8]);
        let child = tables.fork(parent, 8);
        assert_eq!(tables.swap_out(parent), 0);
        let (plan, rows) = tables.plan(|step| step.push(parent, &[4]));
        assert_eq!(rows, Ok(0..1));
        if dropped {
            tables.give_up(plan, true);
        } else {
            tables.tokens.get_mut(&parent).unwrap().push(4);
            tables.commit(plan);
        }
        // Where the growth was dropped, it is out as before.
        assert_eq!(tables.swap_out(child), if dropped { 2 } else { 0 });
        for table in [child, parent] {
            tables.swap_in(table);
            tables.append(table, &[5]);
        }
        tables.release_all();
    }
}

#[test]
fn what_its_last_other_holder_released_leaves_when_the_table_is_swapped_out_again() {
    let mut tables = Tables::new(8, 8);
    let parent = tables.create(&[3; 8]);
    let child = tables.fork(parent, 8);
    assert_eq!(tables.swap_out(parent), 0);
    tables.cache.release(child).unwrap();
    tables.tokens.remove(&child);
    assert_eq!((tables.swap_out(parent), tables.held()), (2, (0, 2)));
    tables.swap_in(parent);
    tables.append(parent, &[5]);
    tables.release_all();
}

#[test]
fn a_full_host_pool_refuses_the_last_of_them_and_nothing_changes() {
    let mut tables = Tables::new(8, 2);
    let parent = tables.create(&[3; 12]);
    let child = tables.fork(parent, 12);
    assert_eq!(tables.swap_out(parent), 0);
    let (plan, refused) = tables.plan(|step| step.swap_out(child));
    assert_eq!(refused, Err(CacheError::HostPoolFull { needed: 3, available: 2 }));
    tables.commit(plan);
    assert_eq!((tables.held(), tables.host_blocks(&[parent, child])), ((3, 0), vec![0, 0]));
    tables.append(child, &[4]);
    let (plan, refused) = tables.plan(|step| step.swap_out(child));
    assert_eq!(refused, Err(CacheError::HostPoolFull { needed: 4, available: 2 }));
    tables.commit(plan);
    tables.swap_in(parent);
    assert_eq!(tables.swap_out(child), 1, "what is its alone");
    let (plan, refused) = tables.plan(|step| step.swap_out(parent));
    assert_eq!(refused, Err(CacheError::HostPoolFull { needed: 3, available: 1 }));
    tables.commit(plan);
    tables.swap_in(child);
    for table in [parent, child] {
        tables.append(table, &[5]);
    }
    tables.release_all();
}

#[test]
fn what_left_is_found_in_the_prefix_cache_until_others_take_the_blocks() {
    let mut tables = Tables::new(8, 8);
    let (namespace, tokens) = (Namespace::default(), (0..9).collect::<Vec<_>>());
    let parent = tables.create(&tokens);
    tables.cache.register_prefix(parent, &namespace, &tokens).unwrap();
    let both = [parent, tables.fork(parent, 9)];
    assert_eq!(both.map(|table| tables.swap_out(table)), [0, 3]);
    assert_eq!(tables.cache.find_prefix(&namespace, &tokens), 8);
    let (found, len) = tables.cache.create_with_prefix(&namespace, &tokens, 16).unwrap();
    tables.tokens.insert(found, tokens[..len as usize].to_vec());
    tables.append(found, &[50]);
    // They return into blocks of their own.
    tables.swap_in(both[1]);
    assert_eq!(tables.held(), (3 + 3, 0));
    for table in both {
        tables.append(table, &[60]);
    }
    tables.append(found, &[70]);
    tables.release_all();
}

#[test]
fn a_return_that_is_given_up_leaves_nothing_to_be_found() {
    let mut tables = Tables::new(8, 8);
    let (namespace, tokens) = (Namespace::default(), (0..9).collect::<Vec<_>>());
    let table = tables.create(&tokens);
    assert_eq!(tables.swap_out(table), 3);
    let (plan, back) = tables.plan(|step| {
        step.swap_in(table)?;
        step.cache_mut().register_prefix(table, &namespace, &tokens)
    });
    assert_eq!((back, tables.cache.find_prefix(&namespace, &tokens)), (Ok(()), 8));
    // The device has not filled these blocks.
    tables.give_up(plan, false);
    assert_eq!(tables.cache.find_prefix(&namespace, &tokens), 0);
    tables.swap_in(table);
    tables.append(table, &[9]);
    tables.release_all();
}

#[test]
fn what_a_step_brings_back_is_neither_moved_out_nor_given_away_by_it() {
    let mut tables = Tables::new(4, 8);
    let [one, two] = [tables.create(&[1; 8]), tables.create(&[2; 8])];
    assert_eq!([one, two].map(|table| tables.swap_out(table)), [2, 2]);
    let (plan, moved) = tables.plan(|step| {
        step.swap_in(one).unwrap();
        step.swap_out(one)
    });
    assert_eq!((moved, plan.swap_ins().len(), plan.swap_outs().len()), (Ok(0), 2, 0));
    tables.commit(plan);
    assert_eq!(tables.swap_out(one), 2, "the next step moves it");
    // One block is left beside those that return.
    let other = tables.create(&[9; 8]);
    let (plan, refused) = tables.plan(|step| {
        step.swap_in(one).unwrap();
        step.cache_mut().release(one).unwrap();
        assert_eq!(step.cache().stats().in_transfer_blocks, 2);
        step.swap_in(two)
    });
    assert_eq!(refused, Err(CacheError::NoFreeBlocks { needed: 2, available: 1 }));
    tables.tokens.remove(&one);
    tables.commit(plan);
    tables.swap_in(two);
    tables.cache.release(other).unwrap();
    tables.tokens.remove(&other);
    tables.append(two, &[3]);
    tables.release_all();
}

/// What is said to be needed is enough, and one block less is not.
#[test]
fn the_blocks_that_a_swapped_table_needs_are_those_of_its_return_and_of_the_push() {
    for (len, push, forked, needed) in
        [(10, 1, false, 3), (10, 3, false, 4), (8, 1, false, 3), (10, 1, true, 4), (8, 1, true, 3)]
    {
        for missing in [0, 1] {
            let mut tables = Tables::new(8, 8);
            let table = tables.create(&vec![1; len]);
            let fork = forked.then(|| tables.fork(table, len as u32));
            let all: Vec<TableId> = [table].into_iter().chain(fork).collect();
            let moved: u32 = all.iter().map(|&table| tables.swap_out(table)).sum();
            assert_eq!(moved as usize, len.div_ceil(SIZE as usize));
            assert_eq!(tables.cache.blocks_needed(table, push), Ok(needed), "{len} {push} {forked}");
            assert_eq!(tables.cache.blocks_needed(table, 0), Ok(moved));
            // All but as many are another's.
            let others = 9 - needed + missing;
            tables.create(&vec![2; (others * SIZE) as usize]);
            assert_eq!(tables.cache.free_blocks(), needed - missing);
            let mut step = StepBuilder::new(&mut tables.cache);
            let done = step.swap_in(table).and_then(|()| step.push(table, &vec![3; push as usize]));
            assert_eq!(done.is_ok(), missing == 0, "{len} {push} {forked} {missing}: {done:?}");
            assert!(done.is_ok() || matches!(done, Err(CacheError::NoFreeBlocks { .. })), "{done:?}");
        }
    }
}
