//! A hostile caller: every public function of the host core with arguments that no application should give it, in any
//! order. Nothing panics but what says so in its documentation, nothing is corrupted, what belongs to another object is
//! refused, and every error that has numbers tells them.
//!
//! 100,000 calls, or what `PAGED_KV_HOSTILE_CALLS` says. What is known to be wrong stands in [`KNOWN`].

mod cache;
mod scheduler;
mod twins;
mod values;

use crate::simulation::random::Random;
use crate::tidy::sources;
use paged_kv::{CacheConfig, CacheError, KvType, ModelShape};
use std::any::Any;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Once;

/// Functions that panic, or take what belongs to another object, without saying so. A list to be emptied.
const KNOWN: &[&str] = &[
    // Asks for as much memory as it is told to.
    "WorkSplit::split",
];

/// Whether a function must be spared what it is known to fail at.
fn is_known(name: &str) -> bool {
    KNOWN.contains(&name)
}

/// Public functions that the property does not call, and why.
const NOT_CALLED: &[(&str, &str)] = &[
    ("Scheduler::set_constant_hash", "hidden: a switch for tests"),
    ("KvCache::set_constant_hash", "hidden: a switch for tests"),
    ("reference::set_swaps", "hidden: makes invalid plans for tests"),
    ("Scheduler::assert_consistent", "called after every n-th call"),
    ("KvCache::assert_consistent", "called after every n-th call"),
];

type Call = fn(&mut World);

/// What a call may leave half done when it panics.
#[derive(Clone, Copy)]
enum Part {
    Schedulers,
    Caches,
    Twins,
    Values,
}

/// Calls between two checks of everything.
const CHECKED: usize = 50;

/// What the caller has got hold of.
struct World {
    random: Random,
    shape: ModelShape,
    config: CacheConfig,
    schedulers: scheduler::Schedulers,
    caches: cache::Caches,
    twins: twins::Twins,
    values: values::Values,
    /// What was taken, or told, wrongly.
    wrong: Vec<String>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let shape = ModelShape::new(2, 4, 2, 8);
        let config = CacheConfig::for_blocks(random.below(2..20), &shape, KvType::F16).unwrap();
        let block_size = random.pick(&[1, 4, 16]);
        let config =
            config.with_block_size(block_size).and_then(|config| config.with_max_sequences(5)).unwrap();
        let config = config.with_host_blocks(random.below(0..8)).unwrap();
        Self {
            schedulers: scheduler::Schedulers::new(&mut random, config.clone()),
            caches: cache::Caches::new(config.clone()),
            twins: twins::Twins::new(&shape, config.clone()),
            values: values::Values::new(&shape, config.clone()),
            random,
            shape,
            config,
            wrong: Vec::new(),
        }
    }

    fn renew(&mut self, part: Part) {
        let config = self.config.clone();
        match part {
            Part::Schedulers => self.schedulers = scheduler::Schedulers::new(&mut self.random, config),
            Part::Caches => self.caches = cache::Caches::new(config),
            Part::Twins => self.twins = twins::Twins::new(&self.shape, config),
            Part::Values => self.values = values::Values::new(&self.shape, config),
        }
    }

    /// A number that is small, or one of those at which arithmetic breaks.
    fn number(&mut self) -> u32 {
        match self.random.below(0..10) {
            0 => u32::MAX,
            1 => u32::MAX - self.random.below(1..20),
            2 => 1 << self.random.below(0..32),
            3 => self.random.next() as u32,
            4 | 5 => self.random.below(0..3),
            _ => self.random.below(0..40),
        }
    }

    /// A number of which that much memory may be taken.
    fn small(&mut self) -> u32 {
        self.random.below(0..40)
    }

    fn tokens(&mut self) -> Vec<u32> {
        let len = if self.random.chance(15) { 0 } else { self.random.below(1..50) };
        (0..len).map(|_| if self.random.chance(5) { u32::MAX } else { self.random.below(0..4) }).collect()
    }

    /// Every error says something, and its numbers if it has any.
    fn judge<T, E: Debug + Display>(&mut self, name: &str, outcome: Result<T, E>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(error) => {
                let (fields, text) = (format!("{error:?}"), error.to_string());
                let has_digit = |text: &str| text.contains(|letter: char| letter.is_ascii_digit());
                if text.is_empty() || has_digit(&fields) && !has_digit(&text) {
                    self.wrong.push(format!("{name}: {fields} says `{text}`"));
                }
                None
            }
        }
    }

    /// The same, of a call with an object of another cache.
    fn judge_foreign<T>(
        &mut self,
        name: &str,
        is_foreign: bool,
        outcome: Result<T, CacheError>,
    ) -> Option<T> {
        if is_foreign && outcome.is_ok() {
            self.wrong.push(format!("{name}: takes what belongs to another cache"));
        }
        self.judge(name, outcome)
    }

    fn check(&self) {
        self.schedulers.check();
        self.caches.check();
    }
}

/// What brings a scheduler and a cache on, some of it as an honest caller does: every other call is one of these.
const BUSY: &[(Part, &str, Call)] = &[
    (Part::Schedulers, "Scheduler::add", scheduler::add),
    (Part::Schedulers, "Scheduler::schedule", scheduler::schedule),
    (Part::Schedulers, "Scheduler::commit", scheduler::commit),
    (Part::Schedulers, "Scheduler::commit", scheduler::honest_step),
    (Part::Schedulers, "Scheduler::commit", scheduler::honest_step),
    (Part::Schedulers, "Scheduler::complete_transfers", scheduler::complete_transfers),
    (Part::Caches, "KvCache::create", cache::create),
    (Part::Caches, "StepBuilder::push", cache::push),
    (Part::Caches, "StepBuilder::push", cache::honest_step),
    (Part::Caches, "StepBuilder::push", cache::honest_step),
    (Part::Caches, "KvCache::commit_step", cache::commit_step),
    (Part::Caches, "KvCache::complete_transfers", cache::complete_transfers),
];

/// All calls by the functions' names.
const PARTS: &[(Part, &[(&str, Call)])] = &[
    (Part::Schedulers, scheduler::CALLS),
    (Part::Caches, cache::CALLS),
    (Part::Twins, twins::CALLS),
    (Part::Values, values::CALLS),
];

fn message(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_default()
}

thread_local! {
    /// This thread expects panics: they are not printed.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

fn quietly<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                print(info);
            }
        }));
    });
    QUIET.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    QUIET.set(false);
    outcome.map_err(message)
}

/// What a run found: by function, what was wrong first, and how often.
type Findings = BTreeMap<String, (String, u32)>;

fn run(seed: u64, num_calls: usize, findings: &mut Findings) -> Reached {
    let mut reached = Reached::default();
    let documented = public_functions();
    let mut find = |name: &str, number: usize, what: &str| {
        let what = format!("seed {seed}, call {number}: {what}");
        findings.entry(name.to_string()).or_insert((what, 0)).1 += 1;
    };
    let mut world = World::new(seed);
    for number in 0..num_calls {
        // Every so often with something new.
        if number % 2_000 == 1_999 {
            reached.note(&world);
            world = World::new(seed + number as u64);
        }
        let busy = world.random.chance(50);
        let (part, name, call) = if busy {
            world.random.pick(BUSY)
        } else {
            let (part, calls) = world.random.pick(PARTS);
            let (name, call) = world.random.pick(calls);
            (part, name, call)
        };
        let outcome = quietly(|| call(&mut world));
        for wrong in std::mem::take(&mut world.wrong) {
            find(wrong.split(": ").next().unwrap_or(name), number, &wrong);
        }
        if let Err(message) = outcome {
            let says_so = documented.get(name).is_some_and(|&says_so| says_so);
            if !says_so {
                find(name, number, &format!("panicked: {message}"));
            }
            // A function that panics may leave behind what it had begun.
            world.renew(part);
        }
        if number % CHECKED == 0 {
            if let Err(message) = quietly(|| world.check()) {
                find(name, number, &format!("corrupted: {message}"));
                world = World::new(seed + number as u64);
            }
        }
    }
    reached
}

/// How far the caller's objects got in spite of it.
#[derive(Debug, Default)]
struct Reached {
    generated_tokens: u64,
    preemptions: u64,
    scheduler_swaps: u64,
    pushed_tokens: u64,
    cache_swaps: u64,
}

impl Reached {
    fn note(&mut self, world: &World) {
        let (scheduler, cache) = (world.schedulers.stats(), world.caches.stats());
        self.generated_tokens += scheduler.generated_tokens;
        self.preemptions += scheduler.preemptions;
        self.scheduler_swaps += scheduler.swaps_in;
        self.pushed_tokens += cache.tokens;
        self.cache_swaps += cache.blocks_swapped_in;
    }

    fn rarest(&self) -> u64 {
        let Self { generated_tokens, preemptions, scheduler_swaps, pushed_tokens, cache_swaps } = *self;
        let counts = [generated_tokens, preemptions, scheduler_swaps, pushed_tokens, cache_swaps];
        counts.into_iter().min().unwrap_or_default()
    }
}

#[test]
fn a_hostile_caller_meets_no_panic_no_corruption_and_errors_with_numbers() {
    let num_calls = match std::env::var("PAGED_KV_HOSTILE_CALLS") {
        Ok(number) => number.parse().expect("PAGED_KV_HOSTILE_CALLS is a number"),
        Err(_) => 100_000,
    };
    let mut findings = Findings::new();
    let reached = (0..10).map(|seed| run(1_000_000 * seed, num_calls / 10, &mut findings));
    let reached: Vec<Reached> = reached.collect();
    println!("{reached:?}");
    let rarest: u64 = reached.iter().map(Reached::rarest).sum();
    assert!(rarest > 0 || num_calls < 100_000, "nothing gets anywhere: {reached:?}");
    for (name, (what, times)) in &findings {
        println!("{name}, {times} times: {what}");
    }
    findings.retain(|name, _| !KNOWN.contains(&&name[..]));
    assert!(findings.is_empty(), "{findings:#?}");
}

/// Public functions of the host core, and whether their documentation says that they panic.
fn public_functions() -> BTreeMap<String, bool> {
    let mut found = BTreeMap::new();
    let rooms = ["src/cache", "src/schedule", "src/reference"].into_iter().flat_map(sources);
    let ground = [
        "src/reach.rs",
        "src/logits.rs",
        "src/model.rs",
        "src/layout.rs",
        "src/stacks.rs",
        "src/config.rs",
        "src/ids.rs",
    ]
    .map(Path::new);
    let files = sources("src").into_iter().filter(|(path, _)| ground.contains(&path.as_path()));
    for (path, text) in rooms.chain(files) {
        let module = if path.starts_with("src/reference") { "reference" } else { "crate" };
        let (mut owner, mut panics) = (module.to_string(), false);
        for line in text.lines() {
            let code = line.trim_start();
            if let Some(header) = line.strip_prefix("impl").filter(|header| !header.ends_with("{}")) {
                owner = type_of(header);
            }
            if line == "}" {
                owner = module.to_string();
            }
            if code.starts_with("/// # Panics") {
                panics = true;
            }
            let function = code.strip_prefix("pub fn ").or_else(|| code.strip_prefix("pub const fn "));
            if let Some(rest) = function {
                let name: String = rest.chars().take_while(|&c| c.is_alphanumeric() || c == '_').collect();
                found.insert(format!("{owner}::{name}"), panics);
            }
            if !code.starts_with("///") && !code.starts_with("#[") {
                panics = false;
            }
        }
    }
    found
}

/// The type of an `impl`, whose first word is gone.
fn type_of(header: &str) -> String {
    let header =
        if header.starts_with('<') { header.split_once("> ").map_or("", |(_, rest)| rest) } else { header };
    let header = header.split(" for ").last().unwrap_or_default().trim_start();
    header.chars().take_while(|&letter| letter.is_alphanumeric()).collect()
}

#[test]
fn the_hostile_caller_calls_every_public_function() {
    let public = public_functions();
    let found = ["Scheduler::commit", "KvCache::fork", "reference::append", "KvType::bits", "RequestId::raw"];
    assert!(found.iter().all(|&name| public.contains_key(name)), "{public:?}");
    assert!(public["Rows::row"] && !public["Rows::new"], "what is documented to panic");
    let called: BTreeSet<String> =
        PARTS.iter().flat_map(|(_, calls)| calls.iter().map(|(name, _)| name.to_string())).collect();
    let excused = |name: &str| NOT_CALLED.iter().any(|&(other, why)| name == other && !why.is_empty());
    let missing: Vec<_> = public.keys().filter(|name| !called.contains(*name) && !excused(name)).collect();
    assert!(missing.is_empty(), "not called: {missing:#?}");
    let gone: Vec<_> = called.iter().filter(|name| !public.contains_key(*name)).collect();
    assert!(gone.is_empty(), "not public: {gone:?}");
    assert!(KNOWN.iter().all(|&name| called.contains(name)), "{KNOWN:?}");
}
