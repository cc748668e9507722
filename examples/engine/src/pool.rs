//! A pool on the model's device: it computes plans, whoever made them.

use std::time::Duration;

use paged_kv::{CacheConfig, Schedule, Scheduler, StepPlan, TransferReport};

use crate::{
    attention::{CpuAttention, GpuAttention},
    cpu::CpuModel,
    error::RunError,
    gguf::GgufFile,
    gpu::{Gpu, GpuModel},
};

/// The keys and values of one cache, and the model that computes them.
pub struct Pool<'a>(Device<'a>);

enum Device<'a> {
    Gpu(&'a mut GpuModel, Box<GpuAttention>),
    Cpu(&'a CpuModel, Box<CpuAttention>),
}

impl<'a> Pool<'a> {
    pub(crate) fn on_gpu(
        model: &'a mut GpuModel,
        cache: CacheConfig,
        rows: u32,
        logit_rows: u32,
    ) -> Result<Self, RunError> {
        let attention = GpuAttention::new(model, cache, rows, logit_rows)?;
        Ok(Self(Device::Gpu(model, Box::new(attention))))
    }

    pub(crate) fn on_cpu(model: &'a CpuModel, cache: CacheConfig) -> Result<Self, RunError> {
        Ok(Self(Device::Cpu(model, Box::new(CpuAttention::new(model, cache)?))))
    }

    /// The next step of a scheduler whose plans this pool computes; none when nothing is left to compute.
    ///
    /// [`Schedule::Waiting`] is no end: requests wait, and nothing can be computed before blocks have arrived in the host
    /// pool. So this waits for them, tells the scheduler, and asks again.
    ///
    /// # Errors
    /// A device's failure; [`RunError::Stuck`] if requests wait for what nothing on its way will bring.
    pub fn next_step(&mut self, scheduler: &mut Scheduler) -> Result<Option<StepPlan>, RunError> {
        let mut reports = self.poll_transfers();
        loop {
            scheduler.complete_transfers(&reports);
            match scheduler.schedule() {
                Schedule::Step(plan) => return Ok(Some(plan)),
                Schedule::Idle => return Ok(None),
                Schedule::Waiting(reason) => {
                    reports = self.wait_for_transfers()?;
                    if reports.is_empty() {
                        return Err(RunError::Stuck { reason });
                    }
                }
            }
        }
    }

    /// Computes a plan and waits for it. `take(i, logits)` gets the logits of `plan.logit_rows()[i]`, `[vocab_len]`.
    ///
    /// # Errors
    /// A device's failure.
    ///
    /// # Panics
    /// If the plan has more rows than the pool was made for, or is of a cache with another layout.
    pub fn step(&mut self, plan: &StepPlan, take: impl FnMut(usize, &[f32])) -> Result<(), RunError> {
        match &mut self.0 {
            Device::Gpu(model, attention) => attention.step(model, plan, take),
            Device::Cpu(model, attention) => attention.step(model, plan, take),
        }
    }

    /// Loads the model anew, onto `gpu`, and goes on there with what the host pool has.
    pub(crate) fn rebuild(&mut self, file: &mut GgufFile, gpu: Gpu) -> Result<(), RunError> {
        match &mut self.0 {
            Device::Gpu(model, attention) => {
                let config = model.config().clone();
                **model = GpuModel::load(gpu, file, config, &mut |_| ())?;
                attention.rebuild(model)
            }
            // It has no device to lose.
            Device::Cpu(..) => Ok(()),
        }
    }

    pub(crate) fn poll_transfers(&mut self) -> Vec<TransferReport> {
        match &mut self.0 {
            Device::Gpu(_, attention) => attention.poll_transfers(),
            Device::Cpu(_, attention) => attention.poll_transfers(),
        }
    }

    fn wait_for_transfers(&mut self) -> Result<Vec<TransferReport>, RunError> {
        match &mut self.0 {
            Device::Gpu(model, attention) => attention.wait_for_transfers(model),
            Device::Cpu(_, attention) => Ok(attention.poll_transfers()),
        }
    }

    pub(crate) fn attention_time(&self) -> Option<Duration> {
        match &self.0 {
            Device::Gpu(_, attention) => attention.elapsed(),
            Device::Cpu(_, attention) => Some(attention.elapsed()),
        }
    }

    pub(crate) fn measure_swap(&mut self) -> Result<f64, RunError> {
        match &mut self.0 {
            Device::Gpu(model, attention) => attention.measure_swap(model),
            Device::Cpu(_, attention) => Ok(attention.measure_swap()),
        }
    }
}

impl std::fmt::Debug for Pool<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let device = match self.0 {
            Device::Gpu(..) => "gpu",
            Device::Cpu(..) => "cpu",
        };
        out.debug_tuple("Pool").field(&device).finish()
    }
}
