//! What can go wrong, one enum per group of verbs, each variant with the numbers needed to act.
//!
//! User mistakes and device limits are errors. A full pool is not: the scheduler waits or preempts. A broken invariant
//! is neither: it panics in debug builds and comes back as a poisoned cache in release builds.

#[cfg(feature = "wgpu")]
mod gpu;

#[cfg(feature = "wgpu")]
pub use gpu::{BindError, DeviceError, PrepareError, RecordError};
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
    /// The bytes do not hold one block and its table entries.
    TooFewBytes {
        /// Bytes given.
        bytes: u64,
        /// Bytes of one block with its table entries.
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
                    "{bytes} bytes do not hold one block, which takes {needed_bytes} with its table entries"
                )
            }
            Self::TooManySlots { slots, max } => {
                write!(f, "a pool of {slots} slots exceeds the {max} that 32 bits can number")
            }
            Self::Overflow { what } => write!(f, "the {what} exceeds its integer type"),
            Self::LayerExceedsArena { layer_bytes, max_bytes, max_blocks } => write!(
                f,
                "one layer takes {layer_bytes} bytes but a storage buffer may have {max_bytes}: \
                 enable a higher max_storage_buffer_binding_size and max_buffer_size, or use at most {max_blocks} blocks"
            ),
        }
    }
}

impl std::error::Error for ConfigError {}
