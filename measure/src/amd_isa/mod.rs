//! What AMD's compiler makes of the kernels, without a card.
//!
//! Mesa's RADV compiles for families of hardware that are not there. Every [`Variant`] is translated as wgpu translates
//! the library's modules and compiled for every [`Family`], by a process of its own ([`Compiler`]). Of the whole kernel
//! RADV tells registers, spills, workgroup memory, waves and code size; the loop over full tiles of keys is counted in
//! its assembly.
//!
//! # How instructions per key are counted
//!
//! 1. RADV runs a workgroup of 64 invocations as one subgroup (else the figures are refused). The counted text says so:
//!    `num_subgroups` is 1 in it, and what several subgroups would need is gone. Registers are those of the real text.
//! 2. The assembly is cut into blocks at its labels (`assembly`); what its disassembler misread is read again
//!    (`realign`), until there are as many instructions as the compiler says.
//! 3. A branch backwards makes a loop (`structure`). Two outermost loops load 16 bytes a lane, which only keys and values
//!    do: that over full tiles, which is counted, and that over the ragged rest.
//! 4. A tile has a known number of such loads, so the loads outside and inside of the inner loops say how often those
//!    run. No or several solutions, loops within them, or loops of unknown trips are errors.
//! 5. Every block of the loop counts with its trips, whether guarded or not, but for the guarded stretch that loads
//!    block-table entries: one tile of 16 stages them, at 16 tokens a block.
//!
//! The sum over the keys of a tile is the count per key and kv head: decode serves a kv head's tile of query heads with
//! it, prefill a tile of (row, head) pairs.
//!
//! What this does not say: how long loads take and how many are in flight, bank conflicts, cache misses.

mod assembly;
mod compiler;
mod family;
mod figures;
mod measure;
mod per_key;
mod radv;
mod realign;
mod roofline;
mod spirv;
mod structure;
mod tables;
mod variants;

pub use compiler::{Compiler, radv_manifest, serve};
pub use family::Family;
pub use figures::{Figures, Row};
pub use measure::{Depth, measure_all};
pub use per_key::PerKey;
pub use roofline::{CARDS, Card};
pub use tables::{render, replace_tables};
pub use variants::Variant;
