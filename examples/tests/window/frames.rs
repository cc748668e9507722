//! Steps among the commands of frames, and those that no frame takes.

use crate::{
    TOY, requires_lavapipe,
    station::{Arrival, SharedStation, Way},
};
use example_engine::{
    attention::shape_of,
    config::Config,
    engine::{Engine, Prompt, SessionOptions},
    frames::{FramePool, Progress},
    gguf::GgufFile,
    gpu::{Adapters, Gpu, GpuModel},
    sample::{Sampler, argmax},
};
use paged_kv::{
    CacheConfig, KvType, Request, RowResult, Schedule, Scheduler, SchedulerConfig, StepEvent, StepPlan,
};

/// The adapter that is required, or whichever there is.
fn gpu() -> Gpu {
    let adapters = Adapters::find(requires_lavapipe().then_some("llvmpipe"));
    Gpu::open(adapters.best().expect("there is an adapter")).unwrap()
}

/// New tokens of [`Reading`].
const NEW: u32 = 6;

/// A prompt and its answer, to be computed by a program that draws frames.
struct Reading {
    gpu: Gpu,
    pool: FramePool,
    scheduler: Scheduler,
    /// The answer, as the CPU has it.
    expected: Vec<u32>,
}

impl Reading {
    fn new() -> Self {
        let mut file = GgufFile::from_bytes("the toy model", TOY).unwrap();
        let config = Config::read(&mut file).unwrap();
        let tokens: Vec<u32> = "In the beginning God created".bytes().map(u32::from).collect();
        let cache = CacheConfig::for_blocks(8, &shape_of(&config), KvType::F16).unwrap();
        let scheduler = SchedulerConfig { step_tokens: 16, ..SchedulerConfig::default() };

        let sampler = Sampler { temperature: 0.0, seed: 0 };
        let options = SessionOptions { cache: cache.clone(), scheduler, sampler, top_logits: 0, rates: None };
        let prompt = Prompt { tokens: tokens.clone(), max_new_tokens: NEW, samples: 1, ..Prompt::default() };
        let mut engine = Engine::load(&mut file, None, &mut |_| ()).unwrap();
        let expected = engine.run(&[prompt], options).unwrap().0.remove(0).tokens;

        let gpu = gpu();
        println!("adapter: {}", gpu.label);
        let model = GpuModel::load(gpu.clone(), &mut file, config, &mut |_| ()).unwrap();
        let pool = FramePool::new(model, cache.clone(), 16, 1).unwrap();
        let mut scheduler = Scheduler::new(scheduler, cache).unwrap();
        scheduler.add(Request::new(tokens).max_new_tokens(NEW)).unwrap();
        Self { gpu, pool, scheduler, expected }
    }
}

/// The next step; none when nothing is left. Nothing here is ever waited for.
fn planned(scheduler: &mut Scheduler) -> Option<StepPlan> {
    match scheduler.schedule() {
        Schedule::Step(plan) => Some(plan),
        Schedule::Idle => None,
        Schedule::Waiting(reason) => panic!("it waits: {reason:?}"),
    }
}

/// Commits a step, and returns the tokens that it told.
fn told(scheduler: &mut Scheduler, plan: StepPlan, results: &[RowResult]) -> Vec<u32> {
    let events = scheduler.commit(plan, results).unwrap().iter();
    events
        .filter_map(|event| match event {
            StepEvent::Token { token, .. } => Some(*token),
            _ => None,
        })
        .collect()
}

#[test]
fn steps_recorded_into_frames_choose_the_same_tokens_and_a_frame_that_is_not_shown_changes_nothing() {
    let Reading { gpu, mut pool, mut scheduler, expected } = Reading::new();
    let (mut chosen, mut frames) = (Vec::new(), 0);
    while let Some(plan) = planned(&mut scheduler) {
        frames += 1;
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        pool.record(&plan, &mut encoder).unwrap();
        // Every third frame finds no surface to be shown on.
        if frames % 3 == 1 {
            drop(encoder);
            assert_eq!(pool.take(&plan, |_, _| panic!("it never ran")).unwrap(), Progress::NeverSubmitted);
            continue;
        }
        gpu.queue.submit([encoder.finish()]);
        let mut results = Vec::new();
        let mut take = |_, logits: &[f32]| results.push(RowResult::Token(argmax(logits).unwrap()));
        while pool.take(&plan, &mut take).unwrap() == Progress::OnItsWay {
            gpu.device.poll(wgpu::PollType::Poll).unwrap();
            std::thread::yield_now();
        }
        assert_eq!(pool.take(&plan, |_, _| ()).unwrap(), Progress::None, "it is taken once");
        chosen.extend(told(&mut scheduler, plan, &results));
    }
    assert_eq!(chosen, expected);
    assert_eq!(scheduler.stats().steps, 1 + u64::from(NEW), "two steps read the prompt");
    assert!(frames > scheduler.stats().steps, "some were not shown");
}

#[test]
fn a_step_that_no_frame_takes_is_submitted_by_itself_and_once() {
    let Reading { gpu, pool, mut scheduler, expected } = Reading::new();
    let station = SharedStation::new(pool);
    let (mut chosen, mut ways, mut steps) = (Vec::new(), Vec::new(), 0);
    while let Some(plan) = planned(&mut scheduler) {
        station.with(|station| station.depart(plan));
        steps += 1;
        // The window is shown in every second step.
        if steps % 2 == 0 {
            let mut encoder = gpu.device.create_command_encoder(&Default::default());
            station.record(&mut encoder);
            gpu.queue.submit([encoder.finish()]);
        } else {
            let arrival = station.with(|station| station.arrive(|_, _, _| panic!("nobody has submitted it")));
            assert!(matches!(arrival, Some(Arrival::Later)));
        }
        let mut results = Vec::new();
        let (plan, way) = loop {
            // In every tick, whatever became of the frame before.
            station.with(|station| station.submit(&gpu.device, &gpu.queue));
            gpu.device.poll(wgpu::PollType::Poll).unwrap();
            let mut take = |_: &_, _, logits: &[f32]| results.push(RowResult::Token(argmax(logits).unwrap()));
            match station.with(|station| station.arrive(&mut take)).unwrap() {
                Arrival::Later => std::thread::yield_now(),
                Arrival::Step(plan, way) => break (plan, way),
                Arrival::Empty => panic!("step {steps} is gone"),
                Arrival::Dropped(error) => panic!("step {steps}: {error:?}"),
            }
        };
        ways.push(way);
        chosen.extend(told(&mut scheduler, plan, &results));
    }
    assert_eq!(chosen, expected);
    assert!(ways.iter().zip(1..).all(|(way, step)| (*way == Way::InFrame) == (step % 2 == 0)), "{ways:?}");
    assert_eq!(ways.len() as u64, scheduler.stats().steps);
}
