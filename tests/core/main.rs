//! Tests of the host core; they need no GPU and no wgpu.
#![allow(clippy::unwrap_used)]

#[path = "support/block_states.rs"]
mod block_states;
#[path = "support/bug_cases.rs"]
mod bug_cases;
mod cache_bugs;
#[path = "support/cache_model.rs"]
mod cache_model;
mod cache_refusals;
mod config_numbers;
mod drafts;
#[cfg(feature = "faults")]
mod faults;
mod gate;
#[path = "support/golden_options.rs"]
mod golden_options;
mod groups;
#[path = "support/histories.rs"]
mod histories;
mod hostile;
mod line;
mod logit_options;
mod long_lines;
mod manifests;
#[path = "support/model.rs"]
mod model;
#[path = "support/models_of_groups.rs"]
mod models_of_groups;
#[path = "support/naive_blocks.rs"]
mod naive_blocks;
mod plan_text;
mod preemption;
mod promises;
mod properties;
mod reference;
mod reference_bugs;
mod residency;
#[path = "support/rig.rs"]
mod rig;
mod scenarios;
mod scheduler_bugs;
#[path = "support/simulated_device.rs"]
mod simulated_device;
mod simulation;
mod swap_histories;
mod swapped_tables;
mod tidy;
