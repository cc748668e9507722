//! Kernels of the benches' own: what the library's are compared with.

use bytemuck::{Pod, Zeroable};
use paged_kv::KvType;
use wgpu::ComputePass;

use crate::cache::BenchCache;
use crate::gpu::Gpu;

/// A compute kernel with one bind group.
pub struct BenchKernel {
    pipeline: wgpu::ComputePipeline,
    /// Workgroups per dimension.
    fold: u64,
}

impl BenchKernel {
    /// Compiles `wgsl` as the library compiles its own kernels: without bounds and loop checks.
    #[allow(unsafe_code)]
    pub fn new(gpu: &Gpu, wgsl: String, entry: &str) -> Self {
        let descriptor = wgpu::ShaderModuleDescriptor {
            label: Some(entry),
            source: wgpu::ShaderSource::Wgsl(wgsl.into()),
        };
        // SAFETY: the kernels of the benches index only what the sizes of the caches, by which their buffers and
        // dispatches are made, allow, and their loops end.
        let module = unsafe {
            let checks = wgpu::ShaderRuntimeChecks::unchecked();
            gpu.device.create_shader_module_trusted(descriptor, checks)
        };
        let pipeline = gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(entry),
            layout: None,
            module: &module,
            entry_point: Some(entry),
            compilation_options: Default::default(),
            cache: None,
        });
        let limits = gpu.device.limits();
        Self { pipeline, fold: u64::from(limits.max_compute_workgroups_per_dimension.min(65_535)) }
    }

    /// Binds `buffers` as bindings 0, 1, …
    pub fn bind(&self, gpu: &Gpu, buffers: &[&wgpu::Buffer]) -> wgpu::BindGroup {
        let entries: Vec<_> = (0..)
            .zip(buffers)
            .map(|(binding, buffer)| wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() })
            .collect();
        gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &self.pipeline.get_bind_group_layout(0),
            entries: &entries,
        })
    }

    /// Records one dispatch of `workgroups`, folded over x and y where one dimension does not hold them.
    pub fn record(&self, pass: &mut ComputePass<'_>, group: &wgpu::BindGroup, workgroups: u64) {
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, group, &[]);
        let x = workgroups.min(self.fold);
        pass.dispatch_workgroups(x as u32, workgroups.div_ceil(x.max(1)) as u32, 1);
    }
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Params {
    /// Units of 16 bytes between blocks, and before the layer.
    block_stride: u32,
    layer_start: u32,
    table_entries: u32,
    /// Blocks to gather, or query vectors.
    num_items: u32,
    scale_log2: f32,
    padding: [u32; 3],
}

/// A kernel over every layer of a cache.
pub struct CacheKernel {
    kernel: BenchKernel,
    groups: Vec<wgpu::BindGroup>,
    workgroups: u64,
}

impl CacheKernel {
    /// Copies what the block tables of `from` name into the extents of `to`, a contiguous twin of it. `from` keeps its
    /// block tables where this kernel finds them.
    pub fn gather(gpu: &Gpu, from: &BenchCache<'_>, to: &BenchCache<'_>) -> Self {
        let kernel = BenchKernel::new(gpu, header(from) + include_str!("shaders/gather.wgsl"), "gather");
        let layout = from.kv.config().layout();
        let blocks: u32 =
            from.case.sequences.iter().map(|sequence| layout.blocks_for(sequence.context)).sum();
        let mut items = Vec::new();
        for (row, sequence) in (0u32..).zip(&from.case.sequences) {
            items.extend((0..layout.blocks_for(sequence.context)).map(|block| [row, block]));
        }
        let items = gpu.buffer(&items);
        let groups = (0..from.case.num_layers)
            .map(|layer| {
                let params = gpu.buffer(&[params(from, layer, blocks)]);
                let (source, target) = (from.arena(layer), to.arena(layer));
                kernel.bind(gpu, &[&params, source, &from.tables_buffer, &items, target])
            })
            .collect();
        Self { kernel, groups, workgroups: u64::from(blocks) }
    }

    /// Reads, and does not keep, what the block tables of `from` name: what the table alone costs a read.
    pub fn gather_read(gpu: &Gpu, from: &BenchCache<'_>) -> Self {
        let kernel = BenchKernel::new(gpu, header(from) + include_str!("shaders/gather.wgsl"), "gather_read");
        let layout = from.kv.config().layout();
        let blocks = layout.blocks_for(from.case.sequences[0].context);
        let units = blocks * (layout.layer_block_words() / 4) as u32;
        let sequences = 0..from.case.sequences.len() as u32;
        let items = sequences.flat_map(|row| (0..units).step_by(1024).map(move |unit| [row, unit]));
        let items: Vec<[u32; 2]> = items.collect();
        let workgroups = items.len() as u64;
        let (items, sink) = (gpu.buffer(&items), gpu.empty(16));
        let groups = (0..from.case.num_layers)
            .map(|layer| {
                let params = gpu.buffer(&[params(from, layer, units)]);
                kernel.bind(gpu, &[&params, from.arena(layer), &from.tables_buffer, &items, &sink])
            })
            .collect();
        Self { kernel, groups, workgroups }
    }

    /// Attention with one invocation per query vector, through the block tables of `cache`, into its output.
    pub fn plain(gpu: &Gpu, cache: &BenchCache<'_>) -> Self {
        let kernel = BenchKernel::new(gpu, header(cache) + include_str!("shaders/plain.wgsl"), "plain");
        let mut rows = Vec::new();
        for (index, sequence) in (0u32..).zip(&cache.case.sequences) {
            let past = sequence.context - sequence.rows;
            rows.extend((1..=sequence.rows).map(|row| [index, past + row]));
        }
        let vectors = rows.len() as u32 * cache.case.num_query_heads;
        let rows = gpu.buffer(&rows);
        let groups = (0..cache.case.num_layers)
            .map(|layer| {
                let params = gpu.buffer(&[params(cache, layer, vectors)]);
                let buffers =
                    [&params, cache.arena(layer), &cache.tables_buffer, &rows, &cache.query, &cache.output];
                kernel.bind(gpu, &buffers)
            })
            .collect();
        Self { kernel, groups, workgroups: u64::from(vectors.div_ceil(64)) }
    }

    /// Records one layer.
    pub fn record(&self, pass: &mut ComputePass<'_>, layer: u32) {
        self.kernel.record(pass, &self.groups[layer as usize], self.workgroups);
    }
}

fn params(cache: &BenchCache<'_>, layer: u32, num_items: u32) -> Params {
    let arenas = cache.attention.arena_layout();
    let (arena, _) = arenas.arena_of(layer);
    Params {
        block_stride: arenas.block_stride_units(arena) as u32,
        layer_start: arenas.layer_start_units(layer) as u32,
        table_entries: cache.kv.config().table_entries(),
        num_items,
        scale_log2: std::f32::consts::LOG2_E / (cache.case.head_dim as f32).sqrt(),
        padding: [0; 3],
    }
}

fn header(cache: &BenchCache<'_>) -> String {
    let case = &cache.case;
    let read = match case.kv_type {
        KvType::F16 => include_str!("shaders/read_f16.wgsl"),
        _ => include_str!("shaders/read_f32.wgsl"),
    };
    format!(
        "const HEADS = {}u;\nconst KV_HEADS = {}u;\nconst HEAD_VECS = {}u;\nconst ROW = {}u;\nconst SHIFT = {}u;\n\
         struct Params {{ block_stride: u32, layer_start: u32, table_entries: u32, num_items: u32, \
         scale_log2: f32, p0: u32, p1: u32, p2: u32 }}\n{read}",
        case.num_query_heads,
        case.num_kv_heads,
        case.head_dim / 4,
        case.head_dim / case.kv_type.elements_per_vec4(),
        case.block_size.trailing_zeros(),
    )
}
