//! A device that keeps, instead of keys and values, the token at each slot and a hash of everything before it.
//!
//! It does what a real one does with a plan and nothing else: table changes, block copies, writes through the slot
//! mapping, then reads through its own mirror of the block tables, stack by stack. A slot knows its stack, its position and
//! its whole history, and every key that a row sees is compared with what the sequence's tokens say: so one wrong block,
//! slot, copy or table entry is seen, and so is a block that was given back too early. What no row sees is not looked at.

use paged_kv::{
    BlockState, CacheConfig, KvCache, PADDING_SLOT, Reach, SequenceId, StepId, StepPlan, TableId,
    TransferReport,
};
use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::ops::Range;

/// A sequence of a plan, as the world knows it.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    /// Its namespace.
    pub(crate) salt: u64,
    /// Its tokens before the first row of the step.
    pub(crate) before: Vec<u32>,
}

/// What a device does for a [`World`](crate::model::World).
pub(crate) trait Device: Debug {
    /// What a row has seen.
    type Seen: Debug;

    /// A device for a cache of this configuration.
    fn new(config: &CacheConfig) -> Self;

    /// Runs a step, of whose sequences this is known. Returns what each row has seen.
    fn run(&mut self, plan: &StepPlan, known: &[Known]) -> Vec<Self::Seen>;

    /// Panics unless a row saw exactly `tokens`.
    fn check_seen(&mut self, seen: &Self::Seen, salt: u64, tokens: &[u32], sequence: SequenceId);

    /// What some rows of a step wrote was wrong.
    fn spoil(&mut self, plan: &StepPlan, rows: Range<usize>);

    /// No step is outstanding: what lies in blocks that are free must not be read.
    fn spoil_free(&mut self, _cache: &KvCache) {}

    /// Steps whose transfers are under way.
    fn num_transfers(&self) -> usize;

    /// The `index`-th transfer under way ends: its blocks arrive, where no later step has claimed their place.
    fn complete(&mut self, index: usize) -> Option<TransferReport>;

    /// The `index`-th transfer under way fails.
    fn lose(&mut self, index: usize) -> Option<TransferReport> {
        Some(TransferReport { complete: false, ..self.complete(index)? })
    }

    /// Another device takes its place: blocks and block tables are gone, what had arrived in the host pool is kept.
    /// Returns the steps whose transfers were under way, which fail.
    fn replace(&mut self) -> Vec<TransferReport>;

    /// Of everything that it was told to do, if it keeps that.
    fn digest(&self) -> u64 {
        EMPTY
    }
}

/// Hash of a sequence without tokens.
pub(crate) const EMPTY: u64 = 0x9e37_79b9_7f4a_7c15;

/// Hash of a history that goes on with `token`.
pub(crate) fn then(history: u64, token: u32) -> u64 {
    let mut hash = (history ^ u64::from(token).wrapping_add(1)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash ^= hash >> 29;
    hash = hash.wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 32)
}

/// Hash of all of `tokens`.
pub(crate) fn history(tokens: &[u32]) -> u64 {
    tokens.iter().fold(EMPTY, |hash, &token| then(hash, token))
}

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    stack: usize,
    position: u32,
    token: u32,
    /// Hash of all tokens up to this one.
    history: u64,
}

/// Nothing that may be read.
const SPOILT: Slot = Slot { stack: usize::MAX, position: u32::MAX, token: u32::MAX, history: 0 };

/// Layers that share blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stack {
    pub(crate) reach: Reach,
    pub(crate) block_size: u32,
}

/// The stacks of a configuration, in their order.
pub(crate) fn stacks_of(config: &CacheConfig) -> Vec<Stack> {
    let mut groups: Vec<_> = config.groups().iter().collect();
    groups.sort_by_key(|group| group.first_stack());
    let stacks = groups.into_iter().flat_map(|group| {
        let stack = Stack { reach: group.reach(), block_size: group.layout().block_size() };
        std::iter::repeat_n(stack, group.num_stacks() as usize)
    });
    stacks.collect()
}

/// Slots and block tables, as the plans that ran have left them.
#[derive(Debug)]
pub(crate) struct SimulatedDevice {
    config: CacheConfig,
    stacks: Vec<Stack>,
    /// Slots of a block of the stack with the largest ones.
    block_slots: usize,
    /// Of each stack, by table.
    tables: Vec<Vec<Vec<u32>>>,
    slots: Vec<Slot>,
    host: Vec<Vec<Slot>>,
    /// The step that last claimed each host slot.
    claims: Vec<StepId>,
    transfers: Vec<Transfer>,
    digest: u64,
}

/// A step's blocks on their way.
#[derive(Debug)]
struct Transfer {
    step: StepId,
    outs: Vec<(u32, Vec<Slot>)>,
}

impl SimulatedDevice {
    pub(crate) fn new(config: &CacheConfig) -> Self {
        let stacks = stacks_of(config);
        let block_slots = stacks.iter().map(|stack| stack.block_size).max().unwrap() as usize;
        let table =
            |stack: &Stack| vec![u32::MAX; config.max_sequence_tokens().div_ceil(stack.block_size) as usize];
        Self {
            tables: stacks.iter().map(|stack| vec![table(stack); config.max_sequences() as usize]).collect(),
            stacks,
            block_slots,
            slots: vec![SPOILT; config.num_blocks() as usize * block_slots],
            host: vec![Vec::new(); config.host_blocks() as usize],
            claims: vec![StepId::default(); config.host_blocks() as usize],
            transfers: Vec::new(),
            digest: EMPTY,
            config: config.clone(),
        }
    }

    /// Runs a step of one stack that sees everything, believing of what was before it what its slots say. Returns, for each
    /// row, the hash of what it sees.
    pub(crate) fn run(&mut self, plan: &StepPlan) -> Vec<u64> {
        assert!(
            self.stacks.len() == 1 && self.stacks[0].reach.is_all(),
            "what is before a row is not all there"
        );
        self.begin(plan);
        let before = |sequence: usize| {
            let table = plan.table_rows()[sequence] as usize;
            let first = plan.positions()[plan.query_starts()[sequence] as usize];
            (0..first).map(|position| self.slot(0, table, position).token).collect()
        };
        let known: Vec<Known> = (0..plan.num_sequences() as usize)
            .map(|sequence| Known { salt: 0, before: before(sequence) })
            .collect();
        self.compute(plan, &known)
    }

    /// Runs a step of whose sequences this is known.
    pub(crate) fn run_known(&mut self, plan: &StepPlan, known: &[Known]) -> Vec<u64> {
        self.begin(plan);
        self.compute(plan, known)
    }

    /// Everything that comes before rows are written.
    fn begin(&mut self, plan: &StepPlan) {
        check_plan(plan, &self.config);
        self.note(plan);
        assert_eq!(plan.stacks().len(), self.stacks.len(), "stacks of the plan");
        for (tables, stack) in self.tables.iter_mut().zip(plan.stacks()) {
            for change in stack.table_changes() {
                let entries = &stack.changed_entries()[change.start as usize..][..change.len as usize];
                let table = &mut tables[change.table_row as usize];
                table[change.first_entry as usize..][..change.len as usize].copy_from_slice(entries);
            }
        }
        self.swap(plan);
        for copy in plan.block_copies() {
            let (source, start) = (self.block(copy.source), self.block(copy.destination).start);
            self.slots.copy_within(source, start);
        }
    }

    fn compute(&mut self, plan: &StepPlan, known: &[Known]) -> Vec<u64> {
        assert_eq!(known.len() as u32, plan.num_sequences(), "sequences of the plan");
        let histories: Vec<Vec<u64>> = known
            .iter()
            .enumerate()
            .map(|(sequence, known)| histories(plan, sequence, &known.before))
            .collect();
        for (sequence, histories) in histories.iter().enumerate() {
            self.write(plan, sequence, histories);
        }
        let read = |(sequence, histories): (usize, &Vec<u64>)| self.read(plan, sequence, histories);
        histories.iter().enumerate().flat_map(read).collect()
    }

    fn note(&mut self, plan: &StepPlan) {
        let swaps =
            plan.swap_outs().iter().chain(plan.swap_ins()).flat_map(|swap| [swap.block, swap.host_slot]);
        let copies = plan.block_copies().iter().flat_map(|copy| [copy.source, copy.destination]);
        let slots = plan.stacks().iter().flat_map(|stack| stack.slot_mapping()).copied();
        let rows = plan.token_ids().iter().copied().chain(slots);
        self.digest = swaps.chain(copies).chain(rows).fold(self.digest, then);
    }

    fn block(&self, block: u32) -> Range<usize> {
        block as usize * self.block_slots..(block as usize + 1) * self.block_slots
    }

    /// Blocks leave, then blocks return. What leaves arrives only when [`complete`](Self::complete) says so.
    fn swap(&mut self, plan: &StepPlan) {
        if plan.swap_outs().is_empty() && plan.swap_ins().is_empty() {
            return;
        }
        let outs: Vec<(u32, Vec<Slot>)> = plan
            .swap_outs()
            .iter()
            .map(|swap| (swap.host_slot, self.slots[self.block(swap.block)].to_vec()))
            .collect();
        for &(slot, _) in &outs {
            self.claims[slot as usize] = plan.step();
            self.host[slot as usize] = Vec::new();
        }
        for swap in plan.swap_ins() {
            let block = self.block(swap.block);
            let content = &self.host[swap.host_slot as usize];
            assert!(!content.is_empty(), "I5: host slot {} is read before it has arrived", swap.host_slot);
            self.slots[block].copy_from_slice(content);
        }
        self.transfers.push(Transfer { step: plan.step(), outs });
    }

    /// Steps whose transfers are under way.
    pub(crate) fn num_transfers(&self) -> usize {
        self.transfers.len()
    }

    /// The `index`-th transfer under way ends: its blocks arrive, where no later step has claimed their place.
    pub(crate) fn complete(&mut self, index: usize) -> Option<TransferReport> {
        let index = index.checked_rem(self.transfers.len())?;
        let Transfer { step, outs } = self.transfers.remove(index);
        for (slot, content) in outs {
            if self.claims[slot as usize] == step {
                self.host[slot as usize] = content;
            }
        }
        Some(TransferReport { step, complete: true })
    }

    /// Another device takes its place: what had arrived in the host pool is all that is left.
    pub(crate) fn replace(&mut self) -> Vec<TransferReport> {
        self.tables.iter_mut().flatten().for_each(|table| table.fill(u32::MAX));
        self.slots.fill(SPOILT);
        let lost = self.transfers.drain(..);
        lost.map(|transfer| TransferReport { step: transfer.step, complete: false }).collect()
    }

    fn write(&mut self, plan: &StepPlan, sequence: usize, histories: &[u64]) {
        let rows = plan.query_starts()[sequence] as usize..plan.query_starts()[sequence + 1] as usize;
        let table = plan.table_rows()[sequence] as usize;
        let first = plan.positions()[rows.start];
        assert_eq!(first + rows.len() as u32, plan.context_lens()[sequence], "the last row sees itself");
        for (row, position) in rows.zip(first..) {
            assert_eq!(plan.positions()[row], position, "positions of a sequence are consecutive");
            for (stack, of_stack) in plan.stacks().iter().enumerate() {
                let Stack { block_size, .. } = self.stacks[stack];
                let slot = of_stack.slot_mapping()[row];
                let entry = self.tables[stack][table][(position / block_size) as usize];
                assert_eq!(
                    slot,
                    entry * block_size + position % block_size,
                    "slot of position {position} in stack {stack}"
                );
                let at = self.block(entry).start + (position % block_size) as usize;
                let (token, history) = (plan.token_ids()[row], histories[position as usize]);
                self.slots[at] = Slot { stack, position, token, history };
            }
        }
    }

    /// Reads every key that the sequence's rows see, in each stack.
    fn read(&self, plan: &StepPlan, sequence: usize, histories: &[u64]) -> Vec<u64> {
        let context = plan.context_lens()[sequence];
        let first = context - (plan.query_starts()[sequence + 1] - plan.query_starts()[sequence]);
        let table = plan.table_rows()[sequence] as usize;
        for (stack, Stack { reach, .. }) in self.stacks.iter().enumerate() {
            // The ends of ranges never go back, so what earlier rows have read is not read again.
            let mut read = [0; 2];
            for position in first..context {
                for (range, read) in reach.visible(position).into_iter().zip(&mut read) {
                    for key in range.start.max(*read)..range.end {
                        let slot = self.slot(stack, table, key);
                        let expected = (stack, key, histories[key as usize]);
                        assert_eq!(
                            (slot.stack, slot.position, slot.history),
                            expected,
                            "position {key} of table {table} holds another sequence's token in stack {stack}, seen by the row at \
                             {position}"
                        );
                    }
                    *read = range.end.max(*read);
                }
            }
        }
        histories[first as usize..].to_vec()
    }

    /// Hash of the first `len` tokens of a table, read through the device's own mirror of it.
    pub(crate) fn history_of(&self, table: TableId, len: u32) -> u64 {
        let row = table.row() as usize;
        let hash = (0..len).fold(EMPTY, |hash, position| then(hash, self.slot(0, row, position).token));
        assert!(
            len == 0 || hash == self.slot(0, row, len - 1).history,
            "{table:?} holds tokens of another sequence"
        );
        hash
    }

    fn slot(&self, stack: usize, table: usize, position: u32) -> Slot {
        let block_size = self.stacks[stack].block_size;
        let block = self.tables[stack][table][(position / block_size) as usize];
        assert!(
            block < self.config.num_blocks(),
            "position {position} of table {table} has no block in stack {stack}"
        );
        self.slots[self.block(block).start + (position % block_size) as usize]
    }
}

/// The hash of each token's history, those of the step's rows included.
fn histories(plan: &StepPlan, sequence: usize, before: &[u32]) -> Vec<u64> {
    let rows = plan.query_starts()[sequence] as usize..plan.query_starts()[sequence + 1] as usize;
    let first = plan.positions()[rows.start];
    assert_eq!(before.len() as u32, first, "tokens before the first row");
    let tokens = before.iter().chain(&plan.token_ids()[rows]);
    let mut hash = EMPTY;
    tokens
        .map(|&token| {
            hash = then(hash, token);
            hash
        })
        .collect()
}

impl Device for SimulatedDevice {
    type Seen = u64;

    fn new(config: &CacheConfig) -> Self {
        Self::new(config)
    }

    fn run(&mut self, plan: &StepPlan, known: &[Known]) -> Vec<u64> {
        self.run_known(plan, known)
    }

    fn check_seen(&mut self, seen: &u64, _: u64, tokens: &[u32], sequence: SequenceId) {
        assert_eq!(*seen, history(tokens), "what {sequence:?} sees");
    }

    fn spoil(&mut self, plan: &StepPlan, rows: Range<usize>) {
        for (stack, Stack { block_size, .. }) in plan.stacks().iter().zip(self.stacks.clone()) {
            for &slot in &stack.slot_mapping()[rows.clone()] {
                let start = self.block(slot / block_size).start;
                self.slots[start + (slot % block_size) as usize] = SPOILT;
            }
        }
    }

    fn spoil_free(&mut self, cache: &KvCache) {
        for (block, state) in cache.block_states() {
            if state == BlockState::Free {
                let block = self.block(block.index());
                self.slots[block].fill(SPOILT);
            }
        }
    }

    fn num_transfers(&self) -> usize {
        self.num_transfers()
    }

    fn complete(&mut self, index: usize) -> Option<TransferReport> {
        self.complete(index)
    }

    fn replace(&mut self) -> Vec<TransferReport> {
        self.replace()
    }

    fn digest(&self) -> u64 {
        self.digest
    }
}

/// What must hold for any plan, whoever made it (I5, I11).
pub(crate) fn check_plan(plan: &StepPlan, config: &CacheConfig) {
    assert!(plan.num_rows() > 0, "a step without rows");
    let mut begun = HashSet::new();
    let mut stack_of = HashMap::new();
    for ((number, of_stack), Stack { block_size, .. }) in
        plan.stacks().iter().enumerate().zip(stacks_of(config))
    {
        let mut slots = HashSet::new();
        for (&slot, &position) in of_stack.slot_mapping().iter().zip(plan.positions()) {
            if slot == PADDING_SLOT {
                continue;
            }
            assert!(slot < config.num_blocks() * block_size, "I11: slot {slot} is beyond the pool");
            assert!(slots.insert(slot), "I11: slot {slot} is written twice");
            let block = slot / block_size;
            let stack = *stack_of.entry(block).or_insert(number);
            assert_eq!(stack, number, "I11: block {block} is written by two stacks");
            if position.is_multiple_of(block_size) {
                begun.insert(block);
            }
        }
    }
    let mut moved = HashSet::new();
    assert!(plan.swap_outs().iter().all(|swap| moved.insert(swap.block)), "a block leaves twice");
    let mut moved = HashSet::new();
    assert!(plan.swap_ins().iter().all(|swap| moved.insert(swap.block)), "a block returns twice");
    let mut slots = HashSet::new();
    let mut swaps = plan.swap_outs().iter().chain(plan.swap_ins());
    assert!(swaps.all(|swap| slots.insert(swap.host_slot)), "a host slot is in two swaps of one step");
    let sources: HashSet<u32> = plan.block_copies().iter().map(|copy| copy.source).collect();
    let mut destinations = HashSet::new();
    for copy in plan.block_copies() {
        assert!(destinations.insert(copy.destination), "I5: {copy:?} has a destination of another copy");
        assert!(!sources.contains(&copy.destination), "I5: {copy:?} writes a source");
        assert!(!begun.contains(&copy.source), "I5: {copy:?} reads a block that this step gave away");
        assert!(!begun.contains(&copy.destination), "I5: {copy:?} fills a block that begins empty");
    }
    let tables: HashSet<u32> = plan.table_rows().iter().copied().collect();
    assert_eq!(tables.len(), plan.table_rows().len(), "a table has rows in two places");
}
