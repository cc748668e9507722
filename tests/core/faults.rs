//! Mutation check: every [deliberate fault](paged_kv::Fault) is caught by the simulation, and one by random swaps of tables.
//!
//! The table under "Deliberate faults" in ARCHITECTURE.md names each fault, the invariant that it breaks, and words of
//! the assertion that caught it; this test checks it.

use crate::simulation::{Models, live};
use crate::swap_histories;
use paged_kv::Fault;
use std::any::Any;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};

const SEED: u64 = 1;
const MOST_MACHINES: u64 = 200;
const STEPS: u64 = 500;

/// Those that only models with windows, or with several groups of layers, can have.
const OF_GROUPS: [Fault; 8] = [
    Fault::WindowSharingPromised,
    Fault::OtherStacksTable,
    Fault::WindowGivesTooMuch,
    Fault::WindowOfPlannedLength,
    Fault::FirstTokensPass,
    Fault::HitLacksWindow,
    Fault::BehindWindowShared,
    Fault::WindowKeepsAll,
];

/// What a fault is caught by, and the steps until then.
fn what_catches(fault: Fault) -> Option<(String, u64)> {
    let mut steps = 0;
    let models = if OF_GROUPS.contains(&fault) { Models::Groups } else { Models::Plain };
    let caught = (SEED..SEED + MOST_MACHINES).find_map(|seed| {
        Fault::activate(Some(fault));
        let outcome = catch_unwind(AssertUnwindSafe(|| match fault {
            // Sequences whose windows share slots of the host pool are rare where a scheduler decides.
            Fault::ReturnTakesSlots => swap_histories::window_history(seed),
            _ => drop(live(seed, models, STEPS)),
        }));
        Fault::activate(None);
        steps += STEPS;
        outcome.err().map(message)
    });
    caught.map(|message| (message, steps))
}

fn message(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_default()
}

/// A row of the table.
struct Row {
    name: String,
    invariant: String,
    /// Words of assertions that catch the fault.
    catchers: Vec<String>,
}

fn table() -> Vec<Row> {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/ARCHITECTURE.md")).unwrap();
    let section = text.split("\n## ").find(|section| section.starts_with("Deliberate faults")).unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let quotes = cells[4].split('`').skip(1).step_by(2);
        Row {
            name: cells[1].trim_matches('`').to_string(),
            invariant: cells[2].to_string(),
            catchers: quotes.map(str::to_string).collect(),
        }
    })
    .collect()
}

#[test]
fn every_deliberate_fault_is_caught() {
    let table = table();
    let names: Vec<&str> = table.iter().map(|row| &row.name[..]).collect();
    assert_eq!(names, Fault::ALL.iter().map(|fault| format!("{fault:?}")).collect::<Vec<_>>());
    let mut wrong = Vec::new();
    for (&fault, row) in Fault::ALL.iter().zip(&table) {
        let caught = what_catches(fault);
        let (message, steps) = caught.unwrap_or_else(|| ("nothing".to_string(), 0));
        let message = message.lines().next().unwrap_or_default().chars().take(160).collect::<String>();
        println!("{fault:?} (I{}): after at most {steps} steps: {message}", fault.invariant());
        let expected = row.catchers.iter().any(|words| message.contains(&words[..]));
        if row.invariant != format!("I{}", fault.invariant()) || !expected {
            wrong.push(format!("{fault:?} is caught by {message}"));
        }
    }
    assert!(wrong.is_empty(), "not what ARCHITECTURE.md says:\n{}", wrong.join("\n"));
    let invariants: Vec<u32> = Fault::ALL.iter().map(|fault| fault.invariant()).collect();
    assert!(
        (1..=12).chain([15]).all(|invariant| invariants.contains(&invariant)),
        "an invariant has no fault"
    );
}
