//! A loaded model that generates: many sequences at once, through one pool of blocks.
//!
//! An [`Engine`] holds the weights and is made once per device. A [`Session`] is one pool with its scheduler; it
//! takes prompts, runs steps, and reports tokens as they are chosen. [`Engine::run`] is a session from prompts to
//! outcomes, in one call.

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use paged_kv::{
    CacheConfig, FinishReason, Preemption, PreemptionMode, PreemptionReason, Priority, Rates, Request,
    RequestId, RowResult, Scheduler, SchedulerConfig, SchedulerStats, SequenceId, StepEvent, StepPlan,
    TokenId,
};

use crate::{
    config::Config,
    cpu::CpuModel,
    error::RunError,
    gguf::GgufFile,
    gpu::{Gpu, GpuModel},
    pool::Pool,
    sample::{SampleKey, Sampler, TopLogits},
};

/// A model on a device.
#[derive(Debug)]
pub struct Engine {
    model: Model,
}

#[derive(Debug)]
enum Model {
    Gpu(Box<GpuModel>),
    Cpu(Box<CpuModel>),
}

/// How a session schedules, caches and chooses.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// The pool.
    pub cache: CacheConfig,
    /// Budgets and admission.
    pub scheduler: SchedulerConfig,
    /// How tokens are chosen.
    pub sampler: Sampler,
    /// How many of the largest logits to report with every token; 0 for none.
    pub top_logits: usize,
    /// How fast the machine is, for [`PreemptionMode::Auto`]; measured where it is not given.
    pub rates: Option<Rates>,
}

/// One prompt and what to make of it.
#[derive(Clone, Debug, Default)]
pub struct Prompt {
    /// Its index, which names it in events and selects its samples' random streams.
    pub index: u32,
    /// Its tokens.
    pub tokens: Vec<TokenId>,
    /// Most tokens to generate for each sample.
    pub max_new_tokens: u32,
    /// Samples of this prompt, at least 1.
    pub samples: u32,
    /// Number of the first sample: one that runs alone keeps the random stream that it has among others.
    pub first_sample: u32,
    /// Tokens that end a sample.
    pub stop_tokens: Vec<TokenId>,
    /// Tokens that are taken in place of the first ones chosen (teacher forcing).
    pub forced_tokens: Vec<TokenId>,
    /// Whether the sequence is kept when it ends, for [`Session::extend`].
    pub keep: bool,
    /// Who goes first.
    pub priority: Priority,
}

impl Prompt {
    /// What a scheduler needs to know of it.
    pub fn request(&self) -> Request {
        Request::new(self.tokens.clone())
            .max_new_tokens(self.max_new_tokens)
            .samples(self.samples)
            .stop_tokens(&self.stop_tokens)
            .keep(self.keep)
            .priority(self.priority)
    }
}

/// What happened to one sample in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It has a new token.
    Token {
        /// Index of the prompt.
        prompt: u32,
        /// Index of the sample.
        sample: u32,
        /// The token.
        token: TokenId,
        /// The logits that it was chosen from, if they were asked for.
        top_logits: Option<TopLogits>,
    },
    /// Its blocks were taken. It goes on when there is room again.
    Preempted {
        /// Index of the prompt.
        prompt: u32,
        /// Index of the sample.
        sample: u32,
        /// How.
        how: Preemption,
        /// Why so.
        why: PreemptionReason,
    },
    /// It ended.
    Finished {
        /// Index of the prompt.
        prompt: u32,
        /// Index of the sample.
        sample: u32,
        /// Why.
        reason: FinishReason,
        /// How often it was preempted.
        preemptions: u32,
    },
}

impl Event {
    /// The prompt and the sample that it is about.
    pub fn subject(&self) -> (u32, u32) {
        let (Self::Token { prompt, sample, .. }
        | Self::Preempted { prompt, sample, .. }
        | Self::Finished { prompt, sample, .. }) = self;
        (*prompt, *sample)
    }
}

/// One finished sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Index of the prompt.
    pub prompt: u32,
    /// Index of the sample.
    pub sample: u32,
    /// The tokens generated, a stop token included.
    pub tokens: Vec<TokenId>,
    /// For every token the logits that it was chosen from, if they were asked for.
    pub top_logits: Vec<TopLogits>,
    /// Why it ended.
    pub reason: FinishReason,
    /// How often it was preempted.
    pub preemptions: u32,
}

/// Counters of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SessionStats {
    /// The scheduler's and the pool's.
    pub scheduler: SchedulerStats,
    /// Bytes moved to the host pool and back.
    pub swap_bytes: u64,
    /// Time spent in steps.
    pub elapsed: Duration,
    /// Part of it that attention took on the device, writing keys and values included; none where the device has no
    /// timestamps.
    pub attention: Option<Duration>,
}

impl SessionStats {
    /// Tokens generated per second of steps.
    pub fn tokens_per_s(&self) -> f64 {
        self.scheduler.generated_tokens as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Share of the steps' time that attention took, where it is known.
    pub fn attention_share(&self) -> Option<f64> {
        Some(self.attention?.as_secs_f64() / self.elapsed.as_secs_f64().max(1e-9))
    }
}

impl Engine {
    /// Loads `file` onto `gpu`, or into host memory without one. `progress` is called with the bytes loaded so far,
    /// of [`GgufFile::tensor_bytes`].
    ///
    /// # Errors
    /// [`RunError::Load`] for a file that is no such model, otherwise what the device lacks.
    pub fn load(
        file: &mut GgufFile,
        gpu: Option<Gpu>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, RunError> {
        let config = Config::read(file)?;
        let model = match gpu {
            Some(gpu) => Model::Gpu(Box::new(GpuModel::load(gpu, file, config, progress)?)),
            None => Model::Cpu(Box::new(CpuModel::load(file, config, progress)?)),
        };
        Ok(Self { model })
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        match &self.model {
            Model::Gpu(model) => model.config(),
            Model::Cpu(model) => model.config(),
        }
    }

    /// An empty pool for plans of up to `rows` rows, `logit_rows` of which need logits.
    ///
    /// # Errors
    /// What the device lacks.
    pub fn pool(&mut self, cache: CacheConfig, rows: u32, logit_rows: u32) -> Result<Pool<'_>, RunError> {
        check_host_pool(&cache)?;
        match &mut self.model {
            Model::Gpu(model) => Pool::on_gpu(model, cache, rows, logit_rows),
            Model::Cpu(model) => Pool::on_cpu(model, cache),
        }
    }

    /// A session over an empty pool. Its options' `step_tokens` and `max_running` size the activations.
    ///
    /// # Errors
    /// [`RunError::Config`] for options that contradict each other, otherwise what the device lacks.
    pub fn session(&mut self, options: SessionOptions) -> Result<Session<'_>, RunError> {
        let mut scheduler = Scheduler::new(options.scheduler, options.cache.clone())?;
        let rows = options.scheduler.step_tokens;
        let max_running = options.scheduler.max_running.unwrap_or(options.cache.max_sequences());
        let mut pool = self.pool(options.cache.clone(), rows, rows.min(max_running))?;
        let mut measured = None;
        if options.rates.is_none() && options.scheduler.preemption == PreemptionMode::Auto {
            let swap_bytes_per_s = pool.measure_swap()?;
            measured = Some(Measured { swap_bytes_per_s, prefill_tokens: 0.0, prefill_s: 0.0 });
        }
        if let Some(rates) = options.rates {
            scheduler.set_rates(rates);
        }
        Ok(Session {
            pool,
            scheduler,
            measured,
            options,
            requests: HashMap::new(),
            results: Vec::new(),
            tops: Vec::new(),
            elapsed: Duration::ZERO,
        })
    }

    /// Runs `prompts` to their ends in a session of their own; see [`Session::run`].
    ///
    /// # Errors
    /// As [`session`](Self::session) and [`Session::run`].
    pub fn run(
        &mut self,
        prompts: &[Prompt],
        options: SessionOptions,
    ) -> Result<(Vec<Outcome>, SessionStats), RunError> {
        let mut session = self.session(options)?;
        let outcomes = session.run(prompts, |_, _| ())?;
        Ok((outcomes, session.stats()))
    }
}

impl Outcome {
    /// A sample that has no token yet.
    pub fn new(prompt: u32, sample: u32) -> Self {
        let (tokens, top_logits, reason) = (Vec::new(), Vec::new(), FinishReason::Aborted);
        Self { prompt, sample, tokens, top_logits, reason, preemptions: 0 }
    }

    /// Adds what an event of this sample says.
    pub fn take(&mut self, event: &Event) {
        match event {
            Event::Token { token, top_logits, .. } => {
                self.tokens.push(*token);
                self.top_logits.extend(top_logits.clone());
            }
            Event::Preempted { .. } => {}
            &Event::Finished { reason, preemptions, .. } => {
                self.reason = reason;
                self.preemptions = preemptions;
            }
        }
    }
}

/// One pool, its scheduler, and the prompts in it.
pub struct Session<'a> {
    pool: Pool<'a>,
    scheduler: Scheduler,
    measured: Option<Measured>,
    options: SessionOptions,
    requests: HashMap<RequestId, RequestState>,
    results: Vec<RowResult>,
    tops: Vec<(SequenceId, TopLogits)>,
    elapsed: Duration,
}

/// How fast the machine is, as far as the session has seen it.
struct Measured {
    swap_bytes_per_s: f64,
    /// Tokens of steps that mostly read prompts, and their seconds; each such step halves the weight of those before it.
    prefill_tokens: f64,
    prefill_s: f64,
}

impl Measured {
    /// Takes a step into account. One in which decoding sequences have most of the rows says little about prompts.
    fn add(&mut self, plan_rows: u32, plan_sequences: u32, took: Duration) {
        if plan_rows >= 2 * plan_sequences {
            self.prefill_tokens = self.prefill_tokens / 2.0 + f64::from(plan_rows);
            self.prefill_s = self.prefill_s / 2.0 + took.as_secs_f64();
        }
    }

    fn rates(&self) -> Rates {
        Rates {
            swap_bytes_per_s: self.swap_bytes_per_s,
            prefill_tokens_per_s: self.prefill_tokens / self.prefill_s.max(1e-9),
        }
    }
}

/// What the session remembers of a request.
struct RequestState {
    prompt: u32,
    first_sample: u32,
    input_len: u32,
    forced_tokens: Vec<TokenId>,
}

impl Session<'_> {
    /// Runs `prompts` to their ends. `on_event` sees every token as it is chosen, with the outcome so far of the sample
    /// that it belongs to. The outcomes come by prompt and sample.
    ///
    /// # Errors
    /// As [`add`](Self::add) and [`step`](Self::step).
    pub fn run(
        &mut self,
        prompts: &[Prompt],
        mut on_event: impl FnMut(&Event, &Outcome),
    ) -> Result<Vec<Outcome>, RunError> {
        for prompt in prompts {
            self.add(prompt)?;
        }
        let mut outcomes = BTreeMap::new();
        let mut events = Vec::new();
        while self.step(&mut events)? {
            for event in events.drain(..) {
                let (prompt, sample) = event.subject();
                let outcome =
                    outcomes.entry((prompt, sample)).or_insert_with(|| Outcome::new(prompt, sample));
                outcome.take(&event);
                on_event(&event, outcome);
            }
        }
        Ok(outcomes.into_values().collect())
    }

    /// Adds a prompt; its sequences are `id.sample(0..samples)`.
    ///
    /// # Errors
    /// [`RunError::Request`] if it can never fit.
    pub fn add(&mut self, prompt: &Prompt) -> Result<RequestId, RunError> {
        let id = self.scheduler.add(prompt.request())?;
        self.remember(id, prompt, prompt.tokens.len());
        Ok(id)
    }

    /// Goes on with a sequence that was kept: the prompt's tokens are appended to it.
    ///
    /// # Errors
    /// [`RunError::Request`] if the sequence is not kept, or would become too long.
    pub fn extend(&mut self, sequence: SequenceId, prompt: &Prompt) -> Result<(), RunError> {
        let before = self.scheduler.tokens(sequence).map_or(0, <[TokenId]>::len);
        self.scheduler.extend(sequence, prompt.request())?;
        self.remember(sequence.request(), prompt, before + prompt.tokens.len());
        Ok(())
    }

    fn remember(&mut self, id: RequestId, prompt: &Prompt, input_len: usize) {
        let state = RequestState {
            prompt: prompt.index,
            first_sample: prompt.first_sample,
            input_len: input_len as u32,
            forced_tokens: prompt.forced_tokens.clone(),
        };
        self.requests.insert(id, state);
    }

    /// Runs one step and appends what happened to `events`. Returns false when nothing is left to do.
    ///
    /// It waits for the device: for the step's logits, and where nothing can be computed before blocks have arrived in
    /// the host pool, for those.
    ///
    /// # Errors
    /// A device's failure; [`RunError::Stuck`] if requests wait for what will never come.
    pub fn step(&mut self, events: &mut Vec<Event>) -> Result<bool, RunError> {
        let start = Instant::now();
        let Some(plan) = self.pool.next_step(&mut self.scheduler)? else { return Ok(false) };
        self.compute(&plan)?;
        if let Some(measured) = &mut self.measured {
            measured.add(plan.num_rows(), plan.num_sequences(), start.elapsed());
            self.scheduler.set_rates(measured.rates());
        }
        for event in self.scheduler.commit(plan, &self.results)? {
            events.extend(translate(event, &self.requests, &mut self.tops));
        }
        self.elapsed += start.elapsed();
        Ok(true)
    }

    /// Goes on after the device was lost ([`step`](Self::step) has failed): loads the model anew, onto `gpu`. No tokens
    /// are lost, nor what is in the host pool; the rest is computed again.
    ///
    /// # Errors
    /// As [`Engine::load`], or what the device lacks; it may be tried again then, with another device.
    pub fn rebuild(&mut self, file: &mut GgufFile, gpu: Gpu) -> Result<(), RunError> {
        let rebuilt = self.pool.rebuild(file, gpu);
        self.scheduler.complete_transfers(&self.pool.poll_transfers());
        self.scheduler.forget_device();
        rebuilt
    }

    /// Runs the plan and chooses a token for each of its logit rows.
    fn compute(&mut self, plan: &StepPlan) -> Result<(), RunError> {
        let Self { options, requests, results, tops, .. } = self;
        results.clear();
        results.resize(plan.logit_rows().len(), RowResult::Invalid);
        tops.clear();
        let take = |entry: usize, logits: &[f32]| {
            let row = &plan.logit_rows()[entry];
            let Some(request) = requests.get(&row.sequence.request()) else { return };
            let key = SampleKey {
                prompt: request.prompt,
                sample: request.first_sample + row.sequence.sample(),
                position: row.next_position,
            };
            let generated = row.next_position.saturating_sub(request.input_len) as usize;
            let chosen = options.sampler.choose(logits, key);
            if let Some(token) = chosen {
                let token = request.forced_tokens.get(generated).copied().unwrap_or(token);
                results[entry] = RowResult::Token(token);
            }
            if options.top_logits > 0 {
                tops.push((row.sequence, TopLogits::of(logits, options.top_logits)));
            }
        };
        self.pool.step(plan, take)
    }

    /// Counters so far.
    pub fn stats(&self) -> SessionStats {
        let scheduler = self.scheduler.stats();
        let blocks = scheduler.cache.blocks_swapped_out + scheduler.cache.blocks_swapped_in;
        let swap_bytes = blocks * self.options.cache.bytes_per_block();
        let attention = self.pool.attention_time();
        SessionStats { scheduler, swap_bytes, elapsed: self.elapsed, attention }
    }

    /// The scheduler, for what a session does not offer.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }
}

impl std::fmt::Debug for Session<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Session").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Whether there is memory for all of the host pool. It is taken as blocks are moved there, where failure would end the
/// program or lose what was computed; so it is asked for before anything is made.
///
/// # Errors
/// [`RunError::HostPoolExceedsMemory`].
pub fn check_host_pool(cache: &CacheConfig) -> Result<(), RunError> {
    let bytes = cache.host_bytes();
    let fits = usize::try_from(bytes).is_ok_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
    if fits { Ok(()) } else { Err(RunError::HostPoolExceedsMemory { bytes }) }
}

/// The scheduler's event in terms of prompts; it takes the logits that belong to a token out of `tops`.
fn translate(
    event: &StepEvent,
    requests: &HashMap<RequestId, RequestState>,
    tops: &mut Vec<(SequenceId, TopLogits)>,
) -> Option<Event> {
    let prompt_of = |sequence: SequenceId| requests.get(&sequence.request()).map(|request| request.prompt);
    match *event {
        StepEvent::Token { sequence, token } => {
            let place = tops.iter().position(|(owner, _)| *owner == sequence);
            let top_logits = place.map(|place| tops.swap_remove(place).1);
            Some(Event::Token { prompt: prompt_of(sequence)?, sample: sequence.sample(), token, top_logits })
        }
        StepEvent::Preempted { sequence, how, why } => {
            Some(Event::Preempted { prompt: prompt_of(sequence)?, sample: sequence.sample(), how, why })
        }
        StepEvent::Finished { sequence, reason, preemptions } => Some(Event::Finished {
            prompt: prompt_of(sequence)?,
            sample: sequence.sample(),
            reason,
            preemptions,
        }),
        _ => None,
    }
}
