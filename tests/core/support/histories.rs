//! Random histories: what may be done to a scheduler, on which machine, as proptest's strategies. The random tests and the
//! fuzz targets draw from them.

use crate::model::{Turn, World};
use crate::simulated_device::{Device, stacks_of};
use paged_kv::{
    Admission, CacheConfig, DuplicatePrompts, KvType, LayerGroup, ModelShape, PreemptionMode,
    PrefixCacheConfig, Priority, Reach, Retention, SchedulerConfig, VictimPolicy,
};
use proptest::prelude::*;
use proptest::strategy::Union;
use std::collections::BTreeSet;

/// What is done to a scheduler. Indices are taken modulo what exists.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Add(Turn),
    Fork {
        parent: usize,
        at: usize,
        turn: Turn,
    },
    Extend {
        index: usize,
        turn: Turn,
    },
    Truncate {
        index: usize,
        len: usize,
    },
    Propose {
        index: usize,
        num: u32,
        right: u32,
    },
    Abort(usize),
    AbortSample {
        index: usize,
        sample: u32,
    },
    CompleteTransfer(usize),
    LoseTransfer(usize),
    LoseDevice {
        arrived: bool,
        after: bool,
    },
    Schedule,
    Run,
    Drop {
        by_mistake: bool,
    },
    Commit {
        choice: u32,
        invalid: Option<usize>,
    },
    /// The common case; with drafts for every sequence, all of them right but perhaps the last.
    Step {
        choice: u32,
        drafts: u32,
    },
}

fn turns() -> impl Strategy<Value = Turn> {
    let max_new = prop_oneof![1 => Just(None), 8 => (0..24u32).prop_map(Some)];
    let samples = prop_oneof![4 => Just(1), 2 => 2..5u32];
    let len = prop_oneof![1 => Just(0), 3 => 1..6u32, 4 => 1..24u32];
    // Few seeds, so that prompts begin alike.
    let seed = prop_oneof![3 => 0..3u32, 1 => any::<u32>()];
    let priority =
        prop_oneof![4 => Just(Priority::Normal), 1 => Just(Priority::Interactive), 1 => Just(Priority::Idle)];
    let salt = prop_oneof![6 => Just(0), 1 => 1..3u64];
    let retention = prop_oneof![
        Just(Retention::Low),
        Just(Retention::Normal),
        Just(Retention::High),
        Just(Retention::Pinned)
    ];
    let retain = prop::option::weighted(0.3, (1..24u32, retention, prop::option::of(1..20u32)));
    (len, seed, max_new, samples, any::<(bool, bool)>(), (priority, salt, retain)).prop_map(
        |(len, seed, max_new, samples, (keep, stops), (priority, salt, retain))| Turn {
            len,
            seed,
            max_new,
            samples,
            keep,
            stops,
            priority,
            salt,
            system: 0,
            system_seed: 0,
            retain,
        },
    )
}

/// Any of them, the usual ones more often.
pub(crate) fn operations() -> impl Strategy<Value = Operation> {
    let index = || 0..12usize;
    let invalid = prop_oneof![9 => Just(None), 1 => (0..4usize).prop_map(Some)];
    prop_oneof![
        8 => turns().prop_map(Operation::Add),
        3 => (index(), any::<usize>(), turns())
            .prop_map(|(parent, at, turn)| Operation::Fork { parent, at, turn }),
        3 => (index(), turns()).prop_map(|(index, turn)| Operation::Extend { index, turn }),
        2 => (index(), any::<usize>()).prop_map(|(index, len)| Operation::Truncate { index, len }),
        4 => (index(), 0..6u32, 0..6u32)
            .prop_map(|(index, num, right)| Operation::Propose { index, num, right }),
        1 => index().prop_map(Operation::Abort),
        1 => (index(), 0..4u32).prop_map(|(index, sample)| Operation::AbortSample { index, sample }),
        4 => any::<usize>().prop_map(Operation::CompleteTransfer),
        1 => any::<usize>().prop_map(Operation::LoseTransfer),
        2 => any::<(bool, bool)>().prop_map(|(arrived, after)| Operation::LoseDevice { arrived, after }),
        5 => Just(Operation::Schedule),
        1 => Just(Operation::Run),
        1 => any::<bool>().prop_map(|by_mistake| Operation::Drop { by_mistake }),
        4 => (any::<u32>(), invalid).prop_map(|(choice, invalid)| Operation::Commit { choice, invalid }),
        25 => (any::<u32>(), 0..6u32).prop_map(|(choice, drafts)| Operation::Step { choice, drafts }),
    ]
}

/// What a model may have that decides how its blocks come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// One group of layers, whose rows see everything.
    Plain,
    Window,
    /// A window that keeps a sequence's first tokens.
    FirstTokens,
    Chunk,
    /// No group sees everything.
    NoneSeesAll,
    /// Blocks of some groups have more tokens than others'.
    BlockSizes,
    ThreeGroups,
}

impl Kind {
    /// All but the first.
    pub(crate) const GROUPED: [Self; 6] = [
        Self::Window,
        Self::FirstTokens,
        Self::Chunk,
        Self::NoneSeesAll,
        Self::BlockSizes,
        Self::ThreeGroups,
    ];

    /// What a configuration's model has.
    pub(crate) fn of(config: &CacheConfig) -> Vec<Self> {
        let (groups, stacks) = (config.groups(), stacks_of(config));
        let has = |seen: fn(Reach) -> bool| stacks.iter().any(|stack| seen(stack.reach));
        let sizes: BTreeSet<u32> = stacks.iter().map(|stack| stack.block_size).collect();
        let is = |kind: &Self| match kind {
            Self::Plain => groups.len() == 1 && groups[0].reach().is_all(),
            Self::Window => has(|reach| matches!(reach, Reach::Window { first: 0, .. })),
            Self::FirstTokens => has(|reach| matches!(reach, Reach::Window { first: 1.., .. })),
            Self::Chunk => has(|reach| matches!(reach, Reach::Chunk { .. })),
            Self::NoneSeesAll => !has(Reach::is_all),
            Self::BlockSizes => sizes.len() > 1,
            Self::ThreeGroups => groups.len() == 3,
        };
        [Self::Plain].into_iter().chain(Self::GROUPED).filter(is).collect()
    }
}

/// One group of layers, whose rows see everything.
pub(crate) fn plain_shapes() -> impl Strategy<Value = ModelShape> {
    Just(ModelShape::new(1, 2, 1, 8))
}

/// Models of one to three groups of layers, with windows or chunks, whose rows are as long, or half or a quarter as long.
pub(crate) fn grouped_shapes() -> impl Strategy<Value = ModelShape> {
    // Around the ends of blocks.
    let tokens = || prop_oneof![Just(1u32), Just(3), Just(4), Just(5), Just(8), Just(20)];
    let window = tokens().prop_map(|tokens| Reach::Window { tokens, first: 0 }).boxed();
    let sinks = (tokens(), prop_oneof![Just(1u32), Just(4), Just(5), Just(9)])
        .prop_map(|(tokens, first)| Reach::Window { tokens, first })
        .boxed();
    let chunk = tokens().prop_map(|tokens| Reach::Chunk { tokens }).boxed();
    let moving = || Union::new([window.clone(), sinks.clone(), chunk.clone()]).boxed();
    let all = || Just(Reach::All).boxed();
    let reaches = prop_oneof![
        4 => (all(), moving()).prop_map(|reaches| vec![reaches.0, reaches.1]),
        2 => (moving(), all()).prop_map(|reaches| vec![reaches.0, reaches.1]),
        2 => moving().prop_map(|reach| vec![reach]),
        2 => (moving(), moving()).prop_map(|reaches| vec![reaches.0, reaches.1]),
        3 => (all(), moving(), moving()).prop_map(|reaches| vec![reaches.0, reaches.1, reaches.2]),
    ];
    let kv_heads =
        prop_oneof![2 => Just([1, 1, 1]), 1 => Just([1, 2, 4]), 1 => Just([2, 1, 2]), 1 => Just([4, 1, 1])];
    // Of each group.
    let layers = prop_oneof![3 => Just([1u32, 1, 1]), 1 => Just([1, 2, 1]), 1 => Just([1, 3, 2])];
    (reaches, kv_heads, layers).prop_map(|(reaches, kv_heads, layers)| {
        let mut first = 0;
        let groups = reaches.into_iter().zip(kv_heads).zip(layers).map(|((reach, kv_heads), layers)| {
            let group = LayerGroup::new(first..first + layers, 4, kv_heads, 8).with_reach(reach);
            first += layers;
            group
        });
        ModelShape::of_groups(groups)
    })
}

/// Pools of a few blocks.
pub(crate) fn caches(shapes: impl Strategy<Value = ModelShape>) -> impl Strategy<Value = CacheConfig> {
    // Tokens of the smallest blocks, and how many of them a sequence would take that nothing is given back of.
    let blocks = prop_oneof![(Just(1u32), 6..48u32), (Just(4u32), 3..14u32), (Just(16u32), 2..6u32)];
    // How much of that there is: windows need less.
    (shapes, blocks, 0..4u32, 1..9u32, prop::option::of(8..40u32)).prop_map(
        move |(shape, (block_size, blocks), less, tables, tokens)| {
            let config = CacheConfig::for_blocks(1, &shape, KvType::F32).unwrap();
            let config = config.with_block_size(block_size).unwrap();
            let stacks = stacks_of(&config);
            let all: u32 = stacks.iter().map(|stack| (blocks * block_size).div_ceil(stack.block_size)).sum();
            let num_blocks = if stacks.len() == 1 { all } else { all * (4 - less) / 4 };
            let config =
                CacheConfig::for_blocks(num_blocks.max(stacks.len() as u32), &shape, KvType::F32).unwrap();
            let config = config.with_block_size(block_size).unwrap().with_max_sequences(tables).unwrap();
            match tokens {
                Some(tokens) => config.with_max_sequence_tokens(tokens).unwrap(),
                None => config,
            }
        },
    )
}

/// Schedulers of any policy, and caches for them.
pub(crate) fn schedulers(
    shapes: impl Strategy<Value = ModelShape>,
) -> impl Strategy<Value = (SchedulerConfig, CacheConfig)> {
    let admission = prop_oneof![
        1 => Just(Admission::Guaranteed),
        2 => (0..3u32).prop_map(|watermark_blocks| Admission::Overcommitted { watermark_blocks })
    ];
    let work = prop_oneof![1 => 1..200u64, 2 => Just(1 << 24)];
    let duplicates = prop_oneof![Just(DuplicatePrompts::Wait), Just(DuplicatePrompts::ComputeAlone)];
    let prefix_cache = prop::option::weighted(
        0.8,
        (prop::option::weighted(0.3, 0..6u32), duplicates)
            .prop_map(|(max_cached_blocks, duplicates)| PrefixCacheConfig { max_cached_blocks, duplicates }),
    );
    let preemption = prop_oneof![
        1 => Just(PreemptionMode::Recompute),
        2 => Just(PreemptionMode::Swap),
        1 => Just(PreemptionMode::Auto)
    ];
    let victims = prop_oneof![
        2 => Just(VictimPolicy::LowestPriority),
        1 => Just(VictimPolicy::LeastLost),
        1 => Just(VictimPolicy::Requester)
    ];
    let host_blocks = prop_oneof![1 => Just(0), 2 => 1..24u32];
    let residency = (prefix_cache, preemption, victims, host_blocks, 0..20u32, 0..4u32);
    (caches(shapes), admission, 2..32u32, work, any::<bool>(), 0..5u32, 0..4u32, residency).prop_map(
        |(cache, admission, step_tokens, step_work_budget, fewer, max_drafts, max_preemptions, residency)| {
            let (prefix_cache, preemption, victims, host_blocks, ageing_steps, max_passed) = residency;
            let cache = cache.with_host_blocks(host_blocks).unwrap();
            let watermark = cache.num_blocks() - 1;
            let admission = match admission {
                Admission::Overcommitted { watermark_blocks } => {
                    Admission::Overcommitted { watermark_blocks: watermark_blocks.min(watermark) }
                }
                guaranteed => guaranteed,
            };
            let max_running = fewer.then(|| cache.max_sequences().div_ceil(2));
            let config = SchedulerConfig {
                step_tokens,
                step_work_budget,
                max_running,
                admission,
                max_drafts,
                max_passed,
                max_preemptions,
                prefix_cache,
                preemption,
                victims,
                ageing_steps,
            };
            (config, cache)
        },
    )
}

/// Does one thing to a world.
pub(crate) fn apply<D: Device>(world: &mut World<D>, operation: &Operation) {
    match operation {
        Operation::Add(turn) => drop(world.add(turn)),
        Operation::Fork { parent, at, turn } => world.fork(*parent, *at, turn),
        Operation::Extend { index, turn } => world.extend(*index, turn),
        Operation::Truncate { index, len } => world.truncate(*index, *len),
        Operation::Propose { index, num, right } => world.propose(*index, *num, *right),
        Operation::Abort(index) => world.abort(*index),
        Operation::AbortSample { index, sample } => world.abort_sample(*index, *sample),
        Operation::CompleteTransfer(index) => world.complete_transfer(*index),
        Operation::LoseTransfer(index) => world.lose_transfer(*index),
        Operation::LoseDevice { arrived, after } => world.lose_device(*arrived, *after),
        Operation::Schedule => drop(world.schedule()),
        Operation::Run => world.run(),
        Operation::Drop { by_mistake } => world.drop_plan(*by_mistake),
        Operation::Commit { choice, invalid } => world.commit(*choice, *invalid),
        Operation::Step { choice, drafts } => {
            for index in 0..12 {
                world.propose(index, *drafts, *drafts - u32::from(*drafts > 2));
            }
            world.schedule();
            world.check_planned();
            world.commit(*choice, None);
        }
    }
}
