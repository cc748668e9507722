//! Tests of the device part.

mod device;
