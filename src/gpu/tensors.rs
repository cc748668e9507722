//! The application's tensors: where queries, keys, values and results of a layer lie.
//!
//! The application binds its buffers once and keeps the result. All layers may share one set, or have one each.

use crate::error::BindError;
use crate::gpu::memory::create_uniform;
use crate::gpu::options::ActivationType;
use crate::gpu::params::TensorParams;
use crate::gpu::pipelines::Layouts;
use crate::gpu::scope::{Refusal, guarded};
use std::num::NonZeroU64;
use wgpu::{
    BindGroup, BindGroupDescriptor, BindGroupEntry, BindGroupLayout, BindingResource, BufferBinding,
    BufferUsages,
};

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
    pub(super) row_lens: RowLens,
    pub(super) append: BindGroup,
    pub(super) attend: BindGroup,
}

impl BoundTensors {
    /// The most rows that a step recorded with these tensors may have.
    pub fn rows(&self) -> u32 {
        self.rows
    }
}

/// Elements of a layer's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowLens {
    pub(super) query: u32,
    pub(super) key: u32,
    pub(super) value: u32,
    pub(super) output: u32,
}

/// What binding needs to know about the attention object.
pub(super) struct Binder<'a> {
    pub(super) device: &'a wgpu::Device,
    pub(super) layouts: &'a Layouts,
    pub(super) attention: u64,
    pub(super) row_lens: RowLens,
    pub(super) activations: ActivationType,
    pub(super) storage_alignment: u32,
    pub(super) max_tensor_bytes: u64,
}

impl Binder<'_> {
    pub(super) fn bind(&self, tensors: &LayerTensors<'_>) -> Result<BoundTensors, BindError> {
        let LayerTensors { query, key, value, output } = tensors;
        let row_lens = self.row_lens;
        let query_bytes = self.check("query", query, row_lens.query)?;
        let key_bytes = self.check("key", key, row_lens.key)?;
        let value_bytes = self.check("value", value, row_lens.value)?;
        let output_bytes = self.check("output", output, row_lens.output)?;
        for (tensor, input) in [("query", query), ("key", key), ("value", value)] {
            if input.buffer == output.buffer {
                return Err(BindError::OutputAliases { tensor });
            }
        }
        let rows = query.rows.min(key.rows).min(value.rows).min(output.rows);
        let params = TensorParams {
            query_stride: query.row_stride / 4,
            key_stride: key.row_stride / 4,
            value_stride: value.row_stride / 4,
            output_stride: output.row_stride / 4,
            num_rows: rows,
            padding: [0; 3],
        };
        let bytes = bytemuck::bytes_of(&params);
        let params = create_uniform(self.device, "paged_kv.tensors", bytes)
            .map_err(|refusal| bind_error(refusal, "parameters", bytes.len() as u64))?;
        let tensor = |name, slice, bytes| Tensor { name, slice, bytes };
        let append = self.group(
            "paged_kv.append_tensors",
            &self.layouts.append_tensors,
            &params,
            [tensor("key", key, key_bytes), tensor("value", value, value_bytes)],
        )?;
        let attend = self.group(
            "paged_kv.attention_tensors",
            &self.layouts.attention_tensors,
            &params,
            [tensor("query", query, query_bytes), tensor("output", output, output_bytes)],
        )?;
        Ok(BoundTensors { attention: self.attention, rows, row_lens, append, attend })
    }

    fn group(
        &self,
        label: &str,
        layout: &BindGroupLayout,
        params: &wgpu::Buffer,
        [first, second]: [Tensor<'_>; 2],
    ) -> Result<BindGroup, BindError> {
        let create = |layout, first: &Tensor<'_>, second: &Tensor<'_>| {
            let resources = [params.as_entire_binding(), first.resource(), second.resource()];
            let entries: Vec<_> = (0..)
                .zip(resources)
                .map(|(binding, resource)| BindGroupEntry { binding, resource })
                .collect();
            let descriptor = BindGroupDescriptor { label: Some(label), layout, entries: &entries };
            guarded(self.device, || self.device.create_bind_group(&descriptor))
        };
        create(layout, &first, &second).map_err(|refusal| {
            // Which of the two it was, the first one tells, bound by itself where both are only read.
            let first_is_refused = create(&self.layouts.append_tensors, &first, &first).is_err();
            let refused = if first_is_refused { &first } else { &second };
            bind_error(refusal, refused.name, refused.bytes)
        })
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
        let bytes = elements.saturating_mul(u64::from(self.activations.bytes()));
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

/// A slice that was checked.
struct Tensor<'a> {
    name: &'static str,
    slice: &'a TensorSlice<'a>,
    bytes: u64,
}

impl Tensor<'_> {
    fn resource(&self) -> BindingResource<'_> {
        BindingResource::Buffer(BufferBinding {
            buffer: self.slice.buffer,
            offset: self.slice.offset,
            size: NonZeroU64::new(self.bytes),
        })
    }
}

fn bind_error(refusal: Refusal, tensor: &'static str, asked_bytes: u64) -> BindError {
    match refusal {
        Refusal::Lost => BindError::DeviceLost,
        Refusal::OutOfMemory => BindError::OutOfMemory { asked_bytes },
        // wgpu tells them apart by its text only.
        Refusal::Other(error) if error.to_string().contains("has been destroyed") => {
            BindError::Destroyed { tensor }
        }
        Refusal::Other(_) => BindError::Refused { tensor },
    }
}
