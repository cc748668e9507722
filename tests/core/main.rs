//! Tests of the host core; they need no GPU and no wgpu.
#![allow(clippy::unwrap_used)]

mod bug_cases;
mod reference;
mod reference_bugs;
mod rig;
mod scenarios;
