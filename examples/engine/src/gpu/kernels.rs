//! Pipelines of the model's own kernels.
//!
//! Layouts are explicit, so that one bind group serves every tile of the matrix product. A tile's pipeline is made
//! when a step first needs it; from then on nothing is created.

use std::{cell::OnceCell, collections::HashMap};

use super::matmul::{Store, TILE_ROWS, Tile};

/// What a binding is to a kernel.
#[derive(Clone, Copy)]
enum Access {
    Uniform,
    Read,
    Write,
}

/// One kernel with the layout of its only bind group.
pub(super) struct Kernel {
    pub(super) pipeline: wgpu::ComputePipeline,
    pub(super) layout: wgpu::BindGroupLayout,
}

/// All kernels of the model.
pub(super) struct Kernels {
    pub(super) embed: Kernel,
    pub(super) rms_norm: Kernel,
    pub(super) rope: Kernel,
    pub(super) matmul_layout: wgpu::BindGroupLayout,
    matmul_pipeline_layout: wgpu::PipelineLayout,
    matmul: HashMap<Tile, OnceCell<wgpu::ComputePipeline>>,
}

impl Kernels {
    pub(super) fn new(device: &wgpu::Device) -> Self {
        use Access::{Read, Uniform, Write};
        let matmul_layout = layout(device, "llama.matmul", &[Uniform, Read, Read, Write]);
        let stores = [Store::Set, Store::Add, Store::SiluMul];
        let tiles = TILE_ROWS.into_iter().flat_map(|rows| stores.map(|store| Tile { rows, store }));
        Self {
            embed: kernel(
                device,
                "embed",
                include_str!("../shaders/embed.wgsl"),
                &[Uniform, Read, Read, Write],
            ),
            rms_norm: kernel(
                device,
                "rms_norm",
                include_str!("../shaders/rms_norm.wgsl"),
                &[Uniform, Read, Read, Read, Write],
            ),
            rope: kernel(device, "rope", include_str!("../shaders/rope.wgsl"), &[Uniform, Read, Read, Write]),
            matmul_pipeline_layout: pipeline_layout(device, "llama.matmul", &matmul_layout),
            matmul_layout,
            matmul: tiles.map(|tile| (tile, OnceCell::new())).collect(),
        }
    }

    /// The pipeline of one tile, made on first use.
    pub(super) fn matmul(&self, device: &wgpu::Device, tile: Tile) -> &wgpu::ComputePipeline {
        self.matmul[&tile].get_or_init(|| {
            pipeline(device, &tile.label(), "matmul", &tile.shader(), &self.matmul_pipeline_layout)
        })
    }
}

/// Workgroups that cover `invocations` of a kernel with 64 of them.
pub(super) fn workgroups_of_64(invocations: u32) -> u32 {
    invocations.div_ceil(64)
}

fn kernel(device: &wgpu::Device, name: &str, text: &str, bindings: &[Access]) -> Kernel {
    let label = format!("llama.{name}");
    let layout = layout(device, &label, bindings);
    let pipeline_layout = pipeline_layout(device, &label, &layout);
    Kernel { pipeline: pipeline(device, &label, name, text, &pipeline_layout), layout }
}

fn layout(device: &wgpu::Device, label: &str, bindings: &[Access]) -> wgpu::BindGroupLayout {
    let entries: Vec<_> = bindings
        .iter()
        .zip(0..)
        .map(|(access, binding)| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: match access {
                    Access::Uniform => wgpu::BufferBindingType::Uniform,
                    Access::Read => wgpu::BufferBindingType::Storage { read_only: true },
                    Access::Write => wgpu::BufferBindingType::Storage { read_only: false },
                },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        })
        .collect();
    device
        .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(label), entries: &entries })
}

fn pipeline_layout(
    device: &wgpu::Device,
    label: &str,
    layout: &wgpu::BindGroupLayout,
) -> wgpu::PipelineLayout {
    device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: Some(label),
        bind_group_layouts: &[Some(layout)],
        immediate_size: 0,
    })
}

fn pipeline(
    device: &wgpu::Device,
    label: &str,
    entry_point: &str,
    text: &str,
    layout: &wgpu::PipelineLayout,
) -> wgpu::ComputePipeline {
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some(label),
        source: wgpu::ShaderSource::Wgsl(text.into()),
    });
    device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(label),
        layout: Some(layout),
        module: &module,
        entry_point: Some(entry_point),
        compilation_options: Default::default(),
        cache: None,
    })
}
