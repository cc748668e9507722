//! The device of the simulation, which runs plans through the CPU twins.

#[path = "../../tests/core/simulation/fake_model.rs"]
pub(crate) mod fake_model;
#[path = "../../tests/core/simulation/twin_device.rs"]
#[allow(dead_code)]
pub(crate) mod twin_device;
