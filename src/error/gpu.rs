//! Errors of the device part: creating it, binding tensors, preparing a step, recording it.

use crate::error::{ConfigError, PlanFault};
use std::error::Error;
use std::fmt;

/// Why the device part cannot be created on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceError {
    /// The cache cannot be laid out within the device's limits, or the model's shape is not supported.
    Config(ConfigError),
    /// The cache was made for another shape than the one given.
    ShapeMismatch {
        /// Which number differs.
        field: &'static str,
        /// The shape's.
        shape: u32,
        /// The cache's.
        cache: u32,
    },
    /// A limit that the application enabled is too low.
    LimitTooLow {
        /// What it is too low for: the kernels, or a buffer.
        object: &'static str,
        /// Its name in `wgpu::Limits`.
        limit: &'static str,
        /// What is needed.
        needed: u64,
        /// What the device has enabled.
        actual: u64,
    },
    /// The device has no memory for a buffer.
    OutOfMemory {
        /// What the buffer is for.
        object: &'static str,
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes that had been created before, and were given back.
        created_bytes: u64,
    },
    /// The device is lost.
    DeviceLost,
    /// The device refused an object for another reason.
    Refused {
        /// The object.
        object: &'static str,
        /// wgpu's reason, for the log.
        reason: String,
    },
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::ShapeMismatch { field, shape, cache } => {
                write!(f, "the shape has {field} {shape} but the cache was made for {cache}")
            }
            Self::LimitTooLow { object, limit, needed, actual } => {
                write!(f, "the device has enabled {limit} of {actual}, {object} need {needed}")
            }
            Self::OutOfMemory { object, asked_bytes, created_bytes } => write!(
                f,
                "no device memory for {asked_bytes} bytes of {object}, after {created_bytes} bytes had been created"
            ),
            Self::DeviceLost => f.write_str("the device is lost"),
            Self::Refused { object, reason } => write!(f, "the device refused {object}: {reason}"),
        }
    }
}

impl Error for DeviceError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            _ => None,
        }
    }
}

impl From<ConfigError> for DeviceError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

/// Why tensors cannot be bound. `tensor` is the name of the field in [`LayerTensors`](crate::LayerTensors).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BindError {
    /// The model has no such layer.
    NoSuchLayer {
        /// The layer asked for.
        layer: u32,
        /// Layers of the model.
        num_layers: u32,
    },
    /// The slice has no rows.
    NoRows {
        /// Which tensor.
        tensor: &'static str,
    },
    /// The buffer ends before the slice's last row does.
    TensorTooSmall {
        /// Which tensor.
        tensor: &'static str,
        /// Bytes of the buffer that the slice needs, its offset included.
        needed_bytes: u64,
        /// Bytes of the buffer.
        actual_bytes: u64,
    },
    /// The slice is larger than a storage binding may be: as the device's limits say, and at most 2 GiB - 4.
    TensorTooLarge {
        /// Which tensor.
        tensor: &'static str,
        /// Bytes of the slice.
        bytes: u64,
        /// Most bytes that a binding may have.
        max_bytes: u64,
    },
    /// The offset is not a multiple of the device's alignment.
    MisalignedOffset {
        /// Which tensor.
        tensor: &'static str,
        /// The offset.
        offset: u64,
        /// The alignment.
        alignment: u32,
    },
    /// Rows are closer than they are long.
    RowStrideTooSmall {
        /// Which tensor.
        tensor: &'static str,
        /// Elements from row to row.
        row_stride: u32,
        /// Elements of a row.
        row_elements: u32,
    },
    /// The row stride is not a multiple of four elements.
    RowStrideAlignment {
        /// Which tensor.
        tensor: &'static str,
        /// Elements from row to row.
        row_stride: u32,
    },
    /// The buffer was created without `BufferUsages::STORAGE`.
    MissingStorageUsage {
        /// Which tensor.
        tensor: &'static str,
    },
    /// The output lies in the buffer of an input, which one dispatch cannot read and write.
    OutputAliases {
        /// The input.
        tensor: &'static str,
    },
    /// The device has no memory for the binding's parameters.
    OutOfMemory {
        /// Bytes asked for.
        asked_bytes: u64,
    },
    /// The device is lost: see [`PagedAttention::rebuild`](crate::PagedAttention::rebuild).
    DeviceLost,
    /// The tensor's buffer was destroyed.
    Destroyed {
        /// Which tensor.
        tensor: &'static str,
    },
    /// The device refused the tensor's buffer: it is another device's. Buffers of another `wgpu::Instance` go unnoticed, by
    /// wgpu itself.
    Refused {
        /// Which tensor.
        tensor: &'static str,
    },
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NoSuchLayer { layer, num_layers } => {
                write!(f, "tensors are bound for layer {layer} of {num_layers}")
            }
            Self::NoRows { tensor } => write!(f, "{tensor} has no rows"),
            Self::TensorTooSmall { tensor, needed_bytes, actual_bytes } => {
                write!(f, "{tensor} needs {needed_bytes} bytes of a buffer of {actual_bytes}")
            }
            Self::TensorTooLarge { tensor, bytes, max_bytes } => {
                write!(f, "{tensor} takes {bytes} bytes but a storage binding may have {max_bytes}")
            }
            Self::MisalignedOffset { tensor, offset, alignment } => {
                write!(f, "the offset {offset} of {tensor} is not a multiple of {alignment}")
            }
            Self::RowStrideTooSmall { tensor, row_stride, row_elements } => {
                write!(f, "rows of {tensor} have {row_elements} elements but are {row_stride} apart")
            }
            Self::RowStrideAlignment { tensor, row_stride } => {
                write!(f, "the row stride {row_stride} of {tensor} is not a multiple of 4")
            }
            Self::MissingStorageUsage { tensor } => {
                write!(f, "the buffer of {tensor} was created without STORAGE usage")
            }
            Self::OutputAliases { tensor } => write!(f, "output lies in the buffer of {tensor}"),
            Self::OutOfMemory { asked_bytes } => write!(f, "no device memory for {asked_bytes} bytes"),
            Self::DeviceLost => f.write_str("the device is lost"),
            Self::Destroyed { tensor } => write!(f, "the buffer of {tensor} was destroyed"),
            Self::Refused { tensor } => {
                write!(f, "the device refused the buffer of {tensor}, which is another device's")
            }
        }
    }
}

impl Error for BindError {}

/// Why a plan cannot be prepared. [`StepsInFlight`](Self::StepsInFlight) and
/// [`TransfersInFlight`](Self::TransfersInFlight) pass, and memory may be had later. After
/// [`StepNotExecuted`](Self::StepNotExecuted) the cache must forget what the device has; after
/// [`DeviceLost`](Self::DeviceLost) comes a [`rebuild`](crate::PagedAttention::rebuild). Every other one means that the
/// plan and the attention object do not belong together, or that the plan is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrepareError {
    /// The plan was made for a cache of another configuration.
    Fingerprint {
        /// The plan's.
        plan: u64,
        /// The attention object's.
        attention: u64,
    },
    /// The plan comes from another cache than the one whose blocks are on the device: the one given to
    /// [`use_cache`](crate::PagedAttention::use_cache), or else that of the first plan that was prepared.
    CacheInstance {
        /// The plan's cache.
        plan: u64,
        /// The cache that is bound.
        attention: u64,
    },
    /// The step was prepared before, or is older than one that was.
    StepNotNewer {
        /// The plan's step.
        step: u64,
        /// The last step prepared.
        last: u64,
    },
    /// A number of the plan cannot be right: a bug in what made it. Nothing was uploaded.
    InvalidPlan(PlanFault),
    /// A block is to be brought back from a slot of the host pool that holds none.
    HostSlotEmpty {
        /// The slot.
        host_slot: u32,
    },
    /// A block is to be brought back before it has arrived in the host pool, as
    /// [`poll_transfers`](crate::PagedAttention::poll_transfers) reports it.
    HostSlotAwaited {
        /// The slot.
        host_slot: u32,
        /// The step whose block the slot is waiting for.
        step: u64,
    },
    /// A step was committed that has not run on this device: it was not prepared, not all of it was recorded, or an encoder
    /// that it was recorded into was dropped. What it was to write is missing. Call
    /// [`Scheduler::forget_device`](crate::Scheduler::forget_device), or
    /// [`KvCache::forget_device`](crate::KvCache::forget_device), and plan again: all that lay on the device is computed
    /// again then. No rebuild is needed.
    StepNotExecuted {
        /// The first such step.
        step: u64,
    },
    /// A fixed-span step needs more partial results than the scratch buffer holds.
    ScratchTooSmall {
        /// Partial results needed.
        needed: u64,
        /// Partial results that fit.
        available: u64,
    },
    /// The step's metadata is larger than a storage binding may be.
    MetadataTooLarge {
        /// Bytes of metadata.
        bytes: u64,
        /// Most bytes that a binding may have.
        max_bytes: u64,
    },
    /// As many steps as the library keeps apart are prepared or in flight. Submit them, and poll the device so that
    /// wgpu learns that they have completed.
    StepsInFlight {
        /// Most steps that may be in flight.
        max: u32,
    },
    /// As many steps that swap blocks are on their way as the library keeps apart. Submit them, poll the device, and
    /// collect them with [`poll_transfers`](crate::PagedAttention::poll_transfers).
    TransfersInFlight {
        /// Most steps that may be on their way.
        max: u32,
    },
    /// The device is lost, or was given up by a [`rebuild`](crate::PagedAttention::rebuild) that failed. Drop the plan, and
    /// rebuild on another device.
    DeviceLost,
    /// The plan was made before its cache forgot the device that was lost, and may read what lay there: call
    /// [`Scheduler::forget_device`](crate::Scheduler::forget_device), or
    /// [`KvCache::forget_device`](crate::KvCache::forget_device), and plan again.
    DeviceNotForgotten {
        /// Devices that the plan's cache had forgotten.
        forgotten: u64,
        /// Devices that it must have forgotten.
        needed: u64,
    },
    /// The device has no memory for a staging buffer of the step's swaps.
    StagingOutOfMemory {
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes of the staging buffers of that kind that there are.
        held_bytes: u64,
    },
    /// The device has no memory for the step's metadata.
    OutOfMemory {
        /// Bytes asked for.
        asked_bytes: u64,
    },
}

impl fmt::Display for PrepareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::InvalidPlan(fault) => fault.fmt(f),
            Self::Fingerprint { plan, attention } => write!(
                f,
                "the plan is for a cache of configuration {plan:#018x}, the attention object for {attention:#018x}"
            ),
            Self::CacheInstance { plan, attention } => {
                write!(
                    f,
                    "the plan comes from cache {plan} but the blocks on the device are those of {attention}"
                )
            }
            Self::StepNotNewer { step, last } => {
                write!(f, "step {step} is not newer than step {last}, which was prepared before")
            }
            Self::HostSlotEmpty { host_slot } => {
                write!(f, "slot {host_slot} of the host pool holds no block to bring back")
            }
            Self::HostSlotAwaited { host_slot, step } => {
                write!(f, "the block of step {step} has not arrived in slot {host_slot} of the host pool")
            }
            Self::StepNotExecuted { step } => {
                write!(f, "step {step} was committed, but has not run on this device")
            }
            Self::ScratchTooSmall { needed, available } => {
                write!(f, "the step has {needed} partial results, the scratch buffer holds {available}")
            }
            Self::MetadataTooLarge { bytes, max_bytes } => {
                write!(
                    f,
                    "the step's metadata takes {bytes} bytes but a storage binding may have {max_bytes}"
                )
            }
            Self::StepsInFlight { max } => {
                write!(f, "{max} steps are in flight: submit them, and poll the device")
            }
            Self::TransfersInFlight { max } => {
                write!(f, "the swaps of {max} steps are on their way: submit, poll the device, collect them")
            }
            Self::DeviceLost => f.write_str("the device is lost"),
            Self::DeviceNotForgotten { forgotten, needed } => write!(
                f,
                "the plan was made when {forgotten} lost devices had been forgotten instead of {needed}"
            ),
            Self::StagingOutOfMemory { asked_bytes, held_bytes } => write!(
                f,
                "no device memory for {asked_bytes} bytes of staging, besides {held_bytes} bytes that are held"
            ),
            Self::OutOfMemory { asked_bytes } => {
                write!(f, "no device memory for {asked_bytes} bytes of step metadata")
            }
        }
    }
}

impl Error for PrepareError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::InvalidPlan(fault) => Some(fault),
            _ => None,
        }
    }
}

impl From<PlanFault> for PrepareError {
    fn from(fault: PlanFault) -> Self {
        Self::InvalidPlan(fault)
    }
}

/// Why a layer cannot be recorded. The step should be dropped, and its plan too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordError {
    /// The tensors were bound for layers whose rows have other lengths.
    TensorsOfOtherLayer {
        /// The layer that was to be recorded.
        layer: u32,
    },
    /// The step was prepared by another attention object, or before a rebuild.
    ForeignStep,
    /// The tensors were bound by another attention object, or before a rebuild.
    ForeignTensors,
    /// `record_transfers` was not called before the first layer, or before `record_block_copies`.
    TransfersMissing,
    /// `record_transfers` was called twice, or after a layer.
    TransfersOutOfOrder,
    /// `record_block_copies` was not called before the first layer.
    BlockCopiesMissing,
    /// `record_block_copies` was called twice, or after a layer.
    BlockCopiesOutOfOrder,
    /// Layers are recorded in order, each once.
    LayerOutOfOrder {
        /// The layer asked for.
        layer: u32,
        /// The layer that is next; the number of layers when all are recorded.
        expected: u32,
    },
    /// The step has more rows than the tensors were bound with.
    TooManyRows {
        /// Rows of the step.
        rows: u32,
        /// Rows of the smallest tensor.
        capacity: u32,
    },
}

impl fmt::Display for RecordError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::TensorsOfOtherLayer { layer } => {
                write!(
                    f,
                    "the tensors were bound for a layer whose rows are not as long as those of layer {layer}"
                )
            }
            Self::ForeignStep => f.write_str("the step was prepared by another attention object"),
            Self::ForeignTensors => f.write_str("the tensors were bound by another attention object"),
            Self::TransfersMissing => f.write_str("record_transfers has not been called for the step"),
            Self::TransfersOutOfOrder => f.write_str("record_transfers was called twice or too late"),
            Self::BlockCopiesMissing => f.write_str("record_block_copies has not been called for the step"),
            Self::BlockCopiesOutOfOrder => f.write_str("record_block_copies was called twice or too late"),
            Self::LayerOutOfOrder { layer, expected } => {
                write!(f, "layer {layer} was recorded where layer {expected} is next")
            }
            Self::TooManyRows { rows, capacity } => {
                write!(f, "the step has {rows} rows, the tensors were bound with {capacity}")
            }
        }
    }
}

impl Error for RecordError {}
