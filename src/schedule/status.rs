//! What each sequence is doing, seen from outside: for programs that show or log it.

use crate::ids::{BlockId, SequenceId};
use crate::schedule::admission::Lacking;
use crate::schedule::blocks;
use crate::schedule::request::WaitReason;
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence::State;

/// A sequence as it is between two calls of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceStatus<'a> {
    /// In line, running, or kept.
    pub state: State,
    /// Tokens that it has: input and generated ones.
    pub tokens: u32,
    /// Those whose keys and values are stored, those of the host pool included; the outstanding step's are not.
    pub computed_tokens: u32,
    /// Its blocks in the pool, as [`KvCache::block_ids`](crate::KvCache::block_ids) has them: `blocks[i]` holds the
    /// tokens from `i * block_size` on, where no window has left blocks behind. Those that the outstanding step writes
    /// are among them.
    pub blocks: &'a [BlockId],
    /// Its blocks in the host pool, which follow them.
    pub host_blocks: u32,
    /// How often it was preempted in its current turn.
    pub preemptions: u32,
    /// Why it waits in line, or had no rows in the step that was planned last although it runs.
    pub waits_for: Option<WaitReason>,
}

impl Scheduler {
    /// What a sequence that waits, runs or is kept is doing; none for any other. Allocates nothing.
    ///
    /// Samples of one prompt are one sequence until their first tokens are committed: until then the first one that has
    /// not been aborted stands for all of them, and there is no status of the others.
    ///
    /// # Complexity
    /// O(log sequences).
    pub fn status(&self, sequence: impl Into<SequenceId>) -> Option<SequenceStatus<'_>> {
        let sequence = &self.sequences[self.sequences.find(sequence.into())?];
        Some(SequenceStatus {
            state: sequence.state(),
            tokens: sequence.tokens_left().len() as u32,
            computed_tokens: sequence.computed(),
            blocks: sequence.table().and_then(|table| self.cache.block_ids(table).ok()).unwrap_or_default(),
            host_blocks: blocks::returning(&self.cache, sequence.table()),
            preemptions: sequence.preemptions,
            waits_for: match (sequence.lacking, sequence.state()) {
                (Some(lacking), _) => Some(self.wait_reason(lacking)),
                (None, State::Waiting) => Some(WaitReason::Line),
                (None, _) => None,
            },
        })
    }

    pub(super) fn wait_reason(&self, lacking: Lacking) -> WaitReason {
        match lacking {
            Lacking::Blocks { needed, available } => WaitReason::Blocks { needed, available },
            Lacking::Table => WaitReason::Tables,
            Lacking::Transfers => WaitReason::Transfers { steps: self.cache.num_transfers() },
            Lacking::Prompt(other) => WaitReason::EqualPrompt { sequence: self.sequences[other].id() },
            Lacking::Budget => WaitReason::Budget,
        }
    }
}
