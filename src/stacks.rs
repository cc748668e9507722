//! Stacks: how groups of layers are cut so that one pool of equal blocks serves them all.
//!
//! A block is `P` tokens of one stack: of equally many layers of one group. Any free block serves any stack, so all have the
//! same bytes. Where rows differ in size, so do the `P` of groups, by powers of two; what a stack's layers leave of a block
//! is padding. The cut with the least padding is chosen, a stack counting as half a percent: each takes a block table of its
//! own and a look in every step.

use crate::error::ConfigError;
use crate::layout::{BlockLayout, LayerPlace, MAX_BLOCK_SIZE};
use crate::model::{KvFormat, LayerGroup, ModelShape};
use crate::reach::{Reach, Stack};

/// The most of all blocks' bytes that may be padding, in percent.
pub const MAX_PADDING_PERCENT: u32 = 15;
/// What a stack costs, as a share of the blocks.
const STACK_COST: f64 = 0.005;
const MAX_STACKS: u32 = 64;
/// Most layers of a model that has several groups.
const MAX_LAYERS: u32 = 1024;
/// The block sizes of two groups differ by this power of two at most.
const MAX_DOUBLINGS: u32 = 4;

/// How a group of layers lies in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupLayout {
    reach: Reach,
    num_layers: u32,
    first_stack: u32,
    layout: BlockLayout,
}

impl GroupLayout {
    /// The keys that a row sees.
    pub fn reach(&self) -> Reach {
        self.reach
    }

    /// Layers of the group.
    pub fn num_layers(&self) -> u32 {
        self.num_layers
    }

    /// Its first stack, among those of all groups.
    pub fn first_stack(&self) -> u32 {
        self.first_stack
    }

    /// Stacks that it is cut into.
    pub fn num_stacks(&self) -> u32 {
        self.num_layers.div_ceil(self.layout.num_layers())
    }

    /// Everything that decides what the bytes of its blocks mean.
    pub(crate) fn words(&self) -> [u32; 11] {
        let layout = &self.layout;
        let [reach, tokens, first] = self.reach.words();
        [
            self.num_layers,
            self.first_stack,
            layout.num_layers(),
            layout.num_kv_heads(),
            layout.k_head_dim(),
            layout.v_head_dim(),
            layout.k_type().bits() << 16 | layout.v_type().bits(),
            layout.block_size(),
            reach,
            tokens,
            first,
        ]
    }

    /// What one of its stacks has in a block. The last one may have fewer layers.
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }
}

/// All groups of a model, cut into stacks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stacks {
    /// In the order of the model's.
    pub(crate) groups: Vec<GroupLayout>,
    /// Of each layer of the model; none where all are of one group.
    pub(crate) places: Vec<LayerPlace>,
    /// Bytes of every block.
    pub(crate) block_bytes: u64,
}

impl Stacks {
    /// Cuts the groups of a model whose smallest blocks have `block_size` tokens.
    pub(crate) fn cut(shape: &ModelShape, format: KvFormat, block_size: u32) -> Result<Self, ConfigError> {
        shape.check()?;
        let groups: Vec<&LayerGroup> = shape.groups().collect();
        let layouts = match groups[..] {
            [only] => vec![BlockLayout::new(only, only.num_layers(), format, block_size)?],
            _ => cut_together(&groups, format, block_size)?,
        };
        let block_bytes = layouts.iter().map(BlockLayout::block_bytes).max().unwrap_or(0);
        let layouts = groups.iter().zip(layouts).map(|(group, layout)| GroupLayout {
            reach: group.reach(),
            num_layers: group.num_layers(),
            first_stack: 0,
            layout,
        });
        let mut groups: Vec<GroupLayout> = layouts.collect();
        // Stacks that keep everything come first.
        let mut next = 0;
        for whole in [true, false] {
            for group in groups.iter_mut().filter(|group| group.reach.is_all() == whole) {
                group.first_stack = next;
                next += group.num_stacks();
            }
        }
        let places = if groups.len() == 1 { Vec::new() } else { places(shape, &groups) };
        Ok(Self { groups, places, block_bytes })
    }

    /// One group, whose rows see everything.
    pub(crate) fn are_plain(&self) -> bool {
        matches!(self.groups[..], [only] if only.reach.is_all())
    }

    /// Tokens of the largest block.
    pub(crate) fn node_tokens(&self) -> u32 {
        self.groups.iter().map(|group| group.layout.block_size()).max().unwrap_or(1)
    }

    /// Every stack, those that keep everything first.
    pub(crate) fn list(&self) -> Vec<Stack> {
        let stack = |group: u32| {
            let GroupLayout { reach, layout, .. } = &self.groups[group as usize];
            Stack { reach: *reach, block_size: layout.block_size() }
        };
        self.group_of_each().into_iter().map(stack).collect()
    }

    /// The group of every stack, in the same order.
    pub(crate) fn group_of_each(&self) -> Vec<u32> {
        let mut groups: Vec<(u32, &GroupLayout)> = (0..).zip(&self.groups).collect();
        groups.sort_by_key(|(_, group)| group.first_stack);
        let stacks = groups.into_iter();
        stacks.flat_map(|(index, group)| std::iter::repeat_n(index, group.num_stacks() as usize)).collect()
    }

    /// The most blocks that a sequence holds on its way to `max_tokens`, with at most `rows` rows in a step.
    pub(crate) fn most_blocks(&self, max_tokens: u32, rows: u32) -> u64 {
        let node_tokens = self.node_tokens();
        let of_group = |group: &GroupLayout| {
            let reach = match group.reach {
                // First tokens take whole nodes.
                Reach::Window { tokens, first } => {
                    let first = first.checked_next_multiple_of(node_tokens).unwrap_or(u32::MAX);
                    Reach::Window { tokens, first }
                }
                reach => reach,
            };
            let blocks = reach.most_blocks(max_tokens, rows, group.layout.block_size());
            u64::from(group.num_stacks()) * u64::from(blocks)
        };
        self.groups.iter().map(of_group).sum()
    }

    /// Entries of the block tables of a sequence of `max_tokens` tokens, all stacks'.
    pub(crate) fn table_entries(&self, max_tokens: u32) -> u64 {
        let of_group = |group: &GroupLayout| {
            u64::from(group.num_stacks()) * u64::from(group.layout.blocks_for(max_tokens))
        };
        self.groups.iter().map(of_group).sum()
    }

    /// Bytes of keys and values per token, all layers.
    pub(crate) fn bytes_per_token(&self) -> u64 {
        let of_group = |group: &GroupLayout| u64::from(group.num_layers) * group.layout.layer_token_bytes();
        self.groups.iter().map(of_group).sum()
    }

    /// The share of all blocks' bytes that no layer uses, as long as no row has left a window.
    pub(crate) fn padding(&self) -> f64 {
        let choices = self.groups.iter().map(|group| (group.num_layers, group.layout));
        padding(choices, self.block_bytes).0
    }
}

/// Where each layer of a model lies.
fn places(shape: &ModelShape, groups: &[GroupLayout]) -> Vec<LayerPlace> {
    let of_group = |(index, (group, layout)): (u32, (&LayerGroup, &GroupLayout))| {
        let (per_stack, first_stack) = (layout.layout.num_layers(), layout.first_stack);
        let places = group.layers().zip(0..).map(move |(layer, number)| {
            let (stack, position) = (first_stack + number / per_stack, number % per_stack);
            (layer, LayerPlace { group: index, stack, position })
        });
        places.collect::<Vec<_>>()
    };
    let mut places: Vec<_> = (0..).zip(shape.groups().zip(groups)).flat_map(of_group).collect();
    places.sort_unstable_by_key(|&(layer, _)| layer);
    places.into_iter().map(|(_, place)| place).collect()
}

/// What is padding of blocks of `block_bytes` bytes, and how many stacks there are.
fn padding(groups: impl Iterator<Item = (u32, BlockLayout)>, block_bytes: u64) -> (f64, u32) {
    let (mut used, mut taken, mut stacks) = (0.0, 0.0, 0);
    for (num_layers, layout) in groups {
        let per_token = f64::from(layout.block_size());
        let of_group = num_layers.div_ceil(layout.num_layers());
        used += f64::from(num_layers) * layout.layer_block_bytes() as f64 / per_token;
        taken += f64::from(of_group) * block_bytes as f64 / per_token;
        stacks += of_group;
    }
    (1.0 - used / taken, stacks)
}

/// The best layout of each of several groups.
fn cut_together(
    groups: &[&LayerGroup],
    format: KvFormat,
    block_size: u32,
) -> Result<Vec<BlockLayout>, ConfigError> {
    let num_layers = groups.iter().fold(0, |sum: u32, group| sum.saturating_add(group.num_layers()));
    if num_layers > MAX_LAYERS {
        return Err(ConfigError::TooManyLayers { num_layers, max: MAX_LAYERS });
    }
    // Every size that some stack fills.
    let mut choices: Vec<Vec<BlockLayout>> = Vec::new();
    for group in groups {
        let mut of_group = Vec::new();
        for doublings in 0..=MAX_DOUBLINGS {
            let block_size = block_size.saturating_mul(1 << doublings);
            if doublings > 0 && block_size > MAX_BLOCK_SIZE {
                break;
            }
            for layers in 1..=group.num_layers() {
                of_group.push(BlockLayout::new(group, layers, format, block_size)?);
            }
        }
        choices.push(of_group);
    }
    let mut best: Option<(f64, f64, Vec<BlockLayout>)> = None;
    for bytes in choices.iter().flatten().map(BlockLayout::block_bytes) {
        let fitting: Option<Vec<BlockLayout>> =
            groups.iter().zip(&choices).map(|(group, choices)| best_within(group, choices, bytes)).collect();
        let Some(layouts) = fitting else { continue };
        // The smallest block is as large as was asked for.
        if layouts.iter().all(|layout| layout.block_size() > block_size) {
            continue;
        }
        let chosen = groups.iter().map(|group| group.num_layers()).zip(layouts.iter().copied());
        let (padding, stacks) = padding(chosen, bytes);
        let cost = padding + STACK_COST * f64::from(stacks);
        if stacks <= MAX_STACKS && best.as_ref().is_none_or(|(least, ..)| cost < *least) {
            best = Some((cost, padding, layouts));
        }
    }
    let Some((_, padding, layouts)) = best else {
        return Err(ConfigError::TooManyLayers { num_layers, max: MAX_LAYERS });
    };
    let padding_percent = (padding * 100.0).ceil() as u32;
    if padding_percent > MAX_PADDING_PERCENT {
        return Err(padding_error(&layouts, padding_percent));
    }
    Ok(layouts)
}

/// Of a group's layouts within `bytes`, the one of which all its layers take the least.
fn best_within(group: &LayerGroup, choices: &[BlockLayout], bytes: u64) -> Option<BlockLayout> {
    let taken = |layout: &BlockLayout| {
        let stacks = group.num_layers().div_ceil(layout.num_layers());
        f64::from(stacks) / f64::from(layout.block_size())
    };
    let fitting = choices.iter().filter(|layout| layout.block_bytes() <= bytes);
    fitting.min_by(|a, b| taken(a).total_cmp(&taken(b))).copied()
}

/// Names the group that wastes the most of its blocks, and the rows that would fill them.
fn padding_error(layouts: &[BlockLayout], padding_percent: u32) -> ConfigError {
    let block_bytes = layouts.iter().map(BlockLayout::block_bytes).max().unwrap_or(0);
    let emptiest = (0..).zip(layouts).min_by_key(|(_, layout)| layout.block_bytes());
    let (group, row_bytes, filling) = emptiest.map_or((0, 0, 0), |(group, layout)| {
        let rows = u64::from(layout.num_layers()) * u64::from(layout.block_size());
        (group, layout.layer_block_bytes() / u64::from(layout.block_size()), block_bytes / rows)
    });
    ConfigError::Padding {
        padding_percent,
        max_percent: MAX_PADDING_PERCENT,
        group,
        row_bytes,
        filling_row_bytes: filling,
    }
}
