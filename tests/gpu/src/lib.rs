//! Nothing but the test binary lives in this package; see `main.rs`.
