//! Why a text is not a plan.

use std::error::Error;
use std::fmt;

/// Why a text cannot be read as a [`StepPlan`](crate::StepPlan), and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanTextError {
    /// The line, counted from 1; the last one where arrays do not fit each other.
    pub line: u32,
    /// What is wrong with it.
    pub fault: PlanTextFault,
}

/// What is wrong with a line of a plan's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanTextFault {
    /// The line is not the one that comes here, or is missing.
    Expected {
        /// What the line should be or begin with.
        field: &'static str,
    },
    /// An entry cannot be read.
    Entry {
        /// The line's field.
        field: &'static str,
        /// Index of the entry.
        index: u32,
    },
    /// An array does not have the length that the others ask for.
    Length {
        /// Which array.
        field: &'static str,
        /// Its length.
        len: u64,
        /// The length it must have.
        expected: u64,
    },
    /// The rows of a sequence end before they start, beyond the step's rows, or are more than its context.
    Rows {
        /// Index of the sequence.
        sequence: u32,
    },
}

impl fmt::Display for PlanTextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {} of the plan: {}", self.line, self.fault)
    }
}

impl fmt::Display for PlanTextFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Expected { field } => write!(f, "expected {field}"),
            Self::Entry { field, index } => write!(f, "entry {index} of {field} cannot be read"),
            Self::Length { field, len, expected } => {
                write!(f, "{field} has {len} entries instead of {expected}")
            }
            Self::Rows { sequence } => write!(f, "sequence {sequence} cannot have its rows"),
        }
    }
}

impl Error for PlanTextError {}
