//! What naga writes for Vulkan and DX12, read by programs that have nothing to do with naga: `spirv-val` (Debian:
//! `spirv-tools`), glslang (`glslang-tools`), which compiles HLSL, and Microsoft's DXC (`tests/get-dxc`), which wgpu takes
//! wherever an application brings it along.
//!
//! SPIR-V: every variant of the run, unchecked as wgpu writes it for Vulkan 1.1, and checked as for Vulkan 1.3. HLSL: every
//! seventh of a sample and all of a matrix, because an attention kernel takes glslang and DXC a third of a second each;
//! checked and unchecked in turn. For DXC there are more with subgroup operations, one of 61 variants that have them: HLSL
//! has no semantics for their builtins, and only DXC sees whether naga has computed all of them. It compiles for shader
//! model 6.0 and for 6.6 with 16-bit types, as where an application has enabled `SHADER_F16`. glslang does not hold a text
//! to its shader model. What FXC makes of the texts is not seen here.
//!
//! Where a program is not installed, its test says so and passes, unless `PAGED_KV_REQUIRE_READERS` is 1. DXC is a library,
//! which `PAGED_KV_DXC` names; Python calls it.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use naga::back::hlsl::ShaderModel;
use paged_kv::shaders::{Kernel, VariantKey, all_variants};

use crate::shaders::variants;
use crate::writers::{validated, validated_text};

#[test]
fn spirv_val_accepts_every_variant() {
    let Some(program) = installed(&["spirv-val"]) else { return };
    let read = |words: &[u32], environment: &str| {
        feed(Command::new(program).args(["--target-env", environment, "-"]), bytemuck::cast_slice(words))
    };
    let variants = variants();
    for_each(&variants, |key| {
        let variant = validated(key);
        for (version, environment, checked) in [((1, 3), "vulkan1.1", false), ((1, 6), "vulkan1.3", true)] {
            if let Err(complaint) = read(&variant.spirv(version, checked), environment) {
                panic!("{key}, checked: {checked}, {environment}: {complaint}");
            }
        }
    });
    // That it does read: an instruction of another length.
    let mut broken = validated(&variants[0]).spirv((1, 3), false);
    broken[5] += 1 << 16;
    assert!(read(&broken, "vulkan1.1").is_err());
    announce(&format!("spirv-val: {} variants, unchecked and checked", variants.len()));
}

#[test]
fn glslang_compiles_the_hlsl_of_every_variant() {
    let Some(program) = installed(&["glslangValidator", "glslang"]) else { return };
    // Some versions do not read standard input.
    let read = |text: &str, entry_point: &str| {
        let (source, compiled) = (ScratchFile::new("hlsl"), ScratchFile::new("spv"));
        std::fs::write(&source.0, text).expect("a file for the text");
        let options = ["-D", "-V", "--target-env", "vulkan1.1", "-S", "comp", "-e", entry_point];
        feed(Command::new(program).args(options).arg(&source.0).arg("-o").arg(&compiled.0), &[])
    };
    let variants: Vec<(VariantKey, bool)> =
        variants().into_iter().step_by(one_of(7)).zip([false, true].into_iter().cycle()).collect();
    for_each(&variants, |(key, checked)| {
        let (text, entry_point) = validated(key).hlsl(*checked);
        if let Err(complaint) = read(&text, &entry_point) {
            panic!("{key}, checked: {checked}: {complaint}");
        }
    });
    let (text, entry_point) = validated(&variants[0].0).hlsl(false);
    assert!(read(&text.replacen("uint", "no_such_type", 1), &entry_point).is_err());
    let subgroups = variants.iter().filter(|(key, _)| key.subgroups()).count();
    assert!(subgroups > 0 && subgroups < variants.len(), "{subgroups} of {} variants", variants.len());
    announce(&format!("glslang: the HLSL of {} variants, {subgroups} with wave intrinsics", variants.len()));
}

#[test]
fn dxc_compiles_the_hlsl_of_every_variant() {
    let Some(library) = dxc() else { return };
    let read = |(text, entry_point): (String, String), model: ShaderModel| {
        let mut command = Command::new("python3");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../dxc/compile.py")).arg(&library);
        command.arg(entry_point).arg(format!("cs_{}", model.to_str()));
        if model >= ShaderModel::V6_2 {
            command.arg("-enable-16bit-types");
        }
        feed(&mut command, text.as_bytes())
    };
    let variants = variants_for_dxc();
    for_each(&variants, |&(key, model, checked)| {
        if let Err(complaint) = read(validated(&key).hlsl_for(model, checked), model) {
            panic!("{key}, checked: {checked}, {model:?}: {complaint}");
        }
    });
    // That it does read: the same kernel with its builtins in a struct, for which naga writes no wave intrinsics.
    let subgroups: Vec<_> = variants.iter().filter(|(key, ..)| key.subgroups()).collect();
    let (decode, model, checked) = subgroups[0];
    let replaced = [("common/attention_decode_subgroup.wgsl", BUILTINS_IN_A_STRUCT)];
    let broken = validated_text(decode, &decode.wgsl_with(u32::from(u16::MAX), &replaced));
    let complaint = read(broken.hlsl_for(*model, *checked), *model);
    assert!(complaint.is_err_and(|complaint| complaint.contains("Semantic must be defined")));
    announce(&format!("dxc: {} texts compiled, {} with wave intrinsics", variants.len(), subgroups.len()));
}

/// Another entry point for decode with subgroups.
const BUILTINS_IN_A_STRUCT: &str = "
    struct Builtins {
        @builtin(local_invocation_index) lane: u32,
        @builtin(subgroup_id) subgroup: u32,
        @builtin(num_subgroups) num_subgroups: u32,
        @builtin(subgroup_invocation_id) subgroup_lane: u32,
    }
    @compute @workgroup_size(WORKGROUP)
    fn attention_decode(@builtin(workgroup_id) workgroup: vec3<u32>, builtins: Builtins) {
        let lane = builtins.lane;
        decode(workgroup, Invocation(lane, builtins.subgroup, builtins.num_subgroups, builtins.subgroup_lane));
    }";

/// Variants, those with subgroup operations first, for which shader model each is compiled, and whether checked.
fn variants_for_dxc() -> Vec<(VariantKey, ShaderModel, bool)> {
    let (lowest, halves) = (ShaderModel::V6_0, ShaderModel::V6_6);
    let ways = [(lowest, false), (lowest, true), (halves, false), (halves, true)];
    // The pairwise sample has a single prefill kernel with subgroup operations.
    let subgroups = all_variants().into_iter().filter(VariantKey::subgroups).step_by(one_of(61));
    let others = variants().into_iter().step_by(one_of(7)).filter(|key| !key.subgroups());
    let chosen: Vec<_> = subgroups
        .chain(others)
        .zip(ways.into_iter().cycle())
        .map(|(key, (model, checked))| (key, model, checked))
        .collect();
    for kernel in [Kernel::AttentionDecode, Kernel::AttentionPrefill] {
        for (model, checked) in ways {
            let is_chosen = chosen
                .iter()
                .any(|key| key.0.subgroups() && (key.0.kernel(), key.1, key.2) == (kernel, model, checked));
            assert!(is_chosen, "no {} with subgroups, {model:?}, checked: {checked}", kernel.name());
        }
    }
    chosen
}

/// Of so many variants one is read, of a matrix every one. The numbers fall in step with no choice that alternates.
fn one_of(step: usize) -> usize {
    if std::env::var("PAGED_KV_MATRIX").is_ok_and(|matrix| matrix == "1") { 1 } else { step }
}

/// The library that `PAGED_KV_DXC` names; where it names none, says so, or fails if one is required.
fn dxc() -> Option<std::ffi::OsString> {
    let found = std::env::var_os("PAGED_KV_DXC").filter(|path| !path.is_empty());
    if found.is_none() {
        not_installed("dxc", "PAGED_KV_DXC names no libdxcompiler.so, which tests/get-dxc fetches");
    }
    found
}

/// The first of `names` that is installed; where none is, says so, or fails if one is required.
fn installed(names: &[&'static str]) -> Option<&'static str> {
    let runs = |name: &&&str| {
        let quiet = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        quiet.is_ok()
    };
    let found = names.iter().find(runs).copied();
    if found.is_none() {
        not_installed(names[0], "it is not installed");
    }
    found
}

fn not_installed(name: &str, reason: &str) {
    let required = std::env::var("PAGED_KV_REQUIRE_READERS").is_ok_and(|required| required == "1");
    assert!(!required, "{name} is required, and {reason}");
    announce(&format!("{name}: NOT RUN, {reason}"));
}

/// One line past the capture of test output, as for the adapters; `tests/run` repeats it.
fn announce(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Runs `command` with `input`; what it says where it fails.
fn feed(command: &mut Command, input: &[u8]) -> Result<(), String> {
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = pipes.spawn().map_err(|error| error.to_string())?;
    // A program that gives up early closes the pipe, and says why.
    let _ = child.stdin.take().expect("a pipe").write_all(input);
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()),
    }
}

/// Calls `test` for all items, on all processors.
fn for_each<T: Sync>(items: &[T], test: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    test(item);
                }
            });
        }
    });
}

/// A file that passes from or to a program, and is removed.
struct ScratchFile(PathBuf);

impl ScratchFile {
    fn new(extension: &str) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("paged-kv-{}-{number}.{extension}", std::process::id())))
    }
}

impl Drop for ScratchFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
