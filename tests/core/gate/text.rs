//! The text form of plans and events: numbers alone, in the order in which the library gives them.

use paged_kv::{Preemption, PreemptionReason, StepEvent, StepPlan};
use std::fmt::Write as _;

fn numbers(values: &[u32]) -> String {
    values.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

/// A plan, one line for each array that is not empty. `last` is the number of the step before it.
pub(super) fn plan(plan: &StepPlan, last: u64) -> String {
    let mut text = format!("  plan +{}, work {}", plan.step().raw() - last, plan.work());
    if plan.forgotten_devices() > 0 {
        let _ = write!(text, ", {} devices forgotten", plan.forgotten_devices());
    }
    let changes = plan
        .table_changes()
        .iter()
        .map(|change| format!("{}:{}+{}@{}", change.table_row, change.first_entry, change.len, change.start));
    let swaps = |swaps: &[paged_kv::BlockSwap]| {
        let swaps = swaps.iter().map(|swap| format!("{}/{}", swap.block, swap.host_slot));
        swaps.collect::<Vec<_>>().join(" ")
    };
    let copies = plan.block_copies().iter().map(|copy| format!("{}>{}", copy.source, copy.destination));
    let logits = plan
        .logit_rows()
        .iter()
        .map(|row| format!("{}:{}+{}@{}", row.sequence, row.row, row.num_rows, row.next_position));
    let arrays = [
        ("tokens", numbers(plan.token_ids())),
        ("positions", numbers(plan.positions())),
        ("slots", numbers(plan.slot_mapping())),
        ("query starts", numbers(plan.query_starts())),
        ("contexts", numbers(plan.context_lens())),
        ("tables", numbers(plan.table_rows())),
        ("changes", changes.collect::<Vec<_>>().join(" ")),
        ("changed entries", numbers(plan.changed_entries())),
        ("swaps out", swaps(plan.swap_outs())),
        ("swaps in", swaps(plan.swap_ins())),
        ("copies", copies.collect::<Vec<_>>().join(" ")),
        ("logits", logits.collect::<Vec<_>>().join(" ")),
    ];
    for (name, array) in arrays.iter().filter(|(_, array)| !array.is_empty()) {
        let _ = write!(text, "\n    {name} {array}");
    }
    text
}

/// An event. That a sequence is let in again says nothing of what was found, which counts its own blocks.
pub(super) fn event(event: &StepEvent, is_again: bool) -> String {
    match *event {
        StepEvent::Admitted { sequence, .. } if is_again => format!("  admitted {sequence} again"),
        StepEvent::Admitted { sequence, prefix } => {
            let (cached, wanted) = (prefix.cached_tokens, prefix.wanted_tokens);
            format!("  admitted {sequence}, {cached} of {wanted} tokens found")
        }
        StepEvent::Preempted { sequence, how, why } => {
            let how = match how {
                Preemption::Swapped { blocks } => format!("{blocks} blocks swapped"),
                Preemption::Dropped { tokens } => format!("{tokens} tokens dropped"),
                other => format!("{other:?}"),
            };
            let why = match why {
                PreemptionReason::Configured => "configured".to_string(),
                PreemptionReason::NoRates => "no rates".to_string(),
                PreemptionReason::Rates { swap_s, recompute_s } => {
                    format!("{swap_s:.9} s against {recompute_s:.9} s")
                }
                PreemptionReason::HostPoolFull { needed, available } => {
                    format!("{needed} of {available} host blocks")
                }
                PreemptionReason::NothingToMove => "nothing to move".to_string(),
                PreemptionReason::TransfersPending { steps } => format!("{steps} transfers pending"),
                other => format!("{other:?}"),
            };
            format!("  preempted {sequence}, {how}: {why}")
        }
        StepEvent::Token { sequence, token } => format!("  token {sequence}: {token}"),
        StepEvent::Finished { sequence, reason, preemptions } => {
            format!("  finished {sequence}: {reason}, {preemptions} preemptions")
        }
        other => format!("  {other:?}"),
    }
}
