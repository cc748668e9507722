//! Calls of plain values: sizes, layouts, ids.

use crate::hostile::{Call, World};
use paged_kv::{
    ArenaLayout, BlockId, BlockLayout, CacheConfig, ConfigError, KvFormat, KvPart, KvType, LayerGroup,
    LogitRule, MAX_PADDING_PERCENT, ModelShape, Reach, RequestId, SequenceId, StepId,
};

pub(super) struct Values {
    config: CacheConfig,
    arenas: ArenaLayout,
}

impl Values {
    pub(super) fn new(shape: &ModelShape, config: CacheConfig) -> Self {
        assert_eq!(config.layout().num_layers(), shape.num_layers());
        Self { arenas: config.arenas(u64::MAX).unwrap(), config }
    }
}

impl World {
    fn take_config(&mut self, name: &str, made: Result<CacheConfig, ConfigError>) {
        if let Some(config) = self.judge(name, made) {
            self.values.config = config;
        }
    }

    fn reach(&mut self) -> Reach {
        match self.random.below(0..4) {
            0 => Reach::All,
            1 => Reach::Window { tokens: self.number(), first: 0 },
            2 => Reach::Window { tokens: self.number(), first: self.number() },
            _ => Reach::Chunk { tokens: self.number() },
        }
    }

    fn group(&mut self, layers: Vec<u32>) -> LayerGroup {
        let (heads, head_dim) = (1 << self.random.below(0..4), 64 << self.random.below(0..3));
        let group = LayerGroup::new(layers, 2 * heads, heads, head_dim).with_reach(self.reach());
        let group = if self.random.chance(10) { group.with_logits(self.logits()) } else { group };
        if self.random.chance(20) { group.with_v_head_dim(self.number()) } else { group }
    }

    fn logits(&mut self) -> LogitRule {
        let numbers = [0.0, -1.0, 0.5, 30.0, f32::NAN, f32::INFINITY, f32::MAX, f32::MIN_POSITIVE];
        let mut rule = LogitRule::new();
        if self.random.chance(50) {
            rule = rule.with_scale(self.random.pick(&numbers));
        }
        if self.random.chance(50) {
            rule = rule.with_soft_cap(self.random.pick(&numbers));
        }
        let mut some = || -> Vec<f32> {
            let count = self.random.below(0..20);
            (0..count).map(|_| self.random.pick(&numbers)).collect()
        };
        let (slopes, sinks) = (some(), some());
        match self.random.below(0..4) {
            0 => rule = rule.with_slopes(slopes),
            1 => rule = rule.with_sinks(sinks),
            2 => rule = rule.with_slopes(slopes).with_sinks(sinks),
            _ => {}
        }
        rule
    }

    fn shape(&mut self) -> (ModelShape, KvFormat) {
        if self.random.chance(15) {
            let (num_layers, num_groups) = (self.random.below(0..40), self.random.below(0..5));
            // Now and then a layer is missing, or in two groups.
            let spoiled = self.random.chance(20);
            let groups: Vec<LayerGroup> = (0..num_groups)
                .map(|group| {
                    let layers = (0..num_layers).filter(|layer| layer % num_groups == group);
                    let layers: Vec<u32> = layers.chain(spoiled.then_some(7)).collect();
                    self.group(layers)
                })
                .collect();
            return (ModelShape::of_groups(groups), KvType::F16.into());
        }
        if self.random.chance(60) {
            let num_kv_heads = 1 << self.random.below(0..16);
            let num_query_heads = num_kv_heads * 2;
            let shape = ModelShape::new(1 << self.random.below(0..31), num_query_heads, num_kv_heads, 256);
            return (shape, KvType::F32.into());
        }
        let head_dim = if self.random.chance(50) { 8 * self.random.below(1..33) } else { self.number() };
        let num_kv_heads = self.number();
        let num_query_heads =
            if self.random.chance(70) { num_kv_heads.wrapping_mul(2) } else { self.number() };
        let shape = ModelShape::new(self.number(), num_query_heads, num_kv_heads, head_dim);
        let types = [KvType::F32, KvType::F16];
        let format = KvFormat::new(self.random.pick(&types), self.random.pick(&types));
        (shape, if self.random.chance(30) { format.with_v_head_dim(self.number()) } else { format })
    }

    fn long(&mut self) -> u64 {
        self.random.next() >> self.random.below(0..64)
    }
}

fn for_bytes(world: &mut World) {
    let ((shape, format), bytes) = (world.shape(), world.long());
    world.take_config("CacheConfig::for_bytes", CacheConfig::for_bytes(bytes, &shape, format));
}

fn for_context(world: &mut World) {
    let ((shape, format), tokens, chats) = (world.shape(), world.number(), world.number());
    world.take_config("CacheConfig::for_context", CacheConfig::for_context(tokens, chats, &shape, format));
}

fn for_blocks(world: &mut World) {
    let (shape, format) = world.shape();
    let blocks = if world.random.chance(70) { world.small() } else { world.number() };
    world.take_config("CacheConfig::for_blocks", CacheConfig::for_blocks(blocks, &shape, format));
}

fn with_block_size(world: &mut World) {
    let size = world.number();
    let changed = world.values.config.clone().with_block_size(size);
    world.take_config("CacheConfig::with_block_size", changed);
}

fn with_max_sequences(world: &mut World) {
    let number = world.number();
    let changed = world.values.config.clone().with_max_sequences(number);
    world.take_config("CacheConfig::with_max_sequences", changed);
}

fn with_max_sequence_tokens(world: &mut World) {
    let number = world.number();
    let changed = world.values.config.clone().with_max_sequence_tokens(number);
    world.take_config("CacheConfig::with_max_sequence_tokens", changed);
}

fn with_host_blocks(world: &mut World) {
    let number = world.number();
    let changed = world.values.config.clone().with_host_blocks(number);
    world.take_config("CacheConfig::with_host_blocks", changed);
}

/// What is asked of a configuration that was taken is within it.
fn ask_config(world: &mut World) {
    let config = &world.values.config;
    assert!(config.num_blocks() > 0 && config.block_size().is_power_of_two() && config.max_sequences() > 0);
    assert!(config.bytes_total() >= config.table_bytes());
    let layouts = config.groups().iter().map(|group| group.layout());
    let most_bytes = layouts.map(BlockLayout::block_bytes).max().unwrap();
    assert!(config.groups().len() > 1 || config.bytes_per_block() >= config.bytes_per_token());
    assert_eq!(config.bytes_per_block(), most_bytes, "the fullest stack fills a block");
    assert!((0.0..=f64::from(MAX_PADDING_PERCENT) / 100.0).contains(&config.padding_share()));
    let slots = u64::from(config.num_blocks()) * u64::from(config.block_size());
    assert!(slots < u64::from(u32::MAX));
    assert_eq!(config.table_entries(), config.layout().blocks_for(config.max_sequence_tokens()));
    assert_eq!(config.worst_waste_tokens(), config.block_size() - 1);
    assert!(config.expected_waste_tokens() <= config.block_size() / 2 && config.fingerprint() > 0);
    assert!(config.host_blocks() > 0 || config.host_bytes() == 0);
}

fn host_bytes(world: &mut World) {
    let config = &world.values.config;
    let bytes = u128::from(config.host_blocks()) * u128::from(config.bytes_per_block());
    assert_eq!(u128::from(config.host_bytes()), bytes, "bytes of the host pool");
}

fn arenas(world: &mut World) {
    let most = world.long();
    let cut = world.values.config.arenas(most);
    if let Some(arenas) = world.judge("CacheConfig::arenas", cut) {
        assert!((0..arenas.num_arenas().min(4)).all(|arena| arenas.arena_bytes(arena) <= most));
        world.values.arenas = arenas;
    }
}

fn block_layout(world: &mut World) -> BlockLayout {
    *world.values.config.layout()
}

fn ask_layout(world: &mut World) {
    let layout = block_layout(world);
    let config = &world.values.config;
    let heads = u64::from(layout.num_layers()) * u64::from(layout.num_kv_heads());
    let bits = layout.k_head_dim() * layout.k_type().bits() + layout.v_head_dim() * layout.v_type().bits();
    let per_token = heads * u64::from(bits / 8);
    assert!(config.bytes_per_token() >= per_token);
    assert!(config.groups().len() > 1 || config.bytes_per_token() == per_token);
    assert_eq!(config.block_size(), layout.block_size());
}

fn blocks_for(world: &mut World) {
    let (layout, tokens) = (block_layout(world), world.number());
    assert_eq!(layout.blocks_for(tokens), tokens.div_ceil(layout.block_size()));
}

fn words(world: &mut World, count: fn(&BlockLayout) -> u64) {
    let layout = block_layout(world);
    count(&layout);
}

fn arena_layout(world: &mut World) -> ArenaLayout {
    world.values.arenas.clone()
}

fn ask_arenas(world: &mut World) {
    let layout = arena_layout(world);
    assert!(layout.num_blocks() > 0 && layout.layers_per_arena() > 0);
    assert!(layout.layers_per_arena() <= layout.block().num_layers());
    assert!(layout.num_layers() >= layout.block().num_layers());
}

fn new_arenas(world: &mut World) {
    let (block, num_blocks, layers) = (block_layout(world), world.number(), world.number());
    let made = ArenaLayout::new(block, num_blocks, layers);
    if let Some(arenas) = world.judge("ArenaLayout::new", made) {
        assert_eq!(arenas.arena_bytes(0), 4 * u64::from(num_blocks) * arenas.block_stride_words(0));
    }
}

fn arena(world: &mut World, ask: fn(&ArenaLayout, u32) -> u64) {
    let (layout, number) = (arena_layout(world), world.number());
    ask(&layout, number);
}

fn row_word(world: &mut World) {
    let layout = arena_layout(world);
    let [layer, block, kv_head, slot] = [(); 4].map(|()| world.number());
    let part = world.random.pick(&[KvPart::K, KvPart::V]);
    let word = layout.row_word(layer, part, block, kv_head, slot);
    let (arena, _) = layout.arena_of(layer);
    assert!(word * 4 < layout.arena_bytes(arena), "an address beyond its arena");
}

fn new_shape(world: &mut World) {
    let [layers, query_heads, kv_heads, head_dim] = [(); 4].map(|()| world.number());
    let shape = ModelShape::new(layers, query_heads, kv_heads, head_dim);
    let told = [shape.num_layers(), shape.num_query_heads(), shape.num_kv_heads(), shape.head_dim()];
    assert_eq!(told, [layers, query_heads, kv_heads, head_dim]);
}

fn shape(world: &mut World) {
    let (shape, _) = world.shape();
    shape.heads_per_kv_head();
}

/// What is read of a shape is what it was made of.
fn groups(world: &mut World) {
    let group = world.group(vec![2, 0, 1]);
    let shape = ModelShape::of_groups([group.clone(), world.group(vec![3])]);
    assert_eq!((shape.num_layers(), shape.groups().len()), (4, 2));
    let read = shape.groups().next().unwrap();
    assert_eq!(read.layers().collect::<Vec<_>>(), [2, 0, 1]);
    assert_eq!(read.num_layers(), 3);
    assert_eq!(read.heads_per_kv_head(), read.num_query_heads() / read.num_kv_heads());
    assert_eq!((read.head_dim(), read.v_head_dim()), (group.head_dim(), group.v_head_dim()));
    assert_eq!(read.reach(), group.reach());
}

/// A rule says what it was given, and nothing of layers and heads that it has no numbers for.
fn logit_rule(world: &mut World) {
    let rule = world.logits();
    let (layer, heads) = (world.number(), world.number());
    assert!(rule.sinks(layer, heads).len() <= heads as usize);
    assert_eq!(rule.has_slopes(), rule.slopes().len() > 0);
    assert!(rule.has_sinks() || rule.sinks(0, heads).len() == 0);
    assert!(rule != LogitRule::new() || (rule.soft_cap().is_none() && rule.scale(64) == 0.125));
    let count = world.small();
    assert_eq!(LogitRule::alibi_slopes(count).len(), count as usize);
    let [one, other] = [(); 2].map(|()| LayerGroup::layer(2, 1, 8).with_logits(world.logits()));
    let joined = ModelShape::from_layers([one.clone(), other, one]);
    assert_eq!((joined.num_layers(), joined.groups().len() <= 2), (3, true));
    let shape = ModelShape::new(1, 2, 1, 8).with_logits(rule.clone()).with_reach(world.reach());
    assert_eq!(shape.groups().next().map(LayerGroup::logits), Some(&rule));
}

/// Groups of a configuration that was taken: their stacks follow one another.
fn group_layouts(world: &mut World) {
    let groups = world.values.config.groups();
    let mut stacks: Vec<u32> = Vec::new();
    for group in groups {
        assert!(group.num_stacks() * group.layout().num_layers() >= group.num_layers());
        stacks.extend(group.first_stack()..group.first_stack() + group.num_stacks());
        assert!(group.reach() == Reach::All || group.num_layers() > 0);
    }
    stacks.sort_unstable();
    assert!((0..).zip(&stacks).all(|(index, &stack)| index == stack), "{stacks:?}");
}

fn reach(world: &mut World) {
    let (reach, position, block_size) = (world.reach(), world.number(), 1 << world.random.below(0..13));
    let [first, rest] = reach.visible(position);
    assert!(first.end <= rest.start && rest.contains(&position) || position == u32::MAX);
    let kept = reach.kept(position, block_size);
    assert!(kept[0].end <= kept[1].start && kept[1].end == position.div_ceil(block_size));
    let most = reach.most_blocks(position, world.number(), block_size);
    assert!(most <= position.div_ceil(block_size) && reach.is_all() == (reach == Reach::All));
}

fn kv_type(world: &mut World) {
    let kv_type = world.random.pick(&[KvType::F32, KvType::F16]);
    assert_eq!(kv_type.bits() * kv_type.elements_per_vec4(), 128);
}

fn ids(world: &mut World) {
    let (raw, sample) = (world.random.next(), world.number());
    let sequence: SequenceId = RequestId::from_raw(raw).sample(sample);
    assert_eq!((sequence.request().raw(), sequence.sample()), (raw, sample));
    let cache = &world.twins.cache;
    let blocks = cache.block_ids(world.twins.table).unwrap();
    assert!(blocks.iter().all(|block| block.index() < cache.config().num_blocks()));
    assert_eq!(StepId::default().raw(), 0);
}

fn new_block(world: &mut World) {
    let index = world.number();
    assert_eq!(BlockId::new(index).index(), index);
}

fn table_row(world: &mut World) {
    let config = world.twins.cache.config();
    let row = world.twins.table.row();
    assert!(row < config.max_sequences());
}

pub(super) const CALLS: &[(&str, Call)] = &[
    ("CacheConfig::for_bytes", for_bytes),
    ("CacheConfig::for_context", for_context),
    ("CacheConfig::for_blocks", for_blocks),
    ("CacheConfig::with_block_size", with_block_size),
    ("CacheConfig::with_max_sequences", with_max_sequences),
    ("CacheConfig::with_max_sequence_tokens", with_max_sequence_tokens),
    ("CacheConfig::with_host_blocks", with_host_blocks),
    ("Reach::visible", reach),
    ("Reach::kept", reach),
    ("Reach::most_blocks", reach),
    ("Reach::is_all", reach),
    ("LayerGroup::new", groups),
    ("LayerGroup::with_reach", groups),
    ("LayerGroup::with_v_head_dim", groups),
    ("LayerGroup::num_layers", groups),
    ("LayerGroup::layers", groups),
    ("LayerGroup::num_query_heads", groups),
    ("LayerGroup::num_kv_heads", groups),
    ("LayerGroup::head_dim", groups),
    ("LayerGroup::v_head_dim", groups),
    ("LayerGroup::reach", groups),
    ("LayerGroup::heads_per_kv_head", groups),
    ("LayerGroup::logits", logit_rule),
    ("LayerGroup::with_logits", logit_rule),
    ("LayerGroup::layer", logit_rule),
    ("ModelShape::from_layers", logit_rule),
    ("LogitRule::new", logit_rule),
    ("LogitRule::with_scale", logit_rule),
    ("LogitRule::with_soft_cap", logit_rule),
    ("LogitRule::with_slopes", logit_rule),
    ("LogitRule::with_sinks", logit_rule),
    ("LogitRule::alibi_slopes", logit_rule),
    ("LogitRule::scale", logit_rule),
    ("LogitRule::soft_cap", logit_rule),
    ("LogitRule::slopes", logit_rule),
    ("LogitRule::sinks", logit_rule),
    ("LogitRule::has_sinks", logit_rule),
    ("LogitRule::has_slopes", logit_rule),
    ("ModelShape::with_logits", logit_rule),
    ("ModelShape::with_reach", logit_rule),
    ("ModelShape::of_groups", groups),
    ("ModelShape::groups", groups),
    ("GroupLayout::reach", group_layouts),
    ("GroupLayout::num_layers", group_layouts),
    ("GroupLayout::first_stack", group_layouts),
    ("GroupLayout::num_stacks", group_layouts),
    ("GroupLayout::layout", group_layouts),
    ("CacheConfig::groups", group_layouts),
    ("CacheConfig::padding_share", ask_config),
    ("CacheConfig::layout", ask_config),
    ("CacheConfig::num_blocks", ask_config),
    ("CacheConfig::block_size", ask_config),
    ("CacheConfig::max_sequences", ask_config),
    ("CacheConfig::max_sequence_tokens", ask_config),
    ("CacheConfig::table_entries", ask_config),
    ("CacheConfig::bytes_per_token", ask_config),
    ("CacheConfig::bytes_per_block", ask_config),
    ("CacheConfig::host_blocks", ask_config),
    ("CacheConfig::host_bytes", host_bytes),
    ("CacheConfig::table_bytes", ask_config),
    ("CacheConfig::bytes_total", ask_config),
    ("CacheConfig::expected_waste_tokens", ask_config),
    ("CacheConfig::worst_waste_tokens", ask_config),
    ("CacheConfig::fingerprint", ask_config),
    ("CacheConfig::arenas", arenas),
    ("BlockLayout::num_layers", ask_layout),
    ("BlockLayout::num_kv_heads", ask_layout),
    ("BlockLayout::k_head_dim", ask_layout),
    ("BlockLayout::v_head_dim", ask_layout),
    ("BlockLayout::k_type", ask_layout),
    ("BlockLayout::v_type", ask_layout),
    ("BlockLayout::block_size", ask_layout),
    ("BlockLayout::blocks_for", blocks_for),
    ("BlockLayout::k_row_words", |world| words(world, |layout| layout.k_row_words().into())),
    ("BlockLayout::v_row_words", |world| words(world, |layout| layout.v_row_words().into())),
    ("BlockLayout::k_head_words", |world| words(world, |layout| layout.k_head_words().into())),
    ("BlockLayout::v_head_words", |world| words(world, |layout| layout.v_head_words().into())),
    ("BlockLayout::v_sum_units", |world| words(world, |layout| layout.v_sum_units().into())),
    ("BlockLayout::layer_block_units", |world| words(world, BlockLayout::layer_block_units)),
    ("BlockLayout::layer_block_bytes", |world| words(world, BlockLayout::layer_block_bytes)),
    ("BlockLayout::layer_token_bytes", |world| words(world, BlockLayout::layer_token_bytes)),
    ("BlockLayout::layer_block_words", |world| words(world, BlockLayout::layer_block_words)),
    ("BlockLayout::block_bytes", |world| words(world, BlockLayout::block_bytes)),
    ("ArenaLayout::new", new_arenas),
    ("ArenaLayout::block", ask_arenas),
    ("ArenaLayout::num_blocks", ask_arenas),
    ("ArenaLayout::layers_per_arena", ask_arenas),
    ("ArenaLayout::num_layers", ask_arenas),
    ("ArenaLayout::block_of", |world| arena(world, |layout, layer| layout.block_of(layer).block_bytes())),
    ("ArenaLayout::place_of", |world| arena(world, |layout, layer| layout.place_of(layer).position.into())),
    ("ArenaLayout::num_arenas", |world| arena(world, |layout, _| layout.num_arenas().into())),
    ("ArenaLayout::arena_of", |world| arena(world, |layout, layer| layout.arena_of(layer).0.into())),
    ("ArenaLayout::layers_in", |world| arena(world, |layout, arena| layout.layers_in(arena).into())),
    ("ArenaLayout::block_stride_words", |world| arena(world, ArenaLayout::block_stride_words)),
    ("ArenaLayout::block_stride_units", |world| arena(world, ArenaLayout::block_stride_units)),
    ("ArenaLayout::block_stride_bytes", |world| arena(world, ArenaLayout::block_stride_bytes)),
    ("ArenaLayout::layer_start_units", |world| arena(world, ArenaLayout::layer_start_units)),
    ("ArenaLayout::arena_words", |world| arena(world, ArenaLayout::arena_words)),
    ("ArenaLayout::arena_bytes", |world| arena(world, ArenaLayout::arena_bytes)),
    ("ArenaLayout::row_word", row_word),
    ("ModelShape::new", new_shape),
    ("ModelShape::num_layers", new_shape),
    ("ModelShape::num_query_heads", new_shape),
    ("ModelShape::num_kv_heads", new_shape),
    ("ModelShape::head_dim", new_shape),
    ("ModelShape::heads_per_kv_head", shape),
    ("KvFormat::new", for_blocks),
    ("KvFormat::with_v_head_dim", for_bytes),
    ("KvType::bits", kv_type),
    ("KvType::elements_per_vec4", kv_type),
    ("BlockId::new", new_block),
    ("BlockId::index", ids),
    ("TableId::row", table_row),
    ("RequestId::from_raw", ids),
    ("RequestId::raw", ids),
    ("RequestId::sample", ids),
    ("SequenceId::request", ids),
    ("SequenceId::sample", ids),
    ("StepId::raw", ids),
];
