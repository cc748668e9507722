//! [`Scheduler::schedule`]: which rows the next step computes.
//!
//! Running sequences come first, in order of arrival; each decoding one has its rows set aside before a prompt's chunk
//! takes what is left of the budgets. When the budgets do not even cover the decoding ones, they take turns: the next
//! step begins where this one ended. Then, unless a sequence was preempted, requests in line are let in while rows are
//! left.

use crate::cache::Growth;
use crate::error::ConfigError;
use crate::ids::{SequenceId, TableId};
use crate::schedule::admission::Lacking;
use crate::schedule::blocks;
use crate::schedule::budget::{Budget, Kind, Turn, prompt_limit, share_rows, wanted};
use crate::schedule::request::{Schedule, SchedulerConfig, WaitReason};
use crate::schedule::scheduler::{Index, Scheduler};
use crate::schedule::sequence::{Place, Sequence, State, Wants};
use crate::schedule::step_builder::{begin_plan, finish_plan, push_rows};
use crate::schedule::step_plan::StepPlan;

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
        if self.cache.has_step() {
            self.rollback();
        }
        while let Some(table) = self.cache.take_broken_table() {
            self.restart_broken(table);
        }
        if self.cache.check_poison().is_err() {
            return Schedule::Waiting(WaitReason::Poisoned);
        }
        let mut plan = std::mem::take(&mut self.spare_plan);
        begin_plan(&mut self.cache, &mut plan);
        let mut budget = Budget { rows: self.config.step_tokens, work: self.config.step_work_budget };
        let lacking = self.fill(&mut plan, &mut budget);
        if !plan.token_ids.is_empty() {
            finish_plan(&self.cache, &mut plan);
            return Schedule::Step(plan);
        }
        self.rollback();
        self.spare_plan = plan;
        match lacking {
            _ if self.sequences.are_idle() => Schedule::Idle,
            Some(lacking @ (Lacking::Blocks { .. } | Lacking::Transfers)) => {
                Schedule::Waiting(self.wait_reason(lacking))
            }
            _ => Schedule::Waiting(WaitReason::Blocks { needed: 1, available: self.cache.free_blocks() }),
        }
    }

    /// Sets the budgets of the steps that are planned from now on: rows, and (row, key) pairs, as in
    /// [`SchedulerConfig`](crate::SchedulerConfig).
    ///
    /// An application that draws has a fixed time for a step. Once it has seen how long steps take, it divides the sum
    /// of their [`work`](StepPlan::work) by the sum of their times and multiplies these pairs per second by the time
    /// that it has. For the rest of the model it does the same with rows. Only steps of about that size count: small
    /// ones take longer per pair. `step_tokens` must not exceed the rows of the tensors that it has bound.
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
        self.planned.iter().map(|&index| self.sequences[index].id())
    }

    /// Plans a step. Returns what the first in line lacks, if it was asked.
    fn fill(&mut self, plan: &mut StepPlan, budget: &mut Budget) -> Option<Lacking> {
        let first = self.sequences.first_in_line();
        let preempted_for = first.filter(|&first| self.displace(first));
        let (start, mut lacking) = (self.stats.preemptions, None);
        loop {
            let before = self.stats.preemptions;
            self.plan_running(plan, budget);
            let has_preempted = self.stats.preemptions > before;
            if plan.token_ids.is_empty() && has_preempted {
                // Blocks that the last in order gave up are for those before it.
                continue;
            }
            // None comes into the line while none is preempted.
            let may_admit = first.is_some() && self.stats.preemptions == start;
            if may_admit || fault!(AdmittedAfterPreempting) {
                lacking = self.admit(plan, budget, preempted_for);
            }
            let ends = !plan.token_ids.is_empty() || self.sequences.are_idle() || fault!(NoLastResort);
            if ends || std::mem::replace(&mut self.last_resort, true) {
                self.last_resort = false;
                return lacking;
            }
        }
    }

    /// Undoes the outstanding plan: growth, copies and lengths. Preemptions and evictions stand.
    pub(super) fn rollback(&mut self) {
        let moves = self.cache.step_moves();
        let swapped = !moves.swap_outs.is_empty() || !moves.swap_ins.is_empty();
        self.cache.rollback_step();
        let planned = std::mem::take(&mut self.planned);
        for &index in &planned {
            self.sequences.unplan(index, &self.cache);
        }
        while let Some(index) = self.sequences.pop_pending_fork() {
            self.resolve_fork(index);
        }
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
        self.sequences.lose(&self.cache);
        let out = |&index: &Index| blocks::returning(&self.cache, self.sequences[index].table()) > 0;
        let back: Vec<Index> = self.sequences.running().iter().copied().filter(out).collect();
        for index in back {
            self.events.take_back_admission(self.sequences[index].id());
            self.requeue(index);
        }
    }

    /// Carries out what was asked of a sequence while its step was outstanding, except for its results.
    pub(super) fn settle(&mut self, index: Index) {
        if !self.sequences.get(index).is_some_and(Sequence::is_asked) {
            return;
        }
        let all_told = self.drop_aborted_samples(index);
        if self.sequences[index].is_aborting() {
            if !all_told {
                self.tell_ended(index);
            }
            self.end(index);
        } else {
            self.make_cut(index);
        }
    }

    /// Plans rows for sequences that run.
    fn plan_running(&mut self, plan: &mut StepPlan, budget: &mut Budget) {
        let mut turns = self.take_turns();
        if turns.is_empty() {
            self.turns = turns;
            return;
        }
        let before = self.stats.preemptions;
        let (mut set_aside, least) = wanted(&turns);
        // A prompt that is being read needs a row, too.
        let takes_turns = !budget.covers(set_aside.plus(least));
        if takes_turns {
            set_aside = Budget::default();
        }
        let last_prompt = share_rows(&mut turns, budget.minus(set_aside).rows, || self.may_let_in());
        for (place, turn) in turns.iter().enumerate() {
            // One before it may have taken its blocks.
            let has_preempted = self.stats.preemptions > before;
            if has_preempted && self.sequences[turn.index].state() != State::Running {
                continue;
            }
            if matches!(turn.kind, Kind::Decode) {
                set_aside = set_aside.minus(turn.wanted());
            }
            let mut limit = budget.minus(set_aside);
            if let Kind::Prompt(share) = turn.kind {
                let takes_all = last_prompt == Some(place) && !self.may_let_in();
                limit = prompt_limit(limit, turn, share, takes_all);
            }
            match self.plan_sequence(plan, turn.index, turn.wants, limit) {
                Planned::Rows(used) => *budget = budget.minus(used),
                Planned::NoBudget => {
                    self.sequences.note_lacking(turn.index, Some(Lacking::Budget));
                    if takes_turns {
                        self.resume_at.get_or_insert(self.sequences[turn.index].place());
                    }
                }
                Planned::NoRoom => self.wait_for_room(turn.index),
            }
        }
        self.turns = turns;
    }

    /// Those that run, in the order in which they have rows: the one that had none in the last step begins.
    fn take_turns(&mut self) -> Vec<Turn> {
        let mut turns = std::mem::take(&mut self.turns);
        turns.clear();
        // One pass over the records, which are many.
        let running = self.sequences.running().iter();
        turns.extend(running.map(|&index| Turn::new(index, self.sequences[index].wants())));
        if let Some(first) = self.resume_at.take() {
            let split = turns.partition_point(|turn| self.sequences[turn.index].place() < first);
            turns.rotate_left(split);
        }
        turns
    }

    /// A running sequence finds no room: it gives its own blocks up, if that is the policy, or waits in place.
    fn wait_for_room(&mut self, index: Index) {
        if self.yields(index) {
            return self.evict(index, None);
        }
        let needed = self.blocks_for_rows(index, 1);
        let available = self.available_to(index);
        self.sequences.note_lacking(index, Some(Lacking::Blocks { needed, available }));
    }

    /// Whether the first in line has not been refused since anything was given up.
    fn may_let_in(&self) -> bool {
        let first = self.door();
        first.is_some() && first != self.closed_at
    }

    /// The first in line, and how much was given up so far: what could let it in.
    fn door(&self) -> Option<(Place, u64)> {
        let given_up = self.ledger.given_up() + self.cache.num_expirations();
        self.sequences.first_in_line().map(|first| (self.sequences[first].place(), given_up))
    }

    /// Lets requests in while rows are left, or only the one that others were preempted for. Returns what the first one left
    /// outside lacks.
    fn admit(
        &mut self,
        plan: &mut StepPlan,
        budget: &mut Budget,
        preempted_for: Option<Index>,
    ) -> Option<Lacking> {
        while let Some(first) = self.sequences.first_in_line() {
            if !plan.token_ids.is_empty() && (budget.rows == 0 || budget.work == 0) {
                return None;
            }
            let admitted = self.admit_next(first, preempted_for);
            self.matched.forget();
            let index = match admitted {
                Ok(index) => index,
                Err(lacking) => {
                    self.closed_at = self.door();
                    return Some(lacking);
                }
            };
            let wants = self.sequences[index].wants();
            if let Planned::Rows(used) = self.plan_sequence(plan, index, wants, *budget) {
                *budget = budget.minus(used);
            }
            if preempted_for.is_some() {
                return None;
            }
        }
        None
    }

    /// Plans as many of the rows that a sequence wants as budget and blocks allow, making room for at least one.
    fn plan_sequence(&mut self, plan: &mut StepPlan, index: Index, wants: Wants, budget: Budget) -> Planned {
        let Some(table) = self.sequences[index].table() else { return Planned::NoRoom };
        let mut rows = wants.known + wants.drafts;
        if self.slides {
            rows = self.slide(index, table, rows);
        }
        let mut used = budget.most(wants.computed, rows);
        if used.rows == 0 {
            if !plan.token_ids.is_empty() {
                return Planned::NoBudget;
            }
            // Progress: a step has at least one row.
            used = Budget::of(wants.computed, 1);
        }
        let Some((growth, rows)) = self.make_growth(index, table, used.rows) else { return Planned::NoRoom };
        if rows < used.rows {
            used = Budget::of(wants.computed, rows);
        }
        let sequence = &self.sequences[index];
        let (tokens, drafts) = sequence.row_tokens(used.rows);
        let Ok(first_row) = push_rows(&mut self.cache, plan, growth, tokens, drafts) else {
            debug_assert!(false, "blocks were counted before they were taken");
            return Planned::NoRoom;
        };
        if fault!(RegisteredWhenPlanned) {
            self.register_planned(index, wants.computed + tokens.len() as u32);
        }
        let sequence = &self.sequences[index];
        let logits = sequence.request_logits(&mut plan.logit_rows, first_row, used.rows);
        let has_all = !self.slides && used.rows >= wants.known;
        self.sequences.plan(index, (used.rows, logits), has_all, &self.cache);
        self.planned.push(index);
        Planned::Rows(used)
    }

    /// What as many of `rows` rows as possible take, once there is room for it, and how many these are. None where there is
    /// room for none.
    fn make_growth(&mut self, index: Index, table: TableId, rows: u32) -> Option<(Growth, u32)> {
        let reserve = self.ledger.reserve(index, &self.sequences, &self.cache);
        let free = self.cache.free_blocks();
        let growth = self.cache.growth(table, rows, free.saturating_sub(reserve.for_others));
        debug_assert!(growth.is_ok(), "a sequence that runs cannot grow: {growth:?}");
        let needed = growth.as_ref().map_or(u32::MAX, |growth| growth.needed());
        if needed == 0 || needed.saturating_add(reserve.untouchable) <= free {
            return growth.ok().map(|growth| (growth, rows));
        }
        let rows = self.room_for(index, rows);
        let free = self.cache.free_blocks();
        let growth = self.cache.growth(table, rows, free.saturating_sub(reserve.for_others)).ok();
        growth.filter(|_| rows > 0).map(|growth| (growth, rows))
    }

    /// Gives back what a sequence's rows do not see any more. Returns the most of `rows` rows for which its windows hold no
    /// more than is promised to it, or reserved.
    fn slide(&mut self, index: Index, table: TableId, rows: u32) -> u32 {
        self.cache.slide(table);
        self.sequences.recount(index, &self.cache);
        // What it leaves pinned behind its window does not take what is promised, even if kept sequences hold it, too.
        while self.sequences[index].is_promised() && self.promises().check(None).is_err() {
            if self.cache.give_up_pins(self.cache.free_blocks() + 1) == 0 && !self.give_up_pinned_content() {
                break;
            }
        }
        let sequence = &self.sequences[index];
        let is_bound = sequence.is_promised() || sequence.is_protected();
        if is_bound { rows.min(self.cache.rows_at_most()) } else { rows }
    }

    /// Free blocks that `rows` more rows take.
    fn blocks_for_rows(&self, index: Index, rows: u32) -> u32 {
        let reserve = self.ledger.reserve(index, &self.sequences, &self.cache);
        blocks::for_rows(&self.cache, self.sequences[index].table(), rows, reserve.for_others)
    }

    /// Makes room for as many of `rows` rows as possible. Idle content gives way to all of them, running sequences only
    /// to the first block's. Returns the rows that fit then.
    fn room_for(&mut self, index: Index, rows: u32) -> u32 {
        let table = self.sequences[index].table();
        let fit = blocks::rows_within(&self.cache, table, rows, self.available_to(index));
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
