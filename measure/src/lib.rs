//! How kernels are measured: an adapter and its clock, caches full of keys and values, twins of the library's kernels
//! that differ in one thing, other kernels to compare with, and what AMD's compiler makes of them all. The benches share
//! it with the example `device_report`.
//!
//! Everything is timed on what it runs on: by timestamps around the compute pass where the adapter has them, else by
//! the wall around submit and wait. Two things that are compared are run in turn, and the median of the pairs' ratios
//! counts, so that a busy machine disturbs both alike.

pub mod amd_isa;
pub mod cache;
pub mod cases;
pub mod faults;
pub mod gpu;
pub mod kernels;
pub mod pairs;
pub mod row;
pub mod stream;
pub mod twins;

/// What went wrong, for people.
pub type Failure = Box<dyn std::error::Error>;
