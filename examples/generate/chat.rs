//! Talking: each line of standard input is a turn; the sequence is kept, and a turn computes only what is new.

use std::{
    collections::BTreeMap,
    io::{self, BufRead, IsTerminal, Write},
};

use example_engine::{
    chat::ChatFormat,
    config::Config,
    engine::{Engine, Outcome, Prompt, Session, SessionOptions},
    gguf::GgufFile,
    tokenizer::Tokenizer,
};
use paged_kv::{FinishReason, SequenceId};

use crate::{
    Failure,
    batch::{DEFAULT_MAX_NEW, check_priorities, session_options},
    options::Options,
    output::{TextPrinter, outcome_json, stats_json, stats_text},
};

/// Tokens of a conversation that the pool has room for where its size is not given.
const DEFAULT_TOKENS: u32 = 8192;

/// A conversation that is about to begin.
pub(crate) struct Chat<'a> {
    options: &'a Options,
    format: ChatFormat,
    tokenizer: Tokenizer,
    session: SessionOptions,
}

/// The sequence so far, and how the last answer ended.
#[derive(Clone, Copy)]
struct Spoken {
    sequence: SequenceId,
    reason: FinishReason,
}

impl<'a> Chat<'a> {
    /// Recognises how the model wants a conversation written.
    pub(crate) fn new(
        options: &'a Options,
        config: &Config,
        file: &GgufFile,
        tokenizer: Tokenizer,
    ) -> Result<Self, Failure> {
        check_priorities(options, 1)?;
        let session = session_options(options, config, &[(config.context_len.min(DEFAULT_TOKENS), 1)])?;
        Ok(Self { options, format: ChatFormat::read(file)?, tokenizer, session })
    }

    /// Talks until standard input ends.
    pub(crate) fn run(&self, engine: &mut Engine, adapter: &str) -> Result<(), Failure> {
        let mut session = engine.session(self.session.clone())?;
        let mut spoken: Option<Spoken> = None;
        let mut turn = 0;
        while let Some(words) = read_turn()? {
            let before = spoken.and_then(|spoken| session.scheduler().tokens(spoken.sequence));
            let prompt = self.prompt(turn, &words, spoken, before.map_or(0, <[u32]>::len))?;
            spoken = Some(self.answer(&mut session, &prompt, spoken)?);
            turn += 1;
        }
        if self.options.json {
            writeln!(io::stdout().lock(), "{}", stats_json(&session.stats(), adapter))?;
        } else if self.options.stats {
            eprintln!("{}", stats_text(&session.stats(), adapter, self.options.block_size));
        }
        Ok(())
    }

    /// What the user's words add to the sequence, which has `before` tokens.
    fn prompt(
        &self,
        turn: u32,
        words: &str,
        spoken: Option<Spoken>,
        before: usize,
    ) -> Result<Prompt, Failure> {
        let text = match spoken {
            None => self.format.first_turn(words),
            Some(spoken) => self.format.next_turn(words, spoken.reason == FinishReason::Stop),
        };
        let tokens = self.tokenizer.encode(&text, spoken.is_none())?;
        let cache = &self.session.cache;
        let most = (cache.num_blocks() * cache.block_size()).min(cache.max_sequence_tokens());
        let left = (most as usize).saturating_sub(before + tokens.len()) as u32;
        if left == 0 {
            return Err(Failure::input(format!("the conversation would exceed {most} tokens")));
        }
        Ok(Prompt {
            index: turn,
            tokens,
            max_new_tokens: self.options.max_new.unwrap_or(DEFAULT_MAX_NEW).min(left),
            samples: 1,
            first_sample: 0,
            stop_tokens: self.tokenizer.end_tokens().to_vec(),
            forced_tokens: Vec::new(),
            keep: true,
            priority: self.options.priority(0),
        })
    }

    /// Shows the model's answer.
    fn answer(
        &self,
        session: &mut Session<'_>,
        prompt: &Prompt,
        spoken: Option<Spoken>,
    ) -> Result<Spoken, Failure> {
        let sequence = match spoken {
            None => session.add(prompt)?.sample(0),
            Some(spoken) => {
                session.extend(spoken.sequence, prompt)?;
                spoken.sequence
            }
        };
        let tokenizer = Some(&self.tokenizer);
        let heading = BTreeMap::from([((prompt.index, 0), String::new())]);
        let mut printer = (!self.options.json).then(|| TextPrinter::new(tokenizer, heading)).transpose()?;
        let mut outcome = Outcome::new(prompt.index, 0);
        let mut events = Vec::new();
        while session.step(&mut events)? {
            for event in events.drain(..) {
                if let Some(printer) = &mut printer {
                    printer.take(&event)?;
                }
                outcome.take(&event);
            }
        }
        if self.options.json {
            let line = outcome_json(&outcome, &prompt.tokens, tokenizer, self.options.top_logits > 0);
            writeln!(io::stdout().lock(), "{line}")?;
        }
        Ok(Spoken { sequence, reason: outcome.reason })
    }
}

/// The next line that is not empty; on a terminal, asks for it.
fn read_turn() -> Result<Option<String>, Failure> {
    let stdin = io::stdin();
    loop {
        if stdin.is_terminal() {
            print!("> ");
            io::stdout().flush()?;
        }
        let mut line = String::new();
        let read = stdin.lock().read_line(&mut line);
        if read.map_err(|error| Failure::input(format!("cannot read standard input: {error}")))? == 0 {
            return Ok(None);
        }
        let words = line.trim_end_matches(['\r', '\n']);
        if !words.is_empty() {
            return Ok(Some(words.to_owned()));
        }
    }
}
