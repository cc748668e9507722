//! A device that keeps, instead of keys and values, the token at each slot and a hash of everything before it.
//!
//! It does what a real one does with a plan and nothing else: table changes, block copies, writes through the slot
//! mapping, then reads through its own mirror of the block tables. Since a slot's hash covers its whole history, one
//! wrong block, slot, copy or table entry changes what some row reads.

use paged_kv::{CacheConfig, PADDING_SLOT, SequenceId, StepId, StepPlan, TableId, TransferReport};
use std::collections::HashSet;
use std::fmt::Debug;

/// What a device does for a [`World`](crate::model::World).
pub(crate) trait Device: Debug {
    /// What a row has seen.
    type Seen: Debug;

    /// A device for a cache of this configuration.
    fn new(config: &CacheConfig) -> Self;

    /// Runs a step, whose sequences belong to the namespaces `salts`. Returns what each row has seen.
    fn run(&mut self, plan: &StepPlan, salts: &[u64]) -> Vec<Self::Seen>;

    /// Panics unless a row saw exactly `tokens`.
    fn check_seen(&mut self, seen: &Self::Seen, salt: u64, tokens: &[u32], sequence: SequenceId);

    /// Whatever was written to these slots was wrong.
    fn spoil(&mut self, slots: &[u32]);

    /// Steps whose transfers are under way.
    fn num_transfers(&self) -> usize;

    /// The `index`-th transfer under way ends: its blocks arrive, where nobody else has claimed their place since.
    fn complete(&mut self, index: usize) -> Option<TransferReport>;

    /// The `index`-th transfer under way fails.
    fn lose(&mut self, index: usize) -> Option<TransferReport> {
        Some(TransferReport { complete: false, ..self.complete(index)? })
    }

    /// Another device takes its place: blocks and block tables are gone, what had arrived in the host pool is kept.
    /// Returns the steps whose transfers were under way, which fail.
    fn replace(&mut self) -> Vec<TransferReport>;
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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Slot {
    history: u64,
    token: u32,
}

/// Slots and block tables, as the plans that ran have left them.
#[derive(Debug)]
pub(crate) struct SimulatedDevice {
    block_size: u32,
    num_blocks: u32,
    tables: Vec<Vec<u32>>,
    slots: Vec<Slot>,
    host: Vec<Vec<Slot>>,
    /// Who has claimed a host slot last, and the blocks on their way there.
    claims: Vec<StepId>,
    transfers: Vec<Transfer>,
}

/// A step's blocks on their way.
#[derive(Debug)]
struct Transfer {
    step: StepId,
    outs: Vec<(u32, Vec<Slot>)>,
}

impl SimulatedDevice {
    pub(crate) fn new(config: &CacheConfig) -> Self {
        let slots = config.num_blocks() as usize * config.block_size() as usize;
        Self {
            block_size: config.block_size(),
            num_blocks: config.num_blocks(),
            tables: vec![vec![u32::MAX; config.table_entries() as usize]; config.max_sequences() as usize],
            slots: vec![Slot::default(); slots],
            host: vec![Vec::new(); config.host_blocks() as usize],
            claims: vec![StepId::default(); config.host_blocks() as usize],
            transfers: Vec::new(),
        }
    }

    /// Runs a step. Returns, for each row, the hash of what it sees.
    pub(crate) fn run(&mut self, plan: &StepPlan) -> Vec<u64> {
        check_plan(plan, self.block_size, self.num_blocks);
        for change in plan.table_changes() {
            let entries = &plan.changed_entries()[change.start as usize..][..change.len as usize];
            let table = &mut self.tables[change.table_row as usize];
            table[change.first_entry as usize..][..change.len as usize].copy_from_slice(entries);
        }
        self.swap(plan);
        let block =
            |id: u32| id as usize * self.block_size as usize..(id as usize + 1) * self.block_size as usize;
        for copy in plan.block_copies() {
            let start = block(copy.destination).start;
            self.slots.copy_within(block(copy.source), start);
        }
        for sequence in 0..plan.num_sequences() as usize {
            self.write(plan, sequence);
        }
        (0..plan.num_sequences() as usize).flat_map(|sequence| self.read(plan, sequence)).collect()
    }

    /// Blocks leave, then blocks return. What leaves arrives only when [`complete`](Self::complete) says so.
    fn swap(&mut self, plan: &StepPlan) {
        if plan.swap_outs().is_empty() && plan.swap_ins().is_empty() {
            return;
        }
        let size = self.block_size as usize;
        let outs: Vec<(u32, Vec<Slot>)> = plan
            .swap_outs()
            .iter()
            .map(|swap| (swap.host_slot, self.slots[swap.block as usize * size..][..size].to_vec()))
            .collect();
        for &(slot, _) in &outs {
            self.claims[slot as usize] = plan.step();
            self.host[slot as usize] = Vec::new();
        }
        for swap in plan.swap_ins() {
            let content = &self.host[swap.host_slot as usize];
            assert_eq!(content.len(), size, "I5: host slot {} is read before it has arrived", swap.host_slot);
            self.slots[swap.block as usize * size..][..size].copy_from_slice(content);
        }
        self.transfers.push(Transfer { step: plan.step(), outs });
    }

    /// Steps whose transfers are under way.
    pub(crate) fn num_transfers(&self) -> usize {
        self.transfers.len()
    }

    /// The `index`-th transfer under way ends: its blocks arrive, where nobody else has claimed their place since.
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
        self.tables.iter_mut().for_each(|table| table.fill(u32::MAX));
        self.slots.fill(Slot { history: 0, token: u32::MAX });
        let lost = self.transfers.drain(..);
        lost.map(|transfer| TransferReport { step: transfer.step, complete: false }).collect()
    }

    fn write(&mut self, plan: &StepPlan, sequence: usize) {
        let rows = plan.query_starts()[sequence] as usize..plan.query_starts()[sequence + 1] as usize;
        let table = plan.table_rows()[sequence] as usize;
        let first = plan.positions()[rows.start];
        assert_eq!(first + rows.len() as u32, plan.context_lens()[sequence], "the last row sees itself");
        let mut hash = if first == 0 { EMPTY } else { self.slot(table, first - 1).history };
        for (row, position) in rows.zip(first..) {
            assert_eq!(plan.positions()[row], position, "positions of a sequence are consecutive");
            let slot = plan.slot_mapping()[row];
            let entry = self.tables[table][(position / self.block_size) as usize];
            assert_eq!(
                slot,
                entry * self.block_size + position % self.block_size,
                "slot of position {position}"
            );
            let token = plan.token_ids()[row];
            hash = then(hash, token);
            self.slots[slot as usize] = Slot { history: hash, token };
        }
    }

    /// Reads every key that the sequence's rows see.
    fn read(&self, plan: &StepPlan, sequence: usize) -> Vec<u64> {
        let rows = plan.query_starts()[sequence + 1] - plan.query_starts()[sequence];
        let table = plan.table_rows()[sequence] as usize;
        let context = plan.context_lens()[sequence];
        let mut hash = EMPTY;
        let mut seen = Vec::new();
        for position in 0..context {
            let slot = self.slot(table, position);
            hash = then(hash, slot.token);
            assert_eq!(
                hash, slot.history,
                "position {position} of table {table} holds another sequence's token"
            );
            if position >= context - rows {
                seen.push(hash);
            }
        }
        seen
    }

    /// Hash of the first `len` tokens of a table, read through the device's own mirror of it.
    pub(crate) fn history_of(&self, table: TableId, len: u32) -> u64 {
        let row = table.row() as usize;
        let hash = (0..len).fold(EMPTY, |hash, position| then(hash, self.slot(row, position).token));
        assert!(
            len == 0 || hash == self.slot(row, len - 1).history,
            "{table:?} holds tokens of another sequence"
        );
        hash
    }

    fn slot(&self, table: usize, position: u32) -> Slot {
        let block = self.tables[table][(position / self.block_size) as usize];
        assert!(block < self.num_blocks, "position {position} of table {table} has no block");
        self.slots[(block * self.block_size + position % self.block_size) as usize]
    }
}

impl Device for SimulatedDevice {
    type Seen = u64;

    fn new(config: &CacheConfig) -> Self {
        Self::new(config)
    }

    fn run(&mut self, plan: &StepPlan, _: &[u64]) -> Vec<u64> {
        self.run(plan)
    }

    fn check_seen(&mut self, seen: &u64, _: u64, tokens: &[u32], sequence: SequenceId) {
        assert_eq!(*seen, history(tokens), "what {sequence:?} sees");
    }

    fn spoil(&mut self, slots: &[u32]) {
        for &slot in slots {
            self.slots[slot as usize] = Slot { history: 0, token: u32::MAX };
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
}

/// What must hold for any plan, whoever made it (I5, I11).
pub(crate) fn check_plan(plan: &StepPlan, block_size: u32, num_blocks: u32) {
    assert!(plan.num_rows() > 0, "a step without rows");
    let mut slots = HashSet::new();
    let mut begun = HashSet::new();
    for (&slot, &position) in plan.slot_mapping().iter().zip(plan.positions()) {
        if slot == PADDING_SLOT {
            continue;
        }
        assert!(slot < num_blocks * block_size, "I11: slot {slot} is beyond the pool");
        assert!(slots.insert(slot), "I11: slot {slot} is written twice");
        if position.is_multiple_of(block_size) {
            begun.insert(slot / block_size);
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
