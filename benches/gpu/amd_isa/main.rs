//! What AMD's compiler makes of the kernels, without a card.
//!
//! ```text
//! cargo bench --bench amd_isa -- [--variant SUBSTRING] [--write]
//! ```
//!
//! Compiles every named variant for Vega, RDNA2 and RDNA3 by Mesa's RADV (Debian: `mesa-vulkan-drivers`), which needs no
//! such card, and prints registers, spills, workgroup memory, waves and code size, the instructions per key and kv head
//! beside those of a contiguous twin, and for some cards the time to issue them against the time to read a key's bytes.
//! `measure::amd_isa` says how instructions are counted. `--write` keeps all that in `benches/amd_isa.json` and
//! `benches/RESULTS.md`; the test `amd_isa` holds the kernels to it.

use std::path::Path;

use clap::Parser;
use measure::Failure;
use measure::amd_isa::{Depth, Figures, Variant, measure_all, radv_manifest, render, replace_tables};

#[derive(Parser)]
#[command(about = "Compiles the kernels for AMD's hardware by Mesa's RADV and counts their instructions.")]
struct Options {
    /// Only the variants whose name contains this.
    #[arg(long, value_name = "SUBSTRING", conflicts_with = "write")]
    variant: Option<String>,
    /// Keep the figures: in benches/amd_isa.json and the tables of benches/RESULTS.md.
    #[arg(long)]
    write: bool,
    /// What cargo passes.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Failure> {
    let options = Options::parse();
    let manifest = radv_manifest().ok_or("no RADV here; on Debian: apt-get install mesa-vulkan-drivers")?;
    let mut variants = Variant::named();
    if let Some(wanted) = &options.variant {
        variants.retain(|variant| variant.name().contains(wanted));
    }
    let compiler = Path::new(env!("CARGO_BIN_EXE_amd_isa_compile"));
    let figures = measure_all(compiler, &manifest, &variants, Depth::Layouts)?;
    print!("{}", render(&figures));
    if options.write {
        let results = std::fs::read_to_string(Figures::results_path())?;
        std::fs::write(Figures::results_path(), replace_tables(&results, &figures)?)?;
        std::fs::write(Figures::path(), figures.to_json()?)?;
    }
    Ok(())
}
