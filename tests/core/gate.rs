//! What the library gives today for one ordinary group of layers, byte for byte: the plans, events and error texts of
//! some hundred random histories of a scheduler, and of a cache under an application's own scheduler.
//!
//! `gate/*.txt` hold one line a history: its number, its entries (one for each thing done), the FNV-1a hash of all their
//! text, and after each entry four digits of the hash so far, so that a difference is found where it begins. Every 25th
//! history is a short one, which `gate/*_plans.txt` hold in full. `PAGED_KV_GATE=write` writes the files anew.
//!
//! A history asks for nothing whose outcome is a matter of taste: admission is named, as many drafts are proposed as may be,
//! retained content has no time to live. In histories that end sequences or cut them in mid-step only the plans count, not
//! what is told about it.

mod cache;
mod scheduler;
mod text;

use std::fs;
use std::path::PathBuf;

/// One history in this many is written out in full.
const FULL: usize = 25;

/// What a history gave: one entry for each thing that was done.
#[derive(Debug, PartialEq, Eq)]
struct Recording {
    /// How the history was set up.
    title: String,
    entries: Vec<String>,
}

/// FNV-1a, 64 bits.
fn hash_on(hash: u64, text: &str) -> u64 {
    text.bytes()
        .chain([b'\n'])
        .fold(hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

impl Recording {
    /// The hash after the title, and after each entry.
    fn hashes(&self) -> Vec<u64> {
        let mut hash = hash_on(0xcbf2_9ce4_8422_2325, &self.title);
        let mut hashes = vec![hash];
        for entry in &self.entries {
            hash = hash_on(hash, entry);
            hashes.push(hash);
        }
        hashes
    }

    /// `number entries hash marks`.
    fn line(&self, number: usize) -> String {
        let hashes = self.hashes();
        let marks: String = hashes.iter().map(|hash| format!("{:04x}", hash & 0xffff)).collect();
        format!("{number} {} {:016x} {marks}\n", self.entries.len(), hashes[hashes.len() - 1])
    }

    fn full(&self, number: usize) -> String {
        format!("history {number}: {}\n{}\n\n", self.title, self.entries.join("\n"))
    }
}

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/core/gate").join(name)
}

fn read(name: &str) -> String {
    let text = fs::read_to_string(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    text.replace("\r\n", "\n")
}

/// Holds recordings to what was written down, or writes them down.
fn hold(name: &str, recordings: &[Recording]) {
    let numbered = || recordings.iter().enumerate();
    let full: String = numbered().step_by(FULL).map(|(number, recording)| recording.full(number)).collect();
    let lines: String = numbered().map(|(number, recording)| recording.line(number)).collect();
    if std::env::var("PAGED_KV_GATE").is_ok_and(|wish| wish == "write") {
        fs::write(path(&format!("{name}.txt")), lines).unwrap();
        fs::write(path(&format!("{name}_plans.txt")), full).unwrap();
        return;
    }
    let written = read(&format!("{name}_plans.txt"));
    let differing = written.lines().zip(full.lines()).enumerate().find(|(_, (then, now))| then != now);
    if let Some((line, (then, now))) = differing {
        panic!("{name}_plans.txt, line {}:\nwritten: {then}\nnow:     {now}", line + 1);
    }
    let written = read(&format!("{name}.txt"));
    for ((number, recording), line) in numbered().zip(written.lines()) {
        if let Some(difference) = difference(recording, number, line) {
            panic!("{name}, history {number} ({}): {difference}", recording.title);
        }
    }
    assert_eq!(written, lines, "{name}.txt has another number of histories");
}

/// Where a recording departs from its line in the file.
fn difference(recording: &Recording, number: usize, line: &str) -> Option<String> {
    let now = recording.line(number);
    if now.trim_end() == line {
        return None;
    }
    let marks = |line: &str| line.split_whitespace().nth(3).unwrap_or_default().as_bytes().to_vec();
    let (then, now) = (marks(line), marks(&now));
    let place = then.chunks(4).zip(now.chunks(4)).position(|(then, now)| then != now);
    Some(match place {
        Some(0) => "it is set up in another way".to_string(),
        Some(place) => {
            let before = recording.entries[..place - 1].last().map_or("", |entry| entry);
            let entry = &recording.entries[place - 1];
            format!("entry {place} differs. It is now, with the one before it:\n{before}\n{entry}")
        }
        None => format!("{} entries were {}", now.len() / 4, then.len() / 4),
    })
}

#[test]
fn histories_of_a_scheduler_give_what_they_gave() {
    let histories = (0..scheduler::HISTORIES).map(|number| scheduler::record(number, None));
    let (recordings, reached): (Vec<_>, Vec<_>) = histories.unzip();
    let sum = |count: fn(&scheduler::Reached) -> u64| reached.iter().map(count).sum::<u64>();
    let reached = [
        ("preemptions", sum(|reached| reached.stats.preemptions)),
        ("swaps in", sum(|reached| reached.stats.swaps_in)),
        ("reclaimed", sum(|reached| reached.stats.reclaimed)),
        ("copies", sum(|reached| reached.stats.cache.block_copies)),
        ("hit tokens", sum(|reached| reached.stats.prefix_hit_tokens)),
        ("evictions", sum(|reached| reached.stats.cache.evictions)),
        ("recomputed", sum(|reached| reached.stats.recomputed_tokens)),
        ("accepted drafts", sum(|reached| reached.accepted)),
        ("dropped plans", sum(|reached| reached.dropped)),
        ("forks", sum(|reached| reached.forks)),
        ("extensions", sum(|reached| reached.extensions)),
        ("cuts", sum(|reached| reached.cuts)),
        ("aborts", sum(|reached| reached.aborts)),
        ("lost devices", sum(|reached| reached.losses)),
        ("lost transfers", sum(|reached| reached.lost_transfers)),
        ("refusals", sum(|reached| reached.refusals)),
    ];
    println!("{reached:?}");
    assert!(reached.iter().all(|&(_, times)| times >= 30), "the histories are too tame: {reached:?}");
    hold("scheduler", &recordings);
}

#[test]
fn histories_of_a_cache_give_what_they_gave() {
    let histories = (0..cache::HISTORIES).map(|number| cache::record(number, None));
    let (recordings, stats): (Vec<_>, Vec<_>) = histories.unzip();
    let reached = [
        ("copies", stats.iter().map(|stats| stats.block_copies).sum::<u64>()),
        ("swapped out", stats.iter().map(|stats| stats.blocks_swapped_out).sum()),
        ("swapped in", stats.iter().map(|stats| stats.blocks_swapped_in).sum()),
        ("evictions", stats.iter().map(|stats| stats.evictions).sum()),
    ];
    println!("{reached:?}");
    assert!(reached.iter().all(|&(_, times)| times >= 30), "the histories are too tame: {reached:?}");
    hold("cache", &recordings);
}

/// A prefix cache seeds its hashes at random.
#[test]
fn no_history_depends_on_the_seed_of_the_hashes() {
    for number in (0..scheduler::HISTORIES).step_by(3) {
        let (once, _) = scheduler::record(number, None);
        assert_eq!(once, scheduler::record(number, None).0, "history {number} of a scheduler");
        assert_eq!(once, scheduler::record(number, Some(0)).0, "history {number}, all hashes alike");
    }
    for number in (0..cache::HISTORIES).step_by(3) {
        let (once, _) = cache::record(number, None);
        assert_eq!(once, cache::record(number, Some(0)).0, "history {number} of a cache, all hashes alike");
    }
}

#[test]
fn a_difference_is_found_where_it_begins() {
    let recording = |entries: &[&str]| Recording {
        title: "a title".to_string(),
        entries: entries.iter().map(|&entry| entry.to_string()).collect(),
    };
    let line = recording(&["one", "two", "three"]).line(7);
    let now = |entries: &[&str]| difference(&recording(entries), 7, line.trim_end());
    assert_eq!(now(&["one", "two", "three"]), None);
    let place = "entry 2 differs. It is now, with the one before it:\none\nto";
    assert_eq!(now(&["one", "to", "three"]).as_deref(), Some(place));
    assert_eq!(now(&["one", "two"]).as_deref(), Some("3 entries were 4"));
    let other = Recording { title: "another".to_string(), ..recording(&["one"]) };
    assert_eq!(difference(&other, 7, &line).as_deref(), Some("it is set up in another way"));
}
