//! One conversation through all kernels on every adapter, against the dense attention.

use paged_kv::{AttentionOptions, KvFormat, KvType, LayerTensors, PagedAttention, StepPlan, TensorSlice};
use wgpu::BufferUsages;

use crate::device::{TestDevice, on_each_adapter};
use crate::rig::{Rig, Tensors};

struct Gpu {
    gpu: TestDevice,
    attention: PagedAttention,
}

impl Gpu {
    fn run(&mut self, rig: &Rig, plan: &StepPlan, tensors: &Tensors) -> Vec<f32> {
        let rows = plan.num_rows();
        let device = &self.gpu.device;
        let make = |data: &[f32], usage| {
            let buffer = device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: data.len() as u64 * 4,
                usage: BufferUsages::STORAGE | usage,
                mapped_at_creation: false,
            });
            self.gpu.queue.write_buffer(&buffer, 0, bytemuck::cast_slice(data));
            buffer
        };
        let out_len = rows as usize * rig.shape.num_query_heads as usize * rig.v_len;
        let (query, key) =
            (make(&tensors.query, BufferUsages::COPY_DST), make(&tensors.key, BufferUsages::COPY_DST));
        let value = make(&tensors.value, BufferUsages::COPY_DST);
        let output = make(&vec![f32::NAN; out_len], BufferUsages::COPY_DST | BufferUsages::COPY_SRC);
        let slice = |buffer, elements: usize| TensorSlice {
            buffer,
            offset: 0,
            row_stride: elements as u32 / rows,
            rows,
        };
        let bound = self
            .attention
            .bind_tensors(&LayerTensors {
                query: slice(&query, tensors.query.len()),
                key: slice(&key, tensors.key.len()),
                value: slice(&value, tensors.value.len()),
                output: slice(&output, out_len),
            })
            .expect("valid tensors");
        let readback = device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: output.size(),
            usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut step = self.attention.prepare(plan).expect("a valid plan");
        let mut encoder = device.create_command_encoder(&Default::default());
        self.attention.record_transfers(&mut encoder, &mut step);
        let mut pass = encoder.begin_compute_pass(&Default::default());
        self.attention.record_block_copies(&mut pass, &mut step);
        self.attention.record_layer(&mut pass, &mut step, 0, &bound).expect("the right order");
        drop(pass);
        encoder.copy_buffer_to_buffer(&output, 0, &readback, 0, output.size());
        self.gpu.queue.submit([encoder.finish()]);
        readback.map_async(wgpu::MapMode::Read, .., |result| result.expect("a mapped buffer"));
        device.poll(wgpu::PollType::wait_indefinitely()).expect("a working device");
        let mapped = readback.get_mapped_range(..).expect("a mapped buffer");
        bytemuck::cast_slice(&mapped).to_vec()
    }
}

#[test]
fn a_conversation_runs_on_every_adapter() {
    on_each_adapter(|adapter| {
        for subgroups in [false, true] {
            for format in
                [KvFormat::from(KvType::F16), KvType::F32.into(), KvFormat::new(KvType::F16, KvType::F32)]
            {
                for (heads, block_size) in
                    [((9, 3, 64), 16), ((2, 2, 80), 4), ((11, 1, 128), 256), ((4, 4, 8), 1)]
                {
                    if subgroups && !adapter.features().contains(wgpu::Features::SUBGROUP) {
                        continue;
                    }
                    let features = if subgroups { wgpu::Features::SUBGROUP } else { wgpu::Features::empty() };
                    let gpu = adapter.request_device(wgpu::Limits::default(), features).expect("a device");
                    let mut rig = Rig::new(heads, format, block_size, 1400 / block_size);
                    rig.shuffle_free_blocks();
                    let config = *rig.kv.config();
                    let options = AttentionOptions::default().fixed_span_tokens(128);
                    let attention =
                        PagedAttention::with_options(&gpu.device, &gpu.queue, rig.shape, config, options)
                            .expect("an attention object");
                    let mut gpu = Gpu { gpu, attention };
                    let tables: Vec<_> = (0..3).map(|_| rig.open()).collect();
                    for pushes in
                        [[(0, 100), (1, 65), (2, 1)], [(0, 37), (1, 1), (2, 60)], [(0, 1), (1, 1), (2, 1)]]
                    {
                        let pushes: Vec<_> = pushes.map(|(i, n): (usize, u32)| (tables[i], n)).into();
                        let plan = rig.plan(&pushes);
                        let tensors = rig.tensors(&plan);
                        rig.write(&plan, &tensors);
                        let output = gpu.run(&rig, &plan, &tensors);
                        rig.assert_dense(&plan, &tensors, &output, 1e-5);
                        rig.commit(plan);
                    }
                    println!("{adapter}: {:?}", gpu.attention.variants().collect::<Vec<_>>());
                }
            }
        }
    });
}
