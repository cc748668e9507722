//! One pass over keys and values for a set of queries of one kv head: what decode and prefill share.
//!
//! Keys are taken in tiles. A tile's rows are decoded once for all queries; per query the tile's logits are computed,
//! the running maximum raised, what was summed so far scaled down to it, and the weighted values added.

use crate::layout::KvPart;
use crate::reach::Reach;
use crate::reference::CpuCache;
use crate::reference::rule::{Logit, LogitBase2, visible};
use std::ops::Range;

/// Where a running maximum starts: finite, and below any logit of finite queries and keys.
pub(super) const LOWEST_LOGIT: f32 = f32::MIN;

/// Keys decoded at a time: enough to amortise the scaling down, few enough for the rows to stay in the first cache.
const KEY_TILE: u32 = 32;

/// Partial lanes of a dot product; head sizes are multiples of it.
const LANES: usize = 8;

/// The keys `first..end` of one sequence, as one kv head of one layer holds them.
#[derive(Clone, Copy)]
pub(super) struct KeySpan<'a> {
    pub(super) cache: &'a CpuCache,
    pub(super) layer: u32,
    pub(super) kv_head: u32,
    pub(super) table: &'a [u32],
    pub(super) first: u32,
    pub(super) end: u32,
}

/// Queries of one kv head and what they have summed so far.
pub(super) struct OnlineSoftmax {
    reach: Reach,
    k_len: usize,
    v_len: usize,
    /// Scaled queries, `[queries, k_len]`.
    queries: Vec<f32>,
    sights: Vec<Sight>,
    states: Vec<State>,
    /// Unnormalised sums of values, `[queries, v_len]`.
    accumulators: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// What a query sees, and what becomes of its products.
struct Sight {
    position: u32,
    /// The first tokens, and the rest.
    keys: [Range<u32>; 2],
    logit: LogitBase2,
}

/// The largest logit so far, in base 2, and the sum of weights relative to it.
#[derive(Clone, Copy)]
pub(super) struct State {
    pub(super) maximum: f32,
    pub(super) sum: f32,
}

impl State {
    /// The factor that a sum of values is divided by the sum of all weights with, that of a learned sink among them. 0
    /// where there was no key.
    pub(super) fn with_sink(self, sink: Option<f32>) -> f32 {
        let Self { maximum, sum } = self;
        match sink {
            _ if sum == 0.0 => 0.0,
            None => 1.0 / sum,
            Some(sink) => {
                let most = maximum.max(sink);
                let shrink = (maximum - most).exp2();
                shrink / (sum * shrink + (sink - most).exp2())
            }
        }
    }
}

impl OnlineSoftmax {
    pub(super) fn new(cache: &CpuCache, layer: u32) -> Self {
        let block = cache.layout().block_of(layer);
        let (k_len, v_len) = (block.k_head_dim() as usize, block.v_head_dim() as usize);
        Self {
            reach: cache.group(layer).reach(),
            k_len,
            v_len,
            queries: Vec::new(),
            sights: Vec::new(),
            states: Vec::new(),
            accumulators: Vec::new(),
            keys: vec![0.0; KEY_TILE as usize * k_len],
            values: vec![0.0; KEY_TILE as usize * v_len],
        }
    }

    /// Forgets all queries.
    pub(super) fn clear(&mut self) {
        self.queries.clear();
        self.sights.clear();
        self.states.clear();
        self.accumulators.clear();
    }

    /// Adds the query of a row at `position`.
    pub(super) fn push_query(&mut self, query: &[f32], logit: Logit, position: Option<u32>) {
        let logit = logit.base_2();
        self.queries.extend(query.iter().map(|x| x * logit.factor));
        let keys = visible(self.reach, position);
        self.sights.push(Sight { position: position.unwrap_or(0), keys, logit });
        self.states.push(State { maximum: LOWEST_LOGIT, sum: 0.0 });
        self.accumulators.resize(self.accumulators.len() + self.v_len, 0.0);
    }

    /// Runs all queries over the keys of `span` that they see, and those whose window begins in it over the first tokens,
    /// too. No key that none of them sees is read.
    pub(super) fn attend(&mut self, span: KeySpan<'_>) {
        let nothing = Range { start: u32::MAX, end: 0 };
        let mut seen = [0..0, nothing];
        for Sight { keys: [first, rest], .. } in &mut self.sights {
            if !(span.first..span.end).contains(&rest.start) {
                *first = 0..0;
            }
            *rest = rest.start.max(span.first)..rest.end.min(span.end);
            seen[0].end = seen[0].end.max(first.end);
            if rest.start < rest.end {
                seen[1] = seen[1].start.min(rest.start)..seen[1].end.max(rest.end);
            }
        }
        // Tiles lie at the same tokens for every query of every step, so that its bits do not depend on the others'.
        let tiles = |keys: &Range<u32>| keys.start / KEY_TILE..keys.end.div_ceil(KEY_TILE);
        let (first, rest) = (tiles(&seen[0]), tiles(&seen[1]));
        for tile in first.clone().chain(rest.start.max(first.end)..rest.end) {
            let tokens = tile * KEY_TILE..(tile + 1) * KEY_TILE;
            for part in &seen {
                self.read_tile(&span, tokens.start, common(part, &tokens));
            }
            for query in 0..self.sights.len() {
                for part in [0, 1] {
                    let keys = common(&self.sights[query].keys[part], &tokens);
                    if keys.start < keys.end {
                        self.attend_tile(query, tokens.start, keys);
                    }
                }
            }
        }
    }

    /// Decodes some keys of the tile that starts at `tile_start`.
    fn read_tile(&mut self, span: &KeySpan<'_>, tile_start: u32, tokens: Range<u32>) {
        let block_size = span.cache.layout().block_of(span.layer).block_size();
        let mut token = tokens.start;
        while token < tokens.end {
            let block = span.table[(token / block_size) as usize];
            let slot = token % block_size;
            let run = (block_size - slot).min(tokens.end - token) as usize;
            let at = (token - tile_start) as usize;
            let keys = &mut self.keys[at * self.k_len..][..run * self.k_len];
            span.cache.read_rows(span.layer, KvPart::K, block, span.kv_head, slot, keys);
            let values = &mut self.values[at * self.v_len..][..run * self.v_len];
            span.cache.read_rows(span.layer, KvPart::V, block, span.kv_head, slot, values);
            token += run as u32;
        }
    }

    /// Adds some keys of the tile that starts at `tile_start` to one query.
    fn attend_tile(&mut self, query: usize, tile_start: u32, keys: Range<u32>) {
        let query_row = &self.queries[query * self.k_len..][..self.k_len];
        let accumulator = &mut self.accumulators[query * self.v_len..][..self.v_len];
        let Sight { position, logit: rule, .. } = &self.sights[query];
        let (start, num_keys) = ((keys.start - tile_start) as usize, keys.len());
        let mut weights = [0.0; KEY_TILE as usize];
        let State { mut maximum, mut sum } = self.states[query];
        let rows = self.keys.chunks_exact(self.k_len).skip(start);
        for ((logit, key), token) in weights[..num_keys].iter_mut().zip(rows).zip(keys) {
            *logit = rule.logit(dot(query_row, key), position - token);
            maximum = maximum.max(*logit);
        }
        let shrink = (self.states[query].maximum - maximum).exp2();
        sum *= shrink;
        accumulator.iter_mut().for_each(|x| *x *= shrink);
        let rows = self.values.chunks_exact(self.v_len).skip(start);
        for (logit, value) in weights[..num_keys].iter().zip(rows) {
            let weight = (logit - maximum).exp2();
            sum += weight;
            accumulator.iter_mut().zip(value).for_each(|(x, v)| *x += weight * v);
        }
        self.states[query] = State { maximum, sum };
    }

    /// The finished output of a query: 0 when it saw no key.
    pub(super) fn write_output(&self, query: usize, output: &mut [f32]) {
        let accumulator = &self.accumulators[query * self.v_len..][..self.v_len];
        let factor = self.states[query].with_sink(self.sights[query].logit.sink);
        write_normalised(accumulator, factor, output);
    }

    /// A query's state as a partial result: sum of values, maximum, sum of weights.
    pub(super) fn write_partial(&self, query: usize, partial: &mut [f32]) {
        let accumulator = &self.accumulators[query * self.v_len..][..self.v_len];
        partial[..self.v_len].copy_from_slice(accumulator);
        partial[self.v_len] = self.states[query].maximum;
        partial[self.v_len + 1] = self.states[query].sum;
    }
}

fn common(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// Writes a sum of values times `factor`.
pub(super) fn write_normalised(accumulator: &[f32], factor: f32, output: &mut [f32]) {
    output.iter_mut().zip(accumulator).for_each(|(out, x)| *out = x * factor);
}

/// A dot product in independent lanes, which the compiler keeps in vector registers.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (a, b) in a.chunks_exact(LANES).zip(b.chunks_exact(LANES)) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let half: [f32; LANES / 2] = std::array::from_fn(|lane| lanes[lane] + lanes[lane + LANES / 2]);
    (half[0] + half[2]) + (half[1] + half[3])
}
