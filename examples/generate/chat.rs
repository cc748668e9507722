//! Talking: each line of standard input is a turn; the sequence is kept, and a turn computes only what is new.

use std::{
    collections::BTreeMap,
    io::{self, BufRead, IsTerminal, Write},
};

use llama::{
    chat::ChatFormat,
    engine::{Engine, Outcome, Prompt},
    gguf::GgufFile,
    tokenizer::Tokenizer,
};
use paged_kv::{FinishReason, SequenceId};

use crate::{
    Failure,
    options::Options,
    output::{TextPrinter, outcome_json, stats_json, stats_text},
    run::{DEFAULT_MAX_NEW, session_options},
};

/// Talks until standard input ends.
pub(crate) fn run(
    options: &Options,
    engine: &mut Engine,
    file: &GgufFile,
    tokenizer: &Tokenizer,
    adapter: &str,
) -> Result<(), Failure> {
    let format = ChatFormat::read(file)?;
    let session_options = session_options(options, engine.config(), &[(engine.config().context_len, 1)])?;
    let mut session = engine.session(session_options)?;
    let mut conversation: Option<(SequenceId, FinishReason)> = None;
    let mut turn = 0;
    let mut events = Vec::new();
    while let Some(words) = read_turn()? {
        let text = match conversation {
            None => format.first_turn(&words),
            Some((_, reason)) => format.next_turn(&words, reason == FinishReason::Stop),
        };
        let prompt = Prompt {
            index: turn,
            tokens: tokenizer.encode(&text, conversation.is_none())?,
            max_new_tokens: options.max_new.unwrap_or(DEFAULT_MAX_NEW),
            samples: 1,
            stop_tokens: tokenizer.end_tokens().to_vec(),
            forced_tokens: Vec::new(),
            keep: true,
        };
        let sequence = match conversation {
            None => SequenceId::from(session.add(&prompt)?),
            Some((sequence, _)) => {
                session.extend(sequence, &prompt)?;
                sequence
            }
        };
        let heading = BTreeMap::from([((turn, 0), String::new())]);
        let mut printer = (!options.json).then(|| TextPrinter::new(Some(tokenizer), heading)).transpose()?;
        let mut outcome = Outcome::new(turn, 0);
        while session.step(&mut events)? {
            for event in events.drain(..) {
                if let Some(printer) = &mut printer {
                    printer.take(&event)?;
                }
                outcome.take(event);
            }
        }
        if options.json {
            let object = outcome_json(&outcome, &prompt.tokens, Some(tokenizer), options.top_logits > 0);
            writeln!(io::stdout().lock(), "{object}")?;
        }
        conversation = Some((sequence, outcome.reason));
        turn += 1;
    }
    if options.json {
        writeln!(io::stdout().lock(), "{}", stats_json(&session.stats(), adapter))?;
    } else if options.stats {
        eprintln!("{}", stats_text(&session.stats(), adapter, options.block_size));
    }
    Ok(())
}

/// The next line that is not empty; on a terminal, asks for it.
fn read_turn() -> io::Result<Option<String>> {
    let stdin = io::stdin();
    loop {
        if stdin.is_terminal() {
            print!("> ");
            io::stdout().flush()?;
        }
        let mut line = String::new();
        if stdin.lock().read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let words = line.trim_end_matches(['\r', '\n']);
        if !words.is_empty() {
            return Ok(Some(words.to_owned()));
        }
    }
}
