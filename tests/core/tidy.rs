//! Rules about the source itself: who may know whom, and that every cited invariant exists.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All Rust files under `folder`, with their text.
pub(crate) fn sources(folder: &str) -> Vec<(PathBuf, String)> {
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

/// The rooms of floor 0. Each may know those before it.
const GROUND: [&str; 9] =
    ["faults", "ids", "error", "reach", "logits", "model", "layout", "stacks", "config"];

/// The floor of a module, by the first name of its path within the crate.
fn floor(module: &str) -> u32 {
    match module {
        ground if GROUND.contains(&ground) => 0,
        "cache" => 1,
        "schedule" => 2,
        "reference" => 3,
        "gpu" => 4,
        "lib" | "docs" => 5,
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
            let room = |module: &str| GROUND.iter().position(|room| *room == module);
            if room(&own).is_some_and(|own| room(&name).is_some_and(|name| name > own)) {
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

/// What the package's `include` list names: files, and folders that are packed as a whole.
fn packed() -> Vec<PathBuf> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let list =
        manifest.split("\ninclude = [").nth(1).and_then(|rest| rest.split(']').next()).expect("a list");
    let names = list.split('"').skip(1).step_by(2).map(|name| root().join(name.trim_start_matches('/')));
    names
        .map(|path| path.canonicalize().unwrap_or_else(|error| panic!("{}: {error}", path.display())))
        .collect()
}

/// What the sources include lies in the package.
#[test]
fn what_is_included_in_a_source_is_in_the_package() {
    let packed = packed();
    let (mut found, mut wrong) = (Vec::new(), Vec::new());
    for (path, text) in sources("src") {
        for rest in text.split("include_str!(\"").skip(1) {
            let target = rest.split('"').next().unwrap_or_default();
            let full = root().join(&path).parent().unwrap().join(target).canonicalize();
            let inside = full.as_ref().is_ok_and(|full| packed.iter().any(|kept| full.starts_with(kept)));
            if !inside {
                wrong.push(format!("{}: {target}", path.display()));
            }
            found.push(target.to_owned());
        }
    }
    assert!(wrong.is_empty(), "not packed: {wrong:#?}");
    for known in ["../README.md", "docs/links.md", "../docs/embedding.md", "../ARCHITECTURE.md"] {
        assert!(found.iter().any(|target| target == known), "{known} is not found among {found:?}");
    }
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

/// A section of ARCHITECTURE.md.
fn architecture(section: &str) -> String {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let mut sections = text.split("\n## ").filter(|text| text.starts_with(section));
    sections.next().unwrap_or_else(|| panic!("ARCHITECTURE.md has a section {section}")).to_owned()
}

/// The items of a list in Markdown, each on one line.
fn items(text: &str) -> Vec<String> {
    let mut items: Vec<String> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        match (line.strip_prefix("- "), line.strip_prefix("  "), items.last_mut()) {
            (Some(first), ..) => items.push(first.to_owned()),
            (None, Some(more), Some(item)) if inside => {
                item.push(' ');
                item.push_str(more.trim_start());
            }
            _ => {}
        }
        inside = line.starts_with("- ") || (inside && line.starts_with("  "));
    }
    items
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Fails unless every item ends by naming tests, and all of them exist.
fn assert_tests_exist(items: &[String]) {
    let tests = ["tests/core", "tests/gpu", "src", "examples/tests"].into_iter().flat_map(sources);
    let tests: String = tests.map(|(_, text)| text).collect();
    for item in items {
        let (_, named) = item.rsplit_once("Tests: ").unwrap_or_else(|| panic!("no test holds: {item}"));
        assert!(named.contains('`'), "no test holds: {item}");
        for name in quoted(named).filter(|&name| name != "properties") {
            assert!(tests.contains(&format!("fn {name}(")), "there is no test {name}");
        }
    }
}

#[test]
fn every_test_that_is_said_to_hold_an_invariant_exists() {
    let section = architecture("Invariants");
    let rows = section.lines().filter(|line| line.starts_with("| I"));
    let listed: Vec<&str> = rows.filter_map(|row| row.split('|').nth(1)).map(str::trim).collect();
    let held: Vec<String> = items(&section).into_iter().filter(|item| item.starts_with('I')).collect();
    let numbers: Vec<&str> = held.iter().filter_map(|item| item.split('.').next()).collect();
    assert_eq!(listed, (1..=16).map(|number| format!("I{number}")).collect::<Vec<_>>());
    assert_eq!(listed, numbers, "the table and the list below it");
    assert_tests_exist(&held);
}

#[test]
fn every_test_that_is_said_to_inject_a_device_fault_exists() {
    let faults = items(&architecture("Device faults"));
    assert!(faults.len() > 10);
    assert_tests_exist(&faults);
}

/// Names of all functions that are called after a fault of others: `b37_…`.
fn tests_of_cases() -> Vec<String> {
    let mut names = Vec::new();
    for (_, text) in ["tests", "src", "examples", "benches"].into_iter().flat_map(sources) {
        for rest in text.split("fn b").skip(1) {
            let name = word(rest);
            let digits = name.chars().take_while(char::is_ascii_digit).count();
            if digits == 2 && name[digits..].starts_with('_') {
                names.push(format!("b{name}"));
            }
        }
    }
    names
}

#[test]
fn every_fault_of_others_that_a_test_is_named_after_is_listed() {
    let list = fs::read_to_string(root().join("tests/cases.md")).unwrap();
    let tests = tests_of_cases();
    let listed: Vec<&str> = list.split("\n## ").skip(1).filter_map(|case| case.split(':').next()).collect();
    assert!(listed.is_sorted_by(|one, other| one < other), "cases stand in order, each once: {listed:?}");
    let missing: Vec<&String> = tests.iter().filter(|name| !listed.contains(&&name[..3])).collect();
    assert!(missing.is_empty() && tests.len() > 50, "tests/cases.md does not list the fault of {missing:?}");
    for case in list.split("\n## ").skip(1) {
        assert!(
            case.contains("\n- Seen in ") && case.contains("\n- Right: "),
            "where, and what is right: {case}"
        );
        for name in
            items(case).iter().filter(|item| item.starts_with("Tests: ")).flat_map(|item| quoted(item))
        {
            assert!(name.starts_with(&case[..3]), "{name} belongs to another case than {}", &case[..3]);
            assert!(tests.iter().any(|test| test == name), "there is no test {name}");
        }
    }
}

/// What is written for people, by path: the documents, and the list of cases.
fn documents() -> Vec<(PathBuf, String)> {
    let pages = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let files = ["README.md", "ARCHITECTURE.md", "tests/cases.md"].map(|name| root().join(name));
    let documents = files.into_iter().chain(pages);
    documents.map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

#[test]
fn documents_have_no_line_above_200_characters_and_the_front_page_1500_words() {
    let mut long = Vec::new();
    for (path, text) in documents() {
        let lines = text.lines().enumerate().filter(|(_, line)| line.chars().count() > 200);
        long.extend(lines.map(|(at, _)| format!("{}:{}", path.display(), at + 1)));
    }
    assert!(long.is_empty(), "{long:#?}");
    let words = fs::read_to_string(root().join("README.md")).unwrap().split_whitespace().count();
    assert!(words <= 1500, "README.md has {words} words");
}

/// What users looked for and did not find, or found wrong, by the page that says it.
const TOLD: [(&str, &[&str]); 11] = [
    (
        "README.md",
        &[
            "Schedule::Waiting(_) => return Ok(true)",
            "**`Waiting` is not the end.**",
            "error E0499",
            "**`keep` counts for one turn.**",
            "**Positions are yours.**",
            "scaled by `1 / sqrt(head_dim)`",
            "once, for all layers and steps",
            "its step is committed at once, without waiting",
        ],
    ),
    (
        "docs/embedding.md",
        &[
            "bounds a dispatch",
            "Block copies, appends and merges are not cut",
            "record one step over several submissions",
            "within it the compiler says E0499",
            "`.keep(true)` on the request of `add`, and on that of each `extend`",
            "positions encoded (RoPE)",
            "One `BoundTensors` serves all layers",
            "without waiting for the device",
            "agree with those that it has alone, but not in every bit",
            "from a tick of your own",
            "waits without a limit",
        ],
    ),
    (
        "docs/devices.md",
        &[
            "| heads above 256 elements |",
            "| layers that read an earlier layer's cache |",
            "| bf16 and quantised keys and values |",
            "| tree drafts |",
            "| sessions on disk |",
            "| elastic pools |",
            "On DX12, bring `dxcompiler.dll` along",
        ],
    ),
    ("docs/comparison.md", &["| stored types | f32, f16 | f16 only |"]),
    ("docs/prefix-cache.md", &["one placeholder id", "**Kept chats are not covered**"]),
    ("src/gpu/options.rs", &["What is not cut may exceed it", "a driver's watchdog counts submissions"]),
    ("src/gpu/tensors.rs", &["`[rows, num_query_heads, head_dim]`, positions encoded"]),
    ("src/cache/forget.rs", &["O(blocks of the pool + table entries), however long the chains are"]),
    ("src/schedule/abort.rs", &["O(log sequences + blocks given back), for each sample"]),
    ("src/schedule/planner.rs", &["O(running sequences + rows + new blocks)"]),
    ("src/schedule/request.rs", &["exactly one [`Finished`](Self::Finished) in a turn"]),
];

#[test]
fn pages_say_what_users_had_to_find_out() {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut missing = Vec::new();
    for (page, sentences) in TOLD {
        let text = fs::read_to_string(root().join(page)).unwrap().replace("///", "");
        let text = words(&text);
        missing.extend(sentences.iter().filter(|sentence| !text.contains(*sentence)).map(|s| (page, s)));
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// Every page begins with the question that it answers, and every link leads somewhere.
#[test]
fn pages_begin_with_a_question_and_their_links_lead_to_files() {
    let links = fs::read_to_string(root().join("src/docs/links.md")).unwrap();
    let mut wrong = Vec::new();
    for (path, text) in documents() {
        let folder = path.parent().unwrap();
        let question = text.split("\n\n").nth(1).is_some_and(|first| first.ends_with('?'));
        if path.starts_with(root().join("docs")) && !question {
            wrong.push(format!("{} begins with no question", path.display()));
        }
        for (name, target) in text.lines().filter_map(|line| line.strip_prefix('[')?.split_once("]: ")) {
            if target.contains("://") {
                continue;
            }
            if !folder.join(target).is_file() {
                wrong.push(format!("{}: {target} is no file", path.display()));
            }
            if !links.contains(&format!("[{name}]: ")) {
                wrong.push(format!("{}: [{name}] leads nowhere in rustdoc", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
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
fn the_documents_say_what_to_do_about_every_error() {
    let variants = error_variants();
    for known in
        ["ConfigError::Zero", "RequestError::EmptyPrompt", "CommitError::Cache", "RecordError::TooManyRows"]
    {
        assert!(variants.iter().any(|variant| variant == known), "{known} is not found in the sources");
    }
    let page = fs::read_to_string(root().join("docs/errors.md")).unwrap();
    let mut listed: Vec<String> = Vec::new();
    for item in items(&page).iter().filter(|item| item.starts_with('`') && item.contains("Error::")) {
        let (names, rest) = item.split_once("`: ").unwrap_or_else(|| panic!("names, then a colon: {item}"));
        let (meaning, advice) = rest.split_once("*Do:* ").unwrap_or_else(|| panic!("no advice: {item}"));
        assert!(meaning.len() > 2 && advice.len() > 2, "what it means and what to do: {item}");
        listed.extend(quoted(names).map(str::to_owned));
    }
    listed.sort();
    let missing: Vec<_> = variants.iter().filter(|variant| !listed.contains(variant)).collect();
    assert!(missing.is_empty(), "docs/errors.md says nothing of {missing:?}");
    let gone: Vec<_> = listed.iter().filter(|name| !variants.contains(name)).collect();
    assert!(gone.is_empty(), "docs/errors.md explains {gone:?}, which do not exist");
    assert!(listed.is_sorted_by(|one, other| one < other), "an error stands there twice");
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
