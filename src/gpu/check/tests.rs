//! Plans that cannot be built, each with one number wrong: what the shaders, which check nothing, must never see.

use super::PlanChecker;
use crate::config::CacheConfig;
use crate::error::{PlanFault, PrepareError};
use crate::ids::TableId;
use crate::model::{KvType, LayerGroup, ModelShape};
use crate::reach::Reach;
use crate::schedule::{StackPlan, StepBuilder, StepPlan};
use crate::{BlockCopy, KvCache};

/// Twelve blocks of four tokens, tables of 24 tokens, three of them.
fn config() -> CacheConfig {
    let shape = ModelShape::new(1, 1, 1, 8);
    CacheConfig::for_blocks(12, &shape, KvType::F16)
        .and_then(|config| config.with_block_size(4))
        .and_then(|config| config.with_max_sequences(3))
        .and_then(|config| config.with_max_sequence_tokens(24))
        .expect("a valid configuration")
}

fn plan(cache: &mut KvCache, pushes: &[(TableId, u32)]) -> StepPlan {
    let mut builder = StepBuilder::new(cache);
    for &(table, rows) in pushes {
        builder.push(table, &vec![7; rows as usize]).expect("room in the pool");
    }
    builder.finish()
}

/// Six rows of one sequence in blocks 0 and 1, one row of another in block 2.
fn two_sequences() -> StepPlan {
    let mut cache = KvCache::new(config());
    let tables = [(); 2].map(|()| cache.create(24).expect("a free table"));
    plan(&mut cache, &[(tables[0], 6), (tables[1], 1)])
}

fn check(checker: &mut PlanChecker, plan: &StepPlan) -> Result<(), PrepareError> {
    checker.check_origin(plan)?;
    Ok(checker.check(plan)?)
}

#[test]
fn one_wrong_number_is_refused_by_its_name() {
    assert_eq!(check(&mut PlanChecker::new(&config()), &two_sequences()), Ok(()));
    type Break = fn(&mut StepPlan);
    let cases: [(Break, PlanFault); 24] = [
        (|plan| plan.positions.truncate(6), PlanFault::Length { array: "positions", actual: 6, expected: 7 }),
        (
            |plan| plan.stacks[0].slot_mapping.push(9),
            PlanFault::Length { array: "slot_mapping", actual: 8, expected: 7 },
        ),
        (
            |plan| plan.query_starts.truncate(2),
            PlanFault::Length { array: "query_starts", actual: 2, expected: 3 },
        ),
        (|plan| plan.table_rows.push(2), PlanFault::Length { array: "table_rows", actual: 3, expected: 2 }),
        (
            |plan| plan.stacks[0].changed_entries.push(3),
            PlanFault::Length { array: "changed_entries", actual: 4, expected: 3 },
        ),
        (
            |plan| plan.stacks[0].table_changes[1].start = 1,
            PlanFault::Length { array: "changed_entries", actual: 1, expected: 2 },
        ),
        (|plan| plan.query_starts[0] = 1, PlanFault::QueryStarts { sequence: 0, start: 1, end: 6 }),
        (|plan| plan.query_starts[1] = 8, PlanFault::QueryStarts { sequence: 0, start: 0, end: 8 }),
        (|plan| plan.query_starts[2] = 5, PlanFault::QueryStarts { sequence: 1, start: 6, end: 5 }),
        (|plan| plan.query_starts[2] = 6, PlanFault::RowWithoutSequence { row: 6 }),
        (|plan| plan.context_lens[0] = 5, PlanFault::RowsExceedContext { sequence: 0, rows: 6, context: 5 }),
        (|plan| plan.context_lens[0] = 25, PlanFault::ContextTooLong { sequence: 0, context: 25, max: 24 }),
        (|plan| plan.context_lens[0] = 9, PlanFault::EntriesUnknown { sequence: 0, needed: 3, known: 2 }),
        (|plan| plan.table_rows[1] = 3, PlanFault::TableRow { table_row: 3, max_sequences: 3 }),
        (
            |plan| plan.stacks[0].table_changes[1].table_row = u32::MAX,
            PlanFault::TableRow { table_row: u32::MAX, max_sequences: 3 },
        ),
        (
            |plan| plan.stacks[0].table_changes[1].first_entry = 1,
            PlanFault::TableRange { table_row: 1, first_entry: 1, len: 1, entries: 0 },
        ),
        (
            |plan| plan.stacks[0].table_changes[1].len = u32::MAX,
            PlanFault::TableRange { table_row: 1, first_entry: 0, len: u32::MAX, entries: 6 },
        ),
        (
            |plan| plan.stacks[0].changed_entries[0] = 12,
            PlanFault::BlockOutOfRange { block: 12, num_blocks: 12 },
        ),
        (
            |plan| plan.stacks[0].slot_mapping[3] = 48,
            PlanFault::SlotOutOfRange { row: 3, slot: 48, num_slots: 48 },
        ),
        (|plan| plan.stacks[0].slot_mapping[6] = 5, PlanFault::SlotTwice { slot: 5 }),
        (|plan| copies(plan, &[(0, 12)]), PlanFault::BlockOutOfRange { block: 12, num_blocks: 12 }),
        (|plan| copies(plan, &[(12, 0)]), PlanFault::BlockOutOfRange { block: 12, num_blocks: 12 }),
        (|plan| copies(plan, &[(3, 4), (5, 3)]), PlanFault::CopyConflict { block: 3 }),
        (|plan| copies(plan, &[(3, 4), (5, 4)]), PlanFault::CopyDestinationTwice { block: 4 }),
    ];
    for (number, (break_it, expected)) in cases.into_iter().enumerate() {
        let mut plan = two_sequences();
        break_it(&mut plan);
        let refused = check(&mut PlanChecker::new(&config()), &plan);
        assert_eq!(refused, Err(PrepareError::InvalidPlan(expected)), "case {number}");
    }
}

fn copies(plan: &mut StepPlan, pairs: &[(u32, u32)]) {
    plan.block_copies =
        pairs.iter().map(|&(source, destination)| BlockCopy { source, destination }).collect();
}

#[test]
fn a_refused_plan_leaves_the_checker_as_it_was() {
    let mut cache = KvCache::new(config());
    let table = cache.create(24).expect("a free table");
    let mut checker = PlanChecker::new(&config());
    let mut broken = plan(&mut cache, &[(table, 6)]);
    broken.stacks[0].slot_mapping[0] = 48;
    assert!(check(&mut checker, &broken).is_err());
    assert!(!checker.has_accepted());
    // Its table changes were not recorded either.
    let next = plan(&mut cache, &[(table, 6)]);
    assert_eq!(check(&mut checker, &next), Ok(()));
    assert!(!next.stacks[0].changed_entries.is_empty());
}

#[test]
fn on_a_new_device_plans_must_have_forgotten_the_old_one() {
    let mut cache = KvCache::new(config());
    let table = cache.create(24).expect("a free table");
    let mut first = PlanChecker::new(&config());
    let succeed = |old: &PlanChecker| {
        let mut checker = PlanChecker::new(&config());
        checker.succeed(old);
        checker
    };
    // Nothing was ever prepared: nothing is to be forgotten.
    assert_eq!(check(&mut succeed(&first), &plan(&mut cache, &[(table, 6)])), Ok(()));

    let step = plan(&mut cache, &[(table, 6)]);
    assert_eq!(check(&mut first, &step), Ok(()));
    first.accept(&step);
    let changes: Vec<_> = step.table_changes().iter().map(|change| (0, *change)).collect();
    first.record_changes(&changes);
    cache.commit_step(step).expect("the outstanding plan");
    let mut second = succeed(&first);
    let not_forgotten = Err(PrepareError::DeviceNotForgotten { forgotten: 0, needed: 1 });
    assert_eq!(check(&mut second, &plan(&mut cache, &[(table, 1)])), not_forgotten);
    // Even one that reads nothing: who knows what comes after it.
    let other = cache.create(24).expect("a free table");
    assert_eq!(check(&mut second, &plan(&mut cache, &[(other, 1)])), not_forgotten);

    cache.forget_device();
    assert_eq!(cache.len(table), Ok(0));
    let step = plan(&mut cache, &[(table, 7)]);
    // As good on the device that was not lost after all.
    assert_eq!(check(&mut first, &step), Ok(()));
    assert_eq!(check(&mut second, &step), Ok(()));
    // A third device, before anything was prepared on the second, and after.
    assert_eq!(check(&mut succeed(&second), &step), Ok(()));
    second.accept(&step);
    let mut third = succeed(&second);
    let step = plan(&mut cache, &[(table, 7)]);
    assert_eq!(check(&mut third, &step), Err(PrepareError::DeviceNotForgotten { forgotten: 1, needed: 2 }));

    // The cache stays the same one.
    let mut foreign = KvCache::new(config());
    foreign.forget_device();
    foreign.forget_device();
    let table = foreign.create(24).expect("a free table");
    let refused = check(&mut third, &plan(&mut foreign, &[(table, 1)]));
    assert!(matches!(refused, Err(PrepareError::CacheInstance { .. })), "{refused:?}");
}

/// Two groups of one layer each, of which the second sees a window of four tokens.
#[test]
fn what_is_wrong_in_one_stack_is_refused_and_a_window_leaves_a_gap_in_its_table() {
    let window = LayerGroup::new([1], 1, 1, 8).with_reach(Reach::Window { tokens: 4, first: 0 });
    let shape = ModelShape::of_groups([LayerGroup::new([0], 1, 1, 8), window]);
    let config = CacheConfig::for_blocks(24, &shape, KvType::F16)
        .and_then(|config| config.with_block_size(4))
        .and_then(|config| config.with_max_sequences(3))
        .and_then(|config| config.with_max_sequence_tokens(24))
        .expect("a valid configuration");
    let mut cache = KvCache::new(config.clone());
    let table = cache.create(24).expect("a free table");
    let step = plan(&mut cache, &[(table, 6)]);
    let damaged = |change: fn(&mut StepPlan)| {
        let mut step = step.clone();
        change(&mut step);
        check(&mut PlanChecker::new(&config), &step)
    };
    assert_eq!(damaged(|_| {}), Ok(()));
    let block = step.stacks[0].slot_mapping[0] / 4;
    assert_eq!(
        damaged(|step| step.stacks[1].slot_mapping[0] = step.stacks[0].slot_mapping[0] + 1),
        Err(PlanFault::BlockOfTwoStacks { block }.into())
    );
    assert_eq!(
        damaged(|step| step.stacks[1].slot_mapping[0] = 96),
        Err(PlanFault::SlotOutOfRange { row: 0, slot: 96, num_slots: 96 }.into())
    );
    assert_eq!(
        damaged(|step| step.stacks.truncate(1)),
        Err(PlanFault::Length { array: "stacks", actual: 1, expected: 2 }.into())
    );
    // The window's table may begin with what its rows see, the whole layer's may not.
    let gap = |step: &mut StepPlan, stack: usize| {
        let StackPlan { table_changes, changed_entries, .. } = &mut step.stacks[stack];
        (table_changes[0].first_entry, table_changes[0].len) = (1, 1);
        changed_entries.remove(0);
        (step.query_starts[1], step.context_lens[0]) = (1, 8);
        step.token_ids.truncate(1);
        step.positions.truncate(1);
        step.stacks.iter_mut().for_each(|stack| stack.slot_mapping.truncate(1));
    };
    let (mut whole, mut windowed) = (step.clone(), step.clone());
    gap(&mut whole, 0);
    gap(&mut windowed, 1);
    assert_eq!(check(&mut PlanChecker::new(&config), &windowed), Ok(()));
    let refused = PlanFault::TableRange { table_row: 0, first_entry: 1, len: 1, entries: 0 };
    assert_eq!(check(&mut PlanChecker::new(&config), &whole), Err(refused.into()));
}
