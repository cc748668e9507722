//! A cache in host memory: the words of one arena of all layers, and each stack's block tables as a device holds them.
//!
//! Addresses come from [`ArenaLayout`] alone. The tables change only through [`CpuCache::apply_table_changes`], as on the
//! device: an entry that no plan has set is whatever it was, and reading through it is a fault of the plan.
//!
//! The host pool, where the configuration has one, takes memory slot by slot as blocks are moved there.

use crate::BlockSwap;
use crate::config::CacheConfig;
use crate::layout::{ArenaLayout, KvPart};
use crate::model::{KvType, LayerGroup, ModelShape};
use crate::reference::f16::{pack_word, unpack_word};
use crate::schedule::{SplitConfig, StepPlan};

/// The keys and values of a model in host memory, laid out as in an arena, with the device's block tables.
#[derive(Clone, Debug)]
pub struct CpuCache {
    layout: ArenaLayout,
    groups: Vec<LayerGroup>,
    max_sequences: u32,
    pub(super) fingerprint: u64,
    words: Vec<u32>,
    /// Of each stack, how many entries a table has.
    table_entries: Vec<u32>,
    /// Of each stack, all tables.
    tables: Vec<Vec<u32>>,
    /// The host pool: one block's words per slot, none until something is moved there.
    host: Vec<Vec<u32>>,
}

impl CpuCache {
    /// A zeroed cache of the size that `config` says.
    ///
    /// # Panics
    /// When `config` was made for a model of another shape, or query heads are no multiple of kv heads.
    pub fn new(shape: &ModelShape, config: &CacheConfig) -> Self {
        if let Err(error) = shape.check() {
            panic!("{error}");
        }
        let (groups, layouts) = (shape.groups(), config.groups());
        assert_eq!(layouts.len(), groups.len(), "groups of layers of the cache, then of the model");
        for (layout, group) in layouts.iter().zip(groups) {
            let block = layout.layout();
            assert_eq!(
                (layout.num_layers(), block.num_kv_heads(), block.k_head_dim(), layout.reach()),
                (group.num_layers(), group.num_kv_heads(), group.head_dim(), group.reach()),
                "layers, kv heads, key head size and reach of the cache, then of the model"
            );
        }
        let layout =
            config.arena().expect("a configuration has checked its layout, and the bytes of the pool");
        let table_entries = config.stack_entries();
        let tables =
            table_entries.iter().map(|&entries| vec![0; config.max_sequences() as usize * entries as usize]);
        Self {
            groups: shape.groups().cloned().collect(),
            max_sequences: config.max_sequences(),
            fingerprint: config.fingerprint(),
            words: vec![0; layout.arena_words(0) as usize],
            tables: tables.collect(),
            table_entries,
            host: vec![Vec::new(); config.host_blocks() as usize],
            layout,
        }
    }

    /// The layout: one arena of all layers.
    pub fn layout(&self) -> &ArenaLayout {
        &self.layout
    }

    /// The group of a layer: its heads, what its rows see, and what becomes of logits.
    ///
    /// # Panics
    /// For a layer that there is not.
    pub fn group(&self, layer: u32) -> &LayerGroup {
        &self.groups[self.layout.place_of(layer).group as usize]
    }

    /// Elements of an output row of a layer: `[num_query_heads, v_head_dim]`.
    ///
    /// # Panics
    /// As [`group`](Self::group).
    pub fn output_len(&self, layer: u32) -> usize {
        self.group(layer).num_query_heads() as usize * self.layout.block_of(layer).v_head_dim() as usize
    }

    /// Elements of a partial result of a layer: `[num_query_heads, v_head_dim + 2]`, per head the unnormalised sum of values,
    /// then the maximum logit in base 2, then the sum of weights.
    ///
    /// # Panics
    /// As [`group`](Self::group).
    pub fn partial_len(&self, layer: u32) -> usize {
        self.output_len(layer) + 2 * self.group(layer).num_query_heads() as usize
    }

    /// A split of the work of a layer's group that suits `num_threads` threads: tiles of whole rows, spans only where there
    /// are fewer rows than threads.
    ///
    /// # Panics
    /// As [`group`](Self::group).
    pub fn split_config(&self, layer: u32, num_threads: u32) -> SplitConfig {
        let group = self.group(layer);
        SplitConfig {
            workgroups_per_item: 1,
            // A part of the work owns whole rows: a chunk that is cut into spans is one thread's all the same.
            workgroups_per_tile: num_threads.max(1),
            heads_per_kv_head: group.heads_per_kv_head(),
            prefill_queries: group.heads_per_kv_head().saturating_mul(16),
            span_quantum: self.layout.block_of(layer).block_size().max(32),
            target_workgroups: num_threads,
            max_partials: num_threads.saturating_mul(2),
            fixed_span_tokens: None,
            batch_invariant: false,
            dispatch_work_budget: u64::MAX,
            reach: group.reach(),
        }
    }

    /// Brings the block tables up to date with `plan`, as the device does before a step.
    ///
    /// # Panics
    /// When the plan is of a cache with another layout or size.
    pub fn apply_table_changes(&mut self, plan: &StepPlan) {
        assert_eq!(
            plan.fingerprint(),
            self.fingerprint,
            "the plan is of a cache with another layout or size"
        );
        for (stack, changes) in plan.stacks().iter().enumerate() {
            for change in changes.table_changes() {
                let entries = &changes.changed_entries()[change.start as usize..][..change.len as usize];
                let start = change.first_entry as usize;
                self.table_mut(stack, change.table_row)[start..][..entries.len()].copy_from_slice(entries);
            }
        }
    }

    /// A layer's block table in row `table_row`, entries beyond its sequence's blocks included.
    ///
    /// # Panics
    /// When there is no such layer or row.
    pub fn table(&self, layer: u32, table_row: u32) -> &[u32] {
        let stack = self.layout.place_of(layer).stack as usize;
        let entries = self.table_entries[stack] as usize;
        &self.tables[stack][table_row as usize * entries..][..entries]
    }

    fn table_mut(&mut self, stack: usize, table_row: u32) -> &mut [u32] {
        let entries = self.table_entries[stack] as usize;
        &mut self.tables[stack][table_row as usize * entries..][..entries]
    }

    /// All block tables of a layer, `[max_sequences][entries]`.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn tables(&self, layer: u32) -> &[u32] {
        let stack = self.layout.place_of(layer).stack as usize;
        debug_assert_eq!(
            self.tables[stack].len(),
            self.max_sequences as usize * self.table_entries[stack] as usize
        );
        &self.tables[stack]
    }

    /// The arena's words, which lie as [`layout`](Self::layout) says.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The arena's words, for writing: to restore a saved state, or to poison slots in a test.
    pub fn words_mut(&mut self) -> &mut [u32] {
        &mut self.words
    }

    /// Blocks in the host pool.
    pub fn host_blocks(&self) -> u32 {
        self.host.len() as u32
    }

    /// A block's words, and those of its slot in the host pool: none if nothing was moved there.
    pub(super) fn swapped_block(&mut self, swap: &BlockSwap) -> (&mut [u32], &mut Vec<u32>) {
        let block_words = self.block_words();
        let block = &mut self.words[swap.block as usize * block_words..][..block_words];
        (block, &mut self.host[swap.host_slot as usize])
    }

    /// The words of one block, all layers.
    pub(super) fn block_words(&self) -> usize {
        self.layout.block_stride_words(0) as usize
    }

    /// The key of one head in a slot, as stored.
    ///
    /// # Panics
    /// For a layer, block, head or slot that there is not.
    pub fn key_row(&self, layer: u32, block: u32, kv_head: u32, slot_in_block: u32) -> Vec<f32> {
        let mut row = vec![0.0; self.layout.block_of(layer).k_head_dim() as usize];
        self.read_rows(layer, KvPart::K, block, kv_head, slot_in_block, &mut row);
        row
    }

    /// The value of one head in a slot, as stored.
    ///
    /// # Panics
    /// For a layer, block, head or slot that there is not.
    pub fn value_row(&self, layer: u32, block: u32, kv_head: u32, slot_in_block: u32) -> Vec<f32> {
        let mut row = vec![0.0; self.layout.block_of(layer).v_head_dim() as usize];
        self.read_rows(layer, KvPart::V, block, kv_head, slot_in_block, &mut row);
        row
    }

    /// The keys and the values of a sequence's first `num_tokens` tokens through its block table, as stored:
    /// `[tokens, num_kv_heads, head_dim]`, the form that [`dense_attention`](crate::reference::dense_attention) takes.
    ///
    /// # Panics
    /// For a layer or table row that there is not, for more tokens than a table has slots, and for an entry that names no
    /// block of the pool.
    pub fn gather(&self, layer: u32, table_row: u32, num_tokens: u32) -> (Vec<f32>, Vec<f32>) {
        let block = *self.layout.block_of(layer);
        let (block_size, table) = (block.block_size(), self.table(layer, table_row));
        let slots = table.len() as u64 * u64::from(block_size);
        assert!(u64::from(num_tokens) <= slots, "{num_tokens} tokens of a table of {slots} slots");
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for token in 0..num_tokens {
            let block_index = table[(token / block_size) as usize];
            for kv_head in 0..block.num_kv_heads() {
                keys.extend(self.key_row(layer, block_index, kv_head, token % block_size));
                values.extend(self.value_row(layer, block_index, kv_head, token % block_size));
            }
        }
        (keys, values)
    }

    /// Writes one head's key or value into a slot, rounded to the stored type.
    ///
    /// # Panics
    /// For a layer, block, head or slot that there is not, and for a row of another length than the head's.
    pub fn write_row(
        &mut self,
        layer: u32,
        part: KvPart,
        block: u32,
        kv_head: u32,
        slot_in_block: u32,
        row: &[f32],
    ) {
        let head_dim = match part {
            KvPart::K => self.layout.block_of(layer).k_head_dim(),
            KvPart::V => self.layout.block_of(layer).v_head_dim(),
        };
        assert_eq!(row.len(), head_dim as usize, "elements of the row, and of a head");
        let start = self.layout.row_word(layer, part, block, kv_head, slot_in_block) as usize;
        let kv_type = self.part_type(layer, part);
        let words = &mut self.words[start..][..row.len() * kv_type.bits() as usize / 32];
        match kv_type {
            KvType::F32 => words.iter_mut().zip(row).for_each(|(word, x)| *word = x.to_bits()),
            KvType::F16 => {
                let pairs = row.chunks_exact(2);
                words.iter_mut().zip(pairs).for_each(|(word, pair)| *word = pack_word(pair[0], pair[1]));
            }
        }
    }

    /// Reads consecutive slots of one head, from `slot_in_block` on, as many as `rows` has room for.
    pub(super) fn read_rows(
        &self,
        layer: u32,
        part: KvPart,
        block: u32,
        kv_head: u32,
        slot_in_block: u32,
        rows: &mut [f32],
    ) {
        let start = self.layout.row_word(layer, part, block, kv_head, slot_in_block) as usize;
        let kv_type = self.part_type(layer, part);
        let words = &self.words[start..][..rows.len() * kv_type.bits() as usize / 32];
        match kv_type {
            KvType::F32 => rows.iter_mut().zip(words).for_each(|(x, word)| *x = f32::from_bits(*word)),
            KvType::F16 => {
                let pairs = rows.chunks_exact_mut(2);
                pairs.zip(words).for_each(|(pair, word)| pair.copy_from_slice(&unpack_word(*word)));
            }
        }
    }

    fn part_type(&self, layer: u32, part: KvPart) -> KvType {
        match part {
            KvPart::K => self.layout.block_of(layer).k_type(),
            KvPart::V => self.layout.block_of(layer).v_type(),
        }
    }
}
