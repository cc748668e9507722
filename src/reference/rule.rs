//! What a row sees, and what becomes of its products: the one rule of the twins and of the dense attention that judges them.
//!
//! Rows are a sequence's last ones: of `rows` rows in a context of `context` tokens, row `i` is the token at position
//! `context - rows + i`, and sees what its reach says of that position. More rows than tokens leave the first rows without
//! a key.

use crate::logits::{LogitRule, finite};
use crate::reach::Reach;
use std::f64::consts::LOG2_E;
use std::ops::Range;

/// The position of a row; none of one before the first token.
pub(super) fn position(context: u32, rows: u32, row: u32) -> Option<u32> {
    (context + row).checked_sub(rows)
}

/// The keys that a row sees: the first tokens, and the rest.
pub(super) fn visible(reach: Reach, position: Option<u32>) -> [Range<u32>; 2] {
    position.map_or([0..0, 0..0], |position| reach.visible(position))
}

/// What the rule makes of the product of a query and a key, for one query head of one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Logit {
    /// Factor of products.
    scale: f64,
    soft_cap: Option<f64>,
    /// What a key loses per token of distance.
    slope: f64,
    /// The logit of the learned sink.
    pub(super) sink: Option<f64>,
}

impl Logit {
    /// The rule of query head `head` of `num_heads`, in the layer with this number in its group.
    pub(super) fn of(rule: &LogitRule, layer: u32, head: u32, num_heads: u32, head_dim: u32) -> Self {
        let index = head as usize;
        Self {
            scale: rule.scale(head_dim),
            soft_cap: rule.soft_cap().map(f64::from),
            slope: rule.slopes().nth(index).map_or(0.0, f64::from),
            sink: rule.sinks(layer, num_heads).nth(index).map(f64::from),
        }
    }

    /// The logit of a key that lies `distance` tokens before its row.
    pub(super) fn logit(&self, product: f64, distance: u32) -> f64 {
        let scaled = self.scale * product;
        let capped = self.soft_cap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
        capped - self.slope * f64::from(distance)
    }

    /// The same in base 2 and f32, of products of queries that were multiplied by its factor.
    pub(super) fn base_2(&self) -> LogitBase2 {
        let (factor, soft_cap) = match self.soft_cap {
            Some(cap) => (self.scale / cap, Some(finite(cap * LOG2_E))),
            None => (self.scale * LOG2_E, None),
        };
        LogitBase2 {
            factor: finite(factor),
            soft_cap,
            slope: finite(self.slope * LOG2_E),
            sink: self.sink.map(|sink| finite(sink * LOG2_E)),
        }
    }
}

/// [`Logit`] as the twins compute it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogitBase2 {
    /// Factor of queries.
    pub(super) factor: f32,
    soft_cap: Option<f32>,
    slope: f32,
    pub(super) sink: Option<f32>,
}

impl LogitBase2 {
    /// The logit of a key that lies `distance` tokens before its row.
    pub(super) fn logit(&self, product: f32, distance: u32) -> f32 {
        let capped = self.soft_cap.map_or(product, |cap| cap * product.tanh());
        capped - self.slope * distance as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_row_sees_the_whole_context_and_each_row_before_it_one_key_less() {
        let ends = |context, rows| {
            let ends = (0..rows).map(|row| visible(Reach::All, position(context, rows, row))[1].end);
            ends.collect::<Vec<u32>>()
        };
        assert_eq!(ends(5, 1), [5]);
        assert_eq!(ends(5, 5), [1, 2, 3, 4, 5]);
        assert_eq!(ends(2, 4), [0, 0, 1, 2], "rows without a key");
    }

    #[test]
    fn both_forms_of_a_rule_agree() {
        let rule = LogitRule::new().with_scale(0.5).with_soft_cap(20.0).with_slopes([0.25, 0.125]);
        for rule in [
            LogitRule::new(),
            rule.clone(),
            LogitRule::new().with_slopes([0.5, 0.0]),
            rule.with_sinks([2.0; 4]),
        ] {
            let logit = Logit::of(&rule, 1, 1, 2, 64);
            let base_2 = logit.base_2();
            for (product, distance) in [(0.0, 0), (3.0, 5), (-40.0, 1), (1e3, 0), (-1e30, 7)] {
                let expected = logit.logit(product, distance) * LOG2_E;
                let found = f64::from(base_2.logit(product as f32 * base_2.factor, distance));
                assert!((found - expected).abs() <= 1e-5 * expected.abs().max(1.0), "{found}, {expected}");
            }
            assert_eq!(base_2.sink.is_some(), logit.sink.is_some());
        }
    }

    #[test]
    fn the_largest_numbers_of_a_rule_leave_a_product_of_zero_a_number() {
        for rule in [
            LogitRule::new().with_scale(f32::MAX),
            LogitRule::new().with_soft_cap(f32::MIN_POSITIVE),
            LogitRule::new().with_soft_cap(f32::MAX).with_slopes([f32::MAX]).with_sinks([f32::MAX]),
        ] {
            let base_2 = Logit::of(&rule, 0, 0, 1, 8).base_2();
            assert_eq!(base_2.logit(0.0 * base_2.factor, 0), 0.0, "{rule:?}");
            assert!(base_2.sink.is_none_or(f32::is_finite));
        }
    }
}
