//! A model of two layers, one kv head and two query heads, whose weights are chance.
//!
//! Queries, keys and values of the first layer follow from token, position and namespace; those of the second from the
//! first one's output as well. So what a row computes depends on every key and value that it reads, and on what those
//! were computed from: one block of another sequence, position or namespace, however long ago it was read, changes it.
//!
//! [`FakeModel::expected`] computes the same on the tokens alone, by dense attention in f64, and remembers it by the hash
//! of the history.

use crate::simulated_device::{EMPTY, then};
use paged_kv::reference::{DenseInputs, dense_attention};
use paged_kv::{LogitRule, ModelShape, Reach};
use std::collections::HashMap;

pub(crate) const SHAPE: ModelShape = ModelShape::new(LAYERS as u32, 2, 1, HEAD as u32);
pub(crate) const LAYERS: usize = 2;
pub(crate) const HEAD: usize = 8;
pub(crate) const QUERY: usize = 2 * HEAD;

/// Outputs of both layers.
pub(crate) type Outputs = [[f32; QUERY]; LAYERS];

/// One row's activations in one layer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Activations {
    pub(crate) query: [f32; QUERY],
    pub(crate) key: [f32; HEAD],
    pub(crate) value: [f32; HEAD],
}

/// Numbers in -1..1 that follow from a hash.
fn noise<const LEN: usize>(mut hash: u64, kind: u32) -> [f32; LEN] {
    std::array::from_fn(|_| {
        hash = then(hash, kind);
        (hash >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}

/// What a layer makes of a token, `below` being the output of the layer below it.
pub(crate) fn activations(
    salt: u64,
    token: u32,
    position: u32,
    layer: u32,
    below: Option<&[f32; QUERY]>,
) -> Activations {
    let hash = [salt as u32, token, position, layer].into_iter().fold(EMPTY, then);
    let mut own = Activations { query: noise(hash, 1), key: noise(hash, 2), value: noise(hash, 3) };
    let Some(below) = below else { return own };
    for index in 0..HEAD {
        let (first, second) = (below[index], below[index + HEAD]);
        own.query[index] += first;
        own.query[index + HEAD] -= second;
        own.key[index] += first - second;
        own.value[index] += first + second;
    }
    own
}

/// What a history leaves behind in each layer: its last token's key, value and output.
#[derive(Clone, Copy, Debug, Default)]
struct Node {
    keys: [[f32; HEAD]; LAYERS],
    values: [[f32; HEAD]; LAYERS],
    outputs: Outputs,
}

/// The model without a cache.
#[derive(Debug, Default)]
pub(crate) struct FakeModel {
    known: HashMap<u64, Node>,
}

impl FakeModel {
    /// Outputs of the last token of `tokens`, all alone.
    pub(crate) fn expected(&mut self, salt: u64, tokens: &[u32]) -> Outputs {
        let mut hashes = Vec::with_capacity(tokens.len());
        let mut hash = then(EMPTY, salt as u32);
        for &token in tokens {
            hash = then(hash, token);
            hashes.push(hash);
        }
        let known = hashes.iter().rposition(|hash| self.known.contains_key(hash)).map_or(0, |last| last + 1);
        let mut history: Vec<Node> = hashes[..known].iter().map(|hash| self.known[hash]).collect();
        for position in known..tokens.len() {
            let node = compute(salt, tokens[position], &history);
            self.known.insert(hashes[position], node);
            history.push(node);
        }
        history.last().map_or(Outputs::default(), |node| node.outputs)
    }
}

/// The token after `history`.
fn compute(salt: u64, token: u32, history: &[Node]) -> Node {
    let mut node = Node::default();
    for layer in 0..LAYERS {
        let below = layer.checked_sub(1).map(|below| &node.outputs[below]);
        let own = activations(salt, token, history.len() as u32, layer as u32, below);
        (node.keys[layer], node.values[layer]) = (own.key, own.value);
        let keys: Vec<f32> = history.iter().chain([&node]).flat_map(|node| node.keys[layer]).collect();
        let values: Vec<f32> = history.iter().chain([&node]).flat_map(|node| node.values[layer]).collect();
        let dense = dense_attention(&DenseInputs {
            query: &own.query,
            keys: &keys,
            values: &values,
            num_query_heads: 2,
            num_kv_heads: 1,
            k_head_dim: HEAD as u32,
            v_head_dim: HEAD as u32,
            reach: Reach::All,
            logits: &LogitRule::new(),
            layer: 0,
        });
        node.outputs[layer] = std::array::from_fn(|index| dense.output[index] as f32);
    }
    node
}
