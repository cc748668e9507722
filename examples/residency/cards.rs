//! The chats' cards: how wide they are, and what they say of a chat's memory. Nothing here draws.

use paged_kv::{Preemption, SequenceState};

use crate::{
    chat::{Chat, News, Phase, letter},
    snapshot::Share,
};

/// The fewest points of a card: its buttons need as many.
pub(crate) const NARROWEST: f32 = 160.0;
/// A card is as wide as if there were at least this many.
const FEWEST: usize = 4;

/// The width of each of `num_cards` cards in a row of `width` points, with `gap` points between two. No card is cut: where
/// not all fit, as many are seen as fit whole, and the rest is scrolled to.
pub(crate) fn width(width: f32, gap: f32, num_cards: usize) -> f32 {
    let fitting = ((width + gap) / (NARROWEST + gap)).floor().max(1.0);
    let seen = fitting.min(num_cards.max(FEWEST) as f32);
    ((width + gap) / seen - gap).floor()
}

/// What the chat is doing.
pub(crate) fn standing(chat: &Chat, share: Option<&Share>) -> String {
    match (&chat.phase, share) {
        (Phase::Ended(reason), _) => format!("ended: {reason}"),
        (Phase::Stopped(_), _) => "stopped".to_owned(),
        (Phase::Invalid(_), _) => "invalid numbers".to_owned(),
        (_, Some(share)) if share.host_blocks > 0 => "moved to main memory".to_owned(),
        (_, Some(share)) if share.state == SequenceState::Waiting && share.preemptions > 0 => {
            "preempted".to_owned()
        }
        (_, Some(share)) if share.state == SequenceState::Waiting => "in line".to_owned(),
        (_, Some(share)) if share.computed_tokens + 1 < share.tokens => {
            format!("reading {} of {}", share.computed_tokens, share.tokens)
        }
        _ => "answering".to_owned(),
    }
}

/// How long it is, and what it holds. A chat that has given up its blocks has its words still.
pub(crate) fn size(chat: &Chat, share: Option<&Share>) -> String {
    let (tokens, blocks) = match (&chat.phase, share) {
        (_, Some(share)) => (share.tokens, share.blocks),
        (Phase::Stopped(tokens) | Phase::Invalid(tokens), None) => (tokens.len() as u32, 0),
        (_, None) => (0, 0),
    };
    format!("{tokens} tokens, {blocks} blocks")
}

pub(crate) fn sharing(share: Option<&Share>) -> String {
    match share {
        Some(Share { host_blocks: 0, shared_blocks, .. }) => format!("{shared_blocks} of them shared"),
        Some(Share { host_blocks, shared_blocks, .. }) => {
            format!("{shared_blocks} shared, {host_blocks} moved out")
        }
        None => "blocks given up".to_owned(),
    }
}

/// What last happened to its memory.
pub(crate) fn news(chat: &Chat) -> String {
    match (&chat.phase, chat.news) {
        (Phase::Invalid(tokens), _) => format!("{} tokens to compute again", tokens.len()),
        (_, None) => String::new(),
        (_, Some(News::Found { tokens, of })) => format!("found {tokens} of {of} tokens"),
        (_, Some(News::Preempted(Preemption::Swapped { blocks }))) => {
            format!("preempted: {blocks} blocks moved out")
        }
        (_, Some(News::Preempted(Preemption::Dropped { tokens }))) => {
            format!("preempted: {tokens} tokens to compute again")
        }
        (_, Some(News::Preempted(_))) => "preempted".to_owned(),
        (_, Some(News::BranchOf(slot))) => format!("branched off {}", letter(slot)),
    }
}
