//! Tests of the device part.

#[path = "../core/bug_cases.rs"]
mod bug_cases;
mod device;
mod device_rig;
mod kernel_bugs;
mod kernels;
mod outside_readers;
mod profiles;
mod raw;
mod raw_kernels;
mod recording;
#[path = "../core/rig.rs"]
mod rig;
mod shaders;
mod steps;
mod swaps;
mod writers;
