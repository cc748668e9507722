//! A day of chat traffic, made from a seed before anything is served.
//!
//! What people send and what the model answers does not depend on who serves them: a text is a number, from which its
//! tokens follow. A chat begins at its own time, everywhere the same; its next turn begins a pause after the answer, so
//! a server that answers late is asked later. Nothing is kept between turns: each sends everything before it again.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::arrivals::{draw_arrivals, steps_per_hour};
use crate::parameters::*;

/// The token that ends an answer.
pub(crate) const END: u32 = 0;
const VOCABULARY: u64 = 50_000;

/// A run of tokens: who wrote it, and how much of it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Text {
    source: u64,
    pub(crate) len: u32,
    /// Whether its last token is [`END`].
    ends: bool,
}

impl Text {
    pub(crate) fn token(self, index: u32) -> u32 {
        if self.ends && index + 1 == self.len {
            return END;
        }
        let place = (self.source << 32) | u64::from(index);
        let mut hash = (place + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        1 + ((hash ^ (hash >> 27)) % VOCABULARY) as u32
    }

    fn cut(self, len: u32) -> Self {
        Self { len, ends: self.ends && len == self.len, ..self }
    }
}

/// One request: a turn of a chat with everything before it, or a branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    pub(crate) prompt: Vec<Text>,
    /// One for each sample, as long as it is when nobody stops it.
    pub(crate) answers: Vec<Text>,
    /// Somebody stops the answer when it has so many tokens.
    pub(crate) stop_after: Option<u32>,
    /// Somebody closes the chat so many steps after asking.
    pub(crate) leave_after: Option<u64>,
    /// The next turn, so many steps after the answer's end.
    pub(crate) next: Option<(u64, usize)>,
    /// A branch that begins when the answer has so many tokens.
    pub(crate) branch: Option<(u32, usize)>,
    /// What it branches off, and how many of its first tokens they have in common.
    pub(crate) parent: Option<(usize, u32)>,
    /// Nobody waits for it.
    pub(crate) idle: bool,
}

impl Job {
    pub(crate) fn prompt_len(&self) -> u32 {
        tokens_of(&self.prompt)
    }

    pub(crate) fn prompt_tokens(&self) -> Vec<u32> {
        self.prompt.iter().flat_map(|&text| (0..text.len).map(move |index| text.token(index))).collect()
    }

    /// Tokens that two sequences have in common, at least: this prompt, and another one with a sample's answer.
    pub(crate) fn common(&self, other: &Self, sample: usize) -> u32 {
        let mut common = 0;
        for (own, theirs) in self.prompt.iter().zip(other.prompt.iter().chain([&other.answers[sample]])) {
            if own.source != theirs.source {
                break;
            }
            common += own.len.min(theirs.len);
            if own.len != theirs.len {
                // One of the two may end there.
                return common.saturating_sub(1);
            }
        }
        common
    }

    /// Tokens that a sample's answer has in the end.
    pub(crate) fn answer_len(&self, sample: usize) -> u32 {
        self.answers[sample].len.min(self.stop_after.unwrap_or(u32::MAX))
    }
}

/// All requests of a day, and when its chats begin.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Traffic {
    pub(crate) jobs: Vec<Job>,
    /// Step and job of every chat's first message, in order.
    pub(crate) arrivals: Vec<(u64, usize)>,
    /// Steps that the day has.
    pub(crate) steps: u64,
    texts: u64,
}

impl Traffic {
    /// The `hours` of a day around its peak.
    pub(crate) fn generate(seed: u64, hours: f64) -> Self {
        let steps = (hours * steps_per_hour()) as u64;
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let texts = SYSTEM_PROMPTS.len() as u64;
        let mut traffic = Self { jobs: Vec::new(), arrivals: Vec::new(), steps, texts };
        for (step, system_prompt) in draw_arrivals(&mut random, steps) {
            let first = traffic.draw_chat(&mut random, system_prompt);
            traffic.arrivals.push((step, first));
        }
        traffic
    }

    /// The same chats, and batches of long documents beside them that nobody waits for.
    pub(crate) fn with_documents(mut self, seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(1);
        let between = HOURS_BETWEEN_BATCHES * STEPS_PER_SECOND * 3600;
        for step in (between.min(self.steps) / 2..self.steps).step_by(between as usize) {
            for _ in 0..BATCH_DOCUMENTS {
                let tokens = DOCUMENT.tokens(&mut random, LONG_CONTEXT - MAX_NEW_TOKENS);
                let document = self.text(tokens, false);
                let job = self.draw_job(&mut random, vec![document], 1, None);
                self.jobs[job].idle = true;
                self.arrivals.push((step, job));
            }
        }
        self.arrivals.sort_unstable();
        self
    }

    /// Tokens that would be resident on average, over the day and in its busiest hour, if every turn were answered at
    /// once, nothing were shared, and nothing but tokens took memory.
    pub(crate) fn demand(&self) -> (f64, f64) {
        let hour = steps_per_hour() as usize;
        let mut hours = vec![0.0; (self.steps as usize).div_ceil(hour)];
        for &(arrival, first) in &self.arrivals {
            let (mut step, mut next) = (arrival, Some(first));
            while let Some(job) = next.map(|index| &self.jobs[index]) {
                let branch = job.branch.map(|(_, branch)| &self.jobs[branch]);
                let place = (step as usize / hour).min(hours.len() - 1);
                hours[place] += token_steps(job) + branch.map_or(0.0, token_steps);
                step += u64::from(job.answer_len(0)) + job.next.map_or(0, |(pause, _)| pause);
                next = job.next.map(|(_, next)| next);
            }
        }
        let busiest = hours.iter().fold(0.0f64, |busiest, &tokens| busiest.max(tokens)) / hour as f64;
        (hours.iter().sum::<f64>() / self.steps as f64, busiest)
    }

    /// Draws a chat's turns; returns the first one's job.
    fn draw_chat(&mut self, random: &mut ChaCha8Rng, system_prompt: usize) -> usize {
        let (len, _) = SYSTEM_PROMPTS[system_prompt];
        let mut history = vec![Text { source: system_prompt as u64, len, ends: false }];
        history.push(self.draw_message(random));
        let first = self.draw_turn(random, &history);
        let mut turn = first;
        while random.random_bool(NEXT_TURN) {
            let job = &self.jobs[turn];
            history.push(job.answers[0].cut(job.answer_len(0)));
            history.push(self.draw_message(random));
            if tokens_of(&history) + MAX_NEW_TOKENS > CONTEXT {
                break;
            }
            let next = self.draw_turn(random, &history);
            let pause = PAUSE.draw(random) * STEPS_PER_SECOND as f64;
            self.jobs[turn].next = Some((pause as u64, next));
            turn = next;
        }
        if random.random_bool(LEAVE) {
            self.jobs[turn].leave_after = Some(random.random_range(0..LEAVE_SECONDS * STEPS_PER_SECOND));
        }
        first
    }

    fn draw_turn(&mut self, random: &mut ChaCha8Rng, history: &[Text]) -> usize {
        let several = random.random_bool(SEVERAL_ANSWERS);
        let samples = if several { random.random_range(2..=MAX_ANSWERS) } else { 1 };
        let turn = self.draw_job(random, history.to_vec(), samples, None);
        if several {
            return turn;
        }
        let len = self.jobs[turn].answers[0].len;
        if random.random_bool(STOP) && len > 1 {
            self.jobs[turn].stop_after = Some(random.random_range(1..len));
        }
        let len = self.jobs[turn].answer_len(0);
        if random.random_bool(BRANCH) && len > 1 {
            let tokens = random.random_range(1..len);
            self.draw_branch(random, turn, tokens);
        }
        turn
    }

    fn draw_branch(&mut self, random: &mut ChaCha8Rng, parent: usize, tokens: u32) {
        let mut prompt = self.jobs[parent].prompt.clone();
        prompt.push(self.jobs[parent].answers[0].cut(tokens));
        let common = tokens_of(&prompt);
        prompt.push(self.draw_message(random));
        if tokens_of(&prompt) + MAX_NEW_TOKENS <= CONTEXT {
            let branch = self.draw_job(random, prompt, 1, Some((parent, common)));
            self.jobs[parent].branch = Some((tokens, branch));
        }
    }

    fn draw_message(&mut self, random: &mut ChaCha8Rng) -> Text {
        self.text(MESSAGE.tokens(random, MAX_MESSAGE), false)
    }

    fn draw_job(
        &mut self,
        random: &mut ChaCha8Rng,
        prompt: Vec<Text>,
        samples: u32,
        parent: Option<(usize, u32)>,
    ) -> usize {
        let answers = (0..samples)
            .map(|_| {
                // The model does not know what was declared: a longer answer is cut.
                let len = ANSWER.tokens(random, u32::MAX);
                self.text(len.min(MAX_NEW_TOKENS), len <= MAX_NEW_TOKENS)
            })
            .collect();
        let (stop_after, leave_after, next, branch) = (None, None, None, None);
        self.jobs.push(Job { prompt, answers, stop_after, leave_after, next, branch, parent, idle: false });
        self.jobs.len() - 1
    }

    fn text(&mut self, len: u32, ends: bool) -> Text {
        self.texts += 1;
        Text { source: self.texts, len, ends }
    }
}

fn tokens_of(texts: &[Text]) -> u32 {
    texts.iter().map(|text| text.len).sum()
}

/// Resident tokens of a request, summed over the steps of its answers.
fn token_steps(job: &Job) -> f64 {
    let of = |answer: u32| f64::from(answer) * (f64::from(job.prompt_len()) + f64::from(answer) / 2.0);
    (0..job.answers.len()).map(|sample| of(job.answer_len(sample))).sum()
}
