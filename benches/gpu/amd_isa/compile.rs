//! Compiles for one AMD family for `amd_isa`'s bench and test, which start it: see `measure::amd_isa`.

use measure::{Failure, amd_isa};

fn main() -> Result<(), Failure> {
    amd_isa::serve()
}
