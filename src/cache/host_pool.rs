//! The swap ledger: who holds which slot of the host pool, and which slots are on their way.
//!
//! A slot is *free*, *held* (tables count on its content), or *in transfer*: on its way out, its content has not arrived
//! yet; on its way in, a step may still read it. Transfers belong to a step; they end when the step is committed and
//! the device part has reported it, in whichever order. What a dropped step moved is lost, whether the device ran it or
//! not.

use crate::ids::{StepId, TableId};
use std::collections::VecDeque;

/// A block of the host pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostSlot(pub(super) u32);

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// Tables that hold it.
    ref_count: u32,
    /// Its content has not arrived.
    arriving: bool,
    /// Its content is being read.
    leaving: bool,
    /// The step that moved its block out.
    sent: StepId,
    /// Its content never arrives.
    lost: bool,
}

/// The swaps of one step.
#[derive(Debug, Default)]
pub(super) struct Transfer {
    step: StepId,
    outs: Vec<HostSlot>,
    ins: Vec<HostSlot>,
    /// Tables that were brought back.
    tables: Vec<TableId>,
    committed: bool,
    report: Option<bool>,
}

#[derive(Debug)]
pub(super) struct HostPool {
    slots: Vec<Slot>,
    free: VecDeque<HostSlot>,
    transfers: VecDeque<Transfer>,
}

/// What the end of a transfer leaves to be done.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// Whether tables count on slots whose content never arrived.
    pub(super) lost: bool,
    /// Tables whose blocks never came back.
    pub(super) broken: Vec<TableId>,
}

impl HostPool {
    pub(super) fn new(num_slots: u32) -> Self {
        Self {
            slots: vec![Slot::default(); num_slots as usize],
            free: (0..num_slots).map(HostSlot).collect(),
            transfers: VecDeque::new(),
        }
    }

    pub(super) fn num_slots(&self) -> u32 {
        self.slots.len() as u32
    }

    pub(super) fn num_free(&self) -> u32 {
        self.free.len() as u32
    }

    /// O(transfers): a slot is in one of them at most.
    pub(super) fn num_in_transfer(&self) -> u32 {
        self.transfers.iter().map(|transfer| (transfer.outs.len() + transfer.ins.len()) as u32).sum()
    }

    /// Slots that tables hold and whose content rests there.
    pub(super) fn num_held(&self) -> u32 {
        self.num_slots() - self.num_free() - self.num_in_transfer()
    }

    /// Steps whose transfers have not ended.
    pub(super) fn num_transfers(&self) -> usize {
        self.transfers.len()
    }

    /// Whether a slot's content has not arrived, or is being read.
    pub(super) fn is_moving(&self, slot: HostSlot) -> bool {
        let Slot { arriving, leaving, .. } = self.slots[slot.0 as usize];
        arriving || leaving
    }

    /// Tables that hold a slot.
    pub(super) fn ref_count(&self, slot: HostSlot) -> u32 {
        self.slots[slot.0 as usize].ref_count
    }

    /// The step that moved a slot's block out. In a table, what was moved later comes first.
    pub(super) fn sent(&self, slot: HostSlot) -> StepId {
        self.slots[slot.0 as usize].sent
    }

    /// Whether a slot's content never arrives. Tables let go of such a slot as soon as that is known.
    pub(super) fn is_lost(&self, slot: HostSlot) -> bool {
        self.slots[slot.0 as usize].lost
    }

    fn transfer(&mut self, step: StepId) -> &mut Transfer {
        if self.transfers.back().is_none_or(|last| last.step != step) {
            self.transfers.push_back(Transfer { step, ..Transfer::default() });
        }
        self.transfers.back_mut().expect("just pushed")
    }

    /// Takes a free slot for a block that `holders` tables hold, on its way out in `step`.
    pub(super) fn send(&mut self, step: StepId, holders: u32) -> Option<HostSlot> {
        let slot = self.free.pop_front()?;
        self.slots[slot.0 as usize] =
            Slot { ref_count: holders, arriving: true, leaving: false, sent: step, lost: false };
        self.transfer(step).outs.push(slot);
        Some(slot)
    }

    /// Starts a slot's way back in `step`, for `holders` tables that hold it no more.
    pub(super) fn fetch(&mut self, step: StepId, slot: HostSlot, holders: u32) {
        self.slots[slot.0 as usize].ref_count -= holders;
        self.slots[slot.0 as usize].leaving = true;
        self.transfer(step).ins.push(slot);
    }

    /// Notes that `step` brings a table back.
    pub(super) fn note_return(&mut self, step: StepId, table: TableId) {
        self.transfer(step).tables.push(table);
    }

    /// A dropped step's slot is held by `holders` tables more; by none, it is free.
    pub(super) fn unfetch(&mut self, slot: HostSlot, holders: u32) {
        self.slots[slot.0 as usize].leaving = false;
        self.slots[slot.0 as usize].ref_count += holders;
        self.free_if_idle(slot);
    }

    pub(super) fn retain(&mut self, slot: HostSlot) {
        self.slots[slot.0 as usize].ref_count += 1;
    }

    /// One holder less. Returns false when there was none: a broken invariant.
    #[must_use]
    pub(super) fn release(&mut self, slot: HostSlot) -> bool {
        let count = &mut self.slots[slot.0 as usize].ref_count;
        debug_assert!(*count > 0, "{slot:?} is released twice");
        if *count == 0 {
            return false;
        }
        *count -= 1;
        self.free_if_idle(slot);
        true
    }

    fn free_if_idle(&mut self, slot: HostSlot) {
        let Slot { ref_count, arriving, leaving, .. } = self.slots[slot.0 as usize];
        if ref_count == 0 && !arriving && !leaving && !fault!(HostSlotLeaked) {
            self.free.push_back(slot);
        }
    }

    /// The outstanding step is committed: its transfers end when they are reported.
    pub(super) fn commit(&mut self, step: StepId) -> Ended {
        match self.transfers.back_mut() {
            Some(transfer) if transfer.step == step => transfer.committed = true,
            _ => return Ended::default(),
        }
        self.end(step)
    }

    /// The device part is done with a step's transfers. A step that is not known was dropped: nothing to do.
    pub(super) fn report(&mut self, step: StepId, complete: bool) -> Ended {
        if let Some(transfer) = self.transfers.iter_mut().find(|transfer| transfer.step == step) {
            transfer.report = Some(complete);
        }
        self.end(step)
    }

    fn end(&mut self, step: StepId) -> Ended {
        let ended =
            |transfer: &Transfer| transfer.step == step && transfer.committed && transfer.report.is_some();
        let Some(place) = self.transfers.iter().position(ended) else { return Ended::default() };
        let Some(transfer) = self.transfers.remove(place) else { return Ended::default() };
        for &slot in &transfer.ins {
            self.slots[slot.0 as usize].leaving = false;
            self.free_if_idle(slot);
        }
        let complete = transfer.report == Some(true);
        for &slot in &transfer.outs {
            self.slots[slot.0 as usize].lost = !complete;
            self.slots[slot.0 as usize].arriving = false;
            self.free_if_idle(slot);
        }
        if complete {
            return Ended::default();
        }
        Ended { lost: !transfer.outs.is_empty(), broken: transfer.tables }
    }

    /// The outstanding step is dropped, its returns undone by [`unfetch`](Self::unfetch). Returns whether slots were on
    /// their way out: what they should have held is lost, and they are free once their holders let go.
    pub(super) fn drop_step(&mut self, step: StepId) -> bool {
        if self.transfers.back().is_none_or(|last| last.step != step) {
            return false;
        }
        let Some(transfer) = self.transfers.pop_back() else { return false };
        for &slot in &transfer.outs {
            self.slots[slot.0 as usize].lost = true;
            self.slots[slot.0 as usize].arriving = false;
            self.free_if_idle(slot);
        }
        !transfer.outs.is_empty()
    }

    /// No step's transfers end any more, for their device is lost. What has not arrived is lost; what was on its way back
    /// is in the host pool still, but no table counts on it there. Returns the first of these steps.
    pub(super) fn abandon_transfers(&mut self) -> Option<StepId> {
        let first = self.transfers.front().map(|transfer| transfer.step);
        for transfer in std::mem::take(&mut self.transfers) {
            for &slot in transfer.outs.iter().chain(&transfer.ins) {
                let Slot { arriving, leaving, lost, .. } = &mut self.slots[slot.0 as usize];
                *lost |= *arriving;
                (*arriving, *leaving) = (false, false);
                self.free_if_idle(slot);
            }
        }
        first
    }

    /// Panics when counts, the free list and transfers disagree; `expected` are the counts that the tables imply.
    pub(super) fn assert_consistent(&self, expected: &[u32]) {
        let mut on_free_list = vec![false; self.slots.len()];
        for slot in &self.free {
            assert!(!on_free_list[slot.0 as usize], "I1: {slot:?} is on the free list twice");
            on_free_list[slot.0 as usize] = true;
        }
        let mut on_the_way = vec![false; self.slots.len()];
        for slot in self.transfers.iter().flat_map(|transfer| transfer.outs.iter().chain(&transfer.ins)) {
            assert!(!on_the_way[slot.0 as usize], "I5: {slot:?} is in two transfers");
            on_the_way[slot.0 as usize] = true;
        }
        for (index, slot) in self.slots.iter().enumerate() {
            assert_eq!(
                slot.ref_count, expected[index],
                "I2: host slot {index} is held by another number of tables"
            );
            let moves = slot.arriving || slot.leaving;
            assert!(slot.ref_count == 0 || !slot.lost, "a table counts on host slot {index}, which is lost");
            assert_eq!(
                moves, on_the_way[index],
                "I5: host slot {index} is in transfer without a step, or not"
            );
            assert_eq!(
                on_free_list[index],
                slot.ref_count == 0 && !moves,
                "I1: host slot {index} is in two states or none"
            );
        }
        let moves = |slot: &Slot| slot.arriving || slot.leaving;
        let held = self.slots.iter().filter(|slot| slot.ref_count > 0 && !moves(slot)).count();
        assert_eq!(
            self.num_held() as usize,
            held,
            "I1: free, held and in transfer do not sum to the host pool"
        );
    }
}
