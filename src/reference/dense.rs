//! Attention as the formula says it, in f64, over keys and values that lie in one piece: the judge of the twins and of
//! the kernels.
//!
//! `output[i] = sum_t softmax_t(logit(query[i] . key[t])) value[t]` over the keys `t` that row `i` sees (Vaswani et al.,
//! "Attention Is All You Need", 3.2.1), with the logits of a [`LogitRule`]. No blocks, no spans, no running maximum.

use crate::logits::LogitRule;
use crate::reach::Reach;
use crate::reference::rule::{Logit, position, visible};

/// One sequence's queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct DenseInputs<'a> {
    /// Queries, `[rows, num_query_heads, k_head_dim]`.
    pub query: &'a [f32],
    /// Keys, `[tokens, num_kv_heads, k_head_dim]`, already rounded to the stored type.
    pub keys: &'a [f32],
    /// Values, `[tokens, num_kv_heads, v_head_dim]`, already rounded to the stored type.
    pub values: &'a [f32],
    /// Query heads.
    pub num_query_heads: u32,
    /// Key and value heads; they divide the query heads.
    pub num_kv_heads: u32,
    /// Elements of a query or key head.
    pub k_head_dim: u32,
    /// Elements of a value head.
    pub v_head_dim: u32,
    /// The keys that rows see.
    pub reach: Reach,
    /// What becomes of products.
    pub logits: &'a LogitRule,
    /// The layer's number in its group: which learned sinks are its own.
    pub layer: u32,
}

/// What [`dense_attention`] returns.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseOutput {
    /// `[rows, num_query_heads, v_head_dim]`; 0 for a row that sees no key.
    pub output: Vec<f64>,
    /// Natural log-sum-exp of the logits, a learned sink among them, `[rows, num_query_heads]`; minus infinity for a row that
    /// sees no key.
    pub lse: Vec<f64>,
}

/// Attention of a sequence's last rows: with `n` rows and `c` tokens, row `i` sees what its reach says of position
/// `c - n + i`.
///
/// # Panics
/// When there are no heads, a head has no elements, kv heads do not divide query heads, or a tensor's length is no whole
/// number of rows, or of as many as the keys'.
pub fn dense_attention(inputs: &DenseInputs<'_>) -> DenseOutput {
    let (query_heads, kv_heads) = (inputs.num_query_heads as usize, inputs.num_kv_heads as usize);
    let (k_len, v_len) = (inputs.k_head_dim as usize, inputs.v_head_dim as usize);
    assert!(kv_heads > 0 && query_heads > 0, "{query_heads} query heads, {kv_heads} kv heads");
    assert!(k_len > 0 && v_len > 0, "heads of {k_len} and {v_len} elements");
    assert!(query_heads.is_multiple_of(kv_heads), "{query_heads} query heads, {kv_heads} kv heads");
    assert!(
        inputs.query.len().is_multiple_of(query_heads * k_len),
        "{} elements of queries",
        inputs.query.len()
    );
    assert!(inputs.keys.len().is_multiple_of(kv_heads * k_len), "{} elements of keys", inputs.keys.len());
    let rows = inputs.query.len() / (query_heads * k_len);
    let tokens = inputs.keys.len() / (kv_heads * k_len);
    assert_eq!(inputs.values.len(), tokens * kv_heads * v_len, "elements of the values of {tokens} tokens");
    let mut output = Vec::with_capacity(rows * query_heads * v_len);
    let mut lse = Vec::with_capacity(rows * query_heads);
    for (index, query) in inputs.query.chunks_exact(k_len).enumerate() {
        let (row, head) = (index / query_heads, index % query_heads);
        let kv_head = head / (query_heads / kv_heads);
        let rule =
            Logit::of(inputs.logits, inputs.layer, head as u32, inputs.num_query_heads, inputs.k_head_dim);
        let position = position(tokens as u32, rows as u32, row as u32);
        let [first, rest] = visible(inputs.reach, position);
        let logits: Vec<(u32, f64)> = first
            .chain(rest)
            .map(|token| {
                let key = &inputs.keys[(token as usize * kv_heads + kv_head) * k_len..][..k_len];
                let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                (token, rule.logit(dot, position.map_or(0, |position| position - token)))
            })
            .collect();
        let sink = rule.sink.filter(|_| !logits.is_empty());
        let all = || logits.iter().map(|(_, logit)| *logit).chain(sink);
        let maximum = all().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = all().map(|logit| (logit - maximum).exp()).sum();
        lse.push(if logits.is_empty() { f64::NEG_INFINITY } else { maximum + sum.ln() });
        let mut result = vec![0.0; v_len];
        for (token, logit) in logits {
            let weight = (logit - maximum).exp() / sum;
            let value = &inputs.values[(token as usize * kv_heads + kv_head) * v_len..][..v_len];
            result.iter_mut().zip(value).for_each(|(x, v)| *x += weight * f64::from(*v));
        }
        output.extend(result);
    }
    DenseOutput { output, lse }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: &LogitRule = &LogitRule::new();

    fn inputs<'a>(query: &'a [f32], keys: &'a [f32], values: &'a [f32]) -> DenseInputs<'a> {
        DenseInputs {
            query,
            keys,
            values,
            num_query_heads: 1,
            num_kv_heads: 1,
            k_head_dim: 1,
            v_head_dim: 1,
            reach: Reach::All,
            logits: RULE,
            layer: 0,
        }
    }

    #[test]
    fn two_keys_weigh_as_the_formula_says() {
        // Logits ln 1 and ln 3: weights 1/4 and 3/4, and the logits' exponentials sum to 4.
        let result = dense_attention(&inputs(&[1.0], &[0.0, 3f32.ln()], &[8.0, 4.0]));
        assert!((result.output[0] - 5.0).abs() < 1e-7);
        assert!((result.lse[0] - 4f64.ln()).abs() < 1e-7);
    }

    #[test]
    fn rows_are_aligned_at_the_last_key_and_rows_without_a_key_give_zero() {
        let result = dense_attention(&inputs(&[0.0; 4], &[0.0; 2], &[10.0, 20.0]));
        assert_eq!(result.output, [0.0, 0.0, 10.0, 15.0]);
        assert_eq!(result.lse[..3], [f64::NEG_INFINITY, f64::NEG_INFINITY, 0.0]);
        assert!((result.lse[3] - 2f64.ln()).abs() < 1e-15);
    }

    #[test]
    fn a_window_and_a_sink_leave_what_the_formula_says() {
        // Of the keys 0, ln 3, ln 2 the last row sees the first and the last: weights 1, 2, and 5 for the sink.
        let rule = LogitRule::new().with_sinks([0.0, 5f32.ln()]);
        let (keys, values) = ([0.0, 3f32.ln(), 2f32.ln()], [8.0, 100.0, 4.0]);
        let reach = Reach::Window { tokens: 1, first: 1 };
        let inputs = DenseInputs { reach, logits: &rule, layer: 1, ..inputs(&[1.0], &keys, &values) };
        let result = dense_attention(&inputs);
        assert!((result.output[0] - 2.0).abs() < 1e-6, "{result:?}");
        assert!((result.lse[0] - 8f64.ln()).abs() < 1e-6);
    }
}
