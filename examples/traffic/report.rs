//! What is printed: first what was fixed before, then what came of it.

use paged_kv::{CacheConfig, PreemptionMode, SchedulerConfig, VictimPolicy};
use serde_json::{Value, json};

use crate::generator::Traffic;
use crate::measure::{Record, Sums, ratio};
use crate::parameters;
use crate::systems::{Layout, System, Table, preemption_name, victims_name};

/// What one line of a table says of a day.
type Cell = fn(&Record) -> String;

/// Who served it, and what came of it.
type Day<'a> = (&'a System, &'a Record);

const LABEL: usize = 44;
const COLUMN: usize = 15;

/// The parameters, and what they come to.
pub(crate) fn stated(seed: u64, hours: f64, traffic: &Traffic, cache: &CacheConfig) -> String {
    let tokens = f64::from(cache.num_blocks()) * f64::from(cache.block_size());
    let (mean, busiest) = traffic.demand();
    format!(
        "{}\nthe pool: {} blocks of {} tokens, {} KiB per token; the layouts: extents of the model's context, of what a \
         request declares,\nor (which nobody can know) of exactly what it will use; blocks, promised at admission up to \
         what is declared, or taken as they are needed;\nand blocks that are shared through the prefix cache, too\nseed {seed}, {hours} hours: {} chats, {} requests; if nothing were \
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
    let days: Vec<Day<'_>> = systems.iter().zip(records).collect();
    let of = |table| days.iter().copied().filter(|(system, _)| system.table == table).collect::<Vec<_>>();
    [layouts(&of(Table::Layouts), expected_waste), policies(&days), classes(&of(Table::Classes))].join("\n")
        + PUBLISHED
}

/// Layouts of memory.
fn layouts(days: &[Day<'_>], expected_waste: u32) -> String {
    let mut out = heads(days);
    out += &section(
        days,
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
    out += &section(
        days,
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
    out += &section(
        days,
        "work",
        &[
            ("prompt tokens computed", |day| day.counters.prompt_tokens.to_string()),
            ("prompt tokens found in the prefix cache", |day| percent(hits(day))),
            ("tokens copied", |day| day.counters.copied_tokens.to_string()),
            ("preemptions", |day| day.counters.preemptions.to_string()),
            ("tokens computed again", |day| day.counters.recomputed_tokens.to_string()),
            ("answers to the end / stopped / left", |day| {
                format!("{}/{}/{}", day.finished, day.stopped, day.left)
            }),
        ],
    );
    let internal = format!("internal waste per sequence (P/2 = {expected_waste})");
    out + &line(days, &internal, |day| number(day.over_day.internal_per_sequence()))
}

/// What is done when those that run are short of blocks: a line for each.
fn policies(days: &[Day<'_>]) -> String {
    const COLUMNS: [([&str; 2], Cell); 9] = [
        (["first token", "median"], |day| day.first_token(0.5).to_string()),
        (["steps to it", "95 of 100"], |day| day.first_token(0.95).to_string()),
        (["", "99 of 100"], |day| day.first_token(0.99).to_string()),
        (["somebody", "waits"], |day| percent(waiting_share(day))),
        (["", "refused"], |day| day.counters.refused_with_room.to_string()),
        (["", "preempted"], |day| day.counters.preemptions.to_string()),
        (["", "moved out"], |day| day.counters.swaps_out.to_string()),
        (["GiB moved", "both ways"], |day| number(day.counters.moved_bytes as f64 / f64::from(1 << 30))),
        (["computed", "again"], |day| day.counters.recomputed_tokens.to_string()),
    ];
    let row = |label: &str, cells: [String; 9]| {
        format!("{label:<30}{}\n", cells.map(|cell| format!("{cell:>13}")).concat())
    };
    let head = |label: &str, line: usize| row(label, COLUMNS.map(|(head, _)| head[line].to_owned()));
    let mut out = head("overcommitted: whose blocks", 0) + &head("are taken, and how", 1);
    for has_cache in [false, true] {
        out += if has_cache { "(c) paging and prefix sharing\n" } else { "(b) paging\n" };
        for victims in [VictimPolicy::Requester, VictimPolicy::LowestPriority, VictimPolicy::LeastLost] {
            for preemption in [PreemptionMode::Recompute, PreemptionMode::Swap, PreemptionMode::Auto] {
                let is_this = |config: SchedulerConfig| {
                    (config.prefix_cache.is_some(), config.victims, config.preemption)
                        == (has_cache, victims, preemption)
                };
                let day = (days.iter()).find(|(system, _)| {
                    system.table != Table::Classes && system.overcommitted().is_some_and(is_this)
                });
                let Some((_, day)) = day else { continue };
                let label = format!("  {}, {}", victims_name(victims), preemption_name(preemption));
                out += &row(&label, COLUMNS.map(|(_, cell)| cell(day)));
            }
        }
    }
    out
}

/// Chats with long documents beside them.
fn classes(days: &[Day<'_>]) -> String {
    heads(days)
        + &section(
            days,
            "(c), with documents to be summarised beside the chats",
            &[
                ("chats: steps to first token, median", |day| day.first_token(0.5).to_string()),
                ("chats: steps to first token, 95 of 100", |day| day.first_token(0.95).to_string()),
                ("chats: steps to first token, 99 of 100", |day| day.first_token(0.99).to_string()),
                ("documents: steps to first token, median", |day| day.idle_first_token(0.5).to_string()),
                ("documents: steps to first token, most", |day| day.idle_first_token(1.0).to_string()),
                ("steps with somebody waiting for memory", |day| percent(waiting_share(day))),
                ("refused though the sum of free would do", |day| day.counters.refused_with_room.to_string()),
                ("preemptions of chats", |day| {
                    (day.counters.preemptions - day.counters.idle_preemptions).to_string()
                }),
                ("preemptions of documents", |day| day.counters.idle_preemptions.to_string()),
                ("tokens computed again", |day| day.counters.recomputed_tokens.to_string()),
            ],
        )
}

/// What others have measured, to be read beside the lines above.
const PUBLISHED: &str = "
published (Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, SOSP 2023):
  memory that holds live tokens: extents 20.4 % (model's context) to 38.2 % (exact), paging 96.3 % (figure 2)
  memory saved by sharing: 6.1 to 9.8 % where every request asks for 2 to 6 answers (section 6.3, Alpaca)";

fn heads(days: &[Day<'_>]) -> String {
    let head = |line: usize| {
        row("", &days.iter().map(|(system, _)| system.name[line].to_owned()).collect::<Vec<_>>())
    };
    head(0) + &head(1)
}

fn section(days: &[Day<'_>], title: &str, rows: &[(&str, Cell)]) -> String {
    let rows = rows.iter().map(|&(label, cell)| line(days, &format!("  {label}"), cell));
    format!("{title}\n") + &rows.collect::<String>()
}

fn line(days: &[Day<'_>], label: &str, cell: Cell) -> String {
    row(label, &days.iter().map(|(_, day)| cell(day)).collect::<Vec<_>>())
}

fn row(label: &str, cells: &[String]) -> String {
    let cells: String = cells.iter().map(|cell| format!("{cell:>COLUMN$}")).collect();
    format!("{label:<LABEL$}{cells}\n")
}

fn waiting_share(day: &Record) -> f64 {
    day.while_waiting.steps as f64 / day.over_day.steps as f64
}

fn hits(day: &Record) -> f64 {
    ratio(day.counters.hit_tokens, day.counters.wanted_tokens)
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
    let counters = &day.counters;
    json!({
        "layout": system.name.join(" "),
        "policy": policy_json(system),
        "steps": day.steps,
        "over_day": sums_json(&day.over_day),
        "while_waiting": sums_json(&day.while_waiting),
        "residents_peak": day.residents_peak,
        "first_token_steps": { "median": day.first_token(0.5), "95": day.first_token(0.95), "99": day.first_token(0.99) },
        "documents_first_token_steps": { "median": day.idle_first_token(0.5), "most": day.idle_first_token(1.0) },
        "answers": { "finished": day.finished, "stopped": day.stopped, "left": day.left },
        "refused_with_room": counters.refused_with_room,
        "prompt_tokens": counters.prompt_tokens,
        "prefix_hit_tokens": counters.hit_tokens,
        "prefix_wanted_tokens": counters.wanted_tokens,
        "copied_tokens": counters.copied_tokens,
        "preemptions": counters.preemptions,
        "preemptions_of_documents": counters.idle_preemptions,
        "swaps_out": counters.swaps_out,
        "swaps_in": counters.swaps_in,
        "moved_bytes": counters.moved_bytes,
        "recomputed_tokens": counters.recomputed_tokens,
    })
}

fn policy_json(system: &System) -> Value {
    let Layout::Blocks(policy) = system.layout else { return Value::Null };
    json!({
        "documents": system.table == Table::Classes,
        "classes": policy.classes,
        "ageing_steps": policy.config.ageing_steps,
        "guaranteed": system.overcommitted().is_none(),
        "prefix_cache": policy.config.prefix_cache.is_some(),
        "victims": victims_name(policy.config.victims),
        "preemption": preemption_name(policy.config.preemption),
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
        "cached": sums.of_pool(sums.cached),
        "external": sums.of_pool(sums.external),
        "internal": sums.of_pool(sums.internal),
        "live_share": sums.live_share(),
        "saved_by_sharing": sums.shared(),
        "internal_per_sequence": sums.internal_per_sequence(),
    })
}
