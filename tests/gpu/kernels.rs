//! Every kernel, as an application runs them, against the f64 attention and the twin's words.
//!
//! One cell is one attention object: shapes, types, block size, reductions, checks and split. The cells cover every block
//! size, head size, head ratio and pair of types, each with others of the rest. In each
//!
//! 1. a ragged step fills sequences of 0, 1, P-1, P, P+1 and 2P tokens, and one long enough for several spans, over blocks
//!    in shuffled order;
//! 2. a second step decodes some of them and prefills chunks behind the others, a few rows behind a long one among them,
//!    four times over, with other poison in the slots that no token has.
//!
//! Both again with naga's checks where the cell has none, and without where it has them: no bit may differ.
//!
//! Outputs are within 1e-5 of the f64 attention over the stored keys and values, relative to the head's largest element:
//! f32 rounds each of a few hundred terms to 6e-8, and `exp2` is allowed a few units in the last place. The poison must
//! not change a bit of them. The arena's words equal the twin's, bit for bit. f16 activations are inputs that f16 has, and
//! outputs rounded to it, which is 2^-11 more.

use half::f16;
use paged_kv::shaders::TILE;
use paged_kv::{ActivationType, AttentionOptions, KvFormat, KvType, TableId};

use crate::device::{TestAdapter, on_each_adapter};
use crate::device_rig::{DeviceRig, on_each_adapter_but_gl, open};
use crate::rig::{Poison, Rig, Tensors};

pub(crate) const TOLERANCE: f64 = 1e-5;
const HALF_ROUNDING: f64 = 1.0 / 2048.0;

/// How rows are split.
#[derive(Clone, Copy, Debug)]
enum Spans {
    One,
    Many,
    /// Whatever else is in the batch, spans of a tile or a block.
    Fixed,
}

#[derive(Clone, Copy, Debug)]
struct Cell {
    block_size: u32,
    /// Query and kv heads.
    heads: (u32, u32),
    /// Key and value head size.
    dims: (u32, u32),
    types: (KvType, KvType),
    subgroups: bool,
    checked: bool,
    spans: Spans,
    activations: ActivationType,
    /// Whether the texts serve two queries at a time, where the library would not choose so itself.
    compact: Option<bool>,
}

impl Cell {
    fn options(&self) -> AttentionOptions {
        let options =
            AttentionOptions::default().allow_subgroups(self.subgroups).checked_shaders(self.checked);
        let options = match self.compact {
            Some(compact) => options.compact_shaders(compact),
            None => options,
        };
        match self.spans {
            Spans::One => options.fixed_span_tokens(u32::MAX),
            Spans::Many => options.target_workgroups(4096),
            Spans::Fixed => options.fixed_span_tokens(1),
        }
    }

    fn rig(&self) -> Rig {
        let (query_heads, kv_heads) = self.heads;
        let (k_type, v_type) = self.types;
        let format = KvFormat::new(k_type, v_type).with_v_head_dim(self.dims.1);
        // Room for all tokens of a run, 14 partly filled blocks among them.
        let num_blocks = (600 + 13 * self.block_size).max(900).div_ceil(self.block_size) + 28;
        Rig::new((query_heads, kv_heads, self.dims.0), format, self.block_size, num_blocks)
    }

    /// The cell as it is, and but for GL, where kernels take long to compile, with checks the other way round: no bit of
    /// an output may depend on them. A compiler may contract the two texts differently; none here does.
    fn run(&self, adapter: &TestAdapter) {
        let outputs = self.run_once(adapter, &Poison::ALL);
        if adapter.info().backend != wgpu::Backend::Gl {
            let other = Self { checked: !self.checked, ..*self };
            assert!(other.run_once(adapter, &[Poison::Nan]) == outputs, "{self:?}: checks change the output");
        }
    }

    /// The outputs' bits, step by step.
    fn run_once(&self, adapter: &TestAdapter, poisons: &[Poison]) -> [Vec<u32>; 2] {
        let gpu = open(adapter);
        let mut rig = DeviceRig::with_activations(&gpu, self.rig(), self.options(), self.activations);
        rig.host.shuffle_free_blocks();
        let p = self.block_size;
        let lens = [0, 1, p - 1, p, p + 1, 2 * p, TILE.max(p) * 2 + 37];
        let decoded: Vec<TableId> = (0..7).map(|_| rig.host.open()).collect();
        let chunked: Vec<TableId> = (0..7).map(|_| rig.host.open()).collect();
        let fill: Vec<(TableId, u32)> = decoded
            .iter()
            .zip(lens)
            .chain(chunked.iter().zip(lens))
            .filter(|(_, len)| *len > 0)
            .map(|(&table, len)| (table, len))
            .collect();
        let filled = self.step(&mut rig, &fill, &[Poison::Nan]);

        let chunks = if p > 16 { [2, 9, 3, p + 1, 1, 5, 7] } else { [2, p, p + 1, 3, 2 * p, 5, 7] };
        let decodes = decoded.iter().map(|&table| (table, 1));
        let pushes: Vec<(TableId, u32)> = decodes
            .zip(chunked.iter().copied().zip(chunks))
            .flat_map(|(decode, chunk)| [decode, chunk])
            .collect();
        let mixed = self.step(&mut rig, &pushes, poisons);
        let dispatches = rig.attention.stats().step_dispatches;
        let expected = if matches!(self.spans, Spans::One) { 3 } else { 4 };
        assert_eq!(dispatches, expected, "append, decode, prefill, and a merge if there are spans");
        [filled, mixed]
    }

    /// The numbers as the application's kernels write them.
    fn activated(&self, mut tensors: Tensors) -> Tensors {
        if self.activations == ActivationType::F16 {
            for tensor in [&mut tensors.query, &mut tensors.key, &mut tensors.value] {
                tensor.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32());
            }
        }
        tensors
    }

    fn tolerance(&self) -> f64 {
        match self.activations {
            ActivationType::F16 => TOLERANCE + HALF_ROUNDING,
            _ => TOLERANCE,
        }
    }

    /// One step, planned and run once per poison, and committed: its output's bits.
    fn step(&self, rig: &mut DeviceRig<'_>, pushes: &[(TableId, u32)], poisons: &[Poison]) -> Vec<u32> {
        let tables: Vec<TableId> = pushes.iter().map(|(table, _)| *table).collect();
        let mut outputs: Vec<Vec<u32>> = Vec::new();
        let mut tensors = None;
        for &poison in poisons {
            // Rolls the plan before it back: the same rows in the same slots.
            let plan = rig.host.plan(pushes);
            let tensors = tensors.get_or_insert_with(|| self.activated(rig.host.tensors(&plan)));
            rig.host.poison_unused(&tables, poison);
            rig.upload_blocks();
            rig.host.write(&plan, tensors);
            let output = rig.run(&plan, std::slice::from_ref(tensors)).swap_remove(0);
            rig.assert_same_blocks();
            rig.host.assert_dense(&plan, tensors, &output, self.tolerance());
            outputs.push(output.iter().map(|x| x.to_bits()).collect());
            if outputs.len() == poisons.len() {
                rig.host.commit(plan);
            }
        }
        assert!(
            outputs.iter().all(|output| *output == outputs[0]),
            "{self:?}: unused slots reach the output"
        );
        outputs.swap_remove(0)
    }
}

const F32: (KvType, KvType) = (KvType::F32, KvType::F32);
const F16: (KvType, KvType) = (KvType::F16, KvType::F16);

macro_rules! cells {
    ($($name:ident: $on:ident, $block_size:literal, $heads:expr, $dims:expr, $types:expr,
       $subgroups:literal, $checked:literal, $spans:ident, $activations:ident, $compact:expr;)*) => {$(
        #[test]
        fn $name() {
            let cell = Cell {
                block_size: $block_size,
                heads: $heads,
                dims: $dims,
                types: $types,
                subgroups: $subgroups,
                checked: $checked,
                spans: Spans::$spans,
                activations: ActivationType::$activations,
                compact: $compact,
            };
            $on(|adapter| cell.run(adapter));
        }
    )*};
}

// Name: adapters, P, (query heads, kv heads), (key size, value size), types, subgroups, checked, spans, activations,
// compact.
cells! {
    blocks_of_1_token_in_f32: on_each_adapter, 1, (2, 2), (8, 8), F32, false, false, Many, F32, None;
    blocks_of_4_tokens_and_3_heads_per_kv_head: on_each_adapter, 4, (3, 1), (40, 40), F16, true, true, Fixed, F16, Some(false);
    blocks_of_16_tokens_and_5_heads_per_kv_head: on_each_adapter, 16, (10, 2), (64, 64), F16, false, true, One, F32, None;
    blocks_of_64_tokens_and_keys_smaller_than_values:
        on_each_adapter, 64, (7, 1), (72, 72), (KvType::F16, KvType::F32), true, false, Many, F16, Some(true);
    blocks_of_256_tokens: on_each_adapter_but_gl, 256, (1, 1), (80, 80), F16, false, false, Fixed, F32, None;
    sixteen_heads_per_kv_head_in_two_tiles:
        on_each_adapter_but_gl, 16, (16, 1), (96, 96), (KvType::F32, KvType::F16), true, true, Many, F32, None;
    seventy_one_heads_per_kv_head_in_nine_tiles:
        on_each_adapter_but_gl, 2, (71, 1), (112, 112), F16, false, false, One, F16, None;
    eight_heads_per_kv_head: on_each_adapter, 16, (8, 1), (128, 128), F32, true, false, Fixed, F16, Some(true);
    heads_of_136_elements: on_each_adapter_but_gl, 64, (2, 2), (136, 136), F16, true, true, Many, F32, None;
    heads_of_256_elements: on_each_adapter_but_gl, 16, (2, 2), (256, 256), F16, false, false, Many, F16, None;
    values_larger_than_keys: on_each_adapter, 16, (3, 1), (64, 128), F16, true, false, Fixed, F32, None;
    keys_larger_than_values:
        on_each_adapter_but_gl, 1, (2, 1), (192, 128), (KvType::F32, KvType::F16), false, true, Many, F16, None;
}
