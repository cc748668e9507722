#![cfg_attr(feature = "wgpu", doc = include_str!("docs/links.md"))]
#![cfg_attr(feature = "wgpu", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "wgpu"),
    doc = "The host core of `paged-kv`: cache, scheduler and CPU twins, without wgpu."
)]

#[macro_use]
mod faults;

mod cache;
mod config;
#[cfg(all(feature = "wgpu", any(doc, doctest)))]
pub mod docs;
mod error;
#[cfg(feature = "wgpu")]
mod gpu;
mod ids;
mod layout;
mod logits;
mod model;
mod reach;
pub mod reference;
mod schedule;
mod stacks;

pub use cache::{BlockCopy, BlockState, BlockSwap, CacheStats, KvCache, MissReason, Namespace, Retention};
pub use config::{CacheConfig, DEFAULT_BLOCK_SIZE, DEFAULT_MAX_SEQUENCES};
pub use error::{CacheError, CommitError, ConfigError, Error, PlanTextError, PlanTextFault, RequestError};
pub use ids::{BlockId, PADDING_SLOT, RequestId, SequenceId, StepId, TableId, TokenId};
pub use layout::{ArenaLayout, BlockLayout, KvPart, LayerPlace, MAX_ARENA_BYTES, MAX_BLOCK_SIZE};
pub use logits::LogitRule;
pub use model::{KvFormat, KvType, LayerGroup, MAX_HEAD_DIM, ModelShape};
pub use reach::Reach;
pub use schedule::{
    Admission, DIRECT, DecodeItem, DuplicatePrompts, FinishReason, LogitRow, MergeItem, MissCounts,
    Preemption, PreemptionMode, PreemptionReason, PrefillItem, PrefixCacheConfig, PrefixReport, Priority,
    Rates, Request, RowGroup, RowResult, Schedule, Scheduler, SchedulerConfig, SchedulerStats, SequenceState,
    SequenceStatus, SplitConfig, StackPlan, StepBuilder, StepEvent, StepPlan, TableChange, TransferReport,
    VictimPolicy, WaitReason, WorkSplit,
};

pub use stacks::{GroupLayout, MAX_PADDING_PERCENT};

#[cfg(feature = "faults")]
#[doc(hidden)]
pub use faults::Fault;

#[cfg(feature = "wgpu")]
pub use error::{BindError, DeviceError, PlanFault, PrepareError, RecordError};
#[cfg(feature = "wgpu")]
#[doc(hidden)]
pub use gpu::shaders;
#[cfg(feature = "wgpu")]
pub use gpu::{
    ActivationType, AttentionOptions, AttentionStats, BoundTensors, LayerTensors, PagedAttention,
    PreparedStep, ShaderVariant, TensorSlice, recommended_features, recommended_limits,
    recommended_scheduler_config,
};
/// The wgpu that this version of the library is built on.
#[cfg(feature = "wgpu")]
pub use wgpu;
