//! The `residency` example: its parts that draw nothing, the script that it plays, and a picture of its window, in which
//! every block must have the colours of its state.
//!
//! The program must have been built with the feature `window`. The picture is taken on a display of its own (Xvfb) and on
//! lavapipe where `PAGED_KV_REQUIRE_ADAPTERS` names that, else on the display and the adapter that there are.
#![allow(clippy::unwrap_used)]
// Only a part of the example is looked at.
#![allow(dead_code)]

#[path = "../residency/chat.rs"]
mod chat;
#[path = "../residency/grid.rs"]
mod grid;
#[path = "../residency/history.rs"]
mod history;
#[path = "../residency/marks.rs"]
mod marks;
#[path = "../residency/options.rs"]
mod options;
#[path = "../residency/pace.rs"]
mod pace;
#[path = "../residency/palette.rs"]
mod palette;
#[path = "../residency/script.rs"]
mod script;
#[path = "../residency/service.rs"]
mod service;
#[path = "../residency/settings.rs"]
mod settings;
#[path = "../residency/snapshot.rs"]
mod snapshot;

use chat::Phase;
use clap::Parser as _;
use example_engine::{
    attention::shape_of,
    chat::ChatFormat,
    config::Config,
    engine::{Engine, Prompt, SessionOptions},
    frames::{FramePool, Progress},
    gguf::GgufFile,
    gpu::{Adapters, Gpu, GpuModel},
    sample::{Sampler, argmax},
    tokenizer::Tokenizer,
};
use grid::{Grid, SMALLEST, Square};
use options::Options;
use pace::{BUDGET_MS, LEAST_ROWS, MOST_ROWS, Pace};
use paged_kv::{
    CacheConfig, KvType, Request, RowResult, Schedule, Scheduler, SchedulerConfig, StepEvent, TransferReport,
};
use palette::{NUM_OWNERS, Palette, Rgb, luminance, mix};
use script::{Action, Player};
use serde_json::Value;
use service::{Language, Service};
use settings::Settings;
use snapshot::{Cell, Kind, Owner, Snapshot};
use std::io::{BufRead as _, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const TOY: &[u8] = include_bytes!("../toy/toy.gguf");

#[test]
fn every_block_has_a_square_of_its_own_and_is_found_there() {
    for (num_cells, width, height) in
        [(1, 300.0, 200.0), (72, 800.0, 300.0), (73, 797.0, 301.0), (1024, 900.0, 400.0)]
    {
        let grid = Grid::fit(num_cells, width, height);
        let size = grid.size();
        assert!(size[0] <= width && size[1] <= height, "{grid:?} does not fit");
        for index in 0..num_cells {
            let Square { left, top, side } = grid.square(index);
            assert!(left + side <= size[0] && top + side <= size[1], "block {index} of {grid:?}");
            assert_eq!((left.fract(), top.fract()), (0.0, 0.0), "edges are whole points");
            for (x, y) in [(left, top), (left + side - 0.5, top + side - 0.5)] {
                assert_eq!(grid.at(x, y), Some(index));
            }
            assert_eq!(grid.at(left + side + 0.5, top), None, "a gap is nobody's");
        }
        assert_eq!(grid.at(-1.0, 0.0), None);
        assert_eq!(grid.at(0.0, size[1] + 10.0), None);
    }
    let crowded = Grid::fit(4096, 300.0, 100.0);
    assert_eq!(crowded.side, SMALLEST as f32);
    assert!(crowded.size()[0] <= 300.0 && crowded.size()[1] > 100.0, "it is scrolled");
}

#[test]
fn stripes_divide_a_square_and_rise_with_what_is_filled() {
    let square = Square { left: 10.0, top: 20.0, side: 31.0 };
    for of in 1..=NUM_OWNERS {
        let stripes: Vec<_> = (0..of).map(|index| square.stripe(index, of, 0.5)).collect();
        assert_eq!((stripes[0].0, stripes[of - 1].1), (10.0, 41.0));
        assert!(stripes.windows(2).all(|pair| pair[0].1 == pair[1].0 && pair[0].0 < pair[0].1));
    }
    let top = |filled| square.stripe(0, 1, filled).2;
    assert_eq!((top(0.0), top(1.0)), (51.0, 20.0));
    assert!(top(1.0 / 64.0) < 48.0, "one token is seen");
    assert!(top(0.75) < top(0.5));
}

/// How a colour looks to people without one kind of cones (Viénot, Brettel and Mollon, 1999).
fn without_cones(kind: usize, colour: Rgb) -> Rgb {
    const SEEN: [[[f32; 3]; 3]; 2] = [
        [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]],
        [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]],
    ];
    let linear = colour.map(|channel| (f32::from(channel) / 255.0).powf(2.2));
    SEEN[kind].map(|row| {
        let sum: f32 = row.iter().zip(linear).map(|(weight, channel)| weight * channel).sum();
        (sum.clamp(0.0, 1.0).powf(1.0 / 2.2) * 255.0).round() as u8
    })
}

#[test]
fn owners_are_told_apart_by_everybody_and_their_letters_are_legible() {
    let distance = |a: Rgb, b: Rgb| -> f32 {
        a.iter().zip(b).map(|(&a, b)| (f32::from(a) - f32::from(b)).powi(2)).sum::<f32>().sqrt()
    };
    for dark in [true, false] {
        let palette = Palette::of(dark);
        for first in 0..NUM_OWNERS {
            let tone = palette.owner(first);
            for ground in [tone, palette.unfilled(first)] {
                let (a, b) = (luminance(ground), luminance(palette.text_on(ground)));
                let contrast = (a.max(b) + 0.05) / (a.min(b) + 0.05);
                assert!(contrast >= 3.0, "{} on {ground:?}: {contrast}", chat::letter(first));
            }
            assert!(distance(tone, palette.unfilled(first)) > 60.0, "filled or not, {first}");
            for second in 0..first {
                let other = palette.owner(second);
                for seen in [
                    [tone, other],
                    [0, 1].map(|i| without_cones(0, [tone, other][i])),
                    [0, 1].map(|i| without_cones(1, [tone, other][i])),
                ] {
                    assert!(distance(seen[0], seen[1]) > 24.0, "owners {first} and {second}: {seen:?}");
                }
            }
        }
        let states = [palette.free, palette.cached, palette.in_transfer, palette.panel];
        for (place, &state) in states.iter().enumerate() {
            assert!(states[..place].iter().all(|&other| distance(state, other) > 8.0), "{state:?}");
        }
    }
    assert_eq!(mix([0, 100, 200], [100, 100, 0], 0.5), [50, 100, 100]);
}

#[test]
fn a_script_waits_for_its_steps_unless_nothing_else_is_to_do() {
    let mut player = Player::new(script::TOY);
    let mut played = Vec::new();
    for step in 0..2000 {
        while let Some(action) = player.due(step, false) {
            played.push((step, action));
        }
    }
    assert!(player.has_ended());
    assert!(played.is_sorted_by_key(|(step, _)| *step));
    assert!(played.iter().filter(|(step, _)| *step == 0).count() >= 2, "the first launch shows life at once");
    let mut player = Player::new(script::TOY);
    let idle: Vec<Action> = std::iter::from_fn(|| player.due(0, true)).collect();
    assert_eq!(idle, played.iter().map(|(_, action)| *action).collect::<Vec<_>>());
}

fn toy_language() -> (Config, Language) {
    let file = GgufFile::from_bytes("the toy model", TOY).unwrap();
    let tokenizer = Arc::new(Tokenizer::read(&file).unwrap());
    (Config::read(&file).unwrap(), Language { tokenizer, format: ChatFormat::read(&file).unwrap() })
}

/// Plays the toy's script to its end with a model that says any letter.
fn play(arguments: &[&str], mut look: impl FnMut(&Service, &Snapshot)) -> Service {
    let options = Options::parse_from(std::iter::once(&"residency").chain(arguments));
    let (config, language) = toy_language();
    let settings = Settings::new(&options, &script::TOY);
    let mut service = Service::new(&settings, &config, language, script::TOY).unwrap();
    let mut player = Player::new(script::TOY);
    let logits: Vec<f32> =
        (0..config.vocab_len).map(|token| if (97..123).contains(&token) { 0.0 } else { -1e6 }).collect();
    let mut reports = Vec::new();
    for step in 0..5000 {
        while let Some(action) = player.due(step, service.is_idle) {
            service.act(&action).unwrap();
            if service.is_idle {
                break;
            }
        }
        let Some(plan) = service.plan(&std::mem::take(&mut reports), step as f64 / 60.0) else {
            if player.has_ended() {
                break;
            }
            continue;
        };
        look(&service, &service.snapshot());
        (0..plan.logit_rows().len()).for_each(|entry| service.choose(&plan, entry, &logits));
        if !plan.swap_outs().is_empty() || !plan.swap_ins().is_empty() {
            reports.push(TransferReport { step: plan.step(), complete: true });
        }
        service.commit(plan).unwrap();
    }
    assert!(player.has_ended() && service.is_idle, "the script has an end");
    service
}

fn check_snapshot(service: &Service, snapshot: &Snapshot) {
    let (config, stats) = (service.scheduler().cache().config(), service.scheduler().cache().stats());
    let count = |kind| snapshot.cells.iter().filter(|cell| cell.kind == kind).count() as u32;
    assert_eq!(
        (count(Kind::Free), count(Kind::Cached), count(Kind::Held), count(Kind::InTransfer)),
        (stats.free_blocks, stats.cached_blocks, stats.held_blocks, stats.in_transfer_blocks)
    );
    assert_eq!(snapshot.cells.iter().filter(|cell| cell.is_shared()).count() as u32, stats.shared_blocks);
    for cell in &snapshot.cells {
        assert_eq!(
            cell.kind == Kind::Held,
            cell.owners().len() > 0,
            "every holder is a chat in sight: {cell:?}"
        );
    }
    let usage = snapshot.usage();
    let all = usage.live + usage.waste + usage.cached + usage.free;
    assert_eq!(all, config.num_blocks() * config.block_size());
    assert_eq!(usage.levels()[3], 1.0);
}

#[test]
fn the_script_shows_sharing_copies_and_preemption_under_every_policy() {
    for preempt in ["swap", "recompute", "auto"] {
        let (mut most_owners, mut most_saved) = (0, 0);
        let service = play(&["--preempt", preempt], |service, snapshot| {
            check_snapshot(service, snapshot);
            let owners = snapshot.cells.iter().map(|cell| cell.owners().len()).max().unwrap();
            most_owners = most_owners.max(owners);
            most_saved = most_saved.max(snapshot.saved_blocks());
        });
        let stats = service.scheduler().stats();
        assert!(most_owners >= 5, "the system prompt is shared by {most_owners} at most");
        assert!(most_saved >= 48, "sharing saves {most_saved} blocks at most");
        assert!(
            stats.cache.block_copies > 0 && stats.prefix_hit_tokens > 0 && stats.preemptions > 0,
            "{stats:?}"
        );
        let moved = stats.cache.blocks_swapped_out.min(stats.cache.blocks_swapped_in);
        assert_eq!(moved > 0, preempt != "recompute", "{moved} blocks moved");
        assert_eq!(stats.recomputed_tokens > 0, preempt == "recompute", "{stats:?}");
    }
}

#[test]
fn what_cannot_be_is_told_in_the_librarys_words() {
    let options = Options::parse_from(["residency", "--blocks", "4"]);
    let (config, language) = toy_language();
    let settings = Settings::new(&options, &script::TOY);
    let mut service = Service::new(&settings, &config, language.clone(), script::TOY).unwrap();
    let error = service.act(&Action::Ask("hello")).unwrap_err();
    assert!(error.contains("blocks") && error.contains('4'), "{error}");
    assert_eq!(service.act(&Action::Branch(3)).unwrap_err(), "there is no chat D");
    let odd = Settings { block_size: 3, ..settings };
    let error = Service::new(&odd, &config, language, script::TOY).err().unwrap();
    assert!(error.contains("block size") && error.contains('3'), "{error}");
}

#[test]
fn steps_grow_while_they_are_full_and_in_time_and_shrink_when_they_are_late() {
    let (early, late) = (BUDGET_MS - 1.0, BUDGET_MS + 1.0);
    let after = |steps: &[(u32, f32)]| {
        let mut pace = Pace::START;
        steps.iter().for_each(|&(rows, longest_ms)| pace.learn(rows, longest_ms));
        pace.rows
    };
    let start = after(&[]);
    assert_eq!(start, LEAST_ROWS);
    assert_eq!(after(&[(start, early)]), 2 * start, "doubled until it is too much");
    assert_eq!(after(&[(start - 1, early)]), start, "there was no more to compute");
    let twice = [(start, early), (2 * start, early)];
    assert_eq!(after(&twice), 4 * start);
    let then = |rows, longest_ms| after(&[twice[0], twice[1], (rows, longest_ms)]);
    assert_eq!(then(128, 1.25 * BUDGET_MS), 102, "by as much as it was late");
    assert_eq!(then(128, 10.0 * BUDGET_MS), 64, "but a single delay does not undo everything");
    assert_eq!(then(60, late), 64, "fewer rows would have been too many, too");
    assert_eq!(then(8, late), 128, "a row for every chat cannot be less");
    assert_eq!(after(&[(32, early), (64, late), (61, early)]), 61 + 61 / 8, "then by little");
    assert_eq!(after(&[(32, late)]), LEAST_ROWS);
    assert_eq!(after(&[(32, early), (64, early), (128, early), (256, early), (512, early)]), MOST_ROWS);

    // A device that takes so long for a step and so long for each of its rows, behind a display of 60 frames a second.
    let settled = |step_ms: f32, row_ms: f32| {
        let frame_ms = 1000.0 / 60.0;
        let mut pace = Pace::START;
        let mut seen: Vec<u32> = Vec::new();
        for _ in 0..60 {
            let took_ms = step_ms + pace.rows as f32 * row_ms;
            pace.learn(pace.rows, (took_ms / frame_ms).ceil() * frame_ms);
            seen.push(pace.rows);
        }
        let steady = seen.split_off(40);
        (*steady.iter().min().unwrap(), *steady.iter().max().unwrap())
    };
    assert_eq!(settled(1.0, 0.01), (MOST_ROWS, MOST_ROWS), "a fast one reads in the largest steps");
    assert_eq!(settled(100.0, 1.0), (LEAST_ROWS, LEAST_ROWS), "a slow one in the smallest");
    let (least, most) = settled(5.0, 0.1);
    assert!(least > 80 && most < 135, "116 rows fit into a frame: {least} to {most}");
}

#[test]
fn the_pace_is_that_of_the_next_step() {
    let (config, language) = toy_language();
    let options = Options::parse_from(["residency", "--blocks", "64"]);
    let settings = Settings::new(&options, &script::TOY);
    let mut service = Service::new(&settings, &config, language, script::TOY).unwrap();
    service.ask(&"long ".repeat(60)).unwrap();
    let logits = vec![0.0; config.vocab_len as usize];
    let mut rows = Vec::new();
    for longest_ms in [1.0, 1.0, 100.0, 1.0] {
        let plan = service.plan(&[], 0.0).expect("a prompt to read");
        rows.push(plan.num_rows());
        (0..plan.logit_rows().len()).for_each(|entry| service.choose(&plan, entry, &logits));
        service.commit(plan).unwrap();
        service.keep_pace(*rows.last().unwrap(), longest_ms).unwrap();
    }
    assert_eq!(rows, [32, 64, 128, 64]);
}

/// A service with one chat that has said a few letters.
fn chatting() -> (Service, Vec<f32>) {
    let (config, language) = toy_language();
    let settings = Settings::new(&Options::parse_from(["residency"]), &script::TOY);
    let mut service = Service::new(&settings, &config, language, script::TOY).unwrap();
    service.act(&Action::Ask("hello")).unwrap();
    let logits: Vec<f32> = (0..config.vocab_len).map(|token| if token == 97 { 0.0 } else { -1e6 }).collect();
    while service.chats().next().unwrap().1.segments.len() < 3 {
        step(&mut service, &logits);
    }
    (service, logits)
}

/// Runs a step in which every chat sees the same logits.
fn step(service: &mut Service, logits: &[f32]) {
    let plan = service.plan(&[], 0.0).expect("there is something to compute");
    (0..plan.logit_rows().len()).for_each(|entry| service.choose(&plan, entry, logits));
    service.commit(plan).unwrap();
}

#[test]
fn a_chat_whose_numbers_are_invalid_can_be_continued_branched_and_closed() {
    let (mut service, logits) = chatting();
    let chat = |service: &Service, slot: usize| service.chats().nth(slot).unwrap().1.clone();
    let before = service.scheduler().tokens(chat(&service, 0).sequence()).unwrap().to_vec();
    step(&mut service, &vec![f32::NAN; logits.len()]);
    assert_eq!(chat(&service, 0).phase, Phase::Invalid(before.clone()));
    assert_eq!(service.scheduler().tokens(chat(&service, 0).sequence()), None, "the scheduler forgets it");
    assert!(service.snapshot().cells.iter().all(|cell| cell.kind == Kind::Free), "and all of its blocks");
    assert!(service.plan(&[], 0.0).is_none() && service.is_idle);

    service.act(&Action::Branch(0)).unwrap();
    service.act(&Action::Continue(0)).unwrap();
    for slot in [0, 1] {
        assert_eq!(chat(&service, slot).phase, Phase::Answering);
        assert_eq!(service.scheduler().tokens(chat(&service, slot).sequence()).unwrap(), before);
    }
    let said = chat(&service, 0).segments[2].text.len();
    while chat(&service, 0).segments[2].text.len() == said {
        step(&mut service, &logits);
    }
    // Nothing of it is left but in the other chat.
    step(&mut service, &vec![f32::NAN; logits.len()]);
    assert!(matches!(chat(&service, 0).phase, Phase::Invalid(_)));
    service.act(&Action::Say(0, "go on")).unwrap();
    assert_eq!(chat(&service, 0).phase, Phase::Answering);
    for slot in [0, 1] {
        service.act(&Action::Close(slot)).unwrap();
    }
    assert!(service.plan(&[], 0.0).is_none());
    assert_eq!(service.chats().count(), 0);
}

/// The adapter that is required, or whichever there is.
fn gpu() -> Gpu {
    let required = std::env::var("PAGED_KV_REQUIRE_ADAPTERS").unwrap_or_default();
    let lavapipe = required.split(',').any(|name| name == "lavapipe");
    let adapters = Adapters::find(lavapipe.then_some("llvmpipe"));
    Gpu::open(adapters.best().expect("there is an adapter")).unwrap()
}

#[test]
fn steps_recorded_into_frames_choose_the_same_tokens_and_a_frame_that_is_not_shown_changes_nothing() {
    const NEW: u32 = 6;
    let mut file = GgufFile::from_bytes("the toy model", TOY).unwrap();
    let config = Config::read(&file).unwrap();
    let tokens: Vec<u32> = "In the beginning God created".bytes().map(u32::from).collect();
    let cache = CacheConfig::for_blocks(8, &shape_of(&config), KvType::F16).unwrap();
    let scheduler = SchedulerConfig { step_tokens: 16, ..SchedulerConfig::default() };

    let sampler = Sampler { temperature: 0.0, seed: 0 };
    let options = SessionOptions { cache, scheduler, sampler, top_logits: 0, rates: None };
    let prompt = Prompt { tokens: tokens.clone(), max_new_tokens: NEW, samples: 1, ..Prompt::default() };
    let mut engine = Engine::load(&mut file, None, &mut |_| ()).unwrap();
    let expected = engine.run(&[prompt], options).unwrap().0.remove(0).tokens;

    let gpu = gpu();
    println!("adapter: {}", gpu.label);
    let model = GpuModel::load(gpu.clone(), &mut file, config, &mut |_| ()).unwrap();
    let mut pool = FramePool::new(model, cache, 16, 1).unwrap();
    let mut scheduler = Scheduler::new(scheduler, cache).unwrap();
    scheduler.add(Request::new(tokens).max_new_tokens(NEW)).unwrap();
    let (mut chosen, mut frames) = (Vec::new(), 0);
    while let Schedule::Step(plan) = scheduler.schedule() {
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
        for event in scheduler.commit(plan, &results).unwrap() {
            if let StepEvent::Token { token, .. } = event {
                chosen.push(*token);
            }
        }
    }
    assert_eq!(chosen, expected);
    assert_eq!(scheduler.stats().steps, 1 + u64::from(NEW), "two steps read the prompt");
    assert!(frames > scheduler.stats().steps, "some were not shown");
}

// --- The picture -------------------------------------------------------------------------------------

/// What a picture may take: a software adapter draws it in less than a minute, if nothing else keeps it busy.
const LIMIT: Duration = Duration::from_secs(600);

/// A display that nobody sees.
struct Display {
    server: Child,
    name: String,
}

impl Display {
    fn open() -> Self {
        let mut server = Command::new("Xvfb")
            .args(["-displayfd", "1", "-screen", "0", "1600x1000x24", "-nolisten", "tcp"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("Xvfb starts; it is in the package xvfb");
        let mut number = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut number).unwrap();
        assert!(!number.trim().is_empty(), "Xvfb has no display");
        Self { server, name: format!(":{}", number.trim()) }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Runs the program. It is killed where it takes longer than [`LIMIT`].
fn run(display: Option<&Display>, arguments: &[&str]) -> Output {
    let tests = std::env::current_exe().unwrap();
    let file = format!("residency{}", std::env::consts::EXE_SUFFIX);
    let path = tests.parent().unwrap().parent().unwrap().join("examples").join(file);
    let build = "cargo build --workspace --features paged-kv-examples/window --example residency";
    assert!(path.exists(), "{} is missing: {build}", path.display());
    let mut command = Command::new(path);
    command.args(arguments);
    if let Some(display) = display {
        command.env("DISPLAY", &display.name).env_remove("WAYLAND_DISPLAY").args(["--adapter", "llvmpipe"]);
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Read meanwhile: a program that nobody listens to stands still.
    let out = listen(child.stdout.take().unwrap());
    let err = listen(child.stderr.take().unwrap());
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let [stdout, stderr] = [out, err].map(|reader| reader.join().unwrap());
    let Some(status) = status else {
        let printed = [&stdout, &stderr].map(|bytes| String::from_utf8_lossy(bytes));
        panic!("{arguments:?} did not end within {LIMIT:?}; it printed: {}{}", printed[0], printed[1]);
    };
    Output { status, stdout, stderr }
}

/// Everything that a pipe has to say.
fn listen(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// The pixels of a picture.
struct Image {
    width: usize,
    bytes: Vec<u8>,
}

impl Image {
    fn open(path: &Path) -> Self {
        let decoder = png::Decoder::new(BufReader::new(std::fs::File::open(path).unwrap()));
        let mut reader = decoder.read_info().unwrap();
        let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut bytes).unwrap();
        assert_eq!(info.color_type, png::ColorType::Rgb);
        Self { width: info.width as usize, bytes }
    }

    /// The pixel whose area holds a point.
    fn at(&self, x: f32, y: f32) -> Rgb {
        let start = 3 * (y.floor() as usize * self.width + x.floor() as usize);
        self.bytes[start..start + 3].try_into().unwrap()
    }
}

fn float(value: &Value) -> f32 {
    value.as_f64().unwrap() as f32
}

fn cell_of(block: &Value) -> Cell {
    let mut cell = Cell::new(match block["kind"].as_str().unwrap() {
        "Free" => Kind::Free,
        "Cached" => Kind::Cached,
        "Held" => Kind::Held,
        "InTransfer" => Kind::InTransfer,
        other => panic!("no kind of block: {other}"),
    });
    for owner in block["owners"].as_array().unwrap() {
        let number = |name: &str| owner[name].as_u64().unwrap();
        cell.hold(Owner { slot: number("slot") as usize, first_token: 0, tokens: number("tokens") as u32 });
    }
    cell
}

fn square_of(block: &Value) -> Square {
    let place: Vec<f32> = block["place"].as_array().unwrap().iter().map(float).collect();
    Square { left: place[0], top: place[1], side: place[2] }
}

/// Compares the colours of every block with its state: each owner's stripe at its foot, which is full as soon as there is
/// a token, and at its head, which is full only in a full block. Points are chosen off letters, hatching and round corners.
fn check_colours(image: &Image, palette: &Palette, block_size: u32, blocks: &[Value]) {
    for (index, block) in blocks.iter().enumerate() {
        let (cell, square) = (cell_of(block), square_of(block));
        let stripes = palette.stripes(&cell);
        for (place, [filled, rest]) in stripes.iter().enumerate() {
            let tokens = cell.owners().nth(place).map_or(0, |owner| owner.tokens);
            let (left, right, _) = square.stripe(place, stripes.len(), 1.0);
            let x = if stripes.len() == 1 { left + 5.0 } else { (left + right) / 2.0 };
            let foot = if tokens > 0 { filled } else { rest };
            let head = if tokens == block_size { filled } else { rest };
            // The foot of a block that nobody holds is hatched if it is cached.
            if cell.kind == Kind::Held {
                assert_close(image.at(x, square.top + square.side - 2.5), *foot, || {
                    format!("foot of block {index}: {block}")
                });
            }
            assert_close(image.at(x, square.top + 2.5), *head, || format!("head of block {index}: {block}"));
        }
    }
}

/// The same, but for rounding on the way through the device.
fn assert_close(found: Rgb, expected: Rgb, what: impl Fn() -> String) {
    let same = found.iter().zip(expected).all(|(&found, expected)| found.abs_diff(expected) <= 1);
    assert!(same, "{}: {found:?}, not {expected:?}", what());
}

/// A block to which something has just happened has a ring of that colour, nearer to it than to the ground.
fn check_marks(image: &Image, palette: &Palette, blocks: &[Value], marks: &[Value]) {
    let distance = |a: Rgb, b: Rgb| a.iter().zip(b).map(|(&a, b)| u32::from(a.abs_diff(b))).sum::<u32>();
    let mut fresh = marks.iter().filter(|mark| float(&mark["strength"]) == 1.0).peekable();
    assert!(fresh.peek().is_some(), "no block has just moved or been copied");
    for mark in fresh {
        let square = square_of(&blocks[mark["block"].as_u64().unwrap() as usize]);
        let colour: Vec<u8> =
            mark["colour"].as_array().unwrap().iter().map(|c| c.as_u64().unwrap() as u8).collect();
        let colour: Rgb = colour.try_into().unwrap();
        let found = image.at(square.left - 0.5, square.top + square.side / 2.0);
        assert!(distance(found, colour) < distance(found, palette.panel), "ring of {mark}: {found:?}");
    }
}

/// Every state has an example in the legend, in its colours: also a block in transfer, which few frames of the script have.
fn check_legend(image: &Image, palette: &Palette, states: &Value) {
    let legend = states["legend"].as_array().unwrap();
    check_colours(image, palette, states["block_size"].as_u64().unwrap() as u32, legend);
    for kind in ["Free", "Cached", "Held", "InTransfer"] {
        assert!(legend.iter().any(|block| block["kind"] == kind), "{kind} is not in the legend: {legend:?}");
    }
}

/// What the picture says of each state, and what the library counts.
fn check_sums(states: &Value) {
    let blocks = states["blocks"].as_array().unwrap();
    let count = |kind: &str| blocks.iter().filter(|block| block["kind"] == kind).count() as u64;
    let stats = &states["stats"];
    for (kind, name) in
        [("Free", "free"), ("Cached", "cached"), ("Held", "held"), ("InTransfer", "in_transfer")]
    {
        assert_eq!(Some(count(kind)), stats[name].as_u64(), "{name}: {stats}");
    }
    assert_eq!(Some(blocks.len() as u64), stats["num_blocks"].as_u64());
    let owners = blocks.iter().map(|block| block["owners"].as_array().unwrap().len());
    assert_eq!(Some(owners.filter(|&owners| owners > 1).count() as u64), stats["shared"].as_u64(), "{stats}");
}

/// A step of the script in which much is to be seen at once.
const CROWDED_STEP: &str = "120";
/// Blocks of a pool that is full by then.
const CROWDED_BLOCKS: &str = "44";

#[test]
fn every_block_is_drawn_in_the_colours_of_its_state() {
    let required = std::env::var("PAGED_KV_REQUIRE_ADAPTERS").unwrap_or_default();
    let display = required.split(',').any(|name| name == "lavapipe").then(Display::open);
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    for theme in ["dark", "light"] {
        let [picture, states] = ["png", "json"].map(|kind| folder.join(format!("residency-{theme}.{kind}")));
        let [picture_name, states_name] = [&picture, &states].map(|path| path.to_str().unwrap());
        let arguments = ["--theme", theme, "--blocks", CROWDED_BLOCKS, "--frames", CROWDED_STEP];
        let files = ["--screenshot", picture_name, "--states", states_name];
        let ended = run(display.as_ref(), &[&arguments[..], &files].concat());
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        let image = Image::open(&picture);
        let states: Value = serde_json::from_slice(&std::fs::read(&states).unwrap()).unwrap();
        let palette = Palette::of(theme == "dark");
        let blocks = states["blocks"].as_array().unwrap();
        let marks = states["marks"].as_array().unwrap();
        check_sums(&states);
        check_colours(&image, &palette, states["block_size"].as_u64().unwrap() as u32, blocks);
        check_marks(&image, &palette, blocks, marks);
        check_legend(&image, &palette, &states);
        let stats = &states["stats"];
        let shows =
            ["shared", "held", "cached", "host_in_use", "block_copies", "preemptions", "prefix_hit_tokens"];
        for name in shows {
            assert!(stats[name].as_u64().unwrap() > 0, "nothing of {name} is to be seen: {stats}");
        }
        println!(
            "window: {} blocks as they are, {} of them shared, in the {theme} theme",
            blocks.len(),
            stats["shared"]
        );
    }
    let ended = run(display.as_ref(), &["--block-size", "3", "--screenshot", "none.png", "--frames", "1"]);
    let error = String::from_utf8(ended.stderr).unwrap();
    assert!(!ended.status.success() && error.contains("block size"), "{error}");
}
