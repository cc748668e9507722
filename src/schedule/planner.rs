//! [`Scheduler::schedule`]: which rows the next step computes.
//!
//! Running sequences come first, in order of arrival; each decoding one has its rows set aside before a prompt's chunk
//! takes what is left of the budgets. When the budgets do not even cover the decoding ones, they take turns: the next
//! step begins where this one ended. Then, unless somebody was preempted, requests in line are let in while rows are
//! left.

use crate::error::ConfigError;
use crate::ids::{SequenceId, TableId, TokenId};
use crate::schedule::admission::Lacking;
use crate::schedule::blocks;
use crate::schedule::request::{Schedule, SchedulerConfig, WaitReason};
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Place, Sequence, State};
use crate::schedule::step_builder::{begin_plan, finish_plan, push_rows};
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
        self.restart_broken();
        if self.cache.check_poison().is_err() {
            return Schedule::Waiting(WaitReason::Poisoned);
        }
        let mut plan = std::mem::take(&mut self.spare_plan);
        begin_plan(&mut self.cache, &mut plan);
        let mut budget = Budget { rows: self.config.step_tokens, work: self.config.step_work_budget };
        let lacking = self.fill(&mut plan, &mut budget);
        if plan.num_rows() > 0 {
            finish_plan(&self.cache, &mut plan);
            return Schedule::Step(plan);
        }
        self.rollback();
        self.spare_plan = plan;
        match lacking {
            _ if self.running.is_empty() && self.line.is_empty() => Schedule::Idle,
            Some(lacking @ (Lacking::Blocks { .. } | Lacking::Transfers)) => {
                Schedule::Waiting(self.wait_reason(lacking))
            }
            _ => Schedule::Waiting(WaitReason::Blocks { needed: 1, available: self.cache.free_blocks() }),
        }
    }

    /// Sets the budgets of the steps that are planned from now on: rows, and (row, key) pairs, as in
    /// [`SchedulerConfig`](crate::SchedulerConfig).
    ///
    /// An application that draws has so many milliseconds for a step. Once it has seen how long steps take, it divides the
    /// sum of their [`work`](StepPlan::work) by the sum of their times, which is pairs per second, and multiplies by what
    /// it has; for the rest of the model it does the same with rows. Steps of about that size count: small ones take
    /// longer per pair. `step_tokens` must not exceed the rows of the tensors that it has bound.
    ///
    /// # Errors
    /// [`ConfigError::Zero`] when one of them is 0; the budgets are as before then.
    pub fn set_step_budgets(&mut self, step_tokens: u32, step_work_budget: u64) -> Result<(), ConfigError> {
        let config = SchedulerConfig { step_tokens, step_work_budget, ..self.config };
        config.validate(self.cache.config())?;
        self.config = config;
        Ok(())
    }

    /// The sequences of the outstanding plan, in the order of its rows: whose adapter or namespace they belong to. Samples
    /// that have not parted go by the first one that lives. Empty when no step is outstanding.
    pub fn planned_sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.planned.iter().map(|&index| self.get(index).id)
    }

    /// Plans a step. Returns what the first in line lacks, if it was asked.
    fn fill(&mut self, plan: &mut StepPlan, budget: &mut Budget) -> Option<Lacking> {
        let displaced = self.displace();
        let (start, mut lacking) = (self.stats.preemptions, None);
        loop {
            let before = self.stats.preemptions;
            self.plan_running(plan, budget);
            if plan.num_rows() == 0 && self.stats.preemptions > before {
                // Blocks that the last in order gave up are for those before it.
                continue;
            }
            if self.stats.preemptions == start || fault!(AdmittedAfterPreempting) {
                lacking = self.admit(plan, budget, displaced);
            }
            let nobody = self.running.is_empty() && self.line.is_empty();
            let gives_up = fault!(NoLastResort);
            if plan.num_rows() > 0 || nobody || gives_up || std::mem::replace(&mut self.last_resort, true) {
                self.last_resort = false;
                return lacking;
            }
        }
    }

    /// Undoes the outstanding plan: growth, copies and lengths. Preemptions and evictions stand.
    pub(super) fn rollback(&mut self) {
        let swapped = !self.cache.step_swap_outs().is_empty() || !self.cache.step_swap_ins().is_empty();
        self.cache.rollback_step();
        let planned = std::mem::take(&mut self.planned);
        for &index in &planned {
            let sequence = self.get_mut(index);
            sequence.planned_rows = 0;
            sequence.planned_logits = 0;
            self.recount(index);
        }
        self.resolve_forks();
        if swapped {
            self.undo_swaps();
        }
        for &index in &planned {
            self.settle(index);
        }
        self.planned = planned;
        self.planned.clear();
    }

    /// What a dropped step moved out is lost; what it brought back is in the host pool still, and its sequences are in
    /// line again.
    fn undo_swaps(&mut self) {
        self.count_losses();
        let out = |&index: &Index| blocks::returning(&self.cache, self.get(index)) > 0;
        let back: Vec<Index> = self.running.iter().copied().filter(out).collect();
        for index in back {
            self.events.take_back_admission(self.get(index).id);
            self.requeue(index);
        }
    }

    /// Carries out what was asked of a sequence while its step was outstanding, its results apart.
    pub(super) fn settle(&mut self, index: Index) {
        if self.records[index].is_none() {
            return;
        }
        let all_told = self.drop_aborted_samples(index);
        if self.get(index).aborting {
            if !all_told {
                self.tell_ended(index);
            }
            self.drop_record(index);
        } else {
            self.truncate_now(index);
        }
    }

    /// Plans rows for sequences that run.
    fn plan_running(&mut self, plan: &mut StepPlan, budget: &mut Budget) {
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        order.extend_from_slice(&self.running);
        if let Some(first) = self.resume_at.take() {
            let split = order.partition_point(|&index| self.get(index).place() < first);
            order.rotate_left(split);
        }
        // One pass over the records, which are many: rows that decoding ones want, and who else is there.
        let mut set_aside = Budget { rows: 0, work: 0 };
        self.shares.clear();
        for &index in &order {
            match decode_wants(self.get(index)) {
                Some(wanted) => set_aside = set_aside.plus(wanted),
                None => self.shares.push((index, 0)),
            }
        }
        // A prompt that is being read needs a row, too.
        let prompt = self.shares.first().map(|share| self.get(share.0));
        let least = prompt.map_or(Budget { rows: 0, work: 0 }, |prompt| Budget::of(prompt.computed, 1));
        let takes_turns = !budget.covers(set_aside.plus(least));
        if takes_turns {
            set_aside = Budget { rows: 0, work: 0 };
        }
        self.share_rows(budget.minus(set_aside).rows);
        for &index in &order {
            if self.get(index).state != State::Running {
                continue;
            }
            if let Some(wanted) = decode_wants(self.get(index)) {
                set_aside = set_aside.minus(wanted);
            }
            let limit = self.share_of(index, budget.minus(set_aside));
            match self.plan_sequence(plan, index, limit) {
                Planned::Rows(used) => *budget = budget.minus(used),
                Planned::NoBudget => {
                    self.get_mut(index).lacking = Some(Lacking::Budget);
                    if takes_turns {
                        self.resume_at.get_or_insert(self.get(index).place());
                    }
                }
                Planned::NoRoom if self.yields(index) => self.evict(index, None),
                Planned::NoRoom => {
                    let needed = self.blocks_for_rows(index, 1);
                    let available = self.available_to(index);
                    self.get_mut(index).lacking = Some(Lacking::Blocks { needed, available });
                }
            }
        }
        self.order = order;
    }

    /// Shares `rows` rows out among the prompts that are being read: each takes half of what is left, the last one all of
    /// it, and what is left then goes to the first ones. So a short prompt is read at once while a long one is read on.
    /// While somebody may be let in, whatever half is left is for them.
    fn share_rows(&mut self, rows: u32) {
        let mut shares = std::mem::take(&mut self.shares);
        let newcomers = self.may_let_in();
        let (mut left, last) = (rows, shares.len().saturating_sub(1));
        for (place, share) in shares.iter_mut().enumerate() {
            let half = if place == last && !newcomers { left } else { left.div_ceil(2) };
            share.1 = half.min(self.get(share.0).uncomputed());
            left -= share.1;
        }
        if !newcomers {
            for share in &mut shares {
                let more = left.min(self.get(share.0).uncomputed() - share.1);
                share.1 += more;
                left -= more;
            }
        }
        self.shares = shares;
    }

    /// What a sequence may use of `limit`: a prompt its share of the rows and, unless it is the last one, half the work.
    fn share_of(&self, index: Index, limit: Budget) -> Budget {
        let Some(place) = self.shares.iter().position(|share| share.0 == index) else { return limit };
        let is_last = place + 1 == self.shares.len() && !self.may_let_in();
        let least = Budget::of(self.get(index).computed, 1).work;
        let work = if is_last { limit.work } else { (limit.work / 2).max(least).min(limit.work) };
        Budget { rows: limit.rows.min(self.shares[place].1), work }
    }

    /// Whether the first in line has not been refused since anything was given up.
    fn may_let_in(&self) -> bool {
        let first = self.door();
        first.is_some() && first != self.closed_at
    }

    /// The first in line, and how much was given up so far: what could let it in.
    fn door(&self) -> Option<(Place, u64)> {
        let given_up = self.ledger.given_up() + self.cache.num_expirations();
        self.line.first().map(|first| (self.get(first).place(), given_up))
    }

    /// Lets requests in while rows are left, or only the one that others were preempted for. Returns what the first one left
    /// outside lacks.
    fn admit(
        &mut self,
        plan: &mut StepPlan,
        budget: &mut Budget,
        preempted_for: Option<Index>,
    ) -> Option<Lacking> {
        while self.line.first().is_some() {
            if plan.num_rows() > 0 && (budget.rows == 0 || budget.work == 0) {
                return None;
            }
            let index = match self.admit_next(preempted_for) {
                Ok(index) => index,
                Err(lacking) => {
                    self.closed_at = self.door();
                    return Some(lacking);
                }
            };
            if let Planned::Rows(used) = self.plan_sequence(plan, index, *budget) {
                *budget = budget.minus(used);
            }
            if preempted_for.is_some() {
                return None;
            }
        }
        None
    }

    /// Plans as many rows of a sequence as budget and blocks allow, making room for at least one.
    fn plan_sequence(&mut self, plan: &mut StepPlan, index: Index, budget: Budget) -> Planned {
        let Some(table) = self.get(index).table else { return Planned::NoRoom };
        if self.cache.slides() {
            self.slide(index, table);
        }
        let sequence = self.get(index);
        let drafts = sequence.usable_drafts();
        let computed = sequence.computed;
        let most = (sequence.uncomputed() + drafts).min(budget.rows);
        let mut rows = rows_within(computed, self.rows_promised(index, most), budget.work);
        if rows == 0 {
            if plan.num_rows() > 0 {
                return Planned::NoBudget;
            }
            // Progress: a step has at least one row.
            rows = 1;
        }
        let reserved = self.reserved_by_others(index);
        if self.missing_to(index, self.blocks_for_rows(index, rows)) > 0 {
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
        let Ok(first_row) = push_rows(&mut self.cache, plan, table, tokens, drafts, reserved) else {
            debug_assert!(false, "blocks were counted before they were taken");
            return Planned::NoRoom;
        };
        if fault!(RegisteredWhenPlanned) {
            let known = &sequence.tokens[..start + known as usize];
            let mut hashes = Vec::new();
            self.cache.extend_hashes(&sequence.namespace, known, &mut hashes);
            self.cache.register(table, &sequence.namespace, known, &hashes, &[]);
        }
        self.request_logits(plan, index, first_row, rows, known);
        self.recount(index);
        self.planned.push(index);
        Planned::Rows(Budget::of(computed, rows))
    }

    /// Gives back what a sequence's rows do not see any more.
    fn slide(&mut self, index: Index, table: TableId) {
        self.cache.slide(table);
        self.recount(index);
        // What it leaves pinned behind its window does not take what is promised, be it that kept sequences hold it, too.
        while self.get(index).is_promised() && self.check_promise(None).is_err() {
            if self.cache.give_up_pins(self.cache.free_blocks() + 1) == 0 && !self.give_up_pinned_content() {
                break;
            }
        }
    }

    /// The most of `rows` rows for which a sequence's windows hold no more than is promised to it, or reserved.
    fn rows_promised(&self, index: Index, rows: u32) -> u32 {
        let sequence = self.get(index);
        match sequence.is_promised() || sequence.protected {
            true if self.cache.slides() => rows.min(self.most_rows),
            _ => rows,
        }
    }

    fn request_logits(&mut self, plan: &mut StepPlan, index: Index, first_row: u32, rows: u32, known: u32) {
        let sequence = self.records[index].as_mut().expect("an index in a queue has a record");
        sequence.planned_rows = rows;
        sequence.lacking = None;
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

    /// Free blocks that `rows` more rows take.
    fn blocks_for_rows(&self, index: Index, rows: u32) -> u32 {
        blocks::for_rows(&self.cache, self.get(index), rows, self.reserved_by_others(index))
    }

    /// Makes room for as many of `rows` rows as possible. Idle content gives way to all of them, running sequences only
    /// to the first block's. Returns the rows that fit then.
    fn room_for(&mut self, index: Index, rows: u32) -> u32 {
        let fit = blocks::rows_within(&self.cache, self.get(index), rows, self.available_to(index));
        let mut wanted = rows;
        while wanted > fit {
            if self.make_room(index, self.blocks_for_rows(index, wanted), false) {
                return wanted;
            }
            wanted /= 2;
        }
        if fit > 0 {
            return fit;
        }
        let node_tokens = self.cache.node_tokens();
        [rows.min(node_tokens), 1]
            .into_iter()
            .find(|&rows| self.make_room(index, self.blocks_for_rows(index, rows), true))
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
