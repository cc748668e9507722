//! What has happened and not been told yet. Events are told by the commit that follows them, in their order, and each once.
//!
//! It knows nothing of what they mean, with one exception: that a sequence was let in by a step which was dropped is taken
//! back.

use crate::ids::SequenceId;
use crate::schedule::request::StepEvent;

/// The events of the next commit, and before them those that the last one has told.
#[derive(Debug, Default)]
pub(super) struct Events {
    list: Vec<StepEvent>,
    /// Of these, how many the last commit has told.
    num_told: usize,
}

impl Events {
    pub(super) fn push(&mut self, event: StepEvent) {
        self.list.push(event);
    }

    /// Takes back that a sequence was let in, if that has not been told.
    pub(super) fn take_back_admission(&mut self, id: SequenceId) {
        self.list.drain(..std::mem::take(&mut self.num_told));
        let is_it =
            |event: &StepEvent| matches!(event, StepEvent::Admitted { sequence, .. } if *sequence == id);
        self.list.retain(|event| !is_it(event));
    }

    /// Ends a commit, which tells them; what the last one has told is not told again.
    pub(super) fn tell(&mut self) -> &[StepEvent] {
        self.list.drain(..self.num_told);
        self.num_told = self.list.len();
        &self.list
    }
}
