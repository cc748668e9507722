//! What a model asks of a cache: its attention shape, and how its keys and values are stored.
//!
//! A shape is a plain value that may be wrong; a configuration refuses it then. Nothing here knows blocks: where keys and
//! values lie is said by `layout.rs`, and how much of them there is by `config.rs`.

use crate::error::ConfigError;
use std::fmt;

/// Largest head size, in elements.
pub const MAX_HEAD_DIM: u32 = 256;

/// The attention shape of a model, as its own description gives it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelShape {
    num_layers: u32,
    num_query_heads: u32,
    num_kv_heads: u32,
    head_dim: u32,
}

impl ModelShape {
    /// `num_layers` layers that have a key-value cache, each of `num_query_heads` query heads and `num_kv_heads` key and
    /// value heads, whose query and key heads have `head_dim` elements.
    ///
    /// Nothing is checked here: a [`CacheConfig`](crate::CacheConfig) refuses a shape that has a zero, query heads that are
    /// no multiple of the kv heads, or a head size that is no multiple of 8 from 8 to [`MAX_HEAD_DIM`].
    pub const fn new(num_layers: u32, num_query_heads: u32, num_kv_heads: u32, head_dim: u32) -> Self {
        Self { num_layers, num_query_heads, num_kv_heads, head_dim }
    }

    /// Transformer layers that have a key-value cache.
    pub fn num_layers(&self) -> u32 {
        self.num_layers
    }

    /// Query heads per layer.
    pub fn num_query_heads(&self) -> u32 {
        self.num_query_heads
    }

    /// Key and value heads per layer.
    pub fn num_kv_heads(&self) -> u32 {
        self.num_kv_heads
    }

    /// Elements of a query and key head. Value heads have the same size unless [`KvFormat::with_v_head_dim`] says otherwise.
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// Query heads that read one kv head.
    ///
    /// # Panics
    /// When there is no kv head; a [`CacheConfig`](crate::CacheConfig) refuses such a shape.
    pub fn heads_per_kv_head(&self) -> u32 {
        self.num_query_heads / self.num_kv_heads
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
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
