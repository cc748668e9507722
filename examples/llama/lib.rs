//! A Llama-architecture language model from a GGUF file, with `paged-kv` as its cache.
//!
//! This is the part of the examples that an application brings itself: the loader, the tokenizer, the kernels between one
//! attention and the next, and the choice of tokens. Attention and the cache are `paged-kv`'s.
//!
//! | module | owns |
//! |---|---|
//! | [`gguf`], [`config`] | the file: metadata, tensors as f32, sizes checked |
//! | [`tokenizer`], [`chat`] | text to tokens and back; turns of a conversation |
//! | [`gpu`] | weights, kernels and one step's recording on a device |
//! | [`sample`] | the next token from a row of logits |

pub mod chat;
pub mod config;
pub mod error;
pub mod gguf;
pub mod gpu;
pub mod sample;
pub mod tokenizer;
