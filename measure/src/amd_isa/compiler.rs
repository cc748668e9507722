//! A process that compiles for one family.
//!
//! RADV takes the family from the environment when it is loaded, and ends the process where it does not know the name:
//! both are safe only in a process of its own. Requests go to its input and answers come from its output, one JSON text
//! a line.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::{Deserialize, Serialize};

use super::family::Family;
use super::radv::Radv;
use super::spirv;
use crate::Failure;

#[derive(Serialize, Deserialize)]
struct Request {
    wgsl: String,
    entry_point: String,
    with_assembly: bool,
}

/// What RADV tells about a kernel.
#[derive(Serialize, Deserialize)]
pub(super) struct Compiled {
    statistics: BTreeMap<String, u64>,
    pub(super) subgroup_size: u32,
    pub(super) assembly: Option<String>,
}

impl Compiled {
    /// One of the numbers that RADV names.
    pub(super) fn statistic(&self, name: &str) -> Result<u64, Failure> {
        Ok(*self.statistics.get(name).ok_or_else(|| format!("RADV tells no `{name}`"))?)
    }
}

/// The caller's side.
pub struct Compiler {
    process: Child,
    requests: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
    mesa: String,
}

impl Compiler {
    /// Starts `executable`, which must do nothing but [`serve`], for `family`.
    ///
    /// # Errors
    /// When RADV does not open: its last words are on the standard error.
    pub fn start(executable: &Path, manifest: &Path, family: Family) -> Result<Self, Failure> {
        let mut failure = Failure::from("no name of the family");
        for name in family.forced_names() {
            match Self::start_as(executable, manifest, name) {
                Ok(compiler) => return Ok(compiler),
                Err(error) => failure = format!("RADV as {name}: {error}").into(),
            }
        }
        Err(failure)
    }

    fn start_as(executable: &Path, manifest: &Path, forced_name: &str) -> Result<Self, Failure> {
        let mut process = Command::new(executable)
            .env("RADV_FORCE_FAMILY", forced_name)
            // The loader looks at no other driver. Its older versions know only the second name.
            .env("VK_DRIVER_FILES", manifest)
            .env("VK_ICD_FILENAMES", manifest)
            .env_remove("VK_ADD_DRIVER_FILES")
            // Statistics come from compiling, not from a cache.
            .env("MESA_SHADER_CACHE_DISABLE", "true")
            .env("MESA_VK_IGNORE_CONFORMANCE_WARNING", "true")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let requests = process.stdin.take();
        let output = process.stdout.take().ok_or("no output")?;
        let mut compiler =
            Self { process, requests, answers: BufReader::new(output).lines(), mesa: String::new() };
        compiler.mesa = compiler.answer()?;
        Ok(compiler)
    }

    /// Mesa's version, as the driver tells it.
    pub fn mesa(&self) -> &str {
        &self.mesa
    }

    pub(super) fn compile(
        &mut self,
        wgsl: String,
        entry_point: &str,
        with_assembly: bool,
    ) -> Result<Compiled, Failure> {
        let request = Request { wgsl, entry_point: entry_point.to_owned(), with_assembly };
        let requests = self.requests.as_mut().ok_or("no input")?;
        writeln!(requests, "{}", serde_json::to_string(&request)?)?;
        self.answer()
    }

    fn answer<T: for<'a> Deserialize<'a>>(&mut self) -> Result<T, Failure> {
        let line = self.answers.next().ok_or("the compiler's process ended")??;
        let answer: Result<T, String> = serde_json::from_str(&line)?;
        Ok(answer?)
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        // The process ends with its input.
        self.requests = None;
        // Nothing can be done about a process that cannot be waited for.
        let _ = self.process.wait();
    }
}

/// The process's side: compiles what comes in until nothing does.
///
/// # Errors
/// When input or output are gone. What RADV refuses is an answer.
pub fn serve() -> Result<(), Failure> {
    let opened = Radv::open().map_err(|error| error.to_string());
    let told = opened.as_ref().map(|radv| radv.mesa.as_str());
    println!("{}", serde_json::to_string(&told)?);
    let Ok(radv) = opened else { return Ok(()) };
    for line in std::io::stdin().lines() {
        let request: Request = serde_json::from_str(&line?)?;
        let compiled = compile(&radv, &request).map_err(|error| error.to_string());
        println!("{}", serde_json::to_string(&compiled)?);
    }
    Ok(())
}

fn compile(radv: &Radv, request: &Request) -> Result<Compiled, Failure> {
    let module = spirv::translate(&request.wgsl, &request.entry_point)?;
    let pipeline = radv.compile(&module, request.with_assembly)?;
    Ok(Compiled {
        statistics: pipeline.statistics,
        subgroup_size: pipeline.subgroup_size,
        assembly: pipeline.assembly,
    })
}

/// RADV's manifest, where the system has one.
pub fn radv_manifest() -> Option<PathBuf> {
    let folders = ["/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/share/vulkan/icd.d"];
    let files = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // On Debian there may be one for each architecture.
        name == "radeon_icd.json" || name == format!("radeon_icd.{}.json", std::env::consts::ARCH)
    };
    files.map(|file| file.path()).find(is_ours)
}
