use super::*;
use proptest::prelude::*;

/// A plan of sequences with these rows and context lengths; nothing else of it matters here.
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
        workgroups_per_tile: 3,
        heads_per_kv_head: 3,
        prefill_queries: 32,
        span_quantum: 64,
        target_workgroups: 256,
        max_partials: 1024,
        fixed_span_tokens: None,
        batch_invariant: false,
        dispatch_work_budget: u64::MAX,
        reach: Reach::All,
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
    let mut prefill = split.prefill_items.iter();
    let mut merge = split.merge_items.iter();
    let mut next_partial = 0;
    for sequence in 0..plan.num_sequences() {
        let row = plan.query_starts[sequence as usize];
        let rows = plan.query_starts[sequence as usize + 1] - row;
        if rows > 1 {
            let items: Vec<_> =
                prefill.as_slice().iter().take_while(|item| item.sequence == sequence).collect();
            prefill = prefill.as_slice()[items.len()..].iter();
            check_chunk(plan, config, sequence, &items, next_partial);
            if items[0].partial != DIRECT {
                next_partial += check_chunk_merges(plan, sequence, &items, &mut merge);
            }
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
            rows.map(|row| u64::from((past + row + 1).min(item.end_token).saturating_sub(item.first_token)))
                .sum()
        })
        .collect();
    check_dispatches(&split.prefill_dispatches, &tiles, config.dispatch_work_budget);
}

/// Tiles of a sequence's queries, and each tile's spans.
fn check_chunk(
    plan: &StepPlan,
    config: &SplitConfig,
    sequence: u32,
    items: &[&PrefillItem],
    first_partial: u32,
) {
    let heads = config.heads_per_kv_head.max(1);
    let Chunk { rows, context } = chunk(plan, sequence);
    let mut query = 0;
    for tile in items.chunk_by(|a, b| a.first_query == b.first_query) {
        let PrefillItem { first_query, end_query, .. } = *tile[0];
        assert_eq!(first_query, query, "tiles follow one another");
        assert!(end_query > query && end_query - query <= config.prefill_queries.max(1));
        query = end_query;
        let mut token = 0;
        for (span, item) in (0..).zip(tile) {
            assert_eq!((item.end_query, item.first_token), (end_query, token), "spans follow one another");
            assert!(item.end_token > token && item.first_token.is_multiple_of(config.span_quantum.max(1)));
            token = item.end_token;
            match items[0].partial {
                DIRECT => assert_eq!(item.partial, DIRECT),
                _ => assert_eq!(item.partial, first_partial + first_query / heads * item.num_spans + span),
            }
        }
        assert_eq!(token, context - rows + (end_query - 1) / heads + 1, "spans cover what the last row sees");
        assert!(items[0].partial != DIRECT || tile.len() == 1, "only one span writes a final result");
    }
    assert_eq!(query, rows * heads, "tiles cover all queries");
}

/// One merge per row, of the spans of which it sees a key; returns the partial results of all rows.
fn check_chunk_merges(
    plan: &StepPlan,
    sequence: u32,
    items: &[&PrefillItem],
    merge: &mut std::slice::Iter<'_, MergeItem>,
) -> u32 {
    let Chunk { rows, context } = chunk(plan, sequence);
    let first = items[0];
    // Tiles that see less than a whole span have a shorter one.
    let span_tokens = items.iter().map(|item| item.end_token - item.first_token).max().expect("an item");
    let first_row = plan.query_starts[sequence as usize];
    for row in 0..rows {
        let item = merge.next().expect("a row in spans is merged");
        let visible = context - rows + row + 1;
        let expected =
            (first_row + row, first.partial + row * first.num_spans, visible.div_ceil(span_tokens));
        assert_eq!((item.row, item.first_partial, item.num_partials), expected);
    }
    assert_eq!(first.num_spans, context.div_ceil(span_tokens), "partial results are nobody else's");
    rows * first.num_spans
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
fn few_rows_over_a_long_context_are_cut_into_spans_that_fill_the_device() {
    // Five rows of three heads are one tile of 32 queries, and 86 items of 3 workgroups are wanted.
    let drafts = split(&[(5, 100_000)], &config());
    assert_eq!((drafts.prefill_items.len(), drafts.merge_items.len()), (83, 5));
    assert_eq!(drafts.num_partials, 5 * 83);
    // Beside a decode row, both fill the device: they are dispatches of their own.
    let mixed = split(&[(1, 100_000), (5, 100_000)], &config());
    assert_eq!((mixed.decode_items.len(), mixed.prefill_items.len()), (83, 83));
    // A chunk that has tiles enough has no partial results. One beside it with much more to walk is cut.
    assert_eq!(split(&[(1024, 100_000)], &config()).num_partials, 0);
    let beside = split(&[(1024, 1024), (5, 100_000)], &config());
    let longest = beside.prefill_items.iter().map(|item| item.end_token - item.first_token).max();
    assert!(longest <= Some(2 * 2100), "{longest:?}");
    // Where scratch is short, decode comes first, and spans of chunks become longer.
    let short = SplitConfig { max_partials: 83 + 100, ..config() };
    let mixed = split(&[(1, 100_000), (5, 100_000)], &short);
    assert_eq!((mixed.decode_items.len(), mixed.num_partials), (83, 83 + 5 * 11));
}

#[test]
fn a_prefill_of_64k_tokens_becomes_many_dispatches_cut_exactly() {
    // 32 query and 8 kv heads: what a chunk of all of it, and what chunks of 512 rows come to.
    let config = SplitConfig {
        workgroups_per_item: 8,
        workgroups_per_tile: 8,
        heads_per_kv_head: 4,
        prefill_queries: 8,
        span_quantum: 128,
        target_workgroups: 1024,
        max_partials: 1024,
        dispatch_work_budget: 1 << 20,
        ..config()
    };
    let work = |rows: u64, context: u64| rows * context - rows * (rows - 1) / 2;
    for (rows, context) in [(65_536, 65_536), (512, 65_536), (512, 32_768), (512, 512)] {
        let split = split(&[(rows, context)], &config);
        let needed = work(u64::from(rows), u64::from(context)).div_ceil(1 << 20);
        let dispatches = split.prefill_dispatches.len() as u64;
        // Two rows over 64k are an eighth of the budget, so that much of each dispatch may stay unused.
        assert!((needed..=needed * 8 / 7 + 1).contains(&dispatches), "{dispatches} instead of {needed}");
    }
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
        split(&[(5, longest), (2, 2)], &SplitConfig { max_partials: 9, ..config });
    }
    let zeros = SplitConfig {
        workgroups_per_item: 0,
        workgroups_per_tile: 0,
        heads_per_kv_head: 0,
        prefill_queries: 0,
        span_quantum: 0,
        target_workgroups: 0,
        max_partials: 0,
        fixed_span_tokens: None,
        batch_invariant: false,
        dispatch_work_budget: 0,
        reach: Reach::All,
    };
    split(&[(1, 1), (3, 9), (1, 70)], &zeros);
    assert_eq!(split(&[], &config()).num_partials, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_split_covers_every_key_and_query_once(
        sequences in prop::collection::vec((1..20u32, 0..3000u32), 0..40),
        (workgroups_per_item, workgroups_per_tile) in (1..9u32, 1..9u32),
        (heads_per_kv_head, prefill_queries) in (1..9u32, 1..70u32),
        quantum in 0..9u32,
        (target_workgroups, max_partials) in (0..600u32, 0..300u32),
        fixed_span_tokens in prop::option::of(1..1000u32),
        dispatch_work_budget in 1..20_000u64,
    ) {
        let sequences: Vec<_> = sequences.into_iter().map(|(rows, past)| (rows, rows + past)).collect();
        let config = SplitConfig {
            workgroups_per_item,
            workgroups_per_tile,
            heads_per_kv_head,
            prefill_queries,
            span_quantum: 1 << quantum,
            target_workgroups,
            max_partials,
            fixed_span_tokens,
            batch_invariant: false,
            dispatch_work_budget,
            reach: Reach::All,
        };
        split(&sequences, &config);
    }
}

/// Every row is computed and merged once, in spans that follow from what it sees, and a group's partial results fit.
fn check_invariant(sequences: &[(u32, u32)], config: &SplitConfig, span_tokens: u32) {
    let plan = plan(sequences);
    let mut split = WorkSplit::default();
    split.split(&plan, config);
    assert!(split.decode_items.is_empty());
    let heads = config.heads_per_kv_head;
    let rows = plan.query_starts.last().copied().unwrap_or(0);
    let (mut items, mut dispatches, mut merges) = (0, 0, 0);
    let mut merged = vec![0; rows as usize];
    for group in &split.groups {
        assert_eq!((group.prefill_items.start, group.merge_items.start), (items, merges));
        assert_eq!(group.prefill_dispatches.start, dispatches);
        (items, merges) = (group.prefill_items.end, group.merge_items.end);
        dispatches = group.prefill_dispatches.end;
        let ranges = &split.prefill_dispatches[group.prefill_dispatches.start as usize..dispatches as usize];
        assert_eq!(ranges.first().map(|range| range.start), Some(group.prefill_items.start));
        assert_eq!(ranges.last().map(|range| range.end), Some(items));

        // (row, span) by partial result, from the items.
        let mut written = std::collections::HashMap::new();
        for item in &split.prefill_items[group.prefill_items.start as usize..items as usize] {
            assert_eq!((item.guarded_from, item.first_token % span_tokens), (item.first_token, 0));
            let first = item.first_query / heads;
            for row in first..=(item.end_query - 1) / heads {
                let partial = item.partial + (row - first) * item.num_spans;
                let row = plan.query_starts[item.sequence as usize] + row;
                let place = (row, item.first_token / span_tokens);
                assert!(
                    *written.entry(partial).or_insert(place) == place,
                    "two rows write one partial result"
                );
                assert!(partial < config.max_partials, "beyond the scratch buffer");
            }
        }
        for merge in &split.merge_items[group.merge_items.start as usize..merges as usize] {
            merged[merge.row as usize] += 1;
            for span in 0..merge.num_partials {
                assert_eq!(written.get(&(merge.first_partial + span)), Some(&(merge.row, span)));
            }
            let sequence = plan.query_starts.partition_point(|&start| start <= merge.row) - 1;
            let behind = plan.query_starts[sequence + 1] - 1 - merge.row;
            let visible = plan.context_lens[sequence] - behind;
            assert_eq!(merge.num_partials, visible.div_ceil(span_tokens), "the spans of what the row sees");
        }
    }
    assert_eq!((items as usize, merges as usize), (split.prefill_items.len(), split.merge_items.len()));
    assert_eq!(dispatches as usize, split.prefill_dispatches.len());
    assert!(merged.iter().all(|&count| count == 1), "a row is merged once");
}

proptest! {
    #[test]
    fn batch_invariant_rows_are_computed_in_groups_that_fit(
        sequences in prop::collection::vec((1..40u32, 0..500u32), 0..6),
        heads_per_kv_head in 1..5u32,
        prefill_queries in 1..9u32,
        max_partials in 9..60u32,
        dispatch_work_budget in 1..20_000u64,
    ) {
        let sequences: Vec<_> = sequences.into_iter().map(|(rows, past)| (rows, rows + past)).collect();
        let config = SplitConfig {
            heads_per_kv_head,
            prefill_queries,
            max_partials,
            dispatch_work_budget,
            fixed_span_tokens: Some(64),
            batch_invariant: true,
            ..config()
        };
        check_invariant(&sequences, &config, 64);
    }
}

/// Under any reach, every query walks every key that it sees once, and its window begins in one of its spans: there it walks
/// the first tokens. Nothing is walked a quantum or more before that.
fn check_reach(sequences: &[(u32, u32)], config: &SplitConfig) {
    let plan = plan(sequences);
    let mut split = WorkSplit::default();
    split.split(&plan, config);
    let heads = config.heads_per_kv_head;
    let whole = RowGroup {
        prefill_items: 0..split.prefill_items.len() as u32,
        merge_items: 0..split.merge_items.len() as u32,
        ..RowGroup::default()
    };
    let groups = if split.groups.is_empty() { vec![whole] } else { split.groups.clone() };
    let decodes = split.decode_items.iter().map(|item| PrefillItem {
        sequence: item.sequence,
        first_query: 0,
        end_query: heads,
        first_token: item.first_token,
        end_token: item.end_token,
        partial: item.partial,
        num_spans: 1,
        guarded_from: item.end_token,
    });
    let decodes: Vec<PrefillItem> = decodes.collect();
    let mut checked = 0;
    for group in groups {
        let prefills =
            &split.prefill_items[group.prefill_items.start as usize..group.prefill_items.end as usize];
        let merges = &split.merge_items[group.merge_items.start as usize..group.merge_items.end as usize];
        // Of each query, its spans in their order, with their partial results.
        let mut walks = std::collections::BTreeMap::<(u32, u32), Vec<(Range<u32>, u32)>>::new();
        let mut writers = std::collections::HashMap::new();
        for item in decodes.iter().chain(prefills) {
            let first_row = plan.query_starts[item.sequence as usize];
            for query in item.first_query..item.end_query {
                let row = first_row + query / heads;
                let partial = match item.partial {
                    DIRECT => DIRECT,
                    partial => partial + (query / heads - item.first_query / heads) * item.num_spans,
                };
                let walk = walks.entry((row, query % heads)).or_default();
                walk.push((item.first_token..item.end_token, partial));
                if partial != DIRECT {
                    let span = (row, item.end_token.div_ceil(config.span_quantum));
                    let other = writers.insert((partial, query % heads), span);
                    assert!(other.is_none(), "partial result {partial} is written twice");
                    assert!(partial < split.num_partials);
                }
            }
        }
        for ((row, _), walk) in walks {
            checked += 1;
            let sequence = plan.query_starts.partition_point(|&start| start <= row) - 1;
            let position = plan.context_lens[sequence] - (plan.query_starts[sequence + 1] - row);
            let [_, seen] = config.reach.visible(position);
            let merged = merges
                .iter()
                .find(|merge| merge.row == row)
                .map(|merge| merge.first_partial..merge.first_partial + merge.num_partials);
            let used: Vec<&(Range<u32>, u32)> = walk
                .iter()
                .filter(|(_, partial)| match &merged {
                    Some(merged) => merged.contains(partial),
                    None => *partial == DIRECT,
                })
                .collect();
            assert_eq!(used.len(), merged.map_or(1, |merged| merged.len()), "{row}: {walk:?}");
            let start = used[0].0.start;
            assert!(start <= seen.start && used[0].0.end > seen.start, "the window begins in the first span");
            assert!(start.is_multiple_of(config.span_quantum));
            let mut token = start;
            for (span, _) in used {
                assert_eq!(span.start, token, "spans follow one another");
                token = span.end;
            }
            assert!(token >= seen.end);
            // A tile's first row says where the tile begins.
            let rows_of_tile = config.prefill_queries.div_ceil(heads) + 1;
            let least = config.reach.visible(position.saturating_sub(rows_of_tile))[1].start;
            assert!(start + config.span_quantum > least, "{start} is walked for what begins at {least}");
        }
    }
    assert_eq!(checked, plan.query_starts.last().unwrap_or(&0) * heads, "every query is computed");
    assert!(config.fixed_span_tokens.is_some() || split.num_partials <= config.max_partials);
}

proptest! {
    #[test]
    fn every_split_walks_every_key_that_a_row_sees_once(
        sequences in prop::collection::vec((1..40u32, 0..700u32), 0..6),
        (heads_per_kv_head, prefill_queries) in (1..5u32, 1..19u32),
        (target_workgroups, max_partials) in (0..600u32, 50..300u32),
        quantum in 0..7u32,
        (fixed, batch_invariant) in (prop::option::of(1..300u32), any::<bool>()),
        reach in prop_oneof![
            (1..300u32, 0..80u32).prop_map(|(tokens, first)| Reach::Window { tokens, first }),
            (1..300u32).prop_map(|tokens| Reach::Chunk { tokens }),
            Just(Reach::All),
        ],
    ) {
        let sequences: Vec<_> = sequences.into_iter().map(|(rows, past)| (rows, rows + past)).collect();
        let fixed_span_tokens = if batch_invariant { Some(fixed.unwrap_or(64)) } else { fixed };
        let config = SplitConfig {
            workgroups_per_item: 1,
            workgroups_per_tile: 1,
            heads_per_kv_head,
            prefill_queries,
            span_quantum: 1 << quantum,
            target_workgroups,
            // Room for one row at least.
            max_partials: if batch_invariant { max_partials + 800 } else { max_partials },
            fixed_span_tokens,
            batch_invariant,
            reach,
            ..config()
        };
        check_reach(&sequences, &config);
    }
}
