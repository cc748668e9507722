//! [`Reach`]: which keys a layer's rows see, and what of a cache must stay for that.
//!
//! These three functions are the only place that knows: the cache asks what to keep, the scheduler what a sequence holds
//! at most, the kernels and their twins which keys a row reads.

use std::ops::Range;

/// The keys that a row of a layer sees, of those at its own position and before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reach {
    /// All of them.
    #[default]
    All,
    /// The latest `tokens`, its own among them, and beside them the sequence's `first` ones.
    Window {
        /// Keys of the window.
        tokens: u32,
        /// Tokens from the sequence's beginning that every row sees.
        first: u32,
    },
    /// Those of its own chunk: positions are cut into chunks of `tokens`.
    Chunk {
        /// Positions of a chunk.
        tokens: u32,
    },
}

impl Reach {
    /// The keys that the row at `position` sees, in order: the first tokens, and the rest. One of them may be empty.
    pub fn visible(self, position: u32) -> [Range<u32>; 2] {
        let end = position.saturating_add(1);
        let start = self.start(position);
        let first = match self {
            Self::Window { first, .. } => first.min(start),
            _ => 0,
        };
        [0..first, start..end]
    }

    /// The first key that the row at `position` sees beside the first tokens.
    fn start(self, position: u32) -> u32 {
        match self {
            Self::All => 0,
            Self::Window { tokens, .. } => position.saturating_sub(tokens.saturating_sub(1)),
            Self::Chunk { tokens } => position - position % tokens.max(1),
        }
    }

    /// The logical blocks of `block_size` tokens that must stay when `length` tokens are computed, in order: those of the
    /// first tokens, and the rest. No later row sees or writes what lies before and between them.
    ///
    /// # Panics
    /// For a `block_size` of 0.
    pub fn kept(self, length: u32, block_size: u32) -> [Range<u32>; 2] {
        let end = length.div_ceil(block_size);
        let start = (self.start(length) / block_size).min(end);
        let first = self.first_blocks(block_size).min(start);
        [0..first, start..end]
    }

    /// Blocks that the first tokens take, of a sequence that has them all.
    pub(crate) fn first_blocks(self, block_size: u32) -> u32 {
        match self {
            Self::Window { first, .. } => first.div_ceil(block_size),
            _ => 0,
        }
    }

    /// The most blocks of `block_size` tokens that a sequence holds on its way to `max_tokens`, with at most `rows` rows in
    /// a step. What a step's rows do not see any more is given back when the next step is planned.
    ///
    /// # Panics
    /// For a `block_size` of 0.
    pub fn most_blocks(self, max_tokens: u32, rows: u32, block_size: u32) -> u32 {
        let all = max_tokens.div_ceil(block_size);
        // Of the last step's length and the rows after it, beginning anywhere in a block.
        let span = match self {
            Self::All => return all,
            Self::Window { tokens, .. } | Self::Chunk { tokens } => {
                u64::from(tokens.max(1) - 1) + u64::from(rows.max(1))
            }
        };
        let block = u64::from(block_size);
        let most = (span + block - 2) / block + 1;
        let first = self.first_blocks(block_size).min(all);
        first + u32::try_from(most).unwrap_or(u32::MAX).min(all - first)
    }

    /// What tells it from every other one.
    pub(crate) fn words(self) -> [u32; 3] {
        match self {
            Self::All => [0; 3],
            Self::Window { tokens, first } => [1, tokens, first],
            Self::Chunk { tokens } => [2, tokens, 0],
        }
    }

    /// Whether what a sequence has of its beginning stays for as long as it lives.
    pub fn is_all(self) -> bool {
        self == Self::All
    }
}

/// Layers that share blocks: what a sequence holds of them, it holds for all of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stack {
    pub(crate) reach: Reach,
    /// Tokens of a block, a power of two.
    pub(crate) block_size: u32,
}

#[cfg(test)]
mod tests {
    use crate::reach::Reach;

    const REACHES: [Reach; 8] = [
        Reach::All,
        Reach::Window { tokens: 1, first: 0 },
        Reach::Window { tokens: 3, first: 0 },
        Reach::Window { tokens: 8, first: 5 },
        Reach::Window { tokens: 5, first: 1 },
        Reach::Chunk { tokens: 1 },
        Reach::Chunk { tokens: 6 },
        Reach::Chunk { tokens: 8 },
    ];

    /// What the row at `position` sees, key by key.
    fn sees(reach: Reach, position: u32, key: u32) -> bool {
        key <= position
            && match reach {
                Reach::All => true,
                Reach::Window { tokens, first } => key < first || position - key < tokens,
                Reach::Chunk { tokens } => key / tokens == position / tokens,
            }
    }

    #[test]
    fn a_row_sees_what_its_definition_says() {
        for reach in REACHES {
            for position in 0..40 {
                let [first, rest] = reach.visible(position);
                assert!(first.end <= rest.start, "{reach:?} at {position}: a key twice");
                for key in 0..42 {
                    let visible = first.contains(&key) || rest.contains(&key);
                    assert_eq!(visible, sees(reach, position, key), "{reach:?}, row {position}, key {key}");
                }
            }
        }
    }

    #[test]
    fn what_is_kept_is_what_later_rows_see_or_write_into_and_no_block_more() {
        for reach in REACHES {
            for (length, block_size) in (0..40).flat_map(|length| [(length, 1), (length, 4), (length, 8)]) {
                let [first, rest] = reach.kept(length, block_size);
                assert!(first.end <= rest.start && rest.end == length.div_ceil(block_size));
                for block in 0..rest.end {
                    let keys = block * block_size..((block + 1) * block_size).min(length);
                    // The row at `length` sees the most of them.
                    let needed = keys.clone().any(|key| sees(reach, length, key));
                    let kept = first.contains(&block) || rest.contains(&block);
                    let written = length / block_size == block;
                    assert_eq!(
                        kept,
                        needed || written,
                        "{reach:?} at {length}, block {block} of {block_size}"
                    );
                    let later =
                        (length..length + 20).any(|row| keys.clone().any(|key| sees(reach, row, key)));
                    assert_eq!(later, needed, "{reach:?}: a later row sees more");
                }
            }
        }
    }

    #[test]
    fn a_sequence_holds_most_blocks_at_some_time_and_never_more() {
        for reach in REACHES {
            for (rows, block_size) in [(1, 1), (1, 4), (3, 4), (7, 4), (5, 8)] {
                let max_tokens = 61;
                let mut most = 0;
                for length in 0..max_tokens {
                    let [first, rest] = reach.kept(length, block_size);
                    let end = (length + rows).min(max_tokens).div_ceil(block_size);
                    let first = first.end.max(reach.first_blocks(block_size).min(end).min(rest.start));
                    most = most.max(first + end - rest.start);
                }
                let said = reach.most_blocks(max_tokens, rows, block_size);
                assert!(most <= said, "{reach:?}: {most} blocks, said {said}");
                let slack = u32::from(matches!(reach, Reach::Chunk { .. }));
                assert!(said <= most + slack, "{reach:?}, {rows} rows of {block_size}: said {said}, {most}");
            }
        }
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        for reach in [
            Reach::Window { tokens: u32::MAX, first: u32::MAX },
            Reach::Chunk { tokens: u32::MAX },
            Reach::Window { tokens: 0, first: 0 },
            Reach::Chunk { tokens: 0 },
        ] {
            assert!(reach.most_blocks(u32::MAX, u32::MAX, 1) >= 1);
            assert!(reach.visible(u32::MAX)[1].end == u32::MAX);
            assert!(reach.kept(u32::MAX, 4096)[1].end == 1 << 20);
        }
    }
}
