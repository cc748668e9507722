//! What a day of traffic is made of. Fixed before the first measurement, and printed before each.

use paged_kv::Rates;
use rand::Rng;
use rand_distr::{Distribution, LogNormal};

/// A small GPU with some dozens of sequences: four tokens a second for each, about as fast as people read.
pub(crate) const STEPS_PER_SECOND: u64 = 4;
/// Chats begun per hour, on average over a day: as many as make the busiest hours ask for about the default pool,
/// if nothing of it were wasted ([`Traffic::demand`](crate::generator::Traffic::demand)).
pub(crate) const CHATS_PER_HOUR: f64 = 200.0;
/// How far the rate swings around its average between day and night.
pub(crate) const SWING: f64 = 0.8;
/// The busiest time of day.
pub(crate) const PEAK_HOUR: f64 = 15.0;
/// A burst (a class that opens the app together, say) comes at any time, and its chats have one system prompt.
pub(crate) const HOURS_BETWEEN_BURSTS: f64 = 3.0;
pub(crate) const BURST_CHATS: u32 = 40;
pub(crate) const BURST_SECONDS: u64 = 60;

/// System prompts: length, and how many of 100 chats have it. The last one stands for none.
pub(crate) const SYSTEM_PROMPTS: [(u32, u32); 4] = [(600, 40), (250, 30), (80, 20), (0, 10)];
/// What people write, in tokens: the mean of ShareGPT's prompts (Kwon et al., SOSP 2023, figure 11); wide, since most
/// write a line and some paste a page.
pub(crate) const MESSAGE: Lognormal = Lognormal { mean: 161.0, sigma: 1.0 };
/// Longest message.
pub(crate) const MAX_MESSAGE: u32 = 2048;
/// What the model answers, in tokens: the mean of ShareGPT's answers (same figure).
pub(crate) const ANSWER: Lognormal = Lognormal { mean: 338.0, sigma: 0.8 };
/// What every request declares as its longest answer, since nobody knows how long it will be.
pub(crate) const MAX_NEW_TOKENS: u32 = 1024;
/// The model's context; a chat whose next turn might exceed it ends.
pub(crate) const CONTEXT: u32 = 4096;

/// Chance that a chat goes on after an answer: 2.9 turns on average.
pub(crate) const NEXT_TURN: f64 = 0.65;
/// Seconds in which people read, think and write before their next message.
pub(crate) const PAUSE: Lognormal = Lognormal { mean: 90.0, sigma: 0.8 };
/// Chance that a turn asks for 2 to [`MAX_ANSWERS`] answers to choose from; the chat goes on with the first.
pub(crate) const SEVERAL_ANSWERS: f64 = 0.06;
pub(crate) const MAX_ANSWERS: u32 = 4;
/// Chance that, while an answer is being written, somebody asks something about what is there so far.
pub(crate) const BRANCH: f64 = 0.06;
/// Chance that an answer is stopped half-way; the chat goes on with what there is.
pub(crate) const STOP: f64 = 0.08;
/// Chance that a chat is closed within so many seconds after its last message, whatever is there by then.
pub(crate) const LEAVE: f64 = 0.10;
pub(crate) const LEAVE_SECONDS: u64 = 120;

/// Rows (tokens) that one step computes at most; the same for all layouts of memory.
pub(crate) const STEP_TOKENS: u32 = 512;
/// Sequences at a time; more than the default pool ever holds.
pub(crate) const MAX_SEQUENCES: u32 = 256;
/// Size of the pool in tokens where nothing else is asked for: 4 GiB at 128 KiB per token, Llama 3 8B's in f16.
pub(crate) const POOL_TOKENS: u32 = 32_768;

/// Steps after which the device has reported what a step has moved.
pub(crate) const TRANSFER_STEPS: u64 = 2;
/// What the machine is said to do, for the choice between moving blocks and computing tokens again: a step's tokens in a
/// step's time, and half of what eight lanes of PCIe 4.0 move.
pub(crate) const RATES: Rates =
    Rates { swap_bytes_per_s: 8e9, prefill_tokens_per_s: (STEP_TOKENS as u64 * STEPS_PER_SECOND) as f64 };

/// Jobs beside the chats, where classes of priority are compared: so many documents at a time are to be summarised.
pub(crate) const HOURS_BETWEEN_BATCHES: u64 = 2;
pub(crate) const BATCH_DOCUMENTS: u32 = 16;
/// Documents, in tokens.
pub(crate) const DOCUMENT: Lognormal = Lognormal { mean: 8192.0, sigma: 0.5 };
/// The model's context there.
pub(crate) const LONG_CONTEXT: u32 = 16_384;
/// An hour: how far a class stands behind the one above it where that is compared with the default.
pub(crate) const AGEING_STEPS: u32 = 3600 * STEPS_PER_SECOND as u32;

/// A lognormal distribution by its mean, and the deviation of its logarithm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lognormal {
    pub(crate) mean: f64,
    pub(crate) sigma: f64,
}

impl Lognormal {
    pub(crate) fn draw(self, random: &mut impl Rng) -> f64 {
        let mu = self.mean.ln() - self.sigma * self.sigma / 2.0;
        LogNormal::new(mu, self.sigma).map_or(self.mean, |distribution| distribution.sample(random))
    }

    /// A length, from 1 to `max`.
    pub(crate) fn tokens(self, random: &mut impl Rng, max: u32) -> u32 {
        (self.draw(random).round() as u32).clamp(1, max)
    }
}

/// The parameters as text.
pub(crate) fn stated() -> String {
    let [long, middle, short, (_, none)] = SYSTEM_PROMPTS;
    [
        format!(
            "{CHATS_PER_HOUR} chats an hour on average, {:.0} % more at {PEAK_HOUR} o'clock and less at night; every \
             {HOURS_BETWEEN_BURSTS} hours {BURST_CHATS} more within {BURST_SECONDS} s",
            100.0 * SWING,
        ),
        format!(
            "system prompts of {}, {} and {} tokens for {}, {} and {} % of the chats, none for {none} %",
            long.0, middle.0, short.0, long.1, middle.1, short.1,
        ),
        format!(
            "messages: lognormal, mean {} tokens, sigma {}, at most {MAX_MESSAGE}; answers: lognormal, mean {}, sigma {}, \
             declared as {MAX_NEW_TOKENS}",
            MESSAGE.mean, MESSAGE.sigma, ANSWER.mean, ANSWER.sigma,
        ),
        format!(
            "a chat goes on after {:.0} % of its answers, after a pause (lognormal, mean {} s, sigma {}), and sends \
             everything again, up to {CONTEXT} tokens",
            100.0 * NEXT_TURN,
            PAUSE.mean,
            PAUSE.sigma,
        ),
        format!(
            "{:.0} % of the turns ask for 2 to {MAX_ANSWERS} answers; of the others, {:.0} % are branched off and {:.0} % \
             stopped; {:.0} % of the chats are closed within {LEAVE_SECONDS} s of their last message",
            100.0 * SEVERAL_ANSWERS,
            100.0 * BRANCH,
            100.0 * STOP,
            100.0 * LEAVE,
        ),
        format!("{STEPS_PER_SECOND} steps a second, of at most {STEP_TOKENS} tokens and {MAX_SEQUENCES} sequences"),
        format!(
            "where blocks are moved: a host pool of the pool's size, reports after {TRANSFER_STEPS} steps, {:.0} GB/s, \
             {:.0} prompt tokens a second",
            RATES.swap_bytes_per_s / 1e9,
            RATES.prefill_tokens_per_s,
        ),
        format!(
            "where classes are compared: {BATCH_DOCUMENTS} documents more every {HOURS_BETWEEN_BATCHES} hours (lognormal, \
             mean {} tokens, sigma {}), to be summarised as idle jobs; context {LONG_CONTEXT} tokens",
            DOCUMENT.mean, DOCUMENT.sigma,
        ),
    ]
    .join("\n")
}
