//! Generates text with a Llama-architecture model, many sequences at once, their keys and values in a paged pool.
//!
//! ```text
//! cargo run --release --example generate
//! cargo run --release --example generate -- --model FILE.gguf --prompt "Once upon a time" --samples 4 --temperature 0.8
//! ```
//!
//! The first command speaks with the toy model that is built in. The model's own part is the package `engine` beside
//! this program; what is here is the command line, the choice of a device, and showing what comes out.

mod batch;
mod chat;
mod device;
mod options;
mod output;

use std::{fmt, io, process::ExitCode};

use clap::Parser;
use example_engine::{
    config::Config,
    engine::Engine,
    error::{LoadError, RunError},
    gguf::GgufFile,
    tokenizer::{Tokenizer, end_tokens},
};

use batch::Batch;
use chat::Chat;
use options::Options;

/// The model that speaks without --model: trained on one book, a byte a token.
const TOY: &[u8] = include_bytes!("../toy/toy.gguf");

/// Why the program ends early: one line, and whether the user's input is to blame.
#[derive(Debug)]
struct Failure {
    message: String,
    wrong_input: bool,
}

impl Failure {
    fn input(message: impl Into<String>) -> Self {
        Self { message: message.into(), wrong_input: true }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.message)
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        Self { message: error.to_string(), wrong_input: error.is_wrong_input() }
    }
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        Self::input(error.to_string())
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self { message: error.to_string(), wrong_input: false }
    }
}

fn main() -> ExitCode {
    let result = match Options::try_parse() {
        Ok(options) => generate(&options),
        // Help was asked for.
        Err(message) if !message.use_stderr() => message.exit(),
        Err(error) => Err(Failure::input(options::in_one_line(&error))),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("generate: {failure}");
            ExitCode::from(if failure.wrong_input { 2 } else { 1 })
        }
    }
}

fn generate(options: &Options) -> Result<(), Failure> {
    if options.top_logits > 0 && !options.json {
        return Err(Failure::input("--top-logits needs --json"));
    }
    let mut file = match &options.model {
        Some(path) => GgufFile::open(path)?,
        None => GgufFile::from_bytes("the toy model", TOY)?,
    };
    // Everything that can be wrong with the input comes before the device is asked for and the weights are loaded.
    let config = Config::read(&mut file)?;
    let tokenizer = Tokenizer::read(&file);
    if options.chat {
        let chat = Chat::new(options, &config, &file, tokenizer?)?;
        let (mut engine, adapter) = load(options, &mut file)?;
        chat.run(&mut engine, &adapter)
    } else {
        let batch = Batch::new(options, &config, end_tokens(&file)?, tokenizer)?;
        let (mut engine, adapter) = load(options, &mut file)?;
        batch.run(&mut engine, &adapter)
    }
}

/// Opens the device and loads the model onto it, with a bar; also returns the adapter's name.
fn load(options: &Options, file: &mut GgufFile) -> Result<(Engine, String), Failure> {
    let gpu = device::open(options.device, options.adapter.as_deref())?;
    let adapter = gpu.as_ref().map_or_else(|| "CPU".to_owned(), |gpu| gpu.label.clone());
    let bar = indicatif::ProgressBar::new(file.tensor_bytes());
    bar.set_style(bar_style());
    let engine = Engine::load(file, gpu, &mut |bytes| bar.set_position(bytes));
    bar.finish_and_clear();
    Ok((engine?, adapter))
}

fn bar_style() -> indicatif::ProgressStyle {
    let template = "loading {wide_bar} {bytes} of {total_bytes}";
    indicatif::ProgressStyle::with_template(template)
        .unwrap_or_else(|_| indicatif::ProgressStyle::default_bar())
}
