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
//!
//! One step of one layer, with the keys and values of a prompt of three tokens:
//!
//! ```
//! use paged_kv::reference::{self, AttentionInputs, CpuCache, Rows, RowsMut};
//! use paged_kv::{CacheConfig, KvCache, KvType, ModelShape, StepBuilder, WorkSplit};
//!
//! let shape = ModelShape::new(1, 2, 1, 8);
//! let config = CacheConfig::for_blocks(4, &shape, KvType::F16)?;
//! let mut cpu = CpuCache::new(&shape, &config);
//! let mut cache = KvCache::new(config);
//! let mut split = WorkSplit::default();
//!
//! let sequence = cache.create(64)?;
//! let mut step = StepBuilder::new(&mut cache);
//! step.push(sequence, &[11, 12, 13])?;
//! let plan = step.finish();
//!
//! // Once per step.
//! cpu.apply_table_changes(&plan);
//! reference::swap_out(&mut cpu, plan.swap_outs());
//! reference::swap_in(&mut cpu, plan.swap_ins());
//! reference::block_copy(&mut cpu, plan.block_copies());
//! split.split(&plan, &cpu.split_config(0, 1));
//! // Once per layer.
//! let (query, key, value) = ([0.0; 3 * 16], [1.0; 3 * 8], [0.5; 3 * 8]);
//! reference::append(&mut cpu, 0, plan.slot_mapping(), Rows::new(&key, 8), Rows::new(&value, 8));
//! let inputs = AttentionInputs::new(&cpu, &plan, 0, Rows::new(&query, 16));
//! let mut output = [0.0; 3 * 16];
//! reference::attention(&inputs, &split, &mut RowsMut::new(&mut output, 16), &mut Vec::new());
//! assert_eq!(output, [0.5; 3 * 16]);
//! cache.commit_step(plan)?;
//! # Ok::<(), paged_kv::Error>(())
//! ```

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
mod rule;
mod swap;

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
#[doc(hidden)]
pub use swap::set_swaps;
pub use swap::{swap_in, swap_out};

#[cfg(test)]
mod tests;
