//! How full the pool was over the last steps: live, unused rest of blocks, cached, free.

use eframe::egui::{Align2, FontId, Mesh, Rect, Sense, Shape, Stroke, Ui, pos2, vec2};

use crate::{
    history::{History, LEN},
    look::{card, colour, title, weak},
    palette::{Palette, Rgb},
};

/// Points of the chart with all that is around it.
pub(crate) const HEIGHT: f32 = 132.0;

/// The parts of the pool from the bottom up, as the chart and the counters name them.
pub(crate) fn parts(palette: &Palette) -> [(&'static str, Rgb); 4] {
    [("live", palette.live), ("waste", palette.waste), ("cached", palette.hatch), ("free", palette.free)]
}

pub(crate) fn show(ui: &mut Ui, palette: &Palette, history: &History) {
    card(palette).show(ui, |ui| {
        ui.horizontal(|ui| {
            title(ui, "Memory over time");
            ui.label(weak(palette, format!("share of the pool, last {LEN} steps")));
            ui.add_space(12.0);
            for (name, tone) in parts(palette) {
                let (rect, _) = ui.allocate_exact_size(vec2(10.0, 10.0), Sense::hover());
                ui.painter().rect_filled(rect, 2.0, colour(tone));
                ui.label(weak(palette, name));
            }
        });
        let (rect, _) = ui.allocate_exact_size(vec2(ui.available_width(), HEIGHT - 58.0), Sense::hover());
        areas(ui, palette, history, rect);
    });
}

fn areas(ui: &Ui, palette: &Palette, history: &History, rect: Rect) {
    let painter = ui.painter_at(rect);
    painter.rect_filled(rect, 3.0, colour(palette.free));
    let width = rect.width() / LEN as f32;
    let mut mesh = Mesh::default();
    for (place, sample) in history.samples().enumerate() {
        let left = rect.left() + place as f32 * width;
        let mut bottom = rect.bottom();
        for (level, (_, tone)) in sample.levels().into_iter().zip(parts(palette)).take(3) {
            let top = rect.bottom() - level * rect.height();
            mesh.add_colored_rect(
                Rect::from_min_max(pos2(left, top), pos2(left + width, bottom)),
                colour(tone),
            );
            bottom = top;
        }
    }
    painter.add(Shape::mesh(mesh));
    let stroke = Stroke::new(1.0, colour(palette.line));
    for half in [0.0, 0.5] {
        painter.hline(rect.x_range(), rect.top() + half * rect.height(), stroke);
    }
    let label = |share: f32, text: &str| {
        let at = pos2(rect.right() - 4.0, rect.top() + share * rect.height() + 2.0);
        painter.text(at, Align2::RIGHT_TOP, text, FontId::proportional(11.0), colour(palette.weak));
    };
    label(0.0, "100 %");
    label(0.5, "50 %");
}
