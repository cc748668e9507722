//! SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014): all chance in a simulation
//! comes from one seed.

use std::ops::Range;

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number of a range that is not empty.
    pub(crate) fn below(&mut self, range: Range<u32>) -> u32 {
        let len = u64::from(range.end - range.start);
        range.start + (((self.next() >> 32) * len) >> 32) as u32
    }

    pub(crate) fn index(&mut self) -> usize {
        (self.next() >> 33) as usize
    }

    /// True in `percent` of all cases.
    pub(crate) fn chance(&mut self, percent: u32) -> bool {
        self.below(0..100) < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.index() % values.len()]
    }

    /// A value in `percent` of all cases.
    pub(crate) fn maybe<T>(&mut self, percent: u32, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.chance(percent) { Some(value(self)) } else { None }
    }
}
