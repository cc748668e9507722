//! How many rows a step may have: as many as leave frames short.
//!
//! A long prompt is read in many steps, and no frame is shown before the step that was submitted with it is computed. What
//! is measured is the longest time from one frame to the next while a step is away: in whole frames where they keep time
//! with a display, and with whatever is drawn.

use crate::palette::NUM_OWNERS;

/// Rows that a step may always have: with fewer it would hardly take less time, since the model's weights are read all the
/// same. Those of the first step, and of all steps of a picture, which must not depend on the machine.
pub(crate) const LEAST_ROWS: u32 = 32;
/// Most rows, for which the model's tensors have room.
pub(crate) const MOST_ROWS: u32 = 512;
/// Milliseconds from one frame to the next that are still in time: at 60 frames a second one that is left out is too many.
pub(crate) const BUDGET_MS: f32 = 25.0;

/// The rows that steps may have now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) rows: u32,
    /// A step has been too long. Before that, nothing is known but that more may be possible.
    was_late: bool,
}

impl Pace {
    pub(crate) const START: Self = Self { rows: LEAST_ROWS, was_late: false };

    /// Learns from a step of `rows` beside which frames were at most `longest_ms` apart.
    pub(crate) fn learn(&mut self, rows: u32, longest_ms: f32) {
        if rows <= NUM_OWNERS as u32 {
            // Every chat's next token, perhaps: a step cannot have less.
            return;
        }
        if longest_ms > BUDGET_MS {
            self.was_late = true;
            let fitting = (rows as f32 * BUDGET_MS / longest_ms) as u32;
            // Something else may have held it up: by half at most.
            self.rows = fitting.clamp(self.rows / 2, self.rows);
        } else if rows >= self.rows {
            self.rows += if self.was_late { self.rows / 8 } else { self.rows };
        }
        self.rows = self.rows.clamp(LEAST_ROWS, MOST_ROWS);
    }
}
