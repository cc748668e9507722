//! The kernels against their CPU twins, on every native adapter of this machine.

use approx::abs_diff_eq;

use super::{Adapters, Gpu, GpuModel, buffers::bytes_of};
use crate::{config::Config, cpu::CpuModel, synthetic::Synthetic};

/// What a step leaves behind.
struct Left {
    /// The last layer's queries, keys and values.
    query_key_value: Vec<f32>,
    logits: Vec<Vec<f32>>,
}

/// Attention's output, in place of attention: any numbers will do.
fn attended(config: &Config, num_rows: usize) -> Vec<f32> {
    (0..num_rows * config.query_len() as usize).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect()
}

fn on_gpu(model: &mut GpuModel, token_ids: &[u32], positions: &[u32], logit_rows: &[u32]) -> Left {
    model.reserve(token_ids.len() as u32, logit_rows.len() as u32).expect("a small model fits");
    model.write_inputs(token_ids, positions, logit_rows);
    let gpu = model.gpu().clone();
    let rows = attended(model.config(), token_ids.len());
    gpu.queue.write_buffer(model.attended(), 0, bytemuck::cast_slice(&rows));
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    let mut pass = encoder.begin_compute_pass(&Default::default());
    let recorded: Result<(), ()> = model.record_layers(&mut pass, token_ids.len() as u32, |_, _| Ok(()));
    recorded.expect("nothing fails");
    model.record_logits(&mut pass, logit_rows.len() as u32);
    drop(pass);
    model.record_readback(&mut encoder, logit_rows.len() as u32);
    gpu.queue.submit([encoder.finish()]);
    let mut logits = Vec::new();
    model
        .read_logits(logit_rows.len() as u32, |_, row| logits.push(row.to_vec()))
        .expect("the device finishes");
    let query_key_value = bytemuck::pod_collect_to_vec(&bytes_of(&gpu, model.query_key_value()));
    Left { query_key_value, logits }
}

fn assert_same(config: &Config, gpu: &Left, cpu: &CpuModel, inputs: [&[u32]; 3], what: &str) {
    let [token_ids, positions, logit_rows] = inputs;
    let mut last = None;
    let logits = cpu
        .forward(token_ids, positions, logit_rows, |_, tensors| {
            last = Some(tensors);
            attended(config, token_ids.len())
        })
        .expect("small products succeed");
    let last = last.expect("there are layers");
    let (query_len, kv_len) = (config.query_len() as usize, config.kv_len() as usize);
    for row in 0..token_ids.len() {
        let on_gpu = &gpu.query_key_value[row * config.query_key_value_len() as usize..];
        for (name, start, expected) in [
            ("query", 0, &last.query[row * query_len..][..query_len]),
            ("key", config.key_start(), &last.key[row * kv_len..][..kv_len]),
            ("value", config.value_start(), &last.value[row * kv_len..][..kv_len]),
        ] {
            let found = &on_gpu[start as usize..][..expected.len()];
            assert_close(found, expected, &format!("{what}, {name} of row {row}"));
        }
    }
    let vocab_len = config.vocab_len as usize;
    assert_eq!(gpu.logits.len(), logit_rows.len());
    for (index, (found, expected)) in gpu.logits.iter().zip(logits.chunks(vocab_len)).enumerate() {
        assert_close(found, expected, &format!("{what}, logits {index}"));
    }
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    let largest = expected.iter().fold(1.0f32, |largest, x| largest.max(x.abs()));
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let is_close = abs_diff_eq!(found, expected, epsilon = 1e-5 * largest);
        assert!(is_close, "{what}, element {index}: {found} on the GPU, {expected} on the CPU");
    }
}

#[test]
fn steps_of_any_height_equal_the_cpu_twin() {
    for tied in [true, false] {
        let synthetic = Synthetic::new(tied);
        let config = Config::read(&mut synthetic.open()).expect("the model is whole");
        let cpu = CpuModel::load(&mut synthetic.open(), config.clone(), &mut |_| ()).expect("it loads");
        let adapters = Adapters::find(None);
        if adapters.all().is_empty() {
            eprintln!("no adapter: the kernels were compared with nothing");
        }
        for adapter in adapters.all() {
            let gpu = Gpu::open(adapter).expect("the adapter opens");
            let label = gpu.label.clone();
            let mut model =
                GpuModel::load(gpu, &mut synthetic.open(), config.clone(), &mut |_| ()).expect("it loads");
            for num_rows in [1u32, 2, 3, 7, 16, 35] {
                let token_ids: Vec<u32> = (0..num_rows).map(|row| row * 83 % config.vocab_len).collect();
                let positions: Vec<u32> = (0..num_rows).map(|row| row * 7 % config.context_len).collect();
                let logit_rows: Vec<u32> = (0..num_rows).rev().step_by(2).collect();
                let inputs = [&token_ids[..], &positions, &logit_rows];
                let left = on_gpu(&mut model, &token_ids, &positions, &logit_rows);
                assert_same(&config, &left, &cpu, inputs, &format!("{num_rows} rows on {label}"));
            }
        }
    }
}

#[test]
fn matrices_beyond_a_binding_are_split() {
    let synthetic = Synthetic::new(true);
    let config = Config::read(&mut synthetic.open()).expect("the model is whole");
    let cpu = CpuModel::load(&mut synthetic.open(), config.clone(), &mut |_| ()).expect("it loads");
    let adapters = Adapters::find(None);
    let Some(adapter) = adapters.best() else {
        eprintln!("no adapter: nothing was split");
        return;
    };
    // Room for two pairs of groups of the embedding: it comes in three parts, of 128, 128 and 1 tokens.
    let required_limits = wgpu::Limits {
        max_storage_buffer_binding_size: 24 << 10,
        ..wgpu::Limits::default().or_worse_values_from(&adapter.limits())
    };
    let descriptor = wgpu::DeviceDescriptor { required_limits, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("it opens");
    let gpu = Gpu::from_device(device, queue);
    let mut model =
        GpuModel::load(gpu, &mut synthetic.open(), config.clone(), &mut |_| ()).expect("it loads");
    assert_eq!(model.weights.embedding.parts.len(), 3);
    let inputs = [&[0, 127, 128, 255, 256][..], &[0, 1, 2, 3, 4], &[0, 4]];
    let left = on_gpu(&mut model, inputs[0], inputs[1], inputs[2]);
    assert_same(&config, &left, &cpu, inputs, "split");
}

#[test]
fn a_row_does_not_depend_on_the_rows_beside_it() {
    let synthetic = Synthetic::new(true);
    let config = Config::read(&mut synthetic.open()).expect("the model is whole");
    for adapter in Adapters::find(None).all() {
        let gpu = Gpu::open(adapter).expect("the adapter opens");
        let mut model =
            GpuModel::load(gpu, &mut synthetic.open(), config.clone(), &mut |_| ()).expect("it loads");
        let alone = on_gpu(&mut model, &[65], &[9], &[0]).logits;
        // The stand-in for attention is the same in row 0.
        let beside = on_gpu(&mut model, &[65; 20], &[9; 20], &[0]).logits;
        assert_eq!(alone, beside);
    }
}
