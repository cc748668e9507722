//! The controls and the counters beside the pool.

use eframe::egui::{ComboBox, Grid, RichText, Sense, Slider, SliderClamping, Ui, vec2};
use paged_kv::{PreemptionMode, SchedulerStats, VictimPolicy};

use crate::{
    chart,
    look::{bytes, card, colour, number, title, weak},
    palette::Palette,
    settings::Settings,
    snapshot::Usage,
};

/// Most blocks that the control offers.
const MOST_BLOCKS: u32 = 1024;

/// What the counters show.
pub(crate) struct Counters<'a> {
    pub(crate) stats: &'a SchedulerStats,
    pub(crate) usage: Usage,
    pub(crate) bytes_per_token: u64,
    pub(crate) block_bytes: u64,
    /// Most rows of a step, as things are.
    pub(crate) step_rows: u32,
    /// Steps that no frame took.
    pub(crate) hidden_steps: u64,
}

/// Lets the user choose. A change makes another pool.
pub(crate) fn controls(ui: &mut Ui, palette: &Palette, settings: &mut Settings) {
    card(palette).show(ui, |ui| {
        ui.set_min_width(ui.available_width());
        title(ui, "Controls");
        Grid::new("controls").num_columns(2).spacing([10.0, 6.0]).show(ui, |ui| {
            ui.label("blocks");
            ui.add(
                Slider::new(&mut settings.num_blocks, 4..=MOST_BLOCKS)
                    .logarithmic(true)
                    // What the command line asked for stays, even beyond the slider's ends.
                    .clamping(SliderClamping::Edits)
                    .drag_value_speed(1.0),
            );
            ui.end_row();
            ui.label("tokens each");
            let sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256];
            choice(ui, "block size", &mut settings.block_size, &sizes.map(|size| (size, size.to_string())));
            ui.end_row();
            ui.label("admission");
            let admissions = [(false, "overcommitted"), (true, "guaranteed")];
            choice(ui, "admission", &mut settings.guaranteed, &admissions.map(in_text));
            ui.end_row();
            ui.label("when full");
            let modes = [
                (PreemptionMode::Recompute, "compute again"),
                (PreemptionMode::Swap, "move out and back"),
                (PreemptionMode::Auto, "whichever is faster"),
            ];
            choice(ui, "preemption", &mut settings.preemption, &modes.map(in_text));
            ui.end_row();
            ui.label("who gives way");
            let victims = [
                (VictimPolicy::LowestPriority, "last in line"),
                (VictimPolicy::LeastLost, "who loses least"),
                (VictimPolicy::Requester, "who asks"),
            ];
            choice(ui, "victims", &mut settings.victims, &victims.map(in_text));
            ui.end_row();
            ui.label("prefix cache");
            ui.checkbox(&mut settings.prefix_cache, "find equal beginnings");
            ui.end_row();
        });
        ui.label(weak(palette, "A change begins anew with an empty pool."));
    });
}

fn in_text<T>((value, text): (T, &str)) -> (T, String) {
    (value, text.to_owned())
}

fn choice<T: Copy + PartialEq>(ui: &mut Ui, id: &str, value: &mut T, choices: &[(T, String)]) {
    let chosen = choices.iter().find(|(choice, _)| choice == value).map_or("", |(_, text)| text);
    ComboBox::from_id_salt(id).width(150.0).selected_text(chosen).show_ui(ui, |ui| {
        for (choice, text) in choices {
            ui.selectable_value(value, *choice, text);
        }
    });
}

pub(crate) fn counters(ui: &mut Ui, palette: &Palette, counters: &Counters<'_>) {
    card(palette).show(ui, |ui| {
        ui.set_min_width(ui.available_width());
        title(ui, "Memory");
        memory(ui, palette, counters);
        ui.add_space(8.0);
        title(ui, "Work so far");
        work(ui, palette, counters);
    });
}

/// What there is to do.
pub(crate) fn hints(ui: &mut Ui, palette: &Palette) {
    card(palette).show(ui, |ui| {
        ui.set_min_width(ui.available_width());
        title(ui, "To try");
        for hint in [
            "Point at a block to see whose tokens it holds, and at a chat to see its blocks.",
            "Branch a chat: the two share every block until one of them writes into the last, and copies it.",
            "Stop a chat and let it go on: what nobody else needed meanwhile is found again.",
            "Make the pool smaller until chats give way, then choose how they come back.",
        ] {
            ui.label(weak(palette, hint));
        }
    });
}

fn memory(ui: &mut Ui, palette: &Palette, counters: &Counters<'_>) {
    let Usage { live, waste, cached, free } = counters.usage;
    let all = f64::from((live + waste + cached + free).max(1));
    Grid::new("memory").num_columns(4).min_col_width(10.0).spacing([8.0, 3.0]).show(ui, |ui| {
        for ((name, tone), tokens) in chart::parts(palette).into_iter().zip([live, waste, cached, free]) {
            let (rect, _) = ui.allocate_exact_size(vec2(10.0, 10.0), Sense::hover());
            ui.painter().rect_filled(rect, 2.0, colour(tone));
            ui.label(name);
            figure(ui, format!("{:5.1} %", 100.0 * f64::from(tokens) / all));
            figure(ui, format!("{:>9}", bytes(u64::from(tokens) * counters.bytes_per_token)));
            ui.end_row();
        }
    });
}

fn work(ui: &mut Ui, palette: &Palette, counters: &Counters<'_>) {
    let Counters { stats, block_bytes, step_rows, hidden_steps, .. } = counters;
    let cache = &stats.cache;
    let moved = |blocks: u64| bytes(blocks * block_bytes);
    let found = 100.0 * stats.prefix_hit_tokens as f64 / stats.prefix_wanted_tokens.max(1) as f64;
    let steps = match hidden_steps {
        0 => "steps".to_owned(),
        hidden => format!("steps, {} hidden", number(*hidden)),
    };
    let rows = [
        (steps.as_str(), number(stats.steps), String::new()),
        ("most rows of a step", number(u64::from(*step_rows)), String::new()),
        ("tokens generated", number(stats.generated_tokens), String::new()),
        ("prompt tokens computed", number(stats.prompt_tokens), String::new()),
        ("found in the cache", number(stats.prefix_hit_tokens), format!("{found:.0} %")),
        ("blocks copied", number(cache.block_copies), moved(cache.block_copies)),
        ("preemptions", number(stats.preemptions), String::new()),
        ("blocks moved out", number(cache.blocks_swapped_out), moved(cache.blocks_swapped_out)),
        ("blocks moved in", number(cache.blocks_swapped_in), moved(cache.blocks_swapped_in)),
        ("tokens computed again", number(stats.recomputed_tokens), String::new()),
        ("cached blocks evicted", number(cache.evictions), String::new()),
    ];
    Grid::new("work").num_columns(3).spacing([8.0, 3.0]).show(ui, |ui| {
        for (name, value, detail) in rows {
            ui.label(name);
            figure(ui, value);
            ui.label(weak(palette, detail));
            ui.end_row();
        }
    });
}

fn figure(ui: &mut Ui, text: String) {
    ui.label(RichText::new(text).monospace());
}
