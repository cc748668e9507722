//! What has happened and not been told yet. Events are told by the commit that follows them, in their order, and each once.
//!
//! It knows nothing of what they mean, with one exception: that a sequence was let in by a step which was dropped is taken
//! back.

use crate::ids::SequenceId;
use crate::schedule::request::StepEvent;

/// The events of the next commit; after a commit, those that it has told, until something new happens.
#[derive(Debug, Default)]
pub(super) struct Events {
    list: Vec<StepEvent>,
    are_told: bool,
}

impl Events {
    pub(super) fn push(&mut self, event: StepEvent) {
        self.forget_told();
        self.list.push(event);
    }

    /// Takes back that a sequence was let in, if that has not been told.
    pub(super) fn take_back_admission(&mut self, id: SequenceId) {
        self.forget_told();
        let is_it =
            |event: &StepEvent| matches!(event, StepEvent::Admitted { sequence, .. } if *sequence == id);
        self.list.retain(|event| !is_it(event));
    }

    /// Ends a commit, which tells them; what the last one has told is not told again.
    pub(super) fn tell(&mut self) -> &[StepEvent] {
        self.forget_told();
        self.are_told = true;
        &self.list
    }

    fn forget_told(&mut self) {
        if std::mem::take(&mut self.are_told) {
            self.list.clear();
        }
    }
}
