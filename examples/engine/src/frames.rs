//! Steps for a program that draws frames: recorded into the frame's own encoder, taken in a later frame.
//!
//! In every frame the program polls its device without waiting and asks [`take`](FramePool::take) for the step that is on
//! its way. When there is none it may [`record`](FramePool::record) the next one among its own commands. It submits once,
//! for drawing and decoding; nothing here submits, waits or polls.

use std::sync::{
    Arc,
    atomic::{AtomicU8, Ordering, fence},
};

use paged_kv::{CacheConfig, StepPlan, TransferReport};

use crate::{
    attention::GpuAttention,
    config::Config,
    error::RunError,
    gpu::{GpuError, GpuModel},
};

/// A model on the program's device, and one pool.
pub struct FramePool {
    model: GpuModel,
    attention: GpuAttention,
    on_its_way: Option<OnItsWay>,
}

struct OnItsWay {
    num_logit_rows: u32,
    /// One of the constants below; held by the callback, too, until it is called or will never be.
    arrival: Arc<AtomicU8>,
}

const UNKNOWN: u8 = 0;
const ARRIVED: u8 = 1;
const FAILED: u8 = 2;

/// What has become of the step that was recorded last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// There is none: it was taken, or none was recorded.
    None,
    /// It has not come back yet.
    OnItsWay,
    /// It is done, and its logits were handed over: commit its plan.
    Done,
    /// Its encoder was dropped, as for a frame that could not be shown: drop its plan.
    NeverSubmitted,
}

impl FramePool {
    /// An empty pool for plans of up to `rows` rows, `logit_rows` of which need logits. Compiles kernels, which takes
    /// some time: a program that must not stand still does it on another thread.
    ///
    /// # Errors
    /// What the device lacks.
    pub fn new(
        mut model: GpuModel,
        cache: CacheConfig,
        rows: u32,
        logit_rows: u32,
    ) -> Result<Self, RunError> {
        let attention = GpuAttention::new(&mut model, cache, rows, logit_rows)?.without_timer();
        Ok(Self { model, attention, on_its_way: None })
    }

    /// Another pool in place of this one, whose content is lost. On an error the old one stays.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// # Panics
    /// While a step is on its way.
    pub fn replace(&mut self, cache: CacheConfig, rows: u32, logit_rows: u32) -> Result<(), RunError> {
        assert!(self.on_its_way.is_none(), "a step is on its way");
        self.attention = GpuAttention::new(&mut self.model, cache, rows, logit_rows)?.without_timer();
        Ok(())
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        self.model.config()
    }

    /// Records a step into `encoder`, outside of any pass. Its inputs are uploaded with the next submission.
    ///
    /// # Errors
    /// What [`PagedAttention::prepare`](paged_kv::PagedAttention::prepare) and
    /// [`record_layer`](paged_kv::PagedAttention::record_layer) return; no step is on its way then.
    ///
    /// # Panics
    /// While another step is on its way, and if the plan has more rows than the pool was made for.
    pub fn record(&mut self, plan: &StepPlan, encoder: &mut wgpu::CommandEncoder) -> Result<(), RunError> {
        assert!(self.on_its_way.is_none(), "a step is on its way");
        let num_logit_rows = self.attention.record(&mut self.model, plan, encoder)?;
        if num_logit_rows == 0 {
            // Something must be read back, or its arrival would say nothing of the step.
            self.model.record_readback(encoder, 1);
        }
        let arrival = Arc::new(AtomicU8::new(UNKNOWN));
        let arrived = Arc::clone(&arrival);
        self.model.record_mapping(encoder, num_logit_rows, move |mapped| {
            arrived.store(if mapped.is_ok() { ARRIVED } else { FAILED }, Ordering::Release);
        });
        self.on_its_way = Some(OnItsWay { num_logit_rows, arrival });
        Ok(())
    }

    /// Looks for the step of `plan`; if it is done, hands the logits of `plan.logit_rows()[i]` to `take(i, logits)`.
    ///
    /// # Errors
    /// [`GpuError::Lost`] if the device failed.
    pub fn take(&mut self, plan: &StepPlan, take: impl FnMut(usize, &[f32])) -> Result<Progress, RunError> {
        let Some(OnItsWay { num_logit_rows, arrival }) = &self.on_its_way else { return Ok(Progress::None) };
        let num_logit_rows = *num_logit_rows;
        // Counted before the value is read: a callback that is gone by then has stored what it had to say. The count is a
        // relaxed load, behind which the fence keeps the other one.
        let is_known = Arc::strong_count(arrival) == 1;
        fence(Ordering::Acquire);
        match arrival.load(Ordering::Acquire) {
            UNKNOWN if !is_known => return Ok(Progress::OnItsWay),
            UNKNOWN => {
                self.on_its_way = None;
                return Ok(Progress::NeverSubmitted);
            }
            arrived => {
                self.on_its_way = None;
                if arrived == FAILED {
                    return Err(GpuError::Lost { reason: "its logits cannot be read".to_owned() }.into());
                }
            }
        }
        self.model.take_logits(num_logit_rows, self.attention.by_entry(plan, take))?;
        Ok(Progress::Done)
    }

    /// What has become of the swaps of earlier steps, for
    /// [`Scheduler::complete_transfers`](paged_kv::Scheduler::complete_transfers).
    pub fn poll_transfers(&mut self) -> Vec<TransferReport> {
        self.attention.poll_transfers()
    }
}

impl std::fmt::Debug for FramePool {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("FramePool").field("model", &self.model).finish_non_exhaustive()
    }
}
