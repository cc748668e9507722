//! Checks a plan before any shader sees it: the shaders are compiled without bounds checks and trust every number.

use crate::config::CacheConfig;
use crate::error::{PlanFault, PrepareError};
use crate::ids::PADDING_SLOT;
use crate::reach::Reach;
use crate::schedule::{StackPlan, StepPlan, TableChange};
use std::ops::Range;

/// Entries of a table that the device has: those from the beginning on, and, where rows do not see everything, those from
/// some other entry on. A table's blocks lie in one run or in two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Known {
    first: u32,
    rest: Range<u32>,
}

impl Known {
    /// Adds the entries of a change. Where it begins behind what is known, it begins a run of its own.
    fn add(&mut self, entries: Range<u32>) {
        if entries.start <= self.first {
            self.first = self.first.max(entries.end);
        } else if self.rest.contains(&entries.start) || entries.start == self.rest.end {
            self.rest.end = self.rest.end.max(entries.end);
        } else {
            self.rest = entries;
        }
        if self.rest.start <= self.first {
            self.first = self.first.max(self.rest.end);
            self.rest = 0..0;
        }
    }

    /// Whether it has all of `entries`.
    fn has(&self, entries: &Range<u32>) -> bool {
        entries.is_empty()
            || entries.end <= self.first
            || (self.rest.start <= entries.start && entries.end <= self.rest.end)
    }
}

/// The numbers that a plan must stay within, and what the device has been told so far.
#[derive(Debug)]
pub(super) struct PlanChecker {
    fingerprint: u64,
    num_blocks: u32,
    host_blocks: u32,
    max_sequences: u32,
    max_sequence_tokens: u32,
    stacks: Vec<StackChecker>,
    /// The cache whose blocks are on the device: the one that was bound, or that of the first plan.
    cache_instance: Option<u64>,
    last_step: u64,
    /// Whether a plan was prepared on this device, and devices that the last one's cache had forgotten.
    has_accepted: bool,
    forgotten_devices: u64,
    /// Devices that a plan's cache must have forgotten, so that it reads nothing that lay on one before this.
    needed_forgotten: u64,
    /// Sorted slots, then sorted destinations of copies, then sorted blocks and host slots.
    sorted: Vec<u32>,
}

/// The numbers of one stack of layers.
#[derive(Debug)]
struct StackChecker {
    block_size: u32,
    num_slots: u32,
    table_entries: u32,
    /// The keys that rows see.
    reach: Reach,
    /// Entries of each table that recorded steps have written to the device.
    known_entries: Vec<Known>,
    /// `known_entries` as the plan at hand will leave it.
    planned_entries: Vec<Known>,
}

impl StackChecker {
    /// Looks at the changes of a plan's tables: their runs lie within the tables, and name every entry once.
    fn check_tables(&mut self, plan: &StackPlan, max_sequences: u32, forgets: bool) -> Result<(), PlanFault> {
        match forgets {
            // The tables are sent in full.
            true => self.planned_entries.fill(Known::default()),
            false => self.planned_entries.clone_from_slice(&self.known_entries),
        }
        let mut next_start = 0u64;
        for &TableChange { table_row, first_entry, start, len } in plan.table_changes() {
            check_table_row(table_row, max_sequences)?;
            let known = &mut self.planned_entries[table_row as usize];
            let out_of_range = |entries| PlanFault::TableRange { table_row, first_entry, len, entries };
            if self.reach.is_all() && first_entry > known.first {
                return Err(out_of_range(known.first));
            }
            let end = u64::from(first_entry) + u64::from(len);
            if end > u64::from(self.table_entries) {
                return Err(out_of_range(self.table_entries));
            }
            known.add(first_entry..end as u32);
            check_length("changed_entries", u64::from(start), next_start)?;
            next_start += u64::from(len);
        }
        check_length("changed_entries", plan.changed_entries().len() as u64, next_start)
    }

    /// Whether the device will know what the rows of a sequence read.
    fn check_known(&self, sequence: u32, table_row: u32, rows: u32, context: u32) -> Result<(), PlanFault> {
        // What the first of them sees is the most that any of them needs of the beginning.
        let [first, rest] = self.reach.kept(context - rows, self.block_size);
        let known = &self.planned_entries[table_row as usize];
        let needed = context.div_ceil(self.block_size);
        if !known.has(&first) || !known.has(&(rest.start..needed)) {
            let known = known.first.max(known.rest.end);
            return Err(PlanFault::EntriesUnknown { sequence, needed, known });
        }
        Ok(())
    }
}

fn check_table_row(table_row: u32, max_sequences: u32) -> Result<(), PlanFault> {
    if table_row >= max_sequences {
        return Err(PlanFault::TableRow { table_row, max_sequences });
    }
    Ok(())
}

fn check_length(array: &'static str, actual: u64, expected: u64) -> Result<(), PlanFault> {
    if actual != expected {
        return Err(PlanFault::Length { array, actual, expected });
    }
    Ok(())
}

impl PlanChecker {
    pub(super) fn new(cache: &CacheConfig) -> Self {
        let stacks = cache.stacks().into_iter().zip(cache.stack_entries());
        let stacks = stacks.map(|(stack, table_entries)| StackChecker {
            block_size: stack.block_size,
            // A cache has fewer than 2^32 - 1 slots.
            num_slots: cache.num_blocks() * stack.block_size,
            table_entries,
            reach: stack.reach,
            known_entries: vec![Known::default(); cache.max_sequences() as usize],
            planned_entries: vec![Known::default(); cache.max_sequences() as usize],
        });
        Self {
            fingerprint: cache.fingerprint(),
            num_blocks: cache.num_blocks(),
            host_blocks: cache.host_blocks(),
            max_sequences: cache.max_sequences(),
            max_sequence_tokens: cache.max_sequence_tokens(),
            stacks: stacks.collect(),
            cache_instance: None,
            last_step: 0,
            has_accepted: false,
            forgotten_devices: 0,
            needed_forgotten: 0,
            sorted: Vec::new(),
        }
    }

    /// Checks every number of `plan`, whose origin was checked.
    pub(super) fn check(&mut self, plan: &StepPlan) -> Result<(), PlanFault> {
        check_lengths(plan, self.stacks.len())?;
        self.check_tables(plan)?;
        self.check_sequences(plan)?;
        self.check_slots(plan)?;
        self.check_copies(plan)?;
        self.check_swaps(plan)
    }

    /// Takes note that `plan`, which was checked, is prepared: later ones must be newer and of the same cache.
    pub(super) fn accept(&mut self, plan: &StepPlan) {
        self.cache_instance = Some(plan.cache_instance());
        self.last_step = plan.step().raw();
        self.has_accepted = true;
        if plan.forgotten_devices() > self.forgotten_devices {
            self.stacks.iter_mut().for_each(|stack| stack.known_entries.fill(Known::default()));
        }
        self.forgotten_devices = plan.forgotten_devices();
    }

    /// Ties the object to the cache with this number.
    pub(super) fn bind(&mut self, cache_instance: u64) {
        self.cache_instance = Some(cache_instance);
    }

    /// The cache that the object is tied to.
    pub(super) fn cache_instance(&self) -> Option<u64> {
        self.cache_instance
    }

    /// Takes the place of `old`, whose device is gone: the cache stays the same, and must have forgotten that device.
    pub(super) fn succeed(&mut self, old: &Self) {
        self.cache_instance = old.cache_instance;
        self.last_step = old.last_step;
        let forgotten = if old.has_accepted { old.forgotten_devices + 1 } else { 0 };
        self.needed_forgotten = old.needed_forgotten.max(forgotten);
    }

    /// Whether a plan has been prepared, so that the pool may hold something.
    pub(super) fn has_accepted(&self) -> bool {
        self.has_accepted
    }

    /// Takes note that these changes are being written to the device.
    pub(super) fn record_changes(&mut self, changes: &[(u32, TableChange)]) {
        for (stack, change) in changes {
            let entries = change.first_entry..change.first_entry + change.len;
            self.stacks[*stack as usize].known_entries[change.table_row as usize].add(entries);
        }
    }

    /// Entries of a table of a stack.
    pub(super) fn table_entries(&self, stack: u32) -> u32 {
        self.stacks[stack as usize].table_entries
    }

    /// Checks whose plan it is, and when it was made.
    pub(super) fn check_origin(&self, plan: &StepPlan) -> Result<(), PrepareError> {
        if plan.fingerprint() != self.fingerprint {
            return Err(PrepareError::Fingerprint { plan: plan.fingerprint(), attention: self.fingerprint });
        }
        if let Some(attention) = self.cache_instance.filter(|&instance| instance != plan.cache_instance()) {
            return Err(PrepareError::CacheInstance { plan: plan.cache_instance(), attention });
        }
        if plan.forgotten_devices() < self.needed_forgotten {
            return Err(PrepareError::DeviceNotForgotten {
                forgotten: plan.forgotten_devices(),
                needed: self.needed_forgotten,
            });
        }
        if plan.step().raw() <= self.last_step {
            return Err(PrepareError::StepNotNewer { step: plan.step().raw(), last: self.last_step });
        }
        Ok(())
    }

    fn check_block(&self, block: u32) -> Result<(), PlanFault> {
        if block >= self.num_blocks {
            return Err(PlanFault::BlockOutOfRange { block, num_blocks: self.num_blocks });
        }
        Ok(())
    }

    fn check_tables(&mut self, plan: &StepPlan) -> Result<(), PlanFault> {
        let forgets = plan.forgotten_devices() > self.forgotten_devices;
        for (stack, plan) in self.stacks.iter_mut().zip(plan.stacks()) {
            stack.check_tables(plan, self.max_sequences, forgets)?;
        }
        let mut entries = plan.stacks().iter().flat_map(StackPlan::changed_entries);
        entries.try_for_each(|&block| self.check_block(block))
    }

    fn check_sequences(&self, plan: &StepPlan) -> Result<(), PlanFault> {
        let num_rows = plan.num_rows();
        let mut expected_start = 0;
        for sequence in 0..plan.num_sequences() {
            let index = sequence as usize;
            let (start, end) = (plan.query_starts()[index], plan.query_starts()[index + 1]);
            if start != expected_start || end < start || end > num_rows {
                return Err(PlanFault::QueryStarts { sequence, start, end });
            }
            expected_start = end;
            let context = plan.context_lens()[index];
            if end - start > context {
                return Err(PlanFault::RowsExceedContext { sequence, rows: end - start, context });
            }
            if context > self.max_sequence_tokens {
                return Err(PlanFault::ContextTooLong { sequence, context, max: self.max_sequence_tokens });
            }
            let table_row = plan.table_rows()[index];
            check_table_row(table_row, self.max_sequences)?;
            self.stacks
                .iter()
                .try_for_each(|stack| stack.check_known(sequence, table_row, end - start, context))?;
        }
        for stack in plan.stacks() {
            let unowned = stack.slot_mapping()[expected_start as usize..].iter();
            if let Some((row, _)) = (expected_start..).zip(unowned).find(|(_, slot)| **slot != PADDING_SLOT) {
                return Err(PlanFault::RowWithoutSequence { row });
            }
        }
        Ok(())
    }

    fn check_slots(&mut self, plan: &StepPlan) -> Result<(), PlanFault> {
        for (stack, plan) in self.stacks.iter().zip(plan.stacks()) {
            self.sorted.clear();
            for (row, &slot) in (0..).zip(plan.slot_mapping()) {
                if slot == PADDING_SLOT {
                    continue;
                }
                if slot >= stack.num_slots {
                    return Err(PlanFault::SlotOutOfRange { row, slot, num_slots: stack.num_slots });
                }
                self.sorted.push(slot);
            }
            if let Some(slot) = twice(&mut self.sorted) {
                return Err(PlanFault::SlotTwice { slot });
            }
        }
        if self.stacks.len() > 1 { self.check_one_stack_per_block(plan) } else { Ok(()) }
    }

    /// A block's bytes mean what its stack says.
    fn check_one_stack_per_block(&mut self, plan: &StepPlan) -> Result<(), PlanFault> {
        self.sorted.clear();
        for (stack, plan) in self.stacks.iter().zip(plan.stacks()) {
            let first = self.sorted.len();
            let slots = plan.slot_mapping().iter().filter(|&&slot| slot != PADDING_SLOT);
            self.sorted.extend(slots.map(|slot| slot / stack.block_size));
            // Each block of the stack once.
            self.sorted[first..].sort_unstable();
            let mut kept = first;
            for index in first..self.sorted.len() {
                if kept == first || self.sorted[index] != self.sorted[kept - 1] {
                    self.sorted[kept] = self.sorted[index];
                    kept += 1;
                }
            }
            self.sorted.truncate(kept);
        }
        match twice(&mut self.sorted) {
            Some(block) => Err(PlanFault::BlockOfTwoStacks { block }),
            None => Ok(()),
        }
    }

    /// Copies of a block into itself are left out by the upload, so they are in no other's way.
    fn check_copies(&mut self, plan: &StepPlan) -> Result<(), PlanFault> {
        self.sorted.clear();
        for copy in plan.block_copies() {
            self.check_block(copy.source)?;
            self.check_block(copy.destination)?;
            if copy.source != copy.destination {
                self.sorted.push(copy.destination);
            }
        }
        if let Some(block) = twice(&mut self.sorted) {
            return Err(PlanFault::CopyDestinationTwice { block });
        }
        // A self-copy is a no-op: its block may be the source of others, and even the destination of one.
        for copy in plan.block_copies().iter().filter(|copy| copy.source != copy.destination) {
            if self.sorted.binary_search(&copy.source).is_ok() {
                return Err(PlanFault::CopyConflict { block: copy.source });
            }
        }
        Ok(())
    }

    /// A block that leaves may have any other part in the step, for all others come later. What a slot holds is known to
    /// the host pool alone.
    fn check_swaps(&mut self, plan: &StepPlan) -> Result<(), PlanFault> {
        self.check_moves(plan.swap_outs().iter().map(|swap| (swap.block, swap.host_slot)))?;
        self.check_moves(plan.swap_ins().iter().map(|swap| (swap.block, swap.host_slot)))?;
        // Sorted now: the slots that blocks return from.
        match plan.swap_outs().iter().find(|swap| self.sorted.binary_search(&swap.host_slot).is_ok()) {
            Some(swap) => Err(PlanFault::HostSlotConflict { host_slot: swap.host_slot }),
            None => Ok(()),
        }
    }

    /// Checks blocks and host slots that are swapped in one direction. Leaves the slots in `sorted`.
    fn check_moves(&mut self, moves: impl Iterator<Item = (u32, u32)> + Clone) -> Result<(), PlanFault> {
        self.sorted.clear();
        for (block, host_slot) in moves.clone() {
            self.check_block(block)?;
            if host_slot >= self.host_blocks {
                return Err(PlanFault::HostSlotOutOfRange { host_slot, host_blocks: self.host_blocks });
            }
            self.sorted.push(block);
        }
        if let Some(block) = twice(&mut self.sorted) {
            return Err(PlanFault::SwapTwice { block });
        }
        self.sorted.clear();
        self.sorted.extend(moves.map(|(_, host_slot)| host_slot));
        match twice(&mut self.sorted) {
            Some(host_slot) => Err(PlanFault::HostSlotTwice { host_slot }),
            None => Ok(()),
        }
    }
}

/// Sorts `numbers`; one that occurs twice.
fn twice(numbers: &mut [u32]) -> Option<u32> {
    numbers.sort_unstable();
    numbers.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

fn check_lengths(plan: &StepPlan, num_stacks: usize) -> Result<(), PlanFault> {
    let rows = u64::from(plan.num_rows());
    let sequences = u64::from(plan.num_sequences());
    let starts = plan.query_starts().len();
    // A plan without sequences may have no query starts at all.
    let expected_starts = if sequences == 0 && starts == 0 { 0 } else { sequences + 1 };
    for (array, actual, expected) in [
        ("positions", plan.positions().len(), rows),
        ("query_starts", starts, expected_starts),
        ("table_rows", plan.table_rows().len(), sequences),
        ("stacks", plan.stacks().len(), num_stacks as u64),
    ] {
        check_length(array, actual as u64, expected)?;
    }
    let mut slots = plan.stacks().iter().map(|stack| stack.slot_mapping().len() as u64);
    slots.try_for_each(|slots| check_length("slot_mapping", slots, rows))
}

#[cfg(test)]
mod tests;
