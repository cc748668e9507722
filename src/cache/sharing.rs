//! The prefix cache as tables see it: finding and taking what is known, registering what was computed, evicting and
//! forgetting.

use crate::cache::KvCache;
use crate::cache::prefix_cache::{Keep, MissReason, Namespace, PrefixCache, PrefixMatch, Retention};
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
        self.prefix.get_or_insert_with(|| PrefixCache::new(num_blocks, self.config.block_size()));
        Ok(())
    }

    /// Makes all hashes alike, to test that hits are compared. Not part of the stable interface.
    #[doc(hidden)]
    pub fn set_constant_hash(&mut self, hash: Option<u64>) {
        if let Some(prefix) = &mut self.prefix {
            prefix.set_constant_hash(hash);
        }
    }

    /// How many of `tokens` are in the prefix cache: never the last one, which has to be computed for its logits, and
    /// tokens of a block's beginning count, too. Changes nothing.
    pub fn find_prefix(&self, namespace: &Namespace, tokens: &[TokenId]) -> u32 {
        let (mut hashes, mut found) = (Vec::new(), PrefixMatch::default());
        self.extend_hashes(namespace, tokens, &mut hashes);
        self.find_match(namespace, tokens, &hashes, &mut found);
        found.num_tokens(self.config.block_size())
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
    /// that computed them is committed and its results are valid. A block that somebody else has registered with the
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
        let mut hashes = Vec::new();
        self.extend_hashes(namespace, tokens, &mut hashes);
        self.register(table, namespace, tokens, &hashes, |_| Keep::default());
        Ok(())
    }

    /// Forgets all blocks of a table from the `first`-th on, and whatever continues them: nobody finds them any more.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    ///
    /// # Complexity
    /// O(blocks forgotten + tables + entries of tables that are found no more).
    pub fn forget_prefix(&mut self, table: TableId, first: u32) -> Result<(), CacheError> {
        let row = self.live(table)?;
        if first < row.registered {
            self.forget_from(row.blocks[first as usize]);
        }
        for row in self.tables.iter_mut().filter(|row| row.live) {
            while row.registered > 0 && !self.pool.is_cached(row.blocks[row.registered as usize - 1]) {
                row.registered -= 1;
            }
            row.borrowed = row.borrowed.filter(|&entry| entry < row.registered);
        }
        Ok(())
    }

    /// Blocks of a table, from the first on, that others can find.
    pub(crate) fn registered_blocks(&self, table: TableId) -> u32 {
        self.live(table).map_or(0, |row| row.registered)
    }

    /// Whether a block stays in the prefix cache although others need blocks.
    pub(crate) fn is_retained(&self, block: BlockId) -> bool {
        self.pool.is_pinned_content(block)
    }

    /// Changes whenever something that could be found is not found any more.
    pub(crate) fn num_evictions(&self) -> u64 {
        self.evictions
    }

    /// Grows whenever blocks become available because their time has passed.
    pub(crate) fn num_expirations(&self) -> u64 {
        self.expirations
    }

    pub(crate) fn has_prefix_cache(&self) -> bool {
        self.prefix.is_some()
    }

    /// Brings the hashes of a sequence's full blocks up to date.
    pub(crate) fn extend_hashes(&self, namespace: &Namespace, tokens: &[TokenId], hashes: &mut Vec<u64>) {
        if let Some(prefix) = &self.prefix {
            prefix.extend_hashes(namespace, tokens, hashes);
        }
    }

    /// What is known of `tokens`. Changes nothing.
    pub(crate) fn find_match(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        hashes: &[u64],
        found: &mut PrefixMatch,
    ) {
        match &self.prefix {
            Some(prefix) => prefix.find_prefix(namespace, tokens, hashes, found),
            None => {
                found.clear();
                found.miss = MissReason::Disabled;
            }
        }
    }

    /// Blocks that taking a match takes from those available.
    pub(crate) fn blocks_taken_by(&self, found: &PrefixMatch) -> u32 {
        let blocks = found.blocks.iter().copied().chain(found.partial.map(|(block, _)| block));
        let counts = |&block: &BlockId| {
            self.pool.ref_count(block) == 0 && self.pool.retention(block) != Retention::Pinned
        };
        blocks.filter(counts).count() as u32
    }

    /// Gives an empty table what was found. Returns its tokens.
    pub(crate) fn adopt(&mut self, table: TableId, found: &PrefixMatch) -> u32 {
        let blocks = found.blocks.iter().copied().chain(found.partial.map(|(block, _)| block));
        for block in blocks {
            self.pool.retain(block);
            self.push_block(table.row as usize, block);
        }
        let len = found.num_tokens(self.config.block_size());
        let row = &mut self.tables[table.row as usize];
        row.len = len;
        row.registered = row.blocks.len() as u32;
        row.borrowed = found.partial.map(|_| found.blocks.len() as u32);
        len
    }

    /// Keeps the first `num_blocks` nodes of a table as long and as well as `keep` says for each entry.
    pub(crate) fn keep_blocks(&mut self, table: TableId, num_blocks: u32, keep: impl Fn(u32) -> Keep) {
        for entry in 0..num_blocks.min(self.tables[table.row as usize].registered) {
            self.raise_keep(self.tables[table.row as usize].blocks[entry as usize], keep(entry));
        }
    }

    /// Registers the full blocks of a table's first tokens, which are committed and valid. Stops at a block that is
    /// known already while others share this table's own: replacing it for one of them would leave their order uneven.
    pub(crate) fn register(
        &mut self,
        table: TableId,
        namespace: &Namespace,
        tokens: &[TokenId],
        hashes: &[u64],
        keep: impl Fn(u32) -> Keep,
    ) {
        let block_size = self.config.block_size() as usize;
        let row = table.row as usize;
        let full = tokens.len() / block_size;
        while (self.tables[row].registered as usize) < full.min(self.tables[row].blocks.len()) {
            let Some(prefix) = &mut self.prefix else { return };
            let entry = self.tables[row].registered as usize;
            let block = self.tables[row].blocks[entry];
            let parent = entry.checked_sub(1).map(|before| self.tables[row].blocks[before]);
            let (chunk, hash) = (&tokens[entry * block_size..][..block_size], hashes[entry]);
            let node = match prefix.find_node(namespace, parent, hash, chunk) {
                Some(known) if known == block => block,
                Some(_) if self.pool.ref_count(block) > 1 => return,
                Some(known) => {
                    self.pool.retain(known);
                    self.replace_block(row, entry as u32, known);
                    self.tables[row].mark_dirty(entry);
                    self.release_block(block);
                    known
                }
                None => {
                    let keep = keep(entry as u32);
                    prefix.insert(block, namespace, parent, hash, chunk, keep.ttl_steps);
                    self.pool.set_cached(block, keep.retention, keep.ttl_steps.is_some());
                    block
                }
            };
            self.tables[row].registered += 1;
            self.raise_keep(node, keep(entry as u32));
        }
    }

    /// Keeps a node for longer, and retains it better, if `keep` says so. It is retained no worse than its children are.
    fn raise_keep(&mut self, block: BlockId, keep: Keep) {
        let Some(prefix) = &mut self.prefix else { return };
        prefix.keep_for(block, keep.ttl_steps);
        self.pool.set_cached(block, keep.retention.max(self.pool.retention(block)), prefix.is_limited(block));
        let mut at = prefix.parent(block);
        while let Some(node) = at.filter(|&node| keep.retention > self.pool.retention(node)) {
            self.pool.set_cached(node, keep.retention, prefix.is_limited(node));
            at = prefix.parent(node);
        }
    }

    // Evicting and forgetting.

    /// Takes a node that nobody holds out of the prefix cache; it is free then.
    pub(super) fn evict(&mut self, block: BlockId) {
        if let Some(prefix) = &mut self.prefix {
            prefix.note_eviction(block, MissReason::Evicted);
        }
        self.evictions += u64::from(self.forget_from(block));
    }

    /// Removes a node and whatever continues it, the last first. Returns how many nodes that were. O(that many): the walk
    /// goes on from the parent of what it has removed.
    pub(super) fn forget_from(&mut self, block: BlockId) -> u32 {
        let Some(prefix) = &mut self.prefix else { return 0 };
        let mut removed = 0;
        let mut at = Some(block);
        while let Some(node) = at {
            let last = prefix.last_descendant(node);
            at = prefix.parent(last).filter(|_| last != block);
            prefix.remove(last);
            self.pool.set_uncached(last);
            removed += 1;
        }
        removed
    }

    /// Keeps within the cap.
    pub(super) fn trim_cached(&mut self) {
        while self.pool.num_evictable() + self.pool.num_retained() > self.max_cached_blocks {
            let oldest = self.pool.oldest_evictable().or_else(|| self.pool.oldest_retained());
            match oldest {
                Some(oldest) if self.prefix.is_some() => self.evict(oldest),
                _ => return,
            }
        }
    }

    /// Forgets what nobody has held for its time to live, and what continues it. O(1) while nothing is due.
    pub(super) fn evict_expired(&mut self) {
        let now = self.last_step.0;
        while let Some(block) = self.prefix.as_mut().and_then(|prefix| prefix.pop_due(now)) {
            let Some(prefix) = self.prefix.as_mut().filter(|_| self.pool.is_idle(block)) else { continue };
            if prefix.is_limited(block) {
                prefix.note_eviction(block, MissReason::Expired);
                self.expirations += u64::from(self.forget_from(block));
            }
        }
    }

    /// Gives up pinned content until `needed` blocks are available, or none is left: first what is pinned for a limited
    /// time. Returns how often some was given up.
    pub(crate) fn give_up_pins(&mut self, needed: u32) -> u32 {
        let mut given_up = 0;
        while self.pool.num_available() < needed {
            let Some(oldest) = self.pool.oldest_retained() else { break };
            self.evict(oldest);
            given_up += 1;
        }
        given_up
    }
}
