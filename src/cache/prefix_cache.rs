//! The prefix cache: full blocks, found again by what is in them.
//!
//! Every block that is registered is a *node* of a tree: its parent is the block before it, or the root of a
//! [`Namespace`]. It is found by a hash of its parent's hash and its own tokens, seeded per cache, and a hit is believed
//! only after parent and tokens have been compared (I6). So two nodes never have the same parent and the same tokens,
//! and a node means its whole history.
//!
//! A table that holds a node holds its parent, too, one entry before it. Tables give up their blocks last first, so a
//! node without a holder was given up after all its children: taking the node that was given up longest ago takes the
//! tail of a chain before its head. A node is retained no worse than its children; when its time to live has passed, what
//! continues it goes with it. That time begins when the last holder gives the node up, and a step begins by forgetting
//! what has passed: whatever is found is within its time.
//!
//! It knows blocks, tokens and steps; it holds no reference counts and does not know who asks.

use crate::cache::expiry::ExpiryQueue;
use crate::ids::{BlockId, TokenId};
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};

/// What some tokens after a certain history are known as: where a lane has everything, its block's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeId(pub(super) u32);

const NONE: u32 = u32::MAX;
/// Set in a parent that is a namespace.
const ROOT: u32 = 1 << 31;
/// Most children of a node that are looked at for a partial hit, the latest first.
const MAX_PARTIAL_CANDIDATES: usize = 64;

/// Who may share blocks with whom: sequences of one namespace, and no others.
///
/// Everything that changes what a token's keys and values are belongs in it, and a salt for users who must not learn by a
/// fast answer what others have asked. All zero by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace {
    /// Which model, where one cache serves several of the same shape.
    pub model: u64,
    /// Which adapter (LoRA) the model runs with.
    pub adapter: u64,
    /// Which position settings (RoPE base, scaling).
    pub positions: u64,
    /// Separates tenants. A random number, so that it cannot be guessed.
    pub salt: u64,
}

/// How long a block without a holder stays in the prefix cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Retention {
    /// Evicted before all others.
    Low,
    /// Evicted in the order in which blocks were last used.
    #[default]
    Normal,
    /// Evicted after all others.
    High,
    /// Stays, with two exceptions: the cache's cap, and a sequence that could not run even alone. Then what is pinned
    /// for a limited time goes first, because it goes anyway.
    Pinned,
}

impl Retention {
    pub(super) const COUNT: usize = 4;

    pub(super) fn from_index(index: u8) -> Self {
        [Self::Low, Self::Normal, Self::High, Self::Pinned][usize::from(index)]
    }
}

/// Why a prompt was not found further.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MissReason {
    /// Nothing was missed: all but the last token, which is always computed.
    #[default]
    None,
    /// There is no prefix cache.
    Disabled,
    /// What follows was never cached, or so long ago that nothing is known of it.
    Unseen,
    /// What follows was cached, and has been evicted.
    Evicted,
    /// What follows was cached for a limited number of steps, which have passed.
    Expired,
}

/// A time to live without an end, longer than any other.
const FOR_EVER: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    hash: u64,
    /// A block, a root, or `NONE` when the block is not registered.
    parent: u32,
    first_child: u32,
    next_sibling: u32,
    prev_sibling: u32,
    next_in_bucket: u32,
    /// Steps that it stays without a holder, or `FOR_EVER`.
    ttl_steps: u32,
}

const UNREGISTERED: Node = Node {
    hash: 0,
    parent: NONE,
    first_child: NONE,
    next_sibling: NONE,
    prev_sibling: NONE,
    next_in_bucket: NONE,
    ttl_steps: 0,
};

const EVICTED: u32 = 1;
const EXPIRED: u32 = 2;

/// What is remembered of a hash, besides its place and why it is gone.
fn trace_of(hash: u64) -> u32 {
    (hash >> 32) as u32 & !3
}

/// The namespace whose blocks a sequence shares: its own.
fn shared_by(namespace: &Namespace) -> Namespace {
    if fault!(NamespaceIgnored) { Namespace::default() } else { *namespace }
}

/// A time to live as a node has it. The longest limited one counts as the next longest.
fn node_ttl(ttl_steps: Option<u32>) -> u32 {
    ttl_steps.map_or(FOR_EVER, |steps| steps.min(FOR_EVER - 1))
}

#[derive(Clone, Copy, Debug)]
struct Root {
    namespace: Namespace,
    first_child: u32,
}

/// What no two nodes have in common: the node before it, or else the namespace that it is the first one in, and its tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeKey<'a> {
    pub(super) namespace: &'a Namespace,
    pub(super) parent: Option<NodeId>,
    /// Of all tokens up to these.
    pub(super) hash: u64,
    pub(super) tokens: &'a [TokenId],
}

/// What is found of a prompt.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefixMatch {
    /// Nodes that match in full, in order.
    pub(super) nodes: Vec<NodeId>,
    /// A node whose first tokens match what follows, and how many do.
    pub(super) partial: Option<(NodeId, u32)>,
    /// What a table takes in each lane.
    pub(super) runs: Vec<FoundRun>,
    /// Tokens found.
    pub(crate) num_tokens: u32,
    pub(crate) miss: MissReason,
}

/// What a match has in one lane.
#[derive(Clone, Debug, Default)]
pub(super) struct FoundRun {
    pub(super) first: u32,
    /// Blocks, in order; behind those of nodes that match in full come those of one that matches in part.
    pub(super) blocks: Vec<BlockId>,
    /// Those that nodes which match in full have.
    pub(super) num_full: u32,
}

impl PrefixMatch {
    /// Nodes that match in full.
    pub(crate) fn num_nodes(&self) -> u32 {
        self.nodes.len() as u32
    }

    /// Blocks of nodes that match in full.
    pub(crate) fn num_full_blocks(&self) -> u32 {
        self.runs.iter().map(|run| run.num_full).sum()
    }

    /// All blocks, sorted.
    pub(crate) fn sorted_blocks(&self) -> Vec<BlockId> {
        let mut blocks: Vec<BlockId> = self.runs.iter().flat_map(|run| run.blocks.iter().copied()).collect();
        blocks.sort_unstable();
        blocks
    }

    pub(crate) fn clear(&mut self) {
        self.nodes.clear();
        self.runs.iter_mut().for_each(|run| run.blocks.clear());
        (self.partial, self.num_tokens, self.miss) = (None, 0, MissReason::None);
    }
}

/// Bytes per node: 32 for itself, 4 for its place among those with a limited time, 4 to 8 for the buckets, 1 for what was
/// evicted, and its tokens.
#[derive(Debug)]
pub(super) struct PrefixCache {
    node_tokens: usize,
    state: RandomState,
    /// Every hash is this one: what a test of collisions asks for.
    constant_hash: Option<u64>,
    nodes: Vec<Node>,
    tokens: Vec<TokenId>,
    buckets: Vec<u32>,
    roots: Vec<Root>,
    free_roots: Vec<u32>,
    root_of: HashMap<Namespace, u32>,
    /// Traces of blocks that are gone, at a place that the hash names.
    evicted: Vec<u32>,
    /// Nodes with a limited time, as of when their last holder gave them up.
    expiries: ExpiryQueue,
    num_nodes: u32,
    /// Nodes that walks down the tree have visited: what tests of costs count.
    #[cfg(test)]
    pub(super) visits: std::cell::Cell<u64>,
}

impl PrefixCache {
    /// `max_nodes`, of `node_tokens` tokens each, is below 2^31.
    pub(super) fn new(max_nodes: u32, node_tokens: u32) -> Self {
        debug_assert!(max_nodes < ROOT, "a node cannot be told from a root");
        let num_buckets = max_nodes.next_power_of_two() as usize;
        Self {
            node_tokens: node_tokens as usize,
            state: RandomState::new(),
            constant_hash: None,
            nodes: vec![UNREGISTERED; max_nodes as usize],
            tokens: vec![0; max_nodes as usize * node_tokens as usize],
            buckets: vec![NONE; num_buckets],
            roots: Vec::new(),
            free_roots: Vec::new(),
            root_of: HashMap::new(),
            evicted: vec![0; (num_buckets / 4).max(64)],
            expiries: ExpiryQueue::new(max_nodes),
            num_nodes: 0,
            #[cfg(test)]
            visits: std::cell::Cell::default(),
        }
    }

    pub(super) fn set_constant_hash(&mut self, hash: Option<u64>) {
        debug_assert_eq!(self.num_nodes, 0, "hashes change while blocks are registered");
        self.constant_hash = hash;
    }

    pub(super) fn is_node(&self, block: NodeId) -> bool {
        self.nodes[block.0 as usize].parent != NONE
    }

    // Hashes.

    fn finish(&self, hasher: impl Hasher) -> u64 {
        self.constant_hash.unwrap_or_else(|| hasher.finish())
    }

    fn root_hash(&self, namespace: &Namespace) -> u64 {
        let mut hasher = self.state.build_hasher();
        shared_by(namespace).hash(&mut hasher);
        self.finish(hasher)
    }

    fn child_hash(&self, parent: u64, tokens: &[TokenId]) -> u64 {
        let mut hasher = self.state.build_hasher();
        hasher.write_u64(parent);
        tokens.hash(&mut hasher);
        self.finish(hasher)
    }

    /// Brings the hashes of a sequence's full blocks up to date: those of `tokens` that `hashes` does not have yet.
    pub(super) fn extend_hashes(&self, namespace: &Namespace, tokens: &[TokenId], hashes: &mut Vec<u64>) {
        let full = tokens.chunks_exact(self.node_tokens);
        for chunk in full.skip(hashes.len()) {
            let parent = hashes.last().copied().unwrap_or_else(|| self.root_hash(namespace));
            hashes.push(self.child_hash(parent, chunk));
        }
    }

    // Finding.

    /// The tokens that a hit may cover: all but the last one, which has to be computed for its logits.
    pub(super) fn findable(tokens: &[TokenId]) -> &[TokenId] {
        let limit =
            if fault!(FullHitComputesNothing) { tokens.len() } else { tokens.len().saturating_sub(1) };
        &tokens[..limit]
    }

    fn node(&self, block: u32) -> &Node {
        &self.nodes[block as usize]
    }

    pub(super) fn tokens_of(&self, block: NodeId) -> &[TokenId] {
        &self.tokens[block.0 as usize * self.node_tokens..][..self.node_tokens]
    }

    fn bucket(&self, hash: u64) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    fn find(&self, hash: u64, parent: u32, tokens: &[TokenId]) -> Option<NodeId> {
        let mut at = self.buckets[self.bucket(hash)];
        while at != NONE {
            let node = self.node(at);
            let alike = node.parent == parent && self.tokens_of(NodeId(at)) == tokens;
            if node.hash == hash && (alike || fault!(HitUnverified)) {
                return Some(NodeId(at));
            }
            at = node.next_in_bucket;
        }
        None
    }

    /// The nodes that `tokens` begin with, and why there are no more: `None` where the next full node's tokens end.
    /// `hashes` are those of its full nodes. Changes nothing.
    pub(super) fn walk(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        hashes: &[u64],
        nodes: &mut Vec<NodeId>,
    ) -> MissReason {
        let mut parent = self.parent_of_first(namespace);
        for (chunk, &hash) in tokens.chunks_exact(self.node_tokens).zip(hashes) {
            let known = if parent == NONE { None } else { self.find(hash, parent, chunk) };
            let Some(node) = known else { return self.reason_for(hash) };
            nodes.push(node);
            parent = node.0;
        }
        MissReason::None
    }

    fn parent_of_first(&self, namespace: &Namespace) -> u32 {
        let root = self.root_of.get(&shared_by(namespace)).copied();
        root.map_or(NONE, |root| ROOT | root)
    }

    /// The child of `parent` (or of the namespace's root) that begins with the most of `rest`, and with how much, of those
    /// that are `usable` so far.
    pub(super) fn longest_child(
        &self,
        namespace: &Namespace,
        parent: Option<NodeId>,
        rest: &[TokenId],
        usable: impl Fn(NodeId, u32) -> bool,
    ) -> Option<(NodeId, u32)> {
        let parent = parent.map_or_else(|| self.parent_of_first(namespace), |parent| parent.0);
        if parent == NONE || rest.is_empty() {
            return None;
        }
        let mut best = None;
        let mut child = *self.first_child(parent);
        for _ in 0..MAX_PARTIAL_CANDIDATES {
            if child == NONE {
                break;
            }
            let tokens = self.tokens_of(NodeId(child));
            let common = tokens.iter().zip(rest).take_while(|(a, b)| a == b).count() as u32;
            if common > best.map_or(0, |(_, most)| most) && usable(NodeId(child), common) {
                best = Some((NodeId(child), common));
            }
            child = self.node(child).next_sibling;
        }
        best
    }

    fn first_child(&self, parent: u32) -> &u32 {
        if parent & ROOT == 0 {
            &self.nodes[parent as usize].first_child
        } else {
            &self.roots[(parent & !ROOT) as usize].first_child
        }
    }

    fn first_child_mut(&mut self, parent: u32) -> &mut u32 {
        if parent & ROOT == 0 {
            &mut self.nodes[parent as usize].first_child
        } else {
            &mut self.roots[(parent & !ROOT) as usize].first_child
        }
    }

    // Registering.

    fn root(&mut self, namespace: &Namespace) -> u32 {
        let namespace = shared_by(namespace);
        if let Some(&root) = self.root_of.get(&namespace) {
            return ROOT | root;
        }
        let entry = Root { namespace, first_child: NONE };
        let root = match self.free_roots.pop() {
            Some(root) => {
                self.roots[root as usize] = entry;
                root
            }
            None => {
                self.roots.push(entry);
                self.roots.len() as u32 - 1
            }
        };
        self.root_of.insert(namespace, root);
        ROOT | root
    }

    /// The node with this parent and these tokens, if there is one.
    pub(super) fn find_node(&self, key: NodeKey<'_>) -> Option<NodeId> {
        let parent = match key.parent {
            Some(parent) => parent.0,
            None => ROOT | *self.root_of.get(&shared_by(key.namespace))?,
        };
        self.find(key.hash, parent, key.tokens)
    }

    /// Makes `block` a node that stays for `ttl_steps` without a holder. There is none with this parent and these tokens.
    pub(super) fn insert(&mut self, block: NodeId, key: NodeKey<'_>, ttl_steps: Option<u32>) {
        debug_assert!(!self.is_node(block), "{block:?} is registered twice");
        let NodeKey { namespace, parent, hash, tokens } = key;
        let parent = parent.map_or_else(|| self.root(namespace), |parent| parent.0);
        let first = self.first_child_mut(parent);
        let next_sibling = std::mem::replace(first, block.0);
        if next_sibling != NONE {
            self.nodes[next_sibling as usize].prev_sibling = block.0;
        }
        let bucket = self.bucket(hash);
        let next_in_bucket = std::mem::replace(&mut self.buckets[bucket], block.0);
        let ttl_steps = node_ttl(ttl_steps);
        self.nodes[block.0 as usize] =
            Node { hash, parent, next_sibling, next_in_bucket, ttl_steps, ..UNREGISTERED };
        self.tokens[block.0 as usize * self.node_tokens..][..self.node_tokens].copy_from_slice(tokens);
        self.num_nodes += 1;
    }

    /// The node before this one.
    pub(super) fn parent(&self, block: NodeId) -> Option<NodeId> {
        let parent = self.node(block.0).parent;
        (parent & ROOT == 0).then_some(NodeId(parent))
    }

    /// Keeps a node for at least `ttl_steps` without a holder. It has one now.
    pub(super) fn keep_for(&mut self, block: NodeId, ttl_steps: Option<u32>) {
        let ttl = &mut self.nodes[block.0 as usize].ttl_steps;
        *ttl = (*ttl).max(node_ttl(ttl_steps));
    }

    /// Whether a node goes when its time has passed.
    pub(super) fn is_limited(&self, block: NodeId) -> bool {
        self.nodes[block.0 as usize].ttl_steps != FOR_EVER
    }

    /// Whether this is a node that goes when its time has passed.
    pub(super) fn is_limited_node(&self, node: NodeId) -> bool {
        self.is_node(node) && self.is_limited(node)
    }

    /// The last holder gave a node up in step `now`: its time begins.
    pub(super) fn begin_time(&mut self, block: NodeId, now: u64) {
        if self.is_limited(block) {
            let ttl = u64::from(self.nodes[block.0 as usize].ttl_steps);
            self.expiries.set(block, now + ttl + 1);
        }
    }

    /// A block whose time has passed by step `now`, if no table has held it since it was given up. Each is told once.
    pub(super) fn pop_due(&mut self, now: u64) -> Option<NodeId> {
        self.expiries.pop_due(now)
    }

    // Forgetting.

    /// A node without children below `block`, or `block` itself.
    pub(super) fn last_descendant(&self, block: NodeId) -> NodeId {
        let mut at = block.0;
        loop {
            #[cfg(test)]
            self.visits.set(self.visits.get() + 1);
            match self.node(at).first_child {
                NONE => return NodeId(at),
                child => at = child,
            }
        }
    }

    /// Whether anything continues a node.
    pub(super) fn has_children(&self, node: NodeId) -> bool {
        self.node(node.0).first_child != NONE
    }

    /// Whether `is` holds of a node, or of one that continues it. O(nodes below it).
    pub(super) fn any_below(&self, node: NodeId, is: impl Fn(NodeId) -> bool) -> bool {
        let mut at = node.0;
        loop {
            if is(NodeId(at)) {
                return true;
            }
            let mut next = self.node(at).first_child;
            while next == NONE {
                if at == node.0 {
                    return false;
                }
                next = self.node(at).next_sibling;
                at = self.node(at).parent;
            }
            at = next;
        }
    }

    /// Removes a node that has no children.
    pub(super) fn remove(&mut self, block: NodeId) {
        let node = self.nodes[block.0 as usize];
        debug_assert!(node.parent != NONE, "{block:?} is not registered");
        debug_assert_eq!(node.first_child, NONE, "{block:?} is removed before its children");
        match node.prev_sibling {
            NONE => *self.first_child_mut(node.parent) = node.next_sibling,
            previous => self.nodes[previous as usize].next_sibling = node.next_sibling,
        }
        if node.next_sibling != NONE {
            self.nodes[node.next_sibling as usize].prev_sibling = node.prev_sibling;
        }
        self.unlink_from_bucket(block, node);
        self.nodes[block.0 as usize] = UNREGISTERED;
        self.num_nodes -= 1;
        if node.parent & ROOT != 0 {
            let root = node.parent & !ROOT;
            if self.roots[root as usize].first_child == NONE {
                self.root_of.remove(&self.roots[root as usize].namespace);
                self.free_roots.push(root);
            }
        }
    }

    /// Removes all nodes at once. What is remembered of those that are gone stays.
    pub(super) fn clear(&mut self) {
        self.nodes.fill(UNREGISTERED);
        self.buckets.fill(NONE);
        self.roots.clear();
        self.free_roots.clear();
        self.root_of.clear();
        self.num_nodes = 0;
    }

    fn unlink_from_bucket(&mut self, block: NodeId, node: Node) {
        let bucket = self.bucket(node.hash);
        if self.buckets[bucket] == block.0 {
            self.buckets[bucket] = node.next_in_bucket;
            return;
        }
        let mut at = self.buckets[bucket];
        while self.node(at).next_in_bucket != block.0 {
            at = self.node(at).next_in_bucket;
        }
        self.nodes[at as usize].next_in_bucket = node.next_in_bucket;
    }

    /// Remembers why a node is not found any more, as long as nothing else is remembered in its place.
    pub(super) fn note_eviction(&mut self, block: NodeId, why: MissReason) {
        let hash = self.node(block.0).hash;
        let place = hash as usize % self.evicted.len();
        self.evicted[place] = trace_of(hash) | if why == MissReason::Expired { EXPIRED } else { EVICTED };
    }

    /// Remembers all nodes as evicted.
    pub(super) fn note_all_evictions(&mut self) {
        for node in (0..self.nodes.len() as u32).map(NodeId) {
            if self.is_node(node) {
                self.note_eviction(node, MissReason::Evicted);
            }
        }
    }

    /// Why the node that had this hash is not found, if that is remembered.
    fn reason_for(&self, hash: u64) -> MissReason {
        let trace = self.evicted[hash as usize % self.evicted.len()];
        match trace.wrapping_sub(trace_of(hash)) {
            EVICTED => MissReason::Evicted,
            EXPIRED => MissReason::Expired,
            _ => MissReason::Unseen,
        }
    }

    pub(super) fn all_nodes(&self) -> impl Iterator<Item = NodeId> {
        (0..self.nodes.len() as u32).map(NodeId).filter(|&node| self.is_node(node))
    }

    /// Panics when links, buckets and counts disagree.
    pub(super) fn assert_consistent(&self) {
        let mut found = 0;
        for (index, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.parent != NONE) {
            found += 1;
            let block = NodeId(index as u32);
            let mut children = *self.first_child(node.parent);
            while children != NONE && children != block.0 {
                children = self.node(children).next_sibling;
            }
            assert_eq!(children, block.0, "I6: {block:?} is not among its parent's children");
            let twin = self.find(node.hash, node.parent, self.tokens_of(block));
            assert_eq!(twin, Some(block), "I6: two nodes have the same parent and tokens");
            if let Some(parent) = self.parent(block) {
                assert!(self.is_node(parent), "I6: the parent of {block:?} is not registered");
            }
            assert!(
                node.prev_sibling == NONE || self.node(node.prev_sibling).next_sibling == block.0,
                "I6: the siblings of {block:?} disagree"
            );
        }
        assert_eq!(found, self.num_nodes, "I6: nodes are miscounted");
        self.expiries.assert_consistent();
        for (&namespace, &root) in &self.root_of {
            assert_eq!(self.roots[root as usize].namespace, namespace, "I6: a root has two namespaces");
            assert_ne!(self.roots[root as usize].first_child, NONE, "I6: a namespace without blocks is kept");
        }
    }
}
