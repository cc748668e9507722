//! A [`Rig`] whose steps also run on a device, through [`PagedAttention`] as an application would use it.

use std::io::Write as _;

use half::f16;
use paged_kv::{
    ActivationType, AttentionOptions, BoundTensors, LayerTensors, PagedAttention, PreparedStep, RecordError,
    StepPlan, TableId, TensorSlice,
};
use wgpu::BufferUsages;

use crate::device::{TestAdapter, TestDevice, on_each_adapter};
use crate::raw::{read, read_range};
use crate::rig::{Lens, Rig, Tensors};

/// Runs `test` on every adapter that is not reached through GL, and says which test was left out there.
///
/// There a software adapter takes 5 to 30 seconds to compile an attention kernel for eight queries, and a few for the
/// compact one. Tests that need many variants leave GL to those that need few.
pub(crate) fn on_each_adapter_but_gl(mut test: impl FnMut(&TestAdapter)) {
    on_each_adapter(|adapter| {
        if adapter.info().backend == wgpu::Backend::Gl {
            announce_left_out(adapter);
        } else {
            test(adapter);
        }
    });
}

/// One line past the capture of test output, as for the adapters; `tests/run` sums them up.
pub(crate) fn announce_left_out(adapter: &TestAdapter) {
    announce_partly_left_out(adapter, "");
}

/// The same for a part of a test, as in "28 cases of ".
pub(crate) fn announce_partly_left_out(adapter: &TestAdapter, part: &str) {
    // The harness names a test's thread after the test.
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let _ = std::io::stderr().write_all(format!("left out on {}: {part}{test}\n", adapter.name()).as_bytes());
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

/// A cache on a device beside its twin.
///
/// Where the device's tensors are f16, the caller's must be numbers that f16 has.
pub(crate) struct DeviceRig<'a> {
    pub(crate) gpu: &'a TestDevice,
    pub(crate) host: Rig,
    pub(crate) attention: PagedAttention,
    activations: ActivationType,
}

impl<'a> DeviceRig<'a> {
    pub(crate) fn new(gpu: &'a TestDevice, host: Rig, options: AttentionOptions) -> Self {
        Self::with_activations(gpu, host, options, ActivationType::F32)
    }

    pub(crate) fn with_activations(
        gpu: &'a TestDevice,
        host: Rig,
        options: AttentionOptions,
        activations: ActivationType,
    ) -> Self {
        let options = options.activations(activations);
        let config = host.kv.config().clone();
        let attention = PagedAttention::with_options(&gpu.device, host.shape.clone(), config, options)
            .expect("a cache that fits the device");
        Self { gpu, host, attention, activations }
    }

    /// Makes the device's blocks those of the twin, where there is one arena.
    pub(crate) fn upload_blocks(&self) {
        assert_eq!(self.attention.arena_layout(), self.host.cpu.layout(), "one arena, as the twin has");
        let words = bytemuck::cast_slice(self.host.cpu.words());
        self.gpu.queue.write_buffer(&self.attention.arena_buffers()[0], 0, words);
    }

    /// Checks that every word of every arena is the twin's.
    pub(crate) fn assert_same_blocks(&self) {
        let (arenas, twin) = (self.attention.arena_layout(), self.host.cpu.layout());
        let twin_stride = twin.block_stride_words(0) as usize;
        let layer_words = twin.block().layer_block_words() as usize;
        for (arena, buffer) in (0..).zip(self.attention.arena_buffers()) {
            let words: Vec<u32> = read(self.gpu, buffer);
            let stride = arenas.block_stride_words(arena) as usize;
            let first_layer = (arena * arenas.layers_per_arena()) as usize;
            for (block, words) in words.chunks_exact(stride).enumerate() {
                let start = block * twin_stride + first_layer * layer_words;
                let same = *words == self.host.cpu.words()[start..start + stride];
                assert!(same, "block {block} of arena {arena} differs from the twin's");
            }
        }
    }

    /// The words of one block, where there is one arena.
    pub(crate) fn block_words(&self, block: u32) -> Vec<u32> {
        let bytes = self.attention.arena_layout().block_stride_bytes(0);
        read_range(self.gpu, &self.attention.arena_buffers()[0], u64::from(block) * bytes, bytes)
    }

    /// Records and submits a step, one set of tensors per layer, and waits for it: the output of each layer,
    /// `[rows, num_query_heads, v_head_dim]`, NaN where nothing was written. The twin stays as it is.
    pub(crate) fn run(&mut self, plan: &StepPlan, layers: &[Tensors]) -> Vec<Vec<f32>> {
        let tensors: Vec<_> =
            (0..).zip(layers).map(|(layer, tensors)| self.bind_layer(plan, tensors, layer)).collect();
        self.submit_layers(plan, &tensors, PagedAttention::record_layer);
        (0..).zip(&tensors).map(|(layer, (_, output))| self.layer_output(output, layer)).collect()
    }

    /// The rows of the first layer's output.
    pub(crate) fn output(&self, buffer: &wgpu::Buffer) -> Vec<f32> {
        self.layer_output(buffer, 0)
    }

    /// The rows of a layer's output.
    fn layer_output(&self, buffer: &wgpu::Buffer, layer: u32) -> Vec<f32> {
        let Lens { heads, v_len, .. } = self.host.lens(layer);
        let output_len = heads * v_len;
        let padded = self.elements(buffer);
        let offset = OFFSET / self.activations.bytes() as usize;
        let rows = padded[offset..].chunks(output_len + ROW_GAP);
        rows.flat_map(|row| {
            assert!(row[output_len..].iter().all(|x| x.is_nan()), "written beyond a row");
            row[..output_len].to_vec()
        })
        .collect()
    }

    /// Commits `rows` tokens whose keys and values do not matter.
    pub(crate) fn hold_blocks(&mut self, table: TableId, rows: u32) {
        let plan = self.host.plan(&[(table, rows)]);
        let mut step = self.attention.prepare(&plan).expect("a plan of this cache");
        let mut encoder = self.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        self.attention.record_transfers(&mut encoder, &mut step);
        step.skip_layers();
        self.gpu.queue.submit([encoder.finish()]);
        drop(step);
        self.gpu.device.poll(wgpu::PollType::wait_indefinitely()).expect("a step that ends");
        self.host.commit(plan);
    }

    /// Records and submits a step of one layer, and waits for nothing.
    pub(crate) fn submit_step(&mut self, plan: &StepPlan, tensors: &Tensors) {
        let bound = self.bind(plan, tensors);
        self.submit_layers(plan, &[bound], PagedAttention::record_layer);
    }

    /// Writes the keys and values of a step of one layer, without its attention, and waits for it.
    pub(crate) fn append(&mut self, plan: &StepPlan, tensors: &Tensors) {
        let bound = self.bind(plan, tensors);
        let output = bound.1.clone();
        self.submit_layers(plan, &[bound], PagedAttention::record_append);
        self.gpu.device.poll(wgpu::PollType::wait_indefinitely()).expect("a step that ends");
        assert!(self.output(&output).iter().all(|x| x.is_nan()), "something was written to the output");
    }

    fn submit_layers(
        &mut self,
        plan: &StepPlan,
        layers: &[(BoundTensors, wgpu::Buffer)],
        record: RecordLayer,
    ) {
        let mut step = self.attention.prepare(plan).expect("a plan of this cache");
        let mut encoder = self.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        self.attention.record_transfers(&mut encoder, &mut step);
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        self.attention.record_block_copies(&mut pass, &mut step);
        for (layer, (bound, _)) in (0..).zip(layers) {
            record(&mut self.attention, &mut pass, &mut step, layer, bound).expect("the right order");
        }
        drop(pass);
        self.gpu.queue.submit([encoder.finish()]);
    }

    /// Buffers for the first layer's tensors, and the output's.
    pub(crate) fn bind(&mut self, plan: &StepPlan, tensors: &Tensors) -> (BoundTensors, wgpu::Buffer) {
        self.bind_layer(plan, tensors, 0)
    }

    fn bind_layer(
        &mut self,
        plan: &StepPlan,
        tensors: &Tensors,
        number: u32,
    ) -> (BoundTensors, wgpu::Buffer) {
        let Lens { heads, kv_heads, k_len, v_len } = self.host.lens(number);
        let nothing = vec![f32::NAN; plan.num_rows() as usize * heads * v_len];
        let [query, key, value, output] = [
            (&tensors.query, heads * k_len),
            (&tensors.key, kv_heads * k_len),
            (&tensors.value, kv_heads * v_len),
            (&nothing, heads * v_len),
        ]
        .map(|(rows, row_len)| (self.tensor(rows, row_len), row_len));
        fn slice((buffer, row_len): &(wgpu::Buffer, usize), rows: u32) -> TensorSlice<'_> {
            TensorSlice { buffer, offset: OFFSET as u64, row_stride: (row_len + ROW_GAP) as u32, rows }
        }
        let layer = LayerTensors {
            query: slice(&query, plan.num_rows()),
            key: slice(&key, plan.num_rows()),
            value: slice(&value, plan.num_rows()),
            output: slice(&output, plan.num_rows()),
        };
        let bound = self.attention.bind_layer_tensors(number, &layer);
        (bound.expect("tensors of the right size"), output.0)
    }

    /// A buffer with rows at a distance, NaN between them.
    fn tensor(&self, rows: &[f32], row_len: usize) -> wgpu::Buffer {
        let mut content = vec![f32::NAN; OFFSET / self.activations.bytes() as usize];
        for row in rows.chunks(row_len) {
            content.extend_from_slice(row);
            content.extend([f32::NAN; ROW_GAP]);
        }
        let content = match self.activations {
            ActivationType::F16 => bytemuck::cast_slice(&halves(&content)).to_vec(),
            _ => bytemuck::cast_slice(&content).to_vec(),
        };
        let buffer = self.gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: content.len() as u64,
            usage: BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        self.gpu.queue.write_buffer(&buffer, 0, &content);
        buffer
    }

    /// The elements of a tensor's buffer.
    fn elements(&self, buffer: &wgpu::Buffer) -> Vec<f32> {
        match self.activations {
            ActivationType::F16 => {
                let halves: Vec<f16> = read(self.gpu, buffer);
                halves.into_iter().map(f16::to_f32).collect()
            }
            _ => read(self.gpu, buffer),
        }
    }
}

/// How a layer is recorded.
type RecordLayer = fn(
    &mut PagedAttention,
    &mut wgpu::ComputePass<'_>,
    &mut PreparedStep,
    u32,
    &BoundTensors,
) -> Result<(), RecordError>;

/// Numbers as f16, each of which f16 must have.
fn halves(elements: &[f32]) -> Vec<f16> {
    let half = |&x: &f32| {
        let half = f16::from_f32(x);
        assert!(x.is_nan() || half.to_f32() == x, "{x} is no f16");
        half
    };
    elements.iter().map(half).collect()
}
