//! A plot of the figures: one bar per row, its length the share of the stream rate.

use std::path::Path;

use measure::Failure;
use measure::row::Row;
use plotters::prelude::*;

const LINE: i32 = 20;
const LEFT: i32 = 380;
/// Pixels of the whole stream rate.
const SCALE: f64 = 400.0;

pub(crate) fn draw(path: &Path, adapter: &str, rows: &[Row]) -> Result<(), Failure> {
    let height = (rows.len() as i32 + 4) * LINE;
    let root = SVGBackend::new(path, (1150, height as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let text = |words: String, x, y| Text::new(words, (x, y), ("sans-serif", 13).into_font());
    root.draw(&text(format!("{adapter}: share of the stream rate"), 10, 12))?;
    for percent in [0, 25, 50, 75, 100] {
        let x = LEFT + (f64::from(percent) / 100.0 * SCALE) as i32;
        root.draw(&PathElement::new(vec![(x, 2 * LINE), (x, height - LINE)], RGBColor(200, 200, 200)))?;
        root.draw(&text(format!("{percent} %"), x - 10, LINE + 6))?;
    }
    for (index, row) in (0..).zip(rows) {
        let y = (index + 2) * LINE + 4;
        let end = LEFT + (row.share_of_stream.min(1.2) * SCALE) as i32;
        let color = match row.kernel {
            "attention_decode" => RGBColor(40, 100, 180),
            "attention_prefill" | "attention_mixed" => RGBColor(200, 110, 30),
            _ => RGBColor(120, 120, 120),
        };
        root.draw(&Rectangle::new([(LEFT, y), (end.max(LEFT + 1), y + LINE - 6)], color.filled()))?;
        root.draw(&text(row.name.clone(), 10, y))?;
        let mut words = format!("{:.2} GB/s", row.bytes_per_s / 1e9);
        for (name, ratio) in [
            ("over contiguous", row.over_contiguous),
            ("plain", row.plain_over_ours),
            ("gather", row.gather_over_ours),
        ] {
            words += &ratio.map_or_else(String::new, |ratio| format!(", {name} {ratio:.2}"));
        }
        root.draw(&text(words, end.max(LEFT) + 8, y))?;
    }
    root.present()?;
    Ok(())
}
