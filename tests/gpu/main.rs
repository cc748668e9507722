//! Tests of the device part.

mod device;
mod recording;
#[path = "../core/rig.rs"]
mod rig;
mod shaders;
mod smoke;
