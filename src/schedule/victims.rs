//! Victims (I9): whose blocks and tables are taken when none are free. A pure choice over a read-only view.
//!
//! Kept sequences are idle content: they come first, least recently finished first. Sequences in line follow, the last in
//! line first, then running ones as the policy says, unless they are in this step already or protected. Victims are taken
//! only when together they free enough, and none is taken that is not needed for it.
//!
//! What victims free is less than what they hold: a block returns when all that hold it have given it up, unless a copy of
//! the step still reads it, it stays as content, or the requester will hold it itself.

use crate::ids::BlockId;
use crate::schedule::request::{Priority, VictimPolicy};
use crate::schedule::scheduler::Index;
use crate::schedule::sequence::Place;
use std::cmp::Reverse;
use std::collections::HashMap;

/// Whose blocks may be taken, beside idle content's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    Idle,
    /// Running sequences, by the policy.
    Running,
    /// Running sequences of lower classes.
    LowerClass,
}

/// How far it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resort {
    Usual,
    /// Pinned content goes, and whatever sequences in line hold, even those before the requester: no sequence goes on otherwise.
    Last,
}

/// A sequence that has a table, as a choice sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) index: Index,
    pub(super) place: Place,
    pub(super) priority: Priority,
    /// Tables that its end frees: its own, and those set aside for its samples.
    pub(super) tables: u32,
    /// Blocks of the pool that it has.
    pub(super) num_blocks: u32,
    /// Its blocks are promised to it.
    pub(super) is_promised: bool,
    /// It is in this step already, or protected.
    pub(super) is_spared: bool,
}

/// Who holds a block, and who keeps it from being given to others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holding {
    pub(super) holders: u32,
    /// A copy of the step reads it.
    pub(super) is_fenced: bool,
    /// It stays in the prefix cache without a holder.
    pub(super) is_retained: bool,
}

/// What a choice looks at. Those without a table are left out.
pub(super) trait View {
    /// Kept sequences, least recently finished first.
    fn kept(&self) -> impl Iterator<Item = Candidate>;

    /// Sequences in line, the last one first.
    fn waiting(&self) -> impl Iterator<Item = Candidate>;

    /// Running sequences, the last one first.
    fn running(&self) -> impl Iterator<Item = Candidate>;

    /// The blocks of the pool that a sequence has.
    fn blocks(&self, index: Index) -> impl Iterator<Item = BlockId>;

    fn holding(&self, block: BlockId) -> Holding;

    /// Blocks that a preemption would lose or move.
    fn lost(&self, index: Index) -> u32;
}

/// A sequence that blocks are taken for.
#[derive(Clone, Debug)]
pub(super) struct Requester {
    pub(super) index: Index,
    pub(super) place: Place,
    pub(super) priority: Priority,
    pub(super) is_protected: bool,
    /// Its shared last blocks: giving one up frees no block, but saves the copy of it.
    pub(super) tails: Vec<BlockId>,
    /// What it has found in the prefix cache, and will hold itself; sorted.
    pub(super) found: Vec<BlockId>,
}

/// The choice: for whom, and how far it goes.
#[derive(Clone, Debug)]
pub(super) struct Victims {
    pub(super) requester: Requester,
    /// None where no running sequence is ever preempted.
    pub(super) policy: Option<VictimPolicy>,
    pub(super) reach: Reach,
    pub(super) resort: Resort,
}

impl Victims {
    /// Sequences that free `missing` blocks together.
    pub(super) fn choose(&self, view: &impl View, missing: u32) -> Option<Vec<Index>> {
        if missing == 0 {
            return Some(Vec::new());
        }
        let mut candidates = self.candidates(view);
        // Copies are saved when all others give the requester's last blocks up.
        let copies = self.requester.tails.len().max(1) as u32;
        let at_most: u32 = candidates.iter().map(|candidate| candidate.num_blocks + copies).sum();
        if at_most < missing {
            return None;
        }
        let mut freed = Freed { view, victims: self, given_up: HashMap::new(), blocks: 0 };
        let enough = candidates.iter().position(|victim| freed.add(victim) >= missing)?;
        candidates.truncate(enough + 1);
        // Those that free nothing, or less than what is freed beyond need, are spared.
        for place in (0..enough).rev() {
            let spared = freed.freed_by(&candidates[place]);
            if freed.blocks - spared + u32::from(fault!(VictimsFreeTooLittle)) >= missing {
                freed.remove(&candidates[place]);
                candidates.remove(place);
            }
        }
        Some(candidates.iter().map(|victim| victim.index).collect())
    }

    /// Whose blocks may be taken, in the order in which they are.
    fn candidates(&self, view: &impl View) -> Vec<Candidate> {
        // A turn or branch that waits in line holds blocks as a kept sequence does; under guarantee they are promised.
        let waiting = view.waiting().filter(|other| {
            let within_reach = self.resort == Resort::Last || other.place > self.requester.place;
            within_reach && other.index != self.requester.index && !other.is_promised
        });
        let mut candidates: Vec<Candidate> = view.kept().chain(waiting).collect();
        let Some(policy) = self.policy.filter(|_| self.reach != Reach::Idle) else { return candidates };
        let idle = candidates.len();
        candidates.extend(view.running().filter(|other| self.may_preempt(policy, other)));
        if self.reach == Reach::Running && policy == VictimPolicy::LeastLost {
            candidates[idle..].sort_by_key(|other| (view.lost(other.index), Reverse(other.place)));
        }
        candidates
    }

    fn may_preempt(&self, policy: VictimPolicy, other: &Candidate) -> bool {
        let Requester { index, place, priority, is_protected, .. } = self.requester;
        // What a protected sequence's window leaves behind does not return while another one holds it. That one may
        // stand before it, and have nothing to go on with.
        let is_last = is_protected && self.resort == Resort::Last;
        let within_reach = match (self.reach, policy) {
            (Reach::Idle, _) => false,
            (Reach::LowerClass, _) => other.priority > priority && other.place > place,
            (Reach::Running, VictimPolicy::LowestPriority) => other.place > place || is_last,
            (Reach::Running, VictimPolicy::LeastLost) => {
                other.index != index && (other.priority >= priority || is_last)
            }
            (Reach::Running, VictimPolicy::Requester) => false,
        };
        within_reach && !other.is_spared
    }
}

/// Idle sequences that free `missing` tables for `index` together. Where it branches off `parent`, which keeps its own, those
/// in line keep theirs, too.
pub(super) fn choose_tables(
    view: &impl View,
    index: Index,
    parent: Option<Index>,
    missing: u32,
) -> Option<Vec<Index>> {
    let waiting = view.waiting().filter(|_| parent.is_none());
    let idle = view.kept().chain(waiting);
    let mut victims = Vec::new();
    let mut freed = 0;
    for victim in
        idle.filter(|other| other.index != index && Some(other.index) != parent && !other.is_promised)
    {
        if freed >= missing {
            break;
        }
        freed += victim.tables;
        victims.push(victim.index);
    }
    (freed >= missing).then_some(victims)
}

/// Blocks that victims free together.
struct Freed<'a, V> {
    view: &'a V,
    victims: &'a Victims,
    given_up: HashMap<BlockId, u32>,
    blocks: u32,
}

impl<V: View> Freed<'_, V> {
    /// Adds a victim; returns what is freed then.
    fn add(&mut self, victim: &Candidate) -> u32 {
        for block in self.view.blocks(victim.index) {
            *self.given_up.entry(block).or_default() += 1;
        }
        self.blocks += self.freed_by(victim);
        self.blocks
    }

    fn remove(&mut self, victim: &Candidate) {
        self.blocks -= self.freed_by(victim);
        for block in self.view.blocks(victim.index) {
            self.given_up.entry(block).and_modify(|given_up| *given_up -= 1);
        }
    }

    /// Blocks of a victim that would have no holder any more, and that any sequence may take.
    fn freed_by(&self, victim: &Candidate) -> u32 {
        let Victims { requester: Requester { tails, found, .. }, resort, .. } = self.victims;
        let is_freed = |&block: &BlockId| {
            let Holding { holders, is_fenced, is_retained } = self.view.holding(block);
            let is_tail = tails.contains(&block);
            self.given_up.get(&block) == Some(&(holders - u32::from(is_tail)))
                && found.binary_search(&block).is_err()
                && (is_tail || !is_fenced)
                && (*resort == Resort::Last || !is_retained)
        };
        self.view.blocks(victim.index).filter(is_freed).count() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use VictimPolicy::{LeastLost, LowestPriority};

    /// Sequences whose blocks are written down; who holds a block is counted from them.
    #[derive(Default)]
    struct Written {
        kept: Vec<Candidate>,
        waiting: Vec<Candidate>,
        running: Vec<Candidate>,
        blocks: HashMap<Index, Vec<BlockId>>,
        retained: Vec<BlockId>,
        fenced: Vec<BlockId>,
    }

    impl View for Written {
        fn kept(&self) -> impl Iterator<Item = Candidate> {
            self.kept.iter().copied()
        }

        fn waiting(&self) -> impl Iterator<Item = Candidate> {
            self.waiting.iter().copied()
        }

        fn running(&self) -> impl Iterator<Item = Candidate> {
            self.running.iter().copied()
        }

        fn blocks(&self, index: Index) -> impl Iterator<Item = BlockId> {
            self.blocks.get(&index).into_iter().flatten().copied()
        }

        fn holding(&self, block: BlockId) -> Holding {
            Holding {
                holders: self.blocks.values().filter(|blocks| blocks.contains(&block)).count() as u32,
                is_fenced: self.fenced.contains(&block),
                is_retained: self.retained.contains(&block),
            }
        }

        fn lost(&self, index: Index) -> u32 {
            self.blocks(index).count() as u32
        }
    }

    /// A sequence, and the blocks that it holds.
    type Holder = (Index, &'static [u32]);

    impl Written {
        /// Kept sequences, those in line and running ones: each arrived at the step of its number.
        fn new(kept: &[Holder], waiting: &[Holder], running: &[Holder]) -> Self {
            let candidate = |&(index, blocks): &Holder| Candidate {
                index,
                place: Place::arrived(index as u64),
                priority: Priority::Normal,
                tables: 1,
                num_blocks: blocks.len() as u32,
                is_promised: false,
                is_spared: false,
            };
            let all = kept.iter().chain(waiting).chain(running);
            let blocks = |blocks: &[u32]| blocks.iter().copied().map(BlockId).collect();
            Self {
                kept: kept.iter().map(candidate).collect(),
                waiting: waiting.iter().map(candidate).collect(),
                running: running.iter().map(candidate).collect(),
                blocks: all.map(|&(index, held)| (index, blocks(held))).collect(),
                ..Self::default()
            }
        }
    }

    /// Sequence 5 asks for blocks.
    fn victims(policy: VictimPolicy, reach: Reach) -> Victims {
        let requester = Requester {
            index: 5,
            place: Place::arrived(5),
            priority: Priority::Normal,
            is_protected: false,
            tails: Vec::new(),
            found: Vec::new(),
        };
        Victims { requester, policy: Some(policy), reach, resort: Resort::Usual }
    }

    #[test]
    fn kept_sequences_come_before_those_in_line_and_those_before_running_ones() {
        let view =
            Written::new(&[(1, &[10])], &[(8, &[11]), (4, &[12])], &[(7, &[13]), (5, &[14]), (2, &[15])]);
        let choice = victims(LowestPriority, Reach::Running);
        assert_eq!(choice.choose(&view, 0), Some(vec![]));
        assert_eq!(choice.choose(&view, 1), Some(vec![1]));
        assert_eq!(choice.choose(&view, 2), Some(vec![1, 8]));
        assert_eq!(choice.choose(&view, 3), Some(vec![1, 8, 7]));
        // Neither 4, which comes before it in line, nor 2, which comes before it among those that run.
        assert_eq!(choice.choose(&view, 4), None);
        let last = Victims { resort: Resort::Last, ..choice.clone() };
        assert_eq!(last.choose(&view, 4), Some(vec![1, 8, 4, 7]));
        assert_eq!(victims(LowestPriority, Reach::Idle).choose(&view, 3), None);
        assert_eq!(Victims { policy: None, ..choice.clone() }.choose(&view, 3), None);
    }

    #[test]
    fn none_is_taken_that_is_not_needed() {
        let view = Written::new(&[(1, &[10]), (2, &[]), (3, &[11, 12, 13])], &[], &[]);
        let choice = victims(LowestPriority, Reach::Idle);
        assert_eq!(choice.choose(&view, 3), Some(vec![3]));
        assert_eq!(choice.choose(&view, 4), Some(vec![1, 3]));
    }

    #[test]
    fn a_shared_block_is_freed_by_the_last_of_its_holders() {
        let view = Written::new(&[(1, &[10, 11]), (2, &[10, 12])], &[], &[(3, &[12])]);
        let choice = victims(LowestPriority, Reach::Idle);
        assert_eq!(choice.choose(&view, 1), Some(vec![1]));
        assert_eq!(choice.choose(&view, 2), Some(vec![1, 2]));
        assert_eq!(choice.choose(&view, 3), None, "3 holds block 12, too");
    }

    #[test]
    fn what_is_found_fenced_or_retained_frees_nothing() {
        let view = Written {
            retained: vec![BlockId(13)],
            fenced: vec![BlockId(14)],
            ..Written::new(&[(1, &[10, 11, 12, 13, 14])], &[], &[])
        };
        let mut choice = victims(LowestPriority, Reach::Idle);
        choice.requester.found = vec![BlockId(10), BlockId(11)];
        assert_eq!((choice.choose(&view, 1), choice.choose(&view, 2)), (Some(vec![1]), None));
        choice.resort = Resort::Last;
        assert_eq!((choice.choose(&view, 2), choice.choose(&view, 3)), (Some(vec![1]), None));
    }

    #[test]
    fn giving_up_the_requesters_last_block_saves_its_copy() {
        let view = Written { fenced: vec![BlockId(10)], ..Written::new(&[(1, &[10])], &[], &[(5, &[10])]) };
        let mut choice = victims(LowestPriority, Reach::Idle);
        assert_eq!(choice.choose(&view, 1), None);
        choice.requester.tails = vec![BlockId(10)];
        assert_eq!(choice.choose(&view, 1), Some(vec![1]));
    }

    #[test]
    fn the_policy_says_which_running_sequences_are_preempted() {
        let mut view = Written::new(&[], &[], &[(8, &[10, 11]), (7, &[12, 13]), (5, &[14]), (4, &[15])]);
        assert_eq!(victims(LowestPriority, Reach::Running).choose(&view, 1), Some(vec![8]));
        // The fewest blocks, and of as many the last in order; it may come before the requester.
        assert_eq!(victims(LeastLost, Reach::Running).choose(&view, 1), Some(vec![4]));
        assert_eq!(victims(LeastLost, Reach::Running).choose(&view, 3), Some(vec![4, 8]));
        assert_eq!(victims(VictimPolicy::Requester, Reach::Running).choose(&view, 1), None);
        assert_eq!(victims(LowestPriority, Reach::LowerClass).choose(&view, 1), None);
        view.running[0].is_spared = true;
        view.running[1].priority = Priority::Idle;
        assert_eq!(victims(LowestPriority, Reach::LowerClass).choose(&view, 1), Some(vec![7]));
        assert_eq!(victims(LowestPriority, Reach::Running).choose(&view, 1), Some(vec![7]));
    }

    #[test]
    fn before_a_step_has_no_row_a_protected_sequence_takes_from_those_before_it() {
        let mut view = Written::new(&[], &[], &[(5, &[14]), (4, &[15]), (3, &[16])]);
        view.running[0].is_spared = true;
        view.running[2].is_spared = true;
        for policy in [LowestPriority, LeastLost] {
            let mut choice = Victims { resort: Resort::Last, ..victims(policy, Reach::Running) };
            view.running[1].priority = Priority::Interactive;
            assert_eq!(choice.choose(&view, 1), None);
            choice.requester.is_protected = true;
            assert_eq!((choice.choose(&view, 1), choice.choose(&view, 2)), (Some(vec![4]), None));
            assert_eq!(Victims { resort: Resort::Usual, ..choice }.choose(&view, 1), None);
        }
    }

    #[test]
    fn tables_are_taken_from_kept_sequences_and_from_those_in_line() {
        let mut view = Written::new(&[(1, &[]), (2, &[10])], &[(8, &[11]), (7, &[12])], &[]);
        view.waiting[0].tables = 3;
        view.waiting[1].is_promised = true;
        assert_eq!(choose_tables(&view, 5, None, 1), Some(vec![1]));
        assert_eq!(choose_tables(&view, 5, None, 5), Some(vec![1, 2, 8]));
        assert_eq!(choose_tables(&view, 5, None, 6), None, "what is promised stays");
        assert_eq!(choose_tables(&view, 5, Some(2), 1), Some(vec![1]));
        assert_eq!(choose_tables(&view, 5, Some(2), 2), None, "the parent keeps its table");
    }
}
