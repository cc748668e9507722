//! What the example programs print and how they end, seen from outside.
//!
//! The programs must have been built: `cargo test` does so; run `cargo build --examples` before
//! `cargo test --test programs`. Most of this runs the toy model on the CPU twins. `share_device` and `device_report` run
//! on the software adapters there are (`PAGED_KV_REQUIRE_ADAPTERS`: those without which the tests fail). The two examples
//! to be read through take the first adapter there is, or the CPU.
#![allow(clippy::unwrap_used)]

mod device_report;

use serde_json::Value;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// An example program, beside the folder of this test binary.
fn program(name: &str) -> Command {
    let tests = std::env::current_exe().unwrap();
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let path = tests.parent().unwrap().parent().unwrap().join("examples").join(file);
    assert!(path.exists(), "{} is missing: cargo build --workspace --examples", path.display());
    let mut command = Command::new(path);
    if std::env::var_os("XDG_RUNTIME_DIR").is_none_or(|folder| !std::path::Path::new(&folder).is_dir()) {
        // Any existing folder will do; without one, EGL complains on standard error.
        command.env("XDG_RUNTIME_DIR", std::env::temp_dir());
    }
    command
}

/// How a program ended: exit status, standard output, standard error.
struct Ended {
    status: i32,
    out: String,
    err: String,
}

fn run(command: &mut Command, input: &str) -> Ended {
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = pipes.spawn().unwrap();
    // A program that needs no input may have ended before it reads any.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    Ended {
        status: output.status.code().expect("no signal ended it"),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

fn generate(arguments: &[&str]) -> Ended {
    run(program("generate").args(["--device", "cpu"]).args(arguments), "")
}

/// The JSON lines of a run that succeeds, the last of which are the statistics.
fn json_lines(arguments: &[&str], input: &str) -> (Vec<Value>, Value) {
    let ended = run(program("generate").args(["--device", "cpu", "--json"]).args(arguments), input);
    assert_eq!(ended.status, 0, "{}", ended.err);
    let mut lines: Vec<Value> = ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let stats = lines.pop().unwrap();
    (lines, stats["stats"].clone())
}

fn ids(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

/// A file for one test, removed when it ends.
struct TestFile(PathBuf);

impl TestFile {
    fn new(name: &str, content: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("paged-kv-{}-{name}", std::process::id()));
        std::fs::write(&path, content).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn toy() -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("toy/toy.gguf")).unwrap()
}

#[test]
fn wrong_input_is_answered_by_one_line_and_exit_status_2() {
    let name_at = |bytes: &[u8]| bytes.windows(5).rposition(|part| part == b"llama").unwrap();
    let mut mamba = toy();
    let first = name_at(&mamba[..200]);
    mamba[first..first + 5].copy_from_slice(b"mamba");
    let mamba = TestFile::new("mamba.gguf", &mamba);
    let cut = TestFile::new("cut.gguf", &toy()[..1_000_000]);
    let header = TestFile::new("header.gguf", &toy()[..300]);
    let text = TestFile::new("text.gguf", b"a text");
    let nothing = TestFile::new("nothing.txt", b"\n\n");
    let latin1 = TestFile::new("latin1.txt", b"na\xefve\n");
    let quoted = TestFile::new("quoted.txt", b"whole\n\"broken\n");
    let long = "a".repeat(1024);
    #[rustfmt::skip]
    let cases: &[(&[&str], &str)] = &[
        // The command line itself.
        (&["--no-such"], "unexpected argument '--no-such' found"),
        (&["stray"], "unexpected argument 'stray' found"),
        (&["--prompt"], "a value is required for '--prompt <TEXT>' but none was supplied"),
        (&["--max-new", "0"], "invalid value '0' for '--max-new <N>': 0 is not in 1..=4294967295"),
        (&["--max-new", "many"], "invalid value 'many' for '--max-new <N>': invalid digit found in string"),
        (&["--samples", "0"], "invalid value '0' for '--samples <N>': 0 is not in 1..=1024"),
        (&["--temperature", "-1"], "invalid value '-1' for '--temperature <T>': a temperature is a number from 0 on"),
        (&["--temperature", "nan"], "invalid value 'nan' for '--temperature <T>': a temperature is a number from 0 on"),
        (&["--seed", "-3"], "invalid value '-3' for '--seed <S>': invalid digit found in string"),
        (&["--kv", "f8"], "invalid value 'f8' for '--kv <KV>' [possible values: f32, f16]"),
        (&["--blocks", "0"], "invalid value '0' for '--blocks <N>': 0 is not in 1..=4294967295"),
        (&["--block-size", "3"], "block size 3 is not a power of two from 1 to 4096"),
        (&["--block-size", "0"], "block size 0 is not a power of two from 1 to 4096"),
        (&["--admission", "all"],
            "invalid value 'all' for '--admission <ADMISSION>' [possible values: guaranteed, overcommitted]"),
        (&["--preempt", "never"],
            "invalid value 'never' for '--preempt <PREEMPT>' [possible values: recompute, swap, auto]"),
        (&["--preempt", "swap", "--host-blocks", "0"],
            "--preempt swap and auto need at least one block: --host-blocks is 0"),
        (&["--preempt", "auto", "--host-blocks", "0"],
            "--preempt swap and auto need at least one block: --host-blocks is 0"),
        (&["--host-blocks", "-1"], "unexpected argument '-1' found"),
        (&["--host-blocks", "4"], "--host-blocks has no meaning without --preempt swap or auto"),
        (&["--preempt", "swap", "--host-blocks", "4294967295"], "there is no memory for a host pool of "),
        (&["--prefix-cache", "maybe"], "invalid value 'maybe' for '--prefix-cache <PREFIX_CACHE>' [possible values: on, off]"),
        (&["--victim", "first"],
            "invalid value 'first' for '--victim <VICTIM>' [possible values: requester, lowest-priority, least-lost]"),
        (&["--priority", "high"],
            "invalid value 'high' for '--priority <PRIORITIES>' [possible values: interactive, normal, idle]"),
        (&["--prompt", "a", "--priority", "idle", "--priority", "normal"],
            "--priority was given 2 times for 1 prompts"),
        (&["--chat", "--priority", "idle", "--priority", "normal"], "--priority was given 2 times for 1 prompts"),
        (&["--max-running", "0"], "invalid value '0' for '--max-running <N>': 0 is not in 1..=4294967295"),
        (&["--step-tokens", "0"], "invalid value '0' for '--step-tokens <N>': 0 is not in 1..=65535"),
        (&["--prompt-ids", "1,x"], "invalid value '1,x' for '--prompt-ids <1,2,3>': invalid digit found in string"),
        (&["--top-logits", "2"], "--top-logits needs --json"),
        (&["--adapter", "any"], "--adapter has no meaning with --device cpu"),
        (&["--chat", "--prompt", "x"], "the argument '--chat' cannot be used with '--prompt <TEXT>'"),
        // The model.
        (&["--model", "/no/such/file"], "cannot read /no/such/file: "),
        (&["--model", "."], "cannot read .: is a directory"),
        (&["--model", text.path()], "FILE is not a GGUF file"),
        (&["--model", mamba.path()], "the model's architecture is \"mamba\", only \"llama\" and \"windowed-llama\" are supported"),
        (&["--model", cut.path()],
            "FILE is truncated: its header describes 1964816 bytes, the file has 1000000"),
        (&["--model", header.path()], "FILE is truncated: it ends within its header, after 300 bytes"),
        // The prompts.
        (&["--prompt", ""], "prompt 0: the sequence has no tokens"),
        (&["--prompt", &long], "prompt 0: 1025 tokens exceed the 1024 that a sequence may hold"),
        (&["--prompt", "a", "--max-new", "4294967295"],
            "prompt 0: 4294967296 tokens exceed the 1024 that a sequence may hold"),
        (&["--prompt-ids", "1,2", "--prompt-ids", "1,257"], "token 257 is not in the model's vocabulary of 257"),
        (&["--force-ids", "999"], "token 999 is not in the model's vocabulary of 257"),
        (&["--prompts", "/no/such/file"], "cannot read /no/such/file: "),
        (&["--prompts", nothing.path()], "FILE has no prompt"),
        (&["--prompts", latin1.path()], "cannot read FILE: stream did not contain valid UTF-8"),
        (&["--prompts", quoted.path()],
            "FILE: line 2 is no JSON string: EOF while parsing a string at line 1 column 7"),
        // The pool.
        (&["--blocks", "2", "--prompt", "a"], "prompt 0: the request needs 9 blocks and the pool has 2"),
        (&["--blocks", "8", "--prompt", "a", "--samples", "3", "--max-new", "45", "--admission", "guaranteed"],
            "prompt 0: the request needs 9 blocks and the pool has 8"),
        (&["--blocks", "4294967295"],
            "a pool of 68719476720 slots exceeds the 4294967294 that 32 bits can number"),
        (&["--samples", "9", "--max-running", "3"], "prompt 0: 9 samples were asked for, 1 to 3 are possible"),
    ];
    // A message that ends with a colon goes on with the operating system's words.
    let files = [&mamba, &cut, &header, &text, &nothing, &latin1, &quoted];
    for (arguments, message) in cases {
        let ended = generate(arguments);
        let err = files.iter().fold(ended.err, |err, file| err.replace(file.path(), "FILE"));
        assert!(err.starts_with(&format!("generate: {message}")), "{arguments:?}: {err}");
        assert_eq!(err.lines().count(), 1, "{arguments:?}: {err}");
        assert_eq!((ended.status, ended.out.as_str()), (2, ""), "{arguments:?}");
    }
}

#[test]
fn an_unknown_adapter_is_answered_with_those_there_are() {
    let ended = run(program("generate").args(["--adapter", "no such"]), "");
    assert_eq!((ended.status, ended.out.as_str()), (2, ""));
    assert!(
        ended.err.starts_with("generate: no adapter's name contains \"no such\"; found: "),
        "{}",
        ended.err
    );
    assert_eq!(ended.err.lines().count(), 1);
}

#[test]
fn every_sequence_is_one_json_line_and_the_statistics_are_the_last() {
    let arguments = ["--prompt-ids", "66,108", "--prompt-ids", "65", "--samples", "2", "--max-new", "3"];
    let ended = generate(&[&arguments[..], &["--json", "--top-logits", "2"]].concat());
    assert_eq!((ended.status, ended.err.as_str()), (0, "computing on the CPU\n"));
    let lines: Vec<&str> = ended.out.lines().collect();
    assert_eq!(lines.len(), 5);
    let mut seen = Vec::new();
    for line in &lines[..4] {
        let object: Value = serde_json::from_str(line).unwrap();
        assert_keys(
            line,
            &["prompt", "sample", "prompt_ids", "token_ids", "text", "finish", "preemptions", "top_logits"],
        );
        let prompt = object["prompt"].as_u64().unwrap();
        seen.push((prompt, object["sample"].as_u64().unwrap()));
        assert_eq!(ids(&object["prompt_ids"]), if prompt == 0 { vec![66, 108] } else { vec![65] });
        let tokens = ids(&object["token_ids"]);
        assert_eq!((tokens.len(), object["finish"].as_str()), (3, Some("max_tokens")));
        let bytes: Vec<u8> = tokens.iter().map(|&id| id as u8).collect();
        assert_eq!(object["text"].as_str().unwrap().as_bytes(), bytes);
        let logits = object["top_logits"].as_array().unwrap();
        assert_eq!(logits.len(), 3);
        for (position, token) in logits.iter().zip(tokens) {
            assert_eq!(position["top"].as_array().unwrap().len(), 2);
            assert_eq!(position["top"][0][0].as_u64(), Some(token), "greedy takes the largest logit");
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, [(0, 0), (0, 1), (1, 0), (1, 1)]);
    let stats: Value = serde_json::from_str(lines[4]).unwrap();
    for key in [
        "blocks_total",
        "blocks_peak",
        "blocks_shared_peak",
        "block_copies",
        "preemptions",
        "recomputed_tokens",
        "swaps_out",
        "swaps_in",
        "swap_bytes",
        "prefix_hit_tokens",
        "steps",
        "prompt_tokens",
        "generated_tokens",
        "tokens_per_s",
        "attention_share",
        "waste_tokens_peak",
    ] {
        assert!(stats["stats"][key].is_number(), "{key}");
    }
    let share = stats["stats"]["attention_share"].as_f64().unwrap();
    assert!(share > 0.0 && share < 1.0, "attention takes {share} of the time");
    let nothing_missed = serde_json::json!({"unseen": 0, "evicted": 0, "expired": 0});
    assert_eq!(stats["stats"]["prefix_miss_reasons"], nothing_missed);
    assert_eq!(stats["stats"]["adapter"], "CPU");
    assert_eq!(
        (&stats["stats"]["prompt_tokens"], &stats["stats"]["generated_tokens"]),
        (&3.into(), &12.into())
    );
}

/// The object's keys, in the order in which the line has them.
fn assert_keys(line: &str, keys: &[&str]) {
    let object: Value = serde_json::from_str(line).unwrap();
    assert_eq!(object.as_object().unwrap().len(), keys.len(), "{line}");
    let places: Vec<usize> = keys.iter().map(|key| line.find(&format!("\"{key}\":")).unwrap()).collect();
    assert!(places.is_sorted(), "{line}");
}

#[test]
fn the_toy_speaks_as_its_reference_does() {
    let golden: Value = serde_json::from_str(include_str!("../toy/golden.json")).unwrap();
    let prompts = golden["prompts"].as_array().unwrap();
    let mut arguments = vec!["--kv".to_owned(), "f32".to_owned(), "--max-new".to_owned(), "48".to_owned()];
    for prompt in prompts {
        arguments.extend(["--prompt".to_owned(), prompt["prompt"].as_str().unwrap().to_owned()]);
    }
    let (lines, _) = json_lines(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), "");
    assert_eq!(lines.len(), prompts.len());
    for line in lines {
        let prompt = &prompts[line["prompt"].as_u64().unwrap() as usize];
        assert_eq!(line["prompt_ids"], prompt["prompt_ids"]);
        let comparable = prompt["comparable_f32"].as_u64().unwrap() as usize;
        assert_eq!(ids(&line["token_ids"])[..comparable], ids(&prompt["token_ids_f32"])[..comparable]);
    }
}

#[test]
fn prompts_come_from_a_file_in_order() {
    let file = TestFile::new("prompts.txt", b"And God\r\n\n\"two\\nlines\"\n");
    let (mut lines, _) = json_lines(&["--prompt", "-first", "--prompts", file.path(), "--max-new", "1"], "");
    lines.sort_by_key(|line| line["prompt"].as_u64());
    let bytes = |text: &str| text.bytes().map(u64::from).collect::<Vec<_>>();
    let prompts: Vec<_> = lines.iter().map(|line| ids(&line["prompt_ids"])).collect();
    assert_eq!(prompts, ["-first", "And God", "two\nlines"].map(bytes));
}

#[test]
fn forced_tokens_are_taken_and_nothing_ends_them() {
    let (lines, _) = json_lines(&["--prompt", "a", "--force-ids", "98,256,99"], "");
    assert_eq!(ids(&lines[0]["token_ids"]), [98, 256, 99]);
    assert_eq!(lines[0]["finish"], "max_tokens");
}

#[test]
fn a_seed_repeats_its_choices_whatever_the_pool_does() {
    let arguments = ["--prompt", "In the", "--samples", "3", "--temperature", "0.9", "--max-new", "40"];
    let texts = |more: &[&str]| {
        let (mut lines, stats) = json_lines(&[&arguments[..], more].concat(), "");
        lines.sort_by_key(|line| line["sample"].as_u64());
        (lines.into_iter().map(|line| line["text"].clone()).collect::<Vec<_>>(), stats)
    };
    let (first, _) = texts(&["--seed", "7"]);
    // Three blocks hold one sequence of 46 tokens, nine hold three.
    let (again, stats) = texts(&["--seed", "7", "--blocks", "5", "--step-tokens", "5"]);
    assert_eq!(first, again);
    assert!(stats["preemptions"].as_u64() > Some(0), "{stats}");
    let (again, stats) = texts(&["--seed", "7", "--blocks", "9", "--admission", "guaranteed"]);
    assert_eq!(first, again);
    assert_eq!(stats["preemptions"].as_u64(), Some(0), "{stats}");
    assert_ne!(first, texts(&["--seed", "8"]).0);
}

#[test]
fn whoever_gives_way_and_however_the_tokens_are_the_same() {
    let arguments =
        ["--prompt", "In the", "--prompt", "And it came", "--prompt", "Blessed", "--max-new", "60"];
    let texts = |more: &[&str]| {
        let (mut lines, stats) = json_lines(&[&arguments[..], &["--block-size", "8"], more].concat(), "");
        lines.sort_by_key(|line| line["prompt"].as_u64());
        (lines.into_iter().map(|line| line["text"].clone()).collect::<Vec<_>>(), stats)
    };
    let number = |stats: &Value, key: &str| stats[key].as_u64().unwrap();
    let (expected, stats) = texts(&[]);
    assert_eq!((number(&stats, "preemptions"), number(&stats, "swap_bytes")), (0, 0));
    for victim in ["requester", "lowest-priority", "least-lost"] {
        for prefix_cache in ["off", "on"] {
            let more = ["--blocks", "14", "--victim", victim, "--prefix-cache", prefix_cache];
            let (found, stats) = texts(&[&more[..], &["--preempt", "swap", "--host-blocks", "32"]].concat());
            assert_eq!(found, expected, "{more:?}, swapped");
            assert!(number(&stats, "swaps_out") > 0 && number(&stats, "swaps_in") > 0, "{stats}");
            assert!(number(&stats, "swap_bytes") > 0 && number(&stats, "recomputed_tokens") == 0, "{stats}");
            let (found, stats) = texts(&[&more[..], &["--preempt", "auto", "--host-blocks", "3"]].concat());
            assert_eq!(found, expected, "{more:?}, either way");
            assert!(number(&stats, "preemptions") > 0, "{stats}");
            let (found, stats) = texts(&more);
            assert_eq!(found, expected, "{more:?}, recomputed");
            assert!(number(&stats, "recomputed_tokens") > 0 && number(&stats, "swaps_out") == 0, "{stats}");
        }
    }
}

#[test]
fn priorities_go_to_prompts_in_their_order_and_the_last_to_the_rest() {
    let prompts =
        ["--prompt", "a", "--prompt-ids", "98", "--prompt", "c", "--max-new", "12", "--max-running", "1"];
    let order = |more: &[&str]| {
        let (lines, _) = json_lines(&[&prompts[..], more].concat(), "");
        lines.iter().map(|line| line["prompt"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(order(&[]), [0, 1, 2]);
    assert_eq!(order(&["--priority", "interactive"]), [0, 1, 2]);
    assert_eq!(order(&["--priority", "idle", "--priority", "interactive"]), [1, 2, 0]);
    // `--prompt` texts come before `--prompt-ids`.
    assert_eq!(
        order(&["--priority", "idle", "--priority", "normal", "--priority", "interactive"]),
        [2, 1, 0]
    );
}

#[test]
fn eight_chats_hold_and_compute_their_system_prompt_once() {
    const BLOCK: u64 = 16;
    let book = "In the beginning God created the heaven and the earth. ".repeat(12);
    let system = &book[..600];
    let words = ["Arise", "Behold", "Come", "Depart", "Enter", "Follow", "Go", "Hearken"];
    let chats: Vec<String> = words.iter().map(|word| format!("{system}{word:<24}")).collect();
    // All eight are read before the first one ends.
    let mut arguments = vec!["--max-new", "8", "--step-tokens", "16384"];
    chats.iter().for_each(|chat| arguments.extend(["--prompt", chat]));
    let run = |cache: &str| {
        let (mut lines, stats) = json_lines(&[&arguments[..], &["--prefix-cache", cache]].concat(), "");
        lines.sort_by_key(|line| line["prompt"].as_u64());
        (lines.into_iter().map(|line| line["token_ids"].clone()).collect::<Vec<_>>(), stats)
    };
    let (expected, apart) = run("off");
    let (found, together) = run("on");
    assert_eq!(found, expected);
    let number = |stats: &Value, key: &str| stats[key].as_u64().unwrap();
    assert_eq!((number(&apart, "prompt_tokens"), number(&apart, "prefix_hit_tokens")), (8 * 624, 0));
    // From the second chat on, only what follows the system prompt is computed: also the rows of the block in which it
    // ends are found.
    assert_eq!(number(&together, "prompt_tokens"), 600 + 8 * 24);
    assert_eq!(number(&together, "prefix_hit_tokens"), 7 * 600);
    let whole = (624 + 8 - 1u64).div_ceil(BLOCK);
    assert_eq!(number(&apart, "blocks_peak"), 8 * whole);
    assert_eq!(number(&together, "blocks_peak"), 600 / BLOCK + 8 * (whole - 600 / BLOCK));
    // The block in which it ends is shared until each chat has a copy of its own.
    assert_eq!(number(&together, "blocks_shared_peak"), 600 / BLOCK + 1);
    assert_eq!(together["prefix_miss_reasons"], serde_json::json!({"unseen": 8, "evicted": 0, "expired": 0}));
}

#[test]
fn a_conversation_keeps_its_sequence_from_turn_to_turn() {
    let (lines, stats) = json_lines(&["--chat", "--max-new", "6"], "Who art thou?\n\nWhence comest thou?\n");
    let turns: Vec<_> = lines.iter().map(|line| line["prompt"].as_u64().unwrap()).collect();
    assert_eq!(turns, [0, 1]);
    let new: u64 = lines.iter().map(|line| ids(&line["prompt_ids"]).len() as u64).sum();
    // The second turn computes its own words and, at most, the last token of the answer before them.
    assert!(stats["prompt_tokens"].as_u64().unwrap() <= new + 1, "{stats}");
    assert_eq!(stats["generated_tokens"], 12);
}

#[test]
fn text_streams_under_a_heading_for_each_sample_and_statistics_go_to_standard_error() {
    let one = generate(&["--prompt", "Blessed are", "--max-new", "4"]);
    assert_eq!((one.out.as_str(), one.err.as_str()), ("Blessed are the\n", "computing on the CPU\n"));
    // `Blessed are` again, as ids.
    let ids = "66,108,101,115,115,101,100,32,97,114,101";
    let two = generate(&["--prompt-ids", ids, "--max-new", "4", "--samples", "2", "--stats"]);
    let sample = |index| format!("--- prompt 0, sample {index}\nBlessed are the\n");
    assert_eq!(two.out, sample(0) + &sample(1));
    assert!(two.err.contains("11 prompt tokens and 8 generated in 4 steps"), "{}", two.err);
    assert!(
        two.err.contains("2 of 2 blocks of 16 tokens used at most, 1 shared at most, 1 copied on write"),
        "{}",
        two.err
    );
}

#[test]
fn frames_are_drawn_while_tokens_are_decoded_on_lavapipe() {
    share_device("lavapipe", "vulkan", "llvmpipe");
}

#[test]
fn frames_are_drawn_while_tokens_are_decoded_on_swiftshader() {
    share_device("swiftshader", "vulkan", "swiftshader");
}

/// Runs `share_device` on one adapter to its end. That it never waits for the device is in its text: it polls, and no
/// call in it blocks once the device is open.
fn share_device(device: &str, backend: &str, adapter: &str) {
    let there = example_engine::gpu::Adapters::find(Some(adapter)).labels();
    if !there.iter().any(|label| label.ends_with(&format!("on {backend}"))) {
        let required = std::env::var("PAGED_KV_REQUIRE_ADAPTERS").unwrap_or_default();
        assert!(!required.contains(device), "the adapter {device} is missing, and required");
        println!("share_device on {device}: NOT RUN, there is no such adapter");
        return;
    }
    let text = include_str!("../share_device.rs");
    let (_, frame_loop) = text.split_once("while finished < 2").unwrap();
    assert!(frame_loop.contains("PollType::Poll"));
    // This is something that the scheduler says.
    let frame_loop = frame_loop.replace("Schedule::Waiting", "");
    for waiting in ["Wait", "wait_indefinitely", "block_on", "recv", "sleep"] {
        assert!(!frame_loop.contains(waiting), "share_device waits: {waiting}");
    }
    let environment = [("WGPU_BACKEND", backend), ("WGPU_ADAPTER_NAME", adapter)];
    let ended = run(program("share_device").envs(environment), "");
    assert_eq!(ended.status, 0, "{}", ended.err);
    // `frame 7: Token { sequence: sequence 1.0, token: 63 }`, and at last `42 frames, 20 steps, …`.
    let frames_of = |event: &str| -> Vec<u32> {
        let lines = ended.out.lines().filter(|line| line.contains(event));
        lines.map(|line| line["frame ".len()..line.find(':').unwrap()].parse().unwrap()).collect()
    };
    let tokens = frames_of(": Token {");
    assert_eq!((tokens.len(), frames_of(": Finished {").len()), (20 + 12, 2), "{}", ended.out);
    let last = ended.out.lines().last().unwrap();
    let numbers: Vec<u32> = last.split([' ', ',']).filter_map(|word| word.parse().ok()).take(2).collect();
    let &[frames, steps] = numbers.as_slice() else { panic!("{last}") };
    // A step's tokens arrive in a later frame than the one that submits it, and that frame submits the next step.
    let mut commits = tokens;
    commits.dedup();
    assert!(steps >= 20 && frames > steps, "{last}");
    assert!(commits[0] > 1 && commits.is_sorted() && commits.last() == Some(&frames), "{commits:?}, {last}");
    assert!(last.contains("0 held (0 shared), 0 in transfer"), "{last}");
}

#[test]
fn parallel_samples_hold_their_prompt_once() {
    let ended = run(&mut program("parallel_sampling"), "");
    assert_eq!(ended.status, 0, "{}", ended.err);
    let last = ended.out.lines().last().unwrap();
    let [answers, computed, apart, held, block_size, held_apart, copied] = numbers(last)[..] else {
        panic!("{last}")
    };
    // 40 tokens each, the last of which is not computed any more.
    let prompt = computed - answers * 39;
    let full = prompt / block_size;
    assert_eq!(apart, answers * (prompt + 39));
    assert_eq!(held_apart, answers * (prompt + 39).div_ceil(block_size));
    assert_eq!(held, full + answers * ((prompt + 39).div_ceil(block_size) - full));
    assert_eq!(copied, if prompt % block_size == 0 { 0 } else { answers - 1 });
    assert_eq!(ended.out.lines().filter(|line| line.starts_with("  …")).count() as u64, answers);
}

#[test]
fn beams_share_the_blocks_of_what_they_have_in_common() {
    let ended = run(&mut program("bring_your_own_scheduler"), "");
    assert_eq!(ended.status, 0, "{}", ended.err);
    let lines: Vec<&str> = ended.out.lines().collect();
    let (texts, last) = (&lines[1..lines.len() - 1], lines[lines.len() - 1]);
    let [width, _, held, _, shared, apart, copied] = numbers(last)[..] else { panic!("{last}") };
    assert_eq!(texts.len() as u64, width);
    let scores: Vec<f64> =
        texts.iter().map(|text| text.split_whitespace().next().unwrap().parse().unwrap()).collect();
    assert!(scores.is_sorted_by(|one, other| one >= other), "{scores:?}");
    let different: std::collections::HashSet<&str> = texts.iter().map(|text| &text[9..]).collect();
    assert_eq!(different.len() as u64, width, "{texts:?}");
    assert!(held < apart && shared > 0 && shared < held && copied > 0, "{last}");
}

/// The whole numbers of a text, in their order.
fn numbers(text: &str) -> Vec<u64> {
    text.split(|letter: char| !letter.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}
