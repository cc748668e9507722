//! Chats: a system prompt that all share, and turns that compute only what is new.

use super::{Served, cache, overcommitted, prompt};
use paged_kv::{DuplicatePrompts, PrefixCacheConfig, RequestId, SchedulerConfig};

const SYSTEM: u32 = 600;
/// Full blocks of 16 tokens in it.
const SHARED: u32 = SYSTEM / 16;
const QUESTION: u32 = 40;

fn first_turn(seed: u32) -> Vec<u32> {
    [prompt(900, SYSTEM), prompt(seed, QUESTION)].concat()
}

fn configs() -> [SchedulerConfig; 2] {
    [SchedulerConfig::default(), overcommitted()]
}

fn all_answered(served: &Served, chats: &[RequestId], new: usize) {
    for (chat, seed) in chats.iter().zip(1..) {
        assert_eq!(served.answers(*chat, &first_turn(seed)), new);
    }
}

#[test]
fn eight_chats_hold_one_system_prompt_once_and_compute_only_the_rest() {
    for config in configs() {
        let mut served = Served::new(config, cache(400, 16));
        let mut chats = Vec::new();
        for seed in 1..9 {
            let running = chats.len() as u32;
            chats.push(served.add(&first_turn(seed), |request| request.max_new_tokens(60)));
            let before = served.scheduler.stats().prompt_tokens;
            while served.tokens[&chats[running as usize].sample(0)].len() == (SYSTEM + QUESTION) as usize {
                served.step();
            }
            // 37 blocks are shared, and the 8 tokens that end the system prompt are copied with theirs.
            let computed = served.scheduler.stats().prompt_tokens - before;
            assert_eq!(computed, u64::from(if running == 0 { SYSTEM + QUESTION } else { QUESTION }));
        }
        let stats = served.scheduler.stats().cache;
        let own: u32 = chats
            .iter()
            .map(|chat| served.scheduler.computed_tokens(*chat).unwrap().div_ceil(16) - SHARED)
            .sum();
        assert_eq!((stats.shared_blocks, stats.held_blocks), (SHARED, SHARED + own), "held once");
        served.finish();
        all_answered(&served, &chats, 60);
    }
}

#[test]
fn eight_chats_that_arrive_in_one_step_compute_one_system_prompt() {
    for config in configs() {
        let mut served = Served::new(config, cache(400, 16));
        let chats: Vec<_> =
            (1..9).map(|seed| served.add(&first_turn(seed), |request| request.max_new_tokens(20))).collect();
        // 512 rows, then the 128 that are left; then every chat's question.
        for (rows, tokens) in [(512, 0), (128, 1), (1 + 7 * QUESTION, 8)] {
            let step = served.step();
            assert_eq!((step.rows, step.tokens()), (rows, tokens));
        }
        let stats = served.scheduler.stats();
        assert_eq!(stats.prompt_tokens, u64::from(SYSTEM + 8 * QUESTION));
        assert_eq!(stats.cache.shared_blocks, SHARED);
        served.finish();
        all_answered(&served, &chats, 20);
    }
}

#[test]
fn eight_chats_that_compute_alone_hold_one_system_prompt_once_afterwards() {
    let prefix_cache = Some(PrefixCacheConfig {
        duplicates: DuplicatePrompts::ComputeAlone,
        ..PrefixCacheConfig::default()
    });
    for config in configs() {
        let config = SchedulerConfig { prefix_cache, step_tokens: 8192, ..config };
        let mut served = Served::new(config, cache(400, 16));
        let chats: Vec<_> =
            (1..9).map(|seed| served.add(&first_turn(seed), |request| request.max_new_tokens(20))).collect();
        let step = served.step();
        assert_eq!((step.rows, step.tokens()), (8 * (SYSTEM + QUESTION), 8));
        let stats = served.scheduler.stats().cache;
        assert_eq!((stats.shared_blocks, stats.held_blocks), (SHARED, SHARED + 8 * 3));
        served.finish();
        all_answered(&served, &chats, 20);
    }
}

#[test]
fn a_chats_second_turn_computes_only_its_new_tokens_with_and_without_the_cache() {
    for config in configs() {
        for prefix_cache in [None, config.prefix_cache] {
            let mut served = Served::new(SchedulerConfig { prefix_cache, ..config }, cache(400, 16));
            let chat = served.add(&first_turn(1), |request| request.max_new_tokens(21).keep(true));
            served.finish();
            for turn in 1..4u32 {
                served.extend(chat, &prompt(50 + turn, 30), |request| request.max_new_tokens(21).keep(true));
                // The answer's last token was chosen, and not computed.
                assert_eq!(served.step().rows, 1 + 30);
                served.finish();
            }
            assert_eq!(served.scheduler.stats().recomputed_tokens, 0);
            assert_eq!(served.tokens[&chat.sample(0)].len(), 640 + 21 + 3 * (30 + 21));
        }
    }
}

#[test]
fn a_second_turn_that_comes_as_a_new_request_finds_the_first_one_and_its_answer() {
    for config in configs() {
        let mut served = Served::new(config, cache(400, 16));
        let chat = served.add(&first_turn(1), |request| request.max_new_tokens(41));
        served.finish();
        let second = [served.tokens[&chat.sample(0)].clone(), prompt(60, 30)].concat();
        // 680 of 711 tokens were computed: 42 full blocks.
        let again = served.add(&second, |request| request.max_new_tokens(1));
        let step = served.step();
        assert_eq!((step.admitted()[0].1.cached_tokens, step.rows), (42 * 16, 711 - 42 * 16));
        served.finish();
        assert_eq!(served.answers(again, &second), 1);
    }
}

#[test]
fn a_kept_chat_whose_table_was_taken_finds_what_is_left_of_it() {
    for (prefix_cache, recomputed) in [(None, 640 + 20), (Some(PrefixCacheConfig::default()), 660 - 16 * 16)]
    {
        for config in configs() {
            let mut served = Served::new(SchedulerConfig { prefix_cache, ..config }, cache(60, 16));
            let chat = served.add(&first_turn(1), |request| request.max_new_tokens(21).keep(true));
            served.finish();
            // 42 of 60 blocks are the chat's. This one needs 44: it takes the 18 others, and 26 of the chat's, last first.
            served.add(&prompt(70, 44 * 16 - 1), |request| request.max_new_tokens(1));
            served.finish();
            served.extend(chat, &prompt(60, 30), |request| request.max_new_tokens(2));
            served.finish();
            assert_eq!(served.scheduler.stats().recomputed_tokens, recomputed);
            assert_eq!(served.tokens[&chat.sample(0)].len(), 640 + 21 + 30 + 2);
        }
    }
}
