//! A naive model of the cache alone: tables as lists of tokens, grown by steps that are committed or dropped.

use crate::block_states::assert_states_sum;
use crate::simulated_device::{SimulatedDevice, history, then};
use paged_kv::{CacheConfig, CacheError, CommitError, KvCache, StepBuilder, StepPlan, TableId};
use proptest::prelude::*;
use std::collections::HashMap;

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

#[derive(Clone, Debug)]
struct Table {
    id: TableId,
    tokens: Vec<u32>,
    /// Tokens before the outstanding step, if it writes through the table.
    before: Option<usize>,
}

#[derive(Debug)]
pub(crate) struct CacheWorld {
    cache: KvCache,
    device: SimulatedDevice,
    tables: Vec<Table>,
    released: Option<TableId>,
    spent: Option<StepPlan>,
}

impl CacheWorld {
    pub(crate) fn new(config: CacheConfig) -> Self {
        Self {
            device: SimulatedDevice::new(&config),
            cache: KvCache::new(config),
            tables: Vec::new(),
            released: None,
            spent: None,
        }
    }

    pub(crate) fn apply(&mut self, operation: &CacheOperation) {
        match operation {
            CacheOperation::Table(operation) => {
                change(&mut self.cache, &mut self.tables, operation, &mut self.released)
            }
            CacheOperation::Step { during, after, end } => self.step(during, after, *end),
            CacheOperation::LoseDevice => self.lose_device(),
        }
        self.check();
    }

    fn step(&mut self, during: &[TableOperation], after: &[TableOperation], end: End) {
        for table in &mut self.tables {
            undo(table);
        }
        let mut builder = StepBuilder::new(&mut self.cache);
        for operation in during {
            match operation {
                &TableOperation::Push { index, tokens, seed } => {
                    push(&mut builder, &mut self.tables, index, tokens, seed);
                }
                other => change(builder.cache_mut(), &mut self.tables, other, &mut self.released),
            }
            builder.cache().assert_consistent();
        }
        if let End::Abandon = end {
            drop(builder);
            return;
        }
        let plan = builder.finish();
        for operation in after {
            change(&mut self.cache, &mut self.tables, operation, &mut self.released);
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
                for table in &mut self.tables {
                    table.before = None;
                }
                if let Some(spent) = self.spent.take() {
                    let stale = spent.step();
                    assert!(stale < step);
                    let error = self.cache.commit_step(spent).unwrap_err();
                    assert_eq!(error, CommitError::StalePlan { step: stale });
                }
            }
            _ => self.spent = Some(plan),
        }
    }

    /// Every table is empty then, and open still.
    fn lose_device(&mut self) {
        self.device.replace();
        self.cache.forget_device();
        assert_eq!(self.cache.free_blocks(), self.cache.config().num_blocks());
        for table in &mut self.tables {
            table.before = None;
            table.tokens.clear();
        }
    }

    fn run(&mut self, plan: &StepPlan) {
        let seen = self.device.run(plan);
        let rows: HashMap<u32, usize> =
            plan.table_rows().iter().enumerate().map(|(sequence, &row)| (row, sequence)).collect();
        for table in self.tables.iter().filter(|table| table.before.is_some()) {
            let sequence = rows[&table.id.row()];
            let first = plan.query_starts()[sequence] as usize;
            let mut hash = history(&table.tokens[..table.before.unwrap()]);
            for (place, &token) in table.tokens[table.before.unwrap()..].iter().enumerate() {
                hash = then(hash, token);
                assert_eq!(seen[first + place], hash, "row {place} of {:?}", table.id);
            }
        }
    }

    fn check(&self) {
        self.cache.assert_consistent();
        assert_states_sum(&self.cache);
        for table in &self.tables {
            assert_eq!(self.cache.len(table.id), Ok(table.tokens.len() as u32));
        }
        if let Some(table) = self.released {
            assert_eq!(self.cache.len(table), Err(CacheError::UnknownTable { table }));
        }
    }

    /// One more token for every table, as far as blocks last: what each has must be its own. Then all blocks return.
    pub(crate) fn finish(mut self) {
        for table in &mut self.tables {
            undo(table);
        }
        let all: Vec<TableOperation> =
            (0..self.tables.len()).map(|index| TableOperation::Push { index, tokens: 1, seed: 1 }).collect();
        self.step(&all, &[], End::Commit);
        while let Some(table) = self.tables.pop() {
            self.cache.release(table.id).unwrap();
            self.cache.assert_consistent();
        }
        assert_eq!(self.cache.free_blocks(), self.cache.config().num_blocks(), "I1: leaked blocks");
        let all = self.cache.config().num_blocks() * self.cache.config().block_size();
        let all = all.min(self.cache.config().max_sequence_tokens());
        let table = self.cache.create(all).unwrap();
        let mut builder = StepBuilder::new(&mut self.cache);
        builder.push(table, &vec![7; all as usize]).expect("I1: one sequence can take every free block");
        self.device.run(&builder.finish());
    }
}

fn undo(table: &mut Table) {
    if let Some(before) = table.before.take() {
        table.tokens.truncate(before);
    }
}

fn push(builder: &mut StepBuilder<'_>, tables: &mut [Table], index: usize, tokens: u32, seed: u32) {
    let count = tables.len().max(1);
    let Some(table) = tables.get_mut(index % count) else { return };
    let tokens: Vec<u32> = (0..tokens).map(|place| seed.wrapping_add(place)).collect();
    let free = builder.cache().free_blocks();
    let rows = builder.num_rows();
    match builder.push(table.id, &tokens) {
        Ok(range) => {
            assert_eq!((range.start, range.len()), (rows, tokens.len()));
            assert_eq!(table.before, None);
            table.before = Some(table.tokens.len());
            table.tokens.extend(tokens);
        }
        Err(error) => {
            assert_eq!((builder.cache().free_blocks(), builder.num_rows()), (free, rows), "{error}");
            match error {
                CacheError::NoTokens { .. } => assert!(tokens.is_empty()),
                CacheError::InStep { .. } => assert!(table.before.is_some()),
                CacheError::NoFreeBlocks { needed, available } => {
                    assert!(needed > available && available == free);
                }
                CacheError::ExceedsTable { tokens: asked, max_tokens } => {
                    assert!(asked > max_tokens && asked as usize == table.tokens.len() + tokens.len());
                }
                other => panic!("{other}"),
            }
        }
    }
}

fn change(
    cache: &mut KvCache,
    tables: &mut Vec<Table>,
    operation: &TableOperation,
    released: &mut Option<TableId>,
) {
    let count = tables.len().max(1);
    let free = cache.free_blocks();
    match *operation {
        TableOperation::Create { max_tokens } => match cache.create(max_tokens) {
            Ok(id) => tables.push(Table { id, tokens: Vec::new(), before: None }),
            Err(CacheError::NoFreeTable { max_sequences }) => {
                assert_eq!(tables.len(), max_sequences as usize)
            }
            Err(CacheError::ExceedsTable { tokens, max_tokens }) => assert!(tokens > max_tokens),
            Err(other) => panic!("{other}"),
        },
        TableOperation::Fork { index, at, max_tokens } => {
            let Some(parent) = tables.get(index % count).cloned() else { return };
            let at = at % (parent.tokens.len() as u32 + 2);
            match cache.fork(parent.id, at, max_tokens) {
                Ok(id) => {
                    assert!(parent.before.is_none());
                    assert_eq!(cache.free_blocks(), free, "a fork copies nothing");
                    tables.push(Table { id, tokens: parent.tokens[..at as usize].to_vec(), before: None });
                }
                Err(CacheError::BeyondLength { .. }) => assert!(at as usize > parent.tokens.len()),
                Err(CacheError::InStep { .. }) => assert!(parent.before.is_some()),
                Err(CacheError::NoFreeTable { max_sequences }) => {
                    assert_eq!(tables.len(), max_sequences as usize);
                }
                Err(CacheError::ExceedsTable { tokens, max_tokens }) => assert!(tokens > max_tokens),
                Err(other) => panic!("{other}"),
            }
        }
        TableOperation::Truncate { index, len } => {
            let Some(table) = tables.get_mut(index % count) else { return };
            let len = len % (table.tokens.len() as u32 + 2);
            match cache.truncate(table.id, len) {
                Ok(()) => table.tokens.truncate(len as usize),
                Err(CacheError::BeyondLength { .. }) => assert!(len as usize > table.tokens.len()),
                Err(CacheError::InStep { .. }) => assert!(table.before.is_some()),
                Err(other) => panic!("{other}"),
            }
        }
        TableOperation::Release { index } => {
            let Some(table) = tables.get(index % count) else { return };
            match cache.release(table.id) {
                Ok(()) => *released = Some(tables.swap_remove(index % count).id),
                Err(CacheError::InStep { .. }) => assert!(table.before.is_some()),
                Err(other) => panic!("{other}"),
            }
        }
        TableOperation::Push { .. } => {}
    }
}
