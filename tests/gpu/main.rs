//! Tests of the device part.
