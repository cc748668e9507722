//! What is printed: first what was fixed before, then what came of it.

use paged_kv::CacheConfig;
use serde_json::{Value, json};

use crate::generator::Traffic;
use crate::measure::{Record, Sums};
use crate::parameters;
use crate::systems::System;

/// What one line of a table says of a day.
type Cell = fn(&Record) -> String;

const LABEL: usize = 46;
const COLUMN: usize = 15;

/// The parameters, and what they come to.
pub(crate) fn stated(seed: u64, hours: f64, traffic: &Traffic, cache: &CacheConfig) -> String {
    let tokens = f64::from(cache.num_blocks()) * f64::from(cache.block_size());
    let (mean, busiest) = traffic.demand();
    format!(
        "{}\nthe pool: {} blocks of {} tokens, {} KiB per token; the layouts: extents of the model's context, of what a \
         request declares,\nor (which nobody can know) of exactly what it will use; blocks, promised at admission up to \
         what is declared, or taken as they are needed\nseed {seed}, {hours} hours: {} chats, {} requests; if nothing were \
         wasted they would take {:.0} % of the pool on average, {:.0} % in the busiest hour",
        parameters::stated(),
        cache.num_blocks(),
        cache.block_size(),
        cache.bytes_per_token() >> 10,
        traffic.arrivals.len(),
        traffic.jobs.len(),
        100.0 * mean / tokens,
        100.0 * busiest / tokens,
    )
}

/// The tables.
pub(crate) fn tables(systems: &[System], records: &[Record], expected_waste: u32) -> String {
    let heads = |line: usize| systems.iter().map(|system| system.name[line].to_owned()).collect::<Vec<_>>();
    let mut out = row("", &heads(0)) + &row("", &heads(1));
    let mut section = |title: &str, rows: &[(&str, Cell)]| {
        out += &format!("{title}\n");
        for (label, cell) in rows {
            out += &row(&format!("  {label}"), &records.iter().map(cell).collect::<Vec<_>>());
        }
    };
    section(
        "over the day",
        &[
            ("resident sequences, mean", |day| number(day.over_day.residents_mean())),
            ("resident sequences, peak", |day| day.residents_peak.to_string()),
            ("steps with somebody waiting for memory", |day| percent(waiting_share(day))),
            ("refused though the sum of free would do", |day| day.counters.refused_with_room.to_string()),
            ("steps to first token, median", |day| day.first_token(0.5).to_string()),
            ("steps to first token, 95 of 100", |day| day.first_token(0.95).to_string()),
            ("memory not free that holds live tokens", |day| percent(day.over_day.live_share())),
            ("memory saved by sharing", |day| percent(day.over_day.shared())),
        ],
    );
    section(
        "of the pool, while somebody waits for memory",
        &[
            ("live tokens", |day| share(day, |sums| sums.live)),
            ("reserved, used later", |day| share(day, |sums| sums.later)),
            ("reserved, never used", |day| share(day, |sums| sums.never)),
            ("held after the end", |day| share(day, |sums| sums.ended)),
            ("external: free, not for the first in line", |day| share(day, |sums| sums.external)),
            ("internal: rest of last blocks", |day| share(day, |sums| sums.internal)),
            ("resident sequences, mean", |day| number(day.while_waiting.residents_mean())),
        ],
    );
    section(
        "work",
        &[
            ("prompt tokens computed", |day| day.counters.prompt_tokens.to_string()),
            ("tokens copied", |day| day.counters.copied_tokens.to_string()),
            ("preemptions", |day| day.counters.preemptions.to_string()),
            ("tokens computed again", |day| day.counters.recomputed_tokens.to_string()),
            ("answers to the end / stopped / left", |day| {
                format!("{}/{}/{}", day.finished, day.stopped, day.left)
            }),
        ],
    );
    let internal = |day: &Record| number(day.over_day.internal_per_sequence());
    out += &row(
        &format!("internal waste per sequence (P/2 = {expected_waste})"),
        &records.iter().map(internal).collect::<Vec<_>>(),
    );
    out + PUBLISHED
}

/// What others have measured, to be read beside the lines above.
const PUBLISHED: &str = "
published (Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, SOSP 2023):
  memory that holds live tokens: extents 20.4 % (model's context) to 38.2 % (exact), paging 96.3 % (figure 2)
  memory saved by sharing: 6.1 to 9.8 % where every request asks for 2 to 6 answers (section 6.3, Alpaca)";

fn row(label: &str, cells: &[String]) -> String {
    let cells: String = cells.iter().map(|cell| format!("{cell:>COLUMN$}")).collect();
    format!("{label:<LABEL$}{cells}\n")
}

fn waiting_share(day: &Record) -> f64 {
    day.while_waiting.steps as f64 / day.over_day.steps as f64
}

fn share(day: &Record, tokens: fn(&Sums) -> u64) -> String {
    percent(day.while_waiting.of_pool(tokens(&day.while_waiting)))
}

fn percent(share: f64) -> String {
    if share.is_nan() { "-".to_owned() } else { format!("{:.1} %", 100.0 * share) }
}

fn number(value: f64) -> String {
    if value.is_nan() { "-".to_owned() } else { format!("{value:.1}") }
}

/// One JSON object a line.
pub(crate) fn print_json(systems: &[System], records: &[Record]) {
    for (system, day) in systems.iter().zip(records) {
        println!("{}", record_json(system, day));
    }
}

fn record_json(system: &System, day: &Record) -> Value {
    json!({
        "layout": system.name.join(" "),
        "steps": day.steps,
        "over_day": sums_json(&day.over_day),
        "while_waiting": sums_json(&day.while_waiting),
        "residents_peak": day.residents_peak,
        "first_token_steps": { "median": day.first_token(0.5), "95": day.first_token(0.95) },
        "answers": { "finished": day.finished, "stopped": day.stopped, "left": day.left },
        "refused_with_room": day.counters.refused_with_room,
        "prompt_tokens": day.counters.prompt_tokens,
        "copied_tokens": day.counters.copied_tokens,
        "preemptions": day.counters.preemptions,
        "recomputed_tokens": day.counters.recomputed_tokens,
    })
}

fn sums_json(sums: &Sums) -> Value {
    json!({
        "steps": sums.steps,
        "residents": sums.residents_mean(),
        "live": sums.of_pool(sums.live),
        "reserved_later": sums.of_pool(sums.later),
        "reserved_never": sums.of_pool(sums.never),
        "held_after_end": sums.of_pool(sums.ended),
        "external": sums.of_pool(sums.external),
        "internal": sums.of_pool(sums.internal),
        "live_share": sums.live_share(),
        "saved_by_sharing": sums.shared(),
        "internal_per_sequence": sums.internal_per_sequence(),
    })
}
