//! A cache in host memory: the words of one arena of all layers, and the block tables as a device holds them.
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
    group: LayerGroup,
    max_sequences: u32,
    table_entries: u32,
    pub(super) fingerprint: u64,
    words: Vec<u32>,
    tables: Vec<u32>,
    /// The host pool: one block's words per slot, none until something is moved there.
    host: Vec<Vec<u32>>,
}

impl CpuCache {
    /// A zeroed cache of the size that `config` says.
    ///
    /// # Panics
    /// When `config` was made for a model of another shape, query heads are no multiple of kv heads, or the model has more
    /// than one group of layers.
    pub fn new(shape: &ModelShape, config: &CacheConfig) -> Self {
        if let Err(error) = config.check_single_group() {
            panic!("{error}");
        }
        let block = *config.layout();
        assert_eq!(
            (block.num_layers(), block.num_kv_heads(), block.k_head_dim()),
            (shape.num_layers(), shape.num_kv_heads(), shape.head_dim()),
            "layers, kv heads and key head size of the cache, then of the model"
        );
        assert!(
            shape.num_query_heads().is_multiple_of(shape.num_kv_heads()),
            "{} query heads are no multiple of {} kv heads",
            shape.num_query_heads(),
            shape.num_kv_heads()
        );
        let layout = ArenaLayout::new(block, config.num_blocks(), block.num_layers())
            .expect("a configuration has checked its layout, and the bytes of the pool");
        Self {
            layout,
            group: shape.first_group().clone(),
            max_sequences: config.max_sequences(),
            table_entries: config.table_entries(),
            fingerprint: config.fingerprint(),
            words: vec![0; layout.arena_words(0) as usize],
            tables: vec![0; config.max_sequences() as usize * config.table_entries() as usize],
            host: vec![Vec::new(); config.host_blocks() as usize],
        }
    }

    /// The layout: one arena of all layers.
    pub fn layout(&self) -> &ArenaLayout {
        &self.layout
    }

    /// The model's layers: what their rows see, and what becomes of logits.
    pub fn group(&self) -> &LayerGroup {
        &self.group
    }

    /// Query heads of the model.
    pub fn num_query_heads(&self) -> u32 {
        self.group.num_query_heads()
    }

    /// Query heads that read one kv head.
    pub fn heads_per_kv_head(&self) -> u32 {
        self.num_query_heads() / self.layout.block().num_kv_heads()
    }

    /// Elements of an output row: `[num_query_heads, v_head_dim]`.
    pub fn output_len(&self) -> usize {
        self.num_query_heads() as usize * self.layout.block().v_head_dim() as usize
    }

    /// Elements of a partial result: `[num_query_heads, v_head_dim + 2]`, per head the unnormalised sum of values, then
    /// the maximum logit in base 2, then the sum of weights.
    pub fn partial_len(&self) -> usize {
        self.num_query_heads() as usize * (self.layout.block().v_head_dim() as usize + 2)
    }

    /// A split that suits `num_threads` threads: tiles of whole rows, spans only where there are fewer rows than
    /// threads.
    pub fn split_config(&self, num_threads: u32) -> SplitConfig {
        SplitConfig {
            workgroups_per_item: 1,
            // A part of the work owns whole rows: a chunk that is cut into spans is one thread's all the same.
            workgroups_per_tile: num_threads.max(1),
            heads_per_kv_head: self.heads_per_kv_head(),
            prefill_queries: self.heads_per_kv_head().saturating_mul(16),
            span_quantum: self.layout.block().block_size().max(32),
            target_workgroups: num_threads,
            reach: self.group.reach(),
            max_partials: num_threads.saturating_mul(2),
            fixed_span_tokens: None,
            batch_invariant: false,
            dispatch_work_budget: u64::MAX,
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
        for change in plan.table_changes() {
            let entries = &plan.changed_entries()[change.start as usize..][..change.len as usize];
            let start = change.first_entry as usize;
            self.table_mut(change.table_row)[start..][..entries.len()].copy_from_slice(entries);
        }
    }

    /// The block table in row `table_row`, `[table_entries]`, entries beyond its sequence's blocks included.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn table(&self, table_row: u32) -> &[u32] {
        let entries = self.table_entries as usize;
        &self.tables[table_row as usize * entries..][..entries]
    }

    fn table_mut(&mut self, table_row: u32) -> &mut [u32] {
        let entries = self.table_entries as usize;
        &mut self.tables[table_row as usize * entries..][..entries]
    }

    /// All block tables, `[max_sequences, table_entries]`.
    pub fn tables(&self) -> &[u32] {
        debug_assert_eq!(self.tables.len(), self.max_sequences as usize * self.table_entries as usize);
        &self.tables
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
        let mut row = vec![0.0; self.layout.block().k_head_dim() as usize];
        self.read_rows(layer, KvPart::K, block, kv_head, slot_in_block, &mut row);
        row
    }

    /// The value of one head in a slot, as stored.
    ///
    /// # Panics
    /// For a layer, block, head or slot that there is not.
    pub fn value_row(&self, layer: u32, block: u32, kv_head: u32, slot_in_block: u32) -> Vec<f32> {
        let mut row = vec![0.0; self.layout.block().v_head_dim() as usize];
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
        let block_size = self.layout.block().block_size();
        let slots = u64::from(self.table_entries) * u64::from(block_size);
        assert!(u64::from(num_tokens) <= slots, "{num_tokens} tokens of a table of {slots} slots");
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for token in 0..num_tokens {
            let block = self.table(table_row)[(token / block_size) as usize];
            for kv_head in 0..self.layout.block().num_kv_heads() {
                keys.extend(self.key_row(layer, block, kv_head, token % block_size));
                values.extend(self.value_row(layer, block, kv_head, token % block_size));
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
            KvPart::K => self.layout.block().k_head_dim(),
            KvPart::V => self.layout.block().v_head_dim(),
        };
        assert_eq!(row.len(), head_dim as usize, "elements of the row, and of a head");
        let start = self.layout.row_word(layer, part, block, kv_head, slot_in_block) as usize;
        let kv_type = self.part_type(part);
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
        let kv_type = self.part_type(part);
        let words = &self.words[start..][..rows.len() * kv_type.bits() as usize / 32];
        match kv_type {
            KvType::F32 => rows.iter_mut().zip(words).for_each(|(x, word)| *x = f32::from_bits(*word)),
            KvType::F16 => {
                let pairs = rows.chunks_exact_mut(2);
                pairs.zip(words).for_each(|(pair, word)| pair.copy_from_slice(&unpack_word(*word)));
            }
        }
    }

    fn part_type(&self, part: KvPart) -> KvType {
        match part {
            KvPart::K => self.layout.block().k_type(),
            KvPart::V => self.layout.block().v_type(),
        }
    }
}
