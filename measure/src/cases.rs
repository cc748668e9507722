//! The cases of the bench `attention`.

use crate::cache::{Case, Sequence};
use paged_kv::KvType;

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The attention of a step, by the name of its kernel.
    Attention(&'static str),
    /// New rows into their slots.
    Append,
    /// Copy-on-write.
    BlockCopy,
    /// To the host pool and back.
    Swap,
}

/// A case, with layers yet to be chosen, and what it is compared with.
#[derive(Clone, Debug)]
pub struct Spec {
    /// What is timed.
    pub what: What,
    /// The step and the cache under it.
    pub case: Case,
    /// With the plain kernel and gather-then-dense, too; attention is always compared with its contiguous twin.
    pub with_rivals: bool,
}

impl Spec {
    /// The kernel's name.
    pub fn kernel(&self) -> &'static str {
        match self.what {
            What::Attention(name) => name,
            What::Append => "append",
            What::BlockCopy => "block_copy",
            What::Swap => "swap",
        }
    }

    /// The longest context.
    pub fn context(&self) -> u32 {
        self.case.sequences.iter().map(|sequence| sequence.context).max().unwrap_or(0)
    }

    /// What `--case` looks in.
    pub fn name(&self) -> String {
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

/// 64 times 8,192 tokens of eight f16 heads of 128 are 2 GiB, four bytes more than any device binds; the same goes for
/// 32,768 tokens of fewer or smaller heads.
fn shortened(context: u32, batch: usize) -> u32 {
    if batch == 64 && context >= 8192 { context - context / 128 } else { context }
}

/// Every case.
pub fn all() -> Vec<Spec> {
    let mut specs = Vec::new();
    for kv_type in [KvType::F16, KvType::F32] {
        for heads in HEADS {
            for head_dim in [128, 64, 256] {
                let mut add =
                    |what, sequences: &[_]| specs.push(spec(what, heads, head_dim, kv_type, sequences));
                for batch in [1, 8, 64] {
                    for context in [512, 2048, 8192, 32768] {
                        add(DECODE, &vec![(1, shortened(context, batch)); batch]);
                    }
                }
                add(DECODE, &[(1, 4096)]);
                add(PREFILL, &[(512, 512)]);
                add(PREFILL, &[(512, 8192)]);
                if head_dim == 128 {
                    add(MIXED, &RAGGED);
                    add(MIXED, &PROMPTS);
                    add(What::Append, &[(1, 128); 64]);
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
pub fn quick() -> Vec<Spec> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use paged_kv::MAX_ARENA_BYTES;

    #[test]
    fn quick_cases_decode_and_prefill_over_512_and_8k_and_have_rivals_for_both() {
        let has = |what, context, rivals: bool| {
            let fits =
                |spec: &Spec| spec.what == what && spec.context() == context && (spec.with_rivals || !rivals);
            assert!(quick().iter().any(fits), "{what:?} over {context}");
        };
        for what in [DECODE, PREFILL] {
            has(what, 512, false);
            has(what, 8192, false);
        }
        has(DECODE, 4096, true);
        has(PREFILL, 512, true);
    }

    #[test]
    fn every_case_has_a_name_of_its_own_that_a_substring_finds() {
        let mut names: Vec<String> = all().iter().map(Spec::name).collect();
        let cases = names.len();
        assert!(
            names.contains(&"attention_decode 32/8 d128 f16 context 8192 batch 8".to_owned()),
            "{names:#?}"
        );
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), cases);
    }

    #[test]
    fn decode_in_f16_with_heads_of_128_fits_a_binding_up_to_64_sequences_of_8k() {
        for spec in all().iter().filter(|spec| spec.what == DECODE && spec.context() <= 8192) {
            let is_f16 = spec.case.kv_type == KvType::F16 && spec.case.head_dim <= 128;
            let fits = spec.case.config().expect("a pool").arenas(MAX_ARENA_BYTES);
            assert!(!is_f16 || fits.is_ok(), "{}: {fits:?}", spec.name());
        }
    }
}
