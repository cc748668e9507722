//! What a program that draws the pool sees of a sequence, from its arrival to its end.

use super::swap::two_that_outgrow;
use super::{Served, pool, prompt, swapping};
use paged_kv::{
    BlockState, PrefixCacheConfig, Request, RequestId, Retention, SchedulerConfig, SequenceState,
};

/// State, tokens, computed ones, blocks in the pool, blocks in the host pool, preemptions.
fn status(served: &Served, id: RequestId) -> (SequenceState, u32, u32, usize, u32, u32) {
    let seen = served.scheduler.status(id).unwrap();
    for block in seen.blocks {
        let state = served.scheduler.cache().block_state(*block);
        assert!(matches!(state, Some(BlockState::Held { .. })), "{block:?} is in a table and {state:?}");
    }
    let host = (seen.host_blocks, seen.preemptions);
    (seen.state, seen.tokens, seen.computed_tokens, seen.blocks.len(), host.0, host.1)
}

#[test]
fn a_sequence_is_seen_in_line_running_swapped_out_and_gone() {
    let mut served = Served::new(swapping(), pool(6, 8));
    let first = served.add(&prompt(1, 8), |request| request.max_new_tokens(8));
    assert_eq!(status(&served, first), (SequenceState::Waiting, 8, 0, 0, 0, 0));
    let plan = served.plan();
    assert_eq!(status(&served, first), (SequenceState::Running, 8, 0, 2, 0, 0), "planned, not computed");
    served.commit(plan);
    assert_eq!(status(&served, first), (SequenceState::Running, 9, 8, 2, 0, 0));
    served.finish();
    assert_eq!(served.scheduler.status(first), None);

    let (served, [first, second], _) = two_that_outgrow(swapping(), 8);
    assert_eq!(status(&served, first), (SequenceState::Running, 14, 13, 4, 0, 0));
    assert_eq!(status(&served, second), (SequenceState::Waiting, 13, 12, 0, 3, 1));
}

#[test]
fn samples_are_seen_one_by_one_once_they_have_parted() {
    let mut served = Served::new(swapping(), pool(8, 0));
    let id = served.add(&prompt(1, 6), |request| request.samples(3).max_new_tokens(2));
    let seen = |served: &Served| [0, 1, 2].map(|sample| served.scheduler.status(id.sample(sample)).is_some());
    assert_eq!(seen(&served), [true, false, false], "in line");
    assert!(served.scheduler.abort_sequence(id.sample(0)).unwrap());
    assert_eq!(seen(&served), [false, true, false], "the first one that lives");
    let plan = served.plan();
    assert_eq!(seen(&served), [false, true, false], "planned");
    served.commit(plan);
    assert_eq!(seen(&served), [false, true, true]);
}

#[test]
fn a_kept_sequence_holds_its_blocks_and_a_branch_shares_them_until_both_end() {
    let config = SchedulerConfig { prefix_cache: Some(PrefixCacheConfig::default()), ..swapping() };
    let mut served = Served::new(config, pool(6, 0));
    let first = served.add(&prompt(1, 8), |request| request.max_new_tokens(2).keep(true));
    served.finish();
    assert_eq!(status(&served, first), (SequenceState::Kept, 10, 9, 3, 0, 0));
    let branch = served.scheduler.fork(first, 8, Request::new([5]).max_new_tokens(1)).unwrap();
    let shared = served.scheduler.status(branch).unwrap().blocks.to_vec();
    assert_eq!(shared, served.scheduler.status(first).unwrap().blocks[..2]);
    for block in &shared {
        assert_eq!(served.scheduler.cache().block_state(*block), Some(BlockState::Held { tables: 2 }));
    }
    assert!(served.scheduler.abort(branch).unwrap());
    assert!(served.scheduler.abort(first).unwrap());
    served.check();
    for block in shared {
        let cached = Some(BlockState::Cached { retention: Retention::default() });
        assert_eq!(served.scheduler.cache().block_state(block), cached);
    }
}
