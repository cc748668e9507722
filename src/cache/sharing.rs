//! The prefix cache as tables see it: finding and taking what is known, registering what was computed.

use crate::cache::KvCache;
use crate::cache::block_table::Run;
use crate::cache::keep::{Keep, RetainRange, keep_in_window, keep_of};
use crate::cache::lane::Lane;
use crate::cache::prefix_cache::{
    FoundRun, MissReason, Namespace, NodeId, NodeKey, PrefixCache, PrefixMatch, Retention,
};
use crate::error::{CacheError, ConfigError};
use crate::ids::{BlockId, TableId, TokenId};

impl KvCache {
    /// Turns the prefix cache on: full blocks that are [registered](Self::register_prefix) are found again by their
    /// content. At most `max_cached_blocks` of them stay without a holder; all that are free by default.
    ///
    /// # Errors
    /// [`ConfigError::Overflow`] for a pool of 2^31 blocks or more.
    pub fn enable_prefix_cache(&mut self, max_cached_blocks: Option<u32>) -> Result<(), ConfigError> {
        let num_blocks = self.config.num_blocks();
        if num_blocks > i32::MAX as u32 {
            return Err(ConfigError::Overflow { what: "blocks of a prefix cache" });
        }
        self.max_cached_blocks = max_cached_blocks.unwrap_or(num_blocks);
        if self.prefix.is_none() {
            self.prefix = Some(PrefixCache::new(self.nodes.enable(num_blocks), self.node_tokens));
        }
        Ok(())
    }

    /// Makes all hashes alike, to test that hits are compared. Not part of the stable interface.
    #[doc(hidden)]
    pub fn set_constant_hash(&mut self, hash: Option<u64>) {
        if let Some(prefix) = &mut self.prefix {
            prefix.set_constant_hash(hash);
        }
    }

    /// How many of `tokens` are in the prefix cache. Tokens of a block's beginning count; the last token never does,
    /// because it has to be computed for its logits. Changes nothing.
    pub fn find_prefix(&self, namespace: &Namespace, tokens: &[TokenId]) -> u32 {
        let (mut hashes, mut found) = (Vec::new(), PrefixMatch::default());
        self.extend_hashes(namespace, tokens, &mut hashes);
        self.find_match(namespace, tokens, &hashes, &mut found);
        found.num_tokens
    }

    /// Opens a table that begins with what is known of `tokens`, for a sequence of at most `max_tokens` tokens. Returns
    /// how many tokens it holds; the rest is to be pushed.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_with_prefix(
        &mut self,
        namespace: &Namespace,
        tokens: &[TokenId],
        max_tokens: u32,
    ) -> Result<(TableId, u32), CacheError> {
        let (mut hashes, mut found) = (Vec::new(), PrefixMatch::default());
        self.extend_hashes(namespace, tokens, &mut hashes);
        self.find_match(namespace, tokens, &hashes, &mut found);
        let table = self.create(max_tokens.max(u32::try_from(tokens.len()).unwrap_or(u32::MAX)))?;
        Ok((table, self.adopt(table, &found)))
    }

    /// Registers the full blocks of a table's first tokens, `tokens`, so that others find them. Call it when the step
    /// that computed them is committed and its results are valid. A block that another table has registered with the
    /// same history takes the place of the table's own.
    ///
    /// # Errors
    /// [`CacheError::BeyondLength`] for more tokens than the table holds, [`CacheError::InStep`], and as
    /// [`len`](Self::len).
    pub fn register_prefix(
        &mut self,
        table: TableId,
        namespace: &Namespace,
        tokens: &[TokenId],
    ) -> Result<(), CacheError> {
        let len = self.idle(table)?.len;
        if tokens.len() > len as usize {
            return Err(CacheError::BeyondLength { tokens: tokens.len() as u32, len });
        }
        self.register(table, namespace, tokens, &mut Vec::new(), &[]);
        Ok(())
    }

    /// Tokens of a node of the prefix cache: the larger block of the stacks'.
    pub(crate) fn node_tokens(&self) -> u32 {
        self.node_tokens
    }

    /// Nodes of a sequence of `len` tokens.
    pub(crate) fn nodes_of(&self, len: u32) -> usize {
        len.div_ceil(self.node_tokens) as usize
    }

    pub(crate) fn has_prefix_cache(&self) -> bool {
        self.prefix.is_some()
    }

    /// Brings the hashes of a sequence's full nodes up to date.
    pub(crate) fn extend_hashes(&self, namespace: &Namespace, tokens: &[TokenId], hashes: &mut Vec<u64>) {
        if let Some(prefix) = &self.prefix {
            prefix.extend_hashes(namespace, tokens, hashes);
        }
    }

    // Finding.

    /// What is known of `tokens`: the longest beginning of which every lane has what its rows see there. Changes nothing.
    pub(crate) fn find_match(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        hashes: &[u64],
        found: &mut PrefixMatch,
    ) {
        found.clear();
        let Some(prefix) = &self.prefix else {
            found.miss = MissReason::Disabled;
            return;
        };
        let tokens = PrefixCache::findable(tokens);
        found.miss = prefix.walk(namespace, tokens, hashes, &mut found.nodes);
        let num_nodes = self.usable_nodes(&found.nodes);
        let rest = &tokens[num_nodes * self.node_tokens as usize..];
        if num_nodes < found.nodes.len() {
            found.nodes.truncate(num_nodes);
            found.miss = MissReason::Evicted;
        } else {
            let usable = |node, rows| self.is_usable_in_part(num_nodes as u32, node, rows);
            found.partial = prefix.longest_child(namespace, found.nodes.last().copied(), rest, usable);
        }
        let rows = found.partial.map_or(0, |(_, rows)| rows);
        if rows as usize == rest.len() {
            found.miss = MissReason::None;
        } else if found.miss == MissReason::None {
            found.miss = MissReason::Unseen;
        }
        found.num_tokens = num_nodes as u32 * self.node_tokens + rows;
        self.fill_runs(found);
    }

    /// How many of these nodes, from the first on, can be taken: up to the last one at whose end no lane lacks a block that
    /// is kept there.
    fn usable_nodes(&self, nodes: &[NodeId]) -> usize {
        if self.is_plain || fault!(HitLacksWindow) {
            return nodes.len();
        }
        // Of each lane: from here on it lacks nothing.
        let mut since: Vec<u32> = self.lanes.iter().map(|lane| lane.start).collect();
        let mut usable = 0;
        for (place, &node) in (0..).zip(nodes) {
            for (lane, since) in self.lanes.iter().zip(&mut since) {
                let entries = self.nodes.entries_at(lane, place).filter(|&entry| lane.covers(entry));
                let lacking = |&entry: &u32| self.nodes.block_at(node, lane, entry).is_none();
                *since = entries.filter(lacking).map(|entry| entry + 1).max().unwrap_or(*since);
            }
            let len = (place + 1) * self.node_tokens;
            if self.lanes.iter().zip(&since).all(|(lane, &since)| since <= lane.first_of(len)) {
                usable = place as usize + 1;
            }
        }
        usable
    }

    /// Whether no lane lacks what `rows` tokens of `node`, after `place` nodes that can be taken, need of it.
    fn is_usable_in_part(&self, place: u32, node: NodeId, rows: u32) -> bool {
        let len = place * self.node_tokens + rows;
        self.is_plain
            || self.lanes.iter().all(|lane| {
                let kept = lane.first_of(len)..lane.end_of(len);
                let mut of_node = self.nodes.entries_at(lane, place).filter(|entry| kept.contains(entry));
                of_node.all(|entry| self.nodes.block_at(node, lane, entry).is_some())
            })
    }

    /// Leaves out what matches in part. Returns whether there was any.
    pub(crate) fn drop_partial(&self, found: &mut PrefixMatch) -> bool {
        let Some((_, rows)) = found.partial.take() else { return false };
        found.num_tokens -= rows;
        // A window that ends earlier begins earlier.
        self.fill_runs(found);
        true
    }

    fn fill_runs(&self, found: &mut PrefixMatch) {
        found.runs.resize_with(self.lanes.len(), FoundRun::default);
        let PrefixMatch { nodes, partial, runs, num_tokens, .. } = found;
        for (lane, run) in self.lanes.iter().zip(runs) {
            run.first = lane.first_of(*num_tokens);
            run.blocks.clear();
            for entry in run.first..lane.end_of(*num_tokens) {
                let place = self.nodes.place_of(lane, entry) as usize;
                if place >= nodes.len() {
                    break;
                }
                run.blocks.extend(self.nodes.block_at(nodes[place], lane, entry));
            }
            run.num_full = run.blocks.len() as u32;
            let Some((node, _)) = *partial else { continue };
            let rest = run.first + run.num_full..lane.end_of(*num_tokens);
            run.blocks.extend(rest.filter_map(|entry| self.nodes.block_at(node, lane, entry)));
        }
    }

    // Taking.

    /// Blocks that taking a match takes from those available.
    pub(crate) fn blocks_taken_by(&self, found: &PrefixMatch) -> u32 {
        let counts = |&&block: &&BlockId| {
            self.pool.ref_count(block) == 0 && self.pool.retention(block) != Retention::Pinned
        };
        found.runs.iter().map(|run| run.blocks.iter().filter(counts).count() as u32).sum()
    }

    /// Blocks of a match that last, of nodes that match in full.
    pub(crate) fn lasting_found(&self, found: &PrefixMatch) -> impl Iterator<Item = BlockId> {
        let runs = self.lanes.iter().zip(&found.runs).filter(|(lane, _)| !lane.slides());
        runs.flat_map(|(_, run)| run.blocks[..run.num_full as usize].iter().copied())
    }

    /// Gives an empty table what was found. Returns its tokens.
    pub(crate) fn adopt(&mut self, table: TableId, found: &PrefixMatch) -> u32 {
        let row = table.row as usize;
        let len = found.num_tokens;
        for (lane, run) in found.runs.iter().enumerate() {
            let own = &mut self.tables[row].runs[lane];
            (own.first, own.dirty_from) = (run.first, run.first);
            for &block in &run.blocks {
                self.pool.retain(block);
                // A hit has needed it, and others may.
                self.pool.set_loose(block, false);
                self.push_block(row, lane, block);
            }
            let tail = self.lanes[lane].tail_of(len).filter(|_| found.partial.is_some());
            self.tables[row].runs[lane].borrowed = tail;
        }
        self.tables[row].len = len;
        if let Some(aside) = self.asides.get_mut(row) {
            aside.likely_hits[0] = len;
        }
        let nodes = found.nodes.iter().chain(found.partial.iter().map(|(node, _)| node));
        for &node in nodes.take(self.most_nodes(len) as usize) {
            self.step_to(row, node);
        }
        len
    }

    // Which nodes a table is.

    /// The node at `place` of a table, which is registered there.
    pub(super) fn node_at(&self, row: usize, place: u32) -> NodeId {
        if !self.nodes.is_anchored() {
            return self.asides[row].path[place as usize];
        }
        let entry = self.nodes.anchor_of(place).unwrap_or(0);
        NodeId(self.tables[row].runs[0].blocks[entry as usize].0)
    }

    /// How many nodes a table of `len` tokens can be: it has all that is essential of them, if of the last one only the
    /// beginning.
    pub(super) fn most_nodes(&self, len: u32) -> u32 {
        let whole = self.lanes.iter().filter(|lane| lane.is_whole());
        let of_lane = |lane: &Lane| self.nodes.place_of(lane, lane.end_of(len));
        whole.map(of_lane).fold(len.div_ceil(self.node_tokens), u32::min)
    }

    /// A table is one node more.
    pub(super) fn step_to(&mut self, row: usize, node: NodeId) {
        self.tables[row].registered += 1;
        if !self.nodes.is_anchored() {
            let path = &mut self.asides[row].path;
            if let Some(&tip) = path.last() {
                self.nodes.count_tip(tip, -1);
            }
            path.push(node);
            self.nodes.count_tip(node, 1);
        }
    }

    /// A table is its first `places` nodes at most.
    pub(super) fn step_back(&mut self, row: usize, places: u32) {
        let table = &mut self.tables[row];
        if table.registered <= places {
            return;
        }
        table.registered = places;
        if self.nodes.is_anchored() {
            return;
        }
        let path = &mut self.asides[row].path;
        let tip = path.last().copied();
        path.truncate(places as usize);
        if let Some(&tip) = path.last() {
            self.nodes.count_tip(tip, 1);
        }
        if let Some(tip) = tip.filter(|&tip| self.prefix.as_ref().is_some_and(|prefix| prefix.is_node(tip))) {
            self.nodes.count_tip(tip, -1);
            self.prune(tip);
        }
    }

    /// Tables are no nodes that have been forgotten.
    pub(super) fn step_back_to_nodes(&mut self) {
        for row in 0..self.tables.len() {
            if !self.tables[row].live {
                continue;
            }
            let mut places = self.tables[row].registered;
            while places > 0 && !self.is_node(self.node_at(row, places - 1)) {
                places -= 1;
            }
            self.step_back(row, places);
            for run in self.tables[row].runs.iter_mut() {
                let is_known =
                    |&entry: &u32| run.block_at(entry).is_some_and(|block| self.pool.is_cached(block));
                run.borrowed = run.borrowed.filter(is_known);
            }
        }
    }

    fn is_node(&self, node: NodeId) -> bool {
        self.prefix.as_ref().is_some_and(|prefix| prefix.is_node(node))
    }

    // Registering.

    /// Keeps the first `num_nodes` nodes of a table as long and as well as `retain` says.
    pub(crate) fn keep_nodes(&mut self, table: TableId, num_nodes: u32, retain: &[RetainRange]) {
        let row = table.row as usize;
        for place in 0..num_nodes.min(self.tables[row].registered) {
            let keep = keep_of(retain, place * self.node_tokens..(place + 1) * self.node_tokens);
            self.raise_keep(row, self.node_at(row, place), place, keep, retain);
        }
    }

    /// Registers the full nodes of a table's first tokens, which are committed and valid, and brings their hashes up to date.
    /// Returns how many tokens end with the first of them that is new to the table, if any is.
    #[inline]
    pub(crate) fn register(
        &mut self,
        table: TableId,
        namespace: &Namespace,
        tokens: &[TokenId],
        hashes: &mut Vec<u64>,
        retain: &[RetainRange],
    ) -> Option<u32> {
        let (row, size) = (table.row as usize, self.node_tokens as usize);
        let before = self.tables[row].registered;
        // Most steps of a sequence fill no node.
        let end = (before as usize + 1) * size;
        let prefix = self.prefix.as_ref().filter(|_| end <= tokens.len())?;
        if hashes.len() < tokens.len() / size {
            prefix.extend_hashes(namespace, tokens, hashes);
        }
        let mut parent = before.checked_sub(1).map(|last| self.node_at(row, last));
        let known = hashes.iter().zip(tokens.chunks_exact(size));
        for (&hash, tokens) in known.skip(before as usize) {
            let key = NodeKey { namespace, parent, hash, tokens };
            parent = self.register_next(row, key, retain);
            if parent.is_none() {
                break;
            }
        }
        (self.tables[row].registered > before).then_some(end as u32)
    }

    /// A table is one node more: the one that is known by this key, or a new one. None for a node that is known while others
    /// share this table's own block: replacing it for one of them would leave their order uneven. None also for a node some of
    /// whose blocks are another one's, and for one that would go by a block that is not in the pool.
    fn register_next(&mut self, row: usize, key: NodeKey<'_>, retain: &[RetainRange]) -> Option<NodeId> {
        let place = self.tables[row].registered;
        // Where a node goes by a block, that block's number is its own.
        let entry = if self.is_plain { Some(place) } else { self.nodes.anchor_of(place) };
        let anchor = match entry {
            Some(entry) => Some(NodeId(self.tables[row].runs[0].block_at(entry)?.0)),
            None => None,
        };
        let keep = keep_of(retain, place * self.node_tokens..(place + 1) * self.node_tokens);
        if let Some(known) = self.prefix.as_ref()?.find_node(key) {
            if !self.join(row, place, known) {
                return None;
            }
            self.step_to(row, known);
            self.raise_keep(row, known, place, keep, retain);
            return Some(known);
        }
        if !self.is_plain && self.is_partly_anothers(row, place) {
            return None;
        }
        let node = anchor.or_else(|| self.take_number())?;
        self.prefix.as_mut()?.insert(node, key, keep.ttl_steps);
        if self.is_plain {
            // The node is the block whose number it goes by.
            self.tables[row].registered += 1;
            self.pool.set_cached(BlockId(node.0), keep.retention, keep.ttl_steps.is_some());
        } else {
            self.attach_own(row, place, node, keep, retain);
            self.step_to(row, node);
        }
        if let Some(parent) = key.parent {
            self.raise_to(parent, keep.retention);
        }
        Some(node)
    }

    /// Whether a new node at `place` would share blocks that keep everything with another one, which begins alike: where a
    /// node has several such blocks, a table may have left the other one after some of them.
    fn is_partly_anothers(&self, row: usize, place: u32) -> bool {
        let is_known = |(lane, run): (&Lane, &Run)| {
            let mut own = self.nodes.entries_at(lane, place).filter_map(|entry| run.block_at(entry));
            lane.is_whole() && own.any(|own| self.pool.is_cached(own))
        };
        self.lanes.iter().zip(self.tables[row].runs.iter()).any(is_known)
    }

    /// A number for a node that goes by none of its blocks'.
    fn take_number(&mut self) -> Option<NodeId> {
        loop {
            if let Some(node) = self.nodes.take_number() {
                return Some(node);
            }
            // Nodes without blocks are as many as may be: what was used least recently makes room.
            let oldest = self.pool.oldest_evictable().or_else(|| self.pool.oldest_retained())?;
            self.evict(oldest);
        }
    }

    /// Gives a node those of a table's blocks at `place` that it lacks, and the table the node's blocks instead of its own
    /// where both have one. Fails where that would part what others share.
    fn join(&mut self, row: usize, place: u32, known: NodeId) -> bool {
        let parts = |cache: &Self, lane: usize, entry: u32| {
            let own = cache.tables[row].runs[lane].block_at(entry);
            let other = cache.nodes.block_at(known, &cache.lanes[lane], entry);
            own.filter(|&own| Some(own) != other && cache.pool.ref_count(own) > 1).is_some()
        };
        for lane in (0..self.lanes.len()).filter(|&lane| self.lanes[lane].is_whole()) {
            let mut entries = self.nodes.entries_at(&self.lanes[lane], place);
            if entries.any(|entry| parts(self, lane, entry)) {
                return false;
            }
        }
        for lane in 0..self.lanes.len() {
            for entry in self.nodes.entries_at(&self.lanes[lane], place) {
                let Some(own) = self.tables[row].runs[lane].block_at(entry) else { continue };
                match self.nodes.block_at(known, &self.lanes[lane], entry) {
                    Some(other) if other == own || parts(self, lane, entry) => {}
                    _ if !self.follows(row, lane, entry, known) => {}
                    Some(other) => {
                        self.pool.retain(other);
                        self.replace_block(row, lane, entry, other);
                        self.tables[row].runs[lane].mark_dirty(entry);
                        self.release_block(own);
                    }
                    None if self.pool.is_cached(own) => {}
                    None => self.attach(row, lane, entry, known, Retention::default()),
                }
            }
        }
        true
    }

    /// Gives a new node all blocks that a table has of it, to be kept as `keep` and, behind windows, `retain` say.
    fn attach_own(&mut self, row: usize, place: u32, node: NodeId, keep: Keep, retain: &[RetainRange]) {
        for lane in 0..self.lanes.len() {
            for entry in self.nodes.entries_at(&self.lanes[lane], place) {
                let retention = match self.lanes[lane].is_whole() {
                    true => keep.retention,
                    false => keep_in_window(retain, &self.lanes[lane], entry, self.node_tokens),
                };
                self.attach(row, lane, entry, node, retention);
            }
        }
    }

    /// Whether what a table has before `entry`, a block of `node`, is what the prefix cache has there, or nothing: only
    /// then do those that share the block agree before it.
    fn follows(&self, row: usize, lane: usize, entry: u32, node: NodeId) -> bool {
        let run = &self.tables[row].runs[lane];
        if self.is_plain || entry == run.first {
            return true;
        }
        let lane = &self.lanes[lane];
        let place = self.nodes.place_of(lane, entry - 1);
        let node = if place == self.nodes.place_of(lane, entry) { node } else { self.node_at(row, place) };
        self.nodes.block_at(node, lane, entry - 1) == run.block_at(entry - 1)
    }

    fn attach(&mut self, row: usize, lane: usize, entry: u32, node: NodeId, retention: Retention) {
        let own = self.tables[row].runs[lane].block_at(entry);
        let Some(own) = own.filter(|&own| !self.pool.is_cached(own)) else { return };
        if !self.follows(row, lane, entry, node) {
            return;
        }
        let limited = self.prefix.as_ref().is_some_and(|prefix| prefix.is_limited(node));
        self.nodes.attach(node, &self.lanes[lane], entry, own);
        self.pool.set_cached(own, retention, limited);
    }

    /// Keeps a node for longer, and retains it better, if `keep` says so of the node at `place`. Blocks of windows are
    /// kept where a hit at the end of what is retained needs them. They are pinned only where the table of `row` holds
    /// them: others were available, and may be promised.
    fn raise_keep(&mut self, row: usize, node: NodeId, place: u32, keep: Keep, retain: &[RetainRange]) {
        let Some(prefix) = &mut self.prefix else { return };
        prefix.keep_for(node, keep.ttl_steps);
        let limited = prefix.is_limited(node);
        for (block, essential) in self.nodes.blocks_of(node) {
            let retention = if essential { keep.retention } else { Retention::Low };
            self.pool.set_cached(block, retention.max(self.pool.retention(block)), limited);
        }
        let windows =
            self.lanes.iter().zip(self.tables[row].runs.iter()).filter(|(lane, _)| !lane.is_whole());
        for (lane, run) in windows.filter(|_| !retain.is_empty()) {
            for entry in self.nodes.entries_at(lane, place).filter(|&entry| lane.covers(entry)) {
                let Some(block) = self.nodes.block_at(node, lane, entry) else { continue };
                let retention = keep_in_window(retain, lane, entry, self.node_tokens);
                let is_held = run.block_at(entry) == Some(block);
                let retention = if is_held { retention } else { retention.min(Retention::High) };
                self.pool.set_cached(block, retention.max(self.pool.retention(block)), limited);
            }
        }
        if let Some(parent) = prefix.parent(node) {
            self.raise_to(parent, keep.retention);
        }
    }

    /// A node is retained no worse than what continues it.
    fn raise_to(&mut self, node: NodeId, retention: Retention) {
        let Some(prefix) = &self.prefix else { return };
        let mut at = Some(node).filter(|_| self.nodes.is_anchored());
        while let Some(node) = at.filter(|node| retention > self.pool.retention(BlockId(node.0))) {
            let limited = prefix.is_limited(node);
            for (block, _) in self.nodes.blocks_of(node).filter(|&(_, essential)| essential) {
                self.pool.set_cached(block, retention, limited);
            }
            at = prefix.parent(node);
        }
    }
}
