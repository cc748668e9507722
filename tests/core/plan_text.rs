//! Plans as text: what was written is read back, and nothing else is.

use paged_kv::{
    CacheConfig, KvType, ModelShape, PlanTextFault, Request, RowResult, Schedule, Scheduler, SchedulerConfig,
    StepPlan,
};

use crate::rig::Random;

/// The plans of a scheduler with little memory: prompts, decoding, copies, swaps.
fn plans() -> Vec<StepPlan> {
    let shape = ModelShape::new(1, 1, 1, 8);
    let cache = CacheConfig::for_blocks(24, &shape, KvType::F16)
        .and_then(|config| config.with_block_size(4))
        .and_then(|config| config.with_host_blocks(32))
        .expect("a valid configuration");
    let config = SchedulerConfig {
        step_tokens: 16,
        admission: paged_kv::Admission::Overcommitted { watermark_blocks: 1 },
        preemption: paged_kv::PreemptionMode::Swap,
        ..Default::default()
    };
    let mut scheduler = Scheduler::new(config, cache).expect("a valid configuration");
    for chat in 0..6 {
        let tokens: Vec<u32> = (0..11 + chat).map(|token| chat / 2 * 100 + token).collect();
        scheduler.add(Request::new(tokens).max_new_tokens(20)).expect("a request that fits");
    }
    let tokens: Vec<u32> = (500..510).collect();
    scheduler.add(Request::new(tokens).max_new_tokens(9).samples(3)).expect("a request that fits");
    let mut plans = Vec::new();
    while let Schedule::Step(plan) = scheduler.schedule() {
        plans.push(plan.clone());
        let results = vec![RowResult::Token(7); plan.logit_rows().len()];
        let swaps = !plan.swap_outs().is_empty() || !plan.swap_ins().is_empty();
        let report = paged_kv::TransferReport { step: plan.step(), complete: true };
        scheduler.commit(plan, &results).expect("the outstanding plan");
        if swaps {
            scheduler.complete_transfers(&[report]);
        }
    }
    plans
}

#[test]
fn a_plan_is_read_back_as_it_was_written() {
    let mut plans = plans();
    assert!(plans.iter().any(|plan| !plan.block_copies().is_empty()));
    assert!(plans.iter().any(|plan| !plan.swap_outs().is_empty()));
    assert!(plans.iter().any(|plan| !plan.swap_ins().is_empty()));
    plans.push(StepPlan::default());
    for plan in &plans {
        let text = plan.to_string();
        assert_eq!(text.parse().as_ref(), Ok(plan), "{text}");
    }
}

#[test]
fn what_is_wrong_with_a_text_is_told_with_its_line() {
    let text = plans()[0].to_string();
    let fault = |text: &str| {
        let error = text.parse::<StepPlan>().expect_err("not a plan");
        (error.line, error.fault)
    };
    let with = |line: usize, new: &str| {
        let mut lines: Vec<&str> = text.lines().collect();
        lines[line - 1] = new;
        lines.join("\n")
    };
    assert_eq!(fault(""), (1, PlanTextFault::Expected { field: "step-plan 1" }));
    assert_eq!(fault(&with(1, "step-plan 2")), (1, PlanTextFault::Expected { field: "step-plan 1" }));
    assert_eq!(fault(&with(2, "step")), (2, PlanTextFault::Entry { field: "step", index: 0 }));
    assert_eq!(fault(&with(2, "step 1 2")), (2, PlanTextFault::Entry { field: "step", index: 0 }));
    assert_eq!(fault(&with(7, "tokens 1")), (7, PlanTextFault::Expected { field: "token_ids" }));
    assert_eq!(
        fault(&with(7, "token_ids 1 2 4294967296")),
        (7, PlanTextFault::Entry { field: "token_ids", index: 2 })
    );
    assert_eq!(fault(&with(8, "positions +1")), (8, PlanTextFault::Entry { field: "positions", index: 0 }));
    let table_changes = PlanTextFault::Entry { field: "table_changes", index: 1 };
    assert_eq!(fault(&with(13, "table_changes 1:2:3:4 1:2:3")), (13, table_changes));
    assert_eq!(fault(&with(12, "table_rows")).1, {
        let expected = text.lines().nth(11).expect("line 12").split(' ').count() as u64 - 1;
        PlanTextFault::Length { field: "table_rows", len: 0, expected }
    });
    let end = text.lines().count() as u32;
    assert_eq!(fault(&with(end as usize, "")), (end, PlanTextFault::Expected { field: "end" }));
    assert_eq!(fault(&format!("{text}end\n")), (end + 1, PlanTextFault::Expected { field: "nothing more" }));
    let sequences = text.lines().nth(10).expect("line 11").split(' ').count() - 1;
    let contexts = format!("context_lens{}", " 0".repeat(sequences));
    assert_eq!(fault(&with(11, &contexts)).1, PlanTextFault::Rows { sequence: 0 });
}

/// Any damage gives an error, or a plan that can be used and written.
#[test]
fn a_damaged_text_never_panics() {
    let texts: Vec<String> = plans().iter().map(StepPlan::to_string).collect();
    let mut random = Random(5);
    let (mut read, mut refused) = (0, 0);
    for round in 0..60_000 {
        let mut text = texts[round % texts.len()].clone().into_bytes();
        for _ in 0..1 + random.next() % 3 {
            if text.is_empty() {
                break;
            }
            let place = random.next() as usize % text.len();
            let other = random.next() as usize % text.len();
            match random.next() % 6 {
                0 => text[place] = b"0123456789 :>.-\nx"[random.next() as usize % 17],
                1 => _ = text.remove(place),
                2 => text.insert(place, b"0123456789 :>.-\n"[random.next() as usize % 16]),
                3 => text.truncate(place.max(1)),
                4 => text.swap(place, other),
                _ => _ = text.splice(place..place, b"99999999999".iter().copied()),
            }
        }
        let text = String::from_utf8(text).expect("ASCII");
        match text.parse::<StepPlan>() {
            Ok(plan) => {
                read += 1;
                let _ = (plan.work(), plan.num_rows(), plan.num_sequences());
                assert_eq!(plan.to_string().parse().as_ref(), Ok(&plan), "{text}");
            }
            Err(error) => {
                refused += 1;
                assert!(error.line as usize <= text.lines().count() + 1, "{error}: {text}");
            }
        }
    }
    assert!(read > 1000 && refused > 1000, "{read} plans, {refused} errors");
}
