//! A pool without blocks: a first-fit allocator.

/// A pool of which contiguous pieces are taken: the first hole that is large enough is cut, neighbouring holes become
/// one.
#[derive(Clone, Debug)]
pub(crate) struct FirstFit {
    /// Start and length, by start; no two touch.
    holes: Vec<(u32, u32)>,
}

impl FirstFit {
    pub(crate) fn new(capacity: u32) -> Self {
        Self { holes: vec![(0, capacity)] }
    }

    /// Takes `len`; returns where it begins, or `None` if no hole is large enough.
    pub(crate) fn take(&mut self, len: u32) -> Option<u32> {
        let place = self.holes.iter().position(|&(_, hole)| hole >= len)?;
        let (start, hole) = self.holes[place];
        if hole == len {
            self.holes.remove(place);
        } else {
            self.holes[place] = (start + len, hole - len);
        }
        Some(start)
    }

    /// Gives back what was taken.
    pub(crate) fn give_back(&mut self, start: u32, len: u32) {
        let place = self.holes.partition_point(|&(other, _)| other < start);
        let after = self.holes.get(place).is_some_and(|&(other, _)| other == start + len);
        let before = place > 0 && self.holes[place - 1].0 + self.holes[place - 1].1 == start;
        match (before, after) {
            (true, true) => {
                let (_, after) = self.holes.remove(place);
                self.holes[place - 1].1 += len + after;
            }
            (true, false) => self.holes[place - 1].1 += len,
            (false, true) => self.holes[place] = (start, len + self.holes[place].1),
            (false, false) => self.holes.insert(place, (start, len)),
        }
    }

    /// Sum of all holes.
    pub(crate) fn free(&self) -> u32 {
        self.holes.iter().map(|&(_, len)| len).sum()
    }
}
