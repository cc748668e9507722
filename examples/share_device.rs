//! The smallest complete embedding: one device, one encoder and one submit per frame, for drawing and for decoding.
//!
//! The model is a stand-in of two shaders (`project` writes queries, keys and values of the step's rows, `choose` turns
//! attention outputs into tokens on the GPU); everything around it is what a real application does. Nothing here waits
//! for the device: the chosen tokens are mapped when they are there, and the step is committed in a later frame.

use paged_kv::wgpu::{self, BufferUsages, PollType};
use paged_kv::{
    CacheConfig, KvType, LayerTensors, ModelShape, PagedAttention, Request, RowResult, Schedule, Scheduler,
    SchedulerConfig, StepEvent, StepPlan, TensorSlice, recommended_features, recommended_limits,
};
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const SHAPE: ModelShape = ModelShape::new(2, 4, 2, 16);
const ROWS: u32 = 32; // Most rows of a step: the scheduler is told, and the tensors are made for it.

/// The stand-in model. Rows are the step's tokens; `metadata` is the library's, where token ids and positions lie.
const MODEL: &str = "
struct Step { rows: u32, token_ids: u32, positions: u32, num_logit_rows: u32 }
@group(0) @binding(0) var<uniform> step: Step;
@group(0) @binding(1) var<storage, read> metadata: array<u32>;
@group(0) @binding(2) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(3) var<storage, read> output: array<f32>;
@group(0) @binding(4) var<storage, read> logit_rows: array<u32>;
@group(0) @binding(5) var<storage, read_write> tokens: array<u32>;

@compute @workgroup_size(64) fn project(@builtin(global_invocation_id) id: vec3<u32>) {
    let row = id.x / 128u; // 64 query, 32 key, 32 value elements
    let i = id.x % 128u;
    if (row >= step.rows) { return; }
    let token = f32(metadata[step.token_ids + row]);
    let position = f32(metadata[step.positions + row]);
    let element = sin(token * (0.37 + 0.011 * f32(i)) + position * 0.05 * f32(i % 8u));
    if (i < 64u) { qkv[row * 64u + i] = element; }
    else if (i < 96u) { qkv[2048u + row * 32u + i - 64u] = element; }
    else { qkv[3072u + row * 32u + i - 96u] = element; }
}

@compute @workgroup_size(64) fn choose(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x >= step.num_logit_rows) { return; }
    var best = 0u;
    for (var i = 1u; i < 64u; i++) {
        if (output[logit_rows[id.x] * 64u + i] > output[logit_rows[id.x] * 64u + best]) { best = i; }
    }
    tokens[id.x] = best;
}";

fn main() -> Result<(), Box<dyn Error>> {
    // An application has all this already. It asks for what the library recommends beside its own needs. WGPU_BACKEND and
    // WGPU_ADAPTER_NAME choose the adapter, as in wgpu's own examples.
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = pollster::block_on(wgpu::util::initialize_adapter_from_env_or_default(&instance, None))
        .map_err(|error| format!("{error}; docs/errors.md says what to install"))?;
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        required_features: recommended_features(&adapter),
        required_limits: recommended_limits(&adapter, wgpu::Limits::default()),
        ..Default::default()
    }))?;
    println!("{} ({:?})", adapter.get_info().name, adapter.get_info().backend);
    let texture = device.create_texture(&wgpu::TextureDescriptor {
        label: Some("window"),
        size: wgpu::Extent3d { width: 64, height: 64, depth_or_array_layers: 1 },
        mip_level_count: 1,
        sample_count: 1,
        dimension: wgpu::TextureDimension::D2,
        format: wgpu::TextureFormat::Rgba8Unorm,
        usage: wgpu::TextureUsages::RENDER_ATTACHMENT,
        view_formats: &[],
    });
    let window = texture.create_view(&Default::default());

    // The attention on the application's device, with the pool, and the scheduler.
    let cache = CacheConfig::for_context(256, 4, &SHAPE, KvType::F16)?;
    let mut attention = PagedAttention::new(&device, SHAPE, cache.clone())?;
    let mut scheduler = Scheduler::new(SchedulerConfig { step_tokens: ROWS, ..Default::default() }, cache)?;

    // The model's buffers and pipelines; the library binds its tensors once.
    let rows_of = |elements| u64::from(ROWS) * elements * 4;
    let buffer = |size, usage| {
        device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
    };
    let qkv = buffer(rows_of(128), BufferUsages::STORAGE);
    let output = buffer(rows_of(64), BufferUsages::STORAGE);
    let step_params = buffer(16, BufferUsages::UNIFORM | BufferUsages::COPY_DST);
    let logit_rows = buffer(rows_of(1), BufferUsages::STORAGE | BufferUsages::COPY_DST);
    let tokens = buffer(rows_of(1), BufferUsages::STORAGE | BufferUsages::COPY_SRC);
    let readback = buffer(rows_of(1), BufferUsages::MAP_READ | BufferUsages::COPY_DST);
    let slice = |buffer, offset, row_stride| TensorSlice { buffer, offset, row_stride, rows: ROWS };
    let tensors = attention.bind_tensors(&LayerTensors {
        query: slice(&qkv, 0, 64),
        key: slice(&qkv, rows_of(64), 32),
        value: slice(&qkv, rows_of(96), 32),
        output: slice(&output, 0, 64),
    })?;
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some("model"),
        source: wgpu::ShaderSource::Wgsl(MODEL.into()),
    });
    let pipeline = |entry_point| {
        device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(entry_point),
            layout: None,
            module: &module,
            entry_point: Some(entry_point),
            compilation_options: Default::default(),
            cache: None,
        })
    };
    let (project, choose) = (pipeline("project"), pipeline("choose"));
    let bind = |pipeline: &wgpu::ComputePipeline, entries: &[(u32, &wgpu::Buffer)]| {
        let mut bound = Vec::new();
        for &(binding, buffer) in entries {
            bound.push(wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() });
        }
        let layout = &pipeline.get_bind_group_layout(0);
        device.create_bind_group(&wgpu::BindGroupDescriptor { label: None, layout, entries: &bound })
    };
    let choose_group = bind(&choose, &[(0, &step_params), (3, &output), (4, &logit_rows), (5, &tokens)]);

    scheduler.add(Request::new([1, 2, 3, 4, 5]).max_new_tokens(20))?;
    scheduler.add(Request::new(vec![7; 40]).max_new_tokens(12))?;
    let mut in_flight: Option<(StepPlan, Arc<AtomicBool>)> = None;
    let (mut frames, mut steps, mut finished) = (0u32, 0u32, 0u32);

    // The frame loop. A real one is driven by the window system and never ends.
    while finished < 2 {
        frames += 1;
        device.poll(PollType::Poll)?; // Never waits; lets callbacks run.
        scheduler.complete_transfers(&attention.poll_transfers()); // What has arrived in a host pool, if there is one.

        // A step whose tokens have arrived is committed.
        if let Some((plan, _)) = in_flight.take_if(|(_, arrived)| arrived.load(Ordering::Acquire)) {
            let bytes = readback.slice(..).get_mapped_range()?; // Fails if the device was lost.
            let chosen = bytemuck::cast_slice(&bytes)[..plan.logit_rows().len()].iter();
            let results: Vec<_> = chosen.map(|&token| RowResult::Token(token)).collect();
            drop(bytes);
            readback.unmap();
            for event in scheduler.commit(plan, &results)? {
                println!("frame {frames}: {event:?}");
                finished += u32::from(matches!(event, StepEvent::Finished { .. }));
            }
        }

        let mut encoder = device.create_command_encoder(&Default::default());
        let schedule = in_flight.is_none().then(|| scheduler.schedule());
        if let Some(Schedule::Waiting(reason)) = &schedule {
            println!("frame {frames}: {reason:?}"); // No end: frames go on, and the next one asks again.
        }
        if let Some(Schedule::Step(plan)) = schedule {
            let mut step = attention.prepare(&plan)?;
            let rows: Vec<u32> = plan.logit_rows().iter().map(|logits| logits.row).collect();
            let params = [step.rows(), step.token_ids_start(), step.positions_start(), rows.len() as u32];
            queue.write_buffer(&step_params, 0, bytemuck::cast_slice(&params));
            queue.write_buffer(&logit_rows, 0, bytemuck::cast_slice(&rows));
            // `metadata` is one of a few buffers; a real application keeps a bind group for each.
            let group = bind(&project, &[(0, &step_params), (1, step.metadata()), (2, &qkv)]);
            attention.record_transfers(&mut encoder, &mut step);
            let mut pass = encoder.begin_compute_pass(&Default::default());
            attention.record_block_copies(&mut pass, &mut step);
            for layer in 0..SHAPE.num_layers() {
                pass.set_pipeline(&project);
                pass.set_bind_group(0, &group, &[]);
                pass.dispatch_workgroups(step.rows() * 2, 1, 1);
                attention.record_layer(&mut pass, &mut step, layer, &tensors)?;
            }
            pass.set_pipeline(&choose);
            pass.set_bind_group(0, &choose_group, &[]);
            pass.dispatch_workgroups(1, 1, 1);
            drop(pass);
            encoder.copy_buffer_to_buffer(&tokens, 0, &readback, 0, rows_of(1));
            let arrived = Arc::new(AtomicBool::new(false));
            in_flight = Some((plan, Arc::clone(&arrived)));
            let tell = move |_| arrived.store(true, Ordering::Release);
            encoder.map_buffer_on_submit(&readback, wgpu::MapMode::Read, .., tell);
            steps += 1;
        }
        draw(&mut encoder, &window, frames); // The frame is drawn whether a step is on its way or not.
        queue.submit([encoder.finish()]);
    }
    println!("{frames} frames, {steps} steps, {}", scheduler.stats().cache);
    Ok(())
}

/// Stands for whatever the application draws.
fn draw(encoder: &mut wgpu::CommandEncoder, window: &wgpu::TextureView, frame: u32) {
    let color = wgpu::Color { r: f64::from(frame % 256) / 255.0, g: 0.2, b: 0.4, a: 1.0 };
    encoder.begin_render_pass(&wgpu::RenderPassDescriptor {
        label: Some("frame"),
        color_attachments: &[Some(wgpu::RenderPassColorAttachment {
            view: window,
            depth_slice: None,
            resolve_target: None,
            ops: wgpu::Operations { load: wgpu::LoadOp::Clear(color), store: wgpu::StoreOp::Store },
        })],
        ..Default::default()
    });
}
