//! How much a step may compute: as much as comes back while frames are still short.
//!
//! A long prompt is read in many steps, each of which holds up the frame that carries it. What is measured is the time from
//! a step's departure to its return, as the window sees it: with what was drawn beside it, and in whole frames where they
//! keep time with a display.

/// Rows that a step may always have: with fewer it would hardly take less time, since the model's weights are read all the
/// same. Those of the first step, and of all steps of a picture, which must not depend on the machine.
pub(crate) const LEAST_ROWS: u32 = 32;
/// Most rows, for which the model's tensors have room.
pub(crate) const MOST_ROWS: u32 = 512;
/// Milliseconds that a step may take: at 60 frames a second it is back for the next one, but not only for the one after it.
pub(crate) const BUDGET_MS: f32 = 25.0;

/// Rows that the next step may have, after one of `rows` took `took_ms` where `allowed` were allowed.
pub(crate) fn next_rows(allowed: u32, rows: u32, took_ms: f32) -> u32 {
    let next = if 2 * rows < allowed {
        // It tells nothing of so many rows.
        allowed
    } else if took_ms > BUDGET_MS {
        // Something else may have held it up: by half at most.
        ((rows as f32 * BUDGET_MS / took_ms) as u32).clamp(allowed / 2, allowed)
    } else if rows >= allowed {
        // By little: only a late frame tells that it was too much.
        allowed + allowed / 8
    } else {
        allowed
    };
    next.clamp(LEAST_ROWS, MOST_ROWS)
}
