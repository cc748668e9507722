//! The `device_report` example, on every software adapter: its JSON against what wgpu and arithmetic say.

use super::{Ended, program, run};
use approx::abs_diff_eq;
use measure::{
    cache::{Case, Sequence},
    gpu::Gpu,
};
use paged_kv::KvType;
use serde_json::Value;

// Its parts by themselves, where no process can be brought to what is tested.
#[allow(dead_code)]
#[path = "../device_report/adapters.rs"]
mod adapters;
#[allow(dead_code)]
#[path = "../device_report/cases.rs"]
mod cases;
#[allow(dead_code)]
#[path = "../device_report/check.rs"]
mod check;
#[allow(dead_code)]
#[path = "../device_report/models.rs"]
mod models;
#[allow(dead_code)]
#[path = "../device_report/rates.rs"]
mod rates;
#[allow(dead_code)]
#[path = "../device_report/report.rs"]
mod report;
#[allow(dead_code)]
#[path = "../device_report/requests.rs"]
mod requests;
#[allow(dead_code)]
#[path = "../device_report/step.rs"]
mod step;

mod failures;

/// On software adapters the report leaves them out: there they say nothing. Here they are the times of eight heads over a
/// few blocks, the results of which the benches compare.
#[test]
fn what_a_card_is_asked_can_be_measured() {
    let Some(adapter) = failures::vulkan_adapter() else {
        return println!("device_report: NOT RUN, ratios: there is no Vulkan adapter");
    };
    let gpu = Gpu::on(&adapter).unwrap();
    let case = Case {
        num_layers: 2,
        num_query_heads: 8,
        num_kv_heads: 4,
        head_dim: 64,
        kv_type: KvType::F16,
        block_size: 16,
        sequences: vec![Sequence { rows: 1, context: 300 }; 2],
    };
    let (ratios, failure) = rates::ratios(&gpu, &case);
    assert!(failure.is_none(), "{failure:?}");
    for ratio in [ratios.over_contiguous, ratios.key_columns] {
        assert!(ratio.is_some_and(|ratio| (0.1..10.0).contains(&ratio)), "{ratios:?}");
    }
    gpu.wait().unwrap();
}

fn run_report(arguments: &[&str]) -> Ended {
    run(program("device_report").args(arguments), "")
}

#[test]
fn lavapipe_is_reported_as_it_is() {
    check_report("lavapipe", "llvmpipe", "vulkan", &["--check", "1"]);
}

#[test]
fn swiftshader_is_reported_as_it_is() {
    check_report("swiftshader", "SwiftShader", "vulkan", &["--check", "1"]);
}

/// Without the self-check: GLSL compilers take half a minute and more for each of its cases.
#[test]
fn llvmpipe_on_gl_is_reported_as_it_is() {
    check_report("gl:llvmpipe", "llvmpipe", "gl", &[]);
}

/// Runs the program on one adapter and compares what it prints.
fn check_report(device: &str, name: &str, backend: &str, more: &[&str]) {
    let adapters = adapters();
    let labels: Vec<String> = adapters.iter().map(label).collect();
    let Some(at) = labels.iter().position(|label| label.starts_with(name) && label.ends_with(backend)) else {
        let required = std::env::var("PAGED_KV_REQUIRE_ADAPTERS").unwrap_or_default();
        assert!(!required.contains(device), "the adapter {device} is missing, and required");
        println!("device_report on {device}: NOT RUN, there is no such adapter");
        return;
    };
    let adapter = &adapters[at];
    let ended = run_report(&[&["--json", "--pool", "3000", "--adapter", &labels[at]], more].concat());
    assert_eq!(ended.status, 0, "{}{}", ended.out, ended.err);
    let json: Value = serde_json::from_str(&ended.out).unwrap();

    assert_eq!(json["versions"]["paged_kv"], "0.1.0");
    assert_eq!(json["versions"]["os"], std::env::consts::OS);
    let chosen = &json["adapters"][json["adapter"].as_u64().unwrap() as usize];
    let info = adapter.get_info();
    assert_eq!(chosen["label"].as_str(), Some(labels[at].as_str()));
    assert_eq!(chosen["driver_info"].as_str(), Some(info.driver_info.as_str()));
    assert_eq!(chosen["device_type"], "Cpu");
    let mut listed: Vec<_> = json["adapters"].as_array().unwrap().iter().map(|one| &one["label"]).collect();
    listed.dedup();
    assert!(labels.iter().all(|label| listed.iter().any(|listed| *listed == label)), "{listed:?} {labels:?}");

    let binding = check_requests(&json["requests"], adapter);
    check_models(&json["models"], 3000 << 20, binding);
    check_rates(&json["rates"], adapter);
    match more {
        [] => assert!(json["check"].is_null()),
        _ => check_numbers(&json["check"]),
    }
}

fn adapters() -> Vec<wgpu::Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.flags = wgpu::InstanceFlags::empty();
    pollster::block_on(wgpu::Instance::new(descriptor).enumerate_adapters(wgpu::Backends::all()))
}

fn label(adapter: &wgpu::Adapter) -> String {
    let info = adapter.get_info();
    format!("{} on {}", info.name, info.backend)
}

/// Bytes that a binding may have.
fn check_requests(requests: &Value, adapter: &wgpu::Adapter) -> u64 {
    let find =
        |name: &str| requests.as_array().unwrap().iter().find(|request| request["name"] == name).unwrap();
    let number = |request: &Value, key: &str| request[key].as_u64().unwrap();
    let limits = adapter.limits();
    let mut least = u64::MAX;
    for (name, offered, default) in [
        ("max_storage_buffer_binding_size", limits.max_storage_buffer_binding_size, 128 << 20),
        ("max_buffer_size", limits.max_buffer_size, 256 << 20),
    ] {
        let request = find(name);
        assert_eq!((number(request, "offered"), number(request, "default")), (offered, default), "{name}");
        // Software adapters offer at least the defaults.
        assert_eq!(number(request, "request"), offered.max(default), "{name}");
        least = least.min(number(request, "request"));
    }
    let subgroups = u64::from(adapter.features().contains(wgpu::Features::SUBGROUP));
    assert_eq!(
        (number(find("SUBGROUP"), "offered"), number(find("SUBGROUP"), "request")),
        (subgroups, subgroups)
    );
    assert_eq!(number(find("SHADER_F16"), "request"), 0);
    least
}

fn check_models(models: &Value, pool_bytes: u64, binding: u64) {
    let expected = [
        ("SmolLM2-135M", 30, 3, 64, 23_040),
        ("Llama-3.2-3B", 28, 8, 128, 114_688),
        ("Llama-3.1-8B", 32, 8, 128, 131_072),
        ("Qwen2.5-14B", 48, 8, 128, 196_608),
    ];
    assert_eq!(models.as_array().unwrap().len(), expected.len());
    for (model, (name, layers, kv_heads, head_dim, bytes_per_token)) in
        models.as_array().unwrap().iter().zip(expected)
    {
        let number = |key: &str| model[key].as_u64().unwrap();
        assert_eq!(model["model"], name);
        assert_eq!(number("bytes_per_token"), 2 * layers * kv_heads * head_dim * 2);
        assert_eq!(number("bytes_per_token"), bytes_per_token);
        // The pool and its block tables fill what was given; tables are a small part.
        let (blocks, tokens) = (number("blocks"), number("tokens"));
        assert_eq!(tokens, 16 * blocks);
        assert!(
            tokens * bytes_per_token <= pool_bytes && tokens * bytes_per_token > pool_bytes / 10 * 9,
            "{model}"
        );
        let layer_block = 16 * bytes_per_token / layers;
        let arena = binding.min((2 << 30) - 4);
        assert_eq!(number("most_tokens"), arena / layer_block * 16, "{model}");
        assert_eq!(number("most_bytes"), number("most_tokens") * bytes_per_token);
        let layers_per_arena = arena / (blocks * layer_block);
        assert_eq!(number("arenas"), layers.div_ceil(layers_per_arena.min(layers)), "{model}");
    }
}

fn check_rates(rates: &Value, adapter: &wgpu::Adapter) {
    assert_eq!(rates["software"], true);
    let names: Vec<&str> = rates["variants"]
        .as_array()
        .unwrap()
        .iter()
        .map(|variant| variant["name"].as_str().unwrap())
        .collect();
    let subgroups = adapter.features().contains(wgpu::Features::SUBGROUP);
    let reduction = if subgroups { "subgroup" } else { "workgroup" };
    assert_eq!(names.len(), 5, "{names:?}");
    // Two queries at a time where shaders compile slowly.
    let kernels = match adapter.get_info().backend {
        wgpu::Backend::Gl => ["attention_decode.f16.d128.q2", "attention_prefill.f16.d128.q2"],
        _ => ["attention_decode.f16.d128.q4", "attention_prefill.f16.d128"],
    };
    for kernel in kernels {
        assert!(names.contains(&format!("{kernel}.{reduction}").as_str()), "{names:?}");
    }
    let number = |value: &Value| value.as_f64().unwrap();
    let (read, decode) = (number(&rates["read_bytes_per_s"]), &rates["decode"]);
    assert!(read > 1e6 && number(&rates["copy_bytes_per_s"]) > 1e6, "{rates}");
    // Keys and values of four chats in one layer.
    let bytes = 4.0 * number(&decode["context"]) * 2.0 * 8.0 * 128.0 * 2.0;
    let rate = bytes / number(&decode["layer_seconds"]);
    let is_same = |ratio: f64| abs_diff_eq!(ratio, 1.0, epsilon = 1e-6);
    assert!(is_same(number(&decode["bytes_per_s"]) / rate), "{rates}");
    assert!(is_same(number(&decode["share_of_stream_read"]) * read / rate), "{rates}");
}

/// At least one case was run, and its errors are those of f32: neither none nor many.
fn check_numbers(check: &Value) {
    assert_eq!(check["passed"], true, "{check}");
    let cases = check["cases"].as_array().unwrap();
    assert_eq!(check["cases_run"].as_u64().unwrap() as usize, cases.len());
    assert!(!cases.is_empty() && cases.len() < check["cases_total"].as_u64().unwrap() as usize);
    for case in cases {
        assert!(case["failure"].is_null(), "{case}");
        for error in ["decode_error", "prefill_error"] {
            let error = case[error].as_f64().unwrap();
            assert!(error > 1e-9 && error < 1e-5, "{case}");
        }
    }
}

#[test]
fn the_text_fits_a_terminal_and_says_what_the_json_says() {
    let ended = run_report(&[]);
    if adapters().is_empty() {
        assert_eq!(ended.status, 2);
        assert!(ended.err.starts_with("device_report: no adapter was found; "), "{}", ended.err);
        return;
    }
    assert_eq!(ended.status, 0, "{}", ended.err);
    for line in ended.out.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
    for words in ["SUBGROUP", "SmolLM2-135M", "Qwen2.5-14B", "GB/s", "numbers: not checked"] {
        assert!(ended.out.contains(words), "{words}: {}", ended.out);
    }
    assert_eq!(ended.out.lines().filter(|line| line.starts_with("* ")).count(), 1);
}

#[test]
fn an_adapter_that_is_not_there_is_answered_with_those_that_are() {
    for json in [&[][..], &["--json"]] {
        let ended = run_report(&[&["--adapter", "no such"], json].concat());
        assert_eq!((ended.status, ended.out.as_str(), ended.err.lines().count()), (2, "", 1));
        for label in adapters().iter().map(label) {
            assert!(ended.err.contains(&label), "{}", ended.err);
        }
    }
}

#[test]
fn a_wrong_option_is_answered_without_a_report() {
    let ended = run_report(&["--json", "--chekc"]);
    assert_eq!((ended.status, ended.out.as_str()), (2, ""));
    assert!(ended.err.contains("--chekc"), "{}", ended.err);
}
