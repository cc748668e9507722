//! The queue's door: who is let in, and when.
//!
//! First come, first served: whoever is first in line goes first or keeps the others waiting. There is one exception, for
//! progress: when nothing runs and the first one cannot be let in, whoever in line already has blocks or a promise goes.

use crate::error::RequestError;
use crate::schedule::request::Admission;
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::State;

/// What the first in line lacks: blocks needed and available, or something else than blocks.
pub(super) type Lacking = Option<(u32, u32)>;

/// A refusal that stands until blocks return.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    place: (u64, u32),
    releases: u64,
    lacking: Lacking,
}

impl Scheduler {
    /// Lets in the first in line, or whoever may go instead. Returns who, or what the first one lacks.
    pub(super) fn admit_next(&mut self) -> Result<Index, Lacking> {
        let first = self.waiting.front().copied().ok_or(None)?;
        let lacking = match self.try_admit(first) {
            Ok(()) => return Ok(first),
            Err(lacking) => lacking,
        };
        if self.running.is_empty() {
            let entitled = |&other: &Index| self.get(other).table.is_some() || self.get(other).promised;
            let others: Vec<Index> = self.waiting.iter().copied().skip(1).filter(entitled).collect();
            if let Some(other) = others.into_iter().find(|&other| self.try_admit(other).is_ok()) {
                return Ok(other);
            }
        }
        Err(lacking)
    }

    fn try_admit(&mut self, index: Index) -> Result<(), Lacking> {
        let running: u32 = self.running.iter().map(|&other| self.get(other).width()).sum();
        if running + self.get(index).width() > self.max_running() {
            return Err(None);
        }
        match self.config.admission {
            Admission::Guaranteed => self.admit_promised(index)?,
            Admission::Overcommitted { watermark_blocks } => self.admit_fitting(index, watermark_blocks)?,
        }
        let max_tokens = self.get(index).max_tokens;
        if self.get(index).table.is_none() {
            let table = self.cache.create(max_tokens).map_err(|_| None)?;
            self.get_mut(index).table = Some(table);
        }
        match self.waiting.front() {
            Some(&first) if first == index => drop(self.waiting.pop_front()),
            _ => self.waiting.retain(|&other| other != index),
        }
        let sequence = self.get_mut(index);
        // Growing to the declared maximum reallocates nothing.
        sequence.tokens.reserve((max_tokens as usize).saturating_sub(sequence.tokens.len()));
        sequence.state = State::Running;
        self.enter_running(index);
        Ok(())
    }

    fn admit_promised(&mut self, index: Index) -> Result<(), Lacking> {
        if self.get(index).promised {
            return if self.ensure_tables(index, None) { Ok(()) } else { Err(None) };
        }
        let place = self.get(index).place();
        // What promised sequences hold and need does not shrink until one of them gives something up.
        match self.refusal {
            Some(refusal) if refusal.place == place && refusal.releases == self.releases => {
                return Err(refusal.lacking);
            }
            _ => self.refusal = None,
        }
        self.get_mut(index).promised = true;
        let lacking = match self.check_promise() {
            Ok(()) if self.ensure_tables(index, None) => return Ok(()),
            Err(RequestError::PromiseExceeded { needed, available }) => {
                let own = self.whole_need(self.get(index));
                let lacking = Some((own, (available + own).saturating_sub(needed)));
                self.refusal = Some(Refusal { place, releases: self.releases, lacking });
                lacking
            }
            _ => None,
        };
        self.get_mut(index).promised = false;
        Err(lacking)
    }

    fn admit_fitting(&mut self, index: Index, watermark_blocks: u32) -> Result<(), Lacking> {
        if !self.ensure_tables(index, None) {
            return Err(None);
        }
        let layout = *self.cache.config().layout();
        let sequence = self.get(index);
        let at_bound = self.is_at_bound(index);
        let copy = u32::from(sequence.table.and_then(|table| self.cache.shared_tail_block(table)).is_some());
        let target = if at_bound { sequence.max_tokens } else { sequence.len() };
        let own = layout.blocks_for(target).saturating_sub(self.table_blocks(sequence)) + copy;
        // Prompts that are being read still need blocks that they were let in for.
        let owed: u32 = self
            .running
            .iter()
            .map(|&other| self.get(other))
            .filter(|other| !other.protected)
            .map(|other| layout.blocks_for(other.len()).saturating_sub(self.table_blocks(other)))
            .sum();
        let watermark = if self.running.is_empty() { 0 } else { watermark_blocks };
        let needed = own.saturating_add(owed).saturating_add(watermark);
        if !self.make_room(index, needed, false) {
            return Err(Some((needed, self.available_to(index))));
        }
        if at_bound {
            self.protect(index);
        }
        Ok(())
    }

    /// Whether a sequence may not be preempted any more (I9).
    pub(super) fn is_at_bound(&self, index: Index) -> bool {
        self.config.admission != Admission::Guaranteed
            && self.get(index).preemptions >= self.config.max_preemptions
    }
}
