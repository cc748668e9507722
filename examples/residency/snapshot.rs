//! The pool as it is, block by block and chat by chat: what is drawn, and what a test compares the picture with.

use paged_kv::{BlockState, Scheduler, SequenceId, SequenceState};

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Free,
    Cached,
    Held,
    InTransfer,
}

/// A chat that holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    /// Which chat.
    pub(crate) slot: usize,
    /// Its first token in the block.
    pub(crate) first_token: u32,
    /// Its tokens in the block.
    pub(crate) tokens: u32,
}

/// One block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) kind: Kind,
    owners: Vec<Owner>,
}

impl Cell {
    pub(crate) fn new(kind: Kind) -> Self {
        Self { kind, owners: Vec::new() }
    }

    /// Adds an owner.
    pub(crate) fn hold(&mut self, owner: Owner) {
        self.owners.push(owner);
    }

    pub(crate) fn owners(&self) -> impl ExactSizeIterator<Item = &Owner> {
        self.owners.iter()
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.owners.len() > 1
    }

    /// Tokens in the block: those of the owner that has most, since owners share their common beginning.
    pub(crate) fn tokens(&self) -> u32 {
        self.owners.iter().map(|owner| owner.tokens).max().unwrap_or(0)
    }
}

/// One chat's part of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) slot: usize,
    pub(crate) state: SequenceState,
    pub(crate) tokens: u32,
    pub(crate) computed_tokens: u32,
    pub(crate) blocks: u32,
    /// Those of its blocks that others hold, too.
    pub(crate) shared_blocks: u32,
    pub(crate) host_blocks: u32,
    pub(crate) preemptions: u32,
}

/// Where the pool's tokens are; they sum to its size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Tokens in held blocks, shared ones once.
    pub(crate) live: u32,
    /// What held blocks have room for beyond them.
    pub(crate) waste: u32,
    pub(crate) cached: u32,
    /// The rest, what is in transfer included.
    pub(crate) free: u32,
}

/// The pool at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) block_size: u32,
    pub(crate) cells: Vec<Cell>,
    pub(crate) shares: Vec<Share>,
}

impl Snapshot {
    /// Looks at every block, and at the sequences of `chats`, each with its slot.
    pub(crate) fn take(scheduler: &Scheduler, chats: impl IntoIterator<Item = (usize, SequenceId)>) -> Self {
        let cache = scheduler.cache();
        let block_size = cache.config().block_size();
        let kind = |state| match state {
            BlockState::Cached { .. } => Kind::Cached,
            BlockState::Held { .. } => Kind::Held,
            BlockState::InTransfer => Kind::InTransfer,
            _ => Kind::Free,
        };
        let mut cells: Vec<Cell> = cache.block_states().map(|(_, state)| Cell::new(kind(state))).collect();
        let mut shares = Vec::new();
        for (slot, sequence) in chats {
            let Some(status) = scheduler.status(sequence) else { continue };
            for (block, first_token) in status.blocks.iter().zip((0..).step_by(block_size as usize)) {
                let tokens = status.computed_tokens.saturating_sub(first_token).min(block_size);
                cells[block.index() as usize].hold(Owner { slot, first_token, tokens });
            }
            let shared = status.blocks.iter().filter(|block| cache.ref_count(**block) > 1).count();
            shares.push(Share {
                slot,
                state: status.state,
                tokens: status.tokens,
                computed_tokens: status.computed_tokens,
                blocks: status.blocks.len() as u32,
                shared_blocks: shared as u32,
                host_blocks: status.host_blocks,
                preemptions: status.preemptions,
            });
        }
        Self { block_size, cells, shares }
    }

    pub(crate) fn share(&self, slot: usize) -> Option<&Share> {
        self.shares.iter().find(|share| share.slot == slot)
    }

    pub(crate) fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for cell in &self.cells {
            match cell.kind {
                Kind::Held => {
                    usage.live += cell.tokens();
                    usage.waste += self.block_size - cell.tokens();
                }
                Kind::Cached => usage.cached += self.block_size,
                Kind::Free | Kind::InTransfer => usage.free += self.block_size,
            }
        }
        usage
    }

    /// Blocks that sharing saves: what the chats' blocks would take if each had its own.
    pub(crate) fn saved_blocks(&self) -> u32 {
        self.cells.iter().map(|cell| (cell.owners.len() as u32).saturating_sub(1)).sum()
    }
}
