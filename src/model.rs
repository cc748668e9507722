//! What a model asks of a cache: its attention shape, and how its keys and values are stored.
//!
//! A shape is a plain value that may be wrong; a configuration refuses it then. Nothing here knows blocks: `layout.rs`
//! says where keys and values lie, and `config.rs` how much of them there is.

use crate::error::ConfigError;
use crate::logits::LogitRule;
use crate::reach::Reach;
use std::fmt;

/// Largest head size, in elements.
pub const MAX_HEAD_DIM: u32 = 256;

/// The attention shape of a model, as its own description gives it: groups of layers that are alike.
///
/// ```
/// # use paged_kv::{LayerGroup, ModelShape, Reach};
/// // A layer in six sees everything, the others a window of 1,024 tokens.
/// let (whole, windowed): (Vec<u32>, Vec<u32>) = (0..48).partition(|layer| layer % 6 == 5);
/// let shape = ModelShape::of_groups([
///     LayerGroup::new(whole, 16, 8, 256),
///     LayerGroup::new(windowed, 16, 8, 256).with_reach(Reach::Window { tokens: 1024, first: 0 }),
/// ]);
/// assert_eq!(shape.num_layers(), 48);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelShape {
    first: LayerGroup,
    others: Vec<LayerGroup>,
}

/// Layers of a model that are alike: in heads, in what their rows see, and in how their keys and values are stored.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerGroup {
    num_layers: u32,
    /// Their indices in the model; none where these are all its layers.
    layers: Vec<u32>,
    num_query_heads: u32,
    num_kv_heads: u32,
    head_dim: u32,
    v_head_dim: Option<u32>,
    reach: Reach,
    logits: LogitRule,
}

impl ModelShape {
    /// `num_layers` layers that have a key-value cache, each of `num_query_heads` query heads and `num_kv_heads` key and
    /// value heads, whose query and key heads have `head_dim` elements. All layers are alike, and their rows see everything
    /// before them.
    ///
    /// Nothing is checked here: a [`CacheConfig`](crate::CacheConfig) refuses a shape that has a zero, query heads that
    /// are not a multiple of the kv heads, or a head size that is not a multiple of 8 from 8 to [`MAX_HEAD_DIM`].
    pub const fn new(num_layers: u32, num_query_heads: u32, num_kv_heads: u32, head_dim: u32) -> Self {
        let first = LayerGroup {
            num_layers,
            layers: Vec::new(),
            num_query_heads,
            num_kv_heads,
            head_dim,
            v_head_dim: None,
            reach: Reach::All,
            logits: LogitRule::new(),
        };
        Self { first, others: Vec::new() }
    }

    /// A model of several groups of layers.
    ///
    /// Nothing is checked here, either: a configuration refuses layers that are missing or in two groups, too.
    pub fn of_groups(groups: impl IntoIterator<Item = LayerGroup>) -> Self {
        let mut groups = groups.into_iter();
        let first = groups.next().unwrap_or_else(|| LayerGroup::new([], 0, 0, 0));
        Self { first, others: groups.collect() }
    }

    /// A model of these layers, from 0 on, each described by [`LayerGroup::layer`]: those that are alike become a group. The
    /// learned sinks of each layer are its own, and stay with it.
    ///
    /// ```
    /// # use paged_kv::{LayerGroup, LogitRule, ModelShape, Reach};
    /// // gpt-oss-20b: every second layer sees a window; each head of each layer has a learned sink, read from the file.
    /// # let sinks_of = |layer: u32| vec![layer as f32; 64];
    /// let window = Reach::Window { tokens: 128, first: 0 };
    /// let shape = ModelShape::from_layers((0..24).map(|index| {
    ///     let reach = if index % 2 == 0 { window } else { Reach::All };
    ///     let logits = LogitRule::new().with_sinks(sinks_of(index));
    ///     LayerGroup::layer(64, 8, 64).with_reach(reach).with_logits(logits)
    /// }));
    /// assert_eq!((shape.num_layers(), shape.groups().len()), (24, 2));
    /// ```
    ///
    /// Nothing is checked here, either.
    pub fn from_layers(layers: impl IntoIterator<Item = LayerGroup>) -> Self {
        let mut groups: Vec<LayerGroup> = Vec::new();
        for (index, mut layer) in (0..).zip(layers) {
            (layer.layers, layer.num_layers) = (vec![index], 1);
            match groups.iter_mut().find(|group| group.is_alike(&layer)) {
                Some(group) => group.join(layer),
                None => groups.push(layer),
            }
        }
        if let [only] = &mut groups[..] {
            // All of the model's layers are in their order.
            only.layers = Vec::new();
        }
        Self::of_groups(groups)
    }

    /// The same model, in all layers of which rows see the keys that `reach` says.
    pub fn with_reach(mut self, reach: Reach) -> Self {
        for group in self.groups_mut() {
            group.reach = reach;
        }
        self
    }

    /// The same model, whose logits are made by `logits` in all layers.
    pub fn with_logits(mut self, logits: LogitRule) -> Self {
        for group in self.groups_mut() {
            group.logits = logits.clone();
        }
        self
    }

    /// A group, which there must be.
    pub(crate) fn group(&self, group: u32) -> &LayerGroup {
        match group {
            0 => &self.first,
            group => &self.others[group as usize - 1],
        }
    }

    fn groups_mut(&mut self) -> impl Iterator<Item = &mut LayerGroup> {
        std::iter::once(&mut self.first).chain(&mut self.others)
    }

    /// The groups of layers, in the order in which they were given.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = &LayerGroup> {
        (0..1 + self.others.len()).map(|group| self.group(group as u32))
    }

    /// Layers of all groups.
    pub fn num_layers(&self) -> u32 {
        self.groups().fold(0, |sum: u32, group| sum.saturating_add(group.num_layers))
    }

    /// Query heads per layer of the first group.
    pub fn num_query_heads(&self) -> u32 {
        self.first.num_query_heads
    }

    /// Key and value heads per layer of the first group.
    pub fn num_kv_heads(&self) -> u32 {
        self.first.num_kv_heads
    }

    /// Elements of a query and key head of the first group. Value heads have the same size unless
    /// [`LayerGroup::with_v_head_dim`] or [`KvFormat::with_v_head_dim`] says otherwise.
    pub fn head_dim(&self) -> u32 {
        self.first.head_dim
    }

    /// Query heads that read one kv head, in the first group.
    ///
    /// # Panics
    /// When there is no kv head; a [`CacheConfig`](crate::CacheConfig) refuses such a shape.
    pub fn heads_per_kv_head(&self) -> u32 {
        self.first.heads_per_kv_head()
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        self.groups().try_for_each(LayerGroup::check)?;
        let mut layers: Vec<u32> = self.groups().flat_map(|group| group.layers.iter().copied()).collect();
        if self.others.is_empty() && layers.is_empty() {
            return Ok(());
        }
        layers.sort_unstable();
        match (0..).zip(&layers).find(|&(index, &layer)| index != layer) {
            Some((layer, _)) => Err(ConfigError::Layers { layer, num_layers: self.num_layers() }),
            None => Ok(()),
        }
    }
}

impl LayerGroup {
    /// The layers of a model that have these indices, from 0 on, in the order of their keys and values in a block; the
    /// numbers as for [`ModelShape::new`].
    pub fn new(
        layers: impl IntoIterator<Item = u32>,
        num_query_heads: u32,
        num_kv_heads: u32,
        head_dim: u32,
    ) -> Self {
        let layers: Vec<u32> = layers.into_iter().collect();
        Self {
            num_layers: u32::try_from(layers.len()).unwrap_or(u32::MAX),
            layers,
            num_query_heads,
            num_kv_heads,
            head_dim,
            v_head_dim: None,
            reach: Reach::All,
            logits: LogitRule::new(),
        }
    }

    /// One layer, for [`ModelShape::from_layers`]; the numbers as for [`ModelShape::new`].
    pub fn layer(num_query_heads: u32, num_kv_heads: u32, head_dim: u32) -> Self {
        Self::new([0], num_query_heads, num_kv_heads, head_dim)
    }

    /// Whether a layer differs in nothing but its sinks, which a layer of another group has, too.
    fn is_alike(&self, layer: &Self) -> bool {
        let Self {
            num_layers: _,
            layers: _,
            num_query_heads,
            num_kv_heads,
            head_dim,
            v_head_dim,
            reach,
            logits,
        } = layer;
        self.num_query_heads == *num_query_heads
            && self.num_kv_heads == *num_kv_heads
            && self.head_dim == *head_dim
            && self.v_head_dim == *v_head_dim
            && self.reach == *reach
            && self.logits.is_alike(logits)
    }

    /// Takes a layer that is alike.
    fn join(&mut self, layer: Self) {
        self.layers.extend(layer.layers);
        self.num_layers += layer.num_layers;
        self.logits.join(layer.logits);
    }

    /// Rows that see the keys that `reach` says.
    pub fn with_reach(mut self, reach: Reach) -> Self {
        self.reach = reach;
        self
    }

    /// Logits that are made by `logits`.
    pub fn with_logits(mut self, logits: LogitRule) -> Self {
        self.logits = logits;
        self
    }

    /// Value heads of `v_head_dim` elements (a multiple of 8, from 8 to 256), whatever the stored format says.
    pub fn with_v_head_dim(mut self, v_head_dim: u32) -> Self {
        self.v_head_dim = Some(v_head_dim);
        self
    }

    /// Layers of the group.
    pub fn num_layers(&self) -> u32 {
        self.num_layers
    }

    /// Their indices in the model, in the order of their keys and values in a block.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = u32> {
        (0..self.num_layers).map(|index| self.layers.get(index as usize).copied().unwrap_or(index))
    }

    /// The place of one of its layers among them.
    pub(crate) fn index_of(&self, layer: u32) -> u32 {
        let found = self.layers.iter().position(|&own| own == layer);
        found.map_or(layer, |index| index as u32)
    }

    /// Query heads per layer.
    pub fn num_query_heads(&self) -> u32 {
        self.num_query_heads
    }

    /// Key and value heads per layer.
    pub fn num_kv_heads(&self) -> u32 {
        self.num_kv_heads
    }

    /// Query heads that read one kv head.
    ///
    /// # Panics
    /// When there is no kv head; a [`CacheConfig`](crate::CacheConfig) refuses such a group.
    pub fn heads_per_kv_head(&self) -> u32 {
        self.num_query_heads / self.num_kv_heads
    }

    /// Elements of a query and key head.
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// Elements of a value head, where they are not those that the stored format says.
    pub fn v_head_dim(&self) -> Option<u32> {
        self.v_head_dim
    }

    /// The keys that a row sees.
    pub fn reach(&self) -> Reach {
        self.reach
    }

    /// What becomes of the product of a query and a key.
    pub fn logits(&self) -> &LogitRule {
        &self.logits
    }

    fn check(&self) -> Result<(), ConfigError> {
        for (field, value) in [
            ("num_layers", self.num_layers),
            ("num_query_heads", self.num_query_heads),
            ("num_kv_heads", self.num_kv_heads),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { field });
            }
        }
        if !self.num_query_heads.is_multiple_of(self.num_kv_heads) {
            return Err(ConfigError::HeadRatio {
                num_query_heads: self.num_query_heads,
                num_kv_heads: self.num_kv_heads,
            });
        }
        if matches!(self.reach, Reach::Window { tokens: 0, .. } | Reach::Chunk { tokens: 0 }) {
            return Err(ConfigError::Zero { field: "tokens of a reach" });
        }
        self.logits.check(self.num_layers, self.num_query_heads)?;
        check_head_dim(self.head_dim)
    }
}

pub(crate) fn check_head_dim(head_dim: u32) -> Result<(), ConfigError> {
    if head_dim == 0 || head_dim > MAX_HEAD_DIM || !head_dim.is_multiple_of(8) {
        return Err(ConfigError::HeadDim { head_dim, max: MAX_HEAD_DIM });
    }
    Ok(())
}

/// How an element of K or V is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvType {
    /// 32-bit floats.
    F32,
    /// 16-bit floats, rounded to nearest even when written; every device can read them.
    F16,
}

impl KvType {
    /// Bits of one element.
    pub const fn bits(self) -> u32 {
        match self {
            Self::F32 => 32,
            Self::F16 => 16,
        }
    }

    /// Elements in one 16-byte load.
    pub const fn elements_per_vec4(self) -> u32 {
        128 / self.bits()
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
        })
    }
}

/// Element types of keys and values, and the size of a value head where it differs from the key's.
///
/// A [`KvType`] converts into the format that stores both alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvFormat {
    pub(crate) k_type: KvType,
    pub(crate) v_type: KvType,
    /// That of the key heads, where none is named.
    pub(crate) v_head_dim: Option<u32>,
}

impl KvFormat {
    /// Keys stored as `k_type`, values as `v_type`.
    pub fn new(k_type: KvType, v_type: KvType) -> Self {
        Self { k_type, v_type, v_head_dim: None }
    }

    /// Value heads of `v_head_dim` elements (a multiple of 8, from 8 to 256).
    pub fn with_v_head_dim(mut self, v_head_dim: u32) -> Self {
        self.v_head_dim = Some(v_head_dim);
        self
    }
}

impl From<KvType> for KvFormat {
    fn from(kv_type: KvType) -> Self {
        Self::new(kv_type, kv_type)
    }
}
