//! A picture of the window, and beside it what the picture shows: for tests, and for docs/residency.md.

use std::{
    fs::File,
    io::{self, BufWriter},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use eframe::egui;
use serde_json::{Value, json};

use crate::{
    grid::Square,
    marks::Event,
    options::Options,
    palette::{NUM_OWNERS, Palette},
    pool_view::{Drawn, event_colour},
    service::Service,
    snapshot::{Cell, Snapshot},
};

/// Frames after which text that is scrolled to its end stays where it is.
const SETTLED: u32 = 3;

/// How the picture came out; set once.
pub(crate) type Outcome = Arc<OnceLock<Result<(), String>>>;

/// A picture to be taken.
pub(crate) struct Picture {
    file: PathBuf,
    states_file: Option<PathBuf>,
    /// It shows the frame that carries this step.
    pub(crate) step: u64,
    outcome: Outcome,
    /// Frames that have shown what it is to show.
    frames: u32,
    /// What it shows, once it has been asked for.
    states: Option<Value>,
    image: Arc<Mutex<Option<Arc<egui::ColorImage>>>>,
}

/// What was drawn in the frame.
pub(crate) struct Shown<'a> {
    pub(crate) service: &'a Service,
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) marks: &'a [(u32, Event, f32)],
    pub(crate) drawn: &'a Drawn,
    pub(crate) cards: &'a [egui::Rect],
    pub(crate) palette: &'a Palette,
    pub(crate) hidden_steps: u64,
}

impl Picture {
    pub(crate) fn new(options: &Options, outcome: Outcome) -> Option<Self> {
        Some(Self {
            file: options.screenshot.clone()?,
            states_file: options.states.clone(),
            step: options.frames?,
            outcome,
            frames: 0,
            states: None,
            image: Arc::default(),
        })
    }

    /// Called in every frame from the one on that is to be shown; nothing changes in them. Asks for the picture when the
    /// window has settled, writes it when it is there, and closes the window.
    pub(crate) fn take(&mut self, context: &egui::Context, shown: &Shown<'_>) {
        self.frames += 1;
        if self.frames == SETTLED {
            self.states = Some(states(shown, context.pixels_per_point()));
            let image = Arc::clone(&self.image);
            context.request_screenshot(move |taken| {
                *image.lock().unwrap_or_else(PoisonError::into_inner) = Some(taken);
            });
        }
        let image = self.image.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(image) = image {
            self.end(context, self.write(&image));
        }
    }

    /// Closes the window; without a picture if something was wrong.
    pub(crate) fn end(&self, context: &egui::Context, result: Result<(), String>) {
        // The first outcome counts.
        let _ = self.outcome.set(result);
        context.send_viewport_cmd(egui::ViewportCommand::Close);
    }

    fn write(&self, image: &egui::ColorImage) -> Result<(), String> {
        let in_words = |path: &Path| {
            let path = path.display().to_string();
            move |error: io::Error| format!("cannot write {path}: {error}")
        };
        write_png(&self.file, image).map_err(in_words(&self.file))?;
        if let (Some(path), Some(states)) = (&self.states_file, &self.states) {
            std::fs::write(path, states.to_string()).map_err(in_words(path))?;
        }
        Ok(())
    }
}

fn write_png(path: &Path, image: &egui::ColorImage) -> io::Result<()> {
    let [width, height] = image.size;
    let mut encoder = png::Encoder::new(BufWriter::new(File::create(path)?), width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    let pixels: Vec<u8> = image.pixels.iter().flat_map(|pixel| [pixel.r(), pixel.g(), pixel.b()]).collect();
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels)?;
    writer.finish()?;
    Ok(())
}

/// What the picture shows. Places are in its pixels; counts are the library's own.
fn states(shown: &Shown<'_>, pixels_per_point: f32) -> Value {
    let Shown { service, snapshot, marks, drawn, cards, palette, hidden_steps } = shown;
    let block = |cell: &Cell, square: &Square| {
        let owners: Vec<Value> =
            cell.owners().map(|owner| json!({ "slot": owner.slot, "tokens": owner.tokens })).collect();
        let place = [square.left, square.top, square.side].map(|length| length * pixels_per_point);
        json!({ "kind": format!("{:?}", cell.kind), "owners": owners, "place": place })
    };
    let blocks: Vec<Value> =
        snapshot.cells.iter().zip(0..).map(|(cell, index)| block(cell, &drawn.square(index))).collect();
    let legend: Vec<Value> = drawn.legend.iter().map(|(cell, square)| block(cell, square)).collect();
    let marks: Vec<Value> = marks.iter().map(|&(block, event, strength)| {
        json!({ "block": block, "strength": strength, "colour": event_colour(palette, event) })
    }).collect();
    let ends: Vec<[f32; 2]> =
        cards.iter().map(|card| [card.left(), card.right()].map(|x| x * pixels_per_point)).collect();
    let stats = service.scheduler().stats();
    let cache = &stats.cache;
    json!({
        "dark": **palette == Palette::of(true),
        "owners": NUM_OWNERS,
        "block_size": snapshot.block_size,
        "blocks": blocks,
        "legend": legend,
        "cards": ends,
        "hidden_steps": hidden_steps,
        "marks": marks,
        "stats": {
            "num_blocks": cache.num_blocks,
            "free": cache.free_blocks,
            "cached": cache.cached_blocks,
            "held": cache.held_blocks,
            "shared": cache.shared_blocks,
            "in_transfer": cache.in_transfer_blocks,
            "num_tables": cache.num_tables,
            "host_in_use": cache.host_blocks - cache.host_free_blocks,
            "block_copies": cache.block_copies,
            "preemptions": stats.preemptions,
            "blocks_swapped_out": cache.blocks_swapped_out,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
        },
    })
}
