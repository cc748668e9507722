//! Compiles for one AMD family for `amd_isa`'s bench and test, which start it: see `bench_support::amd_isa`.

use bench_support::{Failure, amd_isa};

fn main() -> Result<(), Failure> {
    amd_isa::serve()
}
