//! Rules about the manifests: no package declares a dependency that none of its sources names.

use std::fs;
use std::path::{Path, PathBuf};

/// Dependencies that no source names, and why they are there.
const UNNAMED: [(&str, &str, &str); 4] = [
    ("examples/Cargo.toml", "ahash", FEATURES),
    ("examples/Cargo.toml", "log", FEATURES),
    ("examples/Cargo.toml", "rustix", FEATURES),
    ("examples/Cargo.toml", "smallvec", FEATURES),
];
const FEATURES: &str = "declared for its features: with them the window builds nothing twice";

/// Folders without sources of ours.
const OTHERS: [&str; 4] = ["target", "node_modules", "corpus", "artifacts"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// What is in `folder`, without what is hidden or not ours.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let found = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut found: Vec<PathBuf> = found.map(|entry| entry.unwrap().path()).collect();
    found.retain(|path| {
        let name = path.file_name().unwrap().to_string_lossy();
        !name.starts_with('.') && !OTHERS.contains(&&*name)
    });
    found.sort();
    found
}

/// The folders of all packages in and below `folder`.
fn packages(folder: &Path) -> Vec<PathBuf> {
    let own = Some(folder.to_path_buf()).filter(|folder| folder.join("Cargo.toml").exists());
    let below = entries(folder).into_iter().filter(|path| path.is_dir());
    own.into_iter().chain(below.flat_map(|folder| packages(&folder))).collect()
}

/// Adds the Rust files in `folder`, packages in it left out, and the files elsewhere that they take in by `#[path]`.
fn add_sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for path in entries(folder) {
        if path.is_dir() && !path.join("Cargo.toml").exists() {
            add_sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            add_source(&path, found);
        }
    }
}

fn add_source(path: &Path, found: &mut Vec<PathBuf>) {
    let path = path.canonicalize().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    if found.contains(&path) {
        return;
    }
    let text = read(&path);
    found.push(path.clone());
    for rest in text.split("#[path = \"").skip(1) {
        add_source(&path.parent().unwrap().join(rest.split('"').next().unwrap()), found);
    }
}

/// The names that a manifest gives to its dependencies, of whatever kind and for whatever target.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut within = false;
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            assert!(!line.contains("dependencies."), "a section for one dependency is not read: {line}");
            within = line.ends_with("dependencies]") && line != "[workspace.dependencies]";
        } else if within && line.starts_with(|letter: char| letter.is_alphanumeric()) {
            names.push(line.split(['=', '.']).next().unwrap().trim().to_owned());
        }
    }
    names.sort();
    names.dedup();
    names
}

/// Whether Rust code outside of comments has a path that begins with `name`, or imports it.
fn names(code: &str, name: &str) -> bool {
    let name = name.replace('-', "_");
    let is_part =
        |letter: Option<char>| letter.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
    code.lines().map(|line| line.split("//").next().unwrap()).any(|line| {
        line.match_indices(&name).any(|(at, _)| {
            let (before, after) = (&line[..at], &line[at + name.len()..]);
            let is_word = !is_part(before.chars().next_back()) && !is_part(after.chars().next());
            let is_imported =
                before.trim_end().ends_with("use") || before.trim_end().ends_with("extern crate");
            is_word && !before.ends_with("::") && (after.starts_with("::") || is_imported)
        })
    })
}

#[test]
fn dependencies_are_read_from_every_form_and_found_where_they_are_used() {
    let manifest = "[workspace.dependencies]\nignored = \"1\"\n[dependencies]\n# why\na.workspace = true\nb-c = \"1\"\n\
                    [dev-dependencies]\na = { workspace = true, features = [\"x\"] }\n\
                    [target.'cfg(unix)'.dependencies]\nd = { path = \"..\" }\n[features]\ne = [\"dep:a\"]\n";
    assert_eq!(dependencies(manifest), ["a", "b-c", "d"]);
    for used in
        ["use half::f16;", "let x = half::f16::NAN;", "use half;", "    pub use half as h;", "#[half::bench]"]
    {
        assert!(names(used, "half"), "{used}");
    }
    for unused in
        ["// use half::f16;", "let half = 1;", "behalf::x", "half_way::x", "crate::half::x", "a half of"]
    {
        assert!(!names(unused, "half"), "{unused}");
    }
    assert!(names("use b_c::D;", "b-c"));
}

#[test]
fn every_declared_dependency_is_used() {
    let mut unused = Vec::new();
    let packages = packages(root());
    assert!(packages.len() > 5, "{packages:?}");
    for folder in packages {
        let manifest = folder.join("Cargo.toml");
        let name = manifest.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/");
        let mut sources = Vec::new();
        add_sources(&folder, &mut sources);
        let sources: Vec<String> = sources.iter().map(|path| read(path)).collect();
        for dependency in dependencies(&read(&manifest)) {
            if !sources.iter().any(|code| names(code, &dependency)) {
                unused.push((name.clone(), dependency));
            }
        }
    }
    let expected: Vec<_> =
        UNNAMED.iter().map(|&(manifest, name, _)| (manifest.into(), name.into())).collect();
    assert_eq!(unused, expected, "dependencies that no source names; those expected: {UNNAMED:#?}");
}

#[test]
fn every_dependency_of_the_workspace_is_one_of_a_package() {
    let manifest = read(&root().join("Cargo.toml"));
    let section = manifest.split("[workspace.dependencies]\n").nth(1).unwrap().split("\n[").next().unwrap();
    let members: Vec<String> =
        packages(root()).iter().map(|folder| read(&folder.join("Cargo.toml"))).collect();
    for line in section.lines().filter(|line| !line.is_empty()) {
        let name = line.split('=').next().unwrap().trim();
        let inherits = |line: &str| {
            let line = line.replace(' ', "");
            line.starts_with(&format!("{name}.workspace=true"))
                || line.starts_with(&format!("{name}={{workspace=true"))
        };
        assert!(members.iter().any(|member| member.lines().any(inherits)), "no package inherits {name}");
    }
}
