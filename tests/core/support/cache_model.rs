//! A naive model of the cache alone: tables as lists of tokens and of blocks that have names, grown by steps that are
//! committed or dropped. It knows how many blocks are held, and shared, and which lengths a table can be cut to.

use crate::block_states::assert_states_sum;
use crate::naive_blocks::{kept_blocks, num_blocks, pool_tokens};
use crate::simulated_device::{Device, Known, SimulatedDevice, Stack, history, stacks_of, then};
use paged_kv::{CacheConfig, CacheError, CommitError, KvCache, StepBuilder, StepPlan, TableId};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};

/// What is done to a table between and within steps. Indices are taken modulo what exists.
#[derive(Clone, Debug)]
pub(crate) enum TableOperation {
    Create {
        max_tokens: u32,
    },
    Fork {
        index: usize,
        at: u32,
        max_tokens: u32,
    },
    Truncate {
        index: usize,
        len: u32,
    },
    Release {
        index: usize,
    },
    /// Only within a step.
    Push {
        index: usize,
        tokens: u32,
        seed: u32,
    },
}

/// How a step ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Commit,
    Drop {
        ran: bool,
    },
    /// The builder is dropped before the plan is finished.
    Abandon,
}

#[derive(Clone, Debug)]
pub(crate) enum CacheOperation {
    Table(TableOperation),
    Step { during: Vec<TableOperation>, after: Vec<TableOperation>, end: End },
    LoseDevice,
}

pub(crate) fn cache_operations() -> impl Strategy<Value = CacheOperation> {
    let during = prop_oneof![3 => pushes(), 1 => table_operations()];
    let end = prop_oneof![
        5 => Just(End::Commit),
        2 => any::<bool>().prop_map(|ran| End::Drop { ran }),
        1 => Just(End::Abandon)
    ];
    let step = (prop::collection::vec(during, 1..8), prop::collection::vec(table_operations(), 0..3), end);
    prop_oneof![
        10 => table_operations().prop_map(CacheOperation::Table),
        1 => Just(CacheOperation::LoseDevice),
        10 => step.prop_map(|(during, after, end)| CacheOperation::Step { during, after, end }),
    ]
}

fn pushes() -> impl Strategy<Value = TableOperation> {
    (0..8usize, 0..12u32, any::<u32>()).prop_map(|(index, tokens, seed)| TableOperation::Push {
        index,
        tokens,
        seed,
    })
}

fn table_operations() -> impl Strategy<Value = TableOperation> {
    let (index, len) = (0..8usize, any::<u32>());
    prop_oneof![
        3 => (1..60u32).prop_map(|max_tokens| TableOperation::Create { max_tokens }),
        4 => (index.clone(), len, 1..60u32)
            .prop_map(|(index, at, max_tokens)| TableOperation::Fork { index, at, max_tokens }),
        2 => (index.clone(), len).prop_map(|(index, len)| TableOperation::Truncate { index, len }),
        2 => index.prop_map(|index| TableOperation::Release { index }),
    ]
}

/// Blocks of a table in one stack, by entry. Each block of the pool has another name for as long as somebody holds it.
type Run = BTreeMap<u32, u64>;

#[derive(Clone, Debug)]
struct Table {
    id: TableId,
    tokens: Vec<u32>,
    /// Of each stack.
    runs: Vec<Run>,
    /// What it had before the outstanding step, if that writes through it.
    before: Option<(usize, Vec<Run>)>,
}

/// All tables, and what the step that is built does.
#[derive(Debug)]
struct Tables {
    config: CacheConfig,
    stacks: Vec<Stack>,
    all: Vec<Table>,
    released: Option<TableId>,
    names: u64,
    /// Blocks that tables left by a copy of the outstanding step, and the tokens that they had then.
    left: Vec<(u64, u32)>,
    reached: CacheReached,
}

/// How often a history came to what is hard to reach.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CacheReached {
    pub(crate) copies: u64,
    pub(crate) dropped: u64,
    /// Blocks given back by windows, and forks and cuts that were refused because of that.
    pub(crate) slid: u64,
    pub(crate) forks_behind: u64,
    pub(crate) cuts_behind: u64,
    /// Forks of tables that lack what comes before a window.
    pub(crate) forks_after: u64,
}

impl CacheReached {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            copies: self.copies + other.copies,
            dropped: self.dropped + other.dropped,
            slid: self.slid + other.slid,
            forks_behind: self.forks_behind + other.forks_behind,
            cuts_behind: self.cuts_behind + other.cuts_behind,
            forks_after: self.forks_after + other.forks_after,
        }
    }

    /// How often it came to what was rarest, of all that windows have to do with or of the rest.
    pub(crate) fn rarest(self, windows: bool) -> u64 {
        let Self { copies, dropped, slid, forks_behind, cuts_behind, forks_after } = self;
        let windowed = [slid, forks_behind, cuts_behind, forks_after];
        let plain = copies.min(dropped);
        if windows { windowed.into_iter().fold(plain, u64::min) } else { plain }
    }
}

/// What a push takes, stack by stack: entries given back, the last block where it is copied, new entries.
struct Growth {
    passed: Vec<Vec<u32>>,
    copied: Vec<Option<u32>>,
    new: Vec<std::ops::Range<u32>>,
}

impl Growth {
    fn needed(&self) -> u32 {
        let new: usize = self.new.iter().map(ExactSizeIterator::len).sum();
        (new + self.copied.iter().flatten().count()) as u32
    }
}

impl Tables {
    /// Tables that hold a block.
    fn holders(&self, name: u64) -> u32 {
        let runs = self.all.iter().flat_map(|table| &table.runs);
        runs.map(|run| run.values().filter(|&&held| held == name).count() as u32).sum()
    }

    /// Blocks that are held, and those of them that are shared.
    fn held_and_shared(&self) -> (u32, u32) {
        let mut holders: HashMap<u64, u32> = HashMap::new();
        for &name in self.all.iter().flat_map(|table| &table.runs).flat_map(|run| run.values()) {
            *holders.entry(name).or_default() += 1;
        }
        (holders.len() as u32, holders.values().filter(|&&holders| holders > 1).count() as u32)
    }

    /// What `num_tokens` more tokens of a table take.
    fn growth(&self, table: &Table, num_tokens: u32) -> Growth {
        let len = table.tokens.len() as u32;
        let kept = kept_blocks(&self.config, len, len + num_tokens);
        let (mut passed, mut copied, mut new) = (Vec::new(), Vec::new(), Vec::new());
        for ((run, stack), [first, rest]) in table.runs.iter().zip(&self.stacks).zip(kept) {
            let stays = |entry: &u32| first.contains(entry) || rest.contains(entry);
            passed.push(run.keys().copied().filter(|entry| !stays(entry)).collect());
            let tail = run
                .get_key_value(&(len / stack.block_size))
                .filter(|_| num_tokens > 0 && !len.is_multiple_of(stack.block_size));
            let others = |(_, name): &(&u32, &u64)| {
                self.holders(**name) > 1 || self.left.iter().any(|left| left.0 == **name && left.1 > len)
            };
            copied.push(tail.filter(others).map(|(&entry, _)| entry));
            new.push(len.div_ceil(stack.block_size)..(len + num_tokens).div_ceil(stack.block_size));
        }
        Growth { passed, copied, new }
    }

    /// A push gives back what has passed, even one that is refused for want of blocks.
    fn slide(&mut self, index: usize, growth: &Growth) -> u32 {
        let mut gone = Vec::new();
        for (run, passed) in self.all[index].runs.iter_mut().zip(&growth.passed) {
            gone.extend(passed.iter().filter_map(|entry| run.remove(entry)));
            self.reached.slid += passed.len() as u64;
        }
        // What a copy of the step reads is not free until it ends.
        let is_free = |&&name: &&u64| self.holders(name) == 0 && self.left.iter().all(|left| left.0 != name);
        gone.iter().filter(is_free).count() as u32
    }

    fn grow(&mut self, index: usize, growth: &Growth) {
        let len = self.all[index].tokens.len() as u32;
        let before = (len as usize, self.all[index].runs.clone());
        for (stack, run) in self.all[index].runs.iter_mut().enumerate() {
            for entry in growth.copied[stack].into_iter().chain(growth.new[stack].clone()) {
                self.names += 1;
                if let Some(left) = run.insert(entry, self.names) {
                    self.reached.copies += 1;
                    self.left.push((left, len));
                }
            }
        }
        self.all[index].before = Some(before);
    }

    /// Whether a table has what rows after its first `len` tokens see.
    fn reaches(&self, table: &Table, len: u32) -> bool {
        let kept = kept_blocks(&self.config, len, len);
        table
            .runs
            .iter()
            .zip(kept)
            .all(|(run, [first, rest])| first.chain(rest).all(|entry| run.contains_key(&entry)))
    }

    fn check_behind(&self, table: &Table, asked: u32, error: &CacheError) {
        let &CacheError::BehindWindow { table: id, tokens, shortest } = error else { panic!("{error}") };
        assert_eq!((id, tokens), (table.id, asked));
        let lengths = asked + 1..=table.tokens.len() as u32;
        assert_eq!(lengths.clone().find(|&len| self.reaches(table, len)), Some(shortest), "{error}");
    }

    fn truncate(&mut self, index: usize, len: u32) {
        let table = &mut self.all[index];
        table.tokens.truncate(len as usize);
        for (run, stack) in table.runs.iter_mut().zip(&self.stacks) {
            run.retain(|&entry, _| entry < len.div_ceil(stack.block_size));
        }
    }

    /// The outstanding step is dropped: what it gave back stays so.
    fn undo(&mut self) {
        for table in &mut self.all {
            if let Some((len, runs)) = table.before.take() {
                table.tokens.truncate(len);
                table.runs = runs;
            }
        }
        self.left.clear();
    }

    fn commit(&mut self) {
        self.all.iter_mut().for_each(|table| table.before = None);
        self.left.clear();
    }
}

#[derive(Debug)]
pub(crate) struct CacheWorld {
    cache: KvCache,
    device: SimulatedDevice,
    tables: Tables,
    spent: Option<StepPlan>,
    /// A step was planned and neither committed nor rolled back yet.
    in_step: bool,
}

impl CacheWorld {
    pub(crate) fn new(config: CacheConfig) -> Self {
        Self {
            device: SimulatedDevice::new(&config),
            tables: Tables {
                stacks: stacks_of(&config),
                config: config.clone(),
                all: Vec::new(),
                released: None,
                names: 0,
                left: Vec::new(),
                reached: CacheReached::default(),
            },
            cache: KvCache::new(config),
            spent: None,
            in_step: false,
        }
    }

    pub(crate) fn apply(&mut self, operation: &CacheOperation) {
        match operation {
            CacheOperation::Table(operation) => {
                change(&mut self.cache, &mut self.tables, operation);
            }
            CacheOperation::Step { during, after, end } => self.step(during, after, *end),
            CacheOperation::LoseDevice => self.lose_device(),
        }
        self.check();
    }

    fn step(&mut self, during: &[TableOperation], after: &[TableOperation], end: End) {
        self.tables.undo();
        let mut builder = StepBuilder::new(&mut self.cache);
        self.in_step = true;
        for operation in during {
            match operation {
                &TableOperation::Push { index, tokens, seed } => {
                    push(&mut builder, &mut self.tables, index, tokens, seed);
                }
                other => change(builder.cache_mut(), &mut self.tables, other),
            }
            builder.cache().assert_consistent();
            check_counts(builder.cache(), &self.tables);
        }
        if let End::Abandon = end {
            drop(builder);
            self.tables.reached.dropped += 1;
            return;
        }
        let plan = builder.finish();
        for operation in after {
            change(&mut self.cache, &mut self.tables, operation);
            self.cache.assert_consistent();
            assert_states_sum(&self.cache);
        }
        if plan.num_rows() > 0 && !matches!(end, End::Drop { ran: false }) {
            self.run(&plan);
        }
        match end {
            End::Commit => {
                let step = plan.step();
                self.cache.commit_step(plan).unwrap();
                self.tables.commit();
                self.in_step = false;
                if let Some(spent) = self.spent.take() {
                    let stale = spent.step();
                    assert!(stale < step);
                    let error = self.cache.commit_step(spent).unwrap_err();
                    assert_eq!(error, CommitError::StalePlan { step: stale });
                }
            }
            _ => {
                self.tables.reached.dropped += 1;
                self.spent = Some(plan);
            }
        }
    }

    /// Every table is empty then, and still open. Those that had no block, because their windows begin anew, go on.
    fn lose_device(&mut self) {
        self.device.replace();
        self.cache.forget_device();
        assert_eq!(self.cache.free_blocks(), self.cache.config().num_blocks());
        self.in_step = false;
        self.tables.undo();
        for table in self.tables.all.iter_mut().filter(|table| table.runs.iter().any(|run| !run.is_empty())) {
            table.tokens.clear();
            table.runs.iter_mut().for_each(Run::clear);
        }
    }

    fn run(&mut self, plan: &StepPlan) {
        let in_step = |row: &u32| {
            let table = self.tables.all.iter().find(|table| table.id.row() == *row && table.before.is_some());
            table.expect("a row of a table that is not in the step")
        };
        let tables: Vec<&Table> = plan.table_rows().iter().map(in_step).collect();
        let len = |table: &Table| table.before.as_ref().map_or(0, |before| before.0);
        let known = tables.iter().map(|table| Known { salt: 0, before: table.tokens[..len(table)].to_vec() });
        let seen = self.device.run_known(plan, &known.collect::<Vec<_>>());
        assert_eq!(tables.len(), self.tables.all.iter().filter(|table| table.before.is_some()).count());
        for (sequence, table) in tables.into_iter().enumerate() {
            let first = plan.query_starts()[sequence] as usize;
            let mut hash = history(&table.tokens[..len(table)]);
            for (place, &token) in table.tokens[len(table)..].iter().enumerate() {
                hash = then(hash, token);
                assert_eq!(seen[first + place], hash, "row {place} of {:?}", table.id);
            }
        }
    }

    fn check(&mut self) {
        self.cache.assert_consistent();
        assert_states_sum(&self.cache);
        check_counts(&self.cache, &self.tables);
        if !self.in_step {
            let stats = self.cache.stats();
            assert_eq!(stats.free_blocks + stats.held_blocks, stats.num_blocks, "I1: {stats:?}");
            self.device.spoil_free(&self.cache);
        }
        for table in &self.tables.all {
            assert_eq!(self.cache.len(table.id), Ok(table.tokens.len() as u32));
        }
        if let Some(table) = self.tables.released {
            assert_eq!(self.cache.len(table), Err(CacheError::UnknownTable { table }));
        }
    }

    /// One more token for every table, as far as blocks last: what each has must be its own. Then all blocks return.
    pub(crate) fn finish(mut self) -> CacheReached {
        let all: Vec<TableOperation> = (0..self.tables.all.len())
            .map(|index| TableOperation::Push { index, tokens: 1, seed: 1 })
            .collect();
        self.step(&all, &[], End::Commit);
        while let Some(table) = self.tables.all.pop() {
            self.cache.release(table.id).unwrap();
            self.cache.assert_consistent();
            check_counts(&self.cache, &self.tables);
        }
        let config = self.cache.config().clone();
        assert_eq!(self.cache.free_blocks(), config.num_blocks(), "I1: leaked blocks");
        // Row by row, because a window gives back what it has left behind with every step.
        let plain = self.tables.stacks.iter().all(|stack| stack.reach.is_all());
        let all = pool_tokens(&config, 1).min(config.max_sequence_tokens());
        let table = self.cache.create(all).unwrap();
        let mut tokens = Vec::new();
        while (tokens.len() as u32) < all {
            let (len, rows) = (tokens.len() as u32, if plain { all } else { 1 });
            let mut builder = StepBuilder::new(&mut self.cache);
            builder.push(table, &vec![7; rows as usize]).expect("I1: one sequence can take every free block");
            let plan = builder.finish();
            self.device.run_known(&plan, &[Known { salt: 0, before: tokens.clone() }]);
            self.cache.commit_step(plan).unwrap();
            tokens.resize((len + rows) as usize, 7);
            let held = num_blocks(&config, len, len + rows);
            assert_eq!(self.cache.stats().held_blocks, held, "blocks of {} tokens", tokens.len());
        }
        self.tables.reached
    }
}

/// Pool and model agree about who holds how much.
fn check_counts(cache: &KvCache, tables: &Tables) {
    let stats = cache.stats();
    let counted = (stats.held_blocks, stats.shared_blocks);
    assert_eq!(counted, tables.held_and_shared(), "blocks held and shared: {stats:?}");
}

fn push(builder: &mut StepBuilder<'_>, tables: &mut Tables, index: usize, tokens: u32, seed: u32) {
    let index = index % tables.all.len().max(1);
    let Some(table) = tables.all.get(index) else { return };
    let (id, len, in_step) = (table.id, table.tokens.len() as u32, table.before.is_some());
    let growth = tables.growth(table, tokens);
    let tokens: Vec<u32> = (0..tokens).map(|place| seed.wrapping_add(place)).collect();
    let free = builder.cache().free_blocks();
    let rows = builder.num_rows();
    if !in_step {
        assert_eq!(builder.cache().blocks_needed(id, tokens.len() as u32), Ok(growth.needed()));
    }
    let pushed = builder.push(id, &tokens);
    // What the rows do not see any more goes at once, and only then blocks are counted.
    let is_counted =
        matches!(pushed, Ok(_) | Err(CacheError::NoFreeBlocks { .. } | CacheError::ExceedsTable { .. }));
    let freed = if is_counted { tables.slide(index, &growth) } else { 0 };
    match pushed {
        Ok(range) => {
            assert_eq!((range.start, range.len()), (rows, tokens.len()));
            assert!(!in_step);
            tables.grow(index, &growth);
            tables.all[index].tokens.extend(tokens);
        }
        Err(error) => {
            let left = (builder.cache().free_blocks(), builder.num_rows());
            assert_eq!(left, (free + freed, rows), "{error}");
            match error {
                CacheError::NoTokens { .. } => assert!(tokens.is_empty()),
                CacheError::InStep { .. } => assert!(in_step),
                CacheError::NoFreeBlocks { needed, available } => {
                    assert!(needed > available && available == free + freed);
                    assert_eq!(needed, growth.needed());
                }
                CacheError::ExceedsTable { tokens: asked, max_tokens } => {
                    assert!(asked > max_tokens && asked == len + tokens.len() as u32);
                }
                other => panic!("{other}"),
            }
        }
    }
}

fn change(cache: &mut KvCache, tables: &mut Tables, operation: &TableOperation) {
    let count = tables.all.len().max(1);
    let free = cache.free_blocks();
    match *operation {
        TableOperation::Create { max_tokens } => match cache.create(max_tokens) {
            Ok(id) => {
                let runs = vec![Run::new(); tables.stacks.len()];
                tables.all.push(Table { id, tokens: Vec::new(), runs, before: None });
            }
            Err(CacheError::NoFreeTable { max_sequences }) => {
                assert_eq!(tables.all.len(), max_sequences as usize)
            }
            Err(CacheError::ExceedsTable { tokens, max_tokens }) => assert!(tokens > max_tokens),
            Err(other) => panic!("{other}"),
        },
        TableOperation::Fork { index, at, max_tokens } => {
            let Some(parent) = tables.all.get(index % count).cloned() else { return };
            let at = at % (parent.tokens.len() as u32 + 2);
            match cache.fork(parent.id, at, max_tokens) {
                Ok(id) => {
                    assert!(parent.before.is_none() && tables.reaches(&parent, at));
                    assert_eq!(cache.free_blocks(), free, "a fork copies nothing");
                    let has_all = |run: &Run| run.keys().copied().eq(0..run.len() as u32);
                    tables.reached.forks_after += u64::from(!parent.runs.iter().all(has_all));
                    tables.all.push(Table { id, before: None, ..parent });
                    tables.truncate(tables.all.len() - 1, at);
                }
                Err(CacheError::BeyondLength { .. }) => assert!(at as usize > parent.tokens.len()),
                Err(CacheError::InStep { .. }) => assert!(parent.before.is_some()),
                Err(CacheError::NoFreeTable { max_sequences }) => {
                    assert_eq!(tables.all.len(), max_sequences as usize);
                }
                Err(CacheError::ExceedsTable { tokens, max_tokens }) => assert!(tokens > max_tokens),
                Err(error) => {
                    tables.check_behind(&parent, at, &error);
                    tables.reached.forks_behind += 1;
                }
            }
        }
        TableOperation::Truncate { index, len } => {
            let index = index % count;
            let Some(table) = tables.all.get(index) else { return };
            let len = len % (table.tokens.len() as u32 + 2);
            match cache.truncate(table.id, len) {
                Ok(()) => {
                    assert!(tables.reaches(table, len));
                    tables.truncate(index, len);
                }
                Err(CacheError::BeyondLength { .. }) => assert!(len as usize > table.tokens.len()),
                Err(CacheError::InStep { .. }) => assert!(table.before.is_some()),
                Err(error) => {
                    tables.check_behind(table, len, &error);
                    tables.reached.cuts_behind += 1;
                }
            }
        }
        TableOperation::Release { index } => {
            let Some(table) = tables.all.get(index % count) else { return };
            match cache.release(table.id) {
                Ok(()) => tables.released = Some(tables.all.swap_remove(index % count).id),
                Err(CacheError::InStep { .. }) => assert!(table.before.is_some()),
                Err(other) => panic!("{other}"),
            }
        }
        TableOperation::Push { .. } => {}
    }
}
