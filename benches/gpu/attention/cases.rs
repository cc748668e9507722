//! Which cases there are.

use bench_support::cache::{Case, Sequence};
use paged_kv::KvType;

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Attention(&'static str),
    Append,
    BlockCopy,
    Swap,
}

/// A case, with layers yet to be chosen, and what it is compared with.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) what: What,
    pub(crate) case: Case,
    /// With the plain kernel and gather-then-dense, too; attention is always compared with its contiguous twin.
    pub(crate) with_rivals: bool,
}

impl Spec {
    /// The kernel's name.
    pub(crate) fn kernel(&self) -> &'static str {
        match self.what {
            What::Attention(name) => name,
            What::Append => "append",
            What::BlockCopy => "block_copy",
            What::Swap => "swap",
        }
    }

    /// The longest context.
    pub(crate) fn context(&self) -> u32 {
        self.case.sequences.iter().map(|sequence| sequence.context).max().unwrap_or(0)
    }

    /// What `--case` looks in.
    pub(crate) fn name(&self) -> String {
        let Case { num_query_heads, num_kv_heads, head_dim, kv_type, sequences, .. } = &self.case;
        let shape = format!("{num_query_heads}/{num_kv_heads} d{head_dim} {kv_type}");
        let work = match self.what {
            What::Attention("attention_mixed") => format!("{} rows to {}", self.case.rows(), self.context()),
            What::Attention("attention_prefill") => format!("{} over {}", self.case.rows(), self.context()),
            What::Append => format!("{} rows", self.case.rows()),
            What::BlockCopy | What::Swap => format!("{} blocks", sequences.len()),
            _ => format!("context {} batch {}", self.context(), sequences.len()),
        };
        format!("{} {shape} {work}", self.kernel())
    }
}

const HEADS: [(u32, u32); 4] = [(32, 8), (9, 3), (28, 4), (64, 8)];

fn spec(what: What, heads: (u32, u32), head_dim: u32, kv_type: KvType, sequences: &[(u32, u32)]) -> Spec {
    let sequences = sequences.iter().map(|&(rows, context)| Sequence { rows, context }).collect();
    let (num_query_heads, num_kv_heads) = heads;
    let case =
        Case { num_layers: 1, num_query_heads, num_kv_heads, head_dim, kv_type, block_size: 16, sequences };
    Spec { what, case, with_rivals: true }
}

const DECODE: What = What::Attention("attention_decode");
const PREFILL: What = What::Attention("attention_prefill");
const MIXED: What = What::Attention("attention_mixed");

/// Decoding sequences of every length beside chunks of prompts.
const RAGGED: [(u32, u32); 8] =
    [(1, 37), (1, 512), (1, 1999), (1, 4096), (1, 3001), (200, 200), (77, 1500), (129, 3333)];
/// Prompts and chunks alone.
const PROMPTS: [(u32, u32); 4] = [(17, 17), (129, 129), (300, 811), (60, 2048)];

/// Every case.
pub(crate) fn all() -> Vec<Spec> {
    let mut specs = Vec::new();
    for kv_type in [KvType::F16, KvType::F32] {
        for heads in HEADS {
            for head_dim in [128, 64, 256] {
                let mut add =
                    |what, sequences: &[_]| specs.push(spec(what, heads, head_dim, kv_type, sequences));
                for batch in [1, 8, 64] {
                    for context in [512, 2048, 8192, 32768] {
                        add(DECODE, &vec![(1, context); batch]);
                    }
                }
                add(DECODE, &[(1, 4096)]);
                add(PREFILL, &[(512, 512)]);
                add(PREFILL, &[(512, 8192)]);
                if head_dim == 128 {
                    add(MIXED, &RAGGED);
                    add(MIXED, &PROMPTS);
                    add(What::Append, &[(1, 1024); 64]);
                    add(What::Append, &[(512, 512)]);
                    add(What::BlockCopy, &[(1, 24); 64]);
                    add(What::Swap, &[(1, 16); 64]);
                }
            }
        }
    }
    specs
}

/// A few that a software adapter runs in a minute.
pub(crate) fn quick() -> Vec<Spec> {
    let f16 = KvType::F16;
    let (large, small) = ((32, 8), (9, 3));
    let mut specs = vec![
        spec(DECODE, large, 128, f16, &[(1, 512); 2]),
        spec(DECODE, large, 128, f16, &[(1, 4096)]),
        spec(DECODE, small, 64, f16, &[(1, 8192)]),
        spec(DECODE, small, 64, KvType::F32, &[(1, 512)]),
        spec(PREFILL, small, 64, f16, &[(512, 512)]),
        spec(PREFILL, small, 64, f16, &[(8, 8192)]),
        spec(MIXED, small, 64, f16, &[(1, 37), (1, 512), (9, 60), (5, 333)]),
        spec(What::Append, large, 128, f16, &[(512, 512)]),
        spec(What::BlockCopy, large, 128, f16, &[(1, 24); 64]),
        spec(What::Swap, large, 128, f16, &[(1, 16); 64]),
    ];
    for (index, spec) in specs.iter_mut().enumerate() {
        spec.with_rivals = matches!(index, 1 | 4);
    }
    specs
}
