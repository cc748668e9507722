//! What several programs' command lines choose.

use clap::ValueEnum;
use paged_kv::PreemptionMode;

/// How a sequence whose blocks were taken goes on: [`PreemptionMode`], as it is written on a command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preempt {
    /// Its tokens are computed again.
    Recompute,
    /// Its blocks are moved to main memory and back.
    Swap,
    /// Whichever takes less time.
    Auto,
}

impl From<Preempt> for PreemptionMode {
    fn from(preempt: Preempt) -> Self {
        match preempt {
            Preempt::Recompute => Self::Recompute,
            Preempt::Swap => Self::Swap,
            Preempt::Auto => Self::Auto,
        }
    }
}
