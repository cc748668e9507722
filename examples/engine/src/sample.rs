//! Choosing the next token from a row of logits, on the host.
//!
//! A choice depends on the logits, the seed, and which token of which sample of which prompt it is: on nothing
//! else. The generator has no state that neighbours in a batch could advance, so a sample is the same alone,
//! batched, or computed again after a preemption.

/// Which token is being chosen: the sample's own coordinates, the same in every batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleKey {
    /// Index of the prompt.
    pub prompt: u32,
    /// Index of the sample of that prompt.
    pub sample: u32,
    /// Position in the sequence that the token will have.
    pub position: u32,
}

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// 0 takes the largest logit, the lowest id among equals; otherwise logits are divided by this before the
    /// softmax.
    pub temperature: f32,
    /// Seed of every stream of choices.
    pub seed: u64,
}

impl Sampler {
    /// The token chosen, or `None` if the logits are no numbers.
    pub fn choose(&self, logits: &[f32], key: SampleKey) -> Option<u32> {
        let best = argmax(logits)?;
        if self.temperature <= 0.0 {
            return Some(best);
        }
        let largest = f64::from(logits[best as usize]);
        let weight = |logit: f32| ((f64::from(logit) - largest) / f64::from(self.temperature)).exp();
        let total: f64 = logits.iter().map(|&logit| weight(logit)).sum();
        let mut left = total * uniform(self.seed, key);
        for (&logit, id) in logits.iter().zip(0..) {
            left -= weight(logit);
            if left < 0.0 {
                return Some(id);
            }
        }
        // Rounding left a rest beyond the last weight.
        Some(best)
    }
}

/// Index of the largest logit, the lowest one among equals; `None` if a logit is not a number or there is none.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (&logit, id) in logits.iter().zip(0..) {
        if logit.is_nan() {
            return None;
        }
        if best.is_none_or(|(_, largest)| logit > largest) {
            best = Some((id, logit));
        }
    }
    best.map(|(id, _)| id)
}

/// A row of logits in short.
#[derive(Clone, Debug, PartialEq)]
pub struct TopLogits {
    /// The largest, in falling order; equal ones by rising id.
    pub top: Vec<(u32, f32)>,
    /// Logarithm of the sum of all exponentials.
    pub logsumexp: f64,
    /// Mean of all logits.
    pub mean: f64,
}

impl TopLogits {
    /// Sums up `logits`, keeping the `count` largest.
    pub fn of(logits: &[f32], count: usize) -> Self {
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let logit = |id: u32| logits[id as usize];
        let order = |a: &u32, b: &u32| logit(*b).total_cmp(&logit(*a)).then(a.cmp(b));
        let count = count.min(ids.len());
        if count < ids.len() {
            ids.select_nth_unstable_by(count, order);
            ids.truncate(count);
        }
        ids.sort_unstable_by(order);
        let largest = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
        let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
        Self {
            top: ids.into_iter().map(|id| (id, logit(id))).collect(),
            logsumexp: largest + sum.ln(),
            mean: logits.iter().map(|&logit| f64::from(logit)).sum::<f64>() / logits.len() as f64,
        }
    }
}

/// A number in `[0, 1)` that belongs to `key`.
fn uniform(seed: u64, key: SampleKey) -> f64 {
    let words = [u64::from(key.prompt), u64::from(key.sample), u64::from(key.position)];
    let bits = words.into_iter().fold(mix(seed), |state, word| mix(state ^ word));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): one step.
fn mix(state: u64) -> u64 {
    let mut bits = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use approx::assert_abs_diff_eq;

    use super::*;

    const KEY: SampleKey = SampleKey { prompt: 0, sample: 0, position: 0 };

    #[test]
    fn greedy_takes_the_lowest_id_among_equals_and_refuses_no_number() {
        let greedy = Sampler { temperature: 0.0, seed: 1 };
        assert_eq!(greedy.choose(&[1.0, 3.0, 3.0, 2.0], KEY), Some(1));
        assert_eq!(greedy.choose(&[1.0, f32::NAN], KEY), None);
        assert_eq!(greedy.choose(&[], KEY), None);
    }

    #[test]
    fn sampled_shares_follow_the_softmax() {
        let logits = [0.0, 1.0, 2.0f32];
        let sampler = Sampler { temperature: 0.5, seed: 7 };
        let mut counts = [0u32; 3];
        for position in 0..30_000 {
            let chosen = sampler.choose(&logits, SampleKey { position, ..KEY }).expect("logits are numbers");
            counts[chosen as usize] += 1;
        }
        let weights = logits.map(|logit| f64::from(logit / 0.5).exp());
        let total: f64 = weights.iter().sum();
        for (count, weight) in counts.iter().zip(weights) {
            assert_abs_diff_eq!(f64::from(*count) / 30_000.0, weight / total, epsilon = 0.01);
        }
    }

    #[test]
    fn streams_differ_by_seed_prompt_sample_and_position() {
        let keys = [
            (1, KEY),
            (2, KEY),
            (1, SampleKey { prompt: 1, ..KEY }),
            (1, SampleKey { sample: 1, ..KEY }),
            (1, SampleKey { position: 1, ..KEY }),
        ];
        let mut drawn: Vec<u64> = keys.iter().map(|&(seed, key)| uniform(seed, key).to_bits()).collect();
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn.len(), keys.len());
    }

    #[test]
    fn top_logits_are_in_falling_order() {
        let row = TopLogits::of(&[0.0, 2.0, 1.0, 2.0], 3);
        assert_eq!(row.top, [(1, 2.0), (3, 2.0), (2, 1.0)]);
        assert_abs_diff_eq!(row.mean, 1.25, epsilon = 1e-12);
        assert_abs_diff_eq!(row.logsumexp, (1.0 + 1f64.exp() + 2.0 * 2f64.exp()).ln(), epsilon = 1e-12);
    }
}
