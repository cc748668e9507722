//! Pages that answer one question each; the repository has them as files.
//!
//! In the repository a page's links lead to files, and here to pages. `docs/links.md` beside this file comes before
//! each page, and Markdown takes the first of two definitions of a link. The pictures are not in the package; once the
//! project has a public address, that file is the one place to put it. (crates.io takes it from `repository` in
//! Cargo.toml.)

macro_rules! pages {
    ($($name:ident: $text:expr,)+) => {
        $(#[doc = include_str!("docs/links.md")]
        #[doc = $text]
        pub mod $name {})+
    };
}

pages! {
    embedding: include_str!("../docs/embedding.md"),
    models: include_str!("../docs/models.md"),
    sizing: include_str!("../docs/sizing.md"),
    residency: include_str!("../docs/residency.md"),
    prefix_cache: include_str!("../docs/prefix-cache.md"),
    errors: include_str!("../docs/errors.md"),
    devices: include_str!("../docs/devices.md"),
    comparison: include_str!("../docs/comparison.md"),
    traffic: include_str!("../docs/traffic.md"),
    architecture: include_str!("../ARCHITECTURE.md"),
    measurements: include_str!("../benches/RESULTS.md"),
    changelog: include_str!("../CHANGELOG.md"),
}
