//! The window: what happens in a tick, and where everything is drawn.
//!
//! egui ticks before every frame, and also while the window is hidden and has no frames. In each tick the device is polled
//! without waiting, a step that has come back is committed, and the next one is planned. While the window is drawn,
//! [`station`](crate::station) records it into the frame's own encoder; a step that no frame has taken by the next tick is
//! submitted by itself. So the window goes on being drawn however long a prompt is, and chats go on while it is hidden.

mod draw;

use std::time::{Duration, Instant};

use eframe::{
    egui::{self, Ui, ViewportCommand},
    egui_wgpu::RenderState,
};
use example_engine::{config::Config, frames::FramePool, gpu::Gpu};

use crate::{
    chats_view::Wish,
    loading::{Loading, Model, Replaced},
    look,
    options::{Options, Theme},
    picture::{Outcome, Picture},
    script::{Action, Player, Script},
    service::{Language, Service},
    settings::Settings,
    station::{Arrival, SharedStation, Way},
};

/// Frames a second by which events fade in a picture, where time must not depend on the machine.
const PICTURE_RATE: f64 = 60.0;
/// From one tick to the next without frames, which come at the display's rate.
const TICK: Duration = Duration::from_millis(5);
/// The same, and from frame to frame, while nothing is computed.
const IDLE_TICK: Duration = Duration::from_millis(100);

/// The window's state.
pub(crate) struct App {
    config: Config,
    language: Language,
    adapter: String,
    /// Whether threads may use the device: OpenGL's context is one thread's.
    beside: bool,
    dark: bool,
    settings: Settings,
    /// Those of the pool that is there.
    applied: Settings,
    stage: Stage,
    service: Service,
    player: Player,
    picture: Option<Picture>,
    steps: u64,
    /// Those that no frame took.
    hidden_steps: u64,
    departed: Instant,
    ticked: Instant,
    step_ms: f32,
    /// From one tick to the next.
    frame_ms: f32,
    /// The longest of these times since a step departed.
    longest_ms: f32,
    is_paused: bool,
    /// Although paused.
    one_step: bool,
    error: Option<String>,
    draft: String,
    addressed: Option<usize>,
    chosen: Option<usize>,
}

enum Stage {
    Loading(Loading<Result<FramePool, String>>),
    Running(SharedStation),
    /// The pool is about to be replaced, when the last step has come back.
    Ending(SharedStation),
    Replacing {
        station: SharedStation,
        loading: Loading<Replaced>,
        settings: Settings,
    },
    /// Nothing more will be computed.
    Failed,
}

impl App {
    /// # Errors
    /// What is wrong with the settings.
    pub(crate) fn new(
        context: &eframe::CreationContext<'_>,
        options: &Options,
        model: Model,
        script: Script,
        outcome: Outcome,
    ) -> Result<Self, String> {
        let render = context.wgpu_render_state.as_ref().expect("eframe was told to draw with wgpu");
        let gpu = Gpu::from_device(render.device.clone(), render.queue.clone());
        let beside = render.adapter.get_info().backend != wgpu::Backend::Gl;
        let settings = Settings::new(options, &script);
        let Model { file, config, language } = model;
        let service = Service::new(&settings, &config, language.clone(), script)?;
        let adapter = gpu.label.clone();
        let loading = Loading::model(&context.egui_ctx, beside, gpu, file, config.clone(), settings);
        let dark = options.theme == Theme::Dark;
        look::apply(&context.egui_ctx, dark);
        Ok(Self {
            config,
            language,
            adapter,
            beside,
            dark,
            settings,
            applied: settings,
            stage: Stage::Loading(loading),
            service,
            player: Player::new(script),
            picture: Picture::new(options, outcome),
            steps: 0,
            hidden_steps: 0,
            departed: Instant::now(),
            ticked: Instant::now(),
            step_ms: 0.0,
            frame_ms: 0.0,
            longest_ms: 0.0,
            is_paused: false,
            one_step: false,
            error: None,
            draft: String::new(),
            addressed: None,
            chosen: None,
        })
    }

    /// Time by which events fade, in seconds.
    fn now(&self, context: &egui::Context) -> f64 {
        match self.picture {
            Some(_) => self.steps as f64 / PICTURE_RATE,
            None => context.input(|input| input.time),
        }
    }

    /// Whether the picture is due: from then on nothing changes.
    fn is_frozen(&self) -> bool {
        let step = self.picture.as_ref().map(|picture| picture.step);
        step.is_some_and(|step| self.steps == step || self.has_nothing_left())
    }

    /// Whether nothing is computed. What was on its way may arrive still, and what happened fades.
    fn is_at_rest(&self) -> bool {
        self.is_paused || self.has_nothing_left()
    }

    fn has_nothing_left(&self) -> bool {
        matches!(self.stage, Stage::Running(_)) && self.service.is_idle && self.player.has_ended()
    }

    // A tick's work.

    /// Lets wgpu tell what has arrived, and submits what no frame has taken; never waits.
    fn attend(&mut self, render: &RenderState) {
        if let Err(error) = render.device.poll(wgpu::PollType::Poll) {
            self.error = Some(error.to_string());
        }
        if let Stage::Running(station) | Stage::Ending(station) = &self.stage {
            station.with(|station| station.submit(&render.device, &render.queue));
        }
    }

    fn note_tick(&mut self) {
        let tick_ms = self.ticked.elapsed().as_secs_f32() * 1e3;
        self.ticked = Instant::now();
        self.frame_ms = smoothed(self.frame_ms, tick_ms);
        self.longest_ms = self.longest_ms.max(tick_ms);
    }

    fn advance(&mut self, context: &egui::Context) {
        match std::mem::replace(&mut self.stage, Stage::Failed) {
            Stage::Loading(loading) => self.stage = self.after_loading(loading),
            Stage::Running(station) => {
                self.turn(context, &station);
                // While a slider is dragged nothing has been chosen yet.
                let is_chosen = !context.input(|input| input.pointer.any_down());
                let changed = is_chosen && self.settings != self.applied;
                self.stage = if changed { Stage::Ending(station) } else { Stage::Running(station) };
            }
            Stage::Ending(station) => {
                self.receive(&station);
                self.stage = match station.take_pool() {
                    Some(pool) => {
                        let settings = self.settings;
                        let loading = Loading::replace(context, self.beside, pool, settings);
                        Stage::Replacing { station, loading, settings }
                    }
                    None => Stage::Ending(station),
                };
            }
            Stage::Replacing { station, loading, settings } => {
                self.stage = self.after_replacing(station, loading, settings);
            }
            Stage::Failed => {}
        }
        // A step that failed pauses the program, which would never come to its picture.
        let has_failed = matches!(self.stage, Stage::Failed) || (self.is_paused && self.error.is_some());
        if let (true, Some(picture)) = (has_failed, &self.picture) {
            picture.end(context, Err(self.error.clone().unwrap_or_default()));
        }
    }

    fn after_loading(&mut self, loading: Loading<Result<FramePool, String>>) -> Stage {
        match loading.poll() {
            None => Stage::Loading(loading),
            Some(Some(Ok(pool))) => Stage::Running(SharedStation::new(pool)),
            Some(Some(Err(error))) => self.fail(&error),
            Some(None) => self.fail(&"the thread that was to load the model has ended"),
        }
    }

    fn after_replacing(
        &mut self,
        station: SharedStation,
        loading: Loading<Replaced>,
        settings: Settings,
    ) -> Stage {
        let Some(replaced) = loading.poll() else {
            return Stage::Replacing { station, loading, settings };
        };
        let Some((pool, replaced)) = replaced else {
            return self.fail(&"the thread that was to make the pool has ended");
        };
        station.put_pool(pool);
        let script = *self.player.script();
        let service =
            replaced.and_then(|()| Service::new(&settings, &self.config, self.language.clone(), script));
        match service {
            Ok(service) => {
                (self.applied, self.error) = (settings, None);
                self.restart(service);
            }
            Err(error) => {
                // The old pool is still there.
                self.error = Some(error);
                self.settings = self.applied;
            }
        }
        Stage::Running(station)
    }

    fn restart(&mut self, service: Service) {
        self.service = service;
        self.player = Player::new(*self.player.script());
        (self.steps, self.hidden_steps, self.addressed) = (0, 0, None);
    }

    fn fail(&mut self, error: &dyn std::fmt::Display) -> Stage {
        self.error = Some(error.to_string());
        Stage::Failed
    }

    /// Takes the step that has come back, and plans the next one.
    fn turn(&mut self, context: &egui::Context, station: &SharedStation) {
        if self.is_frozen() || !self.receive(station) {
            return;
        }
        self.play();
        if self.is_paused && !std::mem::take(&mut self.one_step) {
            return;
        }
        let now = self.now(context);
        station.with(|station| {
            let reports = station.pool.poll_transfers();
            if let Some(plan) = self.service.plan(&reports, now) {
                station.depart(plan);
                (self.steps, self.departed) = (self.steps + 1, Instant::now());
                self.longest_ms = 0.0;
            }
        });
    }

    /// Whether the station is empty now, so that another step can be planned.
    fn receive(&mut self, station: &SharedStation) -> bool {
        let service = &mut self.service;
        let take = |plan: &_, entry, logits: &[f32]| service.choose(plan, entry, logits);
        let Some(arrival) = station.with(|station| station.arrive(take)) else { return false };
        let error = match arrival {
            Arrival::Empty => None,
            Arrival::Later => return false,
            Arrival::Step(plan, way) => {
                let took = self.departed.elapsed().as_secs_f32() * 1e3;
                self.step_ms = smoothed(self.step_ms, took);
                self.hidden_steps += u64::from(way == Way::Alone);
                let rows = plan.num_rows();
                let committed = self.service.commit(plan);
                // Nothing in a picture may depend on the machine, and a paused or hidden window draws few frames.
                let paced = match self.picture.is_some() || self.is_paused || way == Way::Alone {
                    true => Ok(()),
                    false => self.service.keep_pace(rows, self.longest_ms),
                };
                committed.and(paced).err()
            }
            Arrival::Dropped(error) => {
                // It did not run.
                self.steps = self.steps.saturating_sub(1);
                error
            }
        };
        if let Some(error) = error {
            self.error = Some(error);
            self.is_paused = true;
        }
        true
    }

    fn play(&mut self) {
        while let Some(action) = self.player.due(self.steps, self.service.is_idle) {
            if let Err(error) = self.service.act(&action) {
                // What goes wrong later may follow from what went wrong first.
                self.error.get_or_insert(error);
            }
            if self.service.is_idle {
                break;
            }
        }
    }

    /// What the user does ends the script, and replaces what was wrong before.
    fn after_user(&mut self, done: Result<(), String>) {
        self.player.end();
        self.error = done.err();
    }

    fn wish(&mut self, wish: Wish) {
        let action = match wish {
            Wish::Branch(slot) => Action::Branch(slot),
            Wish::Stop(slot) => Action::Stop(slot),
            Wish::Continue(slot) => Action::Continue(slot),
            Wish::Close(slot) => {
                self.addressed = self.addressed.filter(|&addressed| addressed != slot);
                Action::Close(slot)
            }
            Wish::Address(slot) => {
                self.addressed = Some(slot);
                return;
            }
        };
        let done = self.service.act(&action);
        self.after_user(done);
    }

    fn send(&mut self) {
        let words = std::mem::take(&mut self.draft);
        let done = match self.addressed {
            Some(slot) => self.service.say(slot, words.trim()),
            None => self.service.ask(words.trim()),
        };
        if done.is_err() {
            self.draft = words;
        }
        self.after_user(done);
    }
}

fn smoothed(before: f32, now: f32) -> f32 {
    if before == 0.0 { now } else { before + 0.1 * (now - before) }
}

impl eframe::App for App {
    fn logic(&mut self, context: &egui::Context, frame: &mut eframe::Frame) {
        if let Some(render) = frame.wgpu_render_state() {
            self.attend(render);
        }
        self.note_tick();
        self.advance(context);
        if self.picture.is_some() && self.is_frozen() {
            // It is taken of a hidden window, too.
            context.send_viewport_cmd(ViewportCommand::RequestPaintWhileHidden);
        }
        context.request_repaint_after(if self.is_at_rest() { IDLE_TICK } else { TICK });
    }

    fn ui(&mut self, ui: &mut Ui, _frame: &mut eframe::Frame) {
        self.draw(ui);
        if !self.is_at_rest() {
            ui.request_repaint();
        }
    }
}
