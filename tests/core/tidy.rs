//! Rules about the source itself: who may know whom, and that every cited invariant exists.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All Rust files under `folder`, with their text.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path.strip_prefix(root()).unwrap().to_path_buf(), text));
            }
        }
    }
    found.sort();
    found
}

/// The floor of a module, by the first name of its path within the crate.
fn floor(module: &str) -> u32 {
    match module {
        "config" | "ids" | "error" | "faults" => 0,
        "cache" => 1,
        "schedule" => 2,
        "reference" => 3,
        "gpu" => 4,
        "lib" => 5,
        other => panic!("`{other}` has no floor: give it one in tests/core/tidy.rs and in ARCHITECTURE.md"),
    }
}

/// Where a name that `lib.rs` re-exports comes from.
fn home_of(name: &str, library: &str) -> String {
    let exports = library.split("pub use ").skip(1).filter_map(|export| export.split(';').next());
    let mut homes = exports.filter(|export| {
        export.split(|letter: char| !letter.is_alphanumeric() && letter != '_').any(|word| word == name)
    });
    homes.next().map(word).unwrap_or_else(|| panic!("`crate::{name}` is neither a module nor re-exported"))
}

/// First names after every `crate::` outside comments, grouped imports taken apart.
fn imports(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let code: String =
        text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n");
    for (at, found) in code.match_indices("crate::") {
        let before = code[..at].chars().next_back();
        if before.is_some_and(|before| before.is_alphanumeric() || before == '_' || before == '$') {
            continue;
        }
        let rest = code[at + found.len()..].trim_start();
        match rest.strip_prefix('{') {
            Some(group) => names.extend(first_names(group)),
            None => names.push(word(rest)),
        }
    }
    names
}

fn word(text: &str) -> String {
    text.chars().take_while(|&letter| letter.is_alphanumeric() || letter == '_').collect()
}

/// First names of the paths in a `{…}` group, whose opening brace is gone.
fn first_names(group: &str) -> Vec<String> {
    let (mut depth, mut names, mut expects_name) = (0, Vec::new(), true);
    for (at, letter) in group.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => expects_name = true,
            letter if expects_name && !letter.is_whitespace() => {
                names.push(word(&group[at..]));
                expects_name = false;
            }
            _ => {}
        }
    }
    names
}

fn module_of(path: &Path) -> String {
    let inner = path.strip_prefix("src").unwrap();
    let first = inner.components().next().unwrap().as_os_str().to_string_lossy();
    first.trim_end_matches(".rs").to_string()
}

#[test]
fn imports_are_read_from_every_form_of_use() {
    let text = "use crate::cache::{BlockCopy, KvCache};\npub use crate::{ids::{A, B}, error::E,\n  config};\n\
                fn f() -> crate::schedule::X { $crate::no } // crate::gpu\n";
    assert_eq!(imports(text), ["cache", "ids", "error", "config", "schedule"]);
}

#[test]
fn arrows_point_down_only() {
    let library = fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let mut wrong = Vec::new();
    for (path, text) in sources("src") {
        let own = module_of(&path);
        for name in imports(&text) {
            let name = if name.starts_with(char::is_uppercase) { home_of(&name, &library) } else { name };
            if floor(&name) > floor(&own) {
                wrong.push(format!("{} imports crate::{name}", path.display()));
            }
            // Tests need a cache to have a plan.
            if own == "gpu" && name == "cache" && !path.ends_with("tests.rs") {
                wrong.push(format!(
                    "{} imports crate::cache, whose plans are all it may know",
                    path.display()
                ));
            }
            if floor(&own) == 0 && name != own && own != "error" && name != "error" {
                wrong.push(format!("{} imports crate::{name}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// `super` stays within the folder: no file leaves it by climbing.
#[test]
fn nobody_climbs_out_of_a_folder() {
    let mut wrong = Vec::new();
    for (path, text) in sources("src") {
        let depth = path.components().count() - 2;
        let climbs = text.contains(&"super::".repeat(depth + 1));
        let at_top = depth == 0 || (depth == 1 && path.ends_with("mod.rs"));
        // Within a module that is written out in the file, `super` is the file.
        let inline = text.lines().any(|line| line.contains("mod ") && line.ends_with('{'));
        if climbs || (at_top && !inline && text.contains("super::")) {
            wrong.push(path);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What the library's sources include lies in folders that are packed as a whole.
#[test]
fn what_is_included_in_a_source_is_in_the_package() {
    let (mut included, mut wrong) = (0, Vec::new());
    for (path, text) in sources("src") {
        for (_, rest) in
            text.match_indices("include_str!(\"").map(|(at, found)| text.split_at(at + found.len()))
        {
            let target = rest.split('"').next().unwrap_or_default();
            let full = root().join(&path).parent().unwrap().join(target).canonicalize();
            let inside = full.as_ref().is_ok_and(|full| {
                let packed =
                    ["src", "shaders", "README.md"].map(|kept| root().join(kept).canonicalize().unwrap());
                packed.iter().any(|kept| full.starts_with(kept))
            });
            included += 1;
            if !inside {
                wrong.push(format!("{}: {target}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty() && included > 0, "{included} found; not packed: {wrong:#?}");
}

#[test]
fn only_the_device_part_knows_wgpu() {
    let mut wrong = Vec::new();
    for (path, text) in sources("src") {
        let mut code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let knows = code.any(|line| {
            let line = line.replace("feature = \"wgpu\"", "");
            line.contains("wgpu") || line.contains("bytemuck")
        });
        if knows && !["gpu", "lib"].contains(&module_of(&path).as_str()) {
            wrong.push(path);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_host_core_has_no_clock_no_threads_and_no_io() {
    let forbidden =
        ["std::time", "std::thread", "std::fs", "std::io", "std::net", "std::env", "println!", "unsafe "];
    let mut wrong = Vec::new();
    for (path, text) in sources("src") {
        if floor(&module_of(&path)) > 3 {
            continue;
        }
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for line in code {
            if forbidden.iter().any(|name| line.contains(name)) {
                wrong.push(format!("{}: {}", path.display(), line.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_cited_invariant_is_listed_in_the_architecture() {
    let listed =
        fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md lists the invariants");
    let mut wrong = Vec::new();
    let mut cited = Vec::new();
    for (path, text) in sources("src").into_iter().chain(sources("tests/core")) {
        for number in citations(&text) {
            cited.push(number);
            if !listed.contains(&format!("| I{number} |")) {
                wrong.push(format!("{} cites I{number}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let rare: Vec<u32> = (1..=14).filter(|number| !cited.contains(number)).collect();
    // I14 is kept by the device part, which cites it.
    assert!(rare.is_empty() || rare == [14], "nobody cites {rare:?}");
}

#[test]
fn every_test_that_is_said_to_hold_an_invariant_exists() {
    let listed =
        fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md lists the invariants");
    let tests = ["tests/core", "tests/gpu", "src"].into_iter().flat_map(sources);
    let tests: String = tests.map(|(_, text)| text).collect();
    let mut rows = 0;
    for row in listed.lines().filter(|line| line.starts_with("| I") && line.ends_with('|')) {
        rows += 1;
        let column = row.trim_end_matches('|').rsplit('|').next().unwrap_or("");
        let names: Vec<&str> = column.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "no test holds {row}");
        for name in names.into_iter().filter(|&name| name != "properties") {
            assert!(tests.contains(&format!("fn {name}")), "there is no test {name}");
        }
    }
    assert_eq!(rows, 14);
}

#[test]
fn every_test_that_is_said_to_inject_a_device_fault_exists() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let section = text.split("\n## ").find(|section| section.starts_with("Device faults")).unwrap();
    let tests = ["tests/core", "tests/gpu", "src", "examples/tests"].into_iter().flat_map(sources);
    let tests: String = tests.map(|(_, text)| text).collect();
    let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert!(rows.len() > 10);
    for row in rows {
        let column = row.trim_end_matches('|').rsplit('|').next().unwrap_or("");
        let names: Vec<&str> = column.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "no test injects {row}");
        for name in names.into_iter().filter(|&name| name != "properties") {
            assert!(tests.contains(&format!("fn {name}")), "there is no test {name}");
        }
    }
}

/// Numbers of all invariants cited: an `I` and one or two digits that stand as a word of their own.
fn citations(text: &str) -> Vec<u32> {
    let mut numbers = Vec::new();
    for (at, _) in text.match_indices('I') {
        let before = text[..at].chars().next_back();
        let digits: String = text[at + 1..].chars().take_while(char::is_ascii_digit).collect();
        let after = text[at + 1 + digits.len()..].chars().next();
        let word =
            |letter: Option<char>| letter.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
        if !digits.is_empty() && digits.len() <= 2 && !word(before) && !word(after) {
            numbers.push(digits.parse().unwrap());
        }
    }
    numbers
}

/// Public errors and their variants, read from the enums' text: `ConfigError::Zero`.
fn error_variants() -> Vec<String> {
    let mut found = Vec::new();
    for (_, text) in sources("src") {
        let text = text.replace("\r\n", "\n");
        let enums = text.split("\npub enum ").skip(1).filter_map(|rest| rest.split_once(" {\n"));
        for (name, rest) in enums.filter(|(name, _)| name.ends_with("Error")) {
            let body = rest.split("\n}\n").next().unwrap();
            // Variants are what stands at the first indentation; rustfmt sees to that.
            let lines = body.lines().filter_map(|line| line.strip_prefix("    "));
            let variants = lines.filter(|line| line.starts_with(|letter: char| letter.is_ascii_uppercase()));
            found.extend(variants.map(|line| format!("{name}::{}", word(line))));
        }
    }
    found
}

#[test]
fn the_readme_says_what_to_do_about_every_error() {
    let variants = error_variants();
    for known in
        ["ConfigError::Zero", "RequestError::EmptyPrompt", "CommitError::Cache", "RecordError::TooManyRows"]
    {
        assert!(variants.iter().any(|variant| variant == known), "{known} is not found in the sources");
    }
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let section =
        readme.split("\n## ").find(|section| section.starts_with("Troubleshooting")).expect("a section");
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let mut listed: Vec<String> = Vec::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        assert!(cells.len() == 3 && cells.iter().all(|cell| cell.trim().len() > 2), "three cells: {row}");
        listed.extend(cells[0].split('`').skip(1).step_by(2).map(str::to_owned));
    }
    listed.sort();
    let missing: Vec<_> = variants.iter().filter(|variant| !listed.contains(variant)).collect();
    assert!(missing.is_empty(), "Troubleshooting in README.md has no row for {missing:?}");
    let gone: Vec<_> = listed.iter().filter(|name| !variants.contains(name)).collect();
    assert!(gone.is_empty(), "Troubleshooting in README.md explains {gone:?}, which do not exist");
    assert!(listed.is_sorted_by(|one, other| one < other), "an error has two rows");
}

#[test]
fn examples_that_are_to_be_read_through_are_short() {
    let limits =
        [("share_device.rs", 200), ("parallel_sampling.rs", 150), ("bring_your_own_scheduler.rs", 150)];
    for (name, limit) in limits {
        let text = fs::read_to_string(root().join("examples").join(name)).unwrap();
        let lines = text.lines().count();
        assert!(lines < limit, "{name} has {lines} lines, not under {limit}");
    }
}
