//! Tests of the host core; they need no GPU and no wgpu.

mod reference;
mod reference_bugs;
mod rig;
