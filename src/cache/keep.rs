//! How the prefix cache keeps what no table holds: what ranges of tokens say of nodes, and of blocks of windows.

use crate::cache::lane::Lane;
use crate::cache::prefix_cache::Retention;
use std::ops::Range;

/// Tokens whose blocks stay in the prefix cache in their own way.
#[derive(Clone, Debug)]
pub(crate) struct RetainRange {
    pub(crate) tokens: Range<u32>,
    pub(crate) retention: Retention,
    pub(crate) ttl_steps: Option<u32>,
}

/// How long, and how well, a block is kept once no table holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Keep {
    pub(super) retention: Retention,
    /// Steps without use after which it is gone; `None` for ever.
    pub(super) ttl_steps: Option<u32>,
}

/// The best that those of `ranges` say which `matter`.
fn best_of(ranges: &[RetainRange], matter: impl Fn(&RetainRange) -> bool) -> Keep {
    let best = ranges
        .iter()
        .filter(|range| matter(range))
        .max_by_key(|range| (range.retention, range.ttl_steps.map_or(u64::MAX, u64::from)));
    best.map_or(Keep::default(), |range| Keep { retention: range.retention, ttl_steps: range.ttl_steps })
}

/// How a node of these tokens is kept: it lies within some of `ranges`.
pub(super) fn keep_of(ranges: &[RetainRange], tokens: Range<u32>) -> Keep {
    if ranges.is_empty() {
        return Keep::default();
    }
    best_of(ranges, |range| range.tokens.start <= tokens.start && tokens.end <= range.tokens.end)
}

/// How well a block of a lane that slides is kept: a hit at the end of some of `ranges` needs it.
pub(super) fn keep_in_window(ranges: &[RetainRange], lane: &Lane, entry: u32, node_tokens: u32) -> Retention {
    let needs = |range: &RetainRange| {
        let end = range.tokens.end - range.tokens.end % node_tokens;
        range.tokens.start <= lane.tokens_before(entry)
            && (lane.first_of(end)..lane.end_of(end)).contains(&entry)
    };
    best_of(ranges, needs).retention
}
