//! What goes into the scheduler and what comes out: requests, configuration, results, events.

use crate::cache::CacheStats;
use crate::config::CacheConfig;
use crate::error::ConfigError;
use crate::ids::{SequenceId, TokenId};
use crate::schedule::step_plan::StepPlan;
use std::fmt;

/// A prompt and how to go on from it; also a chat's next turn ([`Scheduler::extend`](crate::Scheduler::extend)) and a
/// branch ([`Scheduler::fork`](crate::Scheduler::fork)).
///
/// ```
/// let request = paged_kv::Request::new([1, 2, 3]).max_new_tokens(256).stop_tokens(&[2]).keep(true);
/// # let _ = request;
/// ```
#[derive(Clone, Debug)]
pub struct Request {
    pub(super) tokens: Vec<TokenId>,
    pub(super) max_new_tokens: Option<u32>,
    pub(super) stop_tokens: Vec<TokenId>,
    pub(super) samples: u32,
    pub(super) keep: bool,
}

impl Request {
    /// A request with these input tokens, one sample, no stop tokens, and as many new tokens as the context holds.
    pub fn new(tokens: impl Into<Vec<TokenId>>) -> Self {
        Self { tokens: tokens.into(), max_new_tokens: None, stop_tokens: Vec::new(), samples: 1, keep: false }
    }

    /// At most `max` new tokens; with 0 the input is computed, and kept if asked, but nothing is generated. Without
    /// this, generation ends with [`FinishReason::ContextFull`] at the latest.
    pub fn max_new_tokens(mut self, max: u32) -> Self {
        self.max_new_tokens = Some(max);
        self
    }

    /// Tokens that end the sequence. The stop token is reported and belongs to the sequence.
    pub fn stop_tokens(mut self, tokens: &[TokenId]) -> Self {
        self.stop_tokens = tokens.to_vec();
        self
    }

    /// `samples` answers to one prompt, which is computed once; their sequences are `request.sample(0..samples)`.
    pub fn samples(mut self, samples: u32) -> Self {
        self.samples = samples;
        self
    }

    /// Keeps the sequence when it has finished, to be extended or forked. Its blocks stay while nobody needs them.
    pub fn keep(mut self, keep: bool) -> Self {
        self.keep = keep;
        self
    }
}

/// When a request is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Every admitted sequence can grow to its declared maximum: nothing is ever preempted (I8).
    Guaranteed,
    /// A request is let in when its tokens fit and `watermark_blocks` stay free; sequences that outgrow the pool are
    /// preempted, and computed again later. The watermark does not hold back the only request.
    Overcommitted {
        /// Blocks left free at admission; less than the pool has.
        watermark_blocks: u32,
    },
}

/// Budgets and policies of a [`Scheduler`](crate::Scheduler).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Rows (new tokens) per step; at least 1.
    pub step_tokens: u32,
    /// (row, key) pairs per step: the sum over rows of the keys they see. A single row may exceed it.
    pub step_work_budget: u64,
    /// Sequences that run at a time, samples counted one by one; at most the cache's `max_sequences`, which is what
    /// `None` stands for.
    pub max_running: Option<u32>,
    /// When a request is let in.
    pub admission: Admission,
    /// Tokens reserved beyond every running sequence, for drafts; what is unused returns at commit.
    pub lookahead: u32,
    /// How often a sequence may be preempted. At the bound it is let in again only with everything it may still need
    /// reserved, and is not preempted any more (I9).
    pub max_preemptions: u32,
}

impl Default for SchedulerConfig {
    /// 512 rows and 2^24 (row, key) pairs a step, guaranteed admission, no lookahead, at most 3 preemptions.
    fn default() -> Self {
        Self {
            step_tokens: 512,
            step_work_budget: 1 << 24,
            max_running: None,
            admission: Admission::Guaranteed,
            lookahead: 0,
            max_preemptions: 3,
        }
    }
}

impl SchedulerConfig {
    pub(super) fn validate(&self, cache: &CacheConfig) -> Result<(), ConfigError> {
        for (field, zero) in [
            ("step_tokens", self.step_tokens == 0),
            ("step_work_budget", self.step_work_budget == 0),
            ("max_running", self.max_running == Some(0)),
        ] {
            if zero {
                return Err(ConfigError::Zero { field });
            }
        }
        let max_sequences = cache.max_sequences();
        match self.max_running {
            Some(max_running) if max_running > max_sequences => {
                return Err(ConfigError::MaxRunning { max_running, max_sequences });
            }
            _ => {}
        }
        match self.admission {
            Admission::Overcommitted { watermark_blocks } if watermark_blocks >= cache.num_blocks() => {
                Err(ConfigError::Watermark { watermark_blocks, num_blocks: cache.num_blocks() })
            }
            _ => Ok(()),
        }
    }
}

/// What [`Scheduler::schedule`](crate::Scheduler::schedule) found to do.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one value per step, taken apart at once")]
pub enum Schedule {
    /// A step to record, submit and commit.
    Step(StepPlan),
    /// Nothing can be computed now.
    Waiting(WaitReason),
    /// Nothing is left to do.
    Idle,
}

/// Why there is no step although requests wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitReason {
    /// The first request in line needs blocks that are not free.
    Blocks {
        /// Blocks it needs.
        needed: u32,
        /// Blocks that are free.
        available: u32,
    },
    /// An invariant was found broken: `commit` and `add` return the error.
    Poisoned,
}

/// What the application made of one of the plan's logit rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RowResult {
    /// The next token.
    Token(TokenId),
    /// Drafts were verified: the first `rows` of them hold, and `next` follows.
    Accepted {
        /// Drafts that hold, `0..=drafts`.
        rows: u32,
        /// The token after them.
        next: TokenId,
    },
    /// The logits cannot be used (NaN, say): the sequence ends and its blocks are not reused as content.
    Invalid,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// A stop token.
    Stop,
    /// As many new tokens as asked for.
    MaxTokens,
    /// The cache's longest sequence.
    ContextFull,
    /// The application ended it.
    Aborted,
    /// Its logits were [`RowResult::Invalid`].
    Invalid,
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stop => "stop",
            Self::MaxTokens => "max_tokens",
            Self::ContextFull => "context_full",
            Self::Aborted => "aborted",
            Self::Invalid => "invalid",
        })
    }
}

/// What a commit did, in the order in which it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StepEvent {
    /// A sequence has a new token.
    Token {
        /// The sequence.
        sequence: SequenceId,
        /// The token.
        token: TokenId,
    },
    /// A sequence ended.
    Finished {
        /// The sequence.
        sequence: SequenceId,
        /// Why.
        reason: FinishReason,
        /// How often it was preempted.
        preemptions: u32,
    },
}

/// Counters of a scheduler since it was made, and the cache as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SchedulerStats {
    /// Steps committed.
    pub steps: u64,
    /// Rows committed for the first time that were input tokens.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Rows committed again after a preemption.
    pub recomputed_tokens: u64,
    /// Sequences preempted.
    pub preemptions: u64,
    /// Kept sequences whose blocks were taken; they are computed again when they are extended.
    pub reclaimed: u64,
    /// Sequences running.
    pub running: u32,
    /// Sequences waiting.
    pub waiting: u32,
    /// Sequences kept.
    pub kept: u32,
    /// Most slots that last blocks left unused after a commit.
    pub tail_waste_tokens_peak: u64,
    /// The pool.
    pub cache: CacheStats,
}
