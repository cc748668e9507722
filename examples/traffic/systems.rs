//! Who serves the day: one line for each layout of memory, and for each policy.

use std::sync::Mutex;
use std::thread;

use paged_kv::{
    Admission, CacheConfig, Error, PreemptionMode, PrefixCacheConfig, SchedulerConfig, VictimPolicy,
};

use crate::contiguous::{Contiguous, Reserve};
use crate::generator::Traffic;
use crate::measure::Record;
use crate::paging::{Paging, Policy};
use crate::parameters::{AGEING_STEPS, LONG_CONTEXT, STEP_TOKENS};
use crate::serve::serve;

/// One way to serve the day.
#[derive(Clone, Copy, Debug)]
pub(crate) struct System {
    /// Two of it for a column's head, two lines.
    pub(crate) name: [&'static str; 2],
    pub(crate) layout: Layout,
    pub(crate) table: Table,
    /// Whether it has a picture of its own.
    pub(crate) drawn: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Layout {
    Extents(Reserve),
    Blocks(Policy),
}

/// Where it is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Table {
    /// Layouts of memory, a column each.
    Layouts,
    /// What is done when blocks are short, a line each; those of the layouts that may be short of them, too.
    Policies,
    /// Classes of priority, a column each: chats with documents beside them.
    Classes,
}

impl System {
    /// How it is run, if it can be short of blocks for those that run.
    pub(crate) fn overcommitted(&self) -> Option<SchedulerConfig> {
        match self.layout {
            Layout::Blocks(policy) if policy.config.admission != Admission::Guaranteed => Some(policy.config),
            _ => None,
        }
    }
}

/// All of them, in the order of the tables' columns and lines.
pub(crate) fn all(cache: &CacheConfig) -> Vec<System> {
    // One block in a hundred is left free at admission, for those that run to grow into.
    let overcommitted = Admission::Overcommitted { watermark_blocks: cache.num_blocks() / 100 };
    let paging =
        SchedulerConfig { step_tokens: STEP_TOKENS, prefix_cache: None, ..SchedulerConfig::default() };
    let sharing = SchedulerConfig { prefix_cache: Some(PrefixCacheConfig::default()), ..paging };
    let with = |config, admission| SchedulerConfig { admission, ..config };

    let extents = |name, reserve| System {
        name: ["(a) extents", name],
        layout: Layout::Extents(reserve),
        table: Table::Layouts,
        drawn: reserve == Reserve::Declared,
    };
    let blocks = |name, config: SchedulerConfig| System {
        name,
        layout: Layout::Blocks(Policy { config, classes: false }),
        table: Table::Layouts,
        drawn: config.admission == overcommitted,
    };
    let mut systems = vec![
        extents("context", Reserve::Context),
        extents("declared", Reserve::Declared),
        extents("exact", Reserve::Exact),
        blocks(["(b) paging", "guaranteed"], with(paging, Admission::Guaranteed)),
        blocks(["(b) paging", "overcommitted"], with(paging, overcommitted)),
        blocks(["(c) sharing", "guaranteed"], with(sharing, Admission::Guaranteed)),
        blocks(["(c) sharing", "overcommitted"], with(sharing, overcommitted)),
    ];
    for (name, config) in [("(b) paging", paging), ("(c) sharing", sharing)] {
        systems.extend(policies(name, with(config, overcommitted)));
    }
    systems.extend(classes(with(sharing, overcommitted)));
    systems
}

/// The other victims and kinds of preemption than those of `default`.
fn policies(name: &'static str, default: SchedulerConfig) -> Vec<System> {
    let mut systems = Vec::new();
    for victims in [VictimPolicy::Requester, VictimPolicy::LowestPriority, VictimPolicy::LeastLost] {
        for preemption in [PreemptionMode::Recompute, PreemptionMode::Swap, PreemptionMode::Auto] {
            let config = SchedulerConfig { victims, preemption, ..default };
            if config != default {
                let layout = Layout::Blocks(Policy { config, classes: false });
                let name = [name, victims_name(victims)];
                systems.push(System { name, layout, table: Table::Policies, drawn: false });
            }
        }
    }
    systems
}

/// Chats and documents in one class, and in two.
fn classes(one: SchedulerConfig) -> Vec<System> {
    let system = |name, config, classes| System {
        name,
        layout: Layout::Blocks(Policy { config, classes }),
        table: Table::Classes,
        drawn: false,
    };
    let hour = SchedulerConfig { ageing_steps: AGEING_STEPS, ..one };
    let swap = SchedulerConfig { preemption: PreemptionMode::Swap, ..hour };
    vec![
        system(["one class", ""], one, false),
        system(["idle documents", "256 behind"], one, true),
        system(["idle documents", "an hour behind"], hour, true),
        system(["the same,", "swapped"], swap, true),
    ]
}

pub(crate) fn victims_name(victims: VictimPolicy) -> &'static str {
    match victims {
        VictimPolicy::Requester => "requester",
        VictimPolicy::LowestPriority => "last in line",
        VictimPolicy::LeastLost => "least lost",
    }
}

pub(crate) fn preemption_name(preemption: PreemptionMode) -> &'static str {
    match preemption {
        PreemptionMode::Recompute => "recompute",
        PreemptionMode::Swap => "swap",
        PreemptionMode::Auto => "auto",
    }
}

/// Lets each of them serve the same traffic, as many at a time as there are processors.
pub(crate) fn serve_all(
    chats: &Traffic,
    with_documents: &Traffic,
    cache: &CacheConfig,
    systems: &[System],
) -> Result<Vec<Record>, Error> {
    let todo = Mutex::new(systems.iter().enumerate());
    let next = || todo.lock().ok().and_then(|mut todo| todo.next());
    let work = || {
        let mut records = Vec::new();
        while let Some((place, system)) = next() {
            let traffic = if system.table == Table::Classes { with_documents } else { chats };
            records.push((place, serve_one(traffic, cache, system)?));
        }
        Ok(records)
    };
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let mut records = thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect::<Result<Vec<_>, Error>>()
    })?
    .concat();
    records.sort_by_key(|&(place, _)| place);
    Ok(records.into_iter().map(|(_, record)| record).collect())
}

fn serve_one(traffic: &Traffic, cache: &CacheConfig, system: &System) -> Result<Record, Error> {
    Ok(match system.layout {
        Layout::Extents(reserve) => {
            let capacity = cache.num_blocks() * cache.block_size();
            serve(traffic, &mut Contiguous::new(traffic, reserve, capacity))
        }
        Layout::Blocks(policy) => {
            let is_long = system.table == Table::Classes;
            let cache = cache.clone();
            let cache = if is_long { cache.with_max_sequence_tokens(LONG_CONTEXT)? } else { cache };
            serve(traffic, &mut Paging::new(traffic, policy, cache)?)
        }
    })
}
