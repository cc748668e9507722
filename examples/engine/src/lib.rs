//! A Llama-architecture language model from a GGUF file, with `paged-kv` as its cache.
//!
//! This is the part of the examples that an application brings itself: the loader, the tokenizer, the kernels
//! between one attention and the next, and the choice of tokens. Attention and the cache are `paged-kv`'s.
//!
//! | module | owns |
//! |---|---|
//! | [`gguf`], [`config`] | the file: metadata, tensors as f32, sizes checked |
//! | [`tokenizer`], [`chat`] | text to tokens and back; turns of a conversation |
//! | [`gpu`] | weights, kernels and one step's recording on a device, attention left out |
//! | [`cpu`] | the same on the CPU |
//! | [`attention`] | where model and cache meet: one step on either device |
//! | [`pool`] | keys and values on the model's device, and the plans it computes |
//! | [`frames`] | the same for a program that draws frames, in its own encoder and without waiting |
//! | [`sample`] | the next token from a row of logits |
//! | [`engine`] | the loop: schedule, compute, choose, commit |
//! | [`options`] | what several programs' command lines choose |

pub mod attention;
pub mod chat;
pub mod config;
pub mod cpu;
pub mod engine;
pub mod error;
pub mod frames;
pub mod gguf;
pub mod gpu;
pub mod options;
pub mod pool;
pub mod sample;
#[cfg(test)]
mod synthetic;
pub mod tokenizer;
#[cfg(test)]
mod windowed;
