//! What becomes of a step once it is prepared: who still holds its slot, and whether its commands have run.
//!
//! A step is committed by the application, which thereby says that its commands were submitted. Where they were not (the
//! frame was skipped and the encoder dropped, say), later steps would read keys and values that were never written. wgpu
//! drops a callback uncalled with the encoder that it was registered on, and every plan names the last step that was
//! committed before it: so a step that was committed and never ran is known, at the latest when the next plan comes after
//! its encoder has gone.
//!
//! A submission that wgpu refuses calls its callbacks like any other. It is an error of the application's queue, which
//! wgpu reports to the application.

use crate::gpu::metadata::MetadataSlots;
use crate::schedule::StepPlan;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use wgpu::ComputePass;

/// What is known of a step's commands. Who holds it (the step, a callback in every encoder) holds the step's slot.
#[derive(Debug, Default)]
pub(super) struct Lease {
    /// All that the step needs has been recorded.
    is_recorded: AtomicBool,
    /// Some of it was dropped with its encoder.
    is_dropped: AtomicBool,
}

impl Lease {
    /// Notes that all of the step has been recorded.
    pub(super) fn complete(&self) {
        self.is_recorded.store(true, Ordering::Relaxed);
    }

    /// Whether all of the step's commands have run, as soon as that is certain.
    pub(super) fn outcome(lease: &mut Arc<Self>) -> Option<bool> {
        if lease.is_dropped.load(Ordering::Acquire) {
            return Some(false);
        }
        let lease = Arc::get_mut(lease)?;
        Some(*lease.is_recorded.get_mut() && !*lease.is_dropped.get_mut())
    }
}

/// Some of a step's commands, from their recording until they have completed.
pub(super) struct Commands(Option<Arc<Lease>>);

impl Commands {
    pub(super) fn new(lease: &Arc<Lease>) -> Self {
        Self(Some(Arc::clone(lease)))
    }

    /// Called by wgpu when the submission has completed.
    pub(super) fn completed(mut self) {
        self.0 = None;
    }
}

impl Drop for Commands {
    fn drop(&mut self) {
        if let Some(lease) = self.0.take() {
            lease.is_dropped.store(true, Ordering::Release);
        }
    }
}

/// The passes of a step, in which its commands are held: once in each, and not in every layer, for wgpu pays for a callback
/// when it is registered, submitted and called.
#[derive(Debug, Default)]
pub(super) struct HeldPasses {
    /// The last one.
    number: Option<u64>,
}

impl HeldPasses {
    /// Has `pass` hold the step until the submission that it becomes part of has completed, or will never be.
    pub(super) fn hold(&mut self, pass: &ComputePass<'_>, lease: &Arc<Lease>) {
        let number = pass_number(pass);
        if number.is_some() && number == self.number {
            return;
        }
        self.number = number;
        let commands = Commands::new(lease);
        pass.on_submitted_work_done(move || commands.completed());
    }
}

/// The number of a pass, which no other one ever has, if it has one.
fn pass_number(pass: &ComputePass<'_>) -> Option<u64> {
    let mut reader = NumberReader::default();
    pass.hash(&mut reader);
    reader.number.filter(|_| !reader.has_more)
}

/// Reads what a pass hashes. wgpu numbers passes from one counter, and hashes the number, behind the kind of the backend;
/// passes of a backend that is not wgpu's own hash their address, which the next one may have, too.
#[derive(Default)]
struct NumberReader {
    number: Option<u64>,
    has_more: bool,
}

impl Hasher for NumberReader {
    fn write(&mut self, _: &[u8]) {
        self.has_more = true;
    }

    fn write_u64(&mut self, number: u64) {
        self.has_more |= self.number.replace(number).is_some();
    }

    /// The kind of the backend.
    fn write_isize(&mut self, _: isize) {}

    fn finish(&self) -> u64 {
        self.number.unwrap_or_default()
    }
}

/// A prepared step and its slot.
#[derive(Clone, Copy, Debug)]
struct Entry {
    step: u64,
    slot: usize,
}

/// Which of the cache's committed steps have run on the device.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// The last step that is known to have been committed.
    committed: u64,
    /// Devices that its cache had forgotten.
    forgotten_devices: u64,
    /// The step prepared last, whose plan may yet be committed or dropped.
    prepared: Option<Entry>,
    /// Steps that were committed and may yet run.
    pending: Vec<Entry>,
    /// The first that was committed and never ran.
    failed: Option<u64>,
}

impl Ledger {
    /// Learns from `plan` what was committed before it, and from `slots` what has run. Returns the first step that was
    /// committed and never ran, unless the cache has forgotten the device since.
    pub(super) fn update(&mut self, plan: &StepPlan, slots: &mut MetadataSlots) -> Option<u64> {
        if plan.forgotten_devices() > self.forgotten_devices {
            *self = Self { forgotten_devices: plan.forgotten_devices(), ..Self::default() };
        }
        let committed = plan.last_committed().raw();
        if committed > self.committed {
            self.committed = committed;
            match self.prepared.take_if(|entry| entry.step == committed) {
                Some(entry) => self.pending.push(entry),
                None => _ = self.failed.get_or_insert(committed),
            }
        }
        let failed = &mut self.failed;
        self.pending.retain(|entry| match slots.outcome(entry.slot) {
            None => true,
            Some(has_run) => {
                if !has_run {
                    failed.get_or_insert(entry.step);
                }
                false
            }
        });
        self.failed
    }

    /// Notes that `plan` is prepared in `slot`. What was prepared before it and is not committed was rolled back.
    pub(super) fn prepared(&mut self, plan: &StepPlan, slot: usize) {
        self.prepared = Some(Entry { step: plan.step().raw(), slot });
    }
}
