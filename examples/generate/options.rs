//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use example_engine::options::Preempt;
use paged_kv::{KvType, VictimPolicy};

/// Generates text with a Llama-architecture model whose keys and values live in a paged pool on the GPU.
///
/// Without --model, a toy model that is part of this program speaks. Without a prompt, a few are made up.
#[derive(Debug, Parser)]
#[command(name = "generate")]
pub(crate) struct Options {
    /// A GGUF file; a toy model is built in.
    #[arg(long, value_name = "FILE")]
    pub(crate) model: Option<PathBuf>,

    /// A text to go on from; may be given several times.
    #[arg(long = "prompt", value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompts: Vec<String>,

    /// A file with one prompt a line; a line that begins with a quotation mark is a JSON string.
    #[arg(long = "prompts", value_name = "FILE")]
    pub(crate) prompts_file: Option<PathBuf>,

    /// A prompt as token ids, for which no tokenizer is needed; may be given several times.
    #[arg(long, value_name = "1,2,3")]
    pub(crate) prompt_ids: Vec<TokenList>,

    /// Take these tokens as the first ones generated, whatever the model says (teacher forcing); nothing ends a
    /// sequence but --max-new, which is then as many as are forced unless it is given.
    #[arg(long, value_name = "1,2,3")]
    pub(crate) force_ids: Option<TokenList>,

    /// Talk: every line of standard input is a turn, and the sequence is kept and extended.
    #[arg(long, conflicts_with_all = ["prompts", "prompts_file", "prompt_ids", "force_ids", "samples"])]
    pub(crate) chat: bool,

    /// Most tokens to generate for each sample; 128, or what the context leaves, unless tokens are forced.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_new: Option<u32>,

    /// Samples of every prompt, at most 1024; the prompt is computed once.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) samples: u32,

    /// 0 always takes the most likely token; higher values choose more freely.
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature,
          allow_negative_numbers = true)]
    pub(crate) temperature: f32,

    /// Seed of the choices at a temperature above 0.
    #[arg(long, value_name = "S", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) seed: u64,

    /// How keys and values are stored.
    #[arg(long, value_enum, default_value = "f16")]
    pub(crate) kv: Kv,

    /// Tokens per block: a power of two.
    #[arg(long, value_name = "P", default_value_t = paged_kv::DEFAULT_BLOCK_SIZE)]
    pub(crate) block_size: u32,

    /// Blocks in the pool; as many as the prompts may need, up to 1 GiB, unless given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) blocks: Option<u32>,

    /// Whether every sequence that is let in is sure to finish without being preempted.
    #[arg(long, value_enum, default_value = "overcommitted")]
    pub(crate) admission: Admission,

    /// How a sequence whose blocks were taken gets them back: `recompute` computes its tokens again, `swap` moves its
    /// blocks to main memory and back, `auto` does whichever takes less time by rates that it measures.
    #[arg(long, value_enum, default_value = "recompute")]
    pub(crate) preempt: Preempt,

    /// Blocks of the host pool, where `--preempt swap` and `auto` move blocks to; as many as the pool has unless given.
    #[arg(long, value_name = "N")]
    pub(crate) host_blocks: Option<u32>,

    /// Whether computed blocks are found again by later prompts that begin with the same tokens.
    #[arg(long, value_enum, default_value = "off")]
    pub(crate) prefix_cache: Switch,

    /// Whose blocks are taken when a sequence needs one and none is free.
    #[arg(long, value_enum, default_value = "lowest-priority")]
    pub(crate) victim: Victim,

    /// Who goes first. May be given several times, once for each prompt in the order --prompt, --prompts, --prompt-ids;
    /// the last one counts for all the rest.
    #[arg(long = "priority", value_enum, default_value = "normal")]
    pub(crate) priorities: Vec<Priority>,

    /// Most sequences at a time; as many as there are, up to 64, unless given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_running: Option<u32>,

    /// Most tokens computed in one step.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_535))]
    pub(crate) step_tokens: u32,

    /// Where to compute: `auto` takes a hardware adapter, else a software one, else the CPU.
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) device: Device,

    /// Take the adapter whose name, followed by `on` and its interface, contains this.
    #[arg(long, value_name = "NAME-PART")]
    pub(crate) adapter: Option<String>,

    /// Report the K largest logits of every position, in the JSON lines.
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub(crate) top_logits: usize,

    /// Print one JSON object a line: each sequence when it has finished, then the statistics.
    #[arg(long)]
    pub(crate) json: bool,

    /// Print statistics at the end.
    #[arg(long)]
    pub(crate) stats: bool,
}

impl Options {
    /// The priority of prompt `index`.
    pub(crate) fn priority(&self, index: usize) -> paged_kv::Priority {
        let last = self.priorities.last();
        self.priorities.get(index).or(last).map_or(paged_kv::Priority::default(), |&priority| priority.into())
    }
}

/// Token ids separated by commas.
#[derive(Clone, Debug)]
pub(crate) struct TokenList(pub(crate) Vec<u32>);

impl std::str::FromStr for TokenList {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.split(',').map(|id| id.trim().parse()).collect::<Result<_, _>>().map(Self)
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Kv {
    F32,
    F16,
}

impl From<Kv> for KvType {
    fn from(kv: Kv) -> Self {
        match kv {
            Kv::F32 => Self::F32,
            Kv::F16 => Self::F16,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Admission {
    /// A sequence is let in when the pool can hold it at its longest.
    Guaranteed,
    /// A sequence is let in when it fits now; if the pool runs out, some are set aside until there is room again.
    Overcommitted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Victim {
    /// The sequence that needs the block gives up its own.
    Requester,
    /// The last in line of those behind it.
    LowestPriority,
    /// Whoever has the fewest tokens to lose.
    LeastLost,
}

impl From<Victim> for VictimPolicy {
    fn from(victim: Victim) -> Self {
        match victim {
            Victim::Requester => Self::Requester,
            Victim::LowestPriority => Self::LowestPriority,
            Victim::LeastLost => Self::LeastLost,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Priority {
    /// Somebody is watching.
    Interactive,
    Normal,
    /// Whenever nothing else needs the device.
    Idle,
}

impl From<Priority> for paged_kv::Priority {
    fn from(priority: Priority) -> Self {
        match priority {
            Priority::Interactive => Self::Interactive,
            Priority::Normal => Self::Normal,
            Priority::Idle => Self::Idle,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// A hardware adapter, else a software one, else the CPU.
    Auto,
    /// An adapter, hardware or software.
    Gpu,
    /// The CPU twins of the kernels.
    Cpu,
}

/// What is wrong with the command line, without the tips and the usage that clap prints below it.
pub(crate) fn in_one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let reason = text.split("\n\n").next().unwrap_or_default();
    let words: Vec<&str> = reason.lines().map(str::trim).collect();
    words.join(" ").trim_start_matches("error: ").to_owned()
}

fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(temperature) if temperature >= 0.0 && temperature.is_finite() => Ok(temperature),
        _ => Err("a temperature is a number from 0 on".to_owned()),
    }
}
