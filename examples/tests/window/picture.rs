//! Pictures of the window, compared with what they are to show.

use crate::{
    grid::Square,
    palette::{Palette, Rgb},
    requires_lavapipe,
    snapshot::{Cell, Kind, Owner},
};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What a picture may take: a software adapter draws it in less than a minute, if nothing else keeps it busy.
pub(crate) const LIMIT: Duration = Duration::from_secs(600);

/// A display that nobody sees.
pub(crate) struct Display {
    server: Child,
    pub(crate) name: String,
}

impl Display {
    pub(crate) fn open() -> Self {
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
pub(crate) fn run(display: Option<&Display>, arguments: &[&str]) -> Output {
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
    // Read meanwhile: a program whose output is not read stands still.
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
pub(crate) struct Image {
    pub(crate) width: usize,
    bytes: Vec<u8>,
}

impl Image {
    pub(crate) fn open(path: &Path) -> Self {
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

pub(crate) fn float(value: &Value) -> f32 {
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
            // The foot of a block that no chat holds is hatched if it is cached.
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
pub(crate) fn check_sums(states: &Value) {
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
    let display = requires_lavapipe().then(Display::open);
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
