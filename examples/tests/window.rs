//! The `residency` example: its parts that draw nothing, the script that it plays, and a picture of its window, in which
//! every block must have the colours of its state.
//!
//! The program must have been built with the feature `window`. The picture is taken on a display of its own (Xvfb) and on
//! lavapipe where `PAGED_KV_REQUIRE_ADAPTERS` names that, else on the display and the adapter that there are.
#![allow(clippy::unwrap_used)]
// Only a part of the example is looked at.
#![allow(dead_code)]

#[path = "../residency/cards.rs"]
mod cards;
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
#[path = "../residency/station.rs"]
mod station;

#[path = "window/frames.rs"]
mod frames;
#[cfg(target_os = "linux")]
#[path = "window/hidden.rs"]
mod hidden;
#[path = "window/picture.rs"]
mod picture;

use chat::Phase;
use clap::Parser as _;
use example_engine::{chat::ChatFormat, config::Config, gguf::GgufFile, tokenizer::Tokenizer};
use grid::{Grid, SMALLEST, Square};
use options::Options;
use pace::{BUDGET_MS, LEAST_ROWS, MOST_ROWS, Pace};
use paged_kv::TransferReport;
use palette::{NUM_OWNERS, Palette, Rgb, luminance, mix};
use script::{Action, Player};
use service::{Language, Service};
use settings::Settings;
use snapshot::{Kind, Snapshot};
use std::sync::Arc;

const TOY: &[u8] = include_bytes!("../toy/toy.gguf");

/// Whether a test is to draw and compute on lavapipe, and on a display of its own.
fn requires_lavapipe() -> bool {
    let required = std::env::var("PAGED_KV_REQUIRE_ADAPTERS").unwrap_or_default();
    required.split(',').any(|name| name == "lavapipe")
}

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
    let mut file = GgufFile::from_bytes("the toy model", TOY).unwrap();
    let tokenizer = Arc::new(Tokenizer::read(&file).unwrap());
    (Config::read(&mut file).unwrap(), Language { tokenizer, format: ChatFormat::read(&file).unwrap() })
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
fn a_chat_that_was_stopped_says_how_long_it_is() {
    let (mut service, logits) = chatting();
    let size = |service: &Service| {
        let (slot, chat) = service.chats().next().unwrap();
        (chat.phase.clone(), cards::size(chat, service.snapshot().share(slot)))
    };
    let tokens = service.scheduler().tokens(service.chats().next().unwrap().1.sequence()).unwrap().len();
    let blocks = service.scheduler().cache().stats().held_blocks;
    assert!(tokens > 100 && blocks > 0);
    assert_eq!(size(&service), (Phase::Answering, format!("{tokens} tokens, {blocks} blocks")));
    service.act(&Action::Stop(0)).unwrap();
    let (phase, stopped) = size(&service);
    assert!(matches!(&phase, Phase::Stopped(kept) if kept.len() == tokens), "{phase:?}");
    assert_eq!(stopped, format!("{tokens} tokens, 0 blocks"));
    service.act(&Action::Continue(0)).unwrap();
    step(&mut service, &logits);
    step(&mut service, &vec![f32::NAN; logits.len()]);
    let (phase, invalid) = size(&service);
    assert!(matches!(phase, Phase::Invalid(_)), "{phase:?}");
    assert!(invalid.starts_with(&format!("{} tokens", tokens + 1)), "{invalid}");
}

#[test]
fn no_card_is_cut_at_any_width_of_the_window() {
    const GAP: f32 = 8.0;
    for row in 200..2000 {
        for num_cards in 1..=NUM_OWNERS {
            let (row, width) = (row as f32, cards::width(row as f32, GAP, num_cards));
            assert!(width >= cards::NARROWEST, "{num_cards} cards of {width} in {row}");
            let begun = (row / (width + GAP)).ceil().min(num_cards as f32);
            let end = begun * (width + GAP) - GAP;
            assert!(end <= row, "{begun} of {num_cards} cards of {width} end at {end} of {row}");
            if num_cards as f32 * (cards::NARROWEST + GAP) - GAP <= row {
                assert_eq!(begun, num_cards as f32, "all fit into {row}");
            }
        }
    }
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
