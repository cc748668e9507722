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
use crate::gpu::setup::ServedGroup;
use crate::gpu::shader::{Kernel, VariantKey};
use std::num::NonZeroU64;
use std::time::Duration;
use wgpu::{
    BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry, BindingType, BufferBindingType,
    ComputePipeline, ComputePipelineDescriptor, PipelineCompilationOptions, PipelineLayoutDescriptor,
    ShaderModuleDescriptor, ShaderRuntimeChecks, ShaderSource, ShaderStages,
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

/// The pipelines of all groups of layers. Groups whose kernels are the same share them.
pub(super) struct Pipelines {
    keys: Vec<GroupKeys>,
    pub(super) variants: Vec<ShaderVariant>,
    pub(super) block_copy: ComputePipeline,
    /// In the order of the groups.
    pub(super) groups: Vec<GroupPipelines>,
}

/// The variants of one group's kernels: decode, prefill, merge and append.
pub(super) type GroupKeys = [VariantKey; 4];

/// The pipelines of one group.
pub(super) struct GroupPipelines {
    pub(super) attention_decode: ComputePipeline,
    pub(super) attention_prefill: ComputePipeline,
    pub(super) attention_merge: ComputePipeline,
    pub(super) append: ComputePipeline,
}

impl Pipelines {
    /// The variants that `variant` names for each of the groups.
    pub(super) fn keys<'a>(
        groups: impl Iterator<Item = ServedGroup<'a>>,
        variant: impl Fn(Kernel, ServedGroup<'a>) -> VariantKey,
    ) -> Vec<GroupKeys> {
        // Those that take longest to compile come first.
        let kernels =
            [Kernel::AttentionDecode, Kernel::AttentionPrefill, Kernel::AttentionMerge, Kernel::Append];
        groups.map(|group| kernels.map(|kernel| variant(kernel, group))).collect()
    }

    /// Creates the pipelines of these variants, some of their fragments replaced.
    pub(super) fn create(
        device: &wgpu::Device,
        layouts: &Layouts,
        compilation: Compilation,
        options: &AttentionOptions,
        keys: Vec<GroupKeys>,
    ) -> Result<Self, DeviceError> {
        let mut distinct: Vec<VariantKey> = Vec::new();
        for key in keys.iter().flatten().copied().chain([VariantKey::block_copy()]) {
            if !distinct.contains(&key) {
                distinct.push(key);
            }
        }
        let made = at_once(device, &distinct, |variant| {
            let (pipeline, creation_time) =
                timed(|| pipeline(device, layouts, compilation, options, variant));
            Ok((pipeline?, ShaderVariant { name: variant.to_string(), creation_time }))
        });
        let made = made.into_iter().collect::<Result<Vec<_>, _>>()?;
        let of = |key: &VariantKey| {
            let index = distinct.iter().position(|other| other == key).expect("every variant was made");
            made[index].0.clone()
        };
        let groups = keys.iter().map(|[decode, prefill, merge, append]| GroupPipelines {
            attention_decode: of(decode),
            attention_prefill: of(prefill),
            attention_merge: of(merge),
            append: of(append),
        });
        Ok(Self {
            groups: groups.collect(),
            block_copy: of(&VariantKey::block_copy()),
            variants: made.iter().map(|(_, variant)| variant.clone()).collect(),
            keys,
        })
    }

    /// Whether these are the pipelines of other variants.
    pub(super) fn are_others(&self, keys: &[GroupKeys]) -> bool {
        self.keys != keys
    }

    /// Number of pipelines.
    pub(super) fn count(&self) -> u32 {
        self.variants.len() as u32
    }
}

/// What `create` makes of each variant, each on a thread of its own: drivers compile on the thread that asks. But for GL,
/// whose context is one thread's at a time: those who wait for it give up after seconds.
#[cfg(not(target_family = "wasm"))]
fn at_once<T: Send>(
    device: &wgpu::Device,
    variants: &[VariantKey],
    create: impl Fn(&VariantKey) -> Result<T, DeviceError> + Sync,
) -> Vec<Result<T, DeviceError>> {
    if device.adapter_info().backend == wgpu::Backend::Gl {
        return variants.iter().map(create).collect();
    }
    let create = &create;
    std::thread::scope(|scope| {
        let threads: Vec<_> = variants.iter().map(|variant| scope.spawn(move || create(variant))).collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results.map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// What `create` makes of each variant, one after the other.
#[cfg(target_family = "wasm")]
fn at_once<T>(
    _device: &wgpu::Device,
    variants: &[VariantKey],
    create: impl Fn(&VariantKey) -> Result<T, DeviceError>,
) -> Vec<Result<T, DeviceError>> {
    variants.iter().map(create).collect()
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
