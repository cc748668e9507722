//! A device that runs plans through the CPU twins, with the keys and values of the [fake model](super::fake_model).
//!
//! Its pool begins as NaN, and so do slots whose content is worth nothing: a row that reads them is NaN. What was moved
//! to the host pool may be read there only when its transfer has been reported.

use super::fake_model::{Activations, FakeModel, HEAD, LAYERS, Outputs, QUERY, SHAPE, activations};
use crate::simulated_device::{Device, EMPTY, Known, check_plan, then};
use approx::abs_diff_eq;
use paged_kv::reference::{self, AttentionInputs, CpuCache, Rows, RowsMut};
use paged_kv::{CacheConfig, KvPart, SequenceId, StepId, StepPlan, TransferReport, WorkSplit};
use std::ops::Range;

/// Whether the device makes this mistake.
#[cfg(feature = "faults")]
macro_rules! fault {
    ($name:ident) => {
        paged_kv::Fault::$name.is_active()
    };
}

#[cfg(not(feature = "faults"))]
macro_rules! fault {
    ($name:ident) => {
        false
    };
}

/// Between the twins' f32 and the dense f64.
const TOLERANCE: f32 = 1e-4;

#[derive(Debug)]
pub(crate) struct TwinDevice {
    cpu: CpuCache,
    config: CacheConfig,
    /// Entries of each block table that plans have sent.
    sent_entries: Vec<u32>,
    model: FakeModel,
    split: WorkSplit,
    partials: Vec<f32>,
    /// The step whose transfer to a host slot has not arrived.
    arriving: Vec<Option<StepId>>,
    transfers: Vec<StepId>,
    /// Of everything that it was told to do.
    digest: u64,
}

impl TwinDevice {
    /// Activations of all rows in one layer, and its output.
    fn run_layer(&mut self, plan: &StepPlan, layer: u32, rows: &[Activations], outputs: &mut [f32]) {
        let query: Vec<f32> = rows.iter().flat_map(|row| row.query).collect();
        let keys: Vec<f32> = rows.iter().flat_map(|row| row.key).collect();
        let values: Vec<f32> = rows.iter().flat_map(|row| row.value).collect();
        let (key, value) = (Rows::new(&keys, HEAD), Rows::new(&values, HEAD));
        reference::append(&mut self.cpu, layer, plan.slot_mapping(), key, value);
        let inputs = AttentionInputs::new(&self.cpu, plan, layer, Rows::new(&query, QUERY));
        reference::attention(&inputs, &self.split, &mut RowsMut::new(outputs, QUERY), &mut self.partials);
    }

    fn move_blocks(&mut self, plan: &StepPlan) {
        if plan.swap_outs().is_empty() && plan.swap_ins().is_empty() {
            return;
        }
        if !fault!(SwapOutsAfterAppends) {
            reference::swap_out(&mut self.cpu, plan.swap_outs());
        }
        for swap in plan.swap_outs() {
            self.arriving[swap.host_slot as usize] = Some(plan.step());
        }
        for swap in plan.swap_ins() {
            let arriving = self.arriving[swap.host_slot as usize];
            assert_eq!(arriving, None, "I5: host slot {} is read before it has arrived", swap.host_slot);
        }
        reference::swap_in(&mut self.cpu, plan.swap_ins());
        self.transfers.push(plan.step());
    }

    /// No context may reach beyond the entries that this device was sent, whatever an earlier one had.
    fn note_entries(&mut self, plan: &StepPlan) {
        for change in plan.table_changes() {
            let sent = &mut self.sent_entries[change.table_row as usize];
            assert!(change.first_entry <= *sent, "{change:?} leaves a gap after {sent} entries");
            *sent = (*sent).max(change.first_entry + change.len);
        }
        for (&table, context) in plan.table_rows().iter().zip(plan.context_lens()) {
            let (needed, sent) =
                (context.div_ceil(self.config.block_size()), self.sent_entries[table as usize]);
            assert!(needed <= sent, "table {table} needs {needed} entries and was sent {sent}");
        }
    }

    fn note(&mut self, plan: &StepPlan) {
        let swaps =
            plan.swap_outs().iter().chain(plan.swap_ins()).flat_map(|swap| [swap.block, swap.host_slot]);
        let copies = plan.block_copies().iter().flat_map(|copy| [copy.source, copy.destination]);
        let rows = plan.token_ids().iter().chain(plan.slot_mapping()).copied();
        self.digest = swaps.chain(copies).chain(rows).fold(self.digest, then);
    }
}

impl Device for TwinDevice {
    type Seen = Outputs;

    fn new(config: &CacheConfig) -> Self {
        let mut cpu = CpuCache::new(&SHAPE, config);
        cpu.words_mut().fill(f32::NAN.to_bits());
        Self {
            cpu,
            config: config.clone(),
            sent_entries: vec![0; config.max_sequences() as usize],
            model: FakeModel::default(),
            split: WorkSplit::default(),
            partials: Vec::new(),
            arriving: vec![None; config.host_blocks() as usize],
            transfers: Vec::new(),
            digest: EMPTY,
        }
    }

    fn run(&mut self, plan: &StepPlan, known: &[Known]) -> Vec<Outputs> {
        check_plan(plan, &self.config);
        self.note(plan);
        self.cpu.apply_table_changes(plan);
        self.note_entries(plan);
        self.move_blocks(plan);
        if !fault!(CopiesAfterAppends) {
            reference::block_copy(&mut self.cpu, plan.block_copies());
        }
        // One thread or several: sums are merged from parts, then.
        let threads = 1 + (plan.step().raw() % 4) as u32;
        self.split.split(plan, &self.cpu.split_config(0, threads));
        let mut salt_of_row = Vec::new();
        for (rows, known) in plan.query_starts().windows(2).zip(known) {
            salt_of_row.resize(rows[1] as usize, known.salt);
        }
        let mut seen = vec![Outputs::default(); salt_of_row.len()];
        for layer in 0..LAYERS {
            let row = |(row, &salt): (usize, &u64)| {
                let below = layer.checked_sub(1).map(|below| &seen[row][below]);
                activations(salt, plan.token_ids()[row], plan.positions()[row], layer as u32, below)
            };
            let rows: Vec<Activations> = salt_of_row.iter().enumerate().map(row).collect();
            let mut outputs = vec![f32::NAN; rows.len() * QUERY];
            self.run_layer(plan, layer as u32, &rows, &mut outputs);
            for (seen, output) in seen.iter_mut().zip(outputs.chunks_exact(QUERY)) {
                seen[layer].copy_from_slice(output);
            }
        }
        if fault!(SwapOutsAfterAppends) {
            reference::swap_out(&mut self.cpu, plan.swap_outs());
        }
        if fault!(CopiesAfterAppends) {
            reference::block_copy(&mut self.cpu, plan.block_copies());
        }
        seen
    }

    fn check_seen(&mut self, seen: &Outputs, salt: u64, tokens: &[u32], sequence: SequenceId) {
        let expected = self.model.expected(salt, tokens);
        for layer in 0..LAYERS {
            let pairs = || seen[layer].iter().zip(&expected[layer]);
            // A NaN is not close to anything.
            assert!(
                pairs().all(|(seen, expected)| abs_diff_eq!(seen, expected, epsilon = TOLERANCE)),
                "what {sequence:?} sees in layer {layer}: another's keys or values among its {} tokens: {:?}",
                tokens.len(),
                pairs().collect::<Vec<_>>()
            );
        }
    }

    fn spoil(&mut self, plan: &StepPlan, rows: Range<usize>) {
        let block_size = self.config.block_size();
        for &slot in &plan.slot_mapping()[rows] {
            for (layer, part) in (0..LAYERS as u32).flat_map(|layer| [(layer, KvPart::K), (layer, KvPart::V)])
            {
                let (block, slot) = (slot / block_size, slot % block_size);
                self.cpu.write_row(layer, part, block, 0, slot, &[f32::NAN; HEAD]);
            }
        }
    }

    fn num_transfers(&self) -> usize {
        self.transfers.len()
    }

    fn complete(&mut self, index: usize) -> Option<TransferReport> {
        let index = index.checked_rem(self.transfers.len())?;
        let step = self.transfers.remove(index);
        for arriving in self.arriving.iter_mut().filter(|arriving| **arriving == Some(step)) {
            *arriving = None;
        }
        Some(TransferReport { step, complete: true })
    }

    fn lose(&mut self, index: usize) -> Option<TransferReport> {
        // Its blocks never arrive.
        let index = index.checked_rem(self.transfers.len())?;
        Some(TransferReport { step: self.transfers.remove(index), complete: false })
    }

    fn replace(&mut self) -> Vec<TransferReport> {
        self.cpu.words_mut().fill(f32::NAN.to_bits());
        self.sent_entries.fill(0);
        self.transfers.drain(..).map(|step| TransferReport { step, complete: false }).collect()
    }

    fn digest(&self) -> u64 {
        self.digest
    }
}
