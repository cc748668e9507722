//! Names for things: blocks, tables, sequences, steps, tokens.
//!
//! Each id is a newtype so that a block is never taken for a slot, nor a table for a sequence. Ids are cheap to copy and
//! carry no meaning of their own beyond what is written here.

use std::fmt;

/// A token as the model's vocabulary numbers it.
pub type TokenId = u32;

/// The slot of a padding row: the append kernel writes nothing for it.
///
/// It is larger than any slot a cache can have, and it is compared for equality before any address is computed.
pub const PADDING_SLOT: u32 = u32::MAX;

/// A physical block: the same place in every arena, `0..num_blocks`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub(crate) u32);

impl BlockId {
    /// The block with this index. A pool may have fewer: each function that takes a block id says what it makes of one
    /// that the pool lacks.
    pub fn new(index: u32) -> Self {
        Self(index)
    }

    /// The block's index, `0..num_blocks`, as shaders see it.
    pub fn index(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}", self.0)
    }
}

/// A block table of a [`KvCache`](crate::KvCache): the key-value state of one sequence.
///
/// It knows the cache that opened it, and every other one refuses it. The generation makes a released id stale: using it
/// again is refused, even when its row has a new owner.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TableId {
    /// The [instance](crate::KvCache::instance) of its cache.
    pub(crate) cache: u64,
    pub(crate) row: u32,
    pub(crate) generation: u32,
}

impl TableId {
    /// The row that this table has on the device, `0..max_sequences`.
    pub fn row(self) -> u32 {
        self.row
    }
}

impl fmt::Debug for TableId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "table {}#{}", self.row, self.generation)
    }
}

/// One request as [`Scheduler::add`](crate::Scheduler::add) took it; never reused within a scheduler, and refused by every
/// other one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId {
    /// [`KvCache::instance`](crate::KvCache::instance) of the scheduler's cache; 0 for an application's own.
    pub(crate) scheduler: u64,
    pub(crate) number: u64,
}

impl RequestId {
    /// A request id of an application that has its own scheduler and only builds steps.
    pub fn from_raw(id: u64) -> Self {
        Self { scheduler: 0, number: id }
    }

    /// The number behind the id, counted from 1 within its scheduler.
    pub fn raw(self) -> u64 {
        self.number
    }

    pub(crate) fn scheduler(self) -> u64 {
        self.scheduler
    }

    /// The `index`-th sample of this request, `0..samples`.
    pub fn sample(self, index: u32) -> SequenceId {
        SequenceId { request: self, sample: index }
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.number)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number)
    }
}

/// One sequence: a sample of a request. A request with one sample is its own sequence (`From<RequestId>`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    pub(crate) request: RequestId,
    pub(crate) sample: u32,
}

impl SequenceId {
    /// The request that this sequence belongs to.
    pub fn request(self) -> RequestId {
        self.request
    }

    /// Which of the request's samples this is, `0..samples`.
    pub fn sample(self) -> u32 {
        self.sample
    }
}

impl From<RequestId> for SequenceId {
    fn from(request: RequestId) -> Self {
        request.sample(0)
    }
}

impl fmt::Debug for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}.{}", self.request.number, self.sample)
    }
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.request.number, self.sample)
    }
}

/// A planned step; grows by one with every plan, dropped ones included.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct StepId(pub(crate) u64);

impl StepId {
    /// The number of the step, counted from 1.
    pub fn raw(self) -> u64 {
        self.0
    }
}
