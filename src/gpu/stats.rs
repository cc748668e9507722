//! What the attention object has made and done, in numbers.

/// Sizes and counts of an attention object, and of the step recorded last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttentionStats {
    /// Bytes of all arenas.
    pub arena_bytes: u64,
    /// Bytes of the block tables.
    pub table_bytes: u64,
    /// Bytes of the scratch buffer for partial results.
    pub scratch_bytes: u64,
    /// Bytes of the metadata slots, and of as much staging.
    pub metadata_bytes: u64,
    /// Bytes of the staging buffers of swaps, in flight and idle. Zero until blocks are swapped.
    pub staging_bytes: u64,
    /// Bytes of main memory that the host pool has taken: it takes a block's when a slot is used for the first time.
    pub host_pool_bytes: u64,
    /// Buffers created since the start.
    pub buffers_created: u32,
    /// Bind groups created since the start.
    pub bind_groups_created: u32,
    /// Pipelines created since the start.
    pub pipelines_created: u32,
    /// Dispatches of the step recorded last, up to now.
    pub step_dispatches: u32,
    /// Bytes uploaded for the step prepared last, returning blocks not counted.
    pub step_uploaded_bytes: u64,
    /// Blocks that have arrived in the host pool since the start.
    pub swapped_out_blocks: u64,
    /// Their bytes.
    pub swapped_out_bytes: u64,
    /// Blocks that have been brought back from the host pool since the start.
    pub swapped_in_blocks: u64,
    /// Their bytes.
    pub swapped_in_bytes: u64,
}
