//! Models of several groups of layers: what their sequences hold, are promised and find again.

use crate::naive_blocks::num_blocks;
use paged_kv::{
    Admission, CacheConfig, CacheError, ConfigError, KvCache, KvType, LayerGroup, ModelShape, Namespace,
    PrefixCacheConfig, Reach, Request, RowResult, Schedule, Scheduler, SchedulerConfig, StepBuilder, TableId,
};

const WINDOW: Reach = Reach::Window { tokens: 1024, first: 0 };

/// 48 layers, of which one in six sees everything: as in Gemma 3 12B.
fn gemma(windowed: Reach) -> ModelShape {
    let (whole, others): (Vec<u32>, Vec<u32>) = (0..48).partition(|layer| layer % 6 == 5);
    ModelShape::of_groups([
        LayerGroup::new(whole, 16, 8, 256),
        LayerGroup::new(others, 16, 8, 256).with_reach(windowed),
    ])
}

/// A layer that sees everything, and one that does not.
fn two_layers(reach: Reach) -> ModelShape {
    ModelShape::of_groups([LayerGroup::new([0], 2, 1, 8), LayerGroup::new([1], 2, 1, 8).with_reach(reach)])
}

/// Blocks of four tokens, and the prefix cache.
fn small_cache(shape: &ModelShape, num_blocks: u32) -> KvCache {
    let config = CacheConfig::for_blocks(num_blocks, shape, KvType::F32).unwrap();
    let mut cache = KvCache::new(config.with_block_size(4).unwrap().with_max_sequence_tokens(64).unwrap());
    cache.enable_prefix_cache(None).unwrap();
    cache
}

/// A step that pushes `tokens`.
fn push(cache: &mut KvCache, table: TableId, tokens: &[u32]) {
    let mut builder = StepBuilder::new(cache);
    builder.push(table, tokens).unwrap();
    let plan = builder.finish();
    cache.commit_step(plan).unwrap();
    cache.assert_consistent();
}

/// A table of the tokens from 0 on, pushed four at a time, whose full blocks others find.
fn chain(cache: &mut KvCache, len: u32) -> TableId {
    let table = cache.create(64).unwrap();
    for end in (4..=len).step_by(4) {
        push(cache, table, &(end - 4..end).collect::<Vec<_>>());
        cache.register_prefix(table, &Namespace::default(), &(0..end).collect::<Vec<_>>()).unwrap();
    }
    table
}

fn found(cache: &KvCache, tokens: u32) -> u32 {
    cache.find_prefix(&Namespace::default(), &(0..tokens).collect::<Vec<_>>())
}

/// Runs a request of `prompt` tokens up to its end. Returns the blocks held in the end, and the most that were promised.
fn serve(shape: &ModelShape, prompt: u32, new: u32) -> (u32, u32) {
    let config = CacheConfig::for_context(prompt + new, 1, shape, KvType::F16).unwrap();
    let guaranteed = SchedulerConfig { admission: Admission::Guaranteed, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(guaranteed, config).unwrap();
    let request = Request::new(vec![1; prompt as usize]).max_new_tokens(new).keep(true);
    scheduler.add(request).unwrap();
    let promised = run(&mut scheduler);
    (scheduler.stats().cache.held_blocks, promised)
}

/// Serves everything to its end. Returns the most blocks that were promised.
fn run(scheduler: &mut Scheduler) -> u32 {
    let mut promised = 0;
    while let Schedule::Step(plan) = scheduler.schedule() {
        promised = promised.max(scheduler.stats().cache.promised_blocks);
        let results = vec![RowResult::Token(2); plan.logit_rows().len()];
        scheduler.commit(plan, &results).unwrap();
    }
    promised
}

#[test]
fn eight_whole_layers_and_forty_windowed_ones_are_one_stack_and_five_without_padding() {
    let config = CacheConfig::for_context(32_768, 1, &gemma(WINDOW), KvType::F16).unwrap();
    let [whole, windowed] = config.groups() else { panic!("{:?}", config.groups()) };
    assert_eq!((whole.num_stacks(), whole.first_stack(), whole.layout().num_layers()), (1, 0, 8));
    assert_eq!((windowed.num_stacks(), windowed.first_stack(), windowed.layout().num_layers()), (5, 1, 8));
    assert_eq!(config.padding_share(), 0.0);
    // 8 layers, 8 kv heads, keys and values of 256 halves, 16 tokens.
    assert_eq!(config.bytes_per_block(), 8 * 8 * 2 * 256 * 2 * 16);
    assert_eq!(config.bytes_per_token(), 48 * 8 * 2 * 256 * 2);
}

#[test]
fn a_chat_of_32k_on_five_windowed_layers_to_a_full_one_holds_about_a_sixth() {
    let (held, promised) = serve(&gemma(WINDOW), 32_752, 16);
    // All blocks of one stack; of five others a window of 1,024 tokens that begins in the middle of a block.
    assert_eq!(held, 2048 + 5 * 65);
    let (all, _) = serve(&gemma(Reach::All), 32_752, 16);
    // Its groups are alike then, and one stack of all layers is as good as six.
    let config = CacheConfig::for_context(32_768, 1, &gemma(Reach::All), KvType::F16).unwrap();
    let bytes = u64::from(all) * config.bytes_per_block();
    let block_bytes =
        CacheConfig::for_context(32_768, 1, &gemma(WINDOW), KvType::F16).unwrap().bytes_per_block();
    let share = f64::from(held) * block_bytes as f64 / bytes as f64;
    assert!((1.0 / 6.0..0.2).contains(&share), "{share} of what all layers take that see everything");
    // A step of 512 rows after a window of 1,024 takes 97 blocks of a stack at most.
    assert_eq!(promised, 2048 + 5 * 97);
}

#[test]
fn rows_that_fill_no_block_are_refused_with_those_that_would() {
    let shape = ModelShape::of_groups([
        LayerGroup::new([0], 3, 3, 64),
        LayerGroup::new([1], 2, 2, 64).with_reach(WINDOW),
    ]);
    let error = CacheConfig::for_blocks(8, &shape, KvType::F16).unwrap_err();
    let ConfigError::Padding { padding_percent, max_percent: 15, group, row_bytes, filling_row_bytes } =
        error
    else {
        panic!("{error}")
    };
    assert_eq!(padding_percent, 17, "{error}");
    // Rows as long as it says leave nothing unused.
    let rows = [3u32, 2].map(|heads| u64::from(heads) * 64 * 2 * 2);
    assert_eq!(row_bytes, rows[group as usize], "{error}");
    let heads = (filling_row_bytes / (64 * 2 * 2)) as u32;
    let mut of_groups = [3, 2];
    of_groups[group as usize] = heads;
    let shape = ModelShape::of_groups([
        LayerGroup::new([0], of_groups[0], of_groups[0], 64),
        LayerGroup::new([1], of_groups[1], of_groups[1], 64).with_reach(WINDOW),
    ]);
    assert_eq!(CacheConfig::for_blocks(8, &shape, KvType::F16).unwrap().padding_share(), 0.0);
}

#[test]
fn rows_of_half_the_size_have_blocks_of_twice_the_tokens() {
    let shape = ModelShape::of_groups([
        LayerGroup::new([0], 4, 2, 8),
        LayerGroup::new([1], 4, 1, 8).with_reach(Reach::Chunk { tokens: 8 }),
    ]);
    let config = CacheConfig::for_blocks(8, &shape, KvType::F32).unwrap().with_block_size(4).unwrap();
    let sizes: Vec<u32> = config.groups().iter().map(|group| group.layout().block_size()).collect();
    assert_eq!((sizes, config.padding_share()), (vec![4, 8], 0.0));
}

#[test]
fn a_window_gives_its_blocks_back_when_the_next_step_is_planned() {
    let mut cache = small_cache(&two_layers(Reach::Window { tokens: 5, first: 0 }), 32);
    let table = cache.create(64).unwrap();
    push(&mut cache, table, &[1; 20]);
    assert_eq!(cache.stats().held_blocks, 5 + 5, "nothing is planned after them");
    push(&mut cache, table, &[1; 1]);
    // The row at 20 sees from 16 on.
    assert_eq!(cache.stats().held_blocks, 6 + 2);
    assert_eq!(cache.stats().held_blocks, num_blocks(cache.config(), 20, 21));
}

#[test]
fn what_a_window_has_left_behind_cannot_be_cut_to_nor_shared() {
    let mut cache = small_cache(&two_layers(Reach::Window { tokens: 5, first: 0 }), 32);
    let table = cache.create(64).unwrap();
    push(&mut cache, table, &[1; 20]);
    push(&mut cache, table, &[1; 1]);
    let behind = |tokens| CacheError::BehindWindow { table, tokens, shortest: 20 };
    assert_eq!(cache.truncate(table, 19), Err(behind(19)));
    assert_eq!(cache.fork(table, 8, 64), Err(behind(8)));
    assert!(cache.fork(table, 20, 64).is_ok());
    assert_eq!(cache.truncate(table, 20), Ok(()));
}

#[test]
fn first_tokens_stay_for_as_long_as_their_sequence() {
    let mut cache = small_cache(&two_layers(Reach::Window { tokens: 4, first: 5 }), 64);
    let table = chain(&mut cache, 64);
    let held = cache.stats().held_blocks;
    // Two blocks of first tokens; of the last step, 3 tokens before its rows and the rows.
    assert_eq!(held, 16 + 2 + 2);
    cache.release(table).unwrap();
    assert_eq!(cache.stats().held_blocks, 0);
}

#[test]
fn a_chunks_end_frees_the_chunk() {
    let mut cache = small_cache(&two_layers(Reach::Chunk { tokens: 8 }), 64);
    let table = cache.create(64).unwrap();
    let mut held = Vec::new();
    for _ in 0..24 {
        push(&mut cache, table, &[1]);
        held.push(cache.stats().held_blocks - cache.len(table).unwrap().div_ceil(4));
    }
    let chunk = [1, 1, 1, 1, 2, 2, 2, 2];
    assert_eq!(held, [chunk; 3].concat());
}

#[test]
fn a_hit_needs_what_rows_see_at_its_end_and_nothing_before() {
    // 16 + 3 blocks of a chain of 64 tokens, and 13 that its window has left behind.
    let mut cache = small_cache(&two_layers(Reach::Window { tokens: 8, first: 0 }), 32);
    let table = chain(&mut cache, 64);
    assert_eq!(cache.stats().cached_blocks, 13);
    assert_eq!((found(&cache, 65), found(&cache, 41), found(&cache, 39)), (64, 40, 38));
    // Others need all that is not held: what a window has left behind goes.
    let other = cache.create(64).unwrap();
    push(&mut cache, other, &[99; 24]);
    assert_eq!(cache.stats().cached_blocks, 1, "what was left behind last");
    assert_eq!((found(&cache, 65), found(&cache, 57)), (64, 56), "all that these ends need is there");
    assert_eq!((found(&cache, 41), found(&cache, 53)), (0, 0), "windows lack what is before these");
    cache.release(table).unwrap();
    cache.assert_consistent();
}

#[test]
fn without_a_group_that_sees_everything_a_hit_needs_the_windows_alone() {
    let windowed = LayerGroup::new([0], 2, 1, 8).with_reach(Reach::Window { tokens: 8, first: 0 });
    let mut cache = small_cache(&ModelShape::of_groups([windowed]), 8);
    let table = chain(&mut cache, 64);
    // Of a chain of 16 blocks 8 fit: the last three are held, the others known.
    assert_eq!((cache.stats().held_blocks, cache.stats().cached_blocks), (3, 5));
    assert_eq!((found(&cache, 65), found(&cache, 17)), (64, 0));
    cache.release(table).unwrap();
    assert_eq!(found(&cache, 65), 64, "its end is known although its beginning is gone");
    let tokens: Vec<u32> = (0..62).collect();
    let (_, len) = cache.create_with_prefix(&Namespace::default(), &tokens, 64).unwrap();
    assert_eq!(len, 61);
    cache.assert_consistent();
}

#[test]
fn a_turn_whose_last_token_is_behind_a_window_is_computed_again() {
    let shape = ModelShape::of_groups([
        LayerGroup::new([0], 2, 1, 8).with_reach(Reach::Window { tokens: 2, first: 0 })
    ]);
    let cache = CacheConfig::for_blocks(16, &shape, KvType::F32).unwrap().with_block_size(1).unwrap();
    for admission in [Admission::Guaranteed, Admission::Overcommitted { watermark_blocks: 0 }] {
        let config = SchedulerConfig { admission, ..SchedulerConfig::default() };
        let mut scheduler = Scheduler::new(config, cache.clone()).unwrap();
        let chat = scheduler.add(Request::new([1, 2, 3]).max_new_tokens(2).keep(true)).unwrap();
        run(&mut scheduler);
        assert_eq!(scheduler.computed_tokens(chat), Some(4));
        // What the row at 3 sees is there, and nothing before that.
        scheduler.truncate(chat, 3).unwrap();
        assert_eq!(scheduler.computed_tokens(chat), Some(3));
        scheduler.extend(chat, Request::new([]).max_new_tokens(1)).unwrap();
        assert_eq!(
            scheduler.computed_tokens(chat),
            Some(0),
            "its last token is computed again, and all before it"
        );
        run(&mut scheduler);
        assert_eq!(scheduler.stats().cache.promised_blocks, 0);
        scheduler.assert_consistent();
    }
}

/// At the bound of preemptions everything is reserved: what two samples share of a window is free for neither.
#[test]
fn samples_that_share_a_window_are_not_both_reserved_what_it_holds() {
    let shape = ModelShape::of_groups([
        LayerGroup::new([0], 4, 1, 8),
        LayerGroup::new([1, 2], 4, 1, 8).with_reach(Reach::Window { tokens: 20, first: 0 }),
    ]);
    let cache = CacheConfig::for_blocks(57, &shape, KvType::F32).unwrap().with_block_size(1).unwrap();
    let config = SchedulerConfig {
        step_tokens: 2,
        admission: Admission::Overcommitted { watermark_blocks: 0 },
        max_preemptions: 0,
        prefix_cache: Some(PrefixCacheConfig::default()),
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(config, cache.with_max_sequences(3).unwrap()).unwrap();
    let chats = scheduler.add(Request::new(vec![1; 18]).max_new_tokens(16).samples(2).keep(true)).unwrap();
    run(&mut scheduler);
    let lens = [0, 1].map(|sample| scheduler.tokens(chats.sample(sample)).map(<[u32]>::len));
    assert_eq!(lens, [Some(34); 2]);
}
