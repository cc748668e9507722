use super::*;
use proptest::prelude::*;

/// A plan of sequences with so many rows and so much context each; nothing else of it matters here.
fn plan(sequences: &[(u32, u32)]) -> StepPlan {
    let mut plan = StepPlan { query_starts: vec![0], ..StepPlan::default() };
    for &(rows, context) in sequences {
        plan.query_starts.push(plan.query_starts.last().unwrap_or(&0) + rows);
        plan.context_lens.push(context);
    }
    plan
}

fn config() -> SplitConfig {
    SplitConfig {
        workgroups_per_item: 3,
        heads_per_kv_head: 3,
        prefill_queries: 32,
        span_quantum: 64,
        target_workgroups: 256,
        max_partials: 1024,
        fixed_span_tokens: None,
        dispatch_work_budget: u64::MAX,
    }
}

fn split(sequences: &[(u32, u32)], config: &SplitConfig) -> WorkSplit {
    let mut split = WorkSplit::default();
    let plan = plan(sequences);
    split.split(&plan, config);
    check(&plan, config, &split);
    split
}

/// What must hold for every plan and every configuration.
fn check(plan: &StepPlan, config: &SplitConfig, split: &WorkSplit) {
    let quantum = config.span_quantum.max(1);
    let mut decode = split.decode_items.iter().peekable();
    let mut prefill = split.prefill_items.iter().peekable();
    let mut merge = split.merge_items.iter();
    let mut next_partial = 0;
    for sequence in 0..plan.num_sequences() {
        let row = plan.query_starts[sequence as usize];
        let rows = plan.query_starts[sequence as usize + 1] - row;
        if rows > 1 {
            let mut query = 0;
            while let Some(item) = prefill.next_if(|item| item.sequence == sequence) {
                assert_eq!(item.first_query, query, "tiles follow one another");
                assert!(item.end_query > query && item.end_query - query <= config.prefill_queries.max(1));
                query = item.end_query;
            }
            assert_eq!(query, rows * config.heads_per_kv_head.max(1), "tiles cover all queries");
            continue;
        }
        let (mut token, mut spans) = (0, Vec::new());
        while let Some(item) = decode.next_if(|item| item.sequence == sequence) {
            assert_eq!(item.first_token, token, "spans follow one another");
            assert!(item.end_token > token && item.first_token.is_multiple_of(quantum));
            token = item.end_token;
            spans.push(item.partial);
        }
        assert_eq!(token, plan.context_lens[sequence as usize], "spans cover the context");
        if spans.len() == 1 {
            assert_eq!(spans, [DIRECT]);
            continue;
        }
        let expected: Vec<u32> = (next_partial..).take(spans.len()).collect();
        assert_eq!(spans, expected, "partial results are consecutive and nobody else's");
        let item = merge.next().expect("a row in spans is merged");
        assert_eq!(
            (item.row, item.first_partial, item.num_partials as usize),
            (row, next_partial, spans.len())
        );
        next_partial += item.num_partials;
    }
    assert!(decode.next().is_none() && prefill.next().is_none() && merge.next().is_none());
    assert_eq!(split.num_partials, next_partial);
    assert!(config.fixed_span_tokens.is_some() || next_partial <= config.max_partials, "scratch overflows");
    let spans: Vec<u64> =
        split.decode_items.iter().map(|item| u64::from(item.end_token - item.first_token)).collect();
    check_dispatches(&split.decode_dispatches, &spans, config.dispatch_work_budget);
    let tiles: Vec<u64> = split
        .prefill_items
        .iter()
        .map(|item| {
            let (heads, sequence) = (config.heads_per_kv_head.max(1), item.sequence as usize);
            let rows = plan.query_starts[sequence + 1] - plan.query_starts[sequence];
            let past = plan.context_lens[sequence] - rows;
            let rows = item.first_query / heads..=(item.end_query - 1) / heads;
            rows.map(|row| u64::from(past) + u64::from(row) + 1).sum()
        })
        .collect();
    check_dispatches(&split.prefill_dispatches, &tiles, config.dispatch_work_budget);
}

fn check_dispatches(dispatches: &[Range<u32>], work: &[u64], budget: u64) {
    let mut next = 0;
    for dispatch in dispatches {
        assert_eq!(dispatch.start, next, "dispatches follow one another");
        assert!(dispatch.end > dispatch.start);
        next = dispatch.end;
        let total: u64 = work[dispatch.start as usize..dispatch.end as usize].iter().sum();
        assert!(total <= budget || dispatch.len() == 1, "I13: a dispatch of {total}");
    }
    assert_eq!(next as usize, work.len(), "dispatches cover all items");
}

#[test]
fn one_long_row_is_cut_into_as_many_spans_as_fill_the_device() {
    let long = split(&[(1, 100_000)], &config());
    // 86 items of 3 workgroups: spans of 1,163 tokens, rounded up to 1,216.
    assert_eq!((long.decode_items.len(), long.merge_items.len()), (83, 1));
    let wide = SplitConfig { target_workgroups: 1 << 20, ..config() };
    assert_eq!(
        split(&[(1, 100_000)], &wide).decode_items.len(),
        782,
        "no span is shorter than the scratch allows"
    );
    let wide = SplitConfig { max_partials: u32::MAX, ..wide };
    assert_eq!(split(&[(1, 100_000)], &wide).decode_items.len(), 1563, "nor than the quantum");
}

#[test]
fn rows_that_fill_the_device_are_not_cut() {
    let rows = split(&[(1, 1000); 86], &config());
    assert_eq!((rows.decode_items.len(), rows.num_partials), (86, 0));
    // But one that is much longer than the others is.
    let mut sequences = vec![(1, 1000); 86];
    sequences.push((1, 100_000));
    let uneven = split(&sequences, &config());
    assert!(uneven.decode_items.len() > 86 + 20, "{} items", uneven.decode_items.len());
    let longest = uneven.decode_items.iter().map(|item| item.end_token - item.first_token).max();
    assert!(longest <= Some(2 * 2138 + 64), "{longest:?}");
}

#[test]
fn a_device_that_wants_few_workgroups_gets_whole_rows() {
    for target_workgroups in [0, 1, 3] {
        let config = SplitConfig { target_workgroups, ..config() };
        for context in [1, 64, 65, 100_000] {
            assert_eq!(split(&[(1, context)], &config).num_partials, 0);
        }
    }
}

#[test]
fn scratch_that_is_too_small_lengthens_every_span_alike() {
    let sequences = [(1, 10_000); 8];
    for max_partials in [0, 1, 7, 15, 16, 100] {
        let config = SplitConfig { max_partials, ..config() };
        let split = split(&sequences, &config);
        let spans: Vec<u32> = split.merge_items.iter().map(|item| item.num_partials).collect();
        assert!(
            spans.iter().all(|&spans| spans == max_partials / 8 || spans * 2 > max_partials / 8),
            "{spans:?}"
        );
        assert_eq!(spans.len(), if max_partials < 16 { 0 } else { 8 }, "first rows do not take it all");
    }
}

#[test]
fn fixed_spans_depend_on_a_rows_own_context_only() {
    for max_partials in [0, 3, 1024] {
        let config = SplitConfig { fixed_span_tokens: Some(100), max_partials, ..config() };
        let alone = split(&[(1, 1000)], &config);
        let spans = |split: &WorkSplit, sequence| -> Vec<(u32, u32)> {
            let items = split.decode_items.iter().filter(|item| item.sequence == sequence);
            items.map(|item| (item.first_token, item.end_token)).collect()
        };
        assert_eq!(spans(&alone, 0).len(), 8, "spans of 128: 100 rounded up to the quantum");
        let batch = [(1, 5), (7, 900), (1, 1000), (1, 100_000), (1, 1000)];
        let together = split(&batch, &config);
        assert_eq!(spans(&together, 2), spans(&alone, 0));
        assert_eq!(spans(&together, 4), spans(&alone, 0));
    }
}

#[test]
fn a_dispatch_budget_also_cuts_rows() {
    let config = SplitConfig { dispatch_work_budget: 1000, target_workgroups: 1, ..config() };
    let split = split(&[(1, 5000), (1, 500)], &config);
    // Spans of at most 960 tokens, each in a dispatch of its own but for the last two.
    assert_eq!((split.decode_items.len(), split.decode_dispatches.len()), (7, 6));
}

#[test]
fn chunks_are_cut_into_tiles_that_may_end_within_a_row() {
    let split = split(&[(11, 40), (1, 7), (2, 2)], &config());
    let tiles: Vec<_> =
        split.prefill_items.iter().map(|item| (item.sequence, item.first_query, item.end_query)).collect();
    assert_eq!(tiles, [(0, 0, 32), (0, 32, 33), (2, 0, 6)]);
}

#[test]
fn more_items_than_one_axis_of_a_dispatch_are_one_dispatch() {
    let config = SplitConfig { prefill_queries: 1, heads_per_kv_head: 1, ..config() };
    let split = split(&[(65_537, 65_537)], &config);
    assert_eq!((split.prefill_dispatches.len(), split.prefill_items.len()), (1, 65_537));
}

#[test]
fn nothing_overflows_or_hangs_at_the_edges() {
    let longest = u32::MAX - 1;
    for fixed_span_tokens in [None, Some(0), Some(u32::MAX)] {
        let config = SplitConfig { fixed_span_tokens, span_quantum: 1 << 30, ..config() };
        split(&[(1, longest), (1, 1)], &config);
    }
    let zeros = SplitConfig {
        workgroups_per_item: 0,
        heads_per_kv_head: 0,
        prefill_queries: 0,
        span_quantum: 0,
        target_workgroups: 0,
        max_partials: 0,
        fixed_span_tokens: None,
        dispatch_work_budget: 0,
    };
    split(&[(1, 1), (3, 9), (1, 70)], &zeros);
    assert_eq!(split(&[], &config()).num_partials, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_split_covers_every_key_and_query_once(
        sequences in prop::collection::vec((1..20u32, 0..3000u32), 0..40),
        (workgroups_per_item, heads_per_kv_head, prefill_queries) in (1..9u32, 1..9u32, 1..70u32),
        quantum in 0..9u32,
        (target_workgroups, max_partials) in (0..600u32, 0..300u32),
        fixed_span_tokens in prop::option::of(1..1000u32),
        dispatch_work_budget in 1..20_000u64,
    ) {
        let sequences: Vec<_> = sequences.into_iter().map(|(rows, past)| (rows, rows + past)).collect();
        let config = SplitConfig {
            workgroups_per_item,
            heads_per_kv_head,
            prefill_queries,
            span_quantum: 1 << quantum,
            target_workgroups,
            max_partials,
            fixed_span_tokens,
            dispatch_work_budget,
        };
        split(&sequences, &config);
    }
}
