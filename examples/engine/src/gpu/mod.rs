//! The model's forward pass on a GPU, but for attention.
//!
//! [`GpuModel`] holds the weights and the activations of one step, and records a step into the caller's compute
//! pass: [`record_layers`](GpuModel::record_layers) leaves a gap in every layer, between the rotated queries, keys
//! and values and the matrix behind attention, which the caller fills with the cache's own kernels. Nothing here
//! knows a cache.
//!
//! ```text
//! embed ─┬ rms_norm ─ matmul ─ rope ─ (attention) ─ matmul ─┬ rms_norm ─ matmul, silu ─ matmul ─┬ … next layer
//!        └───────────────────── residual ──────────── add ──┴──────────────────────── add ──────┘
//! … ─ rms_norm ─ matmul ─ logits
//! ```
//!
//! Eight dispatches a layer without attention, all in one pass. Everything is f32. Buffers, bind groups and
//! parameters are made when the model is loaded or when [`reserve`](GpuModel::reserve) asks for more rows, never by
//! a step.

mod activations;
mod adapter;
mod buffers;
mod kernels;
mod matmul;
#[cfg(test)]
mod tests;
mod timer;
mod transfer;
mod weights;

use std::fmt;

pub use adapter::{Adapters, Gpu, choose};
pub use buffers::GpuError;
pub(crate) use timer::SpanTimer;
pub(crate) use transfer::measure_transfer;

use crate::{config::Config, gguf::GgufFile};
use activations::{Activations, logit_stride, rotated_pairs};
use buffers::lost;
use kernels::{Kernels, workgroups_of_64};
use matmul::Tile;
use weights::{Matrix, Uploader, Weights};

/// A model on a device.
pub struct GpuModel {
    gpu: Gpu,
    config: Config,
    kernels: Kernels,
    weights: Weights,
    activations: Activations,
}

impl GpuModel {
    /// Loads `file` onto `gpu`. `progress` is called with the bytes loaded so far, of
    /// [`GgufFile::tensor_bytes`](crate::gguf::GgufFile::tensor_bytes).
    ///
    /// # Errors
    /// [`GpuError::Load`] for a file that is no such model, otherwise what the device lacks.
    pub fn load(
        gpu: Gpu,
        file: &mut GgufFile,
        config: Config,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, GpuError> {
        let (device, queue) = (&gpu.device, &gpu.queue);
        let mut uploader = Uploader { device, queue, file, progress, loaded_bytes: 0 };
        let weights = uploader.weights(&config)?;
        let kernels = Kernels::new(&gpu.device);
        let activations = Activations::new(&gpu.device, &config, &kernels, &weights, 1, 1)?;
        Ok(Self { gpu, config, kernels, weights, activations })
    }

    /// The device that holds the model.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Makes room for steps of up to `rows` rows of which `logit_rows` need logits. Returns whether buffers were
    /// replaced, and with them what [`query_key_value`](Self::query_key_value) and [`attended`](Self::attended)
    /// return.
    ///
    /// # Errors
    /// [`GpuError::TooLarge`] and [`GpuError::OutOfMemory`].
    pub fn reserve(&mut self, rows: u32, logit_rows: u32) -> Result<bool, GpuError> {
        if rows <= self.activations.rows && logit_rows <= self.activations.logit_rows {
            return Ok(false);
        }
        let rows = rows.max(self.activations.rows);
        let logit_rows = logit_rows.max(self.activations.logit_rows);
        self.activations =
            Activations::new(&self.gpu.device, &self.config, &self.kernels, &self.weights, rows, logit_rows)?;
        Ok(true)
    }

    /// Queries, keys and values of a step's rows, `[rows][query_key_value_len]` f32: a row's queries, then at
    /// [`key_start`](Config::key_start) its keys, then at [`value_start`](Config::value_start) its values.
    pub fn query_key_value(&self) -> &wgpu::Buffer {
        &self.activations.query_key_value
    }

    /// Where attention writes, `[rows][query_len]` f32.
    pub fn attended(&self) -> &wgpu::Buffer {
        &self.activations.attended
    }

    /// Uploads a step's inputs: for each row its token and position, and the rows that need logits.
    ///
    /// # Panics
    /// If there are more than [`reserve`](Self::reserve) made room for.
    pub fn write_inputs(&mut self, token_ids: &[u32], positions: &[u32], logit_rows: &[u32]) {
        let activations = &mut self.activations;
        assert!(token_ids.len() == positions.len(), "every row has a token and a position");
        assert!(token_ids.len() <= activations.rows as usize, "the step has more rows than were reserved");
        assert!(
            logit_rows.len() <= activations.logit_rows as usize,
            "more rows need logits than were reserved"
        );
        activations.inputs.write(&self.gpu.queue, [token_ids, positions, logit_rows]);
    }

    /// Records the layers for the step's first `num_rows` rows. `attend` records layer `layer`'s attention: it
    /// reads [`query_key_value`](Self::query_key_value) and writes [`attended`](Self::attended). It may change the
    /// pass's bound state.
    ///
    /// # Errors
    /// What `attend` returns.
    pub fn record_layers<E>(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        num_rows: u32,
        mut attend: impl FnMut(&mut wgpu::ComputePass<'_>, u32) -> Result<(), E>,
    ) -> Result<(), E> {
        let bindings = &self.activations;
        pass.set_pipeline(&self.kernels.embed.pipeline);
        for part in &bindings.embed {
            pass.set_bind_group(0, part, &[]);
            pass.dispatch_workgroups(workgroups_of_64(self.config.embedding_len), num_rows, 1);
        }
        for ((weights, bindings), layer) in self.weights.layers.iter().zip(&bindings.layers).zip(0..) {
            self.record_norm(pass, &bindings.attention_norm, num_rows);
            self.record_matmul(pass, &weights.query_key_value, &bindings.query_key_value, num_rows);
            self.record_rope(pass, num_rows);
            attend(pass, layer)?;
            self.record_matmul(pass, &weights.attention_output, &bindings.attention_output, num_rows);
            self.record_norm(pass, &bindings.feed_forward_norm, num_rows);
            self.record_matmul(pass, &weights.gate_up, &bindings.gate_up, num_rows);
            self.record_matmul(pass, &weights.down, &bindings.down, num_rows);
        }
        Ok(())
    }

    /// Records the logits of the first `num_logit_rows` rows that [`write_inputs`](Self::write_inputs) named.
    pub fn record_logits(&self, pass: &mut wgpu::ComputePass<'_>, num_logit_rows: u32) {
        if num_logit_rows > 0 {
            let output = self.weights.output.as_ref().unwrap_or(&self.weights.embedding);
            self.record_norm(pass, &self.activations.output_norm, num_logit_rows);
            self.record_matmul(pass, output, &self.activations.output, num_logit_rows);
        }
    }

    /// Records the copy of `num_logit_rows` rows of logits to where [`read_logits`](Self::read_logits) finds them.
    pub fn record_readback(&self, encoder: &mut wgpu::CommandEncoder, num_logit_rows: u32) {
        let bytes = self.logit_bytes(num_logit_rows);
        if bytes > 0 {
            encoder.copy_buffer_to_buffer(&self.activations.logits, 0, &self.activations.readback, 0, bytes);
        }
    }

    /// Waits for the last submission and hands each row of its logits, if it has any, to `row` by index.
    ///
    /// # Errors
    /// [`GpuError::Lost`] if the device did not finish.
    pub fn read_logits(&self, num_logit_rows: u32, row: impl FnMut(u32, &[f32])) -> Result<(), GpuError> {
        if num_logit_rows == 0 {
            return self.gpu.wait();
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        self.activations.readback.map_async(
            wgpu::MapMode::Read,
            ..self.logit_bytes(num_logit_rows),
            move |result| {
                // The receiver is gone only if this function returned early with an error.
                let _ = sender.send(result);
            },
        );
        self.gpu.wait()?;
        match receiver.try_recv() {
            Ok(result) => result.map_err(lost)?,
            Err(error) => return Err(lost(error)),
        }
        self.take_logits(num_logit_rows, row)
    }

    /// Records that the logits are mapped once the commands have run, for [`take_logits`](Self::take_logits). `arrive` is
    /// called when they are, while the application polls its device; or dropped, if they never will be.
    pub(crate) fn record_mapping(
        &self,
        encoder: &wgpu::CommandEncoder,
        num_logit_rows: u32,
        arrive: impl FnOnce(Result<(), wgpu::BufferAsyncError>) + Send + 'static,
    ) {
        let bytes = self.logit_bytes(num_logit_rows.max(1));
        encoder.map_buffer_on_submit(&self.activations.readback, wgpu::MapMode::Read, ..bytes, arrive);
    }

    /// Hands each row of the logits that have been mapped to `row` by index, and gives the buffer back.
    ///
    /// # Errors
    /// [`GpuError::Lost`].
    pub(crate) fn take_logits(
        &self,
        num_logit_rows: u32,
        mut row: impl FnMut(u32, &[f32]),
    ) -> Result<(), GpuError> {
        let readback = &self.activations.readback;
        if num_logit_rows > 0 {
            let view = readback.get_mapped_range(..self.logit_bytes(num_logit_rows)).map_err(lost)?;
            let logits: &[f32] = bytemuck::cast_slice(&view);
            let stride = logit_stride(&self.config) as usize;
            for (index, logits) in logits.chunks_exact(stride).enumerate() {
                row(index as u32, &logits[..self.config.vocab_len as usize]);
            }
        }
        readback.unmap();
        Ok(())
    }

    /// Bytes of rows of logits as they are read back.
    fn logit_bytes(&self, num_logit_rows: u32) -> u64 {
        u64::from(num_logit_rows) * u64::from(logit_stride(&self.config)) * 4
    }

    fn record_norm(&self, pass: &mut wgpu::ComputePass<'_>, bindings: &wgpu::BindGroup, num_rows: u32) {
        pass.set_pipeline(&self.kernels.rms_norm.pipeline);
        pass.set_bind_group(0, bindings, &[]);
        pass.dispatch_workgroups(num_rows, 1, 1);
    }

    fn record_rope(&self, pass: &mut wgpu::ComputePass<'_>, num_rows: u32) {
        pass.set_pipeline(&self.kernels.rope.pipeline);
        pass.set_bind_group(0, &self.activations.rope, &[]);
        pass.dispatch_workgroups(workgroups_of_64(rotated_pairs(&self.config)), num_rows, 1);
    }

    fn record_matmul(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        matrix: &Matrix,
        bindings: &[wgpu::BindGroup],
        num_rows: u32,
    ) {
        let tile = Tile::for_rows(num_rows, self.gpu.max_tile_rows, matrix.store);
        pass.set_pipeline(self.kernels.matmul(&self.gpu.device, tile));
        for (part, bindings) in matrix.parts.iter().zip(bindings) {
            pass.set_bind_group(0, bindings, &[]);
            pass.dispatch_workgroups(Tile::workgroups_x(part.num_groups), num_rows.div_ceil(tile.rows), 1);
        }
    }
}

impl fmt::Debug for GpuModel {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("GpuModel")
            .field("gpu", &self.gpu)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
