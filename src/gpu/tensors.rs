//! The application's tensors: where queries, keys, values and results of a layer lie.
//!
//! The application binds its buffers once and keeps the result. All layers may share one set, or have one each.

use crate::config::BlockLayout;
use crate::error::BindError;
use crate::gpu::memory::create_uniform;
use crate::gpu::options::ActivationType;
use crate::gpu::params::TensorParams;
use crate::gpu::pipelines::Layouts;
use crate::gpu::scope::{Refusal, guarded};
use std::num::NonZeroU64;
use wgpu::{BindGroupDescriptor, BindGroupEntry, BindingResource, BufferBinding, BufferUsages};

/// Rows of [activations](crate::ActivationType) within a buffer of the application.
///
/// Row `i` starts `offset + row_stride * i * element bytes` bytes into the buffer. With a row stride larger than a row, several
/// tensors may lie side by side in one buffer, as a fused projection writes them.
#[derive(Clone, Copy, Debug)]
pub struct TensorSlice<'a> {
    /// The buffer, with `STORAGE` usage.
    pub buffer: &'a wgpu::Buffer,
    /// First byte; a multiple of the device's `min_storage_buffer_offset_alignment`.
    pub offset: u64,
    /// Elements from the start of a row to the start of the next; a multiple of 4.
    pub row_stride: u32,
    /// Rows that the slice has: the most that a step may have.
    pub rows: u32,
}

/// The four tensors of a layer, all of the [element type](crate::AttentionOptions::activations) that was chosen.
#[derive(Clone, Copy, Debug)]
pub struct LayerTensors<'a> {
    /// Queries, `[rows, num_query_heads, head_dim]`, positions encoded.
    pub query: TensorSlice<'a>,
    /// Keys of the new rows, `[rows, num_kv_heads, head_dim]`, positions encoded.
    pub key: TensorSlice<'a>,
    /// Values of the new rows, `[rows, num_kv_heads, v_head_dim]`.
    pub value: TensorSlice<'a>,
    /// Results, `[rows, num_query_heads, v_head_dim]`; in none of the other tensors' buffers. Padding rows are left as
    /// they are.
    pub output: TensorSlice<'a>,
}

/// Tensors that were checked and bound, to be kept and used in every step.
#[derive(Debug)]
pub struct BoundTensors {
    pub(super) attention: u64,
    pub(super) rows: u32,
    pub(super) append: wgpu::BindGroup,
    pub(super) attend: wgpu::BindGroup,
}

impl BoundTensors {
    /// The most rows that a step recorded with these tensors may have.
    pub fn rows(&self) -> u32 {
        self.rows
    }
}

/// What binding needs to know about the attention object.
pub(super) struct Binder<'a> {
    pub(super) device: &'a wgpu::Device,
    pub(super) layouts: &'a Layouts,
    pub(super) attention: u64,
    pub(super) block: BlockLayout,
    pub(super) num_query_heads: u32,
    pub(super) activations: ActivationType,
    pub(super) storage_alignment: u32,
    pub(super) max_tensor_bytes: u64,
}

impl Binder<'_> {
    pub(super) fn bind(&self, tensors: &LayerTensors<'_>) -> Result<BoundTensors, BindError> {
        let LayerTensors { query, key, value, output } = tensors;
        let block = &self.block;
        let query_bytes = self.check("query", query, self.num_query_heads * block.k_head_dim)?;
        let key_bytes = self.check("key", key, block.num_kv_heads * block.k_head_dim)?;
        let value_bytes = self.check("value", value, block.num_kv_heads * block.v_head_dim)?;
        let output_bytes = self.check("output", output, self.num_query_heads * block.v_head_dim)?;
        for (tensor, input) in [("query", query), ("key", key), ("value", value)] {
            if input.buffer == output.buffer {
                return Err(BindError::OutputAliases { tensor });
            }
        }
        let params = TensorParams {
            query_stride: query.row_stride / 4,
            key_stride: key.row_stride / 4,
            value_stride: value.row_stride / 4,
            output_stride: output.row_stride / 4,
        };
        let bytes = bytemuck::bytes_of(&params);
        let refused = |refusal| match refusal {
            Refusal::OutOfMemory => BindError::OutOfMemory { asked_bytes: bytes.len() as u64 },
            Refusal::Other(_) => BindError::Refused,
        };
        let params = create_uniform(self.device, "paged_kv.tensors", bytes).map_err(refused)?;
        let group = |label, layout, first: (&TensorSlice<'_>, u64), second: (&TensorSlice<'_>, u64)| {
            let resources = [params.as_entire_binding(), resource(first), resource(second)];
            let entries: Vec<_> = (0..)
                .zip(resources)
                .map(|(binding, resource)| BindGroupEntry { binding, resource })
                .collect();
            self.device.create_bind_group(&BindGroupDescriptor {
                label: Some(label),
                layout,
                entries: &entries,
            })
        };
        let (append, attend) = guarded(self.device, || {
            (
                group(
                    "paged_kv.append_tensors",
                    &self.layouts.append_tensors,
                    (key, key_bytes),
                    (value, value_bytes),
                ),
                group(
                    "paged_kv.attention_tensors",
                    &self.layouts.attention_tensors,
                    (query, query_bytes),
                    (output, output_bytes),
                ),
            )
        })
        .map_err(refused)?;
        let rows = query.rows.min(key.rows).min(value.rows).min(output.rows);
        Ok(BoundTensors { attention: self.attention, rows, append, attend })
    }

    /// Checks a slice whose rows have `row_elements` elements and returns its bytes.
    fn check(
        &self,
        tensor: &'static str,
        slice: &TensorSlice<'_>,
        row_elements: u32,
    ) -> Result<u64, BindError> {
        let row_stride = slice.row_stride;
        if slice.rows == 0 {
            return Err(BindError::NoRows { tensor });
        }
        if !slice.buffer.usage().contains(BufferUsages::STORAGE) {
            return Err(BindError::MissingStorageUsage { tensor });
        }
        if !slice.offset.is_multiple_of(u64::from(self.storage_alignment)) {
            return Err(BindError::MisalignedOffset {
                tensor,
                offset: slice.offset,
                alignment: self.storage_alignment,
            });
        }
        if row_stride < row_elements {
            return Err(BindError::RowStrideTooSmall { tensor, row_stride, row_elements });
        }
        if !row_stride.is_multiple_of(4) {
            return Err(BindError::RowStrideAlignment { tensor, row_stride });
        }
        let elements = u64::from(slice.rows - 1) * u64::from(row_stride) + u64::from(row_elements);
        let bytes = elements * u64::from(self.activations.bytes());
        let needed_bytes = slice.offset.saturating_add(bytes);
        if needed_bytes > slice.buffer.size() {
            return Err(BindError::TensorTooSmall {
                tensor,
                needed_bytes,
                actual_bytes: slice.buffer.size(),
            });
        }
        if bytes > self.max_tensor_bytes {
            return Err(BindError::TensorTooLarge { tensor, bytes, max_bytes: self.max_tensor_bytes });
        }
        Ok(bytes)
    }
}

fn resource<'a>((slice, bytes): (&TensorSlice<'a>, u64)) -> BindingResource<'a> {
    BindingResource::Buffer(BufferBinding {
        buffer: slice.buffer,
        offset: slice.offset,
        size: NonZeroU64::new(bytes),
    })
}
