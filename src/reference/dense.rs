//! Attention as the formula says it, in f64, over keys and values that lie in one piece: the judge of the twins and of
//! the kernels.
//!
//! `output[i] = sum_t softmax_t(scale * query[i] . key[t]) value[t]` over the keys `t` that row `i` sees (Vaswani et al.,
//! "Attention Is All You Need", 3.2.1). No blocks, no spans, no running maximum.

use crate::reference::rule::visible_end;

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
    /// Factor of the logits.
    pub scale: f64,
}

/// What [`dense_attention`] returns.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseOutput {
    /// `[rows, num_query_heads, v_head_dim]`; 0 for a row that sees no key.
    pub output: Vec<f64>,
    /// Natural log-sum-exp of the scaled logits, `[rows, num_query_heads]`; minus infinity for a row that sees no key.
    pub lse: Vec<f64>,
}

/// Causal attention of a sequence's last rows: with `n` rows and `c` tokens, row `i` sees the keys `0 ..= c - n + i`.
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
        let visible = visible_end(tokens, rows, row);
        let logits: Vec<f64> = (0..visible)
            .map(|token| {
                let key = &inputs.keys[(token * kv_heads + kv_head) * k_len..][..k_len];
                let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                inputs.scale * dot
            })
            .collect();
        let maximum = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - maximum).exp()).sum();
        lse.push(if visible == 0 { f64::NEG_INFINITY } else { maximum + sum.ln() });
        let mut result = vec![0.0; v_len];
        for (token, logit) in logits.iter().enumerate() {
            let weight = (logit - maximum).exp() / sum;
            let value = &inputs.values[(token * kv_heads + kv_head) * v_len..][..v_len];
            result.iter_mut().zip(value).for_each(|(x, v)| *x += weight * f64::from(*v));
        }
        output.extend(result);
    }
    DenseOutput { output, lse }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs<'a>(query: &'a [f32], keys: &'a [f32], values: &'a [f32]) -> DenseInputs<'a> {
        DenseInputs {
            query,
            keys,
            values,
            num_query_heads: 1,
            num_kv_heads: 1,
            k_head_dim: 1,
            v_head_dim: 1,
            scale: 1.0,
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
}
