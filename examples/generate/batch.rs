//! Prompts to texts: what the program does unless it talks.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use example_engine::{
    attention::shape_of,
    config::Config,
    engine::{Engine, Event, Prompt, SessionOptions, check_host_pool},
    error::{LoadError, RunError},
    options::Preempt,
    sample::Sampler,
    tokenizer::Tokenizer,
};
use paged_kv::{CacheConfig, GroupLayout, PrefixCacheConfig, Scheduler, SchedulerConfig};

use crate::{
    Failure,
    options::{Admission, Options, Switch},
    output::{TextPrinter, outcome_json, stats_json, stats_text},
};

/// Tokens generated for each sample where nothing else is asked for.
pub(crate) const DEFAULT_MAX_NEW: u32 = 128;
/// Bytes that the pool has at most where its size is not given.
const DEFAULT_POOL_BYTES: u64 = 1 << 30;
/// Sequences that run at a time at most where nothing else is asked for.
const DEFAULT_MAX_RUNNING: u32 = 64;

/// Prompts for the toy model where none is given.
const MADE_UP: [&str; 4] =
    ["In the beginning", "And the king said unto", "Blessed are the", "Now it came to pass"];

/// Prompts that run together.
pub(crate) struct Batch<'a> {
    options: &'a Options,
    tokenizer: Option<Tokenizer>,
    /// The texts of the first prompts; those after them were given as ids.
    texts: Vec<String>,
    prompts: Vec<Prompt>,
    session: SessionOptions,
}

impl<'a> Batch<'a> {
    /// Reads and checks all prompts, in the order --prompt, --prompts, --prompt-ids. A model without a known
    /// tokenizer still takes ids.
    pub(crate) fn new(
        options: &'a Options,
        config: &Config,
        end_tokens: Vec<u32>,
        tokenizer: Result<Tokenizer, LoadError>,
    ) -> Result<Self, Failure> {
        let texts = read_texts(options)?;
        let mut token_lists = Vec::new();
        for text in &texts {
            let tokenizer = tokenizer.as_ref().map_err(|error| Failure::input(error.to_string()))?;
            token_lists.push(tokenizer.encode(text, true)?);
        }
        token_lists.extend(options.prompt_ids.iter().map(|list| list.0.clone()));

        let forced_tokens = options.force_ids.as_ref().map_or(&[][..], |list| &list.0);
        for &token in token_lists.iter().flatten().chain(forced_tokens) {
            if token >= config.vocab_len {
                let vocab_len = config.vocab_len;
                let message = format!("token {token} is not in the model's vocabulary of {vocab_len}");
                return Err(Failure::input(message));
            }
        }
        check_priorities(options, token_lists.len())?;
        let prompts = token_lists.into_iter().zip(0..).map(|(tokens, index)| Prompt {
            index,
            max_new_tokens: match (options.max_new, forced_tokens.len()) {
                (Some(max_new), _) => max_new,
                (None, 0) => {
                    DEFAULT_MAX_NEW.min(config.context_len.saturating_sub(tokens.len() as u32).max(1))
                }
                (None, forced) => forced as u32,
            },
            tokens,
            samples: options.samples,
            first_sample: 0,
            stop_tokens: if forced_tokens.is_empty() { end_tokens.clone() } else { Vec::new() },
            forced_tokens: forced_tokens.to_vec(),
            keep: false,
            priority: options.priority(index as usize),
        });
        let prompts: Vec<Prompt> = prompts.collect();
        let longest = |prompt: &Prompt| (prompt.tokens.len() as u32).saturating_add(prompt.max_new_tokens);
        let sequences: Vec<_> = prompts.iter().map(|prompt| (longest(prompt), prompt.samples)).collect();
        let session = session_options(options, config, &sequences)?;
        // A scheduler without a model tells whether every prompt can run.
        let mut scheduler =
            Scheduler::new(session.scheduler, session.cache.clone()).map_err(RunError::from)?;
        for prompt in &prompts {
            let added = scheduler.add(prompt.request());
            added.map_err(|error| Failure::input(format!("prompt {}: {error}", prompt.index)))?;
        }
        Ok(Self { options, tokenizer: tokenizer.ok(), texts, prompts, session })
    }

    /// Runs the prompts and shows what comes out.
    pub(crate) fn run(&self, engine: &mut Engine, adapter: &str) -> Result<(), Failure> {
        let tokenizer = self.tokenizer.as_ref();
        let mut session = engine.session(self.session.clone())?;
        let mut printed = Ok(());
        if self.options.json {
            session.run(&self.prompts, |event, outcome| {
                if matches!(event, Event::Finished { .. }) && printed.is_ok() {
                    let prompt_ids = &self.prompts[outcome.prompt as usize].tokens;
                    let line = outcome_json(outcome, prompt_ids, tokenizer, self.options.top_logits > 0);
                    printed = writeln!(io::stdout().lock(), "{line}");
                }
            })?;
            printed?;
            writeln!(io::stdout().lock(), "{}", stats_json(&session.stats(), adapter))?;
            return Ok(());
        }
        let mut printer = TextPrinter::new(tokenizer, self.headings())?;
        session.run(&self.prompts, |event, _| {
            if printed.is_ok() {
                printed = printer.take(event);
            }
        })?;
        printed?;
        if self.options.stats {
            eprintln!("{}", stats_text(&session.stats(), adapter, self.options.block_size));
        }
        Ok(())
    }

    /// A heading for each sample, which ends with the prompt's text; a lone sample has only that.
    fn headings(&self) -> BTreeMap<(u32, u32), String> {
        let alone = self.prompts.len() == 1 && self.options.samples == 1;
        let mut headings = BTreeMap::new();
        for (prompt, index) in self.prompts.iter().zip(0..) {
            let text = match (self.texts.get(index as usize), &self.tokenizer) {
                (Some(text), _) => text.clone(),
                (None, Some(tokenizer)) => tokenizer.decode(&prompt.tokens),
                (None, None) => String::new(),
            };
            for sample in 0..prompt.samples {
                let heading = format!("--- prompt {index}, sample {sample}\n{text}");
                headings.insert((index, sample), if alone { text.clone() } else { heading });
            }
        }
        headings
    }
}

fn read_texts(options: &Options) -> Result<Vec<String>, Failure> {
    let mut texts = options.prompts.clone();
    if let Some(path) = &options.prompts_file {
        let content = std::fs::read_to_string(path)
            .map_err(|error| Failure::input(format!("cannot read {}: {error}", path.display())))?;
        let in_file = texts.len();
        for (line, number) in content.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()) {
            let wrong = |error| format!("{}: line {number} is no JSON string: {error}", path.display());
            texts.push(prompt_line(line).map_err(|error| Failure::input(wrong(error)))?);
        }
        if texts.len() == in_file {
            return Err(Failure::input(format!("{} has no prompt", path.display())));
        }
    }
    if texts.is_empty() && options.prompt_ids.is_empty() {
        if options.model.is_some() {
            return Err(Failure::input("no prompt: give --prompt, --prompts, --prompt-ids or --chat"));
        }
        texts.extend(MADE_UP.map(str::to_owned));
    }
    Ok(texts)
}

/// Every priority has a prompt.
pub(crate) fn check_priorities(options: &Options, num_prompts: usize) -> Result<(), Failure> {
    let given = options.priorities.len();
    if given > num_prompts.max(1) {
        return Err(Failure::input(format!("--priority was given {given} times for {num_prompts} prompts")));
    }
    Ok(())
}

fn prompt_line(line: &str) -> serde_json::Result<String> {
    if line.starts_with('"') { serde_json::from_str(line) } else { Ok(line.to_owned()) }
}

/// The session for sequences that may become `tokens` long, each `samples` times.
pub(crate) fn session_options(
    options: &Options,
    config: &Config,
    sequences: &[(u32, u32)],
) -> Result<SessionOptions, Failure> {
    let num_sequences = sequences.iter().fold(0, |sum: u32, &(_, samples)| sum.saturating_add(samples));
    let most_samples = sequences.iter().map(|&(_, samples)| samples).max().unwrap_or(1);
    let max_running = options.max_running.unwrap_or(DEFAULT_MAX_RUNNING.max(most_samples)).min(num_sequences);
    let config_error = |error| Failure::from(RunError::Config(error));
    let with_blocks = |blocks: u32| {
        CacheConfig::for_blocks(blocks, &shape_of(config), paged_kv::KvType::from(options.kv))?
            .with_max_sequence_tokens(config.context_len)?
            .with_max_sequences(max_running)?
            .with_block_size(options.block_size)
    };
    let one = with_blocks(options.blocks.unwrap_or(1)).map_err(config_error)?;
    let cache = match options.blocks {
        Some(_) => one,
        None => {
            // As if layers with windows kept everything: while a prompt is read, they may.
            let blocks_of = |tokens: u32| -> u64 {
                let blocks = |group: &GroupLayout| {
                    let blocks = group.layout().blocks_for(tokens.min(config.context_len));
                    u64::from(group.num_stacks()) * u64::from(blocks)
                };
                one.groups().iter().map(blocks).sum()
            };
            let all: u64 =
                sequences.iter().map(|&(tokens, samples)| blocks_of(tokens) * u64::from(samples)).sum();
            let longest = sequences.iter().map(|&(tokens, _)| blocks_of(tokens)).max().unwrap_or(1);
            let blocks = all.min(DEFAULT_POOL_BYTES / one.bytes_per_block()).max(longest);
            with_blocks(u32::try_from(blocks).unwrap_or(u32::MAX)).map_err(config_error)?
        }
    };
    let host_blocks = host_blocks(options, cache.num_blocks())?;
    let cache = cache.with_host_blocks(host_blocks).map_err(config_error)?;
    check_host_pool(&cache)?;
    let admission = match options.admission {
        Admission::Guaranteed => paged_kv::Admission::Guaranteed,
        Admission::Overcommitted => {
            paged_kv::Admission::Overcommitted { watermark_blocks: cache.num_blocks() / 100 }
        }
    };
    Ok(SessionOptions {
        cache,
        scheduler: SchedulerConfig {
            step_tokens: options.step_tokens,
            max_running: Some(max_running),
            admission,
            prefix_cache: (options.prefix_cache == Switch::On).then(PrefixCacheConfig::default),
            preemption: options.preempt.into(),
            victims: options.victim.into(),
            ..Default::default()
        },
        sampler: Sampler { temperature: options.temperature, seed: options.seed },
        top_logits: options.top_logits,
        rates: None,
    })
}

/// Blocks of the host pool beside a pool of `num_blocks`.
fn host_blocks(options: &Options, num_blocks: u32) -> Result<u32, Failure> {
    match (options.preempt, options.host_blocks) {
        (Preempt::Recompute, None | Some(0)) => Ok(0),
        (Preempt::Recompute, Some(_)) => {
            Err(Failure::input("--host-blocks has no meaning without --preempt swap or auto"))
        }
        (Preempt::Swap | Preempt::Auto, Some(0)) => {
            Err(Failure::input("--preempt swap and auto need at least one block: --host-blocks is 0"))
        }
        (Preempt::Swap | Preempt::Auto, given) => Ok(given.unwrap_or(num_blocks)),
    }
}
