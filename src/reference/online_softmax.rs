//! One pass over keys and values for a set of queries of one kv head: what decode and prefill share.
//!
//! Keys are taken in tiles. A tile's rows are decoded once for all queries; per query the tile's logits are computed,
//! the running maximum raised, what was summed so far scaled down to it, and the weighted values added.

use crate::layout::KvPart;
use crate::reference::CpuCache;

/// Where a running maximum starts: finite, and below any logit of finite queries and keys.
pub(super) const LOWEST_LOGIT: f32 = f32::MIN;

/// Keys decoded at a time: enough to amortise the scaling down, few enough for the rows to stay in the first cache.
const KEY_TILE: usize = 32;

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
    k_len: usize,
    v_len: usize,
    /// Scaled queries, `[queries, k_len]`.
    queries: Vec<f32>,
    /// End of the keys that each query sees.
    visible_ends: Vec<u32>,
    maxima: Vec<f32>,
    sums: Vec<f32>,
    /// Unnormalised sums of values, `[queries, v_len]`.
    accumulators: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl OnlineSoftmax {
    pub(super) fn new(cache: &CpuCache) -> Self {
        let block = &cache.layout().block();
        let (k_len, v_len) = (block.k_head_dim() as usize, block.v_head_dim() as usize);
        Self {
            k_len,
            v_len,
            queries: Vec::new(),
            visible_ends: Vec::new(),
            maxima: Vec::new(),
            sums: Vec::new(),
            accumulators: Vec::new(),
            keys: vec![0.0; KEY_TILE * k_len],
            values: vec![0.0; KEY_TILE * v_len],
        }
    }

    /// Forgets all queries.
    pub(super) fn clear(&mut self) {
        self.queries.clear();
        self.visible_ends.clear();
        self.maxima.clear();
        self.sums.clear();
        self.accumulators.clear();
    }

    /// Adds a query that sees the keys before `visible_end`.
    pub(super) fn push_query(&mut self, query: &[f32], scale: f32, visible_end: u32) {
        let factor = scale * std::f32::consts::LOG2_E;
        self.queries.extend(query.iter().map(|x| x * factor));
        self.visible_ends.push(visible_end);
        self.maxima.push(LOWEST_LOGIT);
        self.sums.push(0.0);
        self.accumulators.resize(self.accumulators.len() + self.v_len, 0.0);
    }

    /// Runs all queries over the keys of `span` that they see. No key that none of them sees is read.
    pub(super) fn attend(&mut self, span: KeySpan<'_>) {
        let last_visible = self.visible_ends.iter().copied().max().unwrap_or(0);
        let end = span.end.min(last_visible);
        let mut tile_start = span.first;
        while tile_start < end {
            let tile_end = end.min(tile_start + KEY_TILE as u32);
            self.read_tile(&span, tile_start, tile_end);
            for query in 0..self.visible_ends.len() {
                let visible = self.visible_ends[query].min(tile_end).saturating_sub(tile_start);
                if visible > 0 {
                    self.attend_tile(query, visible as usize);
                }
            }
            tile_start = tile_end;
        }
    }

    fn read_tile(&mut self, span: &KeySpan<'_>, tile_start: u32, tile_end: u32) {
        let block_size = span.cache.layout().block().block_size();
        let mut token = tile_start;
        while token < tile_end {
            let block = span.table[(token / block_size) as usize];
            let slot = token % block_size;
            let run = (block_size - slot).min(tile_end - token) as usize;
            let at = (token - tile_start) as usize;
            let keys = &mut self.keys[at * self.k_len..][..run * self.k_len];
            span.cache.read_rows(span.layer, KvPart::K, block, span.kv_head, slot, keys);
            let values = &mut self.values[at * self.v_len..][..run * self.v_len];
            span.cache.read_rows(span.layer, KvPart::V, block, span.kv_head, slot, values);
            token += run as u32;
        }
    }

    /// Adds the first `num_keys` keys of the tile to one query.
    fn attend_tile(&mut self, query: usize, num_keys: usize) {
        let query_row = &self.queries[query * self.k_len..][..self.k_len];
        let accumulator = &mut self.accumulators[query * self.v_len..][..self.v_len];
        let mut weights = [0.0; KEY_TILE];
        let mut maximum = self.maxima[query];
        for (logit, key) in weights[..num_keys].iter_mut().zip(self.keys.chunks_exact(self.k_len)) {
            *logit = dot(query_row, key);
            maximum = maximum.max(*logit);
        }
        let shrink = (self.maxima[query] - maximum).exp2();
        let mut sum = self.sums[query] * shrink;
        accumulator.iter_mut().for_each(|x| *x *= shrink);
        for (logit, value) in weights[..num_keys].iter().zip(self.values.chunks_exact(self.v_len)) {
            let weight = (logit - maximum).exp2();
            sum += weight;
            accumulator.iter_mut().zip(value).for_each(|(x, v)| *x += weight * v);
        }
        self.maxima[query] = maximum;
        self.sums[query] = sum;
    }

    /// The finished output of a query: 0 when it saw no key.
    pub(super) fn write_output(&self, query: usize, output: &mut [f32]) {
        let accumulator = &self.accumulators[query * self.v_len..][..self.v_len];
        write_normalised(accumulator, self.sums[query], output);
    }

    /// A query's state as a partial result: sum of values, maximum, sum of weights.
    pub(super) fn write_partial(&self, query: usize, partial: &mut [f32]) {
        let accumulator = &self.accumulators[query * self.v_len..][..self.v_len];
        partial[..self.v_len].copy_from_slice(accumulator);
        partial[self.v_len] = self.maxima[query];
        partial[self.v_len + 1] = self.sums[query];
    }
}

/// Divides a sum of values by its sum of weights; without a key the sum of weights is 0, and so is the output.
pub(super) fn write_normalised(accumulator: &[f32], sum: f32, output: &mut [f32]) {
    let factor = if sum == 0.0 { 0.0 } else { 1.0 / sum };
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
