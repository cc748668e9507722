//! Who serves the day: one line for each layout of memory, and for each policy.

use std::thread;

use paged_kv::{Admission, CacheConfig, Error};

use crate::contiguous::{Contiguous, Reserve};
use crate::generator::Traffic;
use crate::measure::Record;
use crate::paging::{Paging, Policy};
use crate::serve::serve;

/// One way to serve the day.
#[derive(Clone, Copy, Debug)]
pub(crate) struct System {
    /// The head of its column, a word a line.
    pub(crate) name: [&'static str; 2],
    pub(crate) layout: Layout,
    /// Whether it has a picture of its own.
    pub(crate) drawn: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Layout {
    Extents(Reserve),
    Blocks(Policy),
}

/// All of them, in the order of the table's columns.
pub(crate) fn all(cache: &CacheConfig) -> Vec<System> {
    let extents =
        |name, reserve, drawn| System { name: ["extents", name], layout: Layout::Extents(reserve), drawn };
    let paging = |name, admission, drawn| System {
        name: ["paging", name],
        layout: Layout::Blocks(Policy { admission }),
        drawn,
    };
    // One block in a hundred is left free at admission, for those that run to grow into.
    let overcommitted = Admission::Overcommitted { watermark_blocks: cache.num_blocks() / 100 };
    vec![
        extents("context", Reserve::Context, false),
        extents("declared", Reserve::Declared, true),
        extents("exact", Reserve::Exact, false),
        paging("guaranteed", Admission::Guaranteed, false),
        paging("overcommitted", overcommitted, true),
    ]
}

/// Lets each of them serve the same traffic, side by side.
pub(crate) fn serve_all(
    traffic: &Traffic,
    cache: &CacheConfig,
    systems: &[System],
) -> Result<Vec<Record>, Error> {
    thread::scope(|scope| {
        let days: Vec<_> =
            systems.iter().map(|system| scope.spawn(|| serve_one(traffic, cache, system.layout))).collect();
        days.into_iter()
            .map(|day| day.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

fn serve_one(traffic: &Traffic, cache: &CacheConfig, layout: Layout) -> Result<Record, Error> {
    Ok(match layout {
        Layout::Extents(reserve) => {
            let capacity = cache.num_blocks() * cache.block_size();
            serve(traffic, &mut Contiguous::new(traffic, reserve, capacity))
        }
        Layout::Blocks(policy) => serve(traffic, &mut Paging::new(traffic, policy, *cache)?),
    })
}
