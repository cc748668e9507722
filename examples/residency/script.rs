//! What happens by itself, so that the first launch shows life: chats behind one system prompt, a branch, and a pool that
//! is too small for all of them.

/// One thing that a user might do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// A new chat begins with these words.
    Ask(&'static str),
    /// The chat in this slot is told something more.
    Say(usize, &'static str),
    /// The chat in this slot is branched off where it is.
    Branch(usize),
    Stop(usize),
    /// It goes on where it stopped or ended.
    Continue(usize),
    Close(usize),
}

/// A system prompt, and what is done after how many steps. Nothing is waited for when nothing is left to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Script {
    pub(crate) system: &'static str,
    /// Most tokens of an answer.
    pub(crate) max_new_tokens: u32,
    /// Blocks of the default size in which it gets crowded.
    pub(crate) num_blocks: u32,
    cues: &'static [(u64, Action)],
}

/// For the toy model, which goes on from any text in the language of the one book that it has read.
pub(crate) const TOY: Script = Script {
    system: "And it came to pass in those days, that the king made a covenant with the people of the land, and they \
             went up together unto the house of the LORD, with the priests and the elders, to hear the words of the \
             book.",
    max_new_tokens: 224,
    num_blocks: 72,
    cues: &[
        (0, Action::Ask("And the king said unto the people,")),
        (0, Action::Ask("And the prophet answered,")),
        (24, Action::Ask("Then the woman spake,")),
        (48, Action::Ask("Blessed are")),
        (100, Action::Branch(0)),
        (190, Action::Ask("In the beginning")),
        (300, Action::Stop(1)),
        (360, Action::Continue(1)),
        (460, Action::Branch(3)),
        (560, Action::Say(0, "Now therefore hear the word of the LORD,")),
        (640, Action::Close(2)),
        (700, Action::Ask("And the angel of the LORD said,")),
        (900, Action::Close(1)),
        (960, Action::Branch(0)),
    ],
};

/// For a model that holds conversations.
pub(crate) const CHAT: Script = Script {
    system: "You are a helpful assistant in a desktop application. Answer in a few plain sentences. Say what you know, \
             and say so when you do not know something. Do not use lists or headings, and do not repeat the question. \
             If you are asked for a story, make it short and give it an ending. If you are asked for facts, name the \
             most important one first.",
    max_new_tokens: 160,
    num_blocks: 56,
    cues: &[
        (0, Action::Ask("Why is the sky blue?")),
        (0, Action::Ask("Tell me a story about a lighthouse.")),
        (12, Action::Ask("What is the capital of France?")),
        (24, Action::Ask("How do bees find their way home?")),
        (50, Action::Branch(1)),
        (90, Action::Ask("What should I cook tonight?")),
        (120, Action::Stop(0)),
        (150, Action::Continue(0)),
        (200, Action::Say(2, "And of Italy?")),
        (240, Action::Branch(3)),
        (300, Action::Close(1)),
    ],
};

/// A script and how far it has been played.
#[derive(Clone, Debug)]
pub(crate) struct Player {
    script: Script,
    next: usize,
}

impl Player {
    pub(crate) fn new(script: Script) -> Self {
        Self { script, next: 0 }
    }

    /// The next action, if it is its turn after `steps` steps, or if there is nothing else to do.
    pub(crate) fn due(&mut self, steps: u64, is_idle: bool) -> Option<Action> {
        let &(step, action) = self.script.cues.get(self.next)?;
        if steps < step && !is_idle {
            return None;
        }
        self.next += 1;
        Some(action)
    }

    /// Nothing more is played.
    pub(crate) fn end(&mut self) {
        self.next = self.script.cues.len();
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.next == self.script.cues.len()
    }

    pub(crate) fn script(&self) -> &Script {
        &self.script
    }
}
