//! What can be wrong with a model file, and with running it.
//!
//! Every message is one line, lower case, and carries the numbers or names needed to act, because the examples
//! print it as it is and leave with exit status 2.

use std::{fmt, io};

use paged_kv::{
    BindError, CommitError, ConfigError, DeviceError, PrepareError, RecordError, RequestError, WaitReason,
};

use crate::gpu::GpuError;

/// Why a GGUF file cannot be used as a model.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// The file cannot be opened or read.
    Io {
        /// The file as the user named it.
        file: String,
        /// What the operating system said.
        source: io::Error,
    },
    /// The file does not start with GGUF's magic number.
    NotGguf {
        /// The file as the user named it.
        file: String,
    },
    /// The file ends before its header, or a tensor that its header promises, does.
    Truncated {
        /// The file as the user named it.
        file: String,
        /// Bytes that the header says the file has, if the header itself is whole.
        needed_bytes: Option<u64>,
        /// Bytes that the file has.
        actual_bytes: u64,
    },
    /// The header or a tensor cannot be decoded.
    Malformed {
        /// The file as the user named it.
        file: String,
        /// What the reader said.
        source: candle_core::Error,
    },
    /// The model is of another architecture.
    Architecture {
        /// `general.architecture` of the file.
        found: String,
        /// Those that are supported.
        known: &'static [&'static str],
    },
    /// The metadata lacks a key without which the model cannot be run.
    MissingKey {
        /// The key.
        key: String,
    },
    /// A metadata value is of the wrong type, or out of range.
    BadValue {
        /// The key.
        key: String,
        /// What its value should be.
        expected: &'static str,
    },
    /// The model asks for something that the forward pass here does not do.
    Unsupported {
        /// What it asks for, with its metadata key or tensor name.
        what: String,
    },
    /// A number that must divide evenly does not.
    NotMultiple {
        /// What the number counts.
        what: &'static str,
        /// The number.
        value: u32,
        /// What it must be a multiple of.
        of: u32,
    },
    /// A tensor that the architecture needs is not in the file.
    MissingTensor {
        /// The tensor's name.
        name: String,
    },
    /// A tensor's size disagrees with the metadata.
    WrongShape {
        /// The tensor's name.
        name: String,
        /// Rows and columns (or one length) that the metadata asks for.
        expected: Vec<usize>,
        /// What the file has.
        found: Vec<usize>,
    },
    /// The tokenizer's data does not make a tokenizer.
    Tokenizer {
        /// What is wrong with it.
        reason: String,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { file, source } => write!(out, "cannot read {file}: {source}"),
            Self::NotGguf { file } => write!(out, "{file} is not a GGUF file"),
            Self::Truncated { file, needed_bytes: Some(needed), actual_bytes } => {
                write!(
                    out,
                    "{file} is truncated: its header describes {needed} bytes, the file has {actual_bytes}"
                )
            }
            Self::Truncated { file, needed_bytes: None, actual_bytes } => {
                write!(out, "{file} is truncated: it ends within its header, after {actual_bytes} bytes")
            }
            Self::Malformed { file, source } => {
                // The reader quotes names from the file, which may be anything.
                let reason = source.to_string();
                let line: String = reason.chars().take_while(|letter| !letter.is_control()).collect();
                write!(out, "{file} cannot be decoded: {line}")
            }
            Self::Architecture { found, known } => {
                let known: Vec<String> = known.iter().map(|name| format!("{name:?}")).collect();
                write!(
                    out,
                    "the model's architecture is {found:?}, only {} are supported",
                    known.join(" and ")
                )
            }
            Self::MissingKey { key } => write!(out, "the model's metadata has no {key}"),
            Self::BadValue { key, expected } => write!(out, "the model's {key} is not {expected}"),
            Self::Unsupported { what } => write!(out, "the model needs {what}, which is not supported"),
            Self::NotMultiple { what, value, of } => {
                write!(out, "the model's {what} is {value}, which is not a multiple of {of}")
            }
            Self::MissingTensor { name } => write!(out, "the model has no tensor {name}"),
            Self::WrongShape { name, expected, found } => {
                write!(
                    out,
                    "the model's tensor {name} has shape {found:?}, its metadata asks for {expected:?}"
                )
            }
            Self::Tokenizer { reason } => write!(out, "the model's tokenizer cannot be built: {reason}"),
        }
    }
}

impl std::error::Error for LoadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Malformed { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// Why a model does not run.
#[derive(Debug)]
#[non_exhaustive]
pub enum RunError {
    /// The model file cannot be used.
    Load(LoadError),
    /// The device lacks something, or failed.
    Gpu(GpuError),
    /// The cache cannot have this shape or size, or the options contradict each other.
    Config(ConfigError),
    /// A prompt cannot be taken.
    Request(RequestError),
    /// The cache's device part refuses the device or a step.
    Attention(Box<dyn std::error::Error + Send + Sync>),
    /// A product on the CPU failed.
    Cpu(candle_core::Error),
    /// The pool is larger than the host's memory.
    PoolExceedsMemory {
        /// Bytes that it takes.
        bytes: u64,
    },
    /// The host pool is larger than the host's memory.
    HostPoolExceedsMemory {
        /// Bytes that it takes.
        bytes: u64,
    },
    /// Requests wait although nothing runs.
    Stuck {
        /// What for.
        reason: WaitReason,
    },
}

impl RunError {
    /// Whether the user's input is to blame, rather than the device or this program.
    pub fn is_wrong_input(&self) -> bool {
        matches!(
            self,
            Self::Load(_)
                | Self::Config(_)
                | Self::Request(_)
                | Self::PoolExceedsMemory { .. }
                | Self::HostPoolExceedsMemory { .. }
        )
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load(error) => error.fmt(out),
            Self::Gpu(error) => error.fmt(out),
            Self::Config(error) => error.fmt(out),
            Self::Request(error) => error.fmt(out),
            Self::Attention(error) => error.fmt(out),
            Self::Cpu(error) => write!(out, "a product failed: {error}"),
            Self::PoolExceedsMemory { bytes } => {
                write!(out, "there is no memory for a pool of {bytes} bytes")
            }
            Self::HostPoolExceedsMemory { bytes } => {
                write!(out, "there is no memory for a host pool of {bytes} bytes")
            }
            Self::Stuck { reason } => write!(out, "nothing runs and requests wait: {reason:?}"),
        }
    }
}

impl std::error::Error for RunError {}

impl From<LoadError> for RunError {
    fn from(error: LoadError) -> Self {
        Self::Load(error)
    }
}

impl From<GpuError> for RunError {
    fn from(error: GpuError) -> Self {
        match error {
            GpuError::Load(error) => Self::Load(error),
            error => Self::Gpu(error),
        }
    }
}

impl From<candle_core::Error> for RunError {
    fn from(error: candle_core::Error) -> Self {
        Self::Cpu(error)
    }
}

impl From<ConfigError> for RunError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl From<RequestError> for RunError {
    fn from(error: RequestError) -> Self {
        Self::Request(error)
    }
}

impl From<paged_kv::Error> for RunError {
    fn from(error: paged_kv::Error) -> Self {
        match error {
            paged_kv::Error::Config(error) => Self::Config(error),
            paged_kv::Error::Request(error) => Self::Request(error),
            error => Self::Attention(Box::new(error)),
        }
    }
}

impl From<DeviceError> for RunError {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Config(error) => Self::Config(error),
            error => Self::Attention(Box::new(error)),
        }
    }
}

impl From<BindError> for RunError {
    fn from(error: BindError) -> Self {
        Self::Attention(Box::new(error))
    }
}

impl From<PrepareError> for RunError {
    fn from(error: PrepareError) -> Self {
        Self::Attention(Box::new(error))
    }
}

impl From<RecordError> for RunError {
    fn from(error: RecordError) -> Self {
        Self::Attention(Box::new(error))
    }
}

impl From<CommitError> for RunError {
    fn from(error: CommitError) -> Self {
        Self::Attention(Box::new(error))
    }
}
