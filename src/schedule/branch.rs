//! Branches: requests that begin with another sequence's tokens, and share its blocks.

use crate::error::RequestError;
use crate::ids::{RequestId, SequenceId};
use crate::schedule::request::{Admission, Request};
use crate::schedule::scheduler::{Index, Scheduler};

impl Scheduler {
    /// A new request that begins with the first `at` tokens of `parent` and goes on with the request's tokens. Blocks
    /// that hold the common part are shared, as far as they are computed; nothing is copied until one of the two writes
    /// into a shared block.
    ///
    /// # Errors
    /// [`RequestError::Unknown`], [`RequestError::BeyondLength`] when `at` exceeds the parent's tokens, the errors of
    /// [`add`](Self::add), and under guaranteed admission [`RequestError::PromiseExceeded`] where the request does not say
    /// that it [may wait](Request::may_wait). Nothing has changed then. A branch that waits shares what the prefix cache
    /// has of it when it is let in.
    pub fn fork(
        &mut self,
        parent: impl Into<SequenceId>,
        at: usize,
        request: Request,
    ) -> Result<RequestId, RequestError> {
        self.cache.check_poison()?;
        let parent = self.find(parent.into())?;
        let source = &self.sequences[parent];
        let len = source.tokens_left().len();
        if at > len {
            return Err(RequestError::BeyondLength { tokens: at, len });
        }
        let len = at + request.tokens.len();
        if len == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        let max_tokens = self.declared_maximum(len, &request)?;
        self.check_samples(request.samples)?;
        self.check_fits(len as u32, max_tokens, request.samples)?;
        // Committed tokens only, and not all of the child's (I6).
        let shared = (at as u32).min(source.computed()).min(len as u32 - 1);
        let reaches = source.table().is_some_and(|table| self.cache.reaches(table, shared));
        let shared = if reaches { shared } else { 0 };
        let may_wait = request.may_wait;
        let (id, rank) = (self.sequences.new_request(self.cache.instance()), self.rank(request.priority));
        let (origin, named) = ((parent, at, shared), (id.sample(0), request));
        let index = self.sequences.add_branch(origin, named, max_tokens, rank);
        self.place_branch(index, parent, may_wait)?;
        Ok(id)
    }

    /// Promises a branch its blocks, puts it in line, and has it share its parent's, now or when the outstanding step ends.
    /// Where that cannot be promised it is gone, unless it `may_wait`.
    fn place_branch(&mut self, index: Index, parent: Index, may_wait: bool) -> Result<(), RequestError> {
        // From now on the sum of promises knows of the blocks to be shared.
        self.set_promised(index, self.config.admission == Admission::Guaranteed);
        self.sequences.enqueue(index, &self.cache);
        match self.share_or_go_alone(index, parent) {
            Err(RequestError::PromiseExceeded { .. }) if may_wait => self.go_alone(index),
            Err(error) => {
                self.end(index);
                return Err(error);
            }
            Ok(()) => {}
        }
        let source = &self.sequences[parent];
        if source.is_promised() {
            // Its last block is about to be shared.
            self.ledger.note_shared_tail(parent);
        }
        if !source.is_planned() {
            self.resolve_fork(index);
        }
        Ok(())
    }

    /// Promises a branch what it needs, and sets tables aside for it. Where none are left it shares nothing, and is
    /// computed alone.
    fn share_or_go_alone(&mut self, index: Index, parent: Index) -> Result<(), RequestError> {
        let guaranteed = self.config.admission == Admission::Guaranteed;
        if guaranteed {
            self.promises().check(None)?;
        }
        if self.sequences[index].fork().is_some() && !self.ensure_tables(index, Some(parent)) {
            self.sequences.take_fork(index, &self.cache);
            if guaranteed {
                self.promises().check(None)?;
            }
        }
        Ok(())
    }

    /// A branch shares nothing and is promised nothing: it waits in line like any other request.
    fn go_alone(&mut self, index: Index) {
        self.sequences.take_fork(index, &self.cache);
        self.set_promised(index, false);
        self.sequences.forget_parent(index);
    }

    /// Shares the parent's blocks with a sequence that forked while the parent's step was outstanding.
    pub(super) fn resolve_fork(&mut self, index: Index) {
        let Some(fork) = self.sequences.take_fork(index, &self.cache) else { return };
        // Without a table or with the parent gone, the sequence is computed alone.
        let max_tokens = self.sequences[index].terms.max_tokens;
        if let Ok(table) = self.cache.fork(fork.parent, fork.at, max_tokens) {
            self.set_table(index, table);
            self.sequences.share(index, fork.at);
            self.note_tail(index);
        }
    }
}
