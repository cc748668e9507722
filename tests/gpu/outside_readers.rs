//! What naga writes for Vulkan and DX12, read by programs that have nothing to do with naga: `spirv-val` (Debian:
//! `spirv-tools`) and `glslang` (`glslang-tools`), which compiles HLSL.
//!
//! SPIR-V: every variant of the run, unchecked as wgpu writes it for Vulkan 1.1, and checked as for Vulkan 1.3. HLSL: every
//! seventh of a sample and all of a matrix, for glslang takes a third of a second for an attention kernel; checked and
//! unchecked in turn. glslang knows wave intrinsics, and reads all variants. It is neither FXC nor DXC: it does not hold a
//! text to its shader model, and what those compilers make of it is not seen here.
//!
//! Where a program is not installed, its test says so and passes, unless `PAGED_KV_REQUIRE_READERS` is 1.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use paged_kv::shaders::VariantKey;

use crate::shaders::variants;
use crate::writers::validated;

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
    let all = variants();
    // A number that falls in step with no choice that alternates.
    let step = if std::env::var("PAGED_KV_MATRIX").is_ok_and(|matrix| matrix == "1") { 1 } else { 7 };
    let variants: Vec<(VariantKey, bool)> =
        all.into_iter().step_by(step).zip([false, true].into_iter().cycle()).collect();
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

/// The first of `names` that is installed; where none is, says so, or fails if one is required.
fn installed(names: &[&'static str]) -> Option<&'static str> {
    let runs = |name: &&&str| {
        let quiet = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        quiet.is_ok()
    };
    let found = names.iter().find(runs).copied();
    if found.is_none() {
        let required = std::env::var("PAGED_KV_REQUIRE_READERS").is_ok_and(|required| required == "1");
        assert!(!required, "{} is missing, and required", names[0]);
        announce(&format!("{}: NOT RUN, it is not installed", names[0]));
    }
    found
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
