//! Where everything is drawn, and what is clicked.

use eframe::egui::{self, CentralPanel, ComboBox, Frame, Key, Margin, Panel, Rect, RichText, TextEdit, Ui};
use paged_kv::WaitReason;

use super::{App, Stage};
use crate::{
    chart,
    chat::letter,
    chats_view::{self, Seen},
    look::{self, colour, weak},
    palette::Palette,
    panel::{self, Counters},
    picture::Shown,
    pool_view::PoolView,
    snapshot::Snapshot,
};

/// Points of the chats' panel.
const CHATS_HEIGHT: f32 = 318.0;

impl App {
    pub(super) fn draw(&mut self, ui: &mut Ui) {
        if let Stage::Running(station) | Stage::Ending(station) = &self.stage {
            ui.painter().add(station.recorder(ui.max_rect()));
        }
        if self.picture.is_some() && !self.is_frozen() && !matches!(self.stage, Stage::Failed) {
            // The frames before the picture are not seen, and a software adapter takes long to draw them.
            return;
        }
        let palette = Palette::of(self.dark);
        let snapshot = self.service.snapshot();
        let bare = |side: i8| Frame::new().fill(colour(palette.window)).inner_margin(Margin::same(side));
        Panel::top("header")
            .frame(bare(10))
            .show_separator_line(false)
            .show(ui, |ui| self.header(ui, &palette));
        let left = Frame { inner_margin: Margin { left: 10, right: 0, top: 0, bottom: 10 }, ..bare(0) };
        Panel::left("panel").frame(left).show_separator_line(false).resizable(false).exact_size(312.0).show(
            ui,
            |ui| {
                panel::controls(ui, &palette, &mut self.settings);
                let stats = self.service.scheduler().stats();
                let cache = self.service.scheduler().cache().config();
                let (bytes_per_token, block_bytes) = (cache.bytes_per_token(), cache.bytes_per_block());
                let counters = Counters {
                    stats: &stats,
                    usage: snapshot.usage(),
                    bytes_per_token,
                    block_bytes,
                    step_rows: self.service.pace.rows,
                    hidden_steps: self.hidden_steps,
                };
                panel::counters(ui, &palette, &counters);
                panel::hints(ui, &palette);
            },
        );
        let chats = Panel::bottom("chats").frame(bare(10)).show_separator_line(false);
        let cards = chats.exact_size(CHATS_HEIGHT).show(ui, |ui| self.chats(ui, &palette, &snapshot)).inner;
        let middle = Frame { inner_margin: Margin { left: 10, right: 10, top: 0, bottom: 0 }, ..bare(0) };
        CentralPanel::no_frame().frame(middle).show(ui, |ui| self.pool(ui, &palette, &snapshot, &cards));
    }

    fn header(&mut self, ui: &mut Ui, palette: &Palette) {
        ui.horizontal(|ui| {
            ui.label(RichText::new("paged-kv residency").heading().strong());
            ui.label(weak(palette, &self.adapter));
            ui.label(weak(palette, self.status()));
            ui.with_layout(egui::Layout::right_to_left(egui::Align::Center), |ui| {
                if ui.button(if self.dark { "light" } else { "dark" }).clicked() {
                    self.dark = !self.dark;
                    look::apply(ui.ctx(), self.dark);
                }
                if ui
                    .button("play again")
                    .on_hover_text("begin the script anew, with an empty pool")
                    .clicked()
                {
                    self.begin_anew();
                }
                if ui.add_enabled(self.is_paused, egui::Button::new("one step")).clicked() {
                    self.one_step = true;
                }
                if ui.button(if self.is_paused { "go on" } else { "pause" }).clicked() {
                    self.is_paused = !self.is_paused;
                }
                // In a picture there is nothing that differs from run to run.
                if self.picture.is_none() {
                    let times = format!("frame {:.1} ms, step {:.1} ms", self.frame_ms, self.step_ms);
                    ui.label(RichText::new(times).monospace().color(colour(palette.weak)));
                }
            });
        });
        if let Some(error) = self.error.clone() {
            ui.horizontal(|ui| {
                ui.label(RichText::new(error).color(colour(palette.error)));
                if ui.small_button("dismiss").clicked() {
                    self.error = None;
                }
            });
        }
    }

    /// The same pool, but empty: another scheduler has other blocks, so the pool is made anew.
    fn begin_anew(&mut self) {
        if let Stage::Running(station) = &self.stage {
            self.stage = Stage::Ending(station.clone());
        }
    }

    fn status(&self) -> String {
        match &self.stage {
            Stage::Loading(loading) if loading.progress() < 1.0 => {
                format!("loading the model: {:.0} %", 100.0 * loading.progress())
            }
            Stage::Loading(_) => "compiling kernels".to_owned(),
            Stage::Ending(_) | Stage::Replacing { .. } => "making the pool".to_owned(),
            Stage::Failed => "stopped".to_owned(),
            Stage::Running(_) => match self.service.waiting {
                Some(WaitReason::Blocks { needed, available }) => {
                    format!("waiting for {needed} blocks, {available} are free")
                }
                Some(WaitReason::Transfers { .. }) => {
                    "waiting for blocks to arrive in main memory".to_owned()
                }
                Some(_) => "waiting".to_owned(),
                None if self.is_paused => "paused".to_owned(),
                None if self.has_nothing_left() => "nothing left to compute".to_owned(),
                None => String::new(),
            },
        }
    }

    fn pool(&mut self, ui: &mut Ui, palette: &Palette, snapshot: &Snapshot, cards: &[Rect]) {
        let now = self.now(ui.ctx());
        let marks: Vec<_> = self.service.marks.visible(now).collect();
        let cache = self.service.scheduler().cache().config();
        let view = PoolView {
            palette,
            snapshot,
            marks: &marks,
            chosen: self.chosen,
            block_bytes: cache.bytes_per_block(),
            host_blocks: cache.host_blocks(),
        };
        let drawn = view.show(ui, chart::HEIGHT + ui.spacing().item_spacing.y);
        chart::show(ui, palette, &self.service.history);
        if let (true, Some(picture)) = (self.is_frozen(), &mut self.picture) {
            let hidden_steps = self.hidden_steps;
            let service = &self.service;
            let shown =
                Shown { service, snapshot, marks: &marks, drawn: &drawn, cards, palette, hidden_steps };
            picture.take(ui.ctx(), &shown);
        }
    }

    /// Returns where the cards are.
    fn chats(&mut self, ui: &mut Ui, palette: &Palette, snapshot: &Snapshot) -> Vec<Rect> {
        Panel::bottom("draft").frame(Frame::new()).show_separator_line(false).show(ui, |ui| {
            ui.add_space(8.0);
            self.text_box(ui, palette);
        });
        let Seen { wish, pointed, cards } = chats_view::show(ui, palette, self.service.chats(), snapshot);
        self.chosen = pointed;
        if let Some(wish) = wish {
            self.wish(wish);
        }
        cards
    }

    fn text_box(&mut self, ui: &mut Ui, palette: &Palette) {
        ui.horizontal(|ui| {
            let whom = |slot: Option<usize>| {
                slot.map_or("a new chat".to_owned(), |slot| format!("chat {}", letter(slot)))
            };
            ui.label(weak(palette, "to"));
            ComboBox::from_id_salt("whom").width(96.0).selected_text(whom(self.addressed)).show_ui(
                ui,
                |ui| {
                    let slots = self.service.chats().map(|(slot, _)| Some(slot));
                    for slot in std::iter::once(None).chain(slots).collect::<Vec<_>>() {
                        ui.selectable_value(&mut self.addressed, slot, whom(slot));
                    }
                },
            );
            let width = ui.available_width() - 64.0;
            let edit = TextEdit::singleline(&mut self.draft).hint_text("say something").desired_width(width);
            let response = ui.add(edit);
            let entered = response.lost_focus() && ui.input(|input| input.key_pressed(Key::Enter));
            let clicked = ui.button("send").clicked();
            if (entered || clicked) && !self.draft.trim().is_empty() {
                self.send();
                response.request_focus();
            }
        });
    }
}
