//! What can be wrong with a model file, and with running it.
//!
//! Every message is one line, lower case, and carries the numbers or names needed to act, because the examples print it
//! as it is and leave with exit status 2.

use std::{fmt, io};

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
                write!(out, "{file} is truncated: its header describes {needed} bytes, the file has {actual_bytes}")
            }
            Self::Truncated { file, needed_bytes: None, actual_bytes } => {
                write!(out, "{file} is truncated: it ends within its header, after {actual_bytes} bytes")
            }
            Self::Malformed { file, source } => {
                let reason = source.to_string();
                write!(out, "{file} cannot be decoded: {}", reason.lines().next().unwrap_or_default())
            }
            Self::Architecture { found } => {
                write!(out, "the model's architecture is \"{found}\", only \"llama\" is supported")
            }
            Self::MissingKey { key } => write!(out, "the model's metadata has no {key}"),
            Self::BadValue { key, expected } => write!(out, "the model's {key} is not {expected}"),
            Self::Unsupported { what } => write!(out, "the model needs {what}, which is not supported"),
            Self::NotMultiple { what, value, of } => {
                write!(out, "the model's {what} is {value}, which is not a multiple of {of}")
            }
            Self::MissingTensor { name } => write!(out, "the model has no tensor {name}"),
            Self::WrongShape { name, expected, found } => {
                write!(out, "the model's tensor {name} has shape {found:?}, its metadata asks for {expected:?}")
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
