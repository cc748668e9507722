//! One set of colours for owners and states, and how a block is coloured from its state.
//!
//! Owners have the eight colours that Okabe and Ito chose so that colour-blind people tell them apart; a letter in the
//! block says the same. Nothing here draws.

use crate::snapshot::{Cell, Kind};

/// Red, green, blue.
pub(crate) type Rgb = [u8; 3];

/// Chats that can be told apart by colour.
pub(crate) const NUM_OWNERS: usize = 8;

const OWNERS: [Rgb; NUM_OWNERS] = [
    [0, 114, 178],   // blue
    [230, 159, 0],   // orange
    [0, 158, 115],   // green
    [204, 121, 167], // pink
    [86, 180, 233],  // sky
    [213, 94, 0],    // vermilion
    [240, 228, 66],  // yellow
    [120, 20, 120],  // plum, in place of black
];

/// The colours of one theme.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Palette {
    pub(crate) window: Rgb,
    pub(crate) panel: Rgb,
    pub(crate) line: Rgb,
    pub(crate) ink: Rgb,
    pub(crate) weak: Rgb,
    pub(crate) error: Rgb,
    pub(crate) free: Rgb,
    pub(crate) cached: Rgb,
    pub(crate) hatch: Rgb,
    pub(crate) in_transfer: Rgb,
    pub(crate) live: Rgb,
    pub(crate) waste: Rgb,
    pub(crate) copied: Rgb,
    pub(crate) moved_out: Rgb,
    pub(crate) moved_in: Rgb,
}

pub(crate) const DARK: Palette = Palette {
    window: [17, 19, 23],
    panel: [25, 28, 34],
    line: [48, 53, 62],
    ink: [232, 235, 240],
    weak: [150, 157, 168],
    error: [255, 140, 105],
    free: [35, 39, 47],
    cached: [52, 58, 69],
    hatch: [112, 122, 138],
    in_transfer: [94, 78, 40],
    live: [92, 160, 220],
    waste: [222, 128, 60],
    copied: [255, 255, 255],
    moved_out: [255, 196, 60],
    moved_in: [110, 235, 190],
};

pub(crate) const LIGHT: Palette = Palette {
    window: [240, 241, 244],
    panel: [255, 255, 255],
    line: [214, 218, 225],
    ink: [24, 28, 34],
    weak: [94, 101, 112],
    error: [176, 42, 12],
    free: [240, 242, 245],
    cached: [218, 223, 231],
    hatch: [138, 147, 162],
    in_transfer: [245, 221, 160],
    live: [58, 124, 190],
    waste: [214, 116, 40],
    copied: [20, 22, 28],
    moved_out: [190, 112, 0],
    moved_in: [0, 138, 96],
};

impl Palette {
    pub(crate) fn of(dark: bool) -> Self {
        if dark { DARK } else { LIGHT }
    }

    /// What `slot`'s tokens fill.
    pub(crate) fn owner(&self, slot: usize) -> Rgb {
        OWNERS[slot % NUM_OWNERS]
    }

    /// The part of a block that `slot` holds and has not filled.
    pub(crate) fn unfilled(&self, slot: usize) -> Rgb {
        mix(self.owner(slot), self.panel, 0.66)
    }

    /// The colours of a block, from left to right: one stripe for each owner, or one for a block that no chat holds. Of
    /// each stripe the colour of the part that tokens fill, at the bottom, and of the rest.
    pub(crate) fn stripes(&self, cell: &Cell) -> Vec<[Rgb; 2]> {
        match cell.kind {
            Kind::Free => vec![[self.free; 2]],
            Kind::Cached => vec![[self.cached; 2]],
            Kind::InTransfer => vec![[self.in_transfer; 2]],
            Kind::Held => {
                cell.owners().map(|owner| [self.owner(owner.slot), self.unfilled(owner.slot)]).collect()
            }
        }
    }

    /// Black or white, whichever reads better on `ground`.
    pub(crate) fn text_on(&self, ground: Rgb) -> Rgb {
        if luminance(ground) > 0.3 { [16, 18, 22] } else { [255, 255, 255] }
    }
}

/// `share` of `to` and the rest of `from`.
pub(crate) fn mix(from: Rgb, to: Rgb, share: f32) -> Rgb {
    std::array::from_fn(|channel| {
        let (from, to) = (f32::from(from[channel]), f32::from(to[channel]));
        (from + (to - from) * share).round() as u8
    })
}

/// Relative luminance (WCAG 2), 0 to 1.
pub(crate) fn luminance(colour: Rgb) -> f32 {
    let linear = colour.map(|channel| (f32::from(channel) / 255.0).powf(2.2));
    0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
}
