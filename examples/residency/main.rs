//! A window onto a paged pool: chats that stream their answers, and every block that holds them, drawn as it is.
//!
//! ```text
//! cargo run --release --features window --example residency
//! cargo run --release --features window --example residency -- --model FILE.gguf
//! ```
//!
//! egui draws on wgpu, and the library decodes on the same device: each frame has one encoder and one submission for
//! both, and nothing waits. A hidden window has no frames; its chats go on with one submission a step. [`station`] is
//! where that happens, [`service`] is what a program does with a scheduler, and [`snapshot`] asks the library what
//! every block is. The model is the package `engine` beside this program.

mod app;
mod cards;
mod chart;
mod chat;
mod chats_view;
mod grid;
mod history;
mod loading;
mod look;
mod marks;
mod options;
mod pace;
mod palette;
mod panel;
mod picture;
mod pool_view;
mod script;
mod service;
mod settings;
mod snapshot;
mod station;

use std::{
    process::ExitCode,
    sync::{Arc, OnceLock},
};

use clap::Parser;
use eframe::{
    egui::ViewportBuilder,
    egui_wgpu::{WgpuConfiguration, WgpuSetup, WgpuSetupCreateNew},
};
use example_engine::{
    gguf::GgufFile,
    gpu::{Gpu, choose},
};

use app::App;
use loading::Model;
use options::Options;
use picture::Outcome;
use service::in_words;

/// The model that speaks without --model: trained on one book, a byte a token.
const TOY: &[u8] = include_bytes!("../toy/toy.gguf");

fn main() -> ExitCode {
    match show(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("residency: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Shows the window until it is closed.
fn show(options: Options) -> Result<(), String> {
    let (file, script) = match &options.model {
        Some(path) => (GgufFile::open(path), script::CHAT),
        None => (GgufFile::from_bytes("the toy model", TOY), script::TOY),
    };
    let model = file.map_err(in_words).and_then(Model::read)?;
    let native = eframe::NativeOptions {
        viewport: ViewportBuilder::default()
            .with_title("paged-kv residency")
            .with_inner_size([1440.0, 900.0])
            .with_min_inner_size([960.0, 640.0]),
        // The default lets a frame be made while the step of the one before is computed.
        wgpu_options: WgpuConfiguration { wgpu_setup: setup(options.adapter.clone()), ..Default::default() },
        // Colours mean something here; a test looks at them.
        dithering: false,
        ..Default::default()
    };
    let outcome = Outcome::new(OnceLock::new());
    let told = Arc::clone(&outcome);
    let wants_picture = options.screenshot.is_some();
    let window = eframe::run_native(
        "paged-kv residency",
        native,
        Box::new(move |context| {
            let app = App::new(context, &options, model, script, told)?;
            Ok(Box::new(app))
        }),
    );
    window.map_err(in_words)?;
    match outcome.get() {
        Some(result) => result.clone(),
        None if wants_picture => Err("the window was closed before the picture was taken".to_owned()),
        None => Ok(()),
    }
}

/// A device that can draw in the window, and has what the library recommends for it.
fn setup(name_part: Option<String>) -> WgpuSetup {
    let select = move |adapters: &[wgpu::Adapter], surface: Option<&wgpu::Surface<'_>>| {
        choose(adapters, name_part.as_deref(), surface).ok_or_else(|| {
            let names: Vec<String> = adapters.iter().map(|adapter| adapter.get_info().name).collect();
            format!("no adapter of that name can draw here; found: {}", names.join(", "))
        })
    };
    let mut setup = WgpuSetupCreateNew::without_display_handle();
    // Validation layers cost time and are not what this program is for.
    setup.instance_descriptor.flags = wgpu::InstanceFlags::empty();
    setup.native_adapter_selector = Some(Arc::new(select));
    setup.device_descriptor = Arc::new(Gpu::device_descriptor);
    setup.into()
}
