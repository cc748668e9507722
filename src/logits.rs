//! [`LogitRule`]: what becomes of the product of a query and a key before the softmax.
//!
//! Of a query head `h` in the row at position `i` and a key at position `t`:
//!
//! ```text
//! logit = scale * (query · key)                  scale:  1 / sqrt(head size), unless a model has its own
//! logit = cap * tanh(logit / cap)                soft-cap (Gemma 2)
//! logit = logit - slope[h] * (i - t)             ALiBi
//! weight = exp(logit) / (exp(sink[h]) + sum over all keys that the row sees)      learned sinks (gpt-oss)
//! ```
//!
//! A rule is a plain value that may be wrong; a configuration refuses it then.

use crate::error::ConfigError;

/// What becomes of the product of a query and a key before the softmax. By default it is divided by the square root of the
/// head size, and that is all.
///
/// ```
/// # use paged_kv::{LogitRule, ModelShape};
/// // Gemma 2 2B.
/// let rule = LogitRule::new().with_scale(1.0 / 16.0).with_soft_cap(50.0);
/// let shape = ModelShape::new(26, 8, 4, 256).with_logits(rule);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct LogitRule {
    scale: Option<Number>,
    soft_cap: Option<Number>,
    slopes: Vec<Number>,
    sinks: Vec<Number>,
}

/// A finite number of the rule, by its bits: equal rules make equal shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Number(u32);

/// A number of a rule in the kernels' units; the largest finite one in the place of a larger one, which times zero would be
/// no number.
pub(crate) fn finite(number: f64) -> f32 {
    (number as f32).clamp(f32::MIN, f32::MAX)
}

impl Number {
    fn get(self) -> f32 {
        f32::from_bits(self.0)
    }
}

fn numbers(values: impl IntoIterator<Item = f32>) -> Vec<Number> {
    values.into_iter().map(|value| Number(value.to_bits())).collect()
}

impl LogitRule {
    /// The usual rule.
    pub const fn new() -> Self {
        Self { scale: None, soft_cap: None, slopes: Vec::new(), sinks: Vec::new() }
    }

    /// Products are multiplied by `scale`, whatever the head size.
    pub fn with_scale(mut self, scale: f32) -> Self {
        self.scale = Some(Number(scale.to_bits()));
        self
    }

    /// A logit `x` becomes `cap * tanh(x / cap)`.
    pub fn with_soft_cap(mut self, cap: f32) -> Self {
        self.soft_cap = Some(Number(cap.to_bits()));
        self
    }

    /// ALiBi: a key that lies `d` positions before its row loses `slopes[query head] * d`. One number per query head, the
    /// same in all layers of the group. [`alibi_slopes`](Self::alibi_slopes) has the usual ones.
    pub fn with_slopes(mut self, slopes: impl IntoIterator<Item = f32>) -> Self {
        self.slopes = numbers(slopes);
        self
    }

    /// Learned sinks: each query head has a logit of its own that takes part in the softmax's denominator and has no value.
    /// `[layers of the group, in their order][query heads]`.
    pub fn with_sinks(mut self, sinks: impl IntoIterator<Item = f32>) -> Self {
        self.sinks = numbers(sinks);
        self
    }

    /// The slopes of Press et al., "Train Short, Test Long" (2022): for a power of two of heads a geometric sequence from
    /// `2^(-8 / heads)` on, else that of the next lower power, then every other one of the next higher.
    pub fn alibi_slopes(num_query_heads: u32) -> Vec<f32> {
        let lower = 1 << num_query_heads.max(1).ilog2();
        let slope = |heads: u32, index: u32| (-8.0 * f64::from(index + 1) / f64::from(heads)).exp2() as f32;
        let rest = (0..num_query_heads.saturating_sub(lower)).map(|index| slope(2 * lower, 2 * index));
        (0..lower.min(num_query_heads)).map(|index| slope(lower, index)).chain(rest).collect()
    }

    /// The factor of products for heads of `head_dim` elements.
    pub fn scale(&self, head_dim: u32) -> f64 {
        self.scale.map_or_else(|| 1.0 / f64::from(head_dim).sqrt(), |scale| f64::from(scale.get()))
    }

    /// The soft-cap, if there is one.
    pub fn soft_cap(&self) -> Option<f32> {
        self.soft_cap.map(Number::get)
    }

    /// The slope of each query head; none without ALiBi.
    pub fn slopes(&self) -> impl ExactSizeIterator<Item = f32> {
        self.slopes.iter().map(|slope| slope.get())
    }

    /// The learned sinks of the layer with this number in the group, of `num_query_heads` heads; none where the rule has
    /// none.
    pub fn sinks(&self, layer: u32, num_query_heads: u32) -> impl ExactSizeIterator<Item = f32> {
        let start = (layer as usize).saturating_mul(num_query_heads as usize);
        let sinks = self.sinks.get(start..).unwrap_or_default();
        sinks[..sinks.len().min(num_query_heads as usize)].iter().map(|sink| sink.get())
    }

    /// Whether another rule differs in nothing but the sinks that it has.
    pub(crate) fn is_alike(&self, other: &Self) -> bool {
        let Self { scale, soft_cap, slopes, sinks } = other;
        (self.scale, self.soft_cap, &self.slopes) == (*scale, *soft_cap, slopes)
            && self.has_sinks() != sinks.is_empty()
    }

    /// Takes the sinks of another layer.
    pub(crate) fn join(&mut self, other: Self) {
        self.sinks.extend(other.sinks);
    }

    /// Whether every layer has learned sinks.
    pub fn has_sinks(&self) -> bool {
        !self.sinks.is_empty()
    }

    /// Whether keys lose by their distance.
    pub fn has_slopes(&self) -> bool {
        !self.slopes.is_empty()
    }

    pub(crate) fn check(&self, num_layers: u32, num_query_heads: u32) -> Result<(), ConfigError> {
        let (layers, heads) = (u64::from(num_layers), u64::from(num_query_heads));
        for (what, numbers, needed) in
            [("slopes", &self.slopes, heads), ("learned sinks", &self.sinks, layers * heads)]
        {
            let given = numbers.len() as u64;
            if given != 0 && given != needed {
                return Err(ConfigError::PerHead { what, given, needed });
            }
            if let Some(index) = numbers.iter().position(|number| !number.get().is_finite()) {
                return Err(ConfigError::LogitNumber { what, index: index as u64 });
            }
        }
        let is_wrong = |number: Option<Number>, least: f32| {
            number.is_some_and(|number| !number.get().is_finite() || number.get() < least)
        };
        if is_wrong(self.scale, f32::MIN) {
            return Err(ConfigError::LogitNumber { what: "scale", index: 0 });
        }
        if is_wrong(self.soft_cap, f32::MIN_POSITIVE) {
            return Err(ConfigError::LogitNumber { what: "soft-cap", index: 0 });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::error::ConfigError;
    use crate::logits::LogitRule;

    #[test]
    fn alibi_has_the_published_slopes() {
        assert_eq!(LogitRule::alibi_slopes(8)[..3], [0.5, 0.25, 0.125]);
        assert_eq!(LogitRule::alibi_slopes(1), [1.0 / 256.0]);
        assert_eq!(LogitRule::alibi_slopes(0), [0.0; 0]);
        // 12 heads: those of 8, then the first, third, fifth and seventh of 16.
        let slopes = LogitRule::alibi_slopes(12);
        assert_eq!((slopes.len(), slopes[7]), (12, 1.0 / 256.0));
        assert_eq!(slopes[8], 0.5f32.sqrt());
        assert_eq!(slopes[9], (-1.5f64).exp2() as f32);
    }

    #[test]
    fn a_rule_whose_numbers_do_not_fit_is_refused() {
        let rule = LogitRule::new().with_sinks([0.0; 7]);
        assert_eq!(
            rule.check(2, 4),
            Err(ConfigError::PerHead { what: "learned sinks", given: 7, needed: 8 })
        );
        assert_eq!(LogitRule::new().with_sinks([0.0; 8]).check(2, 4), Ok(()));
        let rule = LogitRule::new().with_slopes([0.5, f32::NAN]);
        assert_eq!(rule.check(9, 2), Err(ConfigError::LogitNumber { what: "slopes", index: 1 }));
        for cap in [0.0, -1.0, f32::INFINITY] {
            let refused = LogitRule::new().with_soft_cap(cap).check(1, 1);
            assert_eq!(refused, Err(ConfigError::LogitNumber { what: "soft-cap", index: 0 }));
        }
        assert!(LogitRule::new().with_scale(f32::NAN).check(1, 1).is_err());
        assert_eq!(LogitRule::new().with_scale(-0.5).with_soft_cap(30.0).check(1, 1), Ok(()));
    }

    #[test]
    fn sinks_are_those_of_the_layer() {
        let rule = LogitRule::new().with_sinks([1.0, 2.0, 3.0, 4.0]);
        let of = |layer| rule.sinks(layer, 2).collect::<Vec<f32>>();
        assert_eq!((of(0), of(1), of(2)), (vec![1.0, 2.0], vec![3.0, 4.0], vec![]));
        assert_eq!(LogitRule::new().sinks(0, 2).len(), 0);
    }
}
