//! A [`Rig`] whose steps also run on a device, through [`PagedAttention`] as an application would use it.

use paged_kv::{AttentionOptions, LayerTensors, PagedAttention, StepPlan, TensorSlice};
use wgpu::BufferUsages;

use crate::device::{TestAdapter, TestDevice, on_each_adapter};
use crate::raw::read;
use crate::rig::{Rig, Tensors};

/// Runs `test` on every adapter that is not reached through GL.
///
/// The GLSL compilers of software adapters take 5 to 30 seconds for an attention kernel. Tests that need many variants of
/// it leave GL to those that need few.
pub(crate) fn on_each_adapter_but_gl(mut test: impl FnMut(&TestAdapter)) {
    on_each_adapter(|adapter| {
        if adapter.info().backend != wgpu::Backend::Gl {
            test(adapter);
        }
    });
}

/// A device with the default limits and, where the adapter has them, subgroup operations.
pub(crate) fn open(adapter: &TestAdapter) -> TestDevice {
    let features = adapter.features() & wgpu::Features::SUBGROUP;
    adapter.request_device(wgpu::Limits::default(), features).expect("the default limits")
}

/// Elements between a row of a tensor and the next, beyond the row itself.
const ROW_GAP: usize = 4;
/// Where tensors start in their buffers: the largest alignment that a device may ask for.
const OFFSET: usize = 256;

/// What [`DeviceRig::run`] leaves behind.
pub(crate) struct StepResult {
    /// `[rows, num_query_heads, v_head_dim]`; NaN where nothing was written.
    pub(crate) output: Vec<f32>,
    /// The words of the arena.
    pub(crate) arena: Vec<u32>,
}

/// A cache on a device beside its twin.
pub(crate) struct DeviceRig<'a> {
    pub(crate) gpu: &'a TestDevice,
    pub(crate) host: Rig,
    pub(crate) attention: PagedAttention,
}

impl<'a> DeviceRig<'a> {
    pub(crate) fn new(gpu: &'a TestDevice, host: Rig, options: AttentionOptions) -> Self {
        let config = *host.kv.config();
        let attention = PagedAttention::with_options(&gpu.device, &gpu.queue, host.shape, config, options)
            .expect("a cache that fits the device");
        assert_eq!(attention.arena_layout(), host.cpu.layout(), "one arena, as the twin has");
        Self { gpu, host, attention }
    }

    /// Makes the device's blocks those of the twin.
    pub(crate) fn upload_blocks(&self) {
        let words = bytemuck::cast_slice(self.host.cpu.words());
        self.gpu.queue.write_buffer(&self.attention.arena_buffers()[0], 0, words);
    }

    /// Records and submits a step of one layer, and waits for it. The twin stays as it is.
    pub(crate) fn run(&mut self, plan: &StepPlan, tensors: &Tensors) -> StepResult {
        let rows = plan.num_rows() as usize;
        let (heads, kv_heads) =
            (self.host.shape.num_query_heads as usize, self.host.shape.num_kv_heads as usize);
        let query_len = heads * self.host.k_len;
        let (key_len, value_len) = (kv_heads * self.host.k_len, kv_heads * self.host.v_len);
        let output_len = heads * self.host.v_len;
        let nothing = vec![f32::NAN; rows * output_len];
        let buffers = [
            self.tensor(&tensors.query, query_len),
            self.tensor(&tensors.key, key_len),
            self.tensor(&tensors.value, value_len),
            self.tensor(&nothing, output_len),
        ];
        let slice = |index: usize, row_len: usize| TensorSlice {
            buffer: &buffers[index],
            offset: OFFSET as u64,
            row_stride: (row_len + ROW_GAP) as u32,
            rows: rows as u32,
        };
        let bound = self
            .attention
            .bind_tensors(&LayerTensors {
                query: slice(0, query_len),
                key: slice(1, key_len),
                value: slice(2, value_len),
                output: slice(3, output_len),
            })
            .expect("tensors of the right size");
        let mut step = self.attention.prepare(plan).expect("a plan of this cache");
        let mut encoder = self.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        self.attention.record_transfers(&mut encoder, &mut step);
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        self.attention.record_block_copies(&mut pass, &mut step);
        self.attention.record_layer(&mut pass, &mut step, 0, &bound).expect("the right order");
        drop(pass);
        self.gpu.queue.submit([encoder.finish()]);
        let padded: Vec<f32> = read(self.gpu, &buffers[3]);
        let output = padded[OFFSET / 4..]
            .chunks(output_len + ROW_GAP)
            .flat_map(|row| {
                assert!(row[output_len..].iter().all(|x| x.is_nan()), "written beyond a row");
                &row[..output_len]
            })
            .copied()
            .collect();
        StepResult { output, arena: read(self.gpu, &self.attention.arena_buffers()[0]) }
    }

    /// A buffer with rows at a distance, NaN between them.
    fn tensor(&self, rows: &[f32], row_len: usize) -> wgpu::Buffer {
        let mut content = vec![f32::NAN; OFFSET / 4];
        for row in rows.chunks(row_len) {
            content.extend_from_slice(row);
            content.extend([f32::NAN; ROW_GAP]);
        }
        let buffer = self.gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 4 * content.len() as u64,
            usage: BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        self.gpu.queue.write_buffer(&buffer, 0, bytemuck::cast_slice(&content));
        buffer
    }
}
