//! Showing what is generated: text as it is made, or JSON lines.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use example_engine::{
    engine::{Event, Outcome, SessionStats},
    sample::TopLogits,
    tokenizer::{TextStream, Tokenizer},
};
use paged_kv::{FinishReason, MissCounts};
use serde::Serialize;

/// Text of several sequences on one terminal: the first unfinished one is shown as it grows, the others wait for
/// their turn.
pub(crate) struct TextPrinter<'a> {
    tokenizer: Option<&'a Tokenizer>,
    /// The heading of each sequence: nothing where there is only one.
    headings: BTreeMap<(u32, u32), String>,
    waiting: BTreeMap<(u32, u32), Waiting>,
}

#[derive(Default)]
struct Waiting {
    stream: TextStream,
    text: String,
    finished: bool,
}

impl<'a> TextPrinter<'a> {
    /// A printer of sequences with these headings, by prompt and sample; the order is theirs.
    pub(crate) fn new(
        tokenizer: Option<&'a Tokenizer>,
        headings: BTreeMap<(u32, u32), String>,
    ) -> io::Result<Self> {
        let waiting = headings.keys().map(|&key| (key, Waiting::default())).collect();
        let printer = Self { tokenizer, headings, waiting };
        printer.show_heading()?;
        Ok(printer)
    }

    /// Takes an event and shows what can be shown.
    pub(crate) fn take(&mut self, event: &Event) -> io::Result<()> {
        let Some(sequence) = self.waiting.get_mut(&event.subject()) else { return Ok(()) };
        match (event, self.tokenizer) {
            (Event::Token { token, .. }, Some(tokenizer)) if !tokenizer.end_tokens().contains(token) => {
                sequence.text += &sequence.stream.push(tokenizer.bytes_of(*token));
            }
            (Event::Token { token, .. }, None) => sequence.text += &format!("{token} "),
            (Event::Token { .. }, Some(_)) | (Event::Preempted { .. }, _) => {}
            (Event::Finished { .. }, _) => {
                sequence.text += &sequence.stream.finish();
                sequence.finished = true;
            }
        }
        self.show()
    }

    fn show(&mut self) -> io::Result<()> {
        let mut out = io::stdout().lock();
        while let Some(mut first) = self.waiting.first_entry() {
            let sequence = first.get_mut();
            write!(out, "{}", std::mem::take(&mut sequence.text))?;
            if !sequence.finished {
                break;
            }
            writeln!(out)?;
            first.remove();
            self.show_heading()?;
        }
        out.flush()
    }

    fn show_heading(&self) -> io::Result<()> {
        match self.waiting.first_key_value().and_then(|(key, _)| self.headings.get(key)) {
            Some(heading) => write!(io::stdout().lock(), "{heading}"),
            None => Ok(()),
        }
    }
}

/// A finished sequence, with its keys in this order.
#[derive(Serialize)]
struct SequenceLine<'a> {
    prompt: u32,
    sample: u32,
    prompt_ids: &'a [u32],
    token_ids: &'a [u32],
    text: String,
    finish: String,
    preemptions: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logits: Option<Vec<TopLogitsLine<'a>>>,
}

/// The largest logits of one position as pairs of token and logit, and a summary of all.
#[derive(Serialize)]
struct TopLogitsLine<'a> {
    top: &'a [(u32, f32)],
    logsumexp: f64,
    mean: f64,
}

impl<'a> TopLogitsLine<'a> {
    fn of(row: &'a TopLogits) -> Self {
        Self { top: &row.top, logsumexp: row.logsumexp, mean: row.mean }
    }
}

#[derive(Serialize)]
struct StatsLine<'a> {
    stats: Stats<'a>,
}

#[derive(Serialize)]
struct Stats<'a> {
    adapter: &'a str,
    blocks_total: u32,
    blocks_peak: u32,
    blocks_shared_peak: u32,
    block_copies: u64,
    preemptions: u64,
    recomputed_tokens: u64,
    swaps_out: u64,
    swaps_in: u64,
    swap_bytes: u64,
    prefix_hit_tokens: u64,
    prefix_miss_reasons: MissReasons,
    steps: u64,
    prompt_tokens: u64,
    generated_tokens: u64,
    seconds: f64,
    tokens_per_s: f64,
    attention_share: Option<f64>,
    waste_tokens_peak: u64,
}

/// How often the prefix cache did not have what followed, by reason.
#[derive(Serialize)]
struct MissReasons {
    unseen: u64,
    evicted: u64,
    expired: u64,
}

impl From<MissCounts> for MissReasons {
    fn from(MissCounts { unseen, evicted, expired }: MissCounts) -> Self {
        Self { unseen, evicted, expired }
    }
}

/// One finished sequence as a line of JSON.
pub(crate) fn outcome_json(
    outcome: &Outcome,
    prompt_ids: &[u32],
    tokenizer: Option<&Tokenizer>,
    with_top_logits: bool,
) -> String {
    let mut shown = outcome.tokens.as_slice();
    if outcome.reason == FinishReason::Stop {
        shown = shown.split_last().map_or(shown, |(_, before)| before);
    }
    line(&SequenceLine {
        prompt: outcome.prompt,
        sample: outcome.sample,
        prompt_ids,
        token_ids: &outcome.tokens,
        text: tokenizer.map(|tokenizer| tokenizer.decode(shown)).unwrap_or_default(),
        finish: outcome.reason.to_string(),
        preemptions: outcome.preemptions,
        top_logits: with_top_logits.then(|| outcome.top_logits.iter().map(TopLogitsLine::of).collect()),
    })
}

/// The statistics as a line of JSON.
pub(crate) fn stats_json(stats: &SessionStats, adapter: &str) -> String {
    let scheduler = &stats.scheduler;
    let cache = &scheduler.cache;
    line(&StatsLine {
        stats: Stats {
            adapter,
            blocks_total: cache.num_blocks,
            blocks_peak: cache.held_blocks_peak,
            blocks_shared_peak: cache.shared_blocks_peak,
            block_copies: cache.block_copies,
            preemptions: scheduler.preemptions,
            recomputed_tokens: scheduler.recomputed_tokens,
            swaps_out: scheduler.swaps_out,
            swaps_in: scheduler.swaps_in,
            swap_bytes: stats.swap_bytes,
            prefix_hit_tokens: scheduler.prefix_hit_tokens,
            prefix_miss_reasons: scheduler.prefix_misses.into(),
            steps: scheduler.steps,
            prompt_tokens: scheduler.prompt_tokens,
            generated_tokens: scheduler.generated_tokens,
            seconds: stats.elapsed.as_secs_f64(),
            tokens_per_s: stats.tokens_per_s(),
            attention_share: stats.attention_share(),
            waste_tokens_peak: scheduler.tail_waste_tokens_peak,
        },
    })
}

fn line(object: &impl Serialize) -> String {
    serde_json::to_string(object).expect("numbers and texts are always JSON")
}

/// The statistics for people.
pub(crate) fn stats_text(stats: &SessionStats, adapter: &str, block_size: u32) -> String {
    let scheduler = &stats.scheduler;
    let cache = &scheduler.cache;
    let misses = scheduler.prefix_misses;
    let (found, wanted) = (scheduler.prefix_hit_tokens, scheduler.prefix_wanted_tokens);
    let was_asked = found + misses.unseen + misses.evicted + misses.expired > 0;
    let prefix = match was_asked {
        true => format!("\n{found} of {wanted} tokens found in the prefix cache"),
        false => String::new(),
    };
    let attention = stats
        .attention_share()
        .map(|share| format!(", {:.0} % of the time in attention", 100.0 * share))
        .unwrap_or_default();
    format!(
        "{adapter}: {} prompt tokens and {} generated in {} steps and {:.1} s, {:.1} generated per second{attention}\n\
         {} of {} blocks of {block_size} tokens used at most, {} shared at most, {} copied on write, \
         {} tokens unused in last blocks at most\n\
         {} preemptions, {} tokens computed again; {} sequences swapped out to {} host blocks and {} back, {} bytes moved{prefix}",
        scheduler.prompt_tokens,
        scheduler.generated_tokens,
        scheduler.steps,
        stats.elapsed.as_secs_f64(),
        stats.tokens_per_s(),
        cache.held_blocks_peak,
        cache.num_blocks,
        cache.shared_blocks_peak,
        cache.block_copies,
        scheduler.tail_waste_tokens_peak,
        scheduler.preemptions,
        scheduler.recomputed_tokens,
        scheduler.swaps_out,
        cache.host_blocks,
        scheduler.swaps_in,
        stats.swap_bytes,
    )
}
