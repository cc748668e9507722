//! What is found of a prompt, and what is never found.

use super::{Served, overcommitted, pool, prompt};
use paged_kv::{
    DuplicatePrompts, FinishReason, MissReason, PrefixCacheConfig, PrefixReport, Request, RowResult,
    SchedulerConfig,
};

fn plain(request: Request) -> Request {
    request
}

fn found(cached_tokens: u32, wanted_tokens: u32, miss: MissReason) -> PrefixReport {
    PrefixReport { cached_tokens, wanted_tokens, miss }
}

#[test]
fn b29_what_an_invalid_sequence_computed_is_never_found() {
    // A's third token is NaN, so its first result is useless; or it turns useless after blocks were registered.
    for invalid_step in [0, 1, 5] {
        let mut served = Served::new(SchedulerConfig::default(), pool(8, 0));
        let (a, b) = (prompt(1, 6), prompt(2, 7));
        let first = served.add(&a, |request| request.max_new_tokens(9));
        let second = served.add(&b, |request| request.max_new_tokens(9));
        for step in 0..=invalid_step {
            let plan = served.plan();
            served.commit_with(plan, |id, token| {
                if step == invalid_step && id.request() == first {
                    RowResult::Invalid
                } else {
                    RowResult::Token(token)
                }
            });
        }
        assert_eq!(served.ends[&first.sample(0)], FinishReason::Invalid);
        let tokens = served.tokens[&first.sample(0)].clone();
        let namespace = Default::default();
        assert_eq!(
            served.scheduler.cache().find_prefix(&namespace, &tokens),
            0,
            "after {invalid_step} steps"
        );
        // D takes A's blocks; A's prompt, asked for again, finds nothing.
        served.serve(&prompt(3, 5), plain);
        assert_eq!(served.serve(&a, plain), found(0, 5, MissReason::Unseen));
        served.finish();
        assert_eq!(served.answers(second, &b), 9);
    }
}

#[test]
fn what_an_aborted_sequence_had_not_confirmed_is_never_found() {
    let config = SchedulerConfig { step_tokens: 8, ..SchedulerConfig::default() };
    let tokens = prompt(1, 20);
    // In the middle of its prompt; in the step that computes its end; in a later one.
    for (steps, known) in [(1, 0), (2, 0), (3, 20)] {
        for outstanding in [false, true] {
            let mut served = Served::new(config, pool(16, 0));
            let id = served.add(&tokens, |request| request.max_new_tokens(9));
            (0..steps).for_each(|_| drop(served.step()));
            let plan = outstanding.then(|| served.plan());
            served.scheduler.abort(id).unwrap();
            if let Some(plan) = plan {
                served.commit(plan);
            }
            let mut longer = tokens.clone();
            longer.push(7);
            let namespace = Default::default();
            assert_eq!(served.scheduler.cache().find_prefix(&namespace, &longer), known, "{steps} steps");
        }
    }
}

#[test]
fn b43_equal_hashes_do_not_make_prompts_equal() {
    let mut served = Served::new(SchedulerConfig::default(), pool(32, 0));
    served.scheduler.set_constant_hash(Some(7));
    // The third one repeats the second one's first block behind another; equal tokens, different parents.
    let prompts = [
        vec![1, 2, 3, 4, 9],
        vec![5, 6, 7, 8, 9],
        vec![11, 12, 13, 14, 5, 6, 7, 8, 9],
        vec![5, 6, 7, 8, 5, 6, 7, 8, 9],
    ];
    for (tokens, cached) in prompts.iter().zip([0, 0, 0, 4]) {
        let wanted = tokens.len() as u32 - 1;
        assert_eq!(served.serve(tokens, plain), found(cached, wanted, MissReason::Unseen), "{tokens:?}");
    }
    for tokens in &prompts {
        let wanted = tokens.len() as u32 - 1;
        assert_eq!(served.serve(tokens, plain), found(wanted, wanted, MissReason::None), "{tokens:?}");
    }
}

#[test]
fn b43_one_other_token_in_the_first_block_finds_nothing() {
    let mut served = Served::new(SchedulerConfig::default(), pool(128, 0));
    let tokens = prompt(1, 41);
    served.serve(&tokens, plain);
    assert_eq!(served.serve(&tokens, plain), found(40, 40, MissReason::None));
    for (position, cached) in [(0, 0), (1, 1), (3, 3), (4, 4), (39, 39)] {
        let mut flipped = tokens.clone();
        flipped[position] ^= 1 << 20;
        // Up to the token itself; the rest of its block is another block.
        assert_eq!(served.serve(&flipped, plain), found(cached, 40, MissReason::Unseen), "token {position}");
    }
}

#[test]
fn b45_a_prompt_that_is_cached_in_full_computes_one_token() {
    for (block_size, len) in [(4, 1), (4, 4), (4, 5), (4, 8), (64, 7681), (64, 7680)] {
        let config =
            SchedulerConfig { step_tokens: 8192, step_work_budget: 1 << 30, ..SchedulerConfig::default() };
        let mut served = Served::new(config, super::cache(400, block_size));
        let tokens = prompt(1, len);
        let holder = served.add(&tokens, |request| request.max_new_tokens(20));
        served.step();
        let before = served.scheduler.cache().stats();
        let again = served.add(&tokens, |request| request.max_new_tokens(20));
        let step = served.step();
        let full = len / block_size * block_size;
        // A last block that is not full was never registered.
        let cached = if full == len { len - 1 } else { full };
        assert_eq!(step.admitted()[0].1, found(cached, len - 1, step.admitted()[0].1.miss), "{len} tokens");
        assert_eq!(step.rows, 1 + (len - cached), "one row of the holder's, and what is not cached of {len}");
        assert!(len - cached >= 1);
        let after = served.scheduler.cache().stats();
        // When its last block is full, it turns out to be the holder's.
        assert_eq!(after.shared_blocks - before.shared_blocks, len / block_size, "{len} tokens");
        assert_eq!(step.copies, usize::from(full == len), "the last block is copied, not written, for {len}");
        served.finish();
        assert_eq!((served.answers(holder, &tokens), served.answers(again, &tokens)), (20, 20));
    }
}

#[test]
fn b45_without_a_block_for_the_copy_the_full_blocks_are_used() {
    // Two blocks: the cached one and one more. The prompt's last block cannot be both kept and copied.
    for config in [SchedulerConfig::default(), overcommitted()] {
        let mut served = Served::new(config, pool(2, 0));
        let tokens = prompt(1, 8);
        served.add(&tokens, |request| request.max_new_tokens(0));
        served.step();
        served.add(&tokens, |request| request.max_new_tokens(0));
        let step = served.step();
        let report = step.admitted()[0].1;
        assert!([4, 7].contains(&report.cached_tokens), "{report:?}");
        assert_eq!((step.rows, step.copies), (8 - report.cached_tokens, 0));
        assert_eq!(served.ends.len(), 2);
    }
}

#[test]
fn a_prompt_that_leaves_a_cached_one_within_a_block_takes_the_matching_rows() {
    let mut served = Served::new(SchedulerConfig::default(), pool(32, 0));
    let tokens = prompt(1, 12);
    served.serve(&tokens, plain);
    for common in 0..12usize {
        let mut other = tokens[..common].to_vec();
        other.extend(prompt(50 + common as u32, 12 - common as u32));
        let id = served.add(&other, |request| request.max_new_tokens(6));
        let step = served.step();
        let report = step.admitted()[0].1;
        assert_eq!(
            report,
            found(common as u32, 11, if common == 11 { MissReason::None } else { MissReason::Unseen })
        );
        assert_eq!((step.rows as usize, step.copies), (12 - common, usize::from(common % 4 > 0)), "{common}");
        served.finish();
        assert_eq!(served.answers(id, &other), 6);
        // The block that was copied is found as before.
        assert_eq!(served.serve(&tokens, plain), found(11, 11, MissReason::None));
    }
}

#[test]
fn every_miss_has_its_reason() {
    let disabled = SchedulerConfig { prefix_cache: None, ..SchedulerConfig::default() };
    let mut served = Served::new(disabled, pool(16, 0));
    served.serve(&prompt(1, 9), plain);
    assert_eq!(served.serve(&prompt(1, 9), plain), found(0, 8, MissReason::Disabled));

    let mut served = Served::new(SchedulerConfig::default(), pool(8, 0));
    assert_eq!(served.serve(&prompt(1, 9), plain), found(0, 8, MissReason::Unseen));
    assert_eq!(served.serve(&prompt(1, 9), plain), found(8, 8, MissReason::None));
    served.squeeze(8);
    assert_eq!(served.serve(&prompt(1, 9), plain), found(0, 8, MissReason::Evicted));
    let retained = |request: Request| request.retain(0..8, Default::default(), Some(2));
    served.serve(&prompt(2, 9), retained);
    (0..4).for_each(|_| served.squeeze(1));
    assert_eq!(served.serve(&prompt(2, 9), plain), found(0, 8, MissReason::Expired));
    let stats = served.scheduler.stats();
    assert_eq!((stats.prefix_misses.evicted, stats.prefix_misses.expired), (1, 1));
    assert_eq!(stats.prefix_hit_tokens, 8);
    // While a sequence runs, it can be asked as well.
    let id = served.add(&prompt(2, 9), |request| request.max_new_tokens(5));
    assert_eq!(served.scheduler.prefix_report(id), Some(PrefixReport::default()));
    served.step();
    assert_eq!(served.scheduler.prefix_report(id), Some(found(8, 8, MissReason::None)));
}

#[test]
fn equal_prompts_of_one_step_share_afterwards_and_read_nothing_that_is_not_written() {
    for (duplicates, rows, first_steps) in
        [(DuplicatePrompts::Wait, 13, 2), (DuplicatePrompts::ComputeAlone, 26, 1)]
    {
        let prefix_cache = Some(PrefixCacheConfig { duplicates, ..PrefixCacheConfig::default() });
        for config in [SchedulerConfig::default(), overcommitted()] {
            let mut served = Served::new(SchedulerConfig { prefix_cache, ..config }, pool(32, 0));
            let tokens = prompt(1, 13);
            let twins = [0, 1].map(|_| served.add(&tokens, |request| request.max_new_tokens(4)));
            let step = served.step();
            assert_eq!(step.rows, rows, "{duplicates:?}");
            let mut steps = 1;
            while !twins.iter().all(|twin| served.tokens[&twin.sample(0)].len() > 13) {
                served.step();
                steps += 1;
            }
            assert_eq!(steps, first_steps, "{duplicates:?}");
            assert_eq!(
                served.scheduler.stats().cache.shared_blocks,
                3,
                "{duplicates:?}: 12 tokens are held once"
            );
            served.finish();
            assert!(twins.iter().all(|&twin| served.answers(twin, &tokens) == 4));
        }
    }
}

#[test]
fn whoever_waits_for_an_equal_prompt_goes_on_when_that_one_is_aborted_or_useless() {
    for abort in [true, false] {
        let mut served = Served::new(SchedulerConfig::default(), pool(32, 0));
        let tokens = prompt(1, 13);
        let [first, second] = [0, 1].map(|_| served.add(&tokens, |request| request.max_new_tokens(4)));
        let plan = served.plan();
        assert_eq!(plan.num_sequences(), 1);
        if abort {
            served.scheduler.abort(first).unwrap();
        }
        served.commit_with(plan, |_, _| RowResult::Invalid);
        assert_eq!(served.step().admitted()[0], (second.sample(0), found(0, 12, MissReason::Unseen)));
        served.finish();
        assert_eq!(served.answers(second, &tokens), 4);
    }
}
