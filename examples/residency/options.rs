//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use example_engine::options::Preempt;

/// Shows a paged key-value pool at work: chats that stream their answers, and every block that holds them.
///
/// Without --model, a toy model that is part of this program speaks.
#[derive(Debug, Parser)]
#[command(name = "residency")]
pub(crate) struct Options {
    /// A GGUF file; a toy model is built in.
    #[arg(long, value_name = "FILE")]
    pub(crate) model: Option<PathBuf>,

    /// Draw and compute on the first adapter whose name contains this; by default the best one.
    #[arg(long, value_name = "NAME")]
    pub(crate) adapter: Option<String>,

    /// Blocks in the pool.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) blocks: Option<u32>,

    /// Tokens per block: a power of two.
    #[arg(long, value_name = "P", default_value_t = paged_kv::DEFAULT_BLOCK_SIZE)]
    pub(crate) block_size: u32,

    /// How a chat whose blocks were taken gets them back.
    #[arg(long, value_enum, default_value = "swap")]
    pub(crate) preempt: Preempt,

    /// The colours of the window.
    #[arg(long, value_enum, default_value = "dark")]
    pub(crate) theme: Theme,

    /// Take a picture, as PNG, and end.
    #[arg(long, value_name = "FILE", requires = "frames")]
    pub(crate) screenshot: Option<PathBuf>,

    /// Of the frame that carries the N-th step, or of the first one in which there is nothing left to do.
    #[arg(long, value_name = "N", requires = "screenshot", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) frames: Option<u64>,

    /// Beside the picture, write as JSON which states it shows.
    #[arg(long, value_name = "FILE", requires = "screenshot")]
    pub(crate) states: Option<PathBuf>,
}

/// Light or dark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Theme {
    Dark,
    Light,
}
