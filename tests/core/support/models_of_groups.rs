//! Models whose layers are not all alike.

use paged_kv::{LayerGroup, LogitRule, ModelShape, Reach};

/// Models of several groups: whole and windowed layers, other heads and sizes, chunks; each with rules of its own.
pub(crate) fn models_of_groups() -> [ModelShape; 4] {
    let sinks = |count: u32| (0..count).map(|index| index as f32 / 2.0 - 1.0);
    let capped = LogitRule::new().with_soft_cap(2.0);
    let window = |tokens, first| Reach::Window { tokens, first };
    [
        ModelShape::of_groups([
            LayerGroup::new([2], 4, 2, 16).with_logits(capped.clone().with_sinks(sinks(4))),
            LayerGroup::new([0, 1, 3, 4], 4, 2, 16)
                .with_reach(window(20, 0))
                .with_logits(capped.clone().with_sinks(sinks(16))),
        ]),
        ModelShape::of_groups([
            LayerGroup::new([1, 0], 4, 1, 32)
                .with_logits(LogitRule::new().with_sinks([2.0, 0.0, 1.0, -1.0, 3.0, 0.5, 0.0, 1.0])),
            LayerGroup::new([2, 4], 2, 2, 16).with_reach(Reach::Chunk { tokens: 30 }).with_logits(capped),
            LayerGroup::new([3], 6, 2, 16).with_reach(window(33, 5)),
        ]),
        ModelShape::of_groups([
            LayerGroup::new([0, 2], 2, 1, 24).with_reach(window(64, 0)),
            LayerGroup::new([1], 2, 1, 48).with_v_head_dim(32).with_reach(window(7, 0)),
        ]),
        ModelShape::of_groups([
            LayerGroup::new([0, 2, 4, 6], 2, 1, 16),
            LayerGroup::new([1, 3, 5, 7], 2, 1, 16).with_reach(window(40, 3)),
        ]),
    ]
}
