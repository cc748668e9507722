//! The adapters that the device tests run on, and the devices opened on them.
//!
//! A test goes through every adapter of the machine with [`on_each_adapter`] and opens its own device
//! with [`TestAdapter::request_device`], with the limits and features that an application would ask
//! for. Hardware and software adapters count alike. `tests/run` provides three software ones, each an
//! independent implementation: `vulkan:lavapipe`, `vulkan:swiftshader` and `gl:llvmpipe`.
//!
//! Two environment variables, each a comma-separated list of parts of [`TestAdapter::name`] in any
//! case, decide what a run covers:
//!
//! - `PAGED_KV_ADAPTERS` restricts it to the adapters that match one of the parts.
//! - `PAGED_KV_REQUIRE_ADAPTERS` fails it unless each part matches an adapter that the run covers.
//!
//! What the run covers is printed once, past the capture of test output: one line
//! `adapter: NAME | DRIVER` per adapter, or one that says that there is none. A machine without any
//! adapter passes the tests that need one without having run them, unless some are required.
//!
//! [`TestAdapter::noop`] is a device that nobody here owns: any limits, features and subgroup sizes,
//! with wgpu's validation but no execution (buffer writes and copies excepted).

use std::collections::HashSet;
use std::fmt;
use std::io::Write as _;
use std::ops::RangeInclusive;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use paged_kv::{CacheConfig, KvType, ModelShape};
use pollster::FutureExt as _;
use wgpu::{Backend, Backends, Features, Limits};

/// Restricts the run to the adapters that match one of these parts of names.
const ADAPTERS_VARIABLE: &str = "PAGED_KV_ADAPTERS";

/// Fails the run unless each of these parts of names matches an adapter.
const REQUIRE_ADAPTERS_VARIABLE: &str = "PAGED_KV_REQUIRE_ADAPTERS";

/// Every adapter of the run, in wgpu's order.
///
/// # Panics
///
/// If an adapter of `PAGED_KV_REQUIRE_ADAPTERS` is missing, or nothing matches `PAGED_KV_ADAPTERS`.
pub(crate) fn adapters() -> Vec<TestAdapter> {
    static SELECTION: LazyLock<Result<Vec<TestAdapter>, String>> = LazyLock::new(|| {
        let found = find_adapters();
        let only = parts_from_env(ADAPTERS_VARIABLE);
        let required = parts_from_env(REQUIRE_ADAPTERS_VARIABLE);
        let selection = select(found, &only, &required, TestAdapter::name);
        if let Ok(adapters) = &selection {
            announce(adapters);
        }
        selection
    });
    match &*SELECTION {
        Ok(adapters) => adapters.clone(),
        Err(message) => panic!("{message}"),
    }
}

/// Runs `test` on one adapter of the run after the other, and names the one on which it panicked.
pub(crate) fn on_each_adapter(mut test: impl FnMut(&TestAdapter)) {
    struct NameOnPanic<'a>(&'a TestAdapter);

    impl Drop for NameOnPanic<'_> {
        fn drop(&mut self) {
            if thread::panicking() {
                eprintln!("failed on adapter {}", self.0);
            }
        }
    }

    for adapter in &adapters() {
        let _name_on_panic = NameOnPanic(adapter);
        test(adapter);
    }
}

/// One adapter of the machine, or a noop one.
#[derive(Clone)]
pub(crate) struct TestAdapter {
    adapter: wgpu::Adapter,
    /// The adapter's own instance, where it has one to itself.
    instance: Option<wgpu::Instance>,
    name: String,
    exclusive: Option<Arc<ThreadLock>>,
}

impl TestAdapter {
    /// An adapter that offers exactly these limits, features and subgroup sizes, and computes nothing.
    pub(crate) fn noop(limits: Limits, features: Features, subgroup_sizes: RangeInclusive<u32>) -> Self {
        let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
        descriptor.backends = Backends::NOOP;
        descriptor.backend_options.noop = wgpu::NoopBackendOptions {
            enable: true,
            limits: Some(limits),
            features: Some(features),
            subgroup_min_size: Some(*subgroup_sizes.start()),
            subgroup_max_size: Some(*subgroup_sizes.end()),
            ..Default::default()
        };
        let instance = wgpu::Instance::new(descriptor);
        let found = instance.enumerate_adapters(Backends::NOOP).block_on();
        let adapter = found.into_iter().next().expect("wgpu's noop backend has one adapter");
        Self { instance: Some(instance), ..Self::new(adapter) }
    }

    /// The adapter itself.
    pub(crate) fn adapter(&self) -> &wgpu::Adapter {
        &self.adapter
    }

    /// `BACKEND:ADAPTER`, where the software Vulkan adapters go by their usual names.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// wgpu's description of the adapter.
    pub(crate) fn info(&self) -> wgpu::AdapterInfo {
        self.adapter.get_info()
    }

    /// The highest limits that a device of this adapter can have.
    pub(crate) fn limits(&self) -> Limits {
        self.adapter.limits()
    }

    /// All features that a device of this adapter can have.
    pub(crate) fn features(&self) -> Features {
        self.adapter.features()
    }

    /// Opens a device with exactly these limits and features.
    ///
    /// A GL adapter's devices share one context, on which wgpu lets a thread wait for 6 seconds
    /// before it panics. They are therefore lent to one thread at a time: until that thread has
    /// dropped all of its own, another one waits here.
    ///
    /// # Errors
    ///
    /// If the adapter does not offer them.
    pub(crate) fn request_device(
        &self,
        limits: Limits,
        features: Features,
    ) -> Result<TestDevice, wgpu::RequestDeviceError> {
        let exclusive = self.exclusive.as_ref().map(ThreadLock::lock);
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("paged_kv tests"),
            required_features: features,
            required_limits: limits,
            ..Default::default()
        };
        let (device, queue) = self.adapter.request_device(&descriptor).block_on()?;
        Ok(TestDevice { device, queue, instance: self.instance.clone(), _exclusive: exclusive })
    }

    fn new(adapter: wgpu::Adapter) -> Self {
        let info = adapter.get_info();
        let exclusive = (info.backend == Backend::Gl).then(Arc::default);
        Self { adapter, instance: None, name: short_name(info.backend, &info.name), exclusive }
    }
}

impl fmt::Display for TestAdapter {
    /// `NAME | DRIVER`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let info = self.info();
        let driver = format!("{} {}", info.driver, info.driver_info);
        write!(f, "{} | {}", self.name, driver.trim())
    }
}

/// A device and its queue, and the right to use them.
pub(crate) struct TestDevice {
    /// The device.
    pub(crate) device: wgpu::Device,
    /// Its queue.
    pub(crate) queue: wgpu::Queue,
    instance: Option<wgpu::Instance>,
    // Last, so that it is released after the device.
    _exclusive: Option<ThreadLockGuard>,
}

impl TestDevice {
    /// Buffers, bind groups, compute pipelines and command encoders that exist, by wgpu's own count: a backend's for this
    /// device, or, for noop, which counts nothing, that of the instance, which the adapter has to itself.
    pub(crate) fn existing(&self) -> [usize; 4] {
        if let Some(report) = self.instance.as_ref().and_then(wgpu::Instance::generate_report) {
            let hub = report.hub;
            let encoders = hub.command_encoders.num_allocated + hub.command_buffers.num_allocated;
            return [
                hub.buffers.num_allocated,
                hub.bind_groups.num_allocated,
                hub.compute_pipelines.num_allocated,
                encoders,
            ];
        }
        let hal = self.device.get_internal_counters().hal;
        let counters = [&hal.buffers, &hal.bind_groups, &hal.compute_pipelines, &hal.command_encoders];
        counters.map(|counter| usize::try_from(counter.read()).expect("a count"))
    }
}

/// A device of a noop adapter that has enabled everything the adapter offers.
pub(crate) fn noop_device(
    limits: Limits,
    features: Features,
    subgroup_sizes: RangeInclusive<u32>,
) -> TestDevice {
    TestAdapter::noop(limits.clone(), features, subgroup_sizes)
        .request_device(limits, features)
        .expect("a noop adapter grants what it was made to offer")
}

/// A noop device that binds 4 PiB: for asking it for memory that no machine has. Only without its flags does wgpu pass on
/// limits beyond 32 bits.
pub(crate) fn open_noop_without_limits() -> TestDevice {
    let limits =
        Limits { max_storage_buffer_binding_size: 1 << 52, max_buffer_size: 1 << 52, ..Limits::default() };
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.flags = wgpu::InstanceFlags::empty();
    descriptor.backend_options.noop =
        wgpu::NoopBackendOptions { enable: true, limits: Some(limits.clone()), ..Default::default() };
    let found = wgpu::Instance::new(descriptor).enumerate_adapters(Backends::NOOP).block_on();
    let adapter = found.into_iter().next().expect("wgpu's noop backend has one adapter");
    TestAdapter::new(adapter)
        .request_device(limits, Features::empty())
        .expect("a noop adapter grants what it was made to offer")
}

/// All adapters of the machine, each once: a driver may be listed twice, and DX12 repeats its own.
fn find_adapters() -> Vec<TestAdapter> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let mut seen = HashSet::new();
    instance
        .enumerate_adapters(Backends::PRIMARY | Backends::GL)
        .block_on()
        .into_iter()
        .filter(|adapter| {
            let info = adapter.get_info();
            seen.insert((info.backend, info.name, info.driver, info.driver_info))
        })
        .map(TestAdapter::new)
        .collect()
}

fn short_name(backend: Backend, adapter_name: &str) -> String {
    let short = if adapter_name.starts_with("SwiftShader") {
        "swiftshader"
    } else if !adapter_name.starts_with("llvmpipe") {
        adapter_name
    } else if backend == Backend::Vulkan {
        "lavapipe"
    } else {
        "llvmpipe"
    };
    format!("{backend}:{short}")
}

fn parts_from_env(variable: &str) -> Vec<String> {
    let list = std::env::var(variable).unwrap_or_default();
    list.split(',').map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// Keeps what matches `only`, everything if that is empty, and checks that nothing required is missing.
fn select<A>(
    found: Vec<A>,
    only: &[String],
    required: &[String],
    name: impl Fn(&A) -> &str,
) -> Result<Vec<A>, String> {
    let matches = |adapter: &A, part: &String| name(adapter).to_lowercase().contains(&part.to_lowercase());
    let all_names = found.iter().map(&name).collect::<Vec<_>>().join(", ");
    let selected: Vec<A> = found
        .into_iter()
        .filter(|adapter| only.is_empty() || only.iter().any(|part| matches(adapter, part)))
        .collect();
    if selected.is_empty() && !only.is_empty() {
        return Err(format!(
            "no adapter matches {ADAPTERS_VARIABLE}={}; this machine has: {all_names}",
            only.join(",")
        ));
    }
    let missing: Vec<_> = required
        .iter()
        .filter(|part| !selected.iter().any(|adapter| matches(adapter, part)))
        .map(String::as_str)
        .collect();
    if !missing.is_empty() {
        return Err(format!(
            "{REQUIRE_ADAPTERS_VARIABLE} asks for {}, which this run does not have; \
             this machine has: {all_names}",
            missing.join(",")
        ));
    }
    Ok(selected)
}

fn announce(adapters: &[TestAdapter]) {
    let mut lines: String = adapters.iter().map(|adapter| format!("adapter: {adapter}\n")).collect();
    if adapters.is_empty() {
        lines = "adapter: none found, so the tests that need one check nothing; \
                 on Debian, `apt-get install mesa-vulkan-drivers libvulkan1` provides one\n"
            .to_owned();
    }
    // Not `eprint!`, which the test harness captures. That the line cannot be written fails no test.
    let _ = std::io::stderr().write_all(lines.as_bytes());
}

/// A lock that one thread may take several times.
#[derive(Default)]
struct ThreadLock {
    holder: Mutex<Option<(ThreadId, usize)>>,
    released: Condvar,
}

struct ThreadLockGuard(Arc<ThreadLock>);

impl ThreadLock {
    fn lock(self: &Arc<Self>) -> ThreadLockGuard {
        let this_thread = thread::current().id();
        let mut holder = self
            .released
            .wait_while(self.holder(), |holder| holder.is_some_and(|(thread, _)| thread != this_thread))
            .unwrap_or_else(PoisonError::into_inner);
        let depth = holder.map_or(0, |(_, depth)| depth);
        *holder = Some((this_thread, depth + 1));
        ThreadLockGuard(Arc::clone(self))
    }

    fn holder(&self) -> MutexGuard<'_, Option<(ThreadId, usize)>> {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ThreadLockGuard {
    fn drop(&mut self) {
        let mut holder = self.0.holder();
        *holder = match *holder {
            Some((thread, depth)) if depth > 1 => Some((thread, depth - 1)),
            _ => None,
        };
        self.0.released.notify_one();
    }
}

mod tests {
    use super::*;

    #[test]
    fn every_adapter_computes() {
        on_each_adapter(|adapter| {
            let gpu = adapter
                .request_device(Limits::downlevel_defaults(), Features::empty())
                .expect("every adapter has the downlevel limits");
            assert_eq!(double(&gpu, &[1, 2, 3]), [2, 4, 6]);
        });
    }

    #[test]
    fn a_thread_may_use_two_devices_of_an_adapter_while_others_wait_for_theirs() {
        on_each_adapter(|adapter| {
            thread::scope(|scope| {
                for first in 0..3 {
                    scope.spawn(move || {
                        let open = || {
                            adapter
                                .request_device(Limits::downlevel_defaults(), Features::empty())
                                .expect("every adapter has the downlevel limits")
                        };
                        let (one, other) = (open(), open());
                        assert_eq!(double(&other, &[first]), [2 * first]);
                        assert_eq!(double(&one, &[first + 1]), [2 * first + 2]);
                        drop(one);
                        assert_eq!(double(&other, &[first + 2]), [2 * first + 4]);
                    });
                }
            });
        });
    }

    #[test]
    fn a_noop_device_reports_what_it_was_made_with() {
        let limits = Limits { max_storage_buffer_binding_size: 1 << 27, ..Limits::default() };
        let gpu = noop_device(limits.clone(), Features::SUBGROUP, 16..=32);
        let info = gpu.device.adapter_info();
        assert_eq!(gpu.device.limits(), limits);
        assert_eq!(gpu.device.features(), Features::SUBGROUP);
        assert_eq!((info.subgroup_min_size, info.subgroup_max_size), (16, 32));
    }

    #[test]
    fn what_exists_is_counted_on_every_adapter() {
        let check = |gpu: &TestDevice| {
            let before = gpu.existing();
            let descriptor = wgpu::BufferDescriptor {
                label: None,
                size: 16,
                usage: wgpu::BufferUsages::STORAGE,
                mapped_at_creation: false,
            };
            let buffers = [(); 3].map(|()| gpu.device.create_buffer(&descriptor));
            assert_eq!(gpu.existing()[0], before[0] + 3);
            drop(buffers);
            gpu.device.poll(wgpu::PollType::wait_indefinitely()).expect("an idle device");
            assert_eq!(gpu.existing(), before);
        };
        check(&noop_device(Limits::default(), Features::empty(), 8..=8));
        on_each_adapter(|adapter| {
            let gpu = adapter.request_device(Limits::downlevel_defaults(), Features::empty());
            check(&gpu.expect("every adapter has the downlevel limits"));
        });
    }

    #[test]
    fn a_noop_adapter_refuses_what_it_was_not_made_to_offer() {
        let adapter = TestAdapter::noop(Limits::default(), Features::SHADER_F16, 32..=32);
        assert!(adapter.request_device(adapter.limits(), adapter.features()).is_ok());
        assert!(adapter.request_device(adapter.limits(), Features::SUBGROUP).is_err());
        let larger = Limits { max_buffer_size: adapter.limits().max_buffer_size + 4, ..adapter.limits() };
        assert!(adapter.request_device(larger, Features::empty()).is_err());
    }

    #[test]
    fn adapters_are_selected_by_parts_of_their_names_in_any_case() {
        let found = || vec!["vulkan:lavapipe", "vulkan:swiftshader", "gl:llvmpipe"];
        let parts = |list: &[&str]| list.iter().map(|&part| part.to_owned()).collect::<Vec<_>>();
        let select =
            |only: &[&str], required: &[&str]| select(found(), &parts(only), &parts(required), |&name| name);
        assert_eq!(select(&[], &[]), Ok(found()));
        assert_eq!(select(&["GL:"], &[]), Ok(vec!["gl:llvmpipe"]));
        assert_eq!(select(&["pipe"], &["lavapipe"]), Ok(vec!["vulkan:lavapipe", "gl:llvmpipe"]));
        assert!(select(&["nvidia"], &[]).is_err_and(|message| message.contains("gl:llvmpipe")));
        assert!(select(&["gl:"], &["lavapipe"]).is_err_and(|message| message.contains("lavapipe")));
        assert!(select(&[], &["nvidia"]).is_err_and(|message| message.contains("nvidia")));
    }

    /// Doubles `numbers` with a shader.
    fn double(gpu: &TestDevice, numbers: &[u32]) -> Vec<u32> {
        const SHADER: &str = "
            @group(0) @binding(0) var<storage, read_write> numbers: array<u32>;
            @compute @workgroup_size(1)
            fn main(@builtin(workgroup_id) id: vec3<u32>) { numbers[id.x] *= 2u; }";
        let TestDevice { device, queue, .. } = gpu;
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: None,
            source: wgpu::ShaderSource::Wgsl(SHADER.into()),
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: None,
            layout: None,
            module: &module,
            entry_point: None,
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        });
        let new_buffer = |usage| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: size_of_val(numbers) as u64,
                usage,
                mapped_at_creation: false,
            })
        };
        let storage = new_buffer(
            wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
        );
        let readback = new_buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
        let bind_group = device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &[wgpu::BindGroupEntry { binding: 0, resource: storage.as_entire_binding() }],
        });
        queue.write_buffer(&storage, 0, bytemuck::cast_slice(numbers));
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            pass.set_pipeline(&pipeline);
            pass.set_bind_group(0, &bind_group, &[]);
            pass.dispatch_workgroups(numbers.len() as u32, 1, 1);
        }
        encoder.copy_buffer_to_buffer(&storage, 0, &readback, 0, None);
        queue.submit([encoder.finish()]);
        readback.map_async(wgpu::MapMode::Read, .., |result| result.expect("the buffer can be mapped"));
        device.poll(wgpu::PollType::wait_indefinitely()).expect("the queue finishes");
        let view = readback.get_mapped_range(..).expect("the buffer is mapped");
        bytemuck::cast_slice(&view).to_vec()
    }
}

/// A pool of 16 blocks of 4 tokens in f16, a host pool of 8 blocks, and four tables.
pub(crate) fn small_pool(shape: &ModelShape) -> CacheConfig {
    CacheConfig::for_blocks(16, shape, KvType::F16)
        .and_then(|config| config.with_block_size(4))
        .and_then(|config| config.with_host_blocks(8))
        .and_then(|config| config.with_max_sequences(4))
        .expect("a valid configuration")
}
