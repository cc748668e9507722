//! Tables alone, with blocks that are found by their content: forks, releases in any order, and the sum of all counts.

use crate::simulated_device::{SimulatedDevice, history};
use paged_kv::{KvCache, Namespace, StepBuilder, TableId};
use std::collections::HashMap;

struct Tables {
    cache: KvCache,
    device: SimulatedDevice,
    tokens: HashMap<TableId, Vec<u32>>,
}

impl Tables {
    fn new(num_blocks: u32) -> Self {
        let config = super::pool(num_blocks, 0);
        let device = SimulatedDevice::new(&config);
        let mut cache = KvCache::new(config);
        cache.enable_prefix_cache(None).unwrap();
        Self { cache, device, tokens: HashMap::new() }
    }

    fn create(&mut self, tokens: &[u32]) -> TableId {
        let (table, found) = self.cache.create_with_prefix(&Namespace::default(), tokens, 60).unwrap();
        self.tokens.insert(table, tokens[..found as usize].to_vec());
        self.append(&[(table, &tokens[found as usize..])]);
        table
    }

    fn fork(&mut self, parent: TableId, at: u32) -> TableId {
        let child = self.cache.fork(parent, at, 60).unwrap();
        self.tokens.insert(child, self.tokens[&parent][..at as usize].to_vec());
        child
    }

    /// One step, after which every table's full blocks can be found.
    fn append(&mut self, pushes: &[(TableId, &[u32])]) {
        let mut builder = StepBuilder::new(&mut self.cache);
        for &(table, tokens) in pushes {
            builder.push(table, tokens).unwrap();
        }
        let plan = builder.finish();
        self.device.run(&plan);
        self.cache.commit_step(plan).unwrap();
        for &(table, tokens) in pushes {
            let all = self.tokens.get_mut(&table).unwrap();
            all.extend(tokens);
            self.cache.register_prefix(table, &Namespace::default(), all).unwrap();
        }
        self.check();
    }

    /// Every table holds exactly its own tokens, and all counts sum.
    fn check(&self) {
        self.cache.assert_consistent();
        for (&table, tokens) in &self.tokens {
            assert_eq!(self.cache.len(table), Ok(tokens.len() as u32));
            // Tables change after a registration, too; the device knows of it with their next step.
            let known = self.cache.block_ids(table).unwrap().len();
            assert_eq!(known, tokens.len().div_ceil(4));
        }
        let stats = self.cache.stats();
        let sum = stats.free_blocks + stats.cached_blocks + stats.held_blocks + stats.in_transfer_blocks;
        assert_eq!(sum, stats.num_blocks, "I1: {stats:?}");
    }

    fn release(&mut self, table: TableId) -> Vec<u32> {
        self.cache.release(table).unwrap();
        let tokens = self.tokens.remove(&table).unwrap();
        self.check();
        tokens
    }

    fn known(&self, tokens: &[u32]) -> u32 {
        self.cache.find_prefix(&Namespace::default(), tokens)
    }
}

#[test]
fn b33_registered_forks_that_grow_apart_are_released_once_in_both_orders() {
    for parent_first in [true, false] {
        let mut tables = Tables::new(16);
        let parent = tables.create(&[1; 10]);
        let child = tables.fork(parent, 10);
        for token in 10..20 {
            tables.append(&[(parent, &[token]), (child, &[100 + token])]);
        }
        let order = if parent_first { [parent, child] } else { [child, parent] };
        for table in order {
            let tokens = tables.release(table);
            assert_eq!(tables.known(&tokens), 19, "what it computed is found until others need the blocks");
        }
        assert_eq!(tables.cache.free_blocks(), 16);
        // One table can take every block.
        tables.create(&(1000..1060).collect::<Vec<_>>());
        let rest = tables.create(&[5000; 4]);
        tables.release(rest);
    }
}

#[test]
fn b37_registered_tables_are_released_in_any_order() {
    let orders = (0..256usize).map(|code| [code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6]);
    let orders: Vec<[usize; 4]> = orders.filter(|order| (0..4).all(|place| order.contains(&place))).collect();
    assert_eq!(orders.len(), 24);
    for order in orders {
        let mut tables = Tables::new(16);
        let a = tables.create(&(0..12).collect::<Vec<_>>());
        let b = tables.fork(a, 12);
        let c = tables.fork(a, 5);
        let d = tables.fork(b, 12);
        let all = [a, b, c, d];
        tables.append(&[(a, &[100]), (b, &[101]), (c, &[102]), (d, &[103])]);
        for (gone, &place) in order.iter().enumerate() {
            tables.release(all[place]);
            for &place in &order[gone + 1..] {
                let (table, tokens) = (all[place], tables.tokens[&all[place]].clone());
                assert_eq!(tables.device.history_of(table, tokens.len() as u32), history(&tokens));
            }
            // The common part is found as long as no table needs its blocks.
            assert_eq!(tables.known(&(0..13).collect::<Vec<_>>()), 12);
        }
        assert_eq!((tables.cache.free_blocks(), tables.cache.stats().held_blocks), (16, 0));
    }
}

#[test]
fn equal_content_that_was_computed_twice_is_held_once_after_it_is_registered() {
    let mut tables = Tables::new(16);
    let tokens: Vec<u32> = (0..11).collect();
    let [first, second] = [0, 1].map(|_| tables.cache.create(60).unwrap());
    tables.tokens.extend([(first, Vec::new()), (second, Vec::new())]);
    tables.append(&[(first, &tokens), (second, &tokens)]);
    let blocks = |tables: &Tables, table| tables.cache.block_ids(table).unwrap().to_vec();
    assert_eq!(blocks(&tables, first)[..2], blocks(&tables, second)[..2]);
    assert_ne!(
        blocks(&tables, first)[2],
        blocks(&tables, second)[2],
        "a block that is not full is each one's own"
    );
    assert_eq!((tables.cache.stats().held_blocks, tables.cache.stats().shared_blocks), (4, 2));
    // The device is told with the next step, and both read on.
    tables.append(&[(first, &[50]), (second, &[60])]);
    for table in [first, second] {
        assert_eq!(tables.device.history_of(table, 12), history(&tables.tokens[&table]));
    }
}
