//! Who goes first, and that nobody waits for ever.

use super::{Served, overcommitted, pool, prompt, swapping};
use paged_kv::{Admission, Preemption, Priority, SchedulerConfig};

/// Steps until an idle request has ended under a stream of interactive ones that is more than the pool can serve; none
/// if it has not after `most`.
fn idle_under_a_stream(ageing_steps: u32, config: SchedulerConfig, most: u32) -> Option<u32> {
    let mut served = Served::new(SchedulerConfig { ageing_steps, ..config }, pool(8, 8));
    let shape = |request: paged_kv::Request| request.max_new_tokens(4);
    let mut idle = None;
    for step in 0..most {
        // Two requests of four blocks run at a time, four steps each: two in four steps, and three arrive.
        if step % 4 != 3 {
            served.add(&prompt(step + 2, 12), |request| shape(request).priority(Priority::Interactive));
        }
        if step == 12 {
            idle = Some(served.add(&prompt(1, 12), |request| shape(request).priority(Priority::Idle)));
        }
        served.step();
        if idle.is_some_and(|idle| served.ends.contains_key(&idle.sample(0))) {
            assert_eq!(served.answers(idle.unwrap(), &prompt(1, 12)), 4);
            return Some(step + 1);
        }
    }
    None
}

#[test]
fn an_idle_request_ends_under_a_stream_of_interactive_ones() {
    // It arrives at step 12 and stands two classes of 16 steps behind: the 33 that arrive until step 44 go before it. Two
    // at a time, they are served in 66 steps; then it takes its own 4, and may begin up to 4 later.
    let bound = 33 * 2 + 4 + 4;
    for config in [SchedulerConfig::default(), overcommitted(), swapping()] {
        let steps = idle_under_a_stream(16, config, 4 * bound);
        assert!(steps.is_some_and(|steps| steps <= bound), "{steps:?} steps, at most {bound}");
        // Were classes never to meet, it would wait for ever.
        assert_eq!(idle_under_a_stream(1 << 20, config, 4 * bound), None);
    }
}

#[test]
fn a_chat_does_not_queue_behind_a_job_of_32768_tokens() {
    // Every step has 512 rows; the first in line gets half of those that the job could have had.
    for (class, job_class) in [
        (Priority::Interactive, Priority::Idle),
        (Priority::Interactive, Priority::Normal),
        (Priority::Normal, Priority::Normal),
    ] {
        for (already_read, chat_len, bound) in
            [(512, 200, 1), (20_000, 200, 2), (512, 1000, 4), (20_000, 1000, 8)]
        {
            let mut served = Served::new(SchedulerConfig::default(), super::cache(4096, 16));
            let job = served.add(&prompt(1, 32_768), |request| request.max_new_tokens(1).priority(job_class));
            while served.scheduler.computed_tokens(job).unwrap() < already_read {
                served.step();
            }
            let tokens = prompt(40, chat_len);
            let chat = served.add(&tokens, |request| request.max_new_tokens(4).priority(class));
            let before = (served.steps, served.scheduler.computed_tokens(job).unwrap());
            while served.tokens[&chat.sample(0)].len() == tokens.len() {
                let read = served.scheduler.computed_tokens(job).unwrap();
                served.step();
                assert!(served.scheduler.computed_tokens(job).unwrap() > read, "the job is read on, too");
            }
            let steps = served.steps - before.0;
            assert!(steps <= bound, "{chat_len} tokens, {} read: {steps} steps, at most {bound}", before.1);
        }
    }
}

#[test]
fn a_running_idle_job_is_displaced_for_a_chat_in_a_full_pool() {
    for (job_class, class, displaced) in [
        (Priority::Idle, Priority::Interactive, true),
        (Priority::Idle, Priority::Normal, true),
        (Priority::Normal, Priority::Interactive, true),
        (Priority::Normal, Priority::Normal, false),
        (Priority::Interactive, Priority::Idle, false),
    ] {
        let mut served = Served::new(swapping(), pool(8, 8));
        let job = served.add(&prompt(1, 20), |request| request.max_new_tokens(8).priority(job_class));
        served.step();
        let chat = served.add(&prompt(2, 14), |request| request.max_new_tokens(2).priority(class));
        let step = served.step();
        let has_token = served.tokens[&chat.sample(0)].len() > 14;
        assert_eq!(has_token, displaced, "{class:?} beside {job_class:?}: its first token in its first step");
        let expected = (job.sample(0), Preemption::Swapped { blocks: 5 });
        let victims: Vec<_> = step.preempted().iter().map(|victim| (victim.0, victim.1)).collect();
        assert_eq!(victims, if displaced { vec![expected] } else { vec![] });
        served.finish();
        assert_eq!((served.answers(job, &prompt(1, 20)), served.answers(chat, &prompt(2, 14))), (8, 2));
    }
}

#[test]
fn nobody_is_displaced_where_that_would_not_let_the_chat_in() {
    let mut served = Served::new(swapping(), pool(8, 8));
    let runs =
        served.add(&prompt(1, 16), |request| request.max_new_tokens(8).priority(Priority::Interactive));
    let job = served.add(&prompt(2, 6), |request| request.max_new_tokens(2).priority(Priority::Idle));
    served.step();
    // 4 blocks of the first one, 2 of the job: without the job there are 4, and the chat needs 5.
    served.add(&prompt(3, 18), |request| request.max_new_tokens(1).priority(Priority::Interactive));
    let step = served.step();
    assert_eq!((step.preempted(), step.tokens()), (vec![], 2));
    served.finish();
    assert_eq!((served.answers(runs, &prompt(1, 16)), served.answers(job, &prompt(2, 6))), (8, 2));
}

#[test]
fn under_guarantee_nobody_is_displaced() {
    let config = SchedulerConfig { admission: Admission::Guaranteed, ..swapping() };
    let mut served = Served::new(config, pool(8, 8));
    served.add(&prompt(1, 20), |request| request.max_new_tokens(8).priority(Priority::Idle));
    served.step();
    served.add(&prompt(2, 14), |request| request.max_new_tokens(2).priority(Priority::Interactive));
    served.finish();
    assert_eq!(served.scheduler.stats().preemptions, 0);
}

#[test]
fn running_chats_keep_their_pace_while_a_long_prompt_is_read() {
    for config in [SchedulerConfig::default(), overcommitted()] {
        let mut served = Served::new(config, super::cache(600, 16));
        let chats: Vec<_> =
            (1..5).map(|seed| served.add(&prompt(seed, 50), |request| request.max_new_tokens(60))).collect();
        served.step();
        let long = served.add(&prompt(9, 4000), |request| request.max_new_tokens(1));
        let mut steps = 0;
        while !served.ends.contains_key(&long.sample(0)) {
            let before: Vec<usize> = chats.iter().map(|chat| served.tokens[&chat.sample(0)].len()).collect();
            let step = served.step();
            assert!(step.rows <= 512);
            for (chat, before) in chats.iter().zip(before) {
                assert_eq!(served.tokens[&chat.sample(0)].len(), before + 1, "one token a step");
            }
            steps += 1;
        }
        assert_eq!(steps, 4000u32.div_ceil(512 - 4), "and the prompt has all other rows");
    }
}
