//! What goes into the scheduler and what comes out: requests, configuration, results, events.

use crate::cache::{CacheStats, MissReason, Namespace, RetainRange, Retention};
use crate::config::{CacheConfig, DEFAULT_STEP_TOKENS};
use crate::error::ConfigError;
use crate::ids::{SequenceId, TokenId};
use crate::schedule::step_plan::StepPlan;
use std::fmt;
use std::ops::Range;

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
    pub(super) may_wait: bool,
    pub(super) priority: Priority,
    pub(super) namespace: Namespace,
    pub(super) retain: Vec<RetainRange>,
}

impl Request {
    /// A request with these input tokens, one sample, no stop tokens, and as many new tokens as the context holds.
    pub fn new(tokens: impl Into<Vec<TokenId>>) -> Self {
        Self {
            tokens: tokens.into(),
            max_new_tokens: None,
            stop_tokens: Vec::new(),
            samples: 1,
            keep: false,
            may_wait: false,
            priority: Priority::default(),
            namespace: Namespace::default(),
            retain: Vec::new(),
        }
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

    /// Keeps the sequence when it has finished, to be extended or forked. Its blocks stay while they are not needed.
    pub fn keep(mut self, keep: bool) -> Self {
        self.keep = keep;
        self
    }

    /// Whether a branch or a chat's next turn waits in line where its blocks cannot be promised at once, instead of
    /// [`RequestError::PromiseExceeded`](crate::RequestError::PromiseExceeded); only guaranteed admission asks. New requests
    /// always wait.
    pub fn may_wait(mut self, may_wait: bool) -> Self {
        self.may_wait = may_wait;
        self
    }
}

impl Request {
    /// Who goes first: in line, for rows, and when blocks are short.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// Whose blocks it may share through the prefix cache: those of requests with an equal namespace. A branch
    /// ([`Scheduler::fork`](crate::Scheduler::fork)) and a next turn have their sequence's.
    pub fn namespace(mut self, namespace: Namespace) -> Self {
        self.namespace = namespace;
        self
    }

    /// How the prefix cache keeps the blocks that lie within `tokens` (positions in the sequence) once no table holds
    /// them. With `ttl_steps` they are found for that many steps after the last one in which a sequence held them (with
    /// 0, not even in the next one), and what continues them is found no longer than they are. With `None` they are
    /// found for ever. Of ranges that overlap, the best counts.
    ///
    /// A system prompt that stays: `.retain(0..600, Retention::Pinned, None)`.
    pub fn retain(mut self, tokens: Range<u32>, retention: Retention, ttl_steps: Option<u32>) -> Self {
        self.retain.push(RetainRange { tokens, retention, ttl_steps });
        self
    }
}

/// Who goes first.
///
/// A request stands in line as if it had arrived [`ageing_steps`](SchedulerConfig::ageing_steps) later for each class
/// below the first. So no request waits for ever: only what arrives within that time goes before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// A person is watching.
    Interactive,
    /// The default.
    #[default]
    Normal,
    /// Whenever nothing else needs the device.
    Idle,
}

impl Priority {
    pub(super) const COUNT: usize = 3;
}

/// How a victim's tokens come back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PreemptionMode {
    /// They are computed again; what the prefix cache still has is used.
    #[default]
    Recompute,
    /// Their blocks are moved to the host pool and back, bit for bit; where it is full, they are computed again.
    Swap,
    /// Whichever takes less time by [`Rates`]; without rates, they are moved. What was moved is computed again if that
    /// has become the quicker way by the time it would return.
    Auto,
}

/// Whose blocks are taken when a running sequence needs one and none can be had. Kept sequences' always come first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum VictimPolicy {
    /// The sequence that needs the block gives up its own, and waits.
    Requester,
    /// The last in line of those behind it, whose class has aged as its place says; where there is none, it waits with
    /// its blocks.
    #[default]
    LowestPriority,
    /// The sequence with the fewest tokens to lose, in its own class or a lower one.
    LeastLost,
}

/// How fast the machine is, as the application has measured it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Bytes per second between the pool and the host pool, one way.
    pub swap_bytes_per_s: f64,
    /// Prompt tokens computed per second.
    pub prefill_tokens_per_s: f64,
}

/// What to do about requests that arrive together and begin alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DuplicatePrompts {
    /// The later one waits until the first one's blocks are in the prefix cache, where that takes no longer than
    /// computing them.
    #[default]
    Wait,
    /// Each is computed; blocks that turn out equal are shared afterwards.
    ComputeAlone,
}

/// The prefix cache: computed blocks are found again by later requests that begin with the same tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PrefixCacheConfig {
    /// Blocks without a holder that it keeps at most; `None` for as many as are free.
    pub max_cached_blocks: Option<u32>,
    /// What to do about requests that arrive together and begin alike.
    pub duplicates: DuplicatePrompts,
}

/// How a running sequence lost its blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Preemption {
    /// Its blocks are in the host pool.
    Swapped {
        /// Blocks moved.
        blocks: u32,
    },
    /// They were given up.
    Dropped {
        /// Tokens to be computed again, unless they are found in the prefix cache.
        tokens: u32,
    },
}

/// Why a victim was swapped out, or was not.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum PreemptionReason {
    /// The configuration says so.
    Configured,
    /// No rates were reported, so the tokens were kept.
    NoRates,
    /// By the rates reported.
    Rates {
        /// Seconds to move its blocks out and back.
        swap_s: f64,
        /// Seconds to compute its tokens again.
        recompute_s: f64,
    },
    /// The host pool does not hold its blocks.
    HostPoolFull {
        /// Blocks to be moved.
        needed: u32,
        /// Blocks free there.
        available: u32,
    },
    /// All its blocks are shared with others.
    NothingToMove,
    /// Too many transfers have not been reported
    /// ([`Scheduler::complete_transfers`](crate::Scheduler::complete_transfers)).
    TransfersPending {
        /// Steps that have not been reported.
        steps: usize,
    },
}

/// What the prefix cache had for a sequence when it was last let in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixReport {
    /// Tokens found.
    pub cached_tokens: u32,
    /// Tokens looked for: all but the last.
    pub wanted_tokens: u32,
    /// Why the rest was not found.
    pub miss: MissReason,
}

/// How often prompts were not found further, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissCounts {
    /// Never cached, as far as is known.
    pub unseen: u64,
    /// Evicted.
    pub evicted: u64,
    /// Expired.
    pub expired: u64,
}

/// When a request is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Every admitted sequence can grow to its declared maximum: nothing is ever preempted (I8). A request without
    /// [`max_new_tokens`](Request::max_new_tokens) is promised the whole context, which often is the whole pool: state a
    /// maximum where chats are to run side by side.
    Guaranteed,
    /// A request is let in when its tokens fit and `watermark_blocks` stay free; sequences that outgrow the pool are
    /// preempted, and computed again later, a bounded number of times. None of them fails half-way. The watermark does
    /// not hold back the only request.
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
    /// (row, key) pairs per step: the sum over rows of the keys they see. A single row may exceed it. How it follows from
    /// a time: [`Scheduler::set_step_budgets`](crate::Scheduler::set_step_budgets).
    pub step_work_budget: u64,
    /// Sequences that run at a time, samples counted one by one; at most the cache's `max_sequences`, which is what
    /// `None` stands for.
    pub max_running: Option<u32>,
    /// When a request is let in.
    pub admission: Admission,
    /// Drafts that a sequence may propose for a step at most. Drafts that are proposed take rows and blocks of their step
    /// like other tokens; nothing is set aside for those that are not.
    pub max_drafts: u32,
    /// Requests that may be let in before the first in line while that one lacks blocks and they do not: of its class or a
    /// higher one, counted from when it became the first. With 0 the line is strict.
    pub max_passed: u32,
    /// How often a sequence may be preempted. At the bound it is let in again only with everything it may still need
    /// reserved, and is not preempted any more (I9).
    pub max_preemptions: u32,
    /// The prefix cache; on by default.
    pub prefix_cache: Option<PrefixCacheConfig>,
    /// How victims' tokens come back. A host pool ([`CacheConfig::with_host_blocks`]) is needed for swapping.
    pub preemption: PreemptionMode,
    /// Whose blocks are taken.
    pub victims: VictimPolicy,
    /// Steps by which a class of [`Priority`] stands behind the one above it. Idle jobs that have waited for twice as many
    /// go before new chats: where they take long, set it to as many steps as they may be made to wait.
    pub ageing_steps: u32,
}

impl Default for SchedulerConfig {
    /// 512 rows and 2^24 (row, key) pairs a step, overcommitted admission without a watermark, no drafts, at most 3 preemptions, by
    /// recomputation and lowest priority first; a prefix cache; classes 256 steps apart.
    fn default() -> Self {
        Self {
            step_tokens: DEFAULT_STEP_TOKENS,
            step_work_budget: 1 << 24,
            max_running: None,
            admission: Admission::Overcommitted { watermark_blocks: 0 },
            max_drafts: 0,
            max_passed: 8,
            max_preemptions: 3,
            prefix_cache: Some(PrefixCacheConfig::default()),
            preemption: PreemptionMode::default(),
            victims: VictimPolicy::default(),
            ageing_steps: 256,
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

/// Why there is no step although requests wait, or why a sequence has no rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitReason {
    /// It, or the first request in line, needs blocks that are not free.
    Blocks {
        /// Blocks it needs.
        needed: u32,
        /// Blocks that are free.
        available: u32,
    },
    /// It, or the first request in line, is swapped out and has not arrived in the host pool: pass on what the device part
    /// reports ([`Scheduler::complete_transfers`](crate::Scheduler::complete_transfers)).
    Transfers {
        /// Steps whose transfers have not been reported.
        steps: usize,
    },
    /// All block tables, or places among those that run, are taken.
    Tables,
    /// Another sequence is computing the beginning of its prompt: it is let in when that can be found.
    EqualPrompt {
        /// The sequence that computes it.
        sequence: SequenceId,
    },
    /// Others come before it in line.
    Line,
    /// The step's rows or work were used up.
    Budget,
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

/// What happened since the last commit, in its order.
///
/// Every sequence has exactly one [`Finished`](Self::Finished) in a turn, in the commit that ends it or, where it was
/// aborted, in the next one: whether it waited, ran or was in the outstanding step. What has finished and is only kept
/// does not finish again.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum StepEvent {
    /// A sequence was let in, for the first time or again.
    Admitted {
        /// The sequence.
        sequence: SequenceId,
        /// What the prefix cache had of it.
        prefix: PrefixReport,
    },
    /// A sequence had to give up its blocks, and waits.
    Preempted {
        /// The sequence.
        sequence: SequenceId,
        /// How.
        how: Preemption,
        /// Why so.
        why: PreemptionReason,
    },
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
    /// Moves of a sequence's blocks to the host pool: of preempted, waiting and kept ones.
    pub swaps_out: u64,
    /// Sequences whose blocks came back from the host pool.
    pub swaps_in: u64,
    /// Kept sequences whose blocks were taken: moved to the host pool if there is room, otherwise to be found in the
    /// prefix cache or computed again when they are extended.
    pub reclaimed: u64,
    /// Tokens found in the prefix cache, when sequences were let in for the first time in a turn.
    pub prefix_hit_tokens: u64,
    /// Tokens looked for then.
    pub prefix_wanted_tokens: u64,
    /// Why the others were not found.
    pub prefix_misses: MissCounts,
    /// Tokens that sequences found again when they came back: after a preemption, say. They are no hits.
    pub prefix_refound_tokens: u64,
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

impl SchedulerStats {
    /// A sequence is let in, `again` in its current turn or for the first time: what the prefix cache had of it.
    pub(super) fn count_found(&mut self, found: PrefixReport, again: bool) {
        if again {
            // What a sequence has computed itself, and finds when it comes back, is no hit.
            self.prefix_refound_tokens += u64::from(found.cached_tokens);
            return;
        }
        self.prefix_hit_tokens += u64::from(found.cached_tokens);
        self.prefix_wanted_tokens += u64::from(found.wanted_tokens);
        match found.miss {
            MissReason::Unseen => self.prefix_misses.unseen += 1,
            MissReason::Evicted => self.prefix_misses.evicted += 1,
            MissReason::Expired => self.prefix_misses.expired += 1,
            MissReason::None | MissReason::Disabled => {}
        }
    }
}
