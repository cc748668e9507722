//! What can be wrong with a plan: numbers that no shader may see.

use std::error::Error;
use std::fmt;

/// A number of a [`StepPlan`](crate::StepPlan) that cannot be right. Only a bug in what made the plan brings one about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanFault {
    /// An array does not have the length that the others ask for.
    Length {
        /// Which array.
        array: &'static str,
        /// Its length.
        actual: u64,
        /// The length it must have.
        expected: u64,
    },
    /// The rows of a sequence end before they start or beyond the step's rows, or the first does not start at 0.
    QueryStarts {
        /// Index of the sequence.
        sequence: u32,
        /// First row.
        start: u32,
        /// End of its rows.
        end: u32,
    },
    /// A sequence has more rows than its context has tokens.
    RowsExceedContext {
        /// Index of the sequence.
        sequence: u32,
        /// Its rows.
        rows: u32,
        /// Its context length.
        context: u32,
    },
    /// A context is longer than the declared maximum.
    ContextTooLong {
        /// Index of the sequence.
        sequence: u32,
        /// Its context length.
        context: u32,
        /// Most tokens of a sequence.
        max: u32,
    },
    /// A block table does not exist.
    TableRow {
        /// The row asked for.
        table_row: u32,
        /// Number of tables.
        max_sequences: u32,
    },
    /// A context reaches beyond the block-table entries that the device has been given.
    EntriesUnknown {
        /// Index of the sequence.
        sequence: u32,
        /// Entries that its context needs.
        needed: u32,
        /// Entries that its table has.
        known: u32,
    },
    /// Changed entries do not lie within their table, or leave a gap before them.
    TableRange {
        /// Row of the table.
        table_row: u32,
        /// First changed entry.
        first_entry: u32,
        /// Number of changed entries.
        len: u32,
        /// Entries of the table that may be written: those known, or the table's capacity.
        entries: u32,
    },
    /// A block does not exist.
    BlockOutOfRange {
        /// The block.
        block: u32,
        /// Number of blocks.
        num_blocks: u32,
    },
    /// A slot does not exist.
    SlotOutOfRange {
        /// The row that it is for.
        row: u32,
        /// The slot.
        slot: u32,
        /// Number of slots.
        num_slots: u32,
    },
    /// Rows of two stacks of layers are written to one block.
    BlockOfTwoStacks {
        /// The block.
        block: u32,
    },
    /// Two rows are written to one slot.
    SlotTwice {
        /// The slot.
        slot: u32,
    },
    /// A row that belongs to no sequence has a slot.
    RowWithoutSequence {
        /// The row.
        row: u32,
    },
    /// A block is source and destination of copies of one step.
    CopyConflict {
        /// The block.
        block: u32,
    },
    /// A block is the destination of two copies.
    CopyDestinationTwice {
        /// The block.
        block: u32,
    },
    /// A slot of the host pool does not exist.
    HostSlotOutOfRange {
        /// The slot.
        host_slot: u32,
        /// Blocks in the host pool.
        host_blocks: u32,
    },
    /// A block leaves for the host pool twice, or is brought back twice.
    SwapTwice {
        /// The block.
        block: u32,
    },
    /// Two blocks go to one slot of the host pool, or come from one.
    HostSlotTwice {
        /// The slot.
        host_slot: u32,
    },
    /// A slot of the host pool is to give a block back and to take another one.
    HostSlotConflict {
        /// The slot.
        host_slot: u32,
    },
}

impl fmt::Display for PlanFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Length { array, actual, expected } => {
                write!(f, "{array} has {actual} entries instead of {expected}")
            }
            Self::QueryStarts { sequence, start, end } => {
                write!(f, "sequence {sequence} cannot have the rows {start}..{end}")
            }
            Self::RowsExceedContext { sequence, rows, context } => {
                write!(f, "sequence {sequence} has {rows} rows but a context of {context}")
            }
            Self::ContextTooLong { sequence, context, max } => {
                write!(f, "sequence {sequence} has a context of {context}, at most {max} were declared")
            }
            Self::TableRow { table_row, max_sequences } => {
                write!(f, "block table {table_row} does not exist, there are {max_sequences}")
            }
            Self::EntriesUnknown { sequence, needed, known } => {
                write!(f, "sequence {sequence} needs {needed} block-table entries, the device has {known}")
            }
            Self::TableRange { table_row, first_entry, len, entries } => {
                write!(
                    f,
                    "{len} entries from {first_entry} on do not fit the {entries} of block table {table_row}"
                )
            }
            Self::BlockOutOfRange { block, num_blocks } => {
                write!(f, "block {block} does not exist, there are {num_blocks}")
            }
            Self::SlotOutOfRange { row, slot, num_slots } => {
                write!(f, "slot {slot} of row {row} does not exist, there are {num_slots}")
            }
            Self::BlockOfTwoStacks { block } => {
                write!(f, "keys and values of two stacks of layers are written to block {block}")
            }
            Self::SlotTwice { slot } => write!(f, "two rows are written to slot {slot}"),
            Self::RowWithoutSequence { row } => write!(f, "row {row} belongs to no sequence but has a slot"),
            Self::CopyConflict { block } => {
                write!(f, "block {block} is both source and destination of a copy")
            }
            Self::CopyDestinationTwice { block } => {
                write!(f, "block {block} is the destination of two copies")
            }
            Self::HostSlotOutOfRange { host_slot, host_blocks } => {
                write!(f, "slot {host_slot} of the host pool does not exist, there are {host_blocks}")
            }
            Self::SwapTwice { block } => write!(f, "block {block} is swapped twice in one direction"),
            Self::HostSlotTwice { host_slot } => {
                write!(f, "slot {host_slot} of the host pool is used twice in one direction")
            }
            Self::HostSlotConflict { host_slot } => {
                write!(f, "slot {host_slot} of the host pool is to give a block and to take another one")
            }
        }
    }
}

impl Error for PlanFault {}
