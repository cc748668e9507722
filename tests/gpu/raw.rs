//! The kernels' texts on buffers of the test's own: for what no plan can say, and to replace parts of a text.
//!
//! A [`RawStep`] holds the arrays that `prepare` would upload; [`Raw::dispatch`] runs one kernel over it. Bindings and
//! parameters are those of `shaders/common/params.wgsl` and of the kernels' files. Caches of equal types and head sizes
//! share the pipelines of one [`RawKernels`]: some adapters take seconds to compile one.

use std::cell::RefCell;
use std::collections::HashMap;

use bytemuck::{Pod, cast_slice};
use paged_kv::shaders::{
    HeadParams, Kernel, LayerParams, MAX_QUERIES, PREFILL_QUERIES, StepParams, TensorParams, VariantKey,
};
use paged_kv::{
    ActivationType, BlockCopy, BlockLayout, DecodeItem, MergeItem, PrefillItem, StepPlan, WorkSplit,
};
use wgpu::util::DeviceExt as _;
use wgpu::{BufferUsages, ShaderStages};

use crate::device::TestDevice;
use crate::rig::Rig;

/// The arrays of a step, and items in any order and of any content.
#[derive(Clone, Debug, Default)]
pub(crate) struct RawStep {
    pub(crate) slot_mapping: Vec<u32>,
    pub(crate) query_starts: Vec<u32>,
    pub(crate) context_lens: Vec<u32>,
    pub(crate) table_rows: Vec<u32>,
    pub(crate) decode_items: Vec<DecodeItem>,
    pub(crate) prefill_items: Vec<PrefillItem>,
    pub(crate) merge_items: Vec<MergeItem>,
    pub(crate) block_copies: Vec<BlockCopy>,
}

impl RawStep {
    /// The arrays of a plan, and its work.
    pub(crate) fn of(plan: &StepPlan, work: &WorkSplit) -> Self {
        Self {
            slot_mapping: plan.slot_mapping().to_vec(),
            query_starts: plan.query_starts().to_vec(),
            context_lens: plan.context_lens().to_vec(),
            table_rows: plan.table_rows().to_vec(),
            decode_items: work.decode_items.clone(),
            prefill_items: work.prefill_items.clone(),
            merge_items: work.merge_items.clone(),
            block_copies: plan.block_copies().to_vec(),
        }
    }

    fn pack(&self) -> (StepParams, Vec<u32>) {
        let mut words = Vec::new();
        let mut place = |array: &mut dyn Iterator<Item = u32>| {
            let start = words.len() as u32;
            words.extend(array);
            start
        };
        let decode = self.decode_items.iter();
        let prefill = self.prefill_items.iter();
        let merge = self.merge_items.iter();
        let copies = self.block_copies.iter();
        let params = StepParams {
            num_rows: self.slot_mapping.len() as u32,
            slot_mapping: place(&mut self.slot_mapping.iter().copied()),
            query_starts: place(&mut self.query_starts.iter().copied()),
            context_lens: place(&mut self.context_lens.iter().copied()),
            table_rows: place(&mut self.table_rows.iter().copied()),
            num_decode_items: self.decode_items.len() as u32,
            decode_items: place(
                &mut decode.flat_map(|i| [i.sequence, i.first_token, i.end_token, i.partial]),
            ),
            num_prefill_items: self.prefill_items.len() as u32,
            prefill_items: place(&mut prefill.flat_map(PrefillItem::words)),
            num_merge_items: self.merge_items.len() as u32,
            merge_items: place(&mut merge.flat_map(|i| [i.row, i.first_partial, i.num_partials, i.padding])),
            num_block_copies: self.block_copies.len() as u32,
            block_copies: place(&mut copies.flat_map(|c| [c.source, c.destination])),
            ..StepParams::default()
        };
        (params, words)
    }
}

/// The storage buffers that the kernels bind; a kernel leaves alone those that it does not name.
pub(crate) struct RawBuffers {
    pub(crate) arena: wgpu::Buffer,
    pub(crate) block_tables: wgpu::Buffer,
    pub(crate) partials: wgpu::Buffer,
    pub(crate) query: wgpu::Buffer,
    pub(crate) key: wgpu::Buffer,
    pub(crate) value: wgpu::Buffer,
    pub(crate) output: wgpu::Buffer,
    pub(crate) counters: wgpu::Buffer,
}

/// Pipelines of one device, made when they are first needed.
pub(crate) struct RawKernels<'a> {
    gpu: &'a TestDevice,
    fold: u32,
    /// What counts loads: replaces `common/load.wgsl`, and binds `counters` as group 3.
    load: Option<&'static str>,
    pipelines: RefCell<HashMap<VariantKey, wgpu::ComputePipeline>>,
}

impl<'a> RawKernels<'a> {
    pub(crate) fn new(gpu: &'a TestDevice) -> Self {
        let fold = gpu.device.limits().max_compute_workgroups_per_dimension;
        Self { gpu, fold, load: None, pipelines: RefCell::default() }
    }

    /// Takes `text` instead of `common/load.wgsl`.
    pub(crate) fn with_load(gpu: &'a TestDevice, text: &'static str) -> Self {
        Self { load: Some(text), ..Self::new(gpu) }
    }

    /// The kernels for the cache of `rig`.
    pub(crate) fn of(&self, rig: &Rig) -> Raw<'_> {
        let config = rig.kv.config();
        Raw {
            kernels: self,
            block: *config.layout(),
            num_query_heads: rig.shape.num_query_heads(),
            table_entries: config.table_entries(),
        }
    }

    fn pipeline(&self, key: &VariantKey) -> wgpu::ComputePipeline {
        let device = &self.gpu.device;
        let replaced: Vec<_> = self.load.iter().map(|text| ("common/load.wgsl", *text)).collect();
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(&key.to_string()),
            source: wgpu::ShaderSource::Wgsl(key.wgsl_with(self.fold, &replaced).into()),
        });
        // Uniform, read-only, or written, binding by binding.
        let groups = [
            "urru",
            match key.kernel() {
                Kernel::Append | Kernel::BlockCopy => "w",
                Kernel::AttentionMerge => "r",
                _ => "rw",
            },
            match key.kernel() {
                Kernel::BlockCopy => "",
                Kernel::Append => "urr",
                _ => "urw",
            },
            if self.load.is_some() { "w" } else { "" },
        ];
        let layouts = groups.map(|bindings| {
            let entries: Vec<_> = (0..)
                .zip(bindings.chars())
                .map(|(binding, kind)| wgpu::BindGroupLayoutEntry {
                    binding,
                    visibility: ShaderStages::COMPUTE,
                    ty: wgpu::BindingType::Buffer {
                        ty: match kind {
                            'u' => wgpu::BufferBindingType::Uniform,
                            kind => wgpu::BufferBindingType::Storage { read_only: kind == 'r' },
                        },
                        has_dynamic_offset: false,
                        min_binding_size: None,
                    },
                    count: None,
                })
                .collect();
            device
                .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries })
        });
        let layouts: Vec<_> = layouts.iter().map(Some).collect();
        let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: None,
            bind_group_layouts: &layouts,
            immediate_size: 0,
        });
        device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(&key.to_string()),
            layout: Some(&layout),
            module: &module,
            entry_point: Some(key.kernel().name()),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        })
    }
}

/// The kernels for caches of one layout, of one layer.
pub(crate) struct Raw<'a> {
    kernels: &'a RawKernels<'a>,
    block: BlockLayout,
    num_query_heads: u32,
    table_entries: u32,
}

impl Raw<'_> {
    /// A storage buffer with this content; never empty.
    pub(crate) fn buffer<T: Pod>(&self, content: &[T]) -> wgpu::Buffer {
        let bytes: &[u8] = if content.is_empty() { &[0; 16] } else { cast_slice(content) };
        self.kernels.gpu.device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
            label: None,
            contents: bytes,
            usage: BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST,
        })
    }

    /// Buffers of the fewest words, to be replaced where a test needs more.
    pub(crate) fn buffers(&self, arena: &[u32], block_tables: &[u32]) -> RawBuffers {
        let empty = || self.buffer::<u32>(&[]);
        RawBuffers {
            arena: self.buffer(arena),
            block_tables: self.buffer(block_tables),
            partials: empty(),
            query: empty(),
            key: empty(),
            value: empty(),
            output: empty(),
            counters: empty(),
        }
    }

    /// Query heads per workgroup and tiles per kv head.
    fn tiling(&self) -> (u32, u32) {
        let heads = self.num_query_heads / self.block.num_kv_heads();
        let tiles = heads.div_ceil(MAX_QUERIES);
        (heads.div_ceil(tiles), tiles)
    }

    fn layer_params(&self) -> LayerParams {
        LayerParams {
            block_stride: self.block.layer_block_units() as u32,
            layer_start: 0,
            block_shift: self.block.block_size().trailing_zeros(),
            table_entries: self.table_entries,
            num_kv_heads: self.block.num_kv_heads(),
            num_query_heads: self.num_query_heads,
            heads_per_kv_head: self.num_query_heads / self.block.num_kv_heads(),
            head_tiles: self.tiling().1,
            scale_log2: std::f32::consts::LOG2_E / (self.block.k_head_dim() as f32).sqrt(),
            ..LayerParams::default()
        }
    }

    /// Rows without gaps.
    fn tensor_params(&self) -> TensorParams {
        let block = &self.block;
        TensorParams {
            query_stride: self.num_query_heads * block.k_head_dim() / 4,
            key_stride: block.num_kv_heads() * block.k_head_dim() / 4,
            value_stride: block.num_kv_heads() * block.v_head_dim() / 4,
            output_stride: self.num_query_heads * block.v_head_dim() / 4,
            // As many as any step has.
            num_rows: u32::MAX,
            padding: [0; 3],
        }
    }

    /// Workgroups that a kernel takes for a step.
    fn workgroups(&self, kernel: Kernel, step: &RawStep) -> u32 {
        let block = &self.block;
        match kernel {
            Kernel::Append => step.slot_mapping.len() as u32,
            Kernel::BlockCopy => {
                // Units of 16 bytes; a workgroup copies 1024.
                let units = block.layer_block_units() as u32;
                step.block_copies.len() as u32 * units.div_ceil(1024)
            }
            Kernel::AttentionDecode => {
                step.decode_items.len() as u32 * block.num_kv_heads() * self.tiling().1
            }
            Kernel::AttentionPrefill => step.prefill_items.len() as u32 * block.num_kv_heads(),
            Kernel::AttentionMerge => {
                let lanes = step.merge_items.len() as u32 * self.num_query_heads * block.v_head_dim() / 4;
                lanes.div_ceil(64)
            }
        }
    }

    /// Runs one kernel over `step` and submits it.
    pub(crate) fn dispatch(&self, kernel: Kernel, step: &RawStep, buffers: &RawBuffers) {
        let types = (self.block.k_type(), self.block.v_type());
        let dims = (self.block.k_head_dim(), self.block.v_head_dim());
        let queries = match kernel {
            Kernel::AttentionPrefill => PREFILL_QUERIES,
            _ => self.tiling().0,
        };
        let key = VariantKey::new(kernel, types, dims, ActivationType::F32, queries, false);
        let mut pipelines = self.kernels.pipelines.borrow_mut();
        let pipeline = pipelines.entry(key).or_insert_with(|| self.kernels.pipeline(&key));
        let (params, metadata) = step.pack();
        let uniform = |content: &[u8]| {
            self.kernels.gpu.device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
                label: None,
                contents: content,
                usage: BufferUsages::UNIFORM,
            })
        };
        let params = uniform(bytemuck::bytes_of(&params));
        let no_heads = HeadParams::default();
        let layer =
            uniform(&[bytemuck::bytes_of(&self.layer_params()), bytemuck::bytes_of(&no_heads)].concat());
        let tensors = uniform(bytemuck::bytes_of(&self.tensor_params()));
        let metadata = self.buffer(&metadata);
        let groups: [Vec<&wgpu::Buffer>; 4] = [
            vec![&params, &metadata, &buffers.block_tables, &layer],
            match kernel {
                Kernel::Append | Kernel::BlockCopy => vec![&buffers.arena],
                Kernel::AttentionMerge => vec![&buffers.partials],
                _ => vec![&buffers.arena, &buffers.partials],
            },
            match kernel {
                Kernel::BlockCopy => vec![],
                Kernel::Append => vec![&tensors, &buffers.key, &buffers.value],
                _ => vec![&tensors, &buffers.query, &buffers.output],
            },
            if self.kernels.load.is_some() { vec![&buffers.counters] } else { vec![] },
        ];
        let workgroups = self.workgroups(kernel, step);
        let mut encoder =
            self.kernels.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(pipeline);
        for (index, group) in (0..).zip(&groups) {
            if !group.is_empty() {
                let entries: Vec<_> = (0..)
                    .zip(group)
                    .map(|(binding, buffer)| wgpu::BindGroupEntry {
                        binding,
                        resource: buffer.as_entire_binding(),
                    })
                    .collect();
                let bind_group = self.kernels.gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
                    label: None,
                    layout: &pipeline.get_bind_group_layout(index),
                    entries: &entries,
                });
                pass.set_bind_group(index, &bind_group, &[]);
            }
        }
        pass.dispatch_workgroups(
            workgroups.min(self.kernels.fold),
            workgroups.div_ceil(self.kernels.fold),
            1,
        );
        drop(pass);
        self.kernels.gpu.queue.submit([encoder.finish()]);
    }

    /// The content of a buffer, once all that was submitted before has run.
    pub(crate) fn read<T: Pod>(&self, buffer: &wgpu::Buffer) -> Vec<T> {
        read(self.kernels.gpu, buffer)
    }
}

/// The content of a buffer, once all that was submitted before has run.
pub(crate) fn read<T: Pod>(gpu: &TestDevice, buffer: &wgpu::Buffer) -> Vec<T> {
    read_range(gpu, buffer, 0, buffer.size())
}

/// A part of a buffer's content, once all that was submitted before has run.
pub(crate) fn read_range<T: Pod>(gpu: &TestDevice, buffer: &wgpu::Buffer, offset: u64, bytes: u64) -> Vec<T> {
    let readback = gpu.device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: bytes,
        usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let mut encoder = gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    encoder.copy_buffer_to_buffer(buffer, offset, &readback, 0, bytes);
    gpu.queue.submit([encoder.finish()]);
    readback.map_async(wgpu::MapMode::Read, .., |result| result.expect("the buffer can be mapped"));
    gpu.device.poll(wgpu::PollType::wait_indefinitely()).expect("the queue finishes");
    let view = readback.get_mapped_range(..).expect("the buffer is mapped");
    bytemuck::pod_collect_to_vec(&view)
}
