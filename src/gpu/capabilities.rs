//! From a device's *enabled* limits and features to what the library does with them. The only place that looks at them.
//!
//! What the adapter could do does not count: an application that wants larger caches or subgroup operations enables
//! them when it requests its device, with [`recommended_limits`] and [`recommended_features`].

use crate::error::DeviceError;
use crate::layout::MAX_ARENA_BYTES;
use crate::model::ModelShape;
use crate::schedule::SchedulerConfig;
use wgpu::{DeviceType, Features, Limits};

/// A limit that the kernels depend on: its name in `wgpu::Limits`, the least that suffices, and where it is.
type Need = (&'static str, u32, fn(&mut Limits) -> &mut u32);

const NEEDS: [Need; 10] = [
    ("max_bind_groups", 3, |limits| &mut limits.max_bind_groups),
    ("max_storage_buffers_per_shader_stage", 6, |limits| &mut limits.max_storage_buffers_per_shader_stage),
    ("max_uniform_buffers_per_shader_stage", 3, |limits| &mut limits.max_uniform_buffers_per_shader_stage),
    ("max_dynamic_uniform_buffers_per_pipeline_layout", 2, |limits| {
        &mut limits.max_dynamic_uniform_buffers_per_pipeline_layout
    }),
    ("max_compute_invocations_per_workgroup", 64, |limits| &mut limits.max_compute_invocations_per_workgroup),
    ("max_compute_workgroup_size_x", 64, |limits| &mut limits.max_compute_workgroup_size_x),
    ("max_compute_workgroup_size_y", 1, |limits| &mut limits.max_compute_workgroup_size_y),
    ("max_compute_workgroup_size_z", 1, |limits| &mut limits.max_compute_workgroup_size_z),
    ("max_compute_workgroup_storage_size", 8192, |limits| &mut limits.max_compute_workgroup_storage_size),
    ("max_compute_workgroups_per_dimension", 1024, |limits| &mut limits.max_compute_workgroups_per_dimension),
];

/// `base`, raised where the library needs more, or has a use for more: to what the kernels need, where the adapter has it,
/// and to all that the adapter offers for the sizes of buffers and storage bindings. No limit is lowered.
///
/// `base` is what the application itself needs, `wgpu::Limits::downlevel_defaults()` as well as `default()`. An adapter
/// that offers less than the kernels need gives a device on which [`PagedAttention::new`](crate::PagedAttention::new) is
/// [`DeviceError::LimitTooLow`].
///
/// ```no_run
/// # fn descriptor(adapter: &wgpu::Adapter) -> wgpu::DeviceDescriptor<'static> {
/// wgpu::DeviceDescriptor {
///     required_limits: paged_kv::recommended_limits(adapter, wgpu::Limits::default()),
///     required_features: paged_kv::recommended_features(adapter),
///     ..Default::default()
/// }
/// # }
/// ```
pub fn recommended_limits(adapter: &wgpu::Adapter, base: Limits) -> Limits {
    raised(base, adapter.limits())
}

fn raised(mut limits: Limits, mut offered: Limits) -> Limits {
    for (_, needed, limit) in NEEDS {
        let available = needed.min(*limit(&mut offered));
        let raised = limit(&mut limits);
        *raised = available.max(*raised);
    }
    Limits {
        max_storage_buffer_binding_size: limits
            .max_storage_buffer_binding_size
            .max(offered.max_storage_buffer_binding_size),
        max_buffer_size: limits.max_buffer_size.max(offered.max_buffer_size),
        ..limits
    }
}

/// The features that the library makes use of, as far as the adapter has them: subgroup operations.
///
/// `SHADER_F16` is not among them: an f16 cache is read without it, and compilers make the same code of both.
pub fn recommended_features(adapter: &wgpu::Adapter) -> Features {
    adapter.features() & Features::SUBGROUP
}

/// A scheduler's configuration whose steps a device of this kind computes in about half a second, so that a step that is
/// submitted at once stays far from the two seconds after which drivers give a device up: the default one, with fewer rows
/// and (row, key) pairs a step where a model is large for the kind of device.
///
/// `num_parameters` are the model's weights that every token is multiplied by; of a mixture of experts, those of one token.
/// wgpu tells no speed, so this goes by discrete GPU (2.9 TFLOP a step), other GPU (0.7) and software adapter (0.05), half
/// of it for attention and half for weights. An application that measures its steps does better, with
/// [`Scheduler::set_step_budgets`](crate::Scheduler::set_step_budgets).
///
/// ```no_run
/// # use paged_kv::{ModelShape, SchedulerConfig, recommended_scheduler_config};
/// # fn config(device: &wgpu::Device, shape: &ModelShape) -> SchedulerConfig {
/// SchedulerConfig { max_drafts: 4, ..recommended_scheduler_config(device, shape, 8_000_000_000) }
/// # }
/// ```
pub fn recommended_scheduler_config(
    device: &wgpu::Device,
    shape: &ModelShape,
    num_parameters: u64,
) -> SchedulerConfig {
    scheduler_config(Scale::of(device.adapter_info().device_type), shape, num_parameters)
}

fn scheduler_config(scale: Scale, shape: &ModelShape, num_parameters: u64) -> SchedulerConfig {
    let default = SchedulerConfig::default();
    let half = STEP_DISPATCHES * scale.dispatch_flop / 2;
    let rows = half / num_parameters.saturating_mul(2).max(1);
    let heads = u64::from(shape.num_query_heads()) * u64::from(shape.num_layers());
    let pairs = half / heads.saturating_mul(4 * u64::from(shape.head_dim())).max(1);
    SchedulerConfig {
        step_tokens: default.step_tokens.min(u32::try_from(rows).unwrap_or(u32::MAX)).max(1),
        step_work_budget: default.step_work_budget.min(pairs).max(1),
        ..default
    }
}

/// Dispatches of the default budget that a step may take as long as: by the times beside [`Scale::dispatch_flop`] half a
/// second on a Steam Deck, 0.4 on an RX 7600, and 0.12 on an RX 7900 XTX.
const STEP_DISPATCHES: u64 = 48;

/// No tensor is larger than this, whatever the device allows: the attention kernels address queries by 27 bits of 16-byte
/// units, or 28 bits of 8-byte ones (`UNIT_MASK`). Vulkan and DX12 bind no more either, but Metal does.
const MAX_TENSOR_BYTES: u64 = MAX_ARENA_BYTES;

/// What the library needs to know about a device.
#[derive(Clone, Debug)]
pub(super) struct Capabilities {
    /// Most bytes of a storage buffer and its binding.
    pub(super) max_binding_bytes: u64,
    /// Most bytes of a binding of one of the application's tensors.
    pub(super) max_tensor_bytes: u64,
    /// Workgroups per dimension of a dispatch.
    pub(super) max_workgroups: u32,
    /// Alignment of dynamic offsets into uniform buffers, and of bound storage slices.
    pub(super) uniform_alignment: u32,
    pub(super) storage_alignment: u32,
    pub(super) subgroups: bool,
    /// Whether the driver takes so long to compile a long shader that a short one is the better choice.
    pub(super) compact_shaders: bool,
    pub(super) scale: Scale,
}

/// How much a device takes at a time, by its class: nothing that wgpu tells says more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// Workgroups that fill the device.
    pub(super) target_workgroups: u32,
    /// Floating-point operations of attention that one dispatch has by default. Enough for half of those workgroups when
    /// a prompt of 16,384 tokens is read, because dispatches run one after the other; few enough for some milliseconds.
    /// By the times to issue in benches/RESULTS.md, an RX 7900 XTX takes 2.6 ms for 60 GFLOP, an RX 7600 8.1, and a Steam
    /// Deck 10.6 for 15.
    pub(super) dispatch_flop: u64,
}

impl Scale {
    fn of(device_type: DeviceType) -> Self {
        match device_type {
            DeviceType::DiscreteGpu => Self { target_workgroups: 1024, dispatch_flop: 60_000_000_000 },
            DeviceType::Cpu => Self { target_workgroups: 16, dispatch_flop: 1_000_000_000 },
            _ => Self { target_workgroups: 256, dispatch_flop: 15_000_000_000 },
        }
    }
}

impl Capabilities {
    pub(super) fn of(device: &wgpu::Device) -> Result<Self, DeviceError> {
        let mut limits = device.limits();
        for (limit, needed, of) in NEEDS {
            let actual = *of(&mut limits);
            if actual < needed {
                let (needed, actual) = (needed.into(), actual.into());
                return Err(DeviceError::LimitTooLow { object: "the kernels", limit, needed, actual });
            }
        }
        let info = device.adapter_info();
        Ok(Self {
            max_binding_bytes: max_binding_bytes(&limits),
            max_tensor_bytes: max_tensor_bytes(&limits),
            max_workgroups: limits.max_compute_workgroups_per_dimension.min(u32::from(u16::MAX)),
            uniform_alignment: limits.min_uniform_buffer_offset_alignment,
            storage_alignment: limits.min_storage_buffer_offset_alignment,
            // Reducing within smaller subgroups would save next to nothing.
            subgroups: device.features().contains(Features::SUBGROUP) && info.subgroup_min_size >= 4,
            compact_shaders: info.backend == wgpu::Backend::Gl,
            scale: Scale::of(info.device_type),
        })
    }
}

fn max_binding_bytes(limits: &Limits) -> u64 {
    limits.max_storage_buffer_binding_size.min(limits.max_buffer_size)
}

fn max_tensor_bytes(limits: &Limits) -> u64 {
    max_binding_bytes(limits).min(MAX_TENSOR_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CacheConfig;
    use crate::gpu::options::AttentionOptions;
    use crate::gpu::setup::{QueryTiles, ServedGroup, split_config};
    use crate::model::KvType;
    use crate::schedule::{StepPlan, WorkSplit};

    #[test]
    fn limits_are_raised_to_what_is_needed_and_neither_beyond_the_offer_nor_lowered() {
        for (base, offered, expected) in [(4, 16, 6), (4, 5, 5), (4, 3, 4), (8, 16, 8), (8, 4, 8), (0, 6, 6)]
        {
            let of = |buffers| Limits { max_storage_buffers_per_shader_stage: buffers, ..Limits::default() };
            assert_eq!(raised(of(base), of(offered)), of(expected), "{base} of {offered}");
        }
    }

    #[test]
    fn tensors_are_below_2_gib_where_a_device_binds_more() {
        let sized = |bytes| Limits {
            max_storage_buffer_binding_size: bytes,
            max_buffer_size: bytes + 4,
            ..Limits::default()
        };
        for (bytes, most) in [(1 << 27, 1 << 27), (2 << 30, (2 << 30) - 4), (1 << 36, (2 << 30) - 4)] {
            assert_eq!(max_binding_bytes(&sized(bytes)), bytes);
            assert_eq!(max_tensor_bytes(&sized(bytes)), most);
        }
    }

    #[test]
    fn a_dispatch_over_a_long_prompt_fills_half_of_the_device() {
        let flop_per_pair = 4 * 32 * 128;
        for device_type in [DeviceType::DiscreteGpu, DeviceType::IntegratedGpu, DeviceType::Cpu] {
            let scale = Scale::of(device_type);
            let pairs = scale.dispatch_flop / flop_per_pair;
            // 32/8 heads: a tile of eight queries is two rows, and a workgroup for each of the eight kv heads.
            let workgroups = pairs / (2 * 16_384) * 8;
            assert!(2 * workgroups >= u64::from(scale.target_workgroups), "{device_type:?}: {workgroups}");
        }
    }

    #[test]
    fn a_recommended_step_is_within_half_a_second_of_its_kind_of_device() {
        let large = ModelShape::new(32, 32, 8, 128);
        let small = ModelShape::new(30, 9, 3, 64);
        // Sustained rates of slow devices of their kind, in GFLOP a second.
        for (device_type, rate, rows) in [
            (DeviceType::DiscreteGpu, 7_400, [90, 512]),
            (DeviceType::IntegratedGpu, 1_400, [22, 512]),
            (DeviceType::Cpu, 100, [1, 88]),
        ] {
            let default = SchedulerConfig::default();
            for ((shape, parameters), rows) in
                [(&large, 8_000_000_000), (&small, 135_000_000)].into_iter().zip(rows)
            {
                let config = scheduler_config(Scale::of(device_type), shape, parameters);
                let flop_per_pair =
                    4 * u64::from(shape.num_query_heads() * shape.head_dim() * shape.num_layers());
                let weights = 2 * parameters * u64::from(config.step_tokens);
                let millis = (weights + config.step_work_budget * flop_per_pair) / (rate * 1_000_000);
                assert!(millis <= 520, "{device_type:?}: {millis} ms");
                assert_eq!(config.step_tokens, rows, "{device_type:?}");
                assert!(config.step_work_budget <= default.step_work_budget);
            }
        }
        let config = scheduler_config(Scale::of(DeviceType::Cpu), &large, u64::MAX);
        assert_eq!(config.step_tokens, 1);
        let endless = ModelShape::new(u32::MAX, u32::MAX, 1, u32::MAX);
        assert_eq!(scheduler_config(Scale::of(DeviceType::Cpu), &endless, 1).step_work_budget, 1);
    }

    #[test]
    fn a_step_is_split_by_the_type_of_device() {
        let shape = ModelShape::new(32, 32, 8, 128);
        let cache = CacheConfig::for_blocks(512, &shape, KvType::F16).expect("a pool of 8,192 tokens");
        // One row and a whole prompt, each of 8,192 tokens: (workgroups, GFLOP, decode items, prefill dispatches).
        let plan =
            |rows| StepPlan { query_starts: vec![0, rows], context_lens: vec![8192], ..StepPlan::default() };
        let (decode, prompt) = (plan(1), plan(8192));
        for (device_type, expected) in [
            (DeviceType::DiscreteGpu, (1024, 60, 64, 10)),
            (DeviceType::IntegratedGpu, (256, 15, 32, 37)),
            (DeviceType::VirtualGpu, (256, 15, 32, 37)),
            (DeviceType::Other, (256, 15, 32, 37)),
            (DeviceType::Cpu, (16, 1, 2, 610)),
        ] {
            let capabilities = Capabilities {
                max_binding_bytes: 1 << 27,
                max_tensor_bytes: 1 << 27,
                max_workgroups: 65_535,
                uniform_alignment: 256,
                storage_alignment: 256,
                subgroups: false,
                compact_shaders: false,
                scale: Scale::of(device_type),
            };
            let group = shape.groups().next().expect("a group");
            let tiles = QueryTiles::of(group, capabilities.compact_shaders);
            let options = AttentionOptions::default();
            let served = ServedGroup { group, block: cache.layout(), tiles };
            let config = split_config(served, &cache, &options, &capabilities);
            let split = |plan| {
                let mut split = WorkSplit::default();
                split.split(plan, &config);
                (split.decode_items.len(), split.prefill_dispatches.len())
            };
            let giga_flop = capabilities.scale.dispatch_flop / 1_000_000_000;
            let found = (config.target_workgroups, giga_flop, split(&decode).0, split(&prompt).1);
            assert_eq!(found, expected, "{device_type:?}");
        }
    }

    #[test]
    fn every_unit_of_the_largest_tensor_passes_the_mask_of_the_shaders() {
        let texts = [
            (16, include_str!("../../shaders/common/activations_f32.wgsl")),
            (8, include_str!("../../shaders/common/activations_f16.wgsl")),
        ];
        for (unit_bytes, text) in texts {
            let mask = text.split_once("UNIT_MASK = 0x").and_then(|(_, rest)| rest.split_once("u;"));
            let mask = u64::from_str_radix(mask.expect("the mask").0, 16).expect("a number");
            assert_eq!(mask.count_ones(), mask.trailing_ones());
            assert!(MAX_TENSOR_BYTES.div_ceil(unit_bytes) <= mask + 1);
            assert!(mask < u64::from(u32::MAX) / unit_bytes, "an address may wrap");
        }
    }
}
