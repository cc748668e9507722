//! A cache, its CPU twin, and random tensors: what the tests of the twins run steps on.

use half::f16;
use paged_kv::reference::{
    CpuCache, DenseInputs, DenseOutput, Rows, append, block_copy, compare, dense_attention,
};
use paged_kv::{
    ArenaLayout, CacheConfig, KvCache, KvFormat, KvPart, KvType, ModelShape, SplitConfig, StepBuilder,
    StepPlan, TableId,
};

/// SplitMix64: small, seedable, the same everywhere.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// From -1 to 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            items.swap(index, (self.next() % (index as u64 + 1)) as usize);
        }
    }
}

/// What a slot that must not be read holds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Poison {
    Nan,
    Infinity,
    Large,
    Zero,
}

impl Poison {
    pub(crate) const ALL: [Self; 4] = [Self::Nan, Self::Infinity, Self::Large, Self::Zero];

    /// The bits of one f32, or of two f16.
    fn word(self, kv_type: KvType) -> u32 {
        let value = match self {
            Self::Nan => f32::NAN,
            Self::Infinity => f32::INFINITY,
            Self::Large => 1e4,
            Self::Zero => 0.0,
        };
        match kv_type {
            KvType::F16 => u32::from(f16::from_f32(value).to_bits()) * 0x1_0001,
            _ => value.to_bits(),
        }
    }
}

/// The rows of one step: queries, keys and values of one layer.
pub(crate) struct Tensors {
    pub(crate) query: Vec<f32>,
    pub(crate) key: Vec<f32>,
    pub(crate) value: Vec<f32>,
}

/// Heads of a layer, and elements of each.
#[derive(Clone, Copy)]
pub(crate) struct Lens {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) k_len: usize,
    pub(crate) v_len: usize,
}

/// One layer's cache on the host, with the block tables that the device would have.
pub(crate) struct Rig {
    pub(crate) shape: ModelShape,
    pub(crate) kv: KvCache,
    pub(crate) cpu: CpuCache,
    pub(crate) random: Random,
    pub(crate) k_len: usize,
    pub(crate) v_len: usize,
}

impl Rig {
    pub(crate) fn new(
        (num_query_heads, num_kv_heads, head_dim): (u32, u32, u32),
        format: impl Into<KvFormat>,
        block_size: u32,
        num_blocks: u32,
    ) -> Self {
        let shape = ModelShape::new(1, num_query_heads, num_kv_heads, head_dim);
        let config = CacheConfig::for_blocks(num_blocks, &shape, format)
            .and_then(|config| config.with_block_size(block_size))
            // One table for every block, to hold each by itself.
            .and_then(|config| config.with_max_sequences(num_blocks + 8))
            .expect("a valid configuration");
        Self::of(shape, config)
    }

    pub(crate) fn of(shape: ModelShape, config: CacheConfig) -> Self {
        Self {
            cpu: CpuCache::new(&shape, &config),
            shape,
            random: Random(1),
            k_len: config.layout().k_head_dim() as usize,
            v_len: config.layout().v_head_dim() as usize,
            kv: KvCache::new(config),
        }
    }

    /// Makes the pool hand out exactly these blocks next, in this order; every other block comes after them.
    pub(crate) fn order_free_blocks(&mut self, order: &[u32]) {
        // A block for each stack of layers.
        let stacks: u32 = self.kv.config().groups().iter().map(|group| group.num_stacks()).sum();
        let mut step = StepBuilder::new(&mut self.kv);
        let mut tables = Vec::new();
        while step.cache().free_blocks() >= stacks {
            let table = step.cache_mut().create(1).expect("a free table");
            step.push(table, &[0]).expect("a free block");
            tables.push(table);
        }
        let plan = step.finish();
        self.kv.commit_step(plan).expect("the outstanding plan");
        // Blocks are reused in the order in which they were released.
        tables.sort_by_key(|table| {
            let block = self.kv.block_ids(*table).expect("a table")[0].index();
            (order.iter().position(|&wanted| wanted == block).unwrap_or(usize::MAX), block)
        });
        for table in tables {
            self.kv.release(table).expect("a table");
        }
        // No device has run that step, and none may rely on it.
        self.kv.forget_device();
        self.kv.assert_consistent();
    }

    /// Makes the pool hand out its blocks in random order.
    pub(crate) fn shuffle_free_blocks(&mut self) {
        let mut order: Vec<u32> = (0..self.kv.config().num_blocks()).collect();
        self.random.shuffle(&mut order);
        self.order_free_blocks(&order);
    }

    pub(crate) fn open(&mut self) -> TableId {
        let max = self.kv.config().max_sequence_tokens();
        self.kv.create(max).expect("a free table")
    }

    /// Plans `rows` new tokens for each table.
    pub(crate) fn plan(&mut self, pushes: &[(TableId, u32)]) -> StepPlan {
        let mut step = StepBuilder::new(&mut self.kv);
        for &(table, rows) in pushes {
            step.push(table, &vec![0; rows as usize]).expect("room in the pool");
        }
        step.finish()
    }

    /// Random tensors for a plan's rows in the first layer.
    pub(crate) fn tensors(&mut self, plan: &StepPlan) -> Tensors {
        self.layer_tensors(plan, 0)
    }

    /// Random tensors for a plan's rows in a layer.
    pub(crate) fn layer_tensors(&mut self, plan: &StepPlan, layer: u32) -> Tensors {
        let rows = plan.num_rows() as usize;
        let Lens { heads, kv_heads, k_len, v_len } = self.lens(layer);
        let mut fill = |len: usize, factor: f32| (0..len).map(|_| factor * self.random.unit()).collect();
        Tensors {
            // Logits up to about 2 in magnitude: weights that differ, none so small that it does not count.
            query: fill(rows * heads * k_len, 2.0),
            key: fill(rows * kv_heads * k_len, 2.0),
            value: fill(rows * kv_heads * v_len, 1.0),
        }
    }

    /// Runs a plan's table changes, copies and first layer's append on the twin, in that order.
    pub(crate) fn write(&mut self, plan: &StepPlan, tensors: &Tensors) {
        self.begin(plan);
        self.append(plan, tensors, 0);
    }

    /// Runs a plan's table changes and copies on the twin.
    pub(crate) fn begin(&mut self, plan: &StepPlan) {
        self.cpu.apply_table_changes(plan);
        block_copy(&mut self.cpu, plan.block_copies());
    }

    /// Runs the append of one layer on the twin.
    pub(crate) fn append(&mut self, plan: &StepPlan, tensors: &Tensors, layer: u32) {
        let Lens { kv_heads, k_len, v_len, .. } = self.lens(layer);
        let key = Rows::new(&tensors.key, kv_heads * k_len);
        let value = Rows::new(&tensors.value, kv_heads * v_len);
        let stack = self.cpu.layout().place_of(layer).stack;
        append(&mut self.cpu, layer, plan.stacks()[stack as usize].slot_mapping(), key, value);
    }

    /// Sizes of a layer's tensors.
    pub(crate) fn lens(&self, layer: u32) -> Lens {
        let (group, block) = (self.cpu.group(layer), self.cpu.layout().block_of(layer));
        Lens {
            heads: group.num_query_heads() as usize,
            kv_heads: group.num_kv_heads() as usize,
            k_len: block.k_head_dim() as usize,
            v_len: block.v_head_dim() as usize,
        }
    }

    /// The dense f64 attention of one sequence of a plan, in one layer.
    fn dense(&self, plan: &StepPlan, tensors: &Tensors, layer: u32, sequence: usize) -> DenseOutput {
        let Lens { heads, kv_heads, k_len, v_len } = self.lens(layer);
        let row_len = heads * k_len;
        let rows = plan.query_starts()[sequence] as usize..plan.query_starts()[sequence + 1] as usize;
        let table_row = plan.table_rows()[sequence];
        let (keys, values) = self.cpu.gather(layer, table_row, plan.context_lens()[sequence]);
        dense_attention(&DenseInputs {
            query: &tensors.query[rows.start * row_len..rows.end * row_len],
            keys: &keys,
            values: &values,
            num_query_heads: heads as u32,
            num_kv_heads: kv_heads as u32,
            k_head_dim: k_len as u32,
            v_head_dim: v_len as u32,
            reach: self.cpu.group(layer).reach(),
            logits: self.cpu.group(layer).logits(),
            layer: self.cpu.group(layer).layers().position(|own| own == layer).unwrap_or_default() as u32,
        })
    }

    /// Checks every row of the first layer's `output` against the dense attention.
    pub(crate) fn assert_dense(&self, plan: &StepPlan, tensors: &Tensors, output: &[f32], tolerance: f64) {
        self.assert_layer_dense(plan, tensors, 0, output, tolerance);
    }

    /// Checks every row of a layer's `output` against the dense attention.
    pub(crate) fn assert_layer_dense(
        &self,
        plan: &StepPlan,
        tensors: &Tensors,
        layer: u32,
        output: &[f32],
        tolerance: f64,
    ) {
        let Lens { heads, v_len, .. } = self.lens(layer);
        let row_len = heads * v_len;
        for sequence in 0..plan.num_sequences() as usize {
            let rows = plan.query_starts()[sequence] as usize..plan.query_starts()[sequence + 1] as usize;
            let actual = &output[rows.start * row_len..rows.end * row_len];
            let expected = self.dense(plan, tensors, layer, sequence).output;
            if let Err(mismatch) = compare(actual, &expected, v_len, tolerance) {
                panic!("layer {layer}, sequence {sequence} of {plan:?}: {mismatch}");
            }
        }
    }

    /// Commits a plan and checks the cache.
    pub(crate) fn commit(&mut self, plan: StepPlan) {
        self.kv.commit_step(plan).expect("the outstanding plan");
        self.kv.assert_consistent();
    }

    /// One step from plan to commit with random tensors, without looking at its outputs.
    pub(crate) fn fill(&mut self, pushes: &[(TableId, u32)]) {
        let plan = self.plan(pushes);
        let tensors = self.tensors(&plan);
        self.write(&plan, &tensors);
        self.commit(plan);
    }

    /// Fills every slot that no later row of a table sees, in every layer.
    pub(crate) fn poison_unseen(&mut self, tables: &[TableId], poison: Poison) {
        let layout = self.cpu.layout().clone();
        for layer in 0..layout.num_layers() {
            let block = layout.block_of(layer);
            let mut seen = std::collections::HashSet::new();
            for &table in tables {
                let len = self.kv.len(table).expect("a table");
                let visible = self.cpu.group(layer).reach().visible(len).into_iter().flatten();
                for token in visible.filter(|&token| token < len) {
                    let id = self.cpu.table(layer, table.row())[(token / block.block_size()) as usize];
                    seen.insert((id, token % block.block_size()));
                }
            }
            // Blocks that other stacks hold have other layers' keys and values in the place of this one's.
            let held = |id: u32| {
                let place = layout.place_of(layer);
                (0..layout.num_layers()).filter(|&other| layout.place_of(other).stack != place.stack).any(
                    |other| {
                        tables.iter().any(|table| {
                            let len = self.kv.len(*table).expect("a table");
                            let block_size = layout.block_of(other).block_size();
                            let kept = self.cpu.group(other).reach().kept(len, block_size);
                            kept.into_iter()
                                .flatten()
                                .any(|entry| self.cpu.table(other, table.row())[entry as usize] == id)
                        })
                    },
                )
            };
            let free: Vec<u32> = (0..layout.num_blocks()).filter(|&id| !held(id)).collect();
            for id in free {
                for slot in (0..block.block_size()).filter(|&slot| !seen.contains(&(id, slot))) {
                    self.poison_slot(&layout, layer, (id, slot), poison);
                }
            }
        }
    }

    /// Fills one slot of a layer, all heads.
    fn poison_slot(&mut self, layout: &ArenaLayout, layer: u32, (id, slot): (u32, u32), poison: Poison) {
        let block = layout.block_of(layer);
        for head in 0..block.num_kv_heads() {
            for (part, kv_type, words) in [
                (KvPart::K, block.k_type(), block.k_row_words()),
                (KvPart::V, block.v_type(), block.v_row_words()),
            ] {
                let start = layout.row_word(layer, part, id, head, slot) as usize;
                self.cpu.words_mut()[start..start + words as usize].fill(poison.word(kv_type));
            }
        }
    }

    /// Fills every slot that no table's length covers.
    pub(crate) fn poison_unused(&mut self, tables: &[TableId], poison: Poison) {
        let layout = self.cpu.layout().clone();
        let block = layout.block();
        let mut used = vec![0u32; layout.num_blocks() as usize];
        for &table in tables {
            let len = self.kv.len(table).expect("a table");
            for (entry, id) in self.kv.block_ids(table).expect("a table").iter().enumerate() {
                let used = &mut used[id.index() as usize];
                *used = (*used).max((len - entry as u32 * block.block_size()).min(block.block_size()));
            }
        }
        for (id, &used) in (0..).zip(&used) {
            for slot in used..block.block_size() {
                self.poison_slot(&layout, 0, (id, slot), poison);
            }
        }
    }
}

/// What [`SplitConfig`] a test of the twins uses where it is not about the split.
pub(crate) fn one_span(rig: &Rig) -> SplitConfig {
    SplitConfig { fixed_span_tokens: Some(1 << 20), ..rig.cpu.split_config(0, 1) }
}

/// Every row cut into spans of `span_tokens`.
pub(crate) fn spans(rig: &Rig, span_tokens: u32) -> SplitConfig {
    SplitConfig { fixed_span_tokens: Some(span_tokens), max_partials: 4096, ..rig.cpu.split_config(0, 1) }
}
