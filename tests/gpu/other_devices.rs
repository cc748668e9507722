//! Two devices in one application, and what belongs to one of them given to the other.

use std::sync::Arc;

use paged_kv::{AttentionOptions, KvType};
use wgpu::{ErrorFilter, Features, Limits};

use crate::device::{TestAdapter, TestDevice};
use crate::device_rig::{DeviceRig, on_each_adapter_but_gl, open};
use crate::rig::Rig;
use crate::steps::step;

fn rig(gpu: &TestDevice) -> DeviceRig<'_> {
    DeviceRig::new(gpu, Rig::new((2, 1, 8), KvType::F32, 4, 16), AttentionOptions::default())
}

/// Records a step of `rig` into an encoder of `other`, and submits it there; what wgpu had to say to `other` about it.
fn submit_elsewhere(rig: &mut DeviceRig<'_>, other: &TestDevice) -> Option<wgpu::Error> {
    let table = rig.host.open();
    let plan = rig.host.plan(&[(table, 3)]);
    let scope = other.device.push_error_scope(ErrorFilter::Validation);
    let mut step = rig.attention.prepare(&plan).expect("a valid plan");
    let mut encoder = other.device.create_command_encoder(&Default::default());
    rig.attention.record_transfers(&mut encoder, &mut step);
    let mut pass = encoder.begin_compute_pass(&Default::default());
    rig.attention.record_block_copies(&mut pass, &mut step);
    drop(pass);
    other.queue.submit([encoder.finish()]);
    other.device.poll(wgpu::PollType::wait_indefinitely()).expect("a working device");
    pollster::block_on(scope.pop())
}

/// The commands of a step on the other device's queue.
fn submit_to_the_wrong_queue(rig: &mut DeviceRig<'_>, other: &TestDevice) -> Option<wgpu::Error> {
    let table = rig.host.open();
    let plan = rig.host.plan(&[(table, 3)]);
    let scope = other.device.push_error_scope(ErrorFilter::Validation);
    let mut step = rig.attention.prepare(&plan).expect("a valid plan");
    let mut encoder = rig.gpu.device.create_command_encoder(&Default::default());
    rig.attention.record_transfers(&mut encoder, &mut step);
    other.queue.submit([encoder.finish()]);
    pollster::block_on(scope.pop())
}

fn check(one: &TestDevice, other: &TestDevice, computes: bool) {
    one.device.on_uncaptured_error(Arc::new(|error| panic!("reached the application: {error}")));
    let mut rig = rig(one);
    for _ in 0..3 {
        assert!(submit_elsewhere(&mut rig, other).is_some(), "wgpu refuses what lies on two devices");
        assert!(
            submit_to_the_wrong_queue(&mut rig, other).is_some(),
            "wgpu refuses commands of another device"
        );
    }
    // The step was given up; the next ones are computed as if nothing had been.
    let table = rig.host.open();
    for rows in [5, 1, 1] {
        if computes {
            step(&mut rig, &[(table, rows)]);
            continue;
        }
        let plan = rig.host.plan(&[(table, rows)]);
        let tensors = rig.host.tensors(&plan);
        rig.run(&plan, std::slice::from_ref(&tensors));
        rig.host.commit(plan);
    }
}

#[test]
fn b59_commands_for_two_devices_are_an_error_of_wgpu_and_the_next_step_is_computed() {
    // Of one instance: objects of two go unnoticed by wgpu, which tells them apart by number.
    let noop = TestAdapter::noop(Limits::default(), Features::empty(), 8..=8);
    check(&open(&noop), &open(&noop), false);
    on_each_adapter_but_gl(|adapter| check(&open(adapter), &open(adapter), true));
}
