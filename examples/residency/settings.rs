//! What the controls choose: the pool and the policy for the moment when it is full.

use example_engine::{attention::shape_of, config::Config};
use paged_kv::{
    Admission, CacheConfig, ConfigError, KvType, PreemptionMode, PrefixCacheConfig, SchedulerConfig,
    VictimPolicy,
};

use crate::{options::Options, pace::LEAST_ROWS, palette::NUM_OWNERS, script::Script};

/// A pool and its policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) num_blocks: u32,
    pub(crate) block_size: u32,
    pub(crate) guaranteed: bool,
    pub(crate) preemption: PreemptionMode,
    pub(crate) victims: VictimPolicy,
    pub(crate) prefix_cache: bool,
}

impl Settings {
    /// Those of the command line; for the rest a pool in which the script gets crowded.
    pub(crate) fn new(options: &Options, script: &Script) -> Self {
        Self {
            num_blocks: options.blocks.unwrap_or(script.num_blocks),
            block_size: options.block_size,
            guaranteed: false,
            preemption: options.preempt.into(),
            victims: VictimPolicy::default(),
            prefix_cache: true,
        }
    }

    /// The pool, with a host pool of the same size where blocks are moved.
    ///
    /// # Errors
    /// As [`CacheConfig`]'s.
    pub(crate) fn cache(&self, config: &Config) -> Result<CacheConfig, ConfigError> {
        let moves = self.preemption != PreemptionMode::Recompute;
        CacheConfig::for_blocks(self.num_blocks, &shape_of(config), KvType::F16)?
            .with_max_sequence_tokens(config.context_len)?
            .with_max_sequences(NUM_OWNERS as u32)?
            .with_block_size(self.block_size)?
            .with_host_blocks(if moves { self.num_blocks } else { 0 })
    }

    pub(crate) fn scheduler(&self) -> SchedulerConfig {
        SchedulerConfig {
            step_tokens: LEAST_ROWS,
            admission: match self.guaranteed {
                true => Admission::Guaranteed,
                false => Admission::Overcommitted { watermark_blocks: self.num_blocks / 32 },
            },
            preemption: self.preemption,
            victims: self.victims,
            prefix_cache: self.prefix_cache.then(PrefixCacheConfig::default),
            ..SchedulerConfig::default()
        }
    }
}
