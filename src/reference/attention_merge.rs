//! Twin of `attention_merge`: joins the partial results of a row's spans.

use crate::reference::online_softmax::{LOWEST_LOGIT, State, write_normalised};
use crate::reference::{AttentionInputs, Rows, RowsMut};
use crate::schedule::MergeItem;

/// Joins each item's partial results, all heads, and writes its row of `output` (`[num_query_heads, v_head_dim]`).
///
/// A span's sum of values and sum of weights are scaled from the span's maximum to the largest of all, added, and divided:
/// the softmax over the union of the keys, exactly except for rounding. A span that saw no key (sum of weights 0) counts as
/// nothing; a row whose spans all saw none gives 0. A learned sink joins the sum here, once.
///
/// # Panics
/// When `partials` lacks a partial result, or `output` does not hold an item's row.
pub fn attention_merge(
    inputs: &AttentionInputs<'_>,
    items: &[MergeItem],
    partials: Rows<'_>,
    output: &mut RowsMut<'_>,
) {
    let cache = inputs.cache;
    let v_len = cache.layout().block_of(inputs.layer).v_head_dim() as usize;
    let mut accumulator = vec![0.0f32; v_len];
    for item in items {
        let row = output.row_mut(item.row as usize, cache.output_len(inputs.layer));
        for (head, output) in row.chunks_exact_mut(v_len).enumerate() {
            let sink = inputs.logit(head as u32).base_2().sink;
            let spans = (item.first_partial..item.first_partial + item.num_partials).map(|partial| {
                let partial = partials.row(partial as usize, cache.partial_len(inputs.layer));
                let (values, state) = partial[head * (v_len + 2)..][..v_len + 2].split_at(v_len);
                (values, state[0], state[1])
            });
            let spans = spans.filter(|(_, _, sum)| *sum != 0.0);
            let maximum = spans.clone().fold(LOWEST_LOGIT, |highest, (_, maximum, _)| highest.max(maximum));
            let mut sum = 0.0;
            accumulator.fill(0.0);
            for (values, span_maximum, span_sum) in spans {
                let weight = (span_maximum - maximum).exp2();
                sum += weight * span_sum;
                accumulator.iter_mut().zip(values).for_each(|(x, v)| *x += weight * v);
            }
            write_normalised(&accumulator, State { maximum, sum }.with_sink(sink), output);
        }
    }
}

/// The natural log-sum-exp of a partial result's logits: minus infinity when it saw no key.
///
/// `maximum` and `sum` are the two numbers behind a head's values in a partial result: the largest logit in base 2, and
/// the sum of weights relative to it.
pub fn log_sum_exp(maximum: f32, sum: f32) -> f32 {
    if sum == 0.0 { f32::NEG_INFINITY } else { (maximum + sum.log2()) * std::f32::consts::LN_2 }
}
