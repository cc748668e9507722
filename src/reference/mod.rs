//! Plain CPU twins of the kernels, and a dense attention in f64 that judges both.
//!
//! A twin reads and writes a [`CpuCache`], whose words lie exactly as an arena's, and takes the same plan and the same
//! work items as the kernel whose name it bears. Arithmetic is f32 throughout, by the kernels' rules:
//!
//! - softmax in base 2, with `scale * log2(e)` folded into the query, one pass with a running maximum and sum;
//! - the running maximum starts at a finite value below any logit, and keys that a row may not see are left out by
//!   count, never by comparing with infinity;
//! - a row without a visible key gives 0, and its partial result weighs nothing;
//! - a slot that no visible key lies in is never read, so what it holds cannot reach an output.
//!
//! The twins agree with the kernels up to rounding, not bit for bit: sums are taken in another order.
//!
//! Nothing here starts a thread. [`decode_parts`] and [`prefill_parts`] cut a step's items, and the rows that they
//! write, into pieces that an application may hand to threads of its own; [`attention`] runs everything in place.
//!
//! Not here: scheduling, sampling, and anything about devices.

mod append;
mod attention;
mod attention_decode;
mod attention_merge;
mod attention_prefill;
mod block_copy;
mod compare;
mod cpu_cache;
mod dense;
mod f16;
mod online_softmax;
mod parts;
mod rows;

pub use append::append;
pub use attention::{AttentionInputs, attention};
pub use attention_decode::attention_decode;
pub use attention_merge::{attention_merge, log_sum_exp};
pub use attention_prefill::attention_prefill;
pub use block_copy::block_copy;
pub use compare::{Mismatch, compare};
pub use cpu_cache::CpuCache;
pub use dense::{DenseInputs, DenseOutput, dense_attention};
pub use f16::{f16_bits_to_f32, f32_to_f16_bits};
pub use parts::{DecodePart, PrefillPart, decode_parts, prefill_parts};
pub use rows::{Rows, RowsMut};

#[cfg(test)]
mod tests;
