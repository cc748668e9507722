//! Tests of the host core; they need no GPU and no wgpu.
#![allow(clippy::unwrap_used)]

mod block_states;
mod bug_cases;
mod cache_bugs;
mod cache_model;
mod cache_refusals;
mod config_numbers;
mod drafts;
#[cfg(feature = "faults")]
mod faults;
mod gate;
mod histories;
mod hostile;
mod line;
mod manifests;
mod long_lines;
mod model;
mod plan_text;
mod preemption;
mod promises;
mod properties;
mod reference;
mod reference_bugs;
mod residency;
mod rig;
mod scenarios;
mod scheduler_bugs;
mod simulated_device;
mod simulation;
mod swap_histories;
mod swapped_tables;
mod tidy;
