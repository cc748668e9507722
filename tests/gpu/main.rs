//! Tests of the device part.

mod after_loss;
mod batch_invariance;
#[path = "../core/support/bug_cases.rs"]
mod bug_cases;
#[path = "../core/support/counting_allocator.rs"]
mod counting_allocator;
mod device;
mod device_loss;
mod device_rig;
mod embedding;
#[path = "../core/support/golden_options.rs"]
mod golden_options;
mod hidden_window;
mod hostile;
mod kernel_bugs;
mod kernels;
mod leaving;
mod logit_options;
mod long_contexts;
#[path = "../core/support/models_of_groups.rs"]
mod models_of_groups;
mod never_ran;
mod other_devices;
mod outside_readers;
mod profiles;
mod raw;
mod raw_kernels;
mod recording;
#[path = "../core/support/rig.rs"]
mod rig;
mod shaders;
mod steps;
mod swaps;
mod use_cache;
mod writers;
