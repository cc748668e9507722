//! Residency: whether a victim's blocks are moved to the host pool, or its tokens computed again.
//!
//! It owns what that depends on beside the victim: the mode, the application's rates, and how much of what victims had
//! computed the prefix cache still had when they came back. It moves nothing, and knows neither sequences nor the cache.

use crate::schedule::request::{PreemptionMode, PreemptionReason, Rates};

/// Steps whose transfers may be under way at a time. More means that they are not collected, and the device part keeps
/// staging memory for each.
pub(super) const MAX_STEPS_IN_TRANSFER: usize = 4;

/// Tokens after which what was found again before counts half.
const MEMORY: u64 = 1 << 16;

#[derive(Debug)]
pub(super) struct Residency {
    mode: PreemptionMode,
    /// None where they are not known, or not positive.
    rates: Option<Rates>,
    /// Tokens of victims that the prefix cache still had when they came back, lately, and all that they had computed.
    found_again: u64,
    lost: u64,
}

/// A victim: what would move, and what would be computed again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub(super) blocks: u32,
    pub(super) block_bytes: u64,
    pub(super) computed: u32,
    /// Tokens of blocks that stay with others, where the prefix cache finds what they hold.
    pub(super) findable: Option<u32>,
    pub(super) steps_in_transfer: usize,
}

impl Residency {
    pub(super) fn new(mode: PreemptionMode) -> Self {
        Self { mode, rates: None, found_again: 0, lost: 0 }
    }

    pub(super) fn set_rates(&mut self, rates: Rates) {
        let known = rates.swap_bytes_per_s > 0.0 && rates.prefill_tokens_per_s > 0.0;
        self.rates = known.then_some(rates);
    }

    /// Whether blocks are ever moved.
    pub(super) fn may_swap(&self) -> bool {
        self.mode != PreemptionMode::Recompute
    }

    /// Whether a victim is swapped out, and why or why not. Where it would be, the host pool must have room.
    pub(super) fn prefers_swap(&self, victim: &Cost) -> (bool, PreemptionReason) {
        if !self.may_swap() {
            return (false, PreemptionReason::Configured);
        }
        if victim.blocks == 0 {
            return (false, PreemptionReason::NothingToMove);
        }
        if victim.steps_in_transfer >= MAX_STEPS_IN_TRANSFER {
            return (false, PreemptionReason::TransfersPending { steps: victim.steps_in_transfer });
        }
        match (self.mode, self.rates) {
            (PreemptionMode::Auto, Some(rates)) => self.compare(victim, rates),
            (PreemptionMode::Auto, None) => (true, PreemptionReason::NoRates),
            _ => (true, PreemptionReason::Configured),
        }
    }

    /// Seconds that a victim costs either way: its blocks move twice.
    fn compare(&self, victim: &Cost, rates: Rates) -> (bool, PreemptionReason) {
        let bytes = 2.0 * f64::from(victim.blocks) * victim.block_bytes as f64;
        let computed = victim.computed;
        // What stays shared need not be computed again where it can be found, nor what is found again as a rule.
        let again = self.found_again as f64 / self.lost.max(1) as f64;
        let found = victim.findable.map_or(0, |shared| shared.max((f64::from(computed) * again) as u32));
        let swap_s = bytes / rates.swap_bytes_per_s;
        let recompute_s = f64::from(computed.saturating_sub(found)) / rates.prefill_tokens_per_s;
        // Its tokens are kept where the two cannot be compared, too.
        let recomputes = recompute_s < swap_s;
        (!recomputes, PreemptionReason::Rates { swap_s, recompute_s })
    }

    /// Whether the choice is made again when a victim returns.
    pub(super) fn reconsiders(&self) -> bool {
        self.mode == PreemptionMode::Auto && self.rates.is_some()
    }

    /// Whether `blocks` blocks come back although their tokens may be computed again, all but `lost` of which are found.
    pub(super) fn prefers_return(&self, blocks: u32, block_bytes: u64, lost: u32) -> bool {
        let bytes = f64::from(blocks) * block_bytes as f64;
        let is_slower =
            |rates: Rates| bytes / rates.swap_bytes_per_s > f64::from(lost) / rates.prefill_tokens_per_s;
        !self.rates.is_some_and(is_slower)
    }

    /// A victim is back: the prefix cache had `found` of the `computed` tokens that it had lost.
    pub(super) fn note_found_again(&mut self, found: u32, computed: u32) {
        self.found_again += u64::from(found.min(computed));
        self.lost += u64::from(computed);
        if self.lost > MEMORY {
            (self.found_again, self.lost) = (self.found_again / 2, self.lost / 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 8 MB that move at 1 MB/s both ways, or 100 tokens that are computed at `tokens_per_s`.
    fn auto(tokens_per_s: f64) -> (Residency, Cost) {
        let mut residency = Residency::new(PreemptionMode::Auto);
        residency.set_rates(Rates { swap_bytes_per_s: 1e6, prefill_tokens_per_s: tokens_per_s });
        let cost = Cost {
            blocks: 4,
            block_bytes: 1_000_000,
            computed: 100,
            findable: Some(0),
            steps_in_transfer: 0,
        };
        (residency, cost)
    }

    #[test]
    fn the_quicker_way_is_taken_and_both_are_named() {
        let (residency, cost) = auto(10.0);
        let why = PreemptionReason::Rates { swap_s: 8.0, recompute_s: 10.0 };
        assert_eq!(residency.prefers_swap(&cost), (true, why));
        // Where 40 tokens stay with others and are found there, 60 are computed again.
        let why = PreemptionReason::Rates { swap_s: 8.0, recompute_s: 6.0 };
        assert_eq!(residency.prefers_swap(&Cost { findable: Some(40), ..cost }), (false, why));
    }

    #[test]
    fn what_victims_found_when_they_came_back_need_not_be_computed_by_the_next_one() {
        let (mut residency, cost) = auto(10.0);
        residency.note_found_again(50, 100);
        let why = PreemptionReason::Rates { swap_s: 8.0, recompute_s: 5.0 };
        assert_eq!(residency.prefers_swap(&cost), (false, why));
        // Without a prefix cache nothing is found.
        let why = PreemptionReason::Rates { swap_s: 8.0, recompute_s: 10.0 };
        assert_eq!(residency.prefers_swap(&Cost { findable: None, ..cost }), (true, why));
    }

    #[test]
    fn returning_moves_blocks_once() {
        let (residency, cost) = auto(10.0);
        assert!(residency.prefers_return(cost.blocks, cost.block_bytes, 40));
        assert!(!residency.prefers_return(cost.blocks, cost.block_bytes, 39));
    }

    #[test]
    fn rates_that_are_not_positive_are_not_known() {
        let (mut residency, cost) = auto(10.0);
        residency.set_rates(Rates { swap_bytes_per_s: 0.0, prefill_tokens_per_s: 1.0 });
        assert_eq!(residency.prefers_swap(&cost), (true, PreemptionReason::NoRates));
        assert!(!residency.reconsiders());
    }
}
