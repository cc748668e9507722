//! The picture: the pool over the day, one panel for each layout that is drawn.

use std::{error::Error, fs, path::Path};

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::measure::{Record, Sums};
use crate::parameters::PEAK_HOUR;
use crate::systems::System;

const WIDTH: u32 = 900;
const TITLE_HEIGHT: u32 = 64;
const PANEL_HEIGHT: u32 = 240;

type Panel<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A stacked area: name, colour, tokens.
type Area = (&'static str, RGBColor, fn(&Sums) -> u64);

/// From the bottom up. What is left on top is free.
const AREAS: [Area; 6] = [
    ("live tokens", RGBColor(38, 110, 166), |sums| sums.live),
    ("internal (last blocks)", RGBColor(214, 39, 40), |sums| sums.internal),
    ("reserved", RGBColor(244, 165, 92), |sums| sums.later + sums.never),
    ("held after the end", RGBColor(148, 190, 130), |sums| sums.ended),
    ("cached, free to be taken", RGBColor(178, 205, 230), |sums| sums.cached),
    ("free, but not for the first in line", RGBColor(200, 200, 200), |sums| sums.external),
];

/// Draws those layouts that are to be drawn.
pub(crate) fn draw(
    path: &Path,
    hours: f64,
    systems: &[System],
    records: &[Record],
) -> Result<(), Box<dyn Error>> {
    let drawn: Vec<_> = systems.iter().zip(records).filter(|(system, _)| system.drawn).collect();
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let height = TITLE_HEIGHT + PANEL_HEIGHT * drawn.len() as u32;
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, panels) = root.split_vertically(TITLE_HEIGHT);
    let seen =
        |&(_, _, tokens): &Area| drawn.iter().any(|(_, day)| day.parts.iter().any(|part| tokens(part) > 0));
    draw_head(&head, &AREAS.into_iter().filter(seen).collect::<Vec<_>>())?;
    for (panel, (system, day)) in panels.split_evenly((drawn.len(), 1)).iter().zip(drawn) {
        let title = system.name.join(", ");
        draw_panel(panel, &title, PEAK_HOUR - hours / 2.0, hours, day)?;
    }
    root.present()?;
    Ok(())
}

/// The title, and what the colours mean.
fn draw_head(head: &Panel<'_>, areas: &[Area]) -> Result<(), Box<dyn Error>> {
    let title = ("sans-serif", 20).into_text_style(head).pos(Pos::new(HPos::Center, VPos::Top));
    head.draw_text("One pool over a day of chat traffic", &title, (WIDTH as i32 / 2, 10))?;
    let text = ("sans-serif", 13).into_text_style(head).pos(Pos::new(HPos::Left, VPos::Center));
    let mut x = 62;
    for &(name, colour, _) in areas {
        head.draw(&Rectangle::new([(x, 44), (x + 12, 56)], colour.filled()))?;
        head.draw_text(name, &text, (x + 17, 51))?;
        x += 45 + 6 * name.len() as i32;
    }
    Ok(())
}

fn draw_panel(
    panel: &Panel<'_>,
    title: &str,
    first_hour: f64,
    hours: f64,
    day: &Record,
) -> Result<(), Box<dyn Error>> {
    let mut chart = ChartBuilder::on(panel)
        .caption(title, ("sans-serif", 16))
        .margin(8)
        .x_label_area_size(34)
        .y_label_area_size(54)
        .build_cartesian_2d(first_hour..first_hour + hours, 0.0..100.0)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("hour of the day")
        .y_desc("% of the pool")
        .x_label_formatter(&|hour| format!("{:.0}", hour.rem_euclid(24.0)))
        .y_label_formatter(&|share| format!("{share:.0}"))
        .x_labels(12)
        .y_labels(5)
        .draw()?;
    let hour = |part: usize| first_hour + hours * (part as f64 + 0.5) / day.parts.len() as f64;
    let mut base = vec![0.0; day.parts.len()];
    for (_, colour, tokens) in AREAS {
        let top: Vec<f64> = (day.parts.iter().zip(&base))
            .map(|(sums, base)| base + 100.0 * sums.of_pool(tokens(sums)))
            .collect();
        if top == base {
            continue;
        }
        let outline = (top.iter().enumerate())
            .chain(base.iter().enumerate().rev())
            .map(|(part, &share)| (hour(part), share));
        chart.draw_series([Polygon::new(outline.collect::<Vec<_>>(), colour.filled())])?;
        base = top;
    }
    Ok(())
}
