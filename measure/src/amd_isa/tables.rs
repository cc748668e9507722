//! The figures as tables, on the console and in `benches/RESULTS.md`.

use std::fmt::Write as _;

use super::family::Family;
use super::figures::{Figures, Row};
use super::roofline::CARDS;
use crate::Failure;

const START: &str = "<!-- Written by `cargo bench --bench amd_isa -- --write`. -->\n";
const END: &str = "<!-- The end of what it writes. -->\n";

/// The tables, as Markdown: one per family, and the roofline.
pub fn render(figures: &Figures) -> String {
    let mut text = String::new();
    for family in Family::ALL {
        text += &format!("{} ({}), {}:\n\n", family.name(), family.generation(), figures.mesa);
        text += &family_table(figures, family);
        text += "\n";
    }
    text += "Nanoseconds per key and kv head on the whole card, to issue / to read:\n\n";
    text + &roofline_table(figures)
}

fn family_table(figures: &Figures, family: Family) -> String {
    let mut text = "| variant | VGPRs | SGPRs | spilled | LDS bytes | waves per SIMD | code bytes | per key | vector ALU | multiply-adds | global | bytes | LDS | cross-lane | scalar | waits | over contiguous | key columns |\n".to_owned();
    text += &format!("|---|{}\n", "---:|".repeat(17));
    for row in figures.rows.iter().filter(|row| row.family == family) {
        let _ = write!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} |",
            row.variant,
            row.vgprs,
            row.sgprs,
            row.spills(),
            row.lds_bytes,
            row.waves_per_simd,
            row.code_bytes
        );
        text += &per_key_cells(row);
    }
    text
}

fn per_key_cells(row: &Row) -> String {
    let Some(per_key) = &row.per_key else { return " |".repeat(11) + "\n" };
    let ratio = |ratio: Option<f64>| ratio.map_or(String::new(), |ratio| format!("{ratio:.3}"));
    let contiguous = ratio(row.contiguous.map(|twin| twin.paged_over_contiguous));
    let key_columns = ratio(row.key_columns);
    format!(
        " {:.1} | {:.1} | {:.1} ({:.0} %) | {:.2} | {:.0} | {:.2} | {:.2} | {:.2} | {:.2} | {contiguous} | {key_columns} |\n",
        per_key.instructions,
        per_key.vector_alu,
        per_key.multiply_adds,
        100.0 * per_key.multiply_adds / per_key.instructions,
        per_key.global,
        per_key.global_bytes,
        per_key.lds,
        per_key.cross_lane,
        per_key.scalar,
        per_key.waits,
    )
}

/// Variants of the roofline: what is read most, by the heads and types of the models that the examples run.
const ROOFLINE: [&str; 5] = [
    "attention_decode.f16.d128.q4.subgroup",
    "attention_decode.f16.d128.q8.subgroup",
    "attention_decode.f16.d64.q3.subgroup",
    "attention_decode.f32.d64.q3.subgroup",
    "attention_prefill.f16.d128.subgroup",
];

fn roofline_table(figures: &Figures) -> String {
    let mut text = "| card | compute units | MHz | GB/s |".to_owned();
    let mut rule = "|---|---:|---:|---:|".to_owned();
    for variant in ROOFLINE {
        let _ = write!(text, " {variant} |");
        rule += "---:|";
    }
    text += &format!("\n{rule}\n");
    for card in CARDS {
        let _ = write!(
            text,
            "| {} | {} | {} | {} |",
            card.name, card.compute_units, card.clock_mhz, card.bandwidth_gb
        );
        for variant in ROOFLINE {
            let per_key = figures.row(card.family, variant).and_then(|row| row.per_key);
            text += &match per_key {
                Some(per_key) => {
                    format!(" {:.2} / {:.2} |", card.issue_ns(&per_key), card.read_ns(&per_key))
                }
                None => " |".to_owned(),
            };
        }
        text += "\n";
    }
    text
}

/// `results`, the text of `RESULTS.md`, with these tables.
///
/// # Errors
/// When the text does not say where they go.
pub fn replace_tables(results: &str, figures: &Figures) -> Result<String, Failure> {
    let missing = || format!("RESULTS.md has no lines `{}` and `{}`", START.trim_end(), END.trim_end());
    let (before, rest) = results.split_once(START).ok_or_else(missing)?;
    let (_, after) = rest.split_once(END).ok_or_else(missing)?;
    Ok(format!("{before}{START}\n{}\n{END}{after}", render(figures)))
}
