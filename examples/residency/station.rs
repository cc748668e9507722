//! Where a step waits to be recorded, and egui's own encoder picks it up.
//!
//! egui makes one encoder for a frame and submits it once. [`Recorder`] is a paint callback that draws nothing: before the
//! frame is drawn it is handed that encoder, and records the planned step into it. So drawing and decoding share one
//! encoder and one submission. While the window is hidden no frame is drawn: [`Station::submit`] then gives the step an
//! encoder and a submission of its own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use eframe::{
    egui,
    egui_wgpu::{self, CallbackResources, CallbackTrait, ScreenDescriptor},
};
use example_engine::frames::{FramePool, Progress};
use paged_kv::StepPlan;

use crate::service::in_words;

/// The pool, and the one step that is planned, recorded, or on its way.
pub(crate) struct Station {
    pub(crate) pool: FramePool,
    step: Option<Step>,
}

struct Step {
    plan: StepPlan,
    state: StepState,
}

enum StepState {
    Waits,
    Departed(Way),
    Refused(String),
}

/// How a step went to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Among the commands of a frame.
    InFrame,
    /// By itself.
    Alone,
}

/// What has become of the step at the station.
#[expect(clippy::large_enum_variant, reason = "one value per frame, taken apart at once")]
pub(crate) enum Arrival {
    /// There is none.
    Empty,
    /// It is to come.
    Later,
    /// It is done; its logits were handed over.
    Step(StepPlan, Way),
    /// It will not run; its plan was dropped. With the reason, if it is an error.
    Dropped(Option<String>),
}

/// The station, for the window and for its paint callback.
#[derive(Clone)]
pub(crate) struct SharedStation(Arc<Mutex<Option<Station>>>);

impl SharedStation {
    pub(crate) fn new(pool: FramePool) -> Self {
        Self(Arc::new(Mutex::new(Some(Station { pool, step: None }))))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Station>> {
        // A panic has ended the program.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` on the station; none while its pool is being replaced.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Station) -> T) -> Option<T> {
        self.lock().as_mut().map(work)
    }

    /// Takes the pool away, if no step is at the station.
    pub(crate) fn take_pool(&self) -> Option<FramePool> {
        let mut station = self.lock();
        if station.as_ref().is_some_and(|station| station.step.is_none()) {
            station.take().map(|station| station.pool)
        } else {
            None
        }
    }

    pub(crate) fn put_pool(&self, pool: FramePool) {
        *self.lock() = Some(Station { pool, step: None });
    }

    /// Records the step into a frame's encoder, if it waits.
    pub(crate) fn record(&self, encoder: &mut wgpu::CommandEncoder) {
        self.with(|station| station.record(encoder, Way::InFrame));
    }

    /// What egui calls before it draws a frame in which `rect` is to be seen.
    pub(crate) fn recorder(&self, rect: egui::Rect) -> egui::Shape {
        egui_wgpu::Callback::new_paint_callback(rect, Recorder(self.clone())).into()
    }
}

impl Station {
    pub(crate) fn depart(&mut self, plan: StepPlan) {
        self.step = Some(Step { plan, state: StepState::Waits });
    }

    /// Submits the step by itself if it still waits: no frame has taken it.
    pub(crate) fn submit(&mut self, device: &wgpu::Device, queue: &wgpu::Queue) {
        if self.step.as_ref().is_some_and(|step| matches!(step.state, StepState::Waits)) {
            let mut encoder = device.create_command_encoder(&Default::default());
            self.record(&mut encoder, Way::Alone);
            queue.submit([encoder.finish()]);
        }
    }

    /// Records the step if it waits.
    fn record(&mut self, encoder: &mut wgpu::CommandEncoder, way: Way) {
        let Some(step @ Step { state: StepState::Waits, .. }) = &mut self.step else { return };
        step.state = match self.pool.record(&step.plan, encoder) {
            Ok(()) => StepState::Departed(way),
            Err(error) => StepState::Refused(in_words(error)),
        };
    }

    /// Looks for the step; `take(plan, i, logits)` gets the logits of `plan.logit_rows()[i]`.
    pub(crate) fn arrive(&mut self, mut take: impl FnMut(&StepPlan, usize, &[f32])) -> Arrival {
        let Some(Step { plan, state }) = self.step.take() else { return Arrival::Empty };
        let way = match state {
            StepState::Departed(way) => way,
            StepState::Refused(error) => return Arrival::Dropped(Some(error)),
            StepState::Waits => {
                self.depart(plan);
                return Arrival::Later;
            }
        };
        match self.pool.take(&plan, |entry, logits| take(&plan, entry, logits)) {
            Ok(Progress::OnItsWay) => {
                self.step = Some(Step { plan, state: StepState::Departed(way) });
                Arrival::Later
            }
            Ok(Progress::Done) => Arrival::Step(plan, way),
            Ok(Progress::NeverSubmitted | Progress::None) => Arrival::Dropped(None),
            Err(error) => Arrival::Dropped(Some(in_words(error))),
        }
    }
}

struct Recorder(SharedStation);

impl CallbackTrait for Recorder {
    fn prepare(
        &self,
        _device: &wgpu::Device,
        _queue: &wgpu::Queue,
        _screen: &ScreenDescriptor,
        encoder: &mut wgpu::CommandEncoder,
        _resources: &mut CallbackResources,
    ) -> Vec<wgpu::CommandBuffer> {
        self.0.record(encoder);
        Vec::new()
    }

    fn paint(
        &self,
        _info: egui::PaintCallbackInfo,
        _pass: &mut wgpu::RenderPass<'static>,
        _resources: &CallbackResources,
    ) {
    }
}
