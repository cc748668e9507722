//! The palette as egui wants it: colours, type, and the few shapes that several views share.

use eframe::egui::{
    self, Color32, CornerRadius, FontFamily, FontId, Frame, Margin, RichText, Stroke, TextStyle, Theme, Ui,
    Visuals,
};

use crate::palette::{Palette, Rgb};

pub(crate) fn colour([red, green, blue]: Rgb) -> Color32 {
    Color32::from_rgb(red, green, blue)
}

/// Sets the theme's colours and the sizes of type.
pub(crate) fn apply(context: &egui::Context, dark: bool) {
    let palette = Palette::of(dark);
    let mut visuals = if dark { Visuals::dark() } else { Visuals::light() };
    visuals.panel_fill = colour(palette.window);
    visuals.window_fill = colour(palette.panel);
    visuals.extreme_bg_color = colour(palette.free);
    visuals.override_text_color = Some(colour(palette.ink));
    visuals.weak_text_color = Some(colour(palette.weak));
    visuals.selection.bg_fill = colour(palette.live);
    visuals.selection.stroke.color = colour(palette.text_on(palette.live));
    visuals.window_stroke = Stroke::new(1.0, colour(palette.line));
    let theme = if dark { Theme::Dark } else { Theme::Light };
    context.set_theme(theme);
    context.set_visuals_of(theme, visuals);
    context.all_styles_mut(|style| {
        let font = |size, family| FontId::new(size, family);
        style.text_styles = [
            (TextStyle::Heading, font(18.0, FontFamily::Proportional)),
            (TextStyle::Body, font(14.0, FontFamily::Proportional)),
            (TextStyle::Button, font(13.0, FontFamily::Proportional)),
            (TextStyle::Small, font(12.0, FontFamily::Proportional)),
            (TextStyle::Monospace, font(13.0, FontFamily::Monospace)),
        ]
        .into();
        style.spacing.item_spacing = egui::vec2(8.0, 6.0);
        style.spacing.button_padding = egui::vec2(7.0, 3.0);
        style.spacing.slider_width = 110.0;
    });
}

/// A sheet on the window's ground.
pub(crate) fn card(palette: &Palette) -> Frame {
    Frame::new()
        .fill(colour(palette.panel))
        .stroke(Stroke::new(1.0, colour(palette.line)))
        .corner_radius(CornerRadius::same(8))
        .inner_margin(Margin::same(12))
}

pub(crate) fn weak(palette: &Palette, text: impl Into<String>) -> RichText {
    RichText::new(text).color(colour(palette.weak)).small()
}

pub(crate) fn title(ui: &mut Ui, text: &str) {
    ui.label(RichText::new(text).strong().size(15.0));
}

/// Bytes, in the largest unit that leaves a whole number before the point.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, size)| bytes >= *size) {
        Some((unit, size)) => format!("{:.1} {unit}", bytes as f64 / *size as f64),
        None => format!("{bytes} B"),
    }
}

/// A number with a thin space between thousands.
pub(crate) fn number(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push('\u{2009}');
        }
        text.push(digit);
    }
    text
}
