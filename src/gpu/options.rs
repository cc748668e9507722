//! What may be chosen when the attention object is made.

use std::fmt;

/// Element type of the application's tensors: queries, keys, values and results.
///
/// All sums are in f32 whatever it is. f16 needs no `SHADER_F16`; what is written in it is rounded to nearest even, and
/// magnitudes beyond 65504 become 65504.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ActivationType {
    /// 32-bit floating point.
    #[default]
    F32,
    /// 16-bit floating point.
    F16,
}

impl ActivationType {
    /// Bytes of an element.
    pub fn bytes(self) -> u32 {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }
}

impl fmt::Display for ActivationType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
        })
    }
}

/// Options of [`PagedAttention::with_options`](crate::PagedAttention::with_options). The defaults suit every device.
///
/// ```
/// # use paged_kv::AttentionOptions;
/// // Bits of a row that do not depend on what else is in the batch.
/// let options = AttentionOptions::default().batch_invariant(512);
/// ```
#[derive(Clone, Debug, Default)]
pub struct AttentionOptions {
    pub(super) activations: ActivationType,
    pub(super) fixed_span_tokens: Option<u32>,
    pub(super) batch_invariant: Option<u32>,
    pub(super) checked_shaders: bool,
    pub(super) compact_shaders: Option<bool>,
    pub(super) disallow_subgroups: bool,
    pub(super) dispatch_work_budget: Option<u64>,
    pub(super) scratch_bytes: Option<u64>,
    pub(super) target_workgroups: Option<u32>,
    pub(super) staging_bytes: Option<u64>,
    pub(super) pipeline_cache: Option<wgpu::PipelineCache>,
    pub(super) replaced_fragments: Vec<(&'static str, String)>,
}

impl AttentionOptions {
    /// Element type of the tensors that are bound, f32 by default. It is independent of the type that the cache stores.
    pub fn activations(mut self, activations: ActivationType) -> Self {
        self.activations = activations;
        self
    }

    /// Cuts the keys of every sequence with one row into spans of `tokens` tokens, whatever else is in the batch, and those
    /// of no other sequence, so that the bits of such a row do not depend on its neighbours. Rounded up to a multiple
    /// of the block size and of 128, and at least that.
    ///
    /// That says nothing of rows which are computed together: which rows of a prompt are is up to the scheduler, and to
    /// the other sequences of the step. For bits that depend on no such thing there is
    /// [`batch_invariant`](Self::batch_invariant).
    ///
    /// The spans' partial results must fit into the scratch buffer, which is made large enough for `max_sequences` rows
    /// of the declared maximum unless [`scratch_bytes`](Self::scratch_bytes) or the device's limits are lower;
    /// a step that needs more is [`PrepareError::ScratchTooSmall`](crate::PrepareError::ScratchTooSmall).
    pub fn fixed_span_tokens(mut self, tokens: u32) -> Self {
        self.fixed_span_tokens = Some(tokens);
        self
    }

    /// Computes every row the same way, whatever step it is in: the bits of its result depend on its query and its keys and
    /// values alone. Neither its neighbours in the batch change them, nor the chunks that its prompt is cut into, nor
    /// preemption, swaps, and blocks found in the prefix cache. So a sequence has the bits that it has alone, as far as the
    /// application's own kernels keep to the same; on another device, or with another `span_tokens`, it has others. Takes the
    /// place of [`fixed_span_tokens`](Self::fixed_span_tokens).
    ///
    /// What it costs: single rows go through the kernel for several rows, which computes eight queries where a kv head has
    /// perhaps one; every row's keys are cut into spans of `span_tokens` tokens (rounded up to a multiple of the block size
    /// and of 128) although the device may be full without, or not be filled with them; every row is merged, also where there is one span; no
    /// tile of keys is walked without guards; and where the partial results of a step's rows do not fit into the
    /// scratch buffer ([`scratch_bytes`](Self::scratch_bytes), 32 MiB), attention and merge take them in groups, one after the
    /// other. A scratch buffer that does not hold one row's is
    /// [`PrepareError::ScratchTooSmall`](crate::PrepareError::ScratchTooSmall).
    pub fn batch_invariant(mut self, span_tokens: u32) -> Self {
        self.batch_invariant = Some(span_tokens);
        self
    }

    /// Compiles the shaders with wgpu's bounds and loop checks. By default they are left out: the shaders only ever see
    /// plans whose ids `prepare` has checked. On the adapters that were tested the results are the same bits.
    pub fn checked_shaders(mut self, checked: bool) -> Self {
        self.checked_shaders = checked;
        self
    }

    /// Compiles attention kernels that serve two queries at a time instead of up to eight. Their text is a quarter as long,
    /// which some drivers take a small part of the time to compile (llvmpipe on GL); but keys and values are read for every
    /// two queries anew. By default it is done on GL, where drivers are slow and compile on the thread that submits.
    pub fn compact_shaders(mut self, compact: bool) -> Self {
        self.compact_shaders = Some(compact);
        self
    }

    /// Whether subgroup operations may be used where the device has enabled them; true by default.
    pub fn allow_subgroups(mut self, allow: bool) -> Self {
        self.disallow_subgroups = !allow;
        self
    }

    /// (row, key) pairs that one dispatch of attention may have, so that no dispatch holds up the frames that are drawn
    /// beside it. The default is about 60 GFLOP of attention per dispatch on a discrete GPU, 15 on others and 1 on a
    /// software adapter.
    ///
    /// What is not cut may exceed it: a tile of queries over one span of keys (long spans are cut where there is scratch
    /// for their partial results), and the dispatches that only move bytes. Those move at most the tensors (append), the
    /// scratch buffer (merge) or one arena (block copies), each less than 2 GiB.
    ///
    /// It bounds dispatches, not submissions, and a driver's watchdog counts submissions: those are bounded by the step
    /// ([`SchedulerConfig::step_tokens`](crate::SchedulerConfig::step_tokens),
    /// [`step_work_budget`](crate::SchedulerConfig::step_work_budget)), for which there is
    /// [`recommended_scheduler_config`](crate::recommended_scheduler_config), and by how many of its layers are submitted at
    /// once.
    pub fn dispatch_work_budget(mut self, pairs: u64) -> Self {
        self.dispatch_work_budget = Some(pairs);
        self
    }

    /// Most bytes of the scratch buffer for partial results; 32 MiB by default.
    pub fn scratch_bytes(mut self, bytes: u64) -> Self {
        self.scratch_bytes = Some(bytes);
        self
    }

    /// Bytes of staging that are kept for block swaps, once for those that leave and once for those that return; 64 MiB
    /// each by default.
    ///
    /// They are cut into four buffers, none too small for one block's range of an arena, and are taken when blocks are
    /// swapped for the first time. A step that swaps more takes more buffers, until it is collected by
    /// [`poll_transfers`](crate::PagedAttention::poll_transfers); as many as steps usually swap should be kept, because
    /// making a buffer costs several times its copy.
    pub fn staging_bytes(mut self, bytes: u64) -> Self {
        self.staging_bytes = Some(bytes);
        self
    }

    /// Where compiled shaders are looked up and kept, if the device has `Features::PIPELINE_CACHE`: where an application
    /// writes its data to a file, the driver compiles nothing at the second start. Most drivers keep a cache of their own.
    ///
    /// A cache of another device is [`DeviceError::Refused`](crate::DeviceError::Refused) when the attention object is made.
    pub fn pipeline_cache(mut self, cache: wgpu::PipelineCache) -> Self {
        self.pipeline_cache = Some(cache);
        self
    }

    /// Takes other texts for some fragments of the shaders, by the fragments' names (`common/layout.wgsl`): how a bench
    /// makes a twin of the kernels that differs from them in one thing. Not part of the stable interface.
    ///
    /// # Safety
    /// Unless the shaders are [checked](Self::checked_shaders), the texts must index no array out of bounds and end
    /// every loop, for every plan that `prepare` accepts.
    #[doc(hidden)]
    #[allow(unsafe_code)]
    pub unsafe fn replaced_fragments(mut self, replaced: Vec<(&'static str, String)>) -> Self {
        self.replaced_fragments = replaced;
        self
    }

    /// Workgroups that fill the device; rows are split until there are about as many. wgpu does not tell how many
    /// cores a device has: the default goes by the kind of device.
    pub fn target_workgroups(mut self, workgroups: u32) -> Self {
        self.target_workgroups = Some(workgroups);
        self
    }
}
