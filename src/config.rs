//! How large a cache is: from the bytes, the context or the blocks that are asked for to a pool and its tables.
//!
//! All sizes are `u64`, and checked when a configuration is made. Nothing here computes an address: `layout.rs` says
//! where a block lies, and what lies in it.

use crate::error::ConfigError;
use crate::layout::{ArenaLayout, BlockLayout, LayerPlace, MAX_ARENA_BYTES};
use crate::model::{KvFormat, ModelShape};
use crate::reach::Stack;
use crate::stacks::{GroupLayout, Stacks};

/// Block size where nothing else is asked for, in tokens.
pub const DEFAULT_BLOCK_SIZE: u32 = 16;
/// Rows of a step where nothing else is asked for.
pub(crate) const DEFAULT_STEP_TOKENS: u32 = 512;
/// Number of block tables where nothing else is asked for.
pub const DEFAULT_MAX_SEQUENCES: u32 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Sizing {
    Bytes(u64),
    Context { tokens: u32, chats: u32 },
    Blocks(u32),
}

/// The size and layout of a cache: a plain value, checked when it is made.
///
/// The three constructors say what is known: the bytes to spend, the context to hold, or the number of blocks. The
/// `with_…` methods change one thing and size the pool again by the same rule.
///
/// ```
/// # use paged_kv::{CacheConfig, KvType, ModelShape};
/// // Layers, query heads, KV heads, head size.
/// let shape = ModelShape::new(30, 9, 3, 64);
/// let cache = CacheConfig::for_bytes(512 << 20, &shape, KvType::F16)?;
/// assert_eq!(cache.bytes_per_token(), 30 * 3 * (64 + 64) * 2);
/// assert!(cache.bytes_total() <= 512 << 20);
/// # Ok::<(), paged_kv::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CacheConfig {
    sizing: Sizing,
    shape: ModelShape,
    format: KvFormat,
    stacks: Stacks,
    num_blocks: u32,
    max_sequences: u32,
    max_sequence_tokens: u32,
    declared_tokens: Option<u32>,
    host_blocks: u32,
}

impl CacheConfig {
    /// As many blocks as fit into `bytes` (arenas and block tables together).
    ///
    /// A sequence may grow to the whole pool unless [`with_max_sequence_tokens`](Self::with_max_sequence_tokens) caps it.
    ///
    /// # Errors
    /// [`ConfigError`] when the shape is not supported, or when `bytes` do not hold one block.
    pub fn for_bytes(
        bytes: u64,
        shape: &ModelShape,
        format: impl Into<KvFormat>,
    ) -> Result<Self, ConfigError> {
        Self::sized(Sizing::Bytes(bytes), shape, format.into())
    }

    /// Blocks for `chats` sequences of `tokens` tokens each; `tokens` is also the most a sequence may hold.
    ///
    /// # Errors
    /// [`ConfigError`] when the shape is not supported, a number is zero, or the pool would exceed 2^32 blocks or slots.
    pub fn for_context(
        tokens: u32,
        chats: u32,
        shape: &ModelShape,
        format: impl Into<KvFormat>,
    ) -> Result<Self, ConfigError> {
        Self::sized(Sizing::Context { tokens, chats }, shape, format.into())
    }

    /// Exactly `num_blocks` blocks.
    ///
    /// # Errors
    /// [`ConfigError`] when the shape is not supported or `num_blocks` is zero.
    pub fn for_blocks(
        num_blocks: u32,
        shape: &ModelShape,
        format: impl Into<KvFormat>,
    ) -> Result<Self, ConfigError> {
        Self::sized(Sizing::Blocks(num_blocks), shape, format.into())
    }

    fn sized(sizing: Sizing, shape: &ModelShape, format: KvFormat) -> Result<Self, ConfigError> {
        let stacks = Stacks::cut(shape, format, DEFAULT_BLOCK_SIZE)?;
        let max_sequences = match sizing {
            Sizing::Context { chats, .. } => chats.max(DEFAULT_MAX_SEQUENCES),
            _ => DEFAULT_MAX_SEQUENCES,
        };
        Self {
            sizing,
            shape: shape.clone(),
            format,
            stacks,
            num_blocks: 0,
            max_sequences,
            max_sequence_tokens: 0,
            declared_tokens: None,
            host_blocks: 0,
        }
        .resized()
    }

    /// The same rule with blocks of `block_size` tokens: a power of two from 1 to 4,096. Where groups of layers have blocks
    /// of different sizes, that of the smallest ones.
    ///
    /// # Errors
    /// [`ConfigError::BlockSize`], [`ConfigError::Overflow`] when the bytes of the host pool exceed 2^64, or as the
    /// constructor.
    pub fn with_block_size(mut self, block_size: u32) -> Result<Self, ConfigError> {
        self.stacks = Stacks::cut(&self.shape, self.format, block_size)?;
        self.resized()
    }

    /// The same rule with `max_sequences` block tables (running and kept sequences, samples counted one by one).
    ///
    /// # Errors
    /// [`ConfigError::Zero`], or as the constructor.
    pub fn with_max_sequences(mut self, max_sequences: u32) -> Result<Self, ConfigError> {
        self.max_sequences = max_sequences;
        self.resized()
    }

    /// The same rule with at most `tokens` tokens in one sequence (prompt and answer).
    ///
    /// # Errors
    /// [`ConfigError::Zero`], or as the constructor.
    pub fn with_max_sequence_tokens(mut self, tokens: u32) -> Result<Self, ConfigError> {
        self.declared_tokens = Some(tokens);
        self.resized()
    }

    /// A host pool of `host_blocks` blocks in main memory, to swap preempted and idle sequences to; none by default. It
    /// does not count towards [`bytes_total`](Self::bytes_total).
    ///
    /// # Errors
    /// [`ConfigError::Overflow`] when its bytes exceed 2^64.
    pub fn with_host_blocks(mut self, host_blocks: u32) -> Result<Self, ConfigError> {
        self.host_blocks = host_blocks;
        self.check_host_bytes()?;
        Ok(self)
    }

    fn check_host_bytes(&self) -> Result<(), ConfigError> {
        let bytes = self.stacks.block_bytes.checked_mul(u64::from(self.host_blocks));
        bytes.map(drop).ok_or(ConfigError::Overflow { what: "bytes of the host pool" })
    }

    fn resized(mut self) -> Result<Self, ConfigError> {
        if self.max_sequences == 0 {
            return Err(ConfigError::Zero { field: "max_sequences" });
        }
        if self.declared_tokens == Some(0) {
            return Err(ConfigError::Zero { field: "max_sequence_tokens" });
        }
        let num_blocks = self.solve_num_blocks()?;
        let slots = u64::from(num_blocks) * u64::from(self.stacks.node_tokens());
        if num_blocks == 0 {
            return Err(ConfigError::Zero { field: "num_blocks" });
        }
        // Slots stay below PADDING_SLOT and every token count stays in u32.
        if slots > u64::from(u32::MAX - 1) {
            return Err(ConfigError::TooManySlots { slots, max: u64::from(u32::MAX - 1) });
        }
        self.num_blocks = num_blocks;
        self.max_sequence_tokens = match (self.declared_tokens, self.sizing) {
            (Some(tokens), _) => tokens,
            (None, Sizing::Context { tokens, .. }) => tokens,
            (None, _) => self.pool_tokens(),
        };
        self.checked_bytes_total().ok_or(ConfigError::Overflow { what: "bytes of the cache" })?;
        self.check_host_bytes()?;
        Ok(self)
    }

    fn solve_num_blocks(&self) -> Result<u32, ConfigError> {
        let overflow = ConfigError::Overflow { what: "number of blocks" };
        match self.sizing {
            Sizing::Blocks(num_blocks) => Ok(num_blocks),
            Sizing::Context { tokens, chats } => {
                if tokens == 0 || chats == 0 {
                    return Err(ConfigError::Zero { field: if tokens == 0 { "tokens" } else { "chats" } });
                }
                let blocks =
                    self.stacks.most_blocks(tokens, DEFAULT_STEP_TOKENS).checked_mul(u64::from(chats));
                blocks.and_then(|blocks| u32::try_from(blocks).ok()).ok_or(overflow)
            }
            Sizing::Bytes(bytes) if !self.stacks.are_plain() => self.most_blocks_within(bytes),
            Sizing::Bytes(bytes) => {
                let overflow = ConfigError::Overflow { what: "bytes of the block tables" };
                let block_bytes = self.stacks.block_bytes;
                // One entry in every table.
                let entry_bytes = u64::from(self.max_sequences) * 4;
                let (per_block, tables) = match self.declared_tokens {
                    // Tables have a fixed size: subtract them, divide the rest.
                    Some(tokens) => {
                        let entries = self.stacks.table_entries(tokens);
                        (block_bytes, entry_bytes.checked_mul(entries).ok_or(overflow)?)
                    }
                    // A table has an entry for every block of the pool.
                    None => (block_bytes.checked_add(entry_bytes).ok_or(overflow)?, 0),
                };
                let num_blocks = bytes.saturating_sub(tables) / per_block;
                if num_blocks == 0 {
                    let needed_bytes = per_block.checked_add(tables).ok_or(overflow)?;
                    return Err(ConfigError::TooFewBytes { bytes, needed_bytes });
                }
                Ok(u32::try_from(num_blocks).unwrap_or(u32::MAX))
            }
        }
    }

    /// The most blocks that fit into `bytes` with the tables that they need. How large these are depends on the number
    /// of blocks, so that is searched for.
    fn most_blocks_within(&self, bytes: u64) -> Result<u32, ConfigError> {
        let total = |num_blocks: u32| {
            let mut config = self.clone();
            config.num_blocks = num_blocks;
            config.max_sequence_tokens = self.declared_tokens.unwrap_or_else(|| config.pool_tokens());
            config.checked_bytes_total().unwrap_or(u64::MAX)
        };
        let largest = (u32::MAX - 1) / self.stacks.node_tokens();
        let (mut fits, mut exceeds) = (0, largest.saturating_add(1));
        while exceeds - fits > 1 {
            let middle = fits + (exceeds - fits) / 2;
            if total(middle) <= bytes { fits = middle } else { exceeds = middle }
        }
        if fits == 0 {
            return Err(ConfigError::TooFewBytes { bytes, needed_bytes: total(1) });
        }
        Ok(fits)
    }

    /// The layout of a block of the first group of layers.
    pub fn layout(&self) -> &BlockLayout {
        self.stacks.groups[0].layout()
    }

    /// How each group of layers lies in blocks, in the order of the model's groups.
    pub fn groups(&self) -> &[GroupLayout] {
        &self.stacks.groups
    }

    /// The share of all blocks' bytes that no layer uses: what it costs that one pool serves groups of layers whose
    /// numbers or rows do not divide. 0 for a model with one group.
    pub fn padding_share(&self) -> f64 {
        self.stacks.padding().max(0.0)
    }

    /// Stacks of layers, those that keep everything first.
    pub(crate) fn stacks(&self) -> Vec<Stack> {
        self.stacks.list()
    }

    /// Where each layer of a model of several groups lies; none where all are of one group.
    pub(crate) fn places(&self) -> &[LayerPlace] {
        &self.stacks.places
    }

    /// The most tokens that the pool holds of one sequence, with one row in a step.
    pub(crate) fn pool_tokens(&self) -> u32 {
        let slots = self.num_blocks * self.stacks.node_tokens();
        if self.stacks.are_plain() {
            return slots;
        }
        let holds = |tokens: u32| self.stacks.most_blocks(tokens, 1) <= u64::from(self.num_blocks);
        let (mut held, mut exceeds) = (0, slots.saturating_add(1));
        while exceeds - held > 1 {
            let middle = held + (exceeds - held) / 2;
            if holds(middle) { held = middle } else { exceeds = middle }
        }
        held.max(1)
    }

    /// Blocks in the pool.
    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// Tokens per block of the first group, `P`.
    pub fn block_size(&self) -> u32 {
        self.layout().block_size()
    }

    /// Block tables, one per sequence that holds blocks.
    pub fn max_sequences(&self) -> u32 {
        self.max_sequences
    }

    /// The most tokens that one sequence may hold, prompt and answer together.
    pub fn max_sequence_tokens(&self) -> u32 {
        self.max_sequence_tokens
    }

    /// Entries of one block table of the first group: blocks of the longest sequence.
    pub fn table_entries(&self) -> u32 {
        self.layout().blocks_for(self.max_sequence_tokens)
    }

    /// Bytes of keys and values per token, all layers.
    pub fn bytes_per_token(&self) -> u64 {
        self.stacks.bytes_per_token()
    }

    /// Bytes of one block: its tokens' keys and values in all layers where these are alike, otherwise in one stack.
    pub fn bytes_per_block(&self) -> u64 {
        self.stacks.block_bytes
    }

    /// Blocks in the host pool.
    pub fn host_blocks(&self) -> u32 {
        self.host_blocks
    }

    /// Bytes of the host pool, in main memory.
    pub fn host_bytes(&self) -> u64 {
        u64::from(self.host_blocks) * self.bytes_per_block()
    }

    /// Bytes of all block tables on the device, at the declared maximum.
    pub fn table_bytes(&self) -> u64 {
        u64::from(self.max_sequences) * self.stacks.table_entries(self.max_sequence_tokens) * 4
    }

    /// Bytes of all blocks and tables: what the cache takes on the device, without step metadata and scratch.
    pub fn bytes_total(&self) -> u64 {
        // Checked when the value was made.
        u64::from(self.num_blocks) * self.bytes_per_block() + self.table_bytes()
    }

    fn checked_bytes_total(&self) -> Option<u64> {
        let pool = u64::from(self.num_blocks).checked_mul(self.stacks.block_bytes)?;
        let entries = self.stacks.table_entries(self.max_sequence_tokens);
        let tables = u64::from(self.max_sequences).checked_mul(entries)?.checked_mul(4)?;
        pool.checked_add(tables)
    }

    /// Tokens that a sequence's last block leaves unused on average, `P / 2`.
    pub fn expected_waste_tokens(&self) -> u32 {
        self.layout().block_size() / 2
    }

    /// Tokens that a sequence's last block leaves unused at most, `P - 1`.
    pub fn worst_waste_tokens(&self) -> u32 {
        self.layout().block_size() - 1
    }

    /// Splits the layers into arenas of at most `max_arena_bytes` (and at most 2 GiB - 4).
    ///
    /// # Errors
    /// [`ConfigError::LayerExceedsArena`] when one layer's blocks do not fit: it names both sizes and the largest pool
    /// that would.
    pub fn arenas(&self, max_arena_bytes: u64) -> Result<ArenaLayout, ConfigError> {
        let blocks: Vec<BlockLayout> = self.groups().iter().map(|group| *group.layout()).collect();
        let max_bytes = max_arena_bytes.min(MAX_ARENA_BYTES);
        let most_layers = blocks.iter().map(BlockLayout::num_layers).max().unwrap_or(1);
        let bytes_in = |num_arenas: u32| {
            let largest = |block: &BlockLayout| {
                u64::from(block.num_layers().div_ceil(num_arenas)) * block.layer_block_bytes()
            };
            u64::from(self.num_blocks) * blocks.iter().map(largest).max().unwrap_or(0)
        };
        // As few arenas as the device's limits allow, filled evenly.
        let layer_bytes = bytes_in(most_layers);
        if layer_bytes > max_bytes {
            let max_blocks = max_bytes / (layer_bytes / u64::from(self.num_blocks));
            return Err(ConfigError::LayerExceedsArena { layer_bytes, max_bytes, max_blocks });
        }
        // More arenas are no larger, so their number is between these two.
        let (mut too_few, mut num_arenas) = (0, most_layers);
        while num_arenas - too_few > 1 {
            let middle = too_few + (num_arenas - too_few) / 2;
            if bytes_in(middle) <= max_bytes { num_arenas = middle } else { too_few = middle }
        }
        let layers_per_arena = |block: &BlockLayout| block.num_layers().div_ceil(num_arenas);
        ArenaLayout::of_groups(&blocks, self.places(), self.num_blocks, layers_per_arena)
    }

    /// One arena of all layers, however large.
    pub(crate) fn arena(&self) -> Result<ArenaLayout, ConfigError> {
        let blocks: Vec<BlockLayout> = self.groups().iter().map(|group| *group.layout()).collect();
        ArenaLayout::of_groups(&blocks, self.places(), self.num_blocks, BlockLayout::num_layers)
    }

    /// Entries of a block table in each stack, at the declared maximum.
    pub(crate) fn stack_entries(&self) -> Vec<u32> {
        let blocks_for = |stack: Stack| self.max_sequence_tokens.div_ceil(stack.block_size);
        self.stacks().into_iter().map(blocks_for).collect()
    }

    /// Bytes of the block tables of each stack on the device.
    #[cfg(feature = "wgpu")]
    pub(crate) fn stack_table_bytes(&self) -> Vec<u64> {
        let entries = self.stack_entries().into_iter();
        entries.map(|entries| u64::from(self.max_sequences) * u64::from(entries) * 4).collect()
    }

    /// The group of each stack.
    #[cfg(feature = "wgpu")]
    pub(crate) fn stack_groups(&self) -> Vec<u32> {
        self.stacks.group_of_each()
    }

    /// Identifies everything that decides what the bytes of a block mean, and the size of the pool and its tables.
    pub fn fingerprint(&self) -> u64 {
        let layout = self.layout();
        let words = [
            layout.num_layers(),
            layout.num_kv_heads(),
            layout.k_head_dim(),
            layout.v_head_dim(),
            layout.k_type().bits(),
            layout.v_type().bits(),
            layout.block_size(),
            self.num_blocks,
            self.max_sequences,
            self.table_entries(),
        ];
        let others = if self.stacks.are_plain() { &[][..] } else { self.groups() };
        let places = self.places().iter().map(|place| place.group);
        let words = words.into_iter().chain(others.iter().flat_map(GroupLayout::words)).chain(places);
        // FNV-1a, 64 bits, over the little-endian bytes: stable across runs and platforms.
        words.flat_map(u32::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }
}
