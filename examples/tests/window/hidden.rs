//! The window while it is minimised, on X11: what a window manager does to it is done here.

use crate::{
    cards,
    picture::{Display, Image, LIMIT, check_sums, float, run},
    requires_lavapipe,
};
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use x11rb::{
    connection::Connection as _,
    protocol::xproto::{AtomEnum, ConfigureWindowAux, ConnectionExt as _, MapState, PropMode, Window},
    rust_connection::RustConnection,
    wrapper::ConnectionExt as _,
};

/// Another program that does to the window what a window manager does: there is none on the [`Display`].
struct Manager {
    connection: RustConnection,
    root: Window,
}

impl Manager {
    fn of(display: &Display) -> Self {
        let (connection, screen) = x11rb::connect(Some(&display.name)).unwrap();
        let root = connection.setup().roots[screen].root;
        Self { connection, root }
    }

    /// Waits for a window that is shown.
    fn await_window(&self) -> Window {
        let start = Instant::now();
        while start.elapsed() < LIMIT {
            let tree = self.connection.query_tree(self.root).unwrap().reply().unwrap();
            let is_shown = |window: &Window| {
                let attributes = self.connection.get_window_attributes(*window).unwrap().reply();
                attributes.is_ok_and(|attributes| attributes.map_state == MapState::VIEWABLE)
            };
            if let Some(window) = tree.children.into_iter().find(is_shown) {
                return window;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("no window within {LIMIT:?}");
    }

    fn widen(&self, window: Window, width: u32) {
        self.connection
            .configure_window(window, &ConfigureWindowAux::new().width(width))
            .unwrap()
            .check()
            .unwrap();
    }

    fn minimise(&self, window: Window) {
        let atom =
            |name: &str| self.connection.intern_atom(false, name.as_bytes()).unwrap().reply().unwrap().atom;
        let (state, hidden) = (atom("_NET_WM_STATE"), atom("_NET_WM_STATE_HIDDEN"));
        self.connection
            .change_property32(PropMode::REPLACE, window, state, AtomEnum::ATOM, &[hidden])
            .unwrap()
            .check()
            .unwrap();
        self.connection.unmap_window(window).unwrap().check().unwrap();
    }
}

/// A step of the script at which there are six chats, and their number.
const SIX_CHATS: (&str, usize) = ("220", 6);

#[test]
fn a_minimised_window_goes_on_and_is_drawn_with_six_whole_cards_at_1400_points() {
    if !requires_lavapipe() {
        println!("window: minimised NOT RUN, for that needs a display of its own");
        return;
    }
    const WIDTH: u32 = 1400;
    let display = Display::open();
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let [picture, states] = ["png", "json"].map(|kind| folder.join(format!("residency-hidden.{kind}")));
    let [picture_name, states_name] = [&picture, &states].map(|path| path.to_str().unwrap());
    let (step, num_chats) = SIX_CHATS;
    let arguments = ["--frames", step, "--screenshot", picture_name, "--states", states_name];
    let ended = std::thread::scope(|scope| {
        let running = scope.spawn(|| run(Some(&display), &arguments));
        let manager = Manager::of(&display);
        let window = manager.await_window();
        manager.widen(window, WIDTH);
        manager.minimise(window);
        running.join().unwrap()
    });
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let states: Value = serde_json::from_slice(&std::fs::read(&states).unwrap()).unwrap();
    let (hidden, steps) = (states["hidden_steps"].as_u64().unwrap(), step.parse().unwrap());
    assert!(hidden > steps / 2 && hidden < steps, "{hidden} of {steps} steps while hidden");
    check_sums(&states);
    let image = Image::open(&picture);
    assert_eq!(image.width, WIDTH as usize);
    let cards = states["cards"].as_array().unwrap();
    assert_eq!(cards.len(), num_chats);
    for card in cards {
        let [left, right] = [0, 1].map(|end| float(&card[end]));
        assert!(right - left >= cards::NARROWEST && right <= WIDTH as f32, "{card}");
    }
    println!("window: {hidden} of {steps} steps while it was minimised");
}
