//! The chats, side by side, with what they say and what they hold.

use eframe::egui::{
    Align, Align2, Color32, FontId, Label, Layout, Rect, RichText, ScrollArea, Sense, TextFormat, Ui,
    UiBuilder, style::ScrollStyle, text::LayoutJob, vec2,
};

use crate::{
    cards,
    chat::{Chat, Phase, Role, letter},
    look::{card, colour, weak},
    palette::Palette,
    snapshot::{Share, Snapshot},
};

/// What the user asks of a chat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    Branch(usize),
    Stop(usize),
    Continue(usize),
    Close(usize),
    /// To be told what is typed next.
    Address(usize),
}

/// What the user does with the chats, and where they are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// What was clicked.
    pub(crate) wish: Option<Wish>,
    /// The chat under the pointer.
    pub(crate) pointed: Option<usize>,
    pub(crate) cards: Vec<Rect>,
}

/// Draws the chats.
pub(crate) fn show<'a>(
    ui: &mut Ui,
    palette: &Palette,
    chats: impl Iterator<Item = (usize, &'a Chat)>,
    snapshot: &Snapshot,
) -> Seen {
    let chats: Vec<_> = chats.filter(|(_, chat)| chat.phase != Phase::Closing).collect();
    let Seen { mut wish, mut pointed, mut cards } = Seen::default();
    let gap = ui.spacing().item_spacing.x;
    let width = cards::width(ui.available_width(), gap, chats.len());
    // A bar that takes room of its own covers no card.
    let floating = std::mem::replace(&mut ui.spacing_mut().scroll, ScrollStyle::solid());
    ScrollArea::horizontal().auto_shrink([false, false]).show(ui, |ui| {
        ui.spacing_mut().scroll = floating;
        let size = vec2(width, ui.available_height());
        ui.horizontal_top(|ui| {
            for (slot, chat) in chats {
                let (rect, response) = ui.allocate_exact_size(size, Sense::hover());
                cards.push(rect);
                let mut column =
                    ui.new_child(UiBuilder::new().max_rect(rect).layout(Layout::top_down(Align::Min)));
                column.set_clip_rect(column.clip_rect().intersect(rect));
                let share = snapshot.share(slot);
                wish = wish.or(card(palette)
                    .inner_margin(10)
                    .show(&mut column, |ui| self::column(ui, palette, slot, chat, share))
                    .inner);
                if response.contains_pointer() || column.rect_contains_pointer(rect) {
                    pointed = Some(slot);
                }
            }
        });
    });
    Seen { wish, pointed, cards }
}

fn column(ui: &mut Ui, palette: &Palette, slot: usize, chat: &Chat, share: Option<&Share>) -> Option<Wish> {
    ui.set_min_size(ui.available_size());
    let mut wish = ui.horizontal(|ui| heading(ui, palette, slot, chat, share)).inner;
    let line = |ui: &mut Ui, text: String| ui.add(Label::new(weak(palette, text)).truncate());
    line(ui, cards::sharing(share));
    line(ui, cards::news(chat));
    let height = (ui.available_height() - 34.0).max(24.0);
    let scroll = ScrollArea::vertical().id_salt(slot).max_height(height).auto_shrink([false, false]);
    scroll.stick_to_bottom(true).show(ui, |ui| {
        ui.label(words(palette, chat, ui.available_width()));
    });
    ui.horizontal(|ui| {
        wish = wish.or(buttons(ui, slot, chat));
    });
    wish
}

fn heading(ui: &mut Ui, palette: &Palette, slot: usize, chat: &Chat, share: Option<&Share>) -> Option<Wish> {
    let (rect, response) = ui.allocate_exact_size(vec2(26.0, 26.0), Sense::click());
    let tone = palette.owner(slot);
    let text = colour(palette.text_on(tone));
    ui.painter().rect_filled(rect, 5.0, colour(tone));
    ui.painter().text(rect.center(), Align2::CENTER_CENTER, letter(slot), FontId::proportional(16.0), text);
    let addressed = response.on_hover_text("say something to this chat").clicked();
    ui.vertical(|ui| {
        ui.spacing_mut().item_spacing.y = 1.0;
        ui.add(Label::new(RichText::new(cards::standing(chat, share)).strong().size(13.0)).truncate());
        ui.add(Label::new(weak(palette, cards::size(chat, share))).truncate());
    });
    addressed.then_some(Wish::Address(slot))
}

fn buttons(ui: &mut Ui, slot: usize, chat: &Chat) -> Option<Wish> {
    let mut wish = None;
    let mut button = |ui: &mut Ui, text: &str, hint: &str, of: Wish| {
        if ui.button(text).on_hover_text(hint).clicked() {
            wish = Some(of);
        }
    };
    ui.spacing_mut().item_spacing.x = 5.0;
    button(ui, "branch", "another chat that shares all blocks so far", Wish::Branch(slot));
    if chat.phase == Phase::Answering {
        button(ui, "stop", "give up its blocks; the prefix cache keeps the full ones", Wish::Stop(slot));
    } else {
        let hint = match chat.phase {
            Phase::Invalid(_) => "compute all of it again, and continue from here",
            _ => "continue from here",
        };
        button(ui, "go on", hint, Wish::Continue(slot));
    }
    button(ui, "×", "close: end the chat and give up its blocks", Wish::Close(slot));
    wish
}

fn words(palette: &Palette, chat: &Chat, width: f32) -> LayoutJob {
    let mut job = LayoutJob::default();
    job.wrap.max_width = width;
    let format = |size: f32, tone: Color32| TextFormat {
        font_id: FontId::proportional(size),
        color: tone,
        ..Default::default()
    };
    for segment in &chat.segments {
        let text = segment.text.trim();
        match segment.role {
            Role::System => {
                let begin: String = text.chars().take(36).collect();
                job.append(&format!("{begin}…\n"), 0.0, format(12.0, colour(palette.weak)));
            }
            Role::User => job.append(&format!("{text}\n"), 0.0, format(14.0, colour(palette.live))),
            Role::Model => job.append(&format!("{text}\n"), 0.0, format(14.0, colour(palette.ink))),
        }
    }
    job
}
