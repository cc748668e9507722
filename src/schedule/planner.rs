//! [`Scheduler::schedule`]: which rows the next step computes.
//!
//! Running sequences come first, in order of arrival; each decoding one has its rows set aside before a prompt's chunk
//! takes what is left of the budgets. When the budgets do not even cover the decoding ones, they take turns: the next
//! step begins where this one ended. Then, unless somebody was preempted, requests in line are let in while rows are
//! left.

use crate::ids::TokenId;
use crate::schedule::request::{Schedule, WaitReason};
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Sequence, State};
use crate::schedule::step_builder::{begin_plan, push_rows};
use crate::schedule::step_plan::{LogitRow, StepPlan, rows_work};

/// What is left of a step.
#[derive(Clone, Copy, Debug)]
struct Budget {
    rows: u32,
    work: u64,
}

impl Budget {
    /// What `rows` rows after `computed` tokens take.
    fn of(computed: u32, rows: u32) -> Self {
        let rows_wide = u64::from(rows);
        Self { rows, work: rows_work(rows_wide, u64::from(computed) + rows_wide) }
    }

    fn plus(self, other: Self) -> Self {
        Self { rows: self.rows.saturating_add(other.rows), work: self.work.saturating_add(other.work) }
    }

    fn minus(self, other: Self) -> Self {
        Self { rows: self.rows.saturating_sub(other.rows), work: self.work.saturating_sub(other.work) }
    }

    fn covers(self, other: Self) -> bool {
        other.rows <= self.rows && other.work <= self.work
    }
}

/// What became of one sequence.
enum Planned {
    Rows(Budget),
    NoBudget,
    NoRoom,
}

impl Scheduler {
    /// Plans the next step. A plan that was neither committed nor superseded is rolled back first (I12).
    ///
    /// Every step computes at least one token while anything can run (I9), and stays within the budgets (I13) but for a
    /// single row that exceeds the work budget alone.
    ///
    /// # Complexity
    /// O(running sequences + rows + new blocks); a steady decode step allocates nothing on the heap.
    pub fn schedule(&mut self) -> Schedule {
        self.rollback();
        if self.cache.check_poison().is_err() {
            return Schedule::Waiting(WaitReason::Poisoned);
        }
        let mut plan = std::mem::take(&mut self.spare_plan);
        begin_plan(&mut self.cache, &mut plan);
        let mut budget = Budget { rows: self.config.step_tokens, work: self.config.step_work_budget };
        let preempted = self.plan_running(&mut plan, &mut budget);
        let lacking = if preempted { None } else { self.admit(&mut plan, &mut budget) };
        if plan.num_rows() > 0 {
            plan.block_copies.extend_from_slice(self.cache.step_copies());
            return Schedule::Step(plan);
        }
        self.cache.rollback_step();
        self.spare_plan = plan;
        match lacking {
            _ if self.running.is_empty() && self.waiting.is_empty() => Schedule::Idle,
            Some((needed, available)) => Schedule::Waiting(WaitReason::Blocks { needed, available }),
            None => Schedule::Waiting(WaitReason::Blocks { needed: 1, available: self.cache.free_blocks() }),
        }
    }

    /// Undoes the outstanding plan: growth, copies and lengths. Preemptions and evictions stand.
    fn rollback(&mut self) {
        self.cache.rollback_step();
        let planned = std::mem::take(&mut self.planned);
        for &index in &planned {
            let sequence = self.get_mut(index);
            sequence.planned_rows = 0;
            sequence.planned_logits = 0;
        }
        self.resolve_forks();
        for &index in &planned {
            self.settle(index);
        }
        self.planned = planned;
        self.planned.clear();
    }

    /// Carries out what was asked of a sequence while its step was outstanding, its results apart.
    pub(super) fn settle(&mut self, index: Index) {
        if self.records[index].is_none() {
            return;
        }
        self.drop_aborted_samples(index);
        if self.get(index).aborting {
            self.drop_record(index);
        } else {
            self.truncate_now(index);
        }
    }

    /// Plans rows for sequences that run. Returns whether anybody was preempted.
    fn plan_running(&mut self, plan: &mut StepPlan, budget: &mut Budget) -> bool {
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        order.extend_from_slice(&self.running);
        if let Some(first) = self.resume_at.take() {
            let split = order.partition_point(|&index| self.get(index).place() < first);
            order.rotate_left(split);
        }
        let mut set_aside = Budget { rows: 0, work: 0 };
        for &index in &order {
            if let Some(wanted) = decode_wants(self.get(index)) {
                set_aside = set_aside.plus(wanted);
            }
        }
        // A prompt that is being read needs a row, too.
        let prompt = order.iter().map(|&index| self.get(index)).find(|&other| decode_wants(other).is_none());
        let least = prompt.map_or(Budget { rows: 0, work: 0 }, |prompt| Budget::of(prompt.computed, 1));
        let takes_turns = !budget.covers(set_aside.plus(least));
        if takes_turns {
            set_aside = Budget { rows: 0, work: 0 };
        }
        let preemptions = self.stats.preemptions;
        for &index in &order {
            if self.get(index).state != State::Running {
                continue;
            }
            if let Some(wanted) = decode_wants(self.get(index)) {
                set_aside = set_aside.minus(wanted);
            }
            match self.plan_sequence(plan, index, budget.minus(set_aside)) {
                Planned::Rows(used) => *budget = budget.minus(used),
                Planned::NoBudget if takes_turns => {
                    self.resume_at.get_or_insert(self.get(index).place());
                }
                Planned::NoBudget | Planned::NoRoom => {}
            }
        }
        self.order = order;
        self.stats.preemptions > preemptions
    }

    /// Lets requests in while rows are left. Returns what the first one left outside lacks.
    fn admit(&mut self, plan: &mut StepPlan, budget: &mut Budget) -> Option<(u32, u32)> {
        while !self.waiting.is_empty() {
            if plan.num_rows() > 0 && (budget.rows == 0 || budget.work == 0) {
                return None;
            }
            let index = match self.admit_next() {
                Ok(index) => index,
                Err(lacking) => return lacking,
            };
            if let Planned::Rows(used) = self.plan_sequence(plan, index, *budget) {
                *budget = budget.minus(used);
            }
        }
        None
    }

    /// Plans as many rows of a sequence as budget and blocks allow, making room for at least one.
    fn plan_sequence(&mut self, plan: &mut StepPlan, index: Index, budget: Budget) -> Planned {
        let sequence = self.get(index);
        let Some(table) = sequence.table else { return Planned::NoRoom };
        let drafts = sequence.usable_drafts();
        let computed = sequence.computed;
        let mut rows = rows_within(computed, (sequence.uncomputed() + drafts).min(budget.rows), budget.work);
        if rows == 0 {
            if plan.num_rows() > 0 {
                return Planned::NoBudget;
            }
            // Progress: a step has at least one row.
            rows = 1;
        }
        let mut lookahead = self.config.lookahead.saturating_sub(drafts);
        if self.blocks_short(index, rows, lookahead) > 0 {
            lookahead = 0;
        }
        if self.blocks_short(index, rows, 0) > 0 {
            rows = self.room_for(index, rows);
            if rows == 0 {
                return Planned::NoRoom;
            }
        }
        let sequence = self.records[index].as_ref().expect("an index in a queue has a record");
        let known = rows.min(sequence.uncomputed());
        let start = computed as usize;
        let tokens = &sequence.tokens[start..start + known as usize];
        let drafts: &[TokenId] = &sequence.drafts[..(rows - known) as usize];
        let Ok(first_row) = push_rows(&mut self.cache, plan, table, tokens, drafts, lookahead) else {
            debug_assert!(false, "blocks were counted before they were taken");
            return Planned::NoRoom;
        };
        self.request_logits(plan, index, first_row, rows, known);
        self.planned.push(index);
        Planned::Rows(Budget::of(computed, rows))
    }

    fn request_logits(&mut self, plan: &mut StepPlan, index: Index, first_row: u32, rows: u32, known: u32) {
        let sequence = self.records[index].as_mut().expect("an index in a queue has a record");
        sequence.planned_rows = rows;
        let complete = known == sequence.uncomputed();
        if !complete || !sequence.wants_token() {
            sequence.planned_logits = 0;
            return;
        }
        let mut logits = |sequence_id, num_rows: u32| {
            plan.logit_rows.push(LogitRow {
                sequence: sequence_id,
                row: first_row + known - 1,
                num_rows,
                next_position: sequence.tokens.len() as u32,
            });
        };
        if sequence.pending_samples.is_empty() {
            logits(sequence.id, 1 + rows - known);
        }
        for &sample in &sequence.pending_samples {
            logits(sequence.id.request().sample(sample), 1);
        }
        sequence.planned_logits = sequence.width();
    }

    /// Blocks that are lacking for `rows` more rows.
    fn blocks_short(&self, index: Index, rows: u32, lookahead: u32) -> u32 {
        let Some(table) = self.get(index).table else { return u32::MAX };
        let needed = self.cache.blocks_needed(table, rows, lookahead).unwrap_or(u32::MAX);
        self.missing_to(index, needed)
    }

    /// The most rows, up to `rows`, that the free blocks hold.
    fn rows_that_fit(&self, index: Index, rows: u32) -> u32 {
        let Some(table) = self.get(index).table else { return 0 };
        let block_size = self.cache.config().block_size();
        let held = self.cache.block_ids(table).map_or(0, <[_]>::len) as u32;
        let copy = u32::from(self.cache.shared_tail_block(table).is_some());
        let Some(free) = self.available_to(index).checked_sub(copy) else { return 0 };
        rows.min(((held + free) * block_size).saturating_sub(self.get(index).computed))
    }

    /// Makes room for as many of `rows` rows as possible. Idle content gives way to all of them, running sequences only
    /// to the first block's. Returns the rows that fit then.
    fn room_for(&mut self, index: Index, rows: u32) -> u32 {
        let Some(table) = self.get(index).table else { return 0 };
        let needed =
            |scheduler: &Self, rows| scheduler.cache.blocks_needed(table, rows, 0).unwrap_or(u32::MAX);
        let fit = self.rows_that_fit(index, rows);
        let mut wanted = rows;
        while wanted > fit {
            if self.make_room(index, needed(self, wanted), false) {
                return wanted;
            }
            wanted /= 2;
        }
        if fit > 0 {
            return fit;
        }
        let block_size = self.cache.config().block_size();
        [rows.min(block_size), 1]
            .into_iter()
            .find(|&rows| self.make_room(index, needed(self, rows), true))
            .unwrap_or(0)
    }
}

/// Rows and work of a decoding sequence's next step.
fn decode_wants(sequence: &Sequence) -> Option<Budget> {
    sequence.is_decoding().then(|| Budget::of(sequence.computed, 1 + sequence.usable_drafts()))
}

/// The most rows, up to `rows`, after a context of `computed` tokens whose work stays within `work`.
fn rows_within(computed: u32, rows: u32, work: u64) -> u32 {
    let fits = |rows: u32| rows_work(u64::from(rows), u64::from(computed) + u64::from(rows)) <= work;
    if fits(rows) {
        return rows;
    }
    let (mut low, mut high) = (0, rows);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    low
}
