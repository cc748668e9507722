//! Cuts a step's items, and the rows that they write, into parts that threads can work on at once.
//!
//! Items come in the order of the rows that they write, so a cut between two items is also a cut of the output. Two tiles
//! that share a row stay in one part, since a row is the smallest thing that a part can own.

use crate::reference::{AttentionInputs, RowsMut};
use crate::schedule::{DIRECT, DecodeItem, PrefillItem};

/// Decode items and the rows that they alone write.
#[derive(Debug)]
pub struct DecodePart<'a> {
    /// The items.
    pub items: &'a [DecodeItem],
    /// The rows of the output that items without a partial result write.
    pub output: RowsMut<'a>,
    /// The partial results that the other items write.
    pub partials: RowsMut<'a>,
}

/// Prefill items and the rows that they alone write.
#[derive(Debug)]
pub struct PrefillPart<'a> {
    /// The items.
    pub items: &'a [PrefillItem],
    /// The rows of the output that items without a partial result write.
    pub output: RowsMut<'a>,
    /// The partial results that the other items write.
    pub partials: RowsMut<'a>,
}

/// Cuts decode items into at most `num_parts` parts of about equal work.
///
/// # Panics
/// When an item names a sequence that the plan does not have, or a span that ends before it begins.
///
/// ```
/// # use paged_kv::reference::{AttentionInputs, RowsMut, attention_decode, decode_parts};
/// # use paged_kv::DecodeItem;
/// fn decode(inputs: &AttentionInputs, items: &[DecodeItem], output: RowsMut, partials: RowsMut) {
///     let parts = decode_parts(inputs, items, output, partials, 4);
///     std::thread::scope(|scope| {
///         for mut part in parts {
///             scope.spawn(move || {
///                 attention_decode(inputs, part.items, &mut part.output, &mut part.partials);
///             });
///         }
///     });
/// }
/// ```
pub fn decode_parts<'a>(
    inputs: &AttentionInputs<'_>,
    items: &'a [DecodeItem],
    mut output: RowsMut<'a>,
    mut partials: RowsMut<'a>,
    num_parts: usize,
) -> Vec<DecodePart<'a>> {
    let work = |item: &DecodeItem| u64::from(item.end_token - item.first_token) + 1;
    let mut parts = Vec::new();
    let mut rest = items;
    for part in (1..=num_parts.max(1)).rev() {
        let (head, tail) = rest.split_at(fair_share(rest, part, work));
        if head.is_empty() {
            break;
        }
        // An item with a partial result writes no row, so the cut may fall between the spans of one row.
        let first_row = tail.first().map_or(usize::MAX, |item| row_of(inputs, item.sequence));
        let first_partial = tail.iter().map(|item| item.partial).find(|&partial| partial != DIRECT);
        let head_output;
        let head_partials;
        (head_output, output) = output.split_at_row(first_row);
        (head_partials, partials) = partials.split_at_row(first_partial.map_or(usize::MAX, |p| p as usize));
        parts.push(DecodePart { items: head, output: head_output, partials: head_partials });
        rest = tail;
    }
    parts
}

/// Cuts prefill items into at most `num_parts` parts of about equal work, never within a row.
///
/// # Panics
/// As [`decode_parts`].
pub fn prefill_parts<'a>(
    inputs: &AttentionInputs<'_>,
    items: &'a [PrefillItem],
    mut output: RowsMut<'a>,
    mut partials: RowsMut<'a>,
    num_parts: usize,
) -> Vec<PrefillPart<'a>> {
    let heads = inputs.cache.group(inputs.layer).heads_per_kv_head();
    let work = |item: &PrefillItem| {
        u64::from(item.end_query - item.first_query) * (u64::from(item.end_token - item.first_token) + 1)
    };
    // A tile's rows each have a partial result from each of its spans.
    let starts_row = |items: &[PrefillItem], index: usize| {
        let (before, item) = (&items[index - 1], &items[index]);
        let same_tile = (before.sequence, before.first_query) == (item.sequence, item.first_query);
        item.first_query.is_multiple_of(heads) && !same_tile
    };
    let mut parts = Vec::new();
    let mut rest = items;
    for part in (1..=num_parts.max(1)).rev() {
        let mut len = fair_share(rest, part, work);
        while len > 0 && len < rest.len() && !starts_row(rest, len) {
            len += 1;
        }
        let (head, tail) = rest.split_at(len);
        if head.is_empty() {
            break;
        }
        let next =
            tail.first().map(|item| row_of(inputs, item.sequence) + (item.first_query / heads) as usize);
        let first_partial = tail.iter().map(|item| item.partial).find(|&partial| partial != DIRECT);
        let head_output;
        let head_partials;
        (head_output, output) = output.split_at_row(next.unwrap_or(usize::MAX));
        (head_partials, partials) = partials.split_at_row(first_partial.map_or(usize::MAX, |p| p as usize));
        parts.push(PrefillPart { items: head, output: head_output, partials: head_partials });
        rest = tail;
    }
    parts
}

fn row_of(inputs: &AttentionInputs<'_>, sequence: u32) -> usize {
    inputs.plan.query_starts()[sequence as usize] as usize
}

/// How many of `items` make up one of `num_parts` equal shares of their work, rounded to the nearer end.
fn fair_share<T>(items: &[T], num_parts: usize, work: impl Fn(&T) -> u64) -> usize {
    if num_parts == 1 {
        return items.len();
    }
    let share = items.iter().map(&work).sum::<u64>() / num_parts as u64;
    let mut total = 0;
    for (index, item) in items.iter().enumerate() {
        total += work(item) / 2;
        if index > 0 && total > share {
            return index;
        }
        total += work(item).div_ceil(2);
    }
    items.len()
}
