//! Leaving with work on the queue: an application that is closed while steps are on their way.

use std::time::{Duration, Instant};

use paged_kv::{AttentionOptions, KvType};
use wgpu::{Features, Limits};

use crate::device::{TestDevice, noop_device};
use crate::device_rig::{DeviceRig, on_each_adapter_but_gl, open};
use crate::rig::Rig;

/// Objects are dropped in the order in which an application owns them, five steps unwaited for.
fn leave(gpu: TestDevice) {
    let host = Rig::new((4, 2, 16), KvType::F16, 16, 64);
    let mut rig = DeviceRig::new(&gpu, host, AttentionOptions::default());
    let table = rig.host.open();
    for _ in 0..5 {
        let plan = rig.host.plan(&[(table, 32)]);
        let tensors = rig.host.tensors(&plan);
        rig.submit_step(&plan, &tensors);
        rig.host.commit(plan);
    }
    let start = Instant::now();
    drop(rig);
    // The attention object waits for nothing; the queue waits for what was submitted, as wgpu has it.
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    drop(gpu);
    assert!(start.elapsed() < Duration::from_secs(120), "{:?}", start.elapsed());
}

#[test]
fn b75_leaving_with_steps_on_the_queue_waits_for_them_and_nothing_panics() {
    leave(noop_device(Limits::default(), Features::empty(), 8..=8));
    on_each_adapter_but_gl(|adapter| leave(open(adapter)));
}
