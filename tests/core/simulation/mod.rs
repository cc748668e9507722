//! Deterministic simulation: the whole scheduler under random traffic, on the CPU twins, and with several groups of layers
//! on the device that keeps tokens.
//!
//! Everything follows from one seed: machines (pool, budgets, policies, prefix cache, host pool) and what happens to them
//! (bursts, shared system prompts, turns, branches, samples, drafts, priorities, namespaces, retention, cuts, aborts, plans
//! that are dropped before or after they ran, useless results, transfers that end late, out of order, or not at all,
//! devices that are lost). A
//! [fake model](fake_model) makes every row depend on all keys and values that it reads; what it computes through the
//! twins is compared with a dense computation on the tokens alone. After every operation, the invariants are checked;
//! after every step, that no request has waited for longer than its [bound](slowdown).
//!
//! 20,000 steps are simulated, and 100,000 of machines with groups of layers, or as many as `PAGED_KV_SIMULATION_STEPS`
//! says. The seed is printed; with `PAGED_KV_SIMULATION_SEED` a run is repeated. A failure names the seed of the machine
//! that it happened to, and a run with that seed begins with it:
//!
//! ```text
//! PAGED_KV_SIMULATION_STEPS=1000000 cargo test -p paged-kv --no-default-features --test core simulation -- --nocapture
//! ```

mod fake_model;
pub(crate) mod random;
mod slowdown;
mod traffic;
mod twin_device;

use crate::model::{Reached, Slid, World};
use crate::simulated_device::{Device, SimulatedDevice};
use paged_kv::SequenceId;
use slowdown::Slowdown;
use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
pub(crate) use traffic::Models;
use traffic::Traffic;
use twin_device::TwinDevice;

/// Steps that one machine lives for.
const LIFE: u64 = 500;

/// A machine, its traffic, and how long its requests have waited.
struct Simulation<D: Device> {
    world: World<D>,
    traffic: Traffic,
    slowdown: Slowdown,
}

/// What came of one machine.
pub(crate) struct Outcome {
    reached: Reached,
    slid: Slid,
    pub(crate) steps: u64,
    worst_wait: u64,
    digest: u64,
}

impl<D: Device> Simulation<D> {
    fn new(seed: u64, models: Models) -> Self {
        let (traffic, world) = Traffic::new(seed, models);
        let slowdown = Slowdown::new(world.config());
        Self { world, traffic, slowdown }
    }

    fn unfinished(&self) -> Vec<(SequenceId, u64)> {
        self.world.unfinished().collect()
    }

    /// Users act; the machine's rows may have to be computed again.
    fn act(&mut self) {
        let cuts = self.world.reached.cuts;
        self.traffic.act(&mut self.world);
        self.world.check();
        let unfinished = self.unfinished();
        if self.world.reached.cuts > cuts {
            self.slowdown.setback(&unfinished);
        }
        self.slowdown.arrive(&unfinished);
    }

    /// One step, unless there is nothing to do. Returns whether there was.
    fn step(&mut self) -> bool {
        self.act();
        if self.traffic.transfer(&mut self.world) {
            self.slowdown.setback(&self.unfinished());
        }
        if !self.world.schedule() {
            return false;
        }
        self.world.check();
        if self.traffic.random.chance(30) {
            self.act();
        }
        if self.traffic.lose_device(&mut self.world) {
            self.slowdown.setback(&self.unfinished());
        } else if self.traffic.drops() {
            if self.traffic.random.chance(50) {
                self.world.run();
            }
            self.world.drop_plan(self.traffic.random.chance(20));
            self.slowdown.setback(&self.unfinished());
        } else {
            let invalid = self.traffic.invalid();
            self.world.commit(self.traffic.random.next() as u32, invalid);
            self.slowdown.arrive(&self.unfinished());
            self.slowdown.step();
        }
        self.world.check();
        true
    }

    /// The life of a machine.
    fn run(mut self, most: u64) -> Outcome {
        let mut steps = 0;
        while steps < most {
            steps += u64::from(self.step());
        }
        let (digest, worst_wait) = (self.world.device.digest(), self.slowdown.worst);
        let (reached, slid) = self.world.finish();
        Outcome { reached, slid, steps, worst_wait, digest }
    }
}

/// The life of the machine of a seed.
pub(crate) fn live(seed: u64, models: Models, steps: u64) -> Outcome {
    match models {
        Models::Plain => Simulation::<TwinDevice>::new(seed, models).run(steps),
        Models::Groups => Simulation::<SimulatedDevice>::new(seed, models).run(steps),
    }
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

/// Lets machines live, one after the other; for longer where they have not come to everything rare.
fn simulate(models: Models) {
    let seed = variable("PAGED_KV_SIMULATION_SEED").unwrap_or_else(|| RandomState::new().hash_one(0));
    // The simulated device computes nothing, so its machines live for longer in the same time.
    let default = if models == Models::Plain { 20_000 } else { 100_000 };
    let steps = variable("PAGED_KV_SIMULATION_STEPS").unwrap_or(default);
    println!("PAGED_KV_SIMULATION_SEED={seed}, {steps} steps");
    let (mut reached, mut slid) = (Reached::default(), Slid::default());
    let (mut done, mut worst_wait) = (0, 0);
    let is_tame = |reached: Reached, slid: Slid| {
        let rarest = if models == Models::Plain { u64::MAX } else { slid.rarest() };
        steps >= default && reached.rarest().min(rarest) < 10
    };
    for machine in 0.. {
        if done >= steps && (!is_tame(reached, slid) || done >= 4 * steps) {
            break;
        }
        let seed = seed.wrapping_add(machine);
        let left = if done < steps { steps - done } else { LIFE };
        let life = || live(seed, models, LIFE.min(left));
        let outcome = catch_unwind(AssertUnwindSafe(life)).unwrap_or_else(|panic| {
            println!("repeat with PAGED_KV_SIMULATION_SEED={seed}");
            resume_unwind(panic)
        });
        (reached, slid) = (reached.plus(outcome.reached), slid.plus(outcome.slid));
        worst_wait = worst_wait.max(outcome.worst_wait);
        done += outcome.steps;
    }
    println!("{done} steps, the longest wait {worst_wait} % of its bound; {reached:?}, {slid:?}");
    assert!(!is_tame(reached, slid), "the traffic is too tame: {reached:?}, {slid:?}");
}

#[test]
fn every_machine_under_any_traffic_computes_what_tokens_alone_say() {
    simulate(Models::Plain);
}

#[test]
fn every_machine_with_groups_of_layers_has_what_its_rows_see() {
    simulate(Models::Groups);
}

#[test]
fn a_seed_always_gives_the_same_history() {
    for (seed, models) in (0..5).flat_map(|seed| [(seed, Models::Plain), (seed, Models::Groups)]) {
        let digest = || live(seed, models, 200).digest;
        assert_eq!(digest(), digest(), "seed {seed}");
    }
}
