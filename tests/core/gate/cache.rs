//! Random histories of a cache under an application's own scheduler.

use crate::gate::{FULL, Recording, text};
use crate::simulation::random::Random;
use paged_kv::{
    CacheConfig, CacheError, CacheStats, KvCache, KvType, ModelShape, Namespace, RequestId, StepBuilder,
    StepId, StepPlan, TableId,
};
use std::fmt::Write as _;

pub(super) const HISTORIES: usize = 200;

/// A table and the tokens that were pushed to it.
#[derive(Clone, Debug)]
struct Row {
    table: TableId,
    tokens: Vec<u32>,
    /// Blocks in the host pool at most.
    out: u32,
}

struct History {
    random: Random,
    cache: KvCache,
    /// Tokens that a table may hold: whole blocks.
    max_tokens: u32,
    rows: Vec<Row>,
    plan: Option<StepPlan>,
    /// The rows as they are if the outstanding step is rolled back.
    before: Vec<Row>,
    last_step: u64,
    transfers: Vec<StepId>,
    entries: Vec<String>,
}

/// Records one history; `hash` makes all hashes of its prefix cache alike.
pub(super) fn record(number: usize, hash: Option<u64>) -> (Recording, CacheStats) {
    let mut random = Random::new(0xcac4e + number as u64);
    let is_full = number.is_multiple_of(FULL);
    let block_size = [1, 4, 16, 256][if is_full { number / FULL % 3 } else { number % 4 }];
    let num_blocks = random.below(6..24);
    let shape = ModelShape::new(2, 2, 1, 8);
    let config = CacheConfig::for_blocks(num_blocks, &shape, KvType::F16).unwrap();
    let config = config.with_block_size(block_size).unwrap().with_max_sequences(random.below(2..9)).unwrap();
    let config = config.with_host_blocks(random.below(0..12)).unwrap();
    let mut cache = KvCache::new(config.clone());
    let cached = random.maybe(80, |random| random.maybe(30, |random| random.below(0..5)));
    if let Some(most) = cached {
        cache.enable_prefix_cache(most).unwrap();
        cache.set_constant_hash(hash);
    }
    let (tables, host) = (config.max_sequences(), config.host_blocks());
    let title = format!(
        "{num_blocks} blocks of {block_size} tokens, {tables} tables, {host} host blocks, prefix cache {cached:?}"
    );
    let mut history = History {
        random,
        cache,
        max_tokens: num_blocks.min(8) * block_size,
        rows: Vec::new(),
        plan: None,
        before: Vec::new(),
        last_step: 0,
        transfers: Vec::new(),
        entries: Vec::new(),
    };
    for _ in 0..if is_full { 14 } else { 100 } {
        history.act();
        history.cache.assert_consistent();
    }
    (Recording { title, entries: history.entries }, history.cache.stats())
}

impl History {
    fn act(&mut self) {
        match self.random.below(0..100) {
            0..10 => self.open(),
            10..18 => self.fork(),
            18..24 => self.truncate(),
            24..31 => self.release(),
            31..34 => self.forget(),
            34..46 => self.report_transfer(),
            46..47 => self.forget_device(),
            47..52 => self.measure(),
            52..55 if self.plan.is_some() => {
                self.plan = None;
                self.entries.push("drop the plan".into());
            }
            _ if self.plan.is_some() => self.commit(),
            _ => self.build(),
        }
    }

    fn log<T: std::fmt::Debug>(&mut self, what: String, outcome: &Result<T, CacheError>) {
        self.entries.push(match outcome {
            Ok(value) => format!("{what}: {value:?}"),
            Err(error) => format!("{what}: {error}"),
        });
    }

    fn tokens(&mut self, len: u32) -> Vec<u32> {
        let seed = self.random.below(0..2);
        (0..len).map(|place| place * 5 % 17 + 20 * seed).collect()
    }

    fn pick(&mut self) -> Option<usize> {
        let len = self.rows.len();
        (len > 0).then(|| self.random.index() % len)
    }

    /// A number of tokens that is now a few, now some blocks.
    fn some_tokens(&mut self) -> u32 {
        let block_size = self.cache.config().block_size();
        let most = if self.random.chance(50) { 4 } else { 3 * block_size + 2 };
        self.random.below(1..most)
    }

    fn open(&mut self) {
        let max_tokens = self.max_tokens;
        if self.random.chance(40) {
            let created = self.cache.create(max_tokens);
            self.log(format!("create for {max_tokens} tokens"), &created);
            self.rows.extend(created.map(|table| Row { table, tokens: Vec::new(), out: 0 }));
            return;
        }
        let len = self.some_tokens();
        let mut tokens = self.tokens(len);
        let created = self.cache.create_with_prefix(&Namespace::default(), &tokens, max_tokens);
        self.log(format!("create with what is found of {len} tokens"), &created);
        if let Ok((table, found)) = created {
            tokens.truncate(found as usize);
            self.rows.push(Row { table, tokens, out: 0 });
        }
    }

    fn fork(&mut self) {
        let Some(row) = self.pick() else { return };
        let Row { table, tokens, out } = self.rows[row].clone();
        let at = self.random.below(0..tokens.len() as u32 + 2);
        let forked = self.cache.fork(table, at, self.max_tokens);
        self.log(format!("fork {table:?} at {at}"), &forked);
        self.rows.extend(forked.map(|table| Row { table, tokens: tokens[..at as usize].to_vec(), out }));
    }

    fn truncate(&mut self) {
        let Some(row) = self.pick() else { return };
        let len = self.random.below(0..self.rows[row].tokens.len() as u32 + 2);
        let table = self.rows[row].table;
        let cut = self.cache.truncate(table, len);
        self.log(format!("cut {table:?} to {len}"), &cut);
        if cut.is_ok() {
            self.rows[row].tokens.truncate(len as usize);
        }
    }

    fn release(&mut self) {
        let Some(row) = self.pick() else { return };
        let table = self.rows[row].table;
        let released = self.cache.release(table);
        self.log(format!("release {table:?}"), &released);
        if released.is_ok() {
            self.rows.remove(row);
            let stale = self.cache.release(table);
            self.log(format!("release {table:?} again"), &stale);
        }
    }

    fn forget(&mut self) {
        let Some(row) = self.pick() else { return };
        let (table, first) = (self.rows[row].table, self.random.below(0..4));
        let forgotten = self.cache.forget_prefix(table, first);
        self.log(format!("forget {table:?} from block {first} on"), &forgotten);
    }

    fn report_transfer(&mut self) {
        if self.transfers.is_empty() {
            return;
        }
        let place = self.random.index() % self.transfers.len();
        let (step, complete) = (self.transfers.remove(place), !self.random.chance(15));
        self.cache.complete_transfers(step, complete);
        self.entries.push(format!("the {place}-th transfer under way ends: {complete}"));
        self.take_lengths();
    }

    fn forget_device(&mut self) {
        if self.plan.is_none() {
            self.cache.forget_device();
            self.transfers.clear();
            self.entries.push("lose the device".into());
            self.take_lengths();
        }
    }

    /// Blocks that were lost take their tokens with them.
    fn take_lengths(&mut self) {
        for row in &mut self.rows {
            let len = self.cache.len(row.table).unwrap();
            row.tokens.truncate(len as usize);
        }
    }

    fn measure(&mut self) {
        let mut entry = format!("{} blocks free", self.cache.free_blocks());
        for row in &self.rows {
            let blocks = self.cache.block_ids(row.table).unwrap();
            let blocks: Vec<u32> = blocks.iter().map(|block| block.index()).collect();
            let len = self.cache.len(row.table).unwrap();
            let _ = write!(entry, "\n  {:?}: {len} tokens in {blocks:?}", row.table);
            // Of what is in the host pool it says only what is new.
            if row.out == 0 {
                let needed = self.cache.blocks_needed(row.table, 3).unwrap();
                let _ = write!(entry, ", 3 more take {needed}");
            }
        }
        self.entries.push(entry);
        let tokens = self.tokens(40);
        let found = self.cache.find_prefix(&Namespace::default(), &tokens);
        self.entries.push(format!("{found} of 40 tokens found"));
    }

    /// Whether no other table holds a table's last block: what two hold alike leaves by no fixed rule.
    fn owns_its_end(&self, table: TableId) -> bool {
        let blocks = self.cache.block_ids(table).unwrap();
        blocks.last().is_some_and(|&block| self.cache.ref_count(block) == 1)
    }

    fn build(&mut self) {
        // A step that was dropped is undone by the next one.
        if !self.before.is_empty() {
            self.roll_back();
        }
        self.before = self.rows.clone();
        let mut entry = "build".to_string();
        let leaving: Vec<bool> = self.rows.iter().map(|row| self.owns_its_end(row.table)).collect();
        let mut rows = std::mem::take(&mut self.rows);
        let pushes: Vec<(u32, u32, Vec<u32>)> = (0..rows.len())
            .map(|_| {
                let len = self.some_tokens();
                (self.random.below(0..10), self.random.below(0..3), self.tokens(len))
            })
            .collect();
        let padding = self.random.maybe(20, |random| random.below(0..12));
        let mut step = StepBuilder::new(&mut self.cache);
        for ((row, leaves), (choice, logits, tokens)) in rows.iter_mut().zip(leaving).zip(pushes) {
            let table = row.table;
            match choice {
                0 | 1 if row.out == 0 && leaves => {
                    let moved = step.swap_out(table);
                    let _ = write!(entry, "\n  swap out {table:?}: {}", told(&moved));
                    row.out = moved.unwrap_or(0);
                }
                _ if row.out > 0 && step.cache().free_blocks() > row.out + 2 => {
                    let moved = step.swap_in(table);
                    let _ = write!(entry, "\n  swap in {table:?}: {}", told(&moved));
                    row.out = if moved.is_ok() { 0 } else { row.out };
                }
                2..9 => {
                    let pushed = step.push(table, &tokens);
                    let _ = write!(entry, "\n  push {} to {table:?}: {}", tokens.len(), told(&pushed));
                    let Ok(range) = pushed else { continue };
                    row.tokens.extend(tokens);
                    let id = RequestId::from_raw(u64::from(table.row())).sample(logits);
                    let asked = step.request_logits(id, range.end - 1, logits);
                    let _ =
                        write!(entry, "\n  ask for {logits} rows from {}: {}", range.end - 1, told(&asked));
                }
                _ => {}
            }
        }
        if let Some(rows) = padding {
            step.pad_to(rows).unwrap();
        }
        let plan = step.finish();
        self.rows = rows;
        if !plan.swap_outs().is_empty() || !plan.swap_ins().is_empty() {
            self.transfers.push(plan.step());
        }
        let _ = write!(entry, "\n{}", text::plan(&plan, self.last_step));
        self.last_step = plan.step().raw();
        self.entries.push(entry);
        self.plan = Some(plan);
    }

    /// Takes the rows back to what they were, as far as they still are, and to what is left of them.
    fn roll_back(&mut self) {
        // The next step begins by undoing the last one: begin it here, so that what is left can be asked for.
        let step = StepBuilder::new(&mut self.cache).finish();
        self.last_step = step.step().raw();
        for row in &mut self.rows {
            if let Some(before) = self.before.iter().find(|before| before.table == row.table) {
                row.out = before.out.max(row.out);
                row.tokens = before.tokens.clone();
            }
        }
        self.before.clear();
        self.take_lengths();
    }

    fn commit(&mut self) {
        let Some(plan) = self.plan.take() else { return };
        let step = plan.step();
        let committed = self.cache.commit_step(plan);
        match committed {
            Ok(()) => self.entries.push(format!("commit {}", step.raw())),
            Err(error) => self.entries.push(format!("commit: {error}")),
        }
        self.before.clear();
        for row in 0..self.rows.len() {
            if self.random.chance(60) {
                let Row { table, tokens, .. } = self.rows[row].clone();
                let registered = self.cache.register_prefix(table, &Namespace::default(), &tokens);
                self.log(format!("register {} tokens of {table:?}", tokens.len()), &registered);
            }
        }
    }
}

fn told<T: std::fmt::Debug>(outcome: &Result<T, CacheError>) -> String {
    match outcome {
        Ok(value) => format!("{value:?}"),
        Err(error) => error.to_string(),
    }
}
