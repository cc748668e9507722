//! What `device_report` says of a device that fails, in a measurement or in a case of the self-check: its parts by
//! themselves.

use measure::{Failure, faults::GpuFailure, gpu::Gpu, stream::Stream, twins};
use paged_kv::{BindError, DeviceError, PrepareError};
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::check::{self, CaseResult, Check};
use super::{adapters, cases, models, rates, report, step};

#[test]
fn any_wrong_number_is_a_failure() {
    let errors = |decode, prefill, stored_exactly| Ok(step::Errors { decode, prefill, stored_exactly });
    let judge = |errors| check::judge(&cases::CASES[0], Duration::ZERO, errors).failure;
    assert_eq!(judge(errors(1e-5, 1e-5, true)), None);
    for wrong in [
        errors(1.1e-5, 0.0, true),
        errors(0.0, 1.1e-5, true),
        errors(f64::INFINITY, 0.0, true),
        errors(0.0, 0.0, false),
        Err("a complaint".into()),
    ] {
        assert!(judge(wrong).is_some());
    }
}

/// The first adapter that compiles kernels in seconds, if there is one.
pub(super) fn vulkan_adapter() -> Option<wgpu::Adapter> {
    super::adapters().into_iter().find(|adapter| adapter.get_info().backend == wgpu::Backend::Vulkan)
}

fn is_lost(failure: &Failure) -> bool {
    matches!(failure.downcast_ref(), Some(GpuFailure::Lost { .. }))
}

/// Whenever it is lost, measuring ends with the loss: no panic, and no rate of a device that did nothing.
#[test]
fn a_device_that_is_lost_while_it_is_measured_is_an_error() {
    let Some(adapter) = vulkan_adapter() else {
        return println!("device_report: NOT RUN, losses: there is no Vulkan adapter");
    };
    let mut lost = 0;
    for milliseconds in [0, 1, 3, 10, 30, 100, 300, 1000, 3000] {
        let gpu = Gpu::on(&adapter).unwrap();
        let device = gpu.device.clone();
        let loss = move || {
            std::thread::sleep(Duration::from_millis(milliseconds));
            device.destroy();
        };
        let (measured, ended_first) = std::thread::scope(|scope| {
            let losing = scope.spawn(loss);
            let measured = rates::measure(&gpu);
            (measured, !losing.is_finished())
        });
        let (rates, failure) = measured;
        match failure {
            None => assert!(ended_first, "measured on a device that was lost after {milliseconds} ms"),
            Some(failure) => {
                // On hardware ratios come after the decode, one of them last.
                let is_unfinished = |rates: rates::Rates| match rates.ratios {
                    Some(ratios) => ratios.key_columns.is_none(),
                    None => !rates.software || rates.decode.is_none(),
                };
                assert!(rates.is_none_or(is_unfinished));
                assert!(is_lost(&failure), "{failure}");
                lost += 1;
            }
        }
        // From now on there is nothing else to hear from it.
        assert!(matches!(gpu.wait(), Err(GpuFailure::Lost { .. })));
    }
    assert!(lost >= 5, "the loss came too late: {lost}");
}

/// A device with limits for the buffers of the first rates, and not for a layer of the decode's keys and values.
#[test]
fn what_was_measured_before_something_that_could_not_be_is_reported() {
    let gpu = Gpu::on(&noop_adapter(of_buffers(4 << 20))).unwrap();
    let (rates, failure) = rates::measure(&gpu);
    let (rates, told) = (rates.unwrap(), failure.unwrap().to_string());
    assert!(told.contains("4194304"), "{told}");

    let report = report::Report { rates: Some(rates), ..a_report(Some(told.clone()), None) };
    assert_eq!((report.status(), report.failure()), (3, Some(told.as_str())));
    let text = report.text();
    for words in ["  read 4 MiB ", "  copy 4 MiB, both ways counted ", "  not all was measured: "] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains("kernels for") && !text.contains("decode"), "{text}");
    let json: Value = serde_json::from_str(&report.json()).unwrap();
    let rates = &json["rates"];
    assert!(rates["read_bytes_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{json}");
    assert!(rates["decode"].is_null() && rates["ratios"].is_null(), "{json}");
    assert_eq!(
        (&rates["variants"], json["rates_failure"].as_str()),
        (&Value::Array(Vec::new()), Some(&*told))
    );
}

#[test]
fn a_check_that_loses_its_device_keeps_what_it_has_and_says_so() {
    let Some(adapter) = vulkan_adapter() else {
        return println!("device_report: NOT RUN, losses: there is no Vulkan adapter");
    };
    let gpu = Gpu::on(&adapter).unwrap();
    gpu.device.destroy();
    let check = check::check(&gpu, Duration::from_secs(60));
    assert_eq!((check.passed, check.cases_run), (false, 0));
    let told = check.interruption.clone().unwrap();
    assert!(told.starts_with("the device was lost"), "{told}");

    let report = a_report(Some("the device was lost".to_owned()), Some(check));
    assert_eq!((report.status(), report.failure()), (3, Some("the device was lost")));
    let text = report.text();
    for words in
        ["SmolLM2-135M", "rates: not measured: the device was lost", "numbers: not checked: the device"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    let json: Value = serde_json::from_str(&report.json()).unwrap();
    assert_eq!(json["check"]["interruption"], told);
    assert!(json["rates"].is_null() && json["models"].is_array());
}

#[test]
fn a_wrong_number_counts_more_than_what_ended_the_report() {
    let case = |errors| check::judge(&cases::CASES[0], Duration::ZERO, errors);
    let right = case(Ok(step::Errors { decode: 0.0, prefill: 0.0, stored_exactly: true }));
    let wrong = case(Ok(step::Errors { decode: 1.0, prefill: 0.0, stored_exactly: true }));
    let report = |cases, interruption: Option<&str>| {
        a_report(None, Some(Check::of(cases, interruption.map(str::to_owned), Duration::ZERO)))
    };
    let lost = Some("the device was lost");
    assert_eq!(report(vec![right.clone()], None).status(), 0);
    assert_eq!(report(vec![right.clone(), wrong.clone()], lost).status(), 1);
    let interrupted = report(vec![right.clone(), right], lost);
    assert_eq!((interrupted.status(), interrupted.failure()), (3, lost));
    assert!(interrupted.text().contains("right in all 2 cases"), "{}", interrupted.text());
    assert!(interrupted.text().contains("ended before its time: the device was lost"));
}

#[test]
fn wrong_results_while_rates_are_measured_are_a_kernels_fault_and_a_lost_device_is_not() {
    let status = |failure: Failure| {
        let rates_are_wrong = !check::is_of_device(&failure);
        report::Report { rates_are_wrong, ..a_report(Some(failure.to_string()), None) }.status()
    };
    let wrong = twins::same_results("a twin", &[1.0], &[2.0]).unwrap_err();
    assert_eq!(status(wrong), 1);
    assert_eq!(status(GpuFailure::Refused { reason: "a call".to_owned() }.into()), 1);
    assert_eq!(status(GpuFailure::Lost { reason: String::new() }.into()), 3);
    assert_eq!(status(GpuFailure::OutOfMemory { asked_bytes: 7 }.into()), 3);
}

#[test]
fn a_case_without_memory_is_not_run_instead_of_wrong() {
    let case = |errors| check::judge(&cases::CASES[0], Duration::ZERO, errors);
    let asked_bytes = 123_456_789;
    let short = GpuFailure::OutOfMemory { asked_bytes };
    let lacks: [Failure; 5] = [
        short.into(),
        DeviceError::OutOfMemory { object: "an arena", asked_bytes, created_bytes: 0 }.into(),
        BindError::OutOfMemory { asked_bytes }.into(),
        PrepareError::OutOfMemory { asked_bytes }.into(),
        PrepareError::StagingOutOfMemory { asked_bytes, held_bytes: 0 }.into(),
    ];
    for failure in lacks {
        let CaseResult { failure, not_run, .. } = case(Err(failure));
        assert_eq!(failure, None);
        assert!(not_run.as_ref().is_some_and(|reason| reason.contains("123456789 bytes")), "{not_run:?}");
    }
    for failure in [DeviceError::DeviceLost.into(), Failure::from(PrepareError::DeviceLost)] {
        assert!(case(Err(failure)).failure.is_some());
    }

    let not_run = || case(Err(BindError::OutOfMemory { asked_bytes }.into()));
    let right = || case(Ok(step::Errors { decode: 0.0, prefill: 0.0, stored_exactly: true }));
    let wrong = || case(Ok(step::Errors { decode: 1.0, prefill: 0.0, stored_exactly: true }));
    let report = |cases| a_report(None, Some(Check::of(cases, None, Duration::ZERO)));
    let told = Some("no device memory for 123456789 bytes");

    let some = report(vec![not_run(), right()]);
    assert_eq!((some.status(), some.failure()), (3, told));
    for words in ["right in all 1 cases that were run", "      not run: no device memory for 123456789 bytes"]
    {
        assert!(some.text().contains(words), "{words}: {}", some.text());
    }
    let json: Value = serde_json::from_str(&some.json()).unwrap();
    assert_eq!((&json["check"]["passed"], &json["check"]["cases_run"]), (&false.into(), &1.into()));
    assert_eq!(json["check"]["cases"][0]["not_run"].as_str(), told);

    assert_eq!(report(vec![not_run(), wrong()]).status(), 1);
    let none = report(vec![not_run()]);
    assert_eq!(none.status(), 3);
    assert!(none.text().contains("numbers: not checked: no device memory"), "{}", none.text());
}

/// Below a limit of the kernels every case is beyond the device, and none is wrong.
#[test]
fn a_case_beyond_the_limits_is_not_run_instead_of_wrong() {
    let limits = wgpu::Limits { max_compute_workgroup_storage_size: 4096, ..wgpu::Limits::default() };
    let gpu = Gpu::on(&noop_adapter(limits)).unwrap();
    let check = check::check(&gpu, Duration::from_secs(60));
    assert_eq!((check.passed, check.cases_run), (false, 0));
    assert!(check.cases.iter().all(|case| case.failure.is_none()), "{check:?}");
    let report = a_report(None, Some(check));
    let told = "the device has enabled max_compute_workgroup_storage_size of 4096, the kernels need 8192";
    assert_eq!((report.status(), report.failure()), (3, Some(told)));
    let text = report.text();
    assert!(
        text.contains("numbers: not checked: the device has enabled max_compute_workgroup_storage"),
        "{text}"
    );

    let gpu = Gpu::on(&noop_adapter(of_buffers(4096))).unwrap();
    let error = step::run(&gpu, &cases::CASES[0]).err().unwrap();
    assert!(matches!(error.downcast_ref(), Some(DeviceError::Config(_))), "{error}");
    let CaseResult { failure, not_run, .. } = check::judge(&cases::CASES[0], Duration::ZERO, Err(error));
    assert!(failure.is_none() && not_run.is_some(), "{failure:?} {not_run:?}");
}

#[test]
fn a_panic_of_the_programs_own_is_not_called_a_loss() {
    let gpu = Gpu::on(&noop_adapter(of_buffers(1 << 52))).unwrap();
    let descriptor = wgpu::BufferDescriptor {
        label: None,
        size: 64,
        usage: wgpu::BufferUsages::MAP_READ,
        mapped_at_creation: false,
    };
    let buffer = gpu.device.create_buffer(&descriptor);
    buffer.map_async(wgpu::MapMode::Read, .., |_| panic!("a bug of the callback's"));
    let panic = catch_unwind(AssertUnwindSafe(|| gpu.wait())).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"a bug of the callback's"));
    assert!(!gpu.is_lost());
    assert_eq!(gpu.wait(), Ok(()));
}

/// A call that wgpu really refuses: which, on what and why are in the error and in the report, however long they are.
#[test]
fn a_refused_call_is_told_whole_and_within_the_columns() {
    let gpu = Gpu::on(&noop_adapter(of_buffers(1 << 52))).unwrap();
    let _refused = gpu.device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("a buffer that the application maps while kernels write to it"),
        size: 64,
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::STORAGE,
        mapped_at_creation: false,
    });
    let refusal = gpu.wait().unwrap_err();
    let told = refusal.to_string();
    assert!(matches!(refusal, GpuFailure::Refused { .. }), "{told}");
    let call = "wgpu refused a call: In Device::create_buffer, label = 'a buffer that the application maps while \
                kernels write to it': ";
    assert!(told.starts_with(call) && told.contains("MAP_READ") && !told.contains('\n'), "{told}");

    let case = check::judge(&cases::CASES[0], Duration::ZERO, Err(refusal.clone().into()));
    for check in [Check::of(vec![case], None, Duration::ZERO), lost_after(&told)] {
        let report = a_report(Some(told.clone()), Some(check));
        assert_eq!(report.failure(), Some(told.as_str()));
        let text = report.text();
        for line in text.lines() {
            assert!(line.chars().count() <= 100, "{line}");
        }
        // Twice: for the rates and for the check.
        let without_spaces = |text: &str| text.split_whitespace().collect::<String>();
        assert_eq!(without_spaces(&text).matches(&without_spaces(&told)).count(), 2, "{text}");
    }
}

/// A check that `reason` ended in its first case.
fn lost_after(reason: &str) -> Check {
    Check::of(Vec::new(), Some(reason.to_owned()), Duration::ZERO)
}

/// A report on an adapter without a device.
fn a_report(rates_failure: Option<String>, check: Option<Check>) -> report::Report {
    report::Report {
        versions: report::Versions::here(),
        adapters: vec![adapters::AdapterFacts::of(&noop_adapter(of_buffers(1 << 52)))],
        adapter: 0,
        features: Vec::new(),
        requests: Vec::new(),
        pool_bytes: 1 << 30,
        models: models::fits(1 << 30, 1 << 30),
        rates: None,
        rates_failure,
        rates_are_wrong: false,
        check,
    }
}

#[test]
fn memory_that_the_device_does_not_have_is_an_error_with_the_bytes() {
    let gpu = Gpu::on(&noop_adapter(of_buffers(1 << 52))).unwrap();
    let asked_bytes = 1 << 50;
    assert_eq!(Stream::read(&gpu, asked_bytes).time(), Err(GpuFailure::OutOfMemory { asked_bytes }));
    // It is told once, and the device goes on.
    assert_eq!(gpu.wait(), Ok(()));
    assert!(Stream::read(&gpu, 1 << 20).time().is_ok());
    // It is also the reason for what comes of it before the next wait.
    let unmeasured = gpu.empty(asked_bytes);
    let failure = gpu.explain::<()>(Err("no such tensor".into())).unwrap_err();
    assert_eq!(failure.downcast_ref(), Some(&GpuFailure::OutOfMemory { asked_bytes: unmeasured.size() }));
}

/// Limits with buffers and bindings of at most `bytes`.
fn of_buffers(bytes: u64) -> wgpu::Limits {
    wgpu::Limits { max_storage_buffer_binding_size: bytes, max_buffer_size: bytes, ..wgpu::Limits::default() }
}

/// wgpu's own adapter without a device.
fn noop_adapter(limits: wgpu::Limits) -> wgpu::Adapter {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.flags = wgpu::InstanceFlags::empty();
    descriptor.backend_options.noop =
        wgpu::NoopBackendOptions { enable: true, limits: Some(limits), ..Default::default() };
    let instance = wgpu::Instance::new(descriptor);
    let mut found = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::NOOP));
    found.pop().unwrap()
}
