//! Random machines and random traffic.

use super::fake_model::SHAPE;
use super::random::Random;
use crate::model::{Turn, World};
use crate::naive_blocks::pool_tokens;
use crate::simulated_device::{Device, stacks_of};
use paged_kv::{
    Admission, CacheConfig, DuplicatePrompts, KvType, LayerGroup, ModelShape, PreemptionMode,
    PrefixCacheConfig, Priority, Rates, Reach, Retention, SchedulerConfig, VictimPolicy,
};

/// Which models a machine may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Models {
    /// The fake one, all of whose rows see everything.
    Plain,
    /// Some with windows or chunks, of one to three groups of layers.
    Groups,
}

fn window(random: &mut Random) -> Reach {
    let tokens = random.pick(&[1, 3, 4, 5, 8, 20]);
    match random.below(0..4) {
        0 | 1 => Reach::Window { tokens, first: 0 },
        2 => Reach::Window { tokens, first: random.pick(&[1, 4, 5, 9]) },
        _ => Reach::Chunk { tokens },
    }
}

fn groups(random: &mut Random) -> ModelShape {
    let mut reaches = vec![window(random)];
    if random.chance(30) {
        reaches.push(window(random));
    }
    if random.chance(75) {
        reaches.insert(random.index() % 2, Reach::All);
    }
    let kv_heads = random.pick(&[[1, 1, 1], [1, 1, 1], [1, 2, 4], [2, 1, 2]]);
    let num_layers = random.pick(&[[1, 1, 1], [1, 1, 1], [1, 2, 1], [1, 3, 2]]);
    let mut first = 0;
    ModelShape::of_groups(reaches.into_iter().zip(kv_heads).zip(num_layers).map(
        |((reach, kv_heads), layers)| {
            let group = LayerGroup::new(first..first + layers, 4, kv_heads, 8).with_reach(reach);
            first += layers;
            group
        },
    ))
}

fn cache(random: &mut Random, models: Models) -> CacheConfig {
    let (block_size, fewest, most) =
        random.pick(&[(1, 8, 60), (2, 6, 40), (4, 4, 24), (4, 4, 24), (8, 3, 14), (16, 2, 7)]);
    let blocks = random.below(fewest..most);
    let config = match models {
        Models::Plain => CacheConfig::for_blocks(blocks, &SHAPE, KvType::F32).unwrap(),
        Models::Groups => {
            let shape = groups(random);
            let config = CacheConfig::for_blocks(1, &shape, KvType::F32).unwrap();
            let stacks = stacks_of(&config.with_block_size(block_size).unwrap());
            let all: u32 = stacks.iter().map(|stack| (blocks * block_size).div_ceil(stack.block_size)).sum();
            let num_blocks = (all * random.pick(&[2, 3, 4]) / 4).max(stacks.len() as u32);
            CacheConfig::for_blocks(num_blocks, &shape, KvType::F32).unwrap()
        }
    };
    let config = config.with_block_size(block_size).unwrap().with_max_sequences(random.below(1..10)).unwrap();
    let config = match random.chance(50) {
        true => config.with_max_sequence_tokens(random.below(12..64)).unwrap(),
        false => config,
    };
    let host_blocks = random.pick(&[0, 2, 6, 24, 24]);
    config.with_host_blocks(host_blocks).unwrap()
}

fn scheduler(random: &mut Random, cache: &CacheConfig) -> SchedulerConfig {
    let watermark_blocks = random.below(0..3).min(cache.num_blocks() - 1);
    let guaranteed = random.chance(30);
    let prefix_cache = random.maybe(80, |random| PrefixCacheConfig {
        max_cached_blocks: random.maybe(30, |random| random.below(0..8)),
        duplicates: random.pick(&[DuplicatePrompts::Wait, DuplicatePrompts::ComputeAlone]),
    });
    SchedulerConfig {
        step_tokens: random.pick(&[2, 5, 16, 32, 64]),
        step_work_budget: random.pick(&[100, 400, 1 << 24, 1 << 24]),
        max_running: random.maybe(30, |_| cache.max_sequences().div_ceil(2)),
        admission: match guaranteed {
            true => Admission::Guaranteed,
            false => Admission::Overcommitted { watermark_blocks },
        },
        max_drafts: random.pick(&[0, 0, 1, 4]),
        max_passed: random.pick(&[0, 2, 8]),
        max_preemptions: random.below(0..4),
        prefix_cache,
        preemption: random.pick(&[PreemptionMode::Recompute, PreemptionMode::Swap, PreemptionMode::Auto]),
        victims: random.pick(&[
            VictimPolicy::LowestPriority,
            VictimPolicy::LeastLost,
            VictimPolicy::Requester,
        ]),
        ageing_steps: random.pick(&[0, 4, 32]),
    }
}

/// Who talks to the machine, and how.
#[derive(Debug)]
pub(crate) struct Traffic {
    pub(crate) random: Random,
    /// Seeds and lengths of the system prompts that are in use.
    systems: Vec<(u32, u32)>,
    num_salts: u32,
    longest_prompt: u32,
    longest_answer: u32,
    /// Percent of steps before which a request arrives, and of those that bring several at once.
    arrivals: u32,
    bursts: u32,
    edits: u32,
    aborts: u32,
    drops: u32,
    invalid: u32,
    /// Percent of steps after which a transfer ends, and of transfers that fail.
    arrives: u32,
    fails: u32,
    /// Of a thousand steps, those before which the device is lost.
    losses: u32,
    pub(crate) max_drafts: u32,
}

impl Traffic {
    /// Traffic that follows from a seed, and the machine that it meets.
    pub(crate) fn new<D: Device>(seed: u64, models: Models) -> (Self, World<D>) {
        let mut random = Random::new(seed);
        let cache = cache(&mut random, models);
        let config = scheduler(&mut random, &cache);
        let longest = pool_tokens(&cache, 1).min(cache.max_sequence_tokens());
        let mut world = World::new(config, cache);
        world.max_chats = random.pick(&[6, 12, 20]);
        if random.chance(12) {
            world.make_hashes_collide();
        }
        let systems = (0..random.below(1..4)).map(|seed| (seed, random.below(1..2 + longest / 3))).collect();
        let traffic = Self {
            systems,
            num_salts: random.pick(&[1, 1, 2, 3]),
            longest_prompt: 2 + random.pick(&[longest / 8, longest / 3, longest * 2 / 3]),
            longest_answer: 2 + random.pick(&[longest / 4, longest / 2, longest]),
            arrivals: random.pick(&[10, 30, 80]),
            bursts: random.pick(&[0, 10, 50]),
            edits: random.pick(&[0, 5, 20]),
            aborts: random.pick(&[0, 2, 10]),
            drops: random.pick(&[0, 5, 25]),
            invalid: random.pick(&[0, 2, 10]),
            arrives: random.pick(&[10, 50, 100]),
            fails: random.pick(&[0, 0, 5, 30]),
            losses: random.pick(&[0, 1, 5]),
            max_drafts: config.max_drafts,
            random,
        };
        (traffic, world)
    }

    fn turn(&mut self) -> Turn {
        let random = &mut self.random;
        let (longest_prompt, longest_answer) = (self.longest_prompt, self.longest_answer);
        let (system_seed, system) = random.pick(&self.systems);
        let system = if random.chance(60) { system } else { 0 };
        let retain = random.maybe(15, |random| {
            let retention =
                random.pick(&[Retention::Low, Retention::Normal, Retention::High, Retention::Pinned]);
            (system.max(1), retention, random.maybe(50, |random| random.below(1..40)))
        });
        Turn {
            len: system + random.below(0..longest_prompt),
            // Few seeds, so that whole prompts are asked again.
            seed: 100 + random.below(0..6),
            max_new: random.maybe(90, |random| random.below(0..longest_answer)),
            samples: if random.chance(15) { random.below(2..5) } else { 1 },
            keep: random.chance(30),
            stops: random.chance(25),
            priority: random.pick(&[
                Priority::Interactive,
                Priority::Normal,
                Priority::Normal,
                Priority::Normal,
                Priority::Idle,
            ]),
            salt: u64::from(random.below(0..self.num_salts)),
            system,
            system_seed,
            retain,
        }
    }

    /// What users do between two steps, or while one is under way.
    pub(crate) fn act<D: Device>(&mut self, world: &mut World<D>) {
        if self.random.chance(self.arrivals) {
            let burst = self.random.chance(self.bursts);
            for _ in 0..if burst { self.random.below(2..9) } else { 1 } {
                let turn = self.turn();
                world.add(&turn);
            }
        }
        if self.random.chance(10) {
            let turn = Turn { system: 0, ..self.turn() };
            world.extend(self.random.index(), &turn);
        }
        if self.random.chance(self.edits) {
            let turn = Turn { system: 0, ..self.turn() };
            match self.random.below(0..2) {
                0 => world.fork(self.random.index(), self.random.index(), &turn),
                _ => world.truncate(self.random.index(), self.random.index()),
            }
        }
        if self.random.chance(self.aborts) {
            match self.random.below(0..2) {
                0 => world.abort(self.random.index()),
                _ => world.abort_sample(self.random.index(), self.random.below(0..4)),
            }
        }
        if world.num_chats() >= world.max_chats && self.random.chance(30) {
            world.abort(self.random.index());
        }
        if self.max_drafts > 0 && self.random.chance(50) {
            for index in 0..world.num_chats() {
                let num = self.random.below(0..self.max_drafts + 2);
                world.propose(index, num, self.random.below(0..num + 1));
            }
        }
        if self.random.chance(3) {
            let bytes = self.random.pick(&[0.0, 1e3, 1e5, 1e7]);
            world.set_rates(Rates { swap_bytes_per_s: bytes, prefill_tokens_per_s: 1000.0 });
        }
    }

    /// Transfers end late and in any order; some fail. Returns whether one did.
    pub(crate) fn transfer<D: Device>(&mut self, world: &mut World<D>) -> bool {
        if !self.random.chance(self.arrives) {
            return false;
        }
        let index = self.random.index();
        let fails = self.random.chance(self.fails);
        if fails {
            world.lose_transfer(index)
        } else {
            world.complete_transfer(index)
        }
        fails
    }

    /// The device is lost, perhaps with a step under way, and rather when blocks are shared or in the host pool. Returns
    /// whether it was.
    pub(crate) fn lose_device<D: Device>(&mut self, world: &mut World<D>) -> bool {
        let times = match (world.has_swapped(), world.has_shared()) {
            (true, _) => 40,
            (_, true) => 10,
            _ => 1,
        };
        let lost = self.random.below(0..1000) < times * self.losses;
        if lost {
            world.lose_device(self.random.chance(50), self.random.chance(50));
        }
        lost
    }

    /// Which of a step's results is useless.
    pub(crate) fn invalid(&mut self) -> Option<usize> {
        self.random.maybe(self.invalid, |random| random.index() % 4)
    }

    /// Whether the step that is planned is dropped.
    pub(crate) fn drops(&mut self) -> bool {
        self.random.chance(self.drops)
    }
}
