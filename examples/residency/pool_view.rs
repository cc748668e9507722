//! The pool, one square a block.

use eframe::egui::{
    self, Align2, Color32, CornerRadius, FontId, Painter, Pos2, Rect, Response, Sense, Shape, Stroke,
    StrokeKind, Ui, pos2, vec2,
};

use crate::{
    chat::letter,
    grid::{Grid, Square},
    look::{bytes, card, colour, title, weak},
    marks::Event,
    palette::{Palette, mix},
    snapshot::{Cell, Kind, Snapshot},
};

/// What is drawn of the pool.
pub(crate) struct PoolView<'a> {
    pub(crate) palette: &'a Palette,
    pub(crate) snapshot: &'a Snapshot,
    /// Blocks to which something has just happened, and how strongly that shows.
    pub(crate) marks: &'a [(u32, Event, f32)],
    /// The chat whose blocks stand out.
    pub(crate) chosen: Option<usize>,
    pub(crate) block_bytes: u64,
    pub(crate) host_blocks: u32,
}

/// Points of the legend in one line, and from one line to the next.
const LEGEND_WIDTH: f32 = 800.0;
const LEGEND_LINE: f32 = 24.0;

/// Where the blocks were drawn, in points of the window.
#[derive(Clone, Debug)]
pub(crate) struct Drawn {
    pub(crate) grid: Grid,
    pub(crate) corner: Pos2,
    /// The block under the pointer.
    pub(crate) pointed: Option<u32>,
    /// The examples of states in the legend.
    pub(crate) legend: Vec<(Cell, Square)>,
}

impl PoolView<'_> {
    /// Draws the pool into the space that is left, `below` points of it spared.
    pub(crate) fn show(&self, ui: &mut Ui, below: f32) -> Drawn {
        let height = ui.available_height() - below;
        card(self.palette)
            .show(ui, |ui| {
                let height = (height - 26.0).max(0.0);
                ui.set_max_height(height);
                ui.set_min_size(vec2(ui.available_width(), height));
                self.heading(ui);
                ui.add_space(4.0);
                let rest = if self.host_blocks > 0 { 62.0 } else { 34.0 };
                let lines = legend_lines(ui.available_width());
                let rest = rest + (lines - 1) as f32 * LEGEND_LINE;
                let space = vec2(ui.available_width(), (ui.available_height() - rest).max(40.0));
                let mut drawn = self.grid(ui, space);
                if self.host_blocks > 0 {
                    self.host(ui);
                }
                drawn.legend = self.legend(ui, lines);
                drawn
            })
            .inner
    }

    fn heading(&self, ui: &mut Ui) {
        let num_blocks = self.snapshot.cells.len() as u64;
        ui.horizontal(|ui| {
            title(ui, "Pool");
            ui.label(weak(
                self.palette,
                format!(
                    "{num_blocks} blocks of {} tokens, {} each, {} in all",
                    self.snapshot.block_size,
                    bytes(self.block_bytes),
                    bytes(num_blocks * self.block_bytes)
                ),
            ));
            let saved = self.snapshot.saved_blocks();
            if saved > 0 {
                ui.with_layout(egui::Layout::right_to_left(egui::Align::Center), |ui| {
                    let text = format!(
                        "sharing saves {saved} blocks, {}",
                        bytes(u64::from(saved) * self.block_bytes)
                    );
                    ui.label(weak(self.palette, text));
                });
            }
        });
    }

    fn grid(&self, ui: &mut Ui, space: egui::Vec2) -> Drawn {
        let grid = Grid::fit(self.snapshot.cells.len() as u32, space.x, space.y);
        let scroll = egui::ScrollArea::vertical().max_height(space.y).auto_shrink([false, false]);
        scroll
            .show(ui, |ui| {
                let [width, height] = grid.size();
                let (rect, response) =
                    ui.allocate_exact_size(vec2(space.x, height.max(space.y)), Sense::hover());
                let left = ((space.x - width) / 2.0).floor().max(0.0);
                let top = ((space.y - height) / 2.0).floor().max(0.0);
                let corner = (rect.min + vec2(left, top)).round();
                let pointed = response.hover_pos().and_then(|at| grid.at(at.x - corner.x, at.y - corner.y));
                let drawn = Drawn { grid, corner, pointed, legend: Vec::new() };
                self.cells(&ui.painter_at(rect.expand(4.0)), &drawn);
                self.explain(&response, pointed);
                drawn
            })
            .inner
    }

    fn cells(&self, painter: &Painter, drawn: &Drawn) {
        for (cell, index) in self.snapshot.cells.iter().zip(0..) {
            let square = drawn.square(index);
            self.cell(painter, cell, &square);
            let is_chosen = self.chosen.is_none_or(|slot| cell.owners().any(|owner| owner.slot == slot));
            if !is_chosen {
                let veil = colour(self.palette.panel).gamma_multiply(0.72);
                painter.rect_filled(rect_of(&square), radius(&square), veil);
            }
            if drawn.pointed == Some(index) {
                let stroke = Stroke::new(2.0, colour(self.palette.ink));
                painter.rect_stroke(rect_of(&square), radius(&square), stroke, StrokeKind::Outside);
            }
        }
        for &(block, event, strength) in self.marks {
            self.mark(painter, &drawn.square(block), event, strength);
        }
    }

    /// A square: a stripe for each owner, full colour as far as tokens fill it.
    fn cell(&self, painter: &Painter, cell: &Cell, square: &Square) {
        let rect = rect_of(square);
        let stripes = self.palette.stripes(cell);
        for (index, [filled, rest]) in stripes.iter().enumerate() {
            let owner = cell.owners().nth(index);
            let share = owner.map_or(0.0, |owner| owner.tokens as f32 / self.snapshot.block_size as f32);
            let (left, right, top) = square.stripe(index, stripes.len(), share);
            let corners = corners_of(square, index, stripes.len());
            let stripe = Rect::from_min_max(pos2(left, rect.top()), pos2(right, rect.bottom()));
            painter.rect_filled(stripe, corners, colour(*rest));
            if top < rect.bottom() {
                let corners = if share < 1.0 { CornerRadius { nw: 0, ne: 0, ..corners } } else { corners };
                painter.rect_filled(
                    Rect::from_min_max(pos2(left, top), stripe.max),
                    corners,
                    colour(*filled),
                );
            }
            if let Some(owner) = owner {
                self.letter(painter, stripe, owner.slot, if share > 0.45 { *filled } else { *rest });
            }
        }
        match cell.kind {
            Kind::Cached => hatch(painter, rect, colour(self.palette.hatch)),
            Kind::InTransfer => ring(painter, square, colour(self.palette.moved_out)),
            Kind::Free | Kind::Held => {}
        }
    }

    fn letter(&self, painter: &Painter, stripe: Rect, slot: usize, ground: [u8; 3]) {
        let size = (stripe.width() * 0.9).min(stripe.height() * 0.42);
        if size >= 8.0 {
            let text = colour(mix(ground, self.palette.text_on(ground), 0.9));
            painter.text(
                stripe.center(),
                Align2::CENTER_CENTER,
                letter(slot),
                FontId::proportional(size),
                text,
            );
        }
    }

    /// A ring, and an arrow for what moves.
    fn mark(&self, painter: &Painter, square: &Square, event: Event, strength: f32) {
        let tone = colour(event_colour(self.palette, event)).gamma_multiply(strength);
        ring(painter, square, tone);
        let (tip, tail) = match event {
            Event::Copied => return,
            Event::MovedOut => (0.18, 0.36),
            Event::MovedIn => (0.36, 0.18),
        };
        let at = |x: f32, y: f32| pos2(square.left + square.side * x, square.top + square.side * y);
        let arrow = vec![at(0.5, tip), at(0.34, tail), at(0.66, tail)];
        painter.add(Shape::convex_polygon(arrow, tone, Stroke::NONE));
    }

    fn explain(&self, response: &Response, pointed: Option<u32>) {
        let Some(index) = pointed else { return };
        let cell = &self.snapshot.cells[index as usize];
        response.clone().on_hover_ui_at_pointer(|ui| {
            ui.label(egui::RichText::new(format!("block {index}")).strong());
            ui.label(match cell.kind {
                Kind::Free => "free".to_owned(),
                Kind::Cached => {
                    "cached: in no table, found again by equal tokens until others need it".to_owned()
                }
                Kind::InTransfer => "in transfer: in no table, still read by this step".to_owned(),
                Kind::Held if cell.is_shared() => format!("shared by {}", cell.owners().len()),
                Kind::Held => "held".to_owned(),
            });
            for owner in cell.owners() {
                let from = owner.first_token;
                let filled = format!(
                    "{}: tokens {from} to {}, {} of {} filled",
                    letter(owner.slot),
                    from + owner.tokens.max(1) - 1,
                    owner.tokens,
                    self.snapshot.block_size
                );
                ui.label(filled);
            }
        });
    }

    /// Blocks in main memory, by owner.
    fn host(&self, ui: &mut Ui) {
        let outside: u32 = self.snapshot.shares.iter().map(|share| share.host_blocks).sum();
        ui.horizontal(|ui| {
            ui.label(weak(self.palette, format!("main memory {outside} of {}", self.host_blocks)));
            let (rect, _) = ui.allocate_exact_size(vec2(ui.available_width(), 12.0), Sense::hover());
            let owners =
                self.snapshot.shares.iter().flat_map(|share| (0..share.host_blocks).map(|_| share.slot));
            let width = (rect.width() / self.host_blocks as f32).min(12.0);
            for (place, slot) in (0..self.host_blocks).zip(owners.map(Some).chain(std::iter::repeat(None))) {
                let left = (rect.left() + place as f32 * width).round();
                let square = Rect::from_min_size(pos2(left, rect.top()), vec2((width - 2.0).max(1.0), 10.0));
                let tone = slot.map_or(self.palette.free, |slot| self.palette.owner(slot));
                ui.painter().rect_filled(square, 2.0, colour(tone));
            }
        });
    }

    /// Returns the examples of states, without those of events.
    fn legend(&self, ui: &mut Ui, lines: usize) -> Vec<(Cell, Square)> {
        let held = |tokens: u32, owners: usize| {
            let mut cell = Cell::new(Kind::Held);
            (0..owners).for_each(|slot| {
                cell.hold(crate::snapshot::Owner { slot, first_token: 0, tokens });
            });
            cell
        };
        let full = self.snapshot.block_size;
        let examples = [
            (Cell::new(Kind::Free), None, "free"),
            (held(full, 1), None, "held by A"),
            (held(full / 4, 1), None, "a quarter filled"),
            (held(full, 3), None, "shared by A, B, C"),
            (Cell::new(Kind::Cached), None, "cached"),
            (Cell::new(Kind::InTransfer), None, "in transfer"),
            (held(full, 1), Some(Event::Copied), "just copied"),
            (Cell::new(Kind::Free), Some(Event::MovedOut), "moved out"),
            (held(full, 1), Some(Event::MovedIn), "moved in"),
        ];
        let mut states = Vec::new();
        for line in examples.chunks(examples.len().div_ceil(lines)) {
            ui.horizontal(|ui| {
                for (cell, event, text) in line {
                    let (rect, _) = ui.allocate_exact_size(vec2(16.0, 16.0), Sense::hover());
                    let square = Square { left: rect.left().round(), top: rect.top().round(), side: 16.0 };
                    self.cell(ui.painter(), cell, &square);
                    match event {
                        Some(event) => self.mark(ui.painter(), &square, *event, 1.0),
                        None => states.push((cell.clone(), square)),
                    }
                    ui.label(weak(self.palette, *text));
                    ui.add_space(2.0);
                }
            });
        }
        states
    }
}

/// Lines of the legend at this width, in points.
fn legend_lines(width: f32) -> usize {
    if width < LEGEND_WIDTH { 2 } else { 1 }
}

impl Drawn {
    /// Where a block is, in points of the window.
    pub(crate) fn square(&self, index: u32) -> Square {
        let Square { left, top, side } = self.grid.square(index);
        Square { left: self.corner.x + left, top: self.corner.y + top, side }
    }
}

/// The colour of what has just happened to a block.
pub(crate) fn event_colour(palette: &Palette, event: Event) -> [u8; 3] {
    match event {
        Event::Copied => palette.copied,
        Event::MovedOut => palette.moved_out,
        Event::MovedIn => palette.moved_in,
    }
}

fn rect_of(square: &Square) -> Rect {
    Rect::from_min_size(pos2(square.left, square.top), vec2(square.side, square.side))
}

fn radius(square: &Square) -> u8 {
    (square.side / 10.0).round().clamp(1.0, 4.0) as u8
}

/// Only the outer corners are round.
fn corners_of(square: &Square, index: usize, of: usize) -> CornerRadius {
    let (left, right) =
        (if index == 0 { radius(square) } else { 0 }, if index + 1 == of { radius(square) } else { 0 });
    CornerRadius { nw: left, sw: left, ne: right, se: right }
}

/// Diagonals that leave the upper left corner free.
fn hatch(painter: &Painter, rect: Rect, tone: Color32) {
    let (side, stroke) = (rect.width(), Stroke::new((rect.width() / 18.0).max(1.0), tone));
    let edge = side / 10.0;
    for sum in [0.7, 1.1, 1.5] {
        let (low, high) = ((sum * side - side + edge).max(edge), (sum * side - edge).min(side - edge));
        let at = |x: f32| rect.min + vec2(x, sum * side - x);
        painter.line_segment([at(low), at(high)], stroke);
    }
}

/// Just outside a block, in the gap around it.
fn ring(painter: &Painter, square: &Square, tone: Color32) {
    painter.rect_stroke(rect_of(square), radius(square), Stroke::new(2.0, tone), StrokeKind::Outside);
}
