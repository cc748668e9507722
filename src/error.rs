//! What can go wrong, one enum per group of verbs, each variant with the numbers needed to act.
//!
//! User mistakes and device limits are errors. A full pool is not: the scheduler waits or preempts. A broken invariant
//! is neither: it panics in debug builds and comes back as a poisoned cache in release builds.

#[cfg(feature = "wgpu")]
mod gpu;
#[cfg(feature = "wgpu")]
mod plan_fault;
mod plan_text;

#[cfg(feature = "wgpu")]
pub use gpu::{BindError, DeviceError, PrepareError, RecordError};
#[cfg(feature = "wgpu")]
pub use plan_fault::PlanFault;
pub use plan_text::{PlanTextError, PlanTextFault};

use crate::ids::{SequenceId, StepId, TableId};
use std::fmt;

/// Why a cache cannot have the asked shape or size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// A number that must be at least one is zero.
    Zero {
        /// Its name.
        field: &'static str,
    },
    /// A layer of the model is in no group of layers, or in two.
    Layers {
        /// Its index, or that of the first one after it that has none.
        layer: u32,
        /// Layers of all groups.
        num_layers: u32,
    },
    /// A model of several groups of layers has too many.
    TooManyLayers {
        /// Layers of all groups.
        num_layers: u32,
        /// Most that are possible.
        max: u32,
    },
    /// One pool of equal blocks would serve these groups of layers badly.
    Padding {
        /// The share of all blocks that no layer would use, in percent.
        padding_percent: u32,
        /// The most that is accepted.
        max_percent: u32,
        /// The group that would leave most of its blocks unused.
        group: u32,
        /// Bytes of keys and values of a token in one of its layers.
        row_bytes: u64,
        /// Bytes that would fill the blocks: rows padded to these, in a head size or a type, waste nothing there.
        filling_row_bytes: u64,
    },
    /// A rule of logits has numbers for more or fewer query heads than there are.
    PerHead {
        /// Which numbers.
        what: &'static str,
        /// How many there are.
        given: u64,
        /// One for each query head, or for each of each layer of the group.
        needed: u64,
    },
    /// A number of a rule of logits is not finite, or not positive where it must be.
    LogitNumber {
        /// Which number.
        what: &'static str,
        /// Its index, where there are several.
        index: u64,
    },
    /// More query heads have numbers of their own, slopes or learned sinks, than the kernels serve.
    NumberedHeads {
        /// Query heads asked for.
        num_query_heads: u32,
        /// Most that are served.
        max: u32,
    },
    /// Query heads are not a multiple of kv heads.
    HeadRatio {
        /// Query heads asked for.
        num_query_heads: u32,
        /// Key and value heads asked for.
        num_kv_heads: u32,
    },
    /// The head size is not a multiple of 8 from 8 to `max`.
    HeadDim {
        /// Elements asked for.
        head_dim: u32,
        /// Largest supported.
        max: u32,
    },
    /// The block size is not a power of two from 1 to `max`.
    BlockSize {
        /// Tokens asked for.
        block_size: u32,
        /// Largest supported.
        max: u32,
    },
    /// The bytes do not hold one block and the block tables.
    TooFewBytes {
        /// Bytes given.
        bytes: u64,
        /// Bytes of one block and the tables.
        needed_bytes: u64,
    },
    /// The pool would have more slots than 32 bits can number.
    TooManySlots {
        /// Slots asked for.
        slots: u64,
        /// Most that are possible.
        max: u64,
    },
    /// A size does not fit its integer.
    Overflow {
        /// Which size.
        what: &'static str,
    },
    /// More sequences may run than there are block tables.
    MaxRunning {
        /// Sequences asked for.
        max_running: u32,
        /// Tables of the cache.
        max_sequences: u32,
    },
    /// The watermark leaves no block to use.
    Watermark {
        /// Blocks to be left free.
        watermark_blocks: u32,
        /// Blocks of the pool.
        num_blocks: u32,
    },
    /// One layer's blocks do not fit into a storage buffer of the device.
    LayerExceedsArena {
        /// Bytes of one layer's blocks.
        layer_bytes: u64,
        /// Bytes that a buffer and its binding may have.
        max_bytes: u64,
        /// Blocks that would fit.
        max_blocks: u64,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Zero { field } => write!(f, "{field} is zero, it must be at least 1"),
            Self::Layers { layer, num_layers } => {
                write!(f, "layer {layer} of {num_layers} is in no group of layers, or in two")
            }
            Self::TooManyLayers { num_layers, max } => {
                write!(f, "{num_layers} layers of several groups exceed {max}")
            }
            Self::Padding { padding_percent, max_percent, group, row_bytes, filling_row_bytes } => write!(
                f,
                "{padding_percent} % of all blocks would be padding, {max_percent} are accepted: group {group} has rows of \
                 {row_bytes} bytes, and rows of {filling_row_bytes} would fill its blocks"
            ),
            Self::PerHead { what, given, needed } => {
                write!(f, "{given} {what} are given, {needed} are needed")
            }
            Self::LogitNumber { what, index } => {
                write!(f, "number {index} of the {what} is not finite, or not positive where it must be")
            }
            Self::NumberedHeads { num_query_heads, max } => {
                write!(f, "{num_query_heads} query heads have slopes or learned sinks, at most {max} may")
            }
            Self::HeadRatio { num_query_heads, num_kv_heads } => {
                write!(f, "{num_query_heads} query heads are not a multiple of {num_kv_heads} kv heads")
            }
            Self::HeadDim { head_dim, max } => {
                write!(f, "head size {head_dim} is not a multiple of 8 from 8 to {max}")
            }
            Self::BlockSize { block_size, max } => {
                write!(f, "block size {block_size} is not a power of two from 1 to {max}")
            }
            Self::TooFewBytes { bytes, needed_bytes } => {
                write!(
                    f,
                    "{bytes} bytes do not hold one block, which takes {needed_bytes} with the block tables"
                )
            }
            Self::TooManySlots { slots, max } => {
                write!(f, "a pool of {slots} slots exceeds the {max} that 32 bits can number")
            }
            Self::Overflow { what } => write!(f, "the {what} exceeds its integer type"),
            Self::MaxRunning { max_running, max_sequences } => {
                write!(f, "{max_running} sequences cannot run on {max_sequences} block tables")
            }
            Self::Watermark { watermark_blocks, num_blocks } => {
                write!(f, "a watermark of {watermark_blocks} blocks leaves none of {num_blocks} to use")
            }
            Self::LayerExceedsArena { layer_bytes, max_bytes, max_blocks } => write!(
                f,
                "one layer takes {layer_bytes} bytes but a storage buffer may have {max_bytes}: \
                 enable a higher max_storage_buffer_binding_size and max_buffer_size, or use at most {max_blocks} blocks"
            ),
        }
    }
}

impl std::error::Error for ConfigError {}

/// Why the cache refuses an operation. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheError {
    /// The pool has too few free blocks.
    NoFreeBlocks {
        /// Blocks needed.
        needed: u32,
        /// Blocks free.
        available: u32,
    },
    /// A table cannot hold that many tokens.
    ExceedsTable {
        /// Tokens asked for.
        tokens: u32,
        /// Tokens that the table may grow to.
        max_tokens: u32,
    },
    /// All block tables are taken.
    NoFreeTable {
        /// Tables of the cache.
        max_sequences: u32,
    },
    /// The table was released.
    UnknownTable {
        /// The stale id.
        table: TableId,
    },
    /// The table is another cache's.
    ForeignTable {
        /// The table.
        table: TableId,
        /// This cache.
        cache: u64,
    },
    /// A window has left behind what the tokens after such a length see.
    BehindWindow {
        /// The table.
        table: TableId,
        /// The length asked for.
        tokens: u32,
        /// The shortest length beyond it that the table can be cut to, or shared up to.
        shortest: u32,
    },
    /// The outstanding step writes through the table.
    InStep {
        /// The table.
        table: TableId,
        /// The step.
        step: StepId,
    },
    /// A position beyond the table's length.
    BeyondLength {
        /// Tokens asked for.
        tokens: u32,
        /// Tokens in the table.
        len: u32,
    },
    /// Blocks of the table are in the host pool: bring them back first.
    SwappedOut {
        /// The table.
        table: TableId,
        /// Its blocks there.
        blocks: u32,
    },
    /// Blocks of the table have not arrived in the host pool: report completed transfers first.
    InTransfer {
        /// The table.
        table: TableId,
    },
    /// The host pool has too few free blocks.
    HostPoolFull {
        /// Blocks needed.
        needed: u32,
        /// Blocks free.
        available: u32,
    },
    /// A push of no tokens.
    NoTokens {
        /// The table.
        table: TableId,
    },
    /// The step has ended, or another one has begun, since its [`StepBuilder`](crate::StepBuilder) was made.
    StepEnded {
        /// The step.
        step: StepId,
    },
    /// More rows than a step is padded to.
    TooManyRows {
        /// Rows asked for.
        rows: u32,
        /// Most that are possible.
        max_rows: u32,
    },
    /// Logits asked for rows that the step does not have.
    NoSuchRow {
        /// First row.
        row: u32,
        /// Number of rows.
        num_rows: u32,
        /// Rows of the step.
        rows: u32,
    },
    /// An invariant was found broken; the cache must be dropped. Please report it with the numbers.
    Poisoned {
        /// Which one.
        what: &'static str,
        /// Blocks of the pool.
        num_blocks: u32,
        /// Blocks on the free list.
        free: u32,
        /// Blocks counted as held.
        held: u32,
    },
}

impl fmt::Display for CacheError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoFreeBlocks { needed, available } => {
                write!(f, "{needed} blocks are needed and {available} are free")
            }
            Self::ExceedsTable { tokens, max_tokens } => {
                write!(f, "{tokens} tokens exceed the {max_tokens} that the block table was declared to hold")
            }
            Self::NoFreeTable { max_sequences } => write!(f, "all {max_sequences} block tables are taken"),
            Self::UnknownTable { table } => write!(f, "{table:?} was released"),
            Self::ForeignTable { table, cache } => {
                write!(f, "{table:?} belongs to cache {}, not to cache {cache}", table.cache)
            }
            Self::InStep { table, step } => {
                write!(f, "{table:?} is written by step {}, which is outstanding", step.raw())
            }
            Self::BehindWindow { table, tokens, shortest } => write!(
                f,
                "a window of {table:?} has left behind what follows its first {tokens} tokens: it can be cut to {shortest}"
            ),
            Self::BeyondLength { tokens, len } => {
                write!(f, "position {tokens} is beyond the {len} tokens of the table")
            }
            Self::SwappedOut { table, blocks } => {
                write!(f, "{blocks} blocks of {table:?} are in the host pool")
            }
            Self::InTransfer { table } => {
                write!(f, "blocks of {table:?} are still on their way to the host pool")
            }
            Self::HostPoolFull { needed, available } => {
                write!(f, "{needed} blocks of the host pool are needed and {available} are free")
            }
            Self::NoTokens { table } => write!(f, "no tokens were pushed to {table:?}"),
            Self::StepEnded { step } => write!(f, "step {} has ended while it was built", step.raw()),
            Self::TooManyRows { rows, max_rows } => {
                write!(f, "a step is padded to {max_rows} rows at most, not to {rows}")
            }
            Self::NoSuchRow { row, num_rows, rows } => {
                write!(f, "logits asked for {num_rows} rows from {row} on, of a step with {rows}")
            }
            Self::Poisoned { what, num_blocks, free, held } => {
                write!(
                    f,
                    "the cache is poisoned: {what}; of {num_blocks} blocks {free} are free and {held} held"
                )
            }
        }
    }
}

impl std::error::Error for CacheError {}

/// Why the scheduler refuses a request. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestError {
    /// No tokens at all.
    EmptyPrompt,
    /// Prompt and new tokens exceed the longest sequence of the cache.
    ExceedsContext {
        /// Tokens asked for.
        needed: u64,
        /// Tokens that a sequence may hold.
        max_tokens: u32,
    },
    /// The request would not fit if it had the whole pool.
    NeverFits {
        /// Blocks it needs.
        needed_blocks: u64,
        /// Blocks of the pool.
        num_blocks: u32,
    },
    /// No samples, or more than can run.
    Samples {
        /// Samples asked for.
        samples: u32,
        /// Most that are possible.
        max: u32,
    },
    /// No such sequence, or it has ended and was not kept.
    Unknown {
        /// The id.
        sequence: SequenceId,
    },
    /// Another scheduler took the request.
    Foreign {
        /// The request's number there.
        request: u64,
        /// [`KvCache::instance`](crate::KvCache::instance) of that scheduler's cache; 0 for an id that the application made.
        owner: u64,
        /// The same of this scheduler's cache.
        scheduler: u64,
    },
    /// Only kept sequences are extended.
    NotKept {
        /// The id.
        sequence: SequenceId,
    },
    /// What the sequence may need cannot be promised beside what is promised already.
    PromiseExceeded {
        /// Blocks that all promises would add up to.
        needed: u32,
        /// Blocks of the pool.
        available: u32,
    },
    /// A position beyond the sequence's tokens.
    BeyondLength {
        /// Position asked for.
        tokens: usize,
        /// Tokens of the sequence.
        len: usize,
    },
    /// More drafts than the configuration allows.
    TooManyDrafts {
        /// Drafts given.
        drafts: usize,
        /// Most that are allowed.
        max: u32,
    },
    /// The cache refused; see there.
    Cache(CacheError),
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmptyPrompt => f.write_str("the sequence has no tokens"),
            Self::ExceedsContext { needed, max_tokens } => {
                write!(f, "{needed} tokens exceed the {max_tokens} that a sequence may hold")
            }
            Self::NeverFits { needed_blocks, num_blocks } => {
                write!(f, "the request needs {needed_blocks} blocks and the pool has {num_blocks}")
            }
            Self::Samples { samples, max } => {
                write!(f, "{samples} samples were asked for, 1 to {max} are possible")
            }
            Self::Unknown { sequence } => write!(f, "there is no sequence {sequence}"),
            Self::Foreign { request, owner, scheduler } => write!(
                f,
                "request {request} belongs to the scheduler over cache {owner}, not to the one over cache {scheduler}"
            ),
            Self::NotKept { sequence } => write!(f, "sequence {sequence} has not finished, or was not kept"),
            Self::PromiseExceeded { needed, available } => {
                write!(f, "the promises would add up to {needed} blocks and the pool has {available}")
            }
            Self::BeyondLength { tokens, len } => {
                write!(f, "position {tokens} is beyond the sequence's {len} tokens")
            }
            Self::TooManyDrafts { drafts, max } => {
                write!(f, "{drafts} drafts exceed the {max} that are configured")
            }
            Self::Cache(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for RequestError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Cache(error) => Some(error),
            _ => None,
        }
    }
}

impl From<CacheError> for RequestError {
    fn from(error: CacheError) -> Self {
        Self::Cache(error)
    }
}

/// Why a plan cannot be committed. The step, if it is outstanding, is rolled back by the next `schedule`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommitError {
    /// The plan is not the outstanding one: it was rolled back, or committed before.
    StalePlan {
        /// The plan's step.
        step: StepId,
    },
    /// Another cache made the plan.
    ForeignPlan {
        /// The plan's cache.
        plan: u64,
        /// This cache.
        cache: u64,
    },
    /// Not one result per logit row.
    ResultCount {
        /// Logit rows of the plan.
        expected: usize,
        /// Results given.
        actual: usize,
    },
    /// More drafts were accepted than the row had.
    TooManyAccepted {
        /// The sequence.
        sequence: SequenceId,
        /// Drafts accepted.
        accepted: u32,
        /// Drafts planned.
        drafts: u32,
    },
    /// The cache refused; see there.
    Cache(CacheError),
}

impl fmt::Display for CommitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StalePlan { step } => {
                write!(f, "step {} is not outstanding: it was committed or rolled back", step.raw())
            }
            Self::ForeignPlan { plan, cache } => {
                write!(f, "the plan belongs to cache {plan}, not to cache {cache}")
            }
            Self::ResultCount { expected, actual } => {
                write!(f, "{actual} results were given for {expected} logit rows")
            }
            Self::TooManyAccepted { sequence, accepted, drafts } => {
                write!(f, "{accepted} of {drafts} drafts of sequence {sequence} were accepted")
            }
            Self::Cache(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CommitError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Cache(error) => Some(error),
            _ => None,
        }
    }
}

impl From<CacheError> for CommitError {
    fn from(error: CacheError) -> Self {
        Self::Cache(error)
    }
}

macro_rules! umbrella {
    ($($(#[doc = $doc:literal])* $(#[cfg($cfg:meta)])? $variant:ident($error:ty)),+ $(,)?) => {
        /// Any error of this crate, for callers that handle them alike.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Error {
            $($(#[doc = $doc])* $(#[cfg($cfg)])? $variant($error),)+
        }

        impl fmt::Display for Error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $($(#[cfg($cfg)])? Self::$variant(error) => error.fmt(f),)+
                }
            }
        }

        impl std::error::Error for Error {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                match self {
                    $($(#[cfg($cfg)])? Self::$variant(error) => Some(error),)+
                }
            }
        }

        $($(#[cfg($cfg)])? impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::$variant(error)
            }
        })+
    };
}

umbrella! {
    /// A shape or size.
    Config(ConfigError),
    /// An operation on the cache.
    Cache(CacheError),
    /// A request.
    Request(RequestError),
    /// A commit.
    Commit(CommitError),
    /// Creating the device part.
    #[cfg(feature = "wgpu")]
    Device(DeviceError),
    /// Binding tensors.
    #[cfg(feature = "wgpu")]
    Bind(BindError),
    /// Preparing a step.
    #[cfg(feature = "wgpu")]
    Prepare(PrepareError),
    /// Recording a step.
    #[cfg(feature = "wgpu")]
    Record(RecordError),
}
