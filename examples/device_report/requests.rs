//! What an application should request of an adapter for the library, and what each thing buys.

use paged_kv::{recommended_features, recommended_limits};
use serde::Serialize;
use wgpu::{Features, Limits};

/// One limit in bytes, or one feature as 0 or 1.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Request {
    /// Its name in `wgpu::Limits` or `wgpu::Features`.
    pub(crate) name: &'static str,
    pub(crate) is_limit: bool,
    /// What a device has that requests nothing.
    pub(crate) default: u64,
    pub(crate) offered: u64,
    /// What the library recommends to request.
    pub(crate) request: u64,
    pub(crate) buys: &'static str,
}

/// Everything that [`recommended_limits`] and [`recommended_features`] raise beyond wgpu's defaults, and the features that
/// one might expect among them.
pub(crate) fn requests(adapter: &wgpu::Adapter) -> Vec<Request> {
    let (base, offered) = (Limits::default(), adapter.limits());
    let recommended = recommended_limits(adapter, base.clone().or_worse_values_from(&offered));
    let limit = |name, of: fn(&Limits) -> u64, buys| Request {
        name,
        is_limit: true,
        default: of(&base),
        offered: of(&offered),
        request: of(&recommended),
        buys,
    };
    let feature = |name, feature: Features, buys| Request {
        name,
        is_limit: false,
        default: 0,
        offered: adapter.features().contains(feature).into(),
        request: recommended_features(adapter).contains(feature).into(),
        buys,
    };
    vec![
        limit(
            "max_storage_buffer_binding_size",
            |limits| limits.max_storage_buffer_binding_size,
            "larger pools, since one binding must hold a layer's blocks; fewer arenas",
        ),
        limit(
            "max_buffer_size",
            |limits| limits.max_buffer_size,
            "the same: an arena is one buffer and one binding",
        ),
        feature(
            "SUBGROUP",
            Features::SUBGROUP,
            "sums across lanes without workgroup memory and its barriers",
        ),
        feature(
            "SHADER_F16",
            Features::SHADER_F16,
            "nothing: an f16 cache is read without it, and compilers make the same of both",
        ),
    ]
}
