//! A [`StepPlan`] as text: one line per field, in one order, for logs that can be replayed.
//!
//! ```text
//! step-plan 1
//! step 7
//! cache_instance 1
//! fingerprint 14695981039346656037
//! forgotten_devices 0
//! last_committed 6
//! token_ids 9 9 1 2
//! positions 40 12 0 1
//! slot_mapping 104 60 -           (`-` is a padding row's)
//! query_starts 0 1 2 4
//! context_lens 41 13 2
//! table_rows 0 1 2
//! table_changes 2:0:0:1           (table row, first entry, start, length)
//! changed_entries 9
//! swap_outs 3>0                   (block, slot of the host pool)
//! swap_ins
//! block_copies 4>8                (source, destination)
//! logit_rows 1/1.0:0:1:41         (scheduler, request and sample, row, rows, next position)
//! end
//! ```
//!
//! Of a model with several stacks of layers, the first one's slots and table changes stand where they stand here; before the
//! end follow the others', each after a line `stack 1`, `stack 2` and so on.
//!
//! What is read has arrays that fit each other, so that every method of the plan is safe to call. Whether its numbers are
//! right is checked when it is prepared.

use crate::cache::{BlockCopy, BlockSwap};
use crate::error::{PlanTextError, PlanTextFault};
use crate::ids::{PADDING_SLOT, RequestId, StepId};
use crate::schedule::step_plan::{LogitRow, StackPlan, StepPlan, TableChange};
use std::fmt;
use std::str::{FromStr, Lines};

/// The first line: what it is, and the version of the format.
const HEADER: &str = "step-plan 1";

impl fmt::Display for StepPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEADER}")?;
        for (field, number) in [
            ("step", self.step.0),
            ("cache_instance", self.cache_instance),
            ("fingerprint", self.fingerprint),
            ("forgotten_devices", self.forgotten_devices),
            ("last_committed", self.last_committed.0),
        ] {
            writeln!(f, "{field} {number}")?;
        }
        line(f, "token_ids", &self.token_ids)?;
        line(f, "positions", &self.positions)?;
        let mut stacks = self.stacks.iter();
        let none = StackPlan::default();
        let first = stacks.next().unwrap_or(&none);
        write_slots(f, first)?;
        line(f, "query_starts", &self.query_starts)?;
        line(f, "context_lens", &self.context_lens)?;
        line(f, "table_rows", &self.table_rows)?;
        write_changes(f, first)?;
        let swaps = |swaps: &[BlockSwap]| -> Vec<Pair> {
            swaps.iter().map(|swap| Pair(swap.block, swap.host_slot)).collect()
        };
        line(f, "swap_outs", swaps(&self.swap_outs))?;
        line(f, "swap_ins", swaps(&self.swap_ins))?;
        let copies = self.block_copies.iter().map(|copy| Pair(copy.source, copy.destination));
        line(f, "block_copies", copies)?;
        line(f, "logit_rows", self.logit_rows.iter().map(Logits))?;
        for (number, stack) in (1..).zip(stacks) {
            writeln!(f, "stack {number}")?;
            write_slots(f, stack)?;
            write_changes(f, stack)?;
        }
        writeln!(f, "end")
    }
}

fn line(
    f: &mut fmt::Formatter<'_>,
    field: &str,
    entries: impl IntoIterator<Item = impl fmt::Display>,
) -> fmt::Result {
    f.write_str(field)?;
    entries.into_iter().try_for_each(|entry| write!(f, " {entry}"))?;
    writeln!(f)
}

fn write_slots(f: &mut fmt::Formatter<'_>, stack: &StackPlan) -> fmt::Result {
    line(f, "slot_mapping", stack.slot_mapping.iter().map(|&slot| Slot(slot)))
}

fn write_changes(f: &mut fmt::Formatter<'_>, stack: &StackPlan) -> fmt::Result {
    line(f, "table_changes", stack.table_changes.iter().map(Change))?;
    line(f, "changed_entries", &stack.changed_entries)
}

struct Slot(u32);

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            PADDING_SLOT => f.write_str("-"),
            slot => slot.fmt(f),
        }
    }
}

struct Pair(u32, u32);

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}>{}", self.0, self.1)
    }
}

struct Change<'a>(&'a TableChange);

impl fmt::Display for Change<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TableChange { table_row, first_entry, start, len } = self.0;
        write!(f, "{table_row}:{first_entry}:{start}:{len}")
    }
}

struct Logits<'a>(&'a LogitRow);

impl fmt::Display for Logits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LogitRow { sequence, row, num_rows, next_position } = self.0;
        let scheduler = sequence.request().scheduler();
        write!(f, "{scheduler}/{sequence}:{row}:{num_rows}:{next_position}")
    }
}

impl FromStr for StepPlan {
    type Err = PlanTextError;

    /// Reads what [`Display`](fmt::Display) wrote.
    ///
    /// # Errors
    /// [`PlanTextError`] with the line, for any text that is not a plan's, or a plan whose arrays do not fit each other.
    fn from_str(text: &str) -> Result<Self, PlanTextError> {
        let mut reader = Reader { lines: text.lines(), line: 0 };
        reader.exactly(HEADER)?;
        let mut plan = Self {
            step: StepId(reader.number("step")?),
            cache_instance: reader.number("cache_instance")?,
            fingerprint: reader.number("fingerprint")?,
            forgotten_devices: reader.number("forgotten_devices")?,
            last_committed: StepId(reader.number("last_committed")?),
            token_ids: reader.array("token_ids", number)?,
            positions: reader.array("positions", number)?,
            ..Self::default()
        };
        let slot_mapping = reader.array("slot_mapping", slot)?;
        plan.query_starts = reader.array("query_starts", number)?;
        plan.context_lens = reader.array("context_lens", number)?;
        plan.table_rows = reader.array("table_rows", number)?;
        let first = reader.changes(slot_mapping)?;
        // A plan that no cache has made has no stacks.
        if plan.step.0 > 0 || first != StackPlan::default() {
            plan.stacks.push(first);
        }
        plan.swap_outs = reader.array("swap_outs", swap)?;
        plan.swap_ins = reader.array("swap_ins", swap)?;
        plan.block_copies = reader.array("block_copies", copy)?;
        plan.logit_rows = reader.array("logit_rows", logit_row)?;
        while !reader.ends_or_exactly("end", &format!("stack {}", plan.stacks.len().max(1)))? {
            let slot_mapping = reader.array("slot_mapping", slot)?;
            plan.stacks.push(reader.changes(slot_mapping)?);
        }
        if reader.lines.next().is_some() {
            reader.line += 1;
            return Err(reader.error(PlanTextFault::Expected { field: "nothing more" }));
        }
        check_shape(&plan).map_err(|fault| reader.error(fault))?;
        Ok(plan)
    }
}

/// The lines of a text, and the number of the one that was read last.
struct Reader<'a> {
    lines: Lines<'a>,
    line: u32,
}

impl<'a> Reader<'a> {
    fn error(&self, fault: PlanTextFault) -> PlanTextError {
        PlanTextError { line: self.line, fault }
    }

    fn next(&mut self, field: &'static str) -> Result<&'a str, PlanTextError> {
        self.line += 1;
        self.lines.next().ok_or_else(|| self.error(PlanTextFault::Expected { field }))
    }

    fn exactly(&mut self, expected: &'static str) -> Result<(), PlanTextError> {
        match self.next(expected)? {
            line if line == expected => Ok(()),
            _ => Err(self.error(PlanTextFault::Expected { field: expected })),
        }
    }

    /// The rest of what a step does in a stack with these slots.
    fn changes(&mut self, slot_mapping: Vec<u32>) -> Result<StackPlan, PlanTextError> {
        Ok(StackPlan {
            slot_mapping,
            table_changes: self.array("table_changes", table_change)?,
            changed_entries: self.array("changed_entries", number)?,
        })
    }

    /// Whether the next line is `end`, and not `another`.
    fn ends_or_exactly(&mut self, end: &'static str, another: &str) -> Result<bool, PlanTextError> {
        match self.next(end)? {
            line if line == end => Ok(true),
            line if line == another => Ok(false),
            _ => Err(self.error(PlanTextFault::Expected { field: end })),
        }
    }

    /// What follows `field` on the next line.
    fn entries(&mut self, field: &'static str) -> Result<&'a str, PlanTextError> {
        let line = self.next(field)?;
        let rest = line.strip_prefix(field).filter(|rest| rest.is_empty() || rest.starts_with(' '));
        rest.ok_or_else(|| self.error(PlanTextFault::Expected { field }))
    }

    fn number(&mut self, field: &'static str) -> Result<u64, PlanTextError> {
        let entries = self.entries(field)?;
        let number = entries.strip_prefix(' ').and_then(number);
        number.ok_or_else(|| self.error(PlanTextFault::Entry { field, index: 0 }))
    }

    fn array<T>(
        &mut self,
        field: &'static str,
        read: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, PlanTextError> {
        let entries = self.entries(field)?;
        let mut array = Vec::new();
        for (index, entry) in (0..).zip(entries.split(' ').skip(1)) {
            let entry = read(entry).ok_or_else(|| self.error(PlanTextFault::Entry { field, index }))?;
            array.push(entry);
        }
        Ok(array)
    }
}

/// A decimal number as it is written: digits and nothing else.
fn number<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

fn slot(text: &str) -> Option<u32> {
    if text == "-" { Some(PADDING_SLOT) } else { number(text).filter(|&slot| slot != PADDING_SLOT) }
}

fn pair(text: &str) -> Option<(u32, u32)> {
    let (first, second) = text.split_once('>')?;
    Some((number(first)?, number(second)?))
}

fn swap(text: &str) -> Option<BlockSwap> {
    pair(text).map(|(block, host_slot)| BlockSwap { block, host_slot })
}

fn copy(text: &str) -> Option<BlockCopy> {
    pair(text).map(|(source, destination)| BlockCopy { source, destination })
}

fn table_change(text: &str) -> Option<TableChange> {
    let mut parts = text.split(':').map(number);
    let change = TableChange {
        table_row: parts.next()??,
        first_entry: parts.next()??,
        start: parts.next()??,
        len: parts.next()??,
    };
    parts.next().is_none().then_some(change)
}

fn logit_row(text: &str) -> Option<LogitRow> {
    let (scheduler, rest) = text.split_once('/')?;
    let (sequence, rest) = rest.split_once(':')?;
    let (request, sample) = sequence.split_once('.')?;
    let request = RequestId { scheduler: number(scheduler)?, number: number(request)? };
    let mut parts = rest.split(':').map(number);
    let logits = LogitRow {
        sequence: request.sample(number(sample)?),
        row: parts.next()??,
        num_rows: parts.next()??,
        next_position: parts.next()??,
    };
    parts.next().is_none().then_some(logits)
}

/// Whether the arrays fit each other.
fn check_shape(plan: &StepPlan) -> Result<(), PlanTextFault> {
    let (rows, sequences) = (plan.token_ids.len(), plan.context_lens.len());
    // A plan without sequences may have no query starts at all.
    let starts = if sequences == 0 && plan.query_starts.is_empty() { 0 } else { sequences + 1 };
    for (field, len, expected) in [
        ("positions", plan.positions.len(), rows),
        ("query_starts", plan.query_starts.len(), starts),
        ("table_rows", plan.table_rows.len(), sequences),
    ] {
        if len != expected {
            let (len, expected) = (len as u64, expected as u64);
            return Err(PlanTextFault::Length { field, len, expected });
        }
    }
    for stack in &plan.stacks {
        let (len, expected) = (stack.slot_mapping.len() as u64, rows as u64);
        if len != expected {
            return Err(PlanTextFault::Length { field: "slot_mapping", len, expected });
        }
    }
    let starts = plan.query_starts.windows(2);
    let fits = |(pair, &context): (&[u32], &u32)| {
        pair[0] <= pair[1] && pair[1] as usize <= rows && pair[1] - pair[0] <= context
    };
    match starts.zip(&plan.context_lens).position(|sequence| !fits(sequence)) {
        Some(sequence) => Err(PlanTextFault::Rows { sequence: sequence as u32 }),
        None => Ok(()),
    }
}
