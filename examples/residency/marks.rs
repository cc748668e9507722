//! What happened to blocks a moment ago: copied, moved out, moved in.

use paged_kv::StepPlan;

/// Seconds for which a block shows what happened to it; for the last half of them it fades.
const SECONDS: f64 = 0.9;

/// What happened to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// It was given a copy of a block that others share.
    Copied,
    /// Its content went to the host pool.
    MovedOut,
    /// Its content came from there.
    MovedIn,
}

/// The latest thing that happened to each block.
#[derive(Clone, Debug, Default)]
pub(crate) struct Marks {
    marks: Vec<(u32, Event, f64)>,
}

impl Marks {
    /// Notes what a step that was planned `now` does.
    pub(crate) fn note(&mut self, plan: &StepPlan, now: f64) {
        self.marks.retain(|&(_, _, since)| now - since < SECONDS);
        let outs = plan.swap_outs().iter().map(|swap| (swap.block, Event::MovedOut));
        let ins = plan.swap_ins().iter().map(|swap| (swap.block, Event::MovedIn));
        let copies = plan.block_copies().iter().map(|copy| (copy.destination, Event::Copied));
        for (block, event) in outs.chain(ins).chain(copies) {
            self.marks.retain(|&(other, ..)| other != block);
            self.marks.push((block, event, now));
        }
    }

    /// What is still to be seen `now`: each block, what happened to it, and how strongly that shows, up to 1.
    pub(crate) fn visible(&self, now: f64) -> impl Iterator<Item = (u32, Event, f32)> {
        self.marks.iter().filter_map(move |&(block, event, since)| {
            let strength = (2.0 * (1.0 - (now - since) / SECONDS)).min(1.0) as f32;
            (strength > 0.0).then_some((block, event, strength))
        })
    }
}
