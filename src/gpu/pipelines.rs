//! Bind group layouts and pipelines: what is bound where, once for all kernels.
//!
//! | group | bindings | kernels |
//! |---|---|---|
//! | 0 | step parameters (dynamic offset), metadata, block tables, layer parameters (dynamic offset) | all |
//! | 1 | arena (read), partial results | attention |
//! | 1 | arena (read and write) | append, block copy |
//! | 1 | partial results (read) | merge |
//! | 2 | tensor parameters, key, value | append |
//! | 2 | tensor parameters, query, output | attention, merge |

use crate::error::DeviceError;
use crate::gpu::memory::device_error;
use crate::gpu::options::AttentionOptions;
use crate::gpu::params::{StepParams, TensorParams};
use crate::gpu::scope::guarded;
use crate::gpu::shader::{Kernel, VariantKey};
use std::num::NonZeroU64;
use std::time::Duration;
use wgpu::{
    BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry, BindingType, BufferBindingType,
    ComputePipelineDescriptor, PipelineCompilationOptions, PipelineLayoutDescriptor, ShaderModuleDescriptor,
    ShaderRuntimeChecks, ShaderSource, ShaderStages,
};

/// The layouts of all bind groups.
pub(super) struct Layouts {
    /// Bytes of a layer's parameters.
    pub(super) layer_bytes: u64,
    pub(super) step: BindGroupLayout,
    pub(super) attention_arena: BindGroupLayout,
    pub(super) written_arena: BindGroupLayout,
    pub(super) merge: BindGroupLayout,
    pub(super) append_tensors: BindGroupLayout,
    pub(super) attention_tensors: BindGroupLayout,
}

const READ: BufferBindingType = BufferBindingType::Storage { read_only: true };
const WRITE: BufferBindingType = BufferBindingType::Storage { read_only: false };

impl Layouts {
    /// Layouts for layer parameters of so many bytes.
    pub(super) fn create(device: &wgpu::Device, layer_bytes: u64) -> Result<Self, DeviceError> {
        let create = || Self {
            layer_bytes,
            step: layout(
                device,
                "paged_kv.step",
                &[
                    uniform(size_of::<StepParams>() as u64, true),
                    storage(READ),
                    storage(READ),
                    uniform(layer_bytes, true),
                ],
            ),
            attention_arena: layout(device, "paged_kv.attention_arena", &[storage(READ), storage(WRITE)]),
            written_arena: layout(device, "paged_kv.written_arena", &[storage(WRITE)]),
            merge: layout(device, "paged_kv.merge", &[storage(READ)]),
            append_tensors: layout(
                device,
                "paged_kv.append_tensors",
                &[uniform(size_of::<TensorParams>() as u64, false), storage(READ), storage(READ)],
            ),
            attention_tensors: layout(
                device,
                "paged_kv.attention_tensors",
                &[uniform(size_of::<TensorParams>() as u64, false), storage(READ), storage(WRITE)],
            ),
        };
        guarded(device, create).map_err(|refusal| device_error(refusal, "bind group layouts", 0, 0))
    }

    fn groups(&self, kernel: Kernel) -> Vec<Option<&BindGroupLayout>> {
        let (arena, tensors) = match kernel {
            Kernel::Append => (&self.written_arena, Some(&self.append_tensors)),
            Kernel::BlockCopy => (&self.written_arena, None),
            Kernel::AttentionDecode | Kernel::AttentionPrefill => {
                (&self.attention_arena, Some(&self.attention_tensors))
            }
            Kernel::AttentionMerge => (&self.merge, Some(&self.attention_tensors)),
        };
        [Some(&self.step), Some(arena)].into_iter().chain(tensors.map(Some)).collect()
    }
}

fn uniform(bytes: u64, has_dynamic_offset: bool) -> BindingType {
    BindingType::Buffer {
        ty: BufferBindingType::Uniform,
        has_dynamic_offset,
        min_binding_size: NonZeroU64::new(bytes),
    }
}

fn storage(ty: BufferBindingType) -> BindingType {
    BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None }
}

fn layout(device: &wgpu::Device, label: &str, bindings: &[BindingType]) -> BindGroupLayout {
    let entries: Vec<_> = (0..)
        .zip(bindings)
        .map(|(binding, &ty)| BindGroupLayoutEntry {
            binding,
            visibility: ShaderStages::COMPUTE,
            ty,
            count: None,
        })
        .collect();
    device.create_bind_group_layout(&BindGroupLayoutDescriptor { label: Some(label), entries: &entries })
}

/// How shaders are compiled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Compilation {
    /// Workgroups per dimension at which dispatches are folded.
    pub(super) fold: u32,
    /// With wgpu's bounds and loop checks.
    pub(super) checked: bool,
}

/// A kernel as it was compiled for the device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShaderVariant {
    /// The kernel and what was chosen for it.
    pub name: String,
    /// How long the shader and its pipeline took to make; all kernels are made at once, but on GL and in a browser. Zero
    /// in a browser.
    pub creation_time: Duration,
}

/// One pipeline per kernel.
pub(super) struct Pipelines {
    pub(super) variants: Vec<ShaderVariant>,
    pub(super) append: wgpu::ComputePipeline,
    pub(super) block_copy: wgpu::ComputePipeline,
    pub(super) attention_decode: wgpu::ComputePipeline,
    pub(super) attention_prefill: wgpu::ComputePipeline,
    pub(super) attention_merge: wgpu::ComputePipeline,
}

impl Pipelines {
    /// Number of pipelines.
    pub(super) const COUNT: u32 = KERNELS.len() as u32;

    /// Creates the pipelines of the variants that `variant` names, some of their fragments replaced.
    pub(super) fn create(
        device: &wgpu::Device,
        layouts: &Layouts,
        compilation: Compilation,
        options: &AttentionOptions,
        variant: impl Fn(Kernel) -> VariantKey,
    ) -> Result<Self, DeviceError> {
        let keys = KERNELS.map(variant);
        let [decode, prefill, merge, append, block_copy] = at_once(device, &keys, |variant| {
            let (pipeline, creation_time) =
                timed(|| pipeline(device, layouts, compilation, options, variant));
            Ok((pipeline?, ShaderVariant { name: variant.to_string(), creation_time }))
        });
        let made = [decode?, prefill?, merge?, append?, block_copy?];
        let variants = made.iter().map(|(_, variant)| variant.clone()).collect();
        let [attention_decode, attention_prefill, attention_merge, append, block_copy] =
            made.map(|(pipeline, _)| pipeline);
        Ok(Self { variants, append, block_copy, attention_decode, attention_prefill, attention_merge })
    }
}

/// All kernels; those that take longest to compile come first.
const KERNELS: [Kernel; 5] = [
    Kernel::AttentionDecode,
    Kernel::AttentionPrefill,
    Kernel::AttentionMerge,
    Kernel::Append,
    Kernel::BlockCopy,
];

/// What `create` makes of each variant, each on a thread of its own: drivers compile on the thread that asks. But for GL,
/// whose context is one thread's at a time: those who wait for it give up after seconds.
#[cfg(not(target_family = "wasm"))]
fn at_once<T: Send>(
    device: &wgpu::Device,
    variants: &[VariantKey; 5],
    create: impl Fn(&VariantKey) -> Result<T, DeviceError> + Sync,
) -> [Result<T, DeviceError>; 5] {
    if device.adapter_info().backend == wgpu::Backend::Gl {
        return variants.each_ref().map(create);
    }
    let create = &create;
    std::thread::scope(|scope| {
        variants
            .each_ref()
            .map(|variant| scope.spawn(move || create(variant)))
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// What `create` makes of each variant, one after the other.
#[cfg(target_family = "wasm")]
fn at_once<T>(
    _device: &wgpu::Device,
    variants: &[VariantKey; 5],
    create: impl Fn(&VariantKey) -> Result<T, DeviceError>,
) -> [Result<T, DeviceError>; 5] {
    variants.each_ref().map(create)
}

#[cfg(not(target_family = "wasm"))]
fn timed<T>(create: impl FnOnce() -> T) -> (T, Duration) {
    let start = std::time::Instant::now();
    (create(), start.elapsed())
}

/// There is no clock that does not need the browser.
#[cfg(target_family = "wasm")]
fn timed<T>(create: impl FnOnce() -> T) -> (T, Duration) {
    (create(), Duration::ZERO)
}

fn pipeline(
    device: &wgpu::Device,
    layouts: &Layouts,
    compilation: Compilation,
    options: &AttentionOptions,
    variant: &VariantKey,
) -> Result<wgpu::ComputePipeline, DeviceError> {
    let replaced: Vec<_> =
        options.replaced_fragments.iter().map(|(name, text)| (*name, text.as_str())).collect();
    let kernel = variant.kernel();
    let label = format!("paged_kv.{}", kernel.name());
    let create = || {
        let wgsl = variant.wgsl_with(compilation.fold, &replaced);
        let module = shader_module(device, &label, wgsl, compilation.checked);
        let layout = device.create_pipeline_layout(&PipelineLayoutDescriptor {
            label: Some(&label),
            bind_group_layouts: &layouts.groups(kernel),
            immediate_size: 0,
        });
        device.create_compute_pipeline(&ComputePipelineDescriptor {
            label: Some(&label),
            layout: Some(&layout),
            module: &module,
            entry_point: Some(kernel.name()),
            // No result depends on workgroup memory that its kernel has not written.
            compilation_options: PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: options.pipeline_cache.as_ref(),
        })
    };
    guarded(device, create).map_err(|refusal| device_error(refusal, kernel.name(), 0, 0))
}

#[allow(unsafe_code)]
fn shader_module(device: &wgpu::Device, label: &str, wgsl: String, checked: bool) -> wgpu::ShaderModule {
    let descriptor = ShaderModuleDescriptor { label: Some(label), source: ShaderSource::Wgsl(wgsl.into()) };
    if checked {
        return device.create_shader_module(descriptor);
    }
    // SAFETY: without wgpu's checks a shader must index no array out of bounds and end every loop. Every index of our
    // kernels is computed from numbers that the host has checked: the constants of the variant and the layer's
    // parameters come from a `CacheConfig`, whose arenas hold every (block, slot, head) that they name; `prepare`
    // checks each block id, slot, table row, context length, query range and copy of a plan against that
    // configuration, and each length against its array; `bind_tensors` and `record_layer` check that the tensors have
    // the step's rows. A device's block tables start as zeros, a valid block id, and take only entries that `prepare`
    // has checked. A slot of metadata is not rewritten before the submissions that read it have completed; where a step's
    // upload does not run before its layers, they read what an earlier step of the same pool has left, whose numbers were
    // checked as well, and which the shaders give up if it has more rows than the tensors (see `metadata.rs`). All loops
    // have bounds from the same numbers. What replaces fragments was promised to keep to the same.
    unsafe { device.create_shader_module_trusted(descriptor, ShaderRuntimeChecks::unchecked()) }
}
