//! One chat: its words, and where its sequence stands.

use example_engine::tokenizer::TextStream;
use paged_kv::{FinishReason, Preemption, RequestId, SequenceId, TokenId};

/// Whose words they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    System,
    User,
    Model,
}

/// Some words of one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) role: Role,
    pub(crate) text: String,
}

/// What the chat is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It waits or runs.
    Answering,
    /// Its answer has ended, and its sequence is kept.
    Ended(FinishReason),
    /// It was stopped: these are its tokens, its blocks are given up.
    Stopped(Vec<TokenId>),
    /// What the model computed for it were no numbers. These are its tokens, all of which are computed again if it goes on.
    Invalid(Vec<TokenId>),
    /// It is to vanish, as soon as no step needs it.
    Closing,
}

/// What last happened to a chat's memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum News {
    /// It was let in; so many of the tokens looked for were found.
    Found { tokens: u32, of: u32 },
    /// Its blocks were taken.
    Preempted(Preemption),
    /// It shares the beginning of the chat in this slot.
    BranchOf(usize),
}

/// A chat in one of the slots.
#[derive(Clone, Debug)]
pub(crate) struct Chat {
    pub(crate) request: RequestId,
    /// Selects its random choices: a branch chooses otherwise than its origin.
    pub(crate) stream: u32,
    pub(crate) phase: Phase,
    pub(crate) news: Option<News>,
    pub(crate) segments: Vec<Segment>,
    pending: TextStream,
}

impl Chat {
    pub(crate) fn new(request: RequestId, stream: u32, segments: Vec<Segment>) -> Self {
        Self {
            request,
            stream,
            phase: Phase::Answering,
            news: None,
            segments,
            pending: TextStream::default(),
        }
    }

    /// The same words under another request.
    pub(crate) fn branch(&self, request: RequestId, stream: u32, slot: usize) -> Self {
        let news = Some(News::BranchOf(slot));
        Self { request, stream, phase: Phase::Answering, news, ..self.clone() }
    }

    pub(crate) fn sequence(&self) -> SequenceId {
        self.request.into()
    }

    pub(crate) fn hear(&mut self, words: &str) {
        self.end_text();
        self.segments.push(Segment { role: Role::User, text: words.to_owned() });
    }

    /// The model says a token's bytes.
    pub(crate) fn speak(&mut self, bytes: &[u8]) {
        let text = self.pending.push(bytes);
        match self.segments.last_mut() {
            Some(Segment { role: Role::Model, text: spoken }) => spoken.push_str(&text),
            _ => self.segments.push(Segment { role: Role::Model, text }),
        }
    }

    fn end_text(&mut self) {
        let rest = std::mem::take(&mut self.pending).finish();
        if let Some(Segment { role: Role::Model, text }) = self.segments.last_mut() {
            text.push_str(&rest);
        }
    }
}

/// What a slot is called.
pub(crate) fn letter(slot: usize) -> char {
    (b'A' + slot as u8) as char
}
