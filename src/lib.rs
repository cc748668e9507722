#![doc = include_str!("../README.md")]

mod config;
mod error;
mod ids;
pub mod reference;
mod schedule;

pub use config::{
    ArenaLayout, BlockLayout, CacheConfig, DEFAULT_BLOCK_SIZE, DEFAULT_MAX_SEQUENCES, KvFormat, KvPart,
    KvType, MAX_ARENA_BYTES, MAX_BLOCK_SIZE, MAX_HEAD_DIM, ModelShape,
};
pub use error::ConfigError;
pub use ids::{BlockId, PADDING_SLOT, RequestId, SequenceId, StepId, TableId, TokenId};
pub use schedule::{
    BlockCopy, DIRECT, DecodeItem, LogitRow, MergeItem, PrefillItem, SplitConfig, StepPlan, TableChange,
    WorkSplit,
};
