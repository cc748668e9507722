//! Which cache an attention object works for, and taking another one.

use std::sync::Arc;

use paged_kv::{
    AttentionOptions, CacheConfig, DeviceError, KvFormat, KvType, ModelShape, PrepareError, RecordError,
};
use wgpu::{Features, Limits};

use crate::device::{TestDevice, noop_device};
use crate::device_rig::{DeviceRig, on_each_adapter_but_gl, open};
use crate::kernels::TOLERANCE;
use crate::rig::{Rig, Tensors};

const SHAPE: ModelShape = ModelShape::new(2, 2, 1, 8);

fn noop() -> TestDevice {
    noop_device(Limits::default(), Features::empty(), 8..=8)
}

fn config(num_blocks: u32, format: impl Into<KvFormat>) -> CacheConfig {
    CacheConfig::for_blocks(num_blocks, &SHAPE, format)
        .and_then(|config| config.with_block_size(4))
        .and_then(|config| config.with_host_blocks(4))
        .and_then(|config| config.with_max_sequences(40))
        .expect("a valid configuration")
}

fn host(config: &CacheConfig) -> Rig {
    let mut host = Rig::of(SHAPE, config.clone());
    host.shuffle_free_blocks();
    host
}

/// A few steps of two sequences; with what they computed compared where the device computes.
fn run(rig: &mut DeviceRig<'_>, computes: bool) {
    let tables = [(); 2].map(|()| rig.host.open());
    for rows in [6, 1, 3, 1] {
        let plan = rig.host.plan(&tables.map(|table| (table, rows)));
        let layers: Vec<Tensors> = (0..SHAPE.num_layers()).map(|_| rig.host.tensors(&plan)).collect();
        rig.host.begin(&plan);
        (0..).zip(&layers).for_each(|(layer, tensors)| rig.host.append(&plan, tensors, layer));
        let outputs = rig.run(&plan, &layers);
        for ((layer, tensors), output) in (0..).zip(&layers).zip(&outputs).filter(|_| computes) {
            rig.host.assert_layer_dense(&plan, tensors, layer, output, TOLERANCE);
        }
        rig.host.commit(plan);
    }
    tables.into_iter().for_each(|table| rig.host.kv.release(table).expect("an open table"));
}

fn check(gpu: &TestDevice, computes: bool) {
    gpu.device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));
    let first = config(16, KvType::F32);
    let mut rig = DeviceRig::new(gpu, host(&first), AttentionOptions::default());
    run(&mut rig, computes);
    let arenas = rig.attention.arena_buffers().to_vec();
    for (next, pipelines, keeps_arenas) in [
        (first, 5, true),
        (config(12, KvType::F32), 5, false),
        (config(24, KvType::F32), 5, false),
        (config(16, KvType::F16), 10, false),
        (config(16, KvType::F16), 10, true),
    ] {
        let arenas_before = rig.attention.arena_buffers().to_vec();
        let (old, new) = (rig.host.kv.instance(), host(&next));
        let table = rig.host.open();
        let old_plan = rig.host.plan(&[(table, 1)]);
        rig.attention.use_cache(next.clone(), new.kv.instance()).expect("room for the pool");
        let refused = rig.attention.prepare(&old_plan).err();
        if *rig.host.kv.config() == next {
            let attention = new.kv.instance();
            assert_eq!(refused, Some(PrepareError::CacheInstance { plan: old, attention }));
        } else {
            assert!(matches!(refused, Some(PrepareError::Fingerprint { .. })), "{refused:?}");
        }
        rig.host = new;
        run(&mut rig, computes);
        assert_eq!(rig.attention.arena_buffers() == arenas_before, keeps_arenas);
        assert_eq!(rig.attention.stats().pipelines_created, pipelines);
        // Once more for the same cache: nothing happens.
        rig.attention.use_cache(next, rig.host.kv.instance()).expect("the same cache");
        run(&mut rig, computes);
    }
    assert!(arenas != rig.attention.arena_buffers());
}

#[test]
fn another_cache_is_taken_without_new_kernels_and_without_new_arenas_where_they_fit() {
    check(&noop(), false);
    on_each_adapter_but_gl(|adapter| check(&open(adapter), true));
}

#[test]
fn the_plan_of_another_cache_of_the_same_configuration_is_refused_even_if_it_comes_first() {
    let gpu = noop();
    let config = config(16, KvType::F32);
    let mut rig = DeviceRig::new(&gpu, host(&config), AttentionOptions::default());
    let mut other = host(&config);
    let own = rig.host.kv.instance();
    rig.attention.use_cache(config, own).expect("the cache that it was made for");
    let table = other.open();
    let foreign = other.plan(&[(table, 1)]);
    let expected = PrepareError::CacheInstance { plan: other.kv.instance(), attention: own };
    assert_eq!(rig.attention.prepare(&foreign).err(), Some(expected));
    run(&mut rig, false);
}

#[test]
fn what_was_prepared_for_the_old_cache_is_refused() {
    let gpu = noop();
    let config = config(16, KvType::F32);
    let mut rig = DeviceRig::new(&gpu, host(&config), AttentionOptions::default());
    let table = rig.host.open();
    let plan = rig.host.plan(&[(table, 1)]);
    let mut step = rig.attention.prepare(&plan).expect("a valid plan");
    let next = host(&config);
    rig.attention.use_cache(config, next.kv.instance()).expect("the same configuration");
    let tensors = rig.host.tensors(&plan);
    let bound = rig.bind(&plan, &tensors).0;
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    let mut pass = encoder.begin_compute_pass(&Default::default());
    let recorded = rig.attention.record_layer(&mut pass, &mut step, 0, &bound);
    assert_eq!(recorded, Err(RecordError::ForeignStep));
}

#[test]
fn a_cache_that_cannot_be_had_leaves_an_object_that_takes_another_one() {
    let limits = Limits { max_storage_buffer_binding_size: 64 << 10, ..Limits::default() };
    let gpu = noop_device(limits, Features::empty(), 8..=8);
    let small = config(16, KvType::F32);
    let mut rig = DeviceRig::new(&gpu, host(&small), AttentionOptions::default());
    run(&mut rig, false);
    let pipelines = rig.attention.stats().pipelines_created;
    // For another shape: nothing has changed.
    let wide = ModelShape::new(2, 2, 1, 16);
    let wide = CacheConfig::for_blocks(16, &wide, KvType::F32).expect("a valid configuration");
    let refused = rig.attention.use_cache(wide, 7);
    assert!(matches!(refused, Err(DeviceError::ShapeMismatch { field: "head_dim", .. })), "{refused:?}");
    run(&mut rig, false);

    let refused = rig.attention.use_cache(config(4096, KvType::F32), 7);
    assert!(matches!(refused, Err(DeviceError::LimitTooLow { .. })), "{refused:?}");
    let table = rig.host.open();
    let plan = rig.host.plan(&[(table, 1)]);
    assert_eq!(rig.attention.prepare(&plan).err(), Some(PrepareError::DeviceLost));
    rig.host = host(&small);
    rig.attention.use_cache(small, rig.host.kv.instance()).expect("room for the pool");
    run(&mut rig, false);
    assert_eq!(rig.attention.stats().pipelines_created, pipelines);
}
