//! Where keys and values lie in a block, and blocks in an arena: the one place that computes an address, and that turns
//! words into bytes, or into the *units* of 16 bytes in which the kernels count.
//!
//! Only checked constructors make a layout, so what it says of itself is right. Nothing here knows how large a pool is
//! to be, nor wgpu, tokens or policy. The layout of a block is fixed here and mirrored once in
//! `shaders/common/layout.wgsl`:
//!
//! ```text
//! arena (some consecutive layers of every block)
//!   block 0                                   block 1 …
//!   ├ first of the layers  ┬ second …  ┤
//!   │ K: head 0 │ head 1 … │ V: head 0 │ head 1 … │
//!     └ P rows of k_head_dim elements, padded to 16 bytes
//! ```
//!
//! A block is one contiguous range per arena, keys precede values as one run, and a row of one head is contiguous.

use crate::error::ConfigError;
use crate::model::{KvFormat, KvType, LayerGroup, check_head_dim};

/// Largest block size, in tokens.
pub const MAX_BLOCK_SIZE: u32 = 4096;
/// No arena is larger than this, whatever the device allows: 2 GiB - 4, the most that every backend can bind.
pub const MAX_ARENA_BYTES: u64 = (2 << 30) - 4;
/// Bytes of a word.
const WORD_BYTES: u64 = 4;
/// Bytes of a unit: a `vec4<u32>` or `vec4<f32>` of the shaders.
pub(crate) const UNIT_BYTES: u64 = 16;
/// Words of a unit.
const UNIT_WORDS: u32 = (UNIT_BYTES / WORD_BYTES) as u32;

/// Words of a row of `head_dim` elements.
fn row_words(head_dim: u32, element: KvType) -> u32 {
    head_dim * element.bits() / 32
}

/// Units of a row of `head_dim` elements.
pub(crate) fn row_units(head_dim: u32, element: KvType) -> u32 {
    row_words(head_dim, element) / UNIT_WORDS
}

/// What a block holds: shapes, types and block size, and from them sizes in `u32` words, bytes, and units of 16 bytes.
///
/// A [`CacheConfig`](crate::CacheConfig) makes and checks it: the sizes of a layout are within their types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockLayout {
    num_layers: u32,
    num_kv_heads: u32,
    k_head_dim: u32,
    v_head_dim: u32,
    k_type: KvType,
    v_type: KvType,
    block_size: u32,
}

impl BlockLayout {
    /// Blocks of `block_size` tokens for `num_layers` layers of a checked group, stored as `format` says.
    ///
    /// # Errors
    /// [`ConfigError`] when the size of a value head or the block size is not supported, or the bytes of a block exceed
    /// 2^64.
    pub(crate) fn new(
        group: &LayerGroup,
        num_layers: u32,
        format: KvFormat,
        block_size: u32,
    ) -> Result<Self, ConfigError> {
        let KvFormat { k_type, v_type, v_head_dim } = format;
        let v_head_dim = group.v_head_dim().or(v_head_dim).unwrap_or(group.head_dim());
        check_head_dim(v_head_dim)?;
        Self {
            num_layers,
            num_kv_heads: group.num_kv_heads(),
            k_head_dim: group.head_dim(),
            v_head_dim,
            k_type,
            v_type,
            block_size,
        }
        .checked()
    }

    fn checked(self) -> Result<Self, ConfigError> {
        let block_size = self.block_size;
        if !block_size.is_power_of_two() || block_size > MAX_BLOCK_SIZE {
            return Err(ConfigError::BlockSize { block_size, max: MAX_BLOCK_SIZE });
        }
        let words = u64::from(self.num_layers).checked_mul(self.layer_block_words());
        let bytes = words.and_then(|words| words.checked_mul(WORD_BYTES));
        bytes.map(|_| self).ok_or(ConfigError::Overflow { what: "bytes of a block" })
    }

    /// Layers.
    pub fn num_layers(&self) -> u32 {
        self.num_layers
    }

    /// Key and value heads per layer.
    pub fn num_kv_heads(&self) -> u32 {
        self.num_kv_heads
    }

    /// Elements of a key head.
    pub fn k_head_dim(&self) -> u32 {
        self.k_head_dim
    }

    /// Elements of a value head.
    pub fn v_head_dim(&self) -> u32 {
        self.v_head_dim
    }

    /// Element type of keys.
    pub fn k_type(&self) -> KvType {
        self.k_type
    }

    /// Element type of values.
    pub fn v_type(&self) -> KvType {
        self.v_type
    }

    /// Tokens per block, a power of two.
    #[inline]
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Blocks that hold `tokens` tokens.
    #[inline]
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        // A shift, because a block size is a power of two: every step asks this of every sequence.
        let full_blocks = tokens >> self.block_size.trailing_zeros();
        full_blocks + u32::from(tokens & (self.block_size - 1) != 0)
    }

    /// Words of one key row of one head.
    pub fn k_row_words(&self) -> u32 {
        row_words(self.k_head_dim, self.k_type)
    }

    /// Words of one value row of one head.
    pub fn v_row_words(&self) -> u32 {
        row_words(self.v_head_dim, self.v_type)
    }

    /// Units of one head's weighted sum of values, `v_head_dim` elements of f32 whatever values are stored as.
    pub fn v_sum_units(&self) -> u32 {
        row_units(self.v_head_dim, KvType::F32)
    }

    /// Words of one head's keys in a block: `P` rows, padded to 16 bytes.
    pub fn k_head_words(&self) -> u32 {
        (self.block_size * self.k_row_words()).next_multiple_of(UNIT_WORDS)
    }

    /// Words of one head's values in a block: `P` rows, padded to 16 bytes.
    pub fn v_head_words(&self) -> u32 {
        (self.block_size * self.v_row_words()).next_multiple_of(UNIT_WORDS)
    }

    /// Words of one layer in a block: all heads' keys, then all heads' values.
    pub fn layer_block_words(&self) -> u64 {
        u64::from(self.num_kv_heads) * (u64::from(self.k_head_words()) + u64::from(self.v_head_words()))
    }

    /// Units of one layer in a block: heads are padded to whole ones.
    pub fn layer_block_units(&self) -> u64 {
        self.layer_block_words() / u64::from(UNIT_WORDS)
    }

    /// Bytes of one layer in a block.
    pub fn layer_block_bytes(&self) -> u64 {
        self.layer_block_words() * WORD_BYTES
    }

    /// Bytes of a block, all layers.
    pub fn block_bytes(&self) -> u64 {
        // Checked when the layout was made.
        u64::from(self.num_layers) * self.layer_block_bytes()
    }

    /// Bytes of one token's keys and values in one layer, without the padding of heads.
    pub fn layer_token_bytes(&self) -> u64 {
        let row_words = u64::from(self.k_row_words()) + u64::from(self.v_row_words());
        u64::from(self.num_kv_heads) * row_words * WORD_BYTES
    }
}

/// The two halves of a layer's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvPart {
    /// Keys.
    K,
    /// Values.
    V,
}

/// Where a layer of a model lies: in which group, in which of all stacks, and in which place within that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerPlace {
    /// Its group, in the order of the model's.
    pub group: u32,
    /// Its stack, among those of all groups: an index into [`StepPlan::stacks`](crate::StepPlan::stacks).
    pub stack: u32,
    /// Its place among the layers of a block of that stack.
    pub position: u32,
}

/// The pool cut into arenas, one storage buffer each: consecutive layers of every block.
///
/// Where a model has several groups of layers, each group's are cut into as many parts, and blocks lie as far apart as the
/// largest part needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaLayout {
    num_blocks: u32,
    groups: Vec<GroupArenas>,
    /// Of each layer of the model; none where all are of one group.
    places: Vec<LayerPlace>,
}

/// How a group's blocks are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GroupArenas {
    block: BlockLayout,
    layers_per_arena: u32,
}

impl GroupArenas {
    fn num_arenas(&self) -> u32 {
        self.block.num_layers.div_ceil(self.layers_per_arena)
    }

    /// Layers in an arena.
    fn layers_in(&self, arena: u32) -> u32 {
        let before = arena.saturating_mul(self.layers_per_arena);
        self.block.num_layers.saturating_sub(before).min(self.layers_per_arena)
    }
}

impl ArenaLayout {
    /// Arenas of `num_blocks` blocks and at most `layers_per_arena` layers each.
    /// [`CacheConfig::arenas`](crate::CacheConfig::arenas) makes those that a device can hold.
    ///
    /// # Errors
    /// [`ConfigError::Zero`] without blocks or layers, [`ConfigError::Overflow`] when an arena's bytes exceed 2^64.
    pub fn new(block: BlockLayout, num_blocks: u32, layers_per_arena: u32) -> Result<Self, ConfigError> {
        Self::of_groups(&[block], &[], num_blocks, |_| layers_per_arena)
    }

    /// Arenas of the blocks of several groups, of whose layers each has so many.
    pub(crate) fn of_groups(
        blocks: &[BlockLayout],
        places: &[LayerPlace],
        num_blocks: u32,
        layers_per_arena: impl Fn(&BlockLayout) -> u32,
    ) -> Result<Self, ConfigError> {
        let groups: Vec<GroupArenas> = blocks
            .iter()
            .map(|block| {
                let layers_per_arena = layers_per_arena(block).min(block.num_layers);
                GroupArenas { block: *block, layers_per_arena }
            })
            .collect();
        let least = groups.iter().map(|group| group.layers_per_arena).min().unwrap_or(0);
        for (field, value) in [("num_blocks", num_blocks), ("layers_per_arena", least)] {
            if value == 0 {
                return Err(ConfigError::Zero { field });
            }
        }
        let layout = Self { num_blocks, groups, places: places.to_vec() };
        // No arena is larger than the first one.
        let bytes = layout.block_stride_bytes(0).checked_mul(u64::from(num_blocks));
        bytes.map(|_| layout).ok_or(ConfigError::Overflow { what: "bytes of an arena" })
    }

    /// What a block of the first group holds.
    pub fn block(&self) -> &BlockLayout {
        &self.groups[0].block
    }

    /// What a block of the group of a layer holds.
    ///
    /// # Panics
    /// For a layer that there is not.
    pub fn block_of(&self, layer: u32) -> &BlockLayout {
        &self.groups[self.place_of(layer).group as usize].block
    }

    /// Layers of the model.
    pub fn num_layers(&self) -> u32 {
        if self.places.is_empty() { self.block().num_layers } else { self.places.len() as u32 }
    }

    /// Where a layer lies.
    ///
    /// # Panics
    /// For a layer that there is not.
    pub fn place_of(&self, layer: u32) -> LayerPlace {
        assert!(layer < self.num_layers(), "layer {layer} of {}", self.num_layers());
        let only = LayerPlace { group: 0, stack: 0, position: layer };
        self.places.get(layer as usize).copied().unwrap_or(only)
    }

    /// Blocks in every arena.
    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// Layers of a block of the first group in every arena but perhaps the last, which has the rest.
    pub fn layers_per_arena(&self) -> u32 {
        self.groups[0].layers_per_arena
    }

    /// Number of arenas.
    pub fn num_arenas(&self) -> u32 {
        self.groups.iter().map(GroupArenas::num_arenas).max().unwrap_or(0)
    }

    /// The arena of a layer, and the layer's index within that arena.
    ///
    /// # Panics
    /// For a layer that there is not.
    pub fn arena_of(&self, layer: u32) -> (u32, u32) {
        let LayerPlace { group, position, .. } = self.place_of(layer);
        let per_arena = self.groups[group as usize].layers_per_arena;
        (position / per_arena, position % per_arena)
    }

    /// A layer that lies in an arena, which there must be.
    #[cfg(feature = "wgpu")]
    pub(crate) fn layer_in(&self, arena: u32) -> u32 {
        let found = (0..self.num_layers()).find(|&layer| self.arena_of(layer).0 == arena);
        found.expect("every arena has a layer")
    }

    /// Layers of a block of the first group in an arena.
    ///
    /// # Panics
    /// For an arena that there is not.
    pub fn layers_in(&self, arena: u32) -> u32 {
        assert!(arena < self.num_arenas(), "arena {arena} of {}", self.num_arenas());
        self.groups[0].layers_in(arena)
    }

    /// Words between consecutive blocks of an arena.
    ///
    /// # Panics
    /// As [`layers_in`](Self::layers_in).
    pub fn block_stride_words(&self, arena: u32) -> u64 {
        self.block_stride_units(arena) * u64::from(UNIT_WORDS)
    }

    /// Units between consecutive blocks of an arena.
    ///
    /// # Panics
    /// As [`layers_in`](Self::layers_in).
    pub fn block_stride_units(&self, arena: u32) -> u64 {
        assert!(arena < self.num_arenas(), "arena {arena} of {}", self.num_arenas());
        let of_group =
            |group: &GroupArenas| u64::from(group.layers_in(arena)) * group.block.layer_block_units();
        self.groups.iter().map(of_group).max().unwrap_or(0)
    }

    /// Bytes between consecutive blocks of an arena.
    ///
    /// # Panics
    /// As [`layers_in`](Self::layers_in).
    pub fn block_stride_bytes(&self, arena: u32) -> u64 {
        self.block_stride_words(arena) * WORD_BYTES
    }

    /// Words of an arena.
    ///
    /// # Panics
    /// As [`layers_in`](Self::layers_in).
    pub fn arena_words(&self, arena: u32) -> u64 {
        u64::from(self.num_blocks) * self.block_stride_words(arena)
    }

    /// Bytes of an arena.
    ///
    /// # Panics
    /// As [`layers_in`](Self::layers_in).
    pub fn arena_bytes(&self, arena: u32) -> u64 {
        // Checked when the layout was made.
        u64::from(self.num_blocks) * self.block_stride_bytes(arena)
    }

    /// The unit of a block at which a layer starts.
    ///
    /// # Panics
    /// As [`arena_of`](Self::arena_of).
    pub fn layer_start_units(&self, layer: u32) -> u64 {
        u64::from(self.arena_of(layer).1) * self.block_of(layer).layer_block_units()
    }

    /// The word at which a row starts within its arena: the only formula for an address, mirrored in
    /// `shaders/common/layout.wgsl`.
    ///
    /// # Panics
    /// For a layer, block, head or slot that does not exist: its word would be another row's.
    pub fn row_word(&self, layer: u32, part: KvPart, block: u32, kv_head: u32, slot_in_block: u32) -> u64 {
        let layout = self.block_of(layer);
        assert!(block < self.num_blocks, "block {block} of {}", self.num_blocks);
        assert!(kv_head < layout.num_kv_heads, "kv head {kv_head} of {}", layout.num_kv_heads);
        assert!(slot_in_block < layout.block_size, "slot {slot_in_block} of {}", layout.block_size);
        let (arena, layer_in_arena) = self.arena_of(layer);
        let layer_start = u64::from(block) * self.block_stride_words(arena)
            + u64::from(layer_in_arena) * layout.layer_block_words();
        let (heads_start, head_words, row_words) = match part {
            KvPart::K => (0, layout.k_head_words(), layout.k_row_words()),
            KvPart::V => {
                let keys = u64::from(layout.num_kv_heads) * u64::from(layout.k_head_words());
                (keys, layout.v_head_words(), layout.v_row_words())
            }
        };
        layer_start
            + heads_start
            + u64::from(kv_head) * u64::from(head_words)
            + u64::from(slot_in_block) * u64::from(row_words)
    }
}
