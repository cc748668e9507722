//! From a variant to its figures.

use std::path::Path;

use super::assembly;
use super::compiler::{Compiled, Compiler};
use super::family::Family;
use super::figures::{Contiguous, Figures, Row, thousandths};
use super::per_key::{PerKey, per_key};
use super::structure::TileLoads;
use super::variants::Variant;
use crate::Failure;
use crate::twins;

/// How much is measured. More takes longer, and is less certain with a version of Mesa that was not tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// What RADV tells by numbers.
    Registers,
    /// Instructions per key too.
    Instructions,
    /// Those of the contiguous twins too.
    Twins,
    /// Those of the twins with keys in columns too.
    Layouts,
}

/// Compiles `variants` for every family, families side by side, by processes of `executable` (see [`Compiler::start`]).
///
/// # Errors
/// When RADV fails, or a kernel's assembly is not what the method expects: the error names the kernel.
pub fn measure_all(
    executable: &Path,
    manifest: &Path,
    variants: &[Variant],
    depth: Depth,
) -> Result<Figures, Failure> {
    let measure = |family| {
        measure_family(executable, manifest, family, variants, depth).map_err(|error| error.to_string())
    };
    let families = std::thread::scope(|scope| {
        let threads = Family::ALL.map(|family| scope.spawn(move || measure(family)));
        threads.map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".to_owned())))
    });
    let mut figures = Figures::default();
    for family in families {
        let (mesa, rows) = family?;
        figures.mesa = mesa;
        figures.rows.extend(rows);
    }
    Ok(figures)
}

fn measure_family(
    executable: &Path,
    manifest: &Path,
    family: Family,
    variants: &[Variant],
    depth: Depth,
) -> Result<(String, Vec<Row>), Failure> {
    let mut compiler = Compiler::start(executable, manifest, family)?;
    let rows = variants.iter().map(|variant| {
        let row = measure(&mut compiler, family, variant, depth);
        row.map_err(|error| format!("{} {}: {error}", family.name(), variant.name()).into())
    });
    let rows = rows.collect::<Result<_, Failure>>()?;
    Ok((compiler.mesa().to_owned(), rows))
}

fn measure(compiler: &mut Compiler, family: Family, variant: &Variant, depth: Depth) -> Result<Row, Failure> {
    let kernel = variant.kernel.name();
    let compiled = compiler.compile(variant.wgsl(), kernel, false)?;
    let (mut counted, mut contiguous, mut key_columns) = (None, None, None);
    if variant.is_counted() && depth >= Depth::Instructions {
        let loads = variant.tile_loads()?;
        let mut count = |wgsl| count(&compiler.compile(wgsl, kernel, true)?, loads);
        let paged = count(variant.counted_wgsl())?;
        let (bytes, loaded) = (f64::from(variant.bytes_per_key()), paged.global_bytes);
        if loaded < bytes || loaded > 1.01 * bytes {
            return Err(format!("{loaded} bytes are loaded for a key of {bytes}").into());
        }
        counted = Some(paged);
        if depth >= Depth::Twins {
            let kept = count(variant.twin_wgsl(twins::contiguous()))?;
            let computed = count(variant.twin_wgsl(twins::contiguous_without_value_rows()))?;
            let fewer = if computed.instructions < kept.instructions { computed } else { kept };
            contiguous = Some(Contiguous::new(&paged, &fewer));
        }
        if depth >= Depth::Layouts {
            let columns = count(variant.twin_wgsl(twins::key_columns()))?;
            key_columns = Some(thousandths(columns.instructions / paged.instructions));
        }
    }
    Ok(Row {
        family,
        kernel: kernel.to_owned(),
        variant: variant.name(),
        vgprs: compiled.statistic("VGPRs")?,
        sgprs: compiled.statistic("SGPRs")?,
        spilled_vgprs: compiled.statistic("Spilled VGPRs")?,
        spilled_sgprs: compiled.statistic("Spilled SGPRs")?,
        lds_bytes: compiled.statistic("LDS size")?,
        waves_per_simd: compiled.statistic("Subgroups per SIMD")?,
        code_bytes: compiled.statistic("Code size")?,
        per_key: counted,
        contiguous,
        key_columns,
    })
}

fn count(compiled: &Compiled, loads: TileLoads) -> Result<PerKey, Failure> {
    if compiled.subgroup_size != 64 {
        return Err(format!("a subgroup of {}", compiled.subgroup_size).into());
    }
    let blocks = assembly::parse(compiled.assembly.as_deref().ok_or("no assembly")?)?;
    let (read, told) = (
        blocks.iter().map(|block| block.instructions.len()).sum::<usize>() as u64,
        compiled.statistic("Instructions")?,
    );
    if read != told {
        return Err(format!("{read} instructions read, {told} compiled").into());
    }
    per_key(&blocks, loads)
}
