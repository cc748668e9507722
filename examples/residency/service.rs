//! The chats and their scheduler: what a program with a window does between its frames. Nothing here draws, and nothing
//! knows a device.
//!
//! A step is planned by [`Service::plan`], recorded and submitted by what draws the frame, and comes back through
//! [`Service::choose`] and [`Service::commit`], in a later frame. In between, users may do anything.

use std::sync::Arc;

use example_engine::{
    chat::ChatFormat,
    config::Config,
    error::LoadError,
    sample::{SampleKey, Sampler},
    tokenizer::Tokenizer,
};
use paged_kv::{
    FinishReason, Request, RowResult, Schedule, Scheduler, SequenceId, StepEvent, StepPlan, TokenId,
    TransferReport, WaitReason,
};

use crate::{
    chat::{Chat, News, Phase, Role, Segment, letter},
    history::History,
    marks::Marks,
    pace::Pace,
    palette::NUM_OWNERS,
    script::{Action, Script},
    settings::Settings,
    snapshot::Snapshot,
};

/// How the model reads and writes.
#[derive(Clone)]
pub(crate) struct Language {
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) format: ChatFormat,
}

impl Language {
    /// The tokens with which a chat begins.
    fn first_turn(&self, system: &str, words: &str) -> Result<Vec<TokenId>, LoadError> {
        let text = match &self.format {
            ChatFormat::ChatMl { .. } => {
                ChatFormat::ChatMl { system: Some(system.to_owned()) }.first_turn(words)
            }
            ChatFormat::Plain => format!("{system} {words}"),
        };
        self.tokenizer.encode(&text, true)
    }

    fn next_turn(&self, words: &str, answer_ended: bool) -> Result<Vec<TokenId>, LoadError> {
        let text = match &self.format {
            ChatFormat::ChatMl { .. } => self.format.next_turn(words, answer_ended),
            ChatFormat::Plain => format!(" {words}"),
        };
        self.tokenizer.encode(&text, false)
    }
}

/// The chats, in slots that are told apart by colour and letter.
pub(crate) struct Service {
    scheduler: Scheduler,
    language: Language,
    sampler: Sampler,
    script: Script,
    chats: [Option<Chat>; NUM_OWNERS],
    next_stream: u32,
    results: Vec<RowResult>,
    pub(crate) pace: Pace,
    step_work_budget: u64,
    pub(crate) marks: Marks,
    pub(crate) history: History,
    /// Why nothing is computed although something waits.
    pub(crate) waiting: Option<WaitReason>,
    pub(crate) is_idle: bool,
}

impl Service {
    /// No chats yet, and an empty pool.
    ///
    /// # Errors
    /// What is wrong with the settings, in the library's words.
    pub(crate) fn new(
        settings: &Settings,
        config: &Config,
        language: Language,
        script: Script,
    ) -> Result<Self, String> {
        let cache = settings.cache(config).map_err(in_words)?;
        let scheduler = settings.scheduler();
        Ok(Self {
            pace: Pace::START,
            step_work_budget: scheduler.step_work_budget,
            scheduler: Scheduler::new(scheduler, cache).map_err(in_words)?,
            language,
            sampler: Sampler { temperature: 0.7, seed: 11 },
            script,
            chats: Default::default(),
            next_stream: 0,
            results: Vec::new(),
            marks: Marks::default(),
            history: History::default(),
            waiting: None,
            is_idle: true,
        })
    }

    pub(crate) fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// The chats with their slots.
    pub(crate) fn chats(&self) -> impl Iterator<Item = (usize, &Chat)> {
        self.chats.iter().enumerate().filter_map(|(slot, chat)| Some((slot, chat.as_ref()?)))
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot::take(&self.scheduler, self.chats().map(|(slot, chat)| (slot, chat.sequence())))
    }

    // Steps.

    /// The next step, if anything can be computed.
    pub(crate) fn plan(&mut self, reports: &[TransferReport], now: f64) -> Option<StepPlan> {
        self.scheduler.complete_transfers(reports);
        (self.waiting, self.is_idle) = (None, false);
        let schedule = self.scheduler.schedule();
        // The step of a chat that was closed may have been dropped.
        (0..NUM_OWNERS).for_each(|slot| self.clear_if_gone(slot));
        match schedule {
            Schedule::Step(plan) => {
                self.marks.note(&plan, now);
                self.results.clear();
                self.results.resize(plan.logit_rows().len(), RowResult::Invalid);
                return Some(plan);
            }
            Schedule::Waiting(reason) => self.waiting = Some(reason),
            Schedule::Idle => self.is_idle = true,
        }
        None
    }

    /// Chooses a token from the logits of one of the plan's logit rows.
    pub(crate) fn choose(&mut self, plan: &StepPlan, entry: usize, logits: &[f32]) {
        let row = plan.logit_rows()[entry];
        let Some(slot) = self.slot_of(row.sequence) else { return };
        let Some(chat) = &self.chats[slot] else { return };
        let key = SampleKey { prompt: chat.stream, sample: 0, position: row.next_position };
        if let Some(token) = self.sampler.choose(logits, key) {
            self.results[entry] = RowResult::Token(token);
        }
    }

    /// Takes what was chosen.
    ///
    /// # Errors
    /// A broken invariant, in the library's words.
    pub(crate) fn commit(&mut self, plan: StepPlan) -> Result<(), String> {
        let results = std::mem::take(&mut self.results);
        let invalid = self.invalid_tokens(&plan, &results);
        // Copied, since they borrow the scheduler: what follows from an event may be an `add` or an `extend`.
        let events = self.scheduler.commit(plan, &results).map_err(in_words)?.to_vec();
        self.results = results;
        for (slot, tokens) in invalid {
            if let Some(chat) = self.chats[slot].as_mut().filter(|chat| chat.phase == Phase::Answering) {
                chat.phase = Phase::Invalid(tokens);
            }
        }
        events.into_iter().for_each(|event| self.take(event));
        for slot in 0..NUM_OWNERS {
            self.clear_if_gone(slot);
        }
        self.history.push(self.snapshot().usage());
        Ok(())
    }

    /// The tokens of chats whose logits were no numbers. The scheduler forgets such a sequence with all that it computed.
    fn invalid_tokens(&self, plan: &StepPlan, results: &[RowResult]) -> Vec<(usize, Vec<TokenId>)> {
        let rows = plan.logit_rows().iter().zip(results);
        let invalid = rows.filter(|(_, result)| **result == RowResult::Invalid);
        invalid
            .filter_map(|(row, _)| {
                Some((self.slot_of(row.sequence)?, self.scheduler.tokens(row.sequence)?.to_vec()))
            })
            .collect()
    }

    /// Lets the next steps have more or fewer rows, after one of `rows` beside which frames were at most `longest_ms`
    /// apart.
    ///
    /// # Errors
    /// As [`Scheduler::set_step_budgets`], in words.
    pub(crate) fn keep_pace(&mut self, rows: u32, longest_ms: f32) -> Result<(), String> {
        self.pace.learn(rows, longest_ms);
        self.scheduler.set_step_budgets(self.pace.rows, self.step_work_budget).map_err(in_words)
    }

    fn take(&mut self, event: StepEvent) {
        let (StepEvent::Admitted { sequence, .. }
        | StepEvent::Preempted { sequence, .. }
        | StepEvent::Token { sequence, .. }
        | StepEvent::Finished { sequence, .. }) = event
        else {
            return;
        };
        let Some(slot) = self.slot_of(sequence) else { return };
        let Some(chat) = &mut self.chats[slot] else { return };
        match event {
            StepEvent::Admitted { prefix, .. } => {
                let (tokens, of) = (prefix.cached_tokens, prefix.wanted_tokens);
                chat.news = (tokens > 0).then_some(News::Found { tokens, of }).or(chat.news);
            }
            StepEvent::Preempted { how, .. } => chat.news = Some(News::Preempted(how)),
            StepEvent::Token { token, .. } => {
                let tokenizer = &self.language.tokenizer;
                if !tokenizer.end_tokens().contains(&token) {
                    chat.speak(tokenizer.bytes_of(token));
                }
            }
            StepEvent::Finished { reason, .. } if chat.phase == Phase::Answering => {
                chat.phase = Phase::Ended(reason);
            }
            _ => {}
        }
    }

    fn slot_of(&self, sequence: SequenceId) -> Option<usize> {
        self.chats().find(|(_, chat)| chat.sequence() == sequence).map(|(slot, _)| slot)
    }

    /// A chat that was closed keeps its slot until its blocks are given up.
    fn clear_if_gone(&mut self, slot: usize) {
        let gone =
            |chat: &Chat| chat.phase == Phase::Closing && self.scheduler.status(chat.sequence()).is_none();
        if self.chats[slot].as_ref().is_some_and(gone) {
            self.chats[slot] = None;
        }
    }

    // What users do.

    /// Does what a script or a user says; what is wrong with it comes back in words.
    pub(crate) fn act(&mut self, action: &Action) -> Result<(), String> {
        match *action {
            Action::Ask(words) => self.ask(words),
            Action::Say(slot, words) => self.say(slot, words),
            Action::Branch(slot) => self.branch(slot),
            Action::Stop(slot) => {
                self.stop(slot);
                Ok(())
            }
            Action::Continue(slot) => self.go_on(slot, &[]),
            Action::Close(slot) => {
                self.close(slot);
                Ok(())
            }
        }
    }

    /// Begins a chat.
    pub(crate) fn ask(&mut self, words: &str) -> Result<(), String> {
        let slot = self.free_slot()?;
        let tokens = self.language.first_turn(self.script.system, words).map_err(in_words)?;
        let request = self.scheduler.add(self.request(tokens)).map_err(in_words)?;
        let system = Segment { role: Role::System, text: self.script.system.to_owned() };
        let user = Segment { role: Role::User, text: words.to_owned() };
        self.chats[slot] = Some(Chat::new(request, self.new_stream(), vec![system, user]));
        Ok(())
    }

    /// Says something more in a chat whose answer has ended.
    pub(crate) fn say(&mut self, slot: usize, words: &str) -> Result<(), String> {
        let Some(chat) = &self.chats[slot] else { return Err(no_chat(slot)) };
        let ended = chat.phase == Phase::Ended(FinishReason::Stop);
        let tokens = self.language.next_turn(words, ended).map_err(in_words)?;
        self.go_on(slot, &tokens)?;
        if let Some(chat) = &mut self.chats[slot] {
            chat.hear(words);
        }
        Ok(())
    }

    /// A chat goes on with `tokens` appended: from its kept sequence, or, where it was stopped or became invalid, from all
    /// its tokens. Of a stopped one the prefix cache may still have blocks.
    fn go_on(&mut self, slot: usize, tokens: &[TokenId]) -> Result<(), String> {
        let Some(chat) = &self.chats[slot] else { return Err(no_chat(slot)) };
        let request = match &chat.phase {
            Phase::Stopped(before) | Phase::Invalid(before) => {
                let all = [before, tokens].concat();
                self.scheduler.add(self.request(all)).map_err(in_words)?
            }
            _ => {
                let request = chat.request;
                self.scheduler.extend(request, self.request(tokens.to_vec())).map_err(in_words)?;
                request
            }
        };
        if let Some(chat) = &mut self.chats[slot] {
            (chat.request, chat.phase) = (request, Phase::Answering);
        }
        Ok(())
    }

    /// Another chat that shares all of this one so far, and chooses otherwise from here on.
    pub(crate) fn branch(&mut self, slot: usize) -> Result<(), String> {
        let free = self.free_slot()?;
        let Some(chat) = &self.chats[slot] else { return Err(no_chat(slot)) };
        let request = match &chat.phase {
            Phase::Stopped(tokens) | Phase::Invalid(tokens) => {
                self.scheduler.add(self.request(tokens.clone()))
            }
            _ => {
                let len = self.scheduler.tokens(chat.sequence()).map_or(0, <[TokenId]>::len);
                self.scheduler.fork(chat.sequence(), len, self.request(Vec::new()))
            }
        };
        let branch = chat.branch(request.map_err(in_words)?, self.next_stream, slot);
        self.new_stream();
        self.chats[free] = Some(branch);
        Ok(())
    }

    /// Stops an answer. Its blocks are given up; the prefix cache keeps the full ones while no other chat needs them.
    pub(crate) fn stop(&mut self, slot: usize) {
        let Some(chat) = &mut self.chats[slot] else { return };
        if let (Phase::Answering, Some(tokens)) = (&chat.phase, self.scheduler.tokens(chat.sequence())) {
            chat.phase = Phase::Stopped(tokens.to_vec());
            self.scheduler.abort(chat.request).expect("a request of this scheduler");
        }
    }

    /// Ends a chat for good.
    pub(crate) fn close(&mut self, slot: usize) {
        if let Some(chat) = &mut self.chats[slot] {
            chat.phase = Phase::Closing;
            self.scheduler.abort(chat.request).expect("a request of this scheduler");
            self.clear_if_gone(slot);
        }
    }

    fn request(&self, tokens: Vec<TokenId>) -> Request {
        Request::new(tokens)
            .max_new_tokens(self.script.max_new_tokens)
            .stop_tokens(self.language.tokenizer.end_tokens())
            .keep(true)
    }

    fn free_slot(&self) -> Result<usize, String> {
        let taken = || format!("there are {NUM_OWNERS} chats already: close one");
        self.chats.iter().position(Option::is_none).ok_or_else(taken)
    }

    fn new_stream(&mut self) -> u32 {
        self.next_stream += 1;
        self.next_stream - 1
    }
}

/// An error for people to read.
pub(crate) fn in_words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn no_chat(slot: usize) -> String {
    format!("there is no chat {}", letter(slot))
}
