//! Faults that users of other paged caches reported, tried on the cache alone. The numbers are those of the project's
//! list of bug cases; each test is named after what holds here.

use crate::simulated_device::{SimulatedDevice, history};
use paged_kv::{
    ArenaLayout, BlockCopy, CacheConfig, CacheError, ConfigError, KvCache, KvPart, KvType, ModelShape,
    PADDING_SLOT, RequestId, StepBuilder, StepPlan, TableId,
};
use std::collections::{HashMap, HashSet};

fn config(num_blocks: u32, block_size: u32) -> CacheConfig {
    let shape = ModelShape::new(1, 2, 1, 8);
    CacheConfig::for_blocks(num_blocks, &shape, KvType::F32).unwrap().with_block_size(block_size).unwrap()
}

/// A cache, its device, and what every table should hold.
struct Tables {
    cache: KvCache,
    device: SimulatedDevice,
    tokens: HashMap<TableId, Vec<u32>>,
}

impl Tables {
    fn new(num_blocks: u32, block_size: u32) -> Self {
        let config = config(num_blocks, block_size);
        Self { device: SimulatedDevice::new(&config), cache: KvCache::new(config), tokens: HashMap::new() }
    }

    fn create(&mut self, tokens: &[u32]) -> TableId {
        let table = self.cache.create(self.cache.config().max_sequence_tokens()).unwrap();
        self.tokens.insert(table, Vec::new());
        if !tokens.is_empty() {
            self.append(&[(table, tokens)]);
        }
        table
    }

    fn fork(&mut self, parent: TableId, at: u32) -> TableId {
        let child = self.cache.fork(parent, at, self.cache.config().max_sequence_tokens()).unwrap();
        self.tokens.insert(child, self.tokens[&parent][..at as usize].to_vec());
        child
    }

    fn plan(&mut self, pushes: &[(TableId, &[u32])]) -> StepPlan {
        let mut builder = StepBuilder::new(&mut self.cache);
        for &(table, tokens) in pushes {
            builder.push(table, tokens).unwrap();
        }
        let plan = builder.finish();
        self.cache.assert_consistent();
        plan
    }

    /// One step; returns its copies.
    fn append(&mut self, pushes: &[(TableId, &[u32])]) -> Vec<BlockCopy> {
        let plan = self.plan(pushes);
        self.device.run(&plan);
        let copies = plan.block_copies().to_vec();
        self.cache.commit_step(plan).unwrap();
        self.cache.assert_consistent();
        for &(table, tokens) in pushes {
            self.tokens.get_mut(&table).unwrap().extend(tokens);
        }
        self.read(pushes.iter().map(|push| push.0));
        copies
    }

    /// Every table holds exactly its own tokens.
    fn read(&self, tables: impl IntoIterator<Item = TableId>) {
        for table in tables {
            let tokens = &self.tokens[&table];
            assert_eq!(self.cache.len(table), Ok(tokens.len() as u32));
            assert_eq!(self.device.history_of(table, tokens.len() as u32), history(tokens), "{table:?}");
        }
    }

    fn release(&mut self, table: TableId) {
        self.cache.release(table).unwrap();
        self.tokens.remove(&table);
        self.cache.assert_consistent();
    }

    fn ref_counts(&self, table: TableId) -> Vec<u32> {
        self.cache.block_ids(table).unwrap().iter().map(|&block| self.cache.ref_count(block)).collect()
    }

    fn blocks(&self, table: TableId) -> Vec<u32> {
        self.cache.block_ids(table).unwrap().iter().map(|block| block.index()).collect()
    }
}

#[test]
fn b03_the_last_slot_of_a_whole_number_of_blocks_is_in_the_last_block() {
    let layout = *config(16, 4).layout();
    for (len, blocks) in [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)] {
        assert_eq!(layout.blocks_for(len), blocks, "{len} tokens");
    }
    let mut tables = Tables::new(16, 4);
    tables.create(&[0; 40]);
    let table = tables.cache.create(64).unwrap();
    tables.tokens.insert(table, Vec::new());
    let plan = tables.plan(&[(table, &[1, 2, 3, 4, 5, 6, 7, 8])]);
    assert_eq!(plan.slot_mapping(), [40, 41, 42, 43, 44, 45, 46, 47]);
    tables.cache.commit_step(plan).unwrap();
    assert_eq!(tables.blocks(table), [10, 11]);
    let plan = tables.plan(&[(table, &[9])]);
    assert_eq!(
        (plan.slot_mapping(), plan.changed_entries()),
        (&[48][..], &[12][..]),
        "a new block comes first"
    );
}

#[test]
fn b03_every_position_goes_to_its_own_slot_for_every_length_and_block_size() {
    for block_size in [1, 4, 16] {
        let mut tables = Tables::new(16, block_size);
        let table = tables.create(&[]);
        for len in 0..=9 {
            tables.append(&[(table, &[100 + len])]);
            let blocks = tables.blocks(table);
            assert_eq!(blocks.len() as u32, (len + 1).div_ceil(block_size));
            let waste = tables.cache.stats().tail_waste_tokens;
            assert_eq!(waste, u64::from(blocks.len() as u32 * block_size - (len + 1)));
        }
    }
}

#[test]
fn b21_addresses_beyond_32_bits_are_exact() {
    // 16 tokens, 8 heads of 128 half-precision elements, keys and values: 16,384 words a block.
    let shape = ModelShape::new(1, 8, 8, 128);
    let config = CacheConfig::for_blocks(16, &shape, KvType::F16).unwrap();
    let arena = ArenaLayout::new(*config.layout(), u32::MAX, 1).unwrap();
    assert_eq!(arena.block_stride_words(0), 16_384);
    for (block, word) in [
        (131_071, 2_147_467_264),
        (131_072, 2_147_483_648),
        (262_143, 4_294_950_912),
        (262_144, 4_294_967_296),
    ] {
        assert_eq!(arena.row_word(0, KvPart::K, block, 0, 0), word);
        assert_eq!(arena.row_word(0, KvPart::V, block, 7, 15), word + 16_384 - 64);
    }
}

#[test]
fn b21_a_pool_that_cannot_be_addressed_is_refused_with_both_numbers() {
    let shape = ModelShape::new(2, 8, 8, 128);
    let config = CacheConfig::for_blocks(262_144, &shape, KvType::F16).unwrap();
    let error = config.arenas(u64::MAX).unwrap_err();
    let expected = ConfigError::LayerExceedsArena {
        layer_bytes: 262_144 * 65_536,
        max_bytes: (2 << 30) - 4,
        max_blocks: 32_767,
    };
    assert_eq!(error, expected);
    let message = error.to_string();
    assert!(message.contains("17179869184") && message.contains("2147483644"), "{message}");
    assert!(CacheConfig::for_blocks(32_767, &shape, KvType::F16).unwrap().arenas(u64::MAX).is_ok());
    assert_eq!(
        CacheConfig::for_blocks(u32::MAX, &shape, KvType::F16).unwrap_err(),
        ConfigError::TooManySlots { slots: u64::from(u32::MAX) * 16, max: u64::from(u32::MAX) - 1 }
    );
}

#[test]
fn b23_padding_rows_write_nothing_and_belong_to_nobody() {
    let mut tables = Tables::new(4, 4);
    let table = tables.create(&[7, 8, 9]);
    let mut builder = StepBuilder::new(&mut tables.cache);
    builder.pad_to(4).unwrap();
    let rows = builder.push(table, &[10]).unwrap();
    assert_eq!(rows, 0..1, "padding comes last, whenever it was asked for");
    assert_eq!(
        builder.request_logits(RequestId::from_raw(1).sample(0), 1, 1),
        Err(CacheError::NoSuchRow { row: 1, num_rows: 1, rows: 1 }),
        "padding has no logits"
    );
    let plan = builder.finish();
    assert_eq!(plan.slot_mapping(), [3, PADDING_SLOT, PADDING_SLOT, PADDING_SLOT]);
    assert_eq!((plan.num_rows(), plan.num_sequences()), (4, 1));
    assert_eq!((plan.token_ids().len(), plan.positions().len()), (4, 4));
    assert_eq!((plan.query_starts(), plan.context_lens()), (&[0, 1][..], &[4][..]));
    assert_eq!(plan.work(), 4, "padding is no work");
    let highest = tables.cache.config().num_blocks() * tables.cache.config().block_size();
    assert!(PADDING_SLOT > highest);
    tables.device.run(&plan);
    tables.cache.commit_step(plan).unwrap();
    assert_eq!(tables.device.history_of(table, 4), history(&[7, 8, 9, 10]));
}

#[test]
fn b25_a_step_of_65537_tokens_is_planned_whole() {
    let mut tables = Tables::new(4097, 16);
    let tokens: Vec<u32> = (0..65_537).collect();
    let table = tables.cache.create(65_537).unwrap();
    let plan = tables.plan(&[(table, &tokens)]);
    let seen = tables.device.run(&plan);
    for row in [65_534, 65_535, 65_536] {
        assert_eq!(seen[row], history(&tokens[..=row]));
        assert_eq!(plan.slot_mapping()[row] as usize, row);
    }
    assert_eq!(plan.work(), 65_537 * 65_538 / 2);
}

#[test]
fn b33_forks_that_grow_apart_are_released_once_in_both_orders() {
    for parent_first in [true, false] {
        let mut tables = Tables::new(16, 4);
        let parent = tables.create(&[1; 10]);
        let child = tables.fork(parent, 10);
        for token in 10..20 {
            tables.append(&[(parent, &[token]), (child, &[100 + token])]);
        }
        tables.read([parent, child]);
        let order = if parent_first { [parent, child] } else { [child, parent] };
        for table in order {
            tables.release(table);
        }
        assert_eq!(tables.cache.free_blocks(), 16);
    }
}

#[test]
fn b33_a_fork_after_a_truncation_holds_only_the_parents_live_blocks() {
    let mut tables = Tables::new(6, 4);
    let parent = tables.create(&[1; 16]);
    tables.cache.truncate(parent, 8).unwrap();
    tables.tokens.get_mut(&parent).unwrap().truncate(8);
    let other = tables.create(&[2; 16]);
    assert!(tables.blocks(other).iter().any(|&block| block < 4), "it takes blocks that the parent gave up");
    let child = tables.fork(parent, 8);
    assert_eq!(tables.blocks(child), tables.blocks(parent));
    tables.read([other]);
    for table in [parent, other, child] {
        tables.release(table);
    }
    assert_eq!(tables.cache.free_blocks(), 6);
}

#[test]
fn b35_the_first_writer_copies_and_the_last_holder_writes_in_place() {
    let mut tables = Tables::new(8, 4);
    let a = tables.create(&[1, 2, 3, 4, 5, 6]);
    let b = tables.fork(a, 6);
    let shared = tables.blocks(a);
    let copies = tables.append(&[(a, &[100])]);
    assert_eq!(copies, [BlockCopy { source: shared[1], destination: tables.blocks(a)[1] }]);
    assert_eq!((tables.ref_counts(a), tables.ref_counts(b)), (vec![2, 1], vec![2, 1]));
    assert_eq!(tables.append(&[(b, &[200])]), [], "the last holder copies nothing");
    assert_eq!(tables.blocks(b), shared);
    tables.read([a, b]);
    assert_eq!(tables.cache.stats().block_copies, 1);
}

#[test]
fn b35_writers_of_the_same_step_share_one_copy() {
    let mut tables = Tables::new(8, 4);
    let a = tables.create(&[1, 2, 3, 4, 5, 6]);
    let b = tables.fork(a, 6);
    assert_eq!(tables.append(&[(a, &[100]), (b, &[200])]).len(), 1);
    tables.read([a, b]);
}

#[test]
fn b35_no_copy_is_made_for_a_holder_that_is_gone() {
    let mut tables = Tables::new(8, 4);
    let a = tables.create(&[1, 2, 3, 4, 5, 6]);
    let b = tables.fork(a, 6);
    tables.release(a);
    assert_eq!(tables.append(&[(b, &[200])]), []);
    tables.read([b]);
}

#[test]
fn b35_a_full_shared_block_is_never_copied() {
    let mut tables = Tables::new(8, 4);
    let a = tables.create(&[1; 8]);
    let b = tables.fork(a, 8);
    assert_eq!(tables.append(&[(a, &[100]), (b, &[200])]), []);
    assert_eq!((tables.ref_counts(a), tables.ref_counts(b)), (vec![2, 2, 1], vec![2, 2, 1]));
    assert_eq!(tables.cache.free_blocks(), 8 - 4);
}

#[test]
fn b35_three_holders_make_two_copies() {
    let mut tables = Tables::new(8, 4);
    let a = tables.create(&[1; 6]);
    let (b, c) = (tables.fork(a, 6), tables.fork(a, 6));
    let copies: usize = [a, b, c].into_iter().map(|table| tables.append(&[(table, &[9])]).len()).sum();
    assert_eq!(copies, 2);
    tables.read([a, b, c]);
}

#[test]
fn b35_holders_of_one_partial_block_read_within_their_own_lengths() {
    let mut tables = Tables::new(8, 4);
    let a = tables.create(&[1, 2, 3, 4, 5, 6, 7]);
    let b = tables.fork(a, 5);
    assert_eq!(tables.append(&[(b, &[200])]).len(), 1, "the shorter one copies");
    assert_eq!(tables.append(&[(a, &[100])]), []);
    tables.read([a, b]);
}

#[test]
fn a_dropped_step_overwrites_no_token_of_a_longer_holder() {
    let mut tables = Tables::new(8, 4);
    let long = tables.create(&[1, 2, 3]);
    let short = tables.fork(long, 1);
    // The longer one leaves by a copy, the shorter one would be the last holder. But a rollback brings the first back.
    let plan = tables.plan(&[(long, &[4]), (short, &[20])]);
    tables.device.run(&plan);
    drop(plan);
    tables.append(&[(short, &[21])]);
    tables.append(&[(long, &[5])]);
    tables.read([long, short]);
}

#[test]
fn b37_tables_are_released_in_any_order() {
    let orders = (0..256usize).map(|code| [code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6]);
    let orders: Vec<_> = orders.filter(|order| order.iter().collect::<HashSet<_>>().len() == 4).collect();
    assert_eq!(orders.len(), 24);
    for order in orders {
        let mut tables = Tables::new(16, 4);
        let a = tables.create(&(0..12).collect::<Vec<_>>());
        let b = tables.fork(a, 12);
        let c = tables.fork(a, 5);
        let d = tables.fork(b, 12);
        let all = [a, b, c, d];
        tables.append(&[(a, &[100]), (b, &[101]), (c, &[102]), (d, &[103])]);
        for (gone, &place) in order.iter().enumerate() {
            tables.release(all[place]);
            tables.read(order[gone + 1..].iter().map(|&place| all[place]));
        }
        assert_eq!(tables.cache.free_blocks(), 16);
    }
}

#[test]
fn b37_a_beam_drops_two_and_forks_the_best_twice() {
    let mut tables = Tables::new(16, 4);
    let root = tables.create(&[1; 6]);
    let mut beams = vec![root];
    beams.extend((0..3).map(|_| tables.fork(root, 6)));
    for step in 0..12 {
        let pushes: Vec<(TableId, [u32; 1])> =
            beams.iter().zip(10 * step..).map(|(&beam, token)| (beam, [token])).collect();
        let pushes: Vec<(TableId, &[u32])> = pushes.iter().map(|(beam, token)| (*beam, &token[..])).collect();
        tables.append(&pushes);
        tables.read(beams.iter().copied());
        let len = 7 + step;
        for place in [3, 1] {
            tables.release(beams.remove(place));
        }
        beams.extend([tables.fork(beams[0], len), tables.fork(beams[0], len)]);
    }
    for beam in beams {
        tables.release(beam);
    }
    assert_eq!(tables.cache.free_blocks(), 16);
}

#[test]
fn b41_no_copy_reads_or_writes_what_another_one_writes() {
    let mut tables = Tables::new(32, 4);
    let root = tables.create(&[1; 6]);
    let mut all = vec![root];
    // A tree of branches at all positions of the last block, each written in one step.
    for at in [5, 6, 5, 6, 6, 5, 6] {
        let parent = all[at as usize % all.len()];
        let at = at.min(tables.tokens[&parent].len() as u32);
        all.push(tables.fork(parent, at));
    }
    for token in 0..6 {
        let token = [token];
        let pushes: Vec<(TableId, &[u32])> = all.iter().map(|&table| (table, &token[..])).collect();
        let copies = tables.append(&pushes);
        let sources: HashSet<u32> = copies.iter().map(|copy| copy.source).collect();
        let destinations: HashSet<u32> = copies.iter().map(|copy| copy.destination).collect();
        assert_eq!(destinations.len(), copies.len());
        assert!(sources.is_disjoint(&destinations));
        tables.read(all.iter().copied());
    }
}

#[test]
fn a_copied_block_is_given_to_nobody_until_the_step_ends() {
    let mut tables = Tables::new(4, 4);
    let a = tables.create(&[1, 2, 3]);
    let b = tables.fork(a, 3);
    let c = tables.create(&[]);
    let mut builder = StepBuilder::new(&mut tables.cache);
    builder.push(a, &[4]).unwrap();
    builder.cache_mut().release(b).unwrap();
    assert_eq!(builder.cache().stats().in_transfer_blocks, 1);
    let short = builder.push(c, &[9; 12]).unwrap_err();
    assert_eq!(short, CacheError::NoFreeBlocks { needed: 3, available: 2 });
    builder.push(c, &[9; 8]).unwrap();
    let plan = builder.finish();
    tables.device.run(&plan);
    tables.cache.commit_step(plan).unwrap();
    assert_eq!(tables.cache.free_blocks(), 1);
}

#[test]
fn nothing_overflows_at_the_largest_numbers() {
    let config = config(4, 1).with_max_sequence_tokens(u32::MAX).unwrap();
    let mut cache = KvCache::new(config);
    let table = cache.create(4).unwrap();
    assert_eq!(cache.blocks_needed(table, u32::MAX), Ok(u32::MAX));
    let mut builder = StepBuilder::new(&mut cache);
    builder.push(table, &[1]).unwrap();
    let none = builder.request_logits(RequestId::from_raw(1).sample(0), u32::MAX, u32::MAX);
    assert!(matches!(none, Err(CacheError::NoSuchRow { .. })));
    assert_eq!(builder.cache().blocks_needed(table, u32::MAX), Ok(u32::MAX - 1));
}
