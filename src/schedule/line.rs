//! The line: sequences that wait, in order of place.
//!
//! Most of them are *open*: they may be asked at the next step whether they can be let in. One that begins like a prompt
//! which a running sequence is computing stands *behind* that sequence, and is asked again when the sequence has got
//! further or runs no more: a line of equal prompts costs a step nothing.
//!
//! *Claimants* are those in line that may hold a table, or have one set aside, or are promised blocks; some of them may
//! have given all that up since. Steps look at them, and never walk the whole line.
//!
//! It knows places and indices of records, and nothing of why a sequence waits. Every operation takes O(log n).

use crate::schedule::scheduler::Index;
use crate::schedule::sequence::Place;
use std::collections::BTreeMap;
use std::ops::Bound;

/// Who waits, and where.
#[derive(Debug, Default)]
pub(super) struct Line {
    open: BTreeMap<Place, Index>,
    /// By the running sequence that they stand behind.
    behind: BTreeMap<(Index, Place), Index>,
    claimants: BTreeMap<Place, Index>,
}

impl Line {
    pub(super) fn len(&self) -> usize {
        self.open.len() + self.behind.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.behind.is_empty()
    }

    /// The first of those that may be asked.
    pub(super) fn first(&self) -> Option<Index> {
        self.open.first_key_value().map(|(_, &index)| index)
    }

    /// Those that may be asked and come after `place`, in order.
    pub(super) fn after(&self, place: Place) -> impl Iterator<Item = Index> {
        self.open.range((Bound::Excluded(place), Bound::Unbounded)).map(|(_, &index)| index)
    }

    /// Puts a sequence in line, at its place.
    pub(super) fn enter(&mut self, place: Place, index: Index) {
        self.open.insert(place, index);
    }

    /// Takes a sequence out of the line; `behind` is the sequence that it stood behind.
    pub(super) fn leave(&mut self, place: Place, behind: Option<Index>) {
        match behind {
            Some(other) => self.behind.remove(&(other, place)),
            None => self.open.remove(&place),
        };
        self.claimants.remove(&place);
    }

    /// Has a sequence, which stood behind `before` if behind any, wait behind a running one.
    pub(super) fn stand_behind(&mut self, place: Place, before: Option<Index>, other: Index) {
        let filed = match before {
            Some(before) => self.behind.remove(&(before, place)),
            None => self.open.remove(&place),
        };
        if let Some(index) = filed {
            self.behind.insert((other, place), index);
        }
    }

    /// Has those that stand behind `other` be asked again. Returns one of them, until there are no more.
    pub(super) fn wake_one(&mut self, other: Index) -> Option<Index> {
        let (&(behind, place), &index) = self.behind.range((other, Place::FIRST)..).next()?;
        if behind != other {
            return None;
        }
        self.behind.remove(&(other, place));
        self.open.insert(place, index);
        Some(index)
    }

    /// In order of place.
    pub(super) fn claimants(&self) -> impl DoubleEndedIterator<Item = Index> {
        self.claimants.values().copied()
    }

    /// In order of place: those that come after `place`.
    pub(super) fn claimants_after(&self, place: Place) -> impl Iterator<Item = Index> {
        self.claimants.range((Bound::Excluded(place), Bound::Unbounded)).map(|(_, &index)| index)
    }

    /// Files a sequence in line among the claimants.
    pub(super) fn note_claims(&mut self, place: Place, index: Index) {
        self.claimants.insert(place, index);
    }

    /// Whether the sequence at `place` is filed among the claimants.
    pub(super) fn has_noted(&self, place: Place) -> bool {
        self.claimants.contains_key(&place)
    }

    /// All in line with their places, and the sequences that they stand behind: first those that may be asked.
    pub(super) fn all(&self) -> impl Iterator<Item = (Place, Index, Option<Index>)> {
        let open = self.open.iter().map(|(&place, &index)| (place, index, None));
        open.chain(self.behind.iter().map(|(&(other, place), &index)| (place, index, Some(other))))
    }
}
