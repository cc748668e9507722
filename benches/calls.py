#!/usr/bin/env python3
"""How far a reader has to follow a call: `benches/calls.py [ROOT] [--trace]`.

Copies `src` to a temporary folder, has every function of `src/schedule` and `src/cache` say that it was entered, and runs
a small program over that library. Three calls are counted: the first `schedule` of one prompt, the `commit` of its first
token, and the `schedule` of a later decode step. For each it prints how many functions were entered, in how many files,
how often the file changed along the way, and how often that led back to a file already left. What a closure, a macro or
a derived implementation does counts where it is written; debug assertions do not count. `--trace` prints the functions, too.

Needs rustc and no network: without its device part the library has no dependencies.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

FOLDERS = ("schedule", "cache")

TRACE = """
pub mod trace {
    use std::cell::RefCell;
    thread_local! { static ENTERED: RefCell<Vec<(&'static str, &'static str)>> = const { RefCell::new(Vec::new()) }; }
    pub fn enter(file: &'static str, function: &'static str) {
        ENTERED.with(|entered| entered.borrow_mut().push((file, function)));
    }
    pub fn take() -> Vec<(&'static str, &'static str)> {
        ENTERED.with(RefCell::take)
    }
}
"""

PROGRAM = """
use paged_kv::{trace, CacheConfig, KvType, ModelShape, Request, RowResult, Schedule, Scheduler, SchedulerConfig, StepPlan};

fn report(call: &str) {
    println!("call {call}");
    trace::take().iter().for_each(|(file, function)| println!("{file} {function}"));
}

fn schedule(scheduler: &mut Scheduler) -> StepPlan {
    match scheduler.schedule() {
        Schedule::Step(plan) => plan,
        _ => panic!("a step"),
    }
}

fn main() {
    let shape = ModelShape::new(2, 4, 2, 32);
    let cache = CacheConfig::for_blocks(64, &shape, KvType::F16).unwrap();
    let mut scheduler = Scheduler::new(SchedulerConfig::default(), cache).unwrap();
    scheduler.add(Request::new(PROMPT).max_new_tokens(32)).unwrap();
    trace::take();
    let plan = schedule(&mut scheduler);
    report("schedule, first step");
    scheduler.commit(plan, &[RowResult::Token(100)]).unwrap();
    report("commit, first token");
    let plan = schedule(&mut scheduler);
    scheduler.commit(plan, &[RowResult::Token(101)]).unwrap();
    trace::take();
    let plan = schedule(&mut scheduler);
    report("schedule, decode step");
    scheduler.commit(plan, &[RowResult::Token(102)]).unwrap();
    report("commit, decode step");
}
"""


def code_only(text):
    """The text with comments and literals blanked, so that braces and words are the language's."""
    pattern = r'//[^\n]*|/\*.*?\*/|b?"(?:\\.|[^"\\])*"|' r"'(?:\\.[^']*|[^'\\])'"
    return re.sub(pattern, lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.S)


def instrumented(text, file):
    """The text with a call of `enter` at the beginning of each function's body."""
    code, parts, at = code_only(text), [], 0
    for function in re.finditer(r"\bfn\s+(\w+)", code):
        depth = 0
        for place in range(function.end(), len(code)):
            letter = code[place]
            depth += (letter in "([") - (letter in ")]")
            if depth == 0 and letter in "{;":
                break
        if code[place] == "{":
            parts += [text[at : place + 1], f' crate::trace::enter("{file}", "{function[1]}");']
            at = place + 1
    return "".join(parts) + text[at:]


def build(root, folder):
    source = folder / "src"
    shutil.copytree(root / "src", source)
    for name in FOLDERS:
        for path in (source / name).rglob("*.rs"):
            path.write_text(instrumented(path.read_text(), path.relative_to(source)))
    with (source / "lib.rs").open("a") as library:
        library.write(TRACE)
    (folder / "main.rs").write_text(PROGRAM.replace("PROMPT", str(list(range(1, 21)))))
    rustc = ["rustc", "--edition", "2024", "--cap-lints", "allow", "-C", "debug-assertions=off", "--out-dir", str(folder)]
    subprocess.run([*rustc, "--crate-type", "rlib", "--crate-name", "paged_kv", str(source / "lib.rs")], check=True)
    library = f"paged_kv={folder / 'libpaged_kv.rlib'}"
    subprocess.run([*rustc, "--extern", library, str(folder / "main.rs")], check=True)
    return folder / "main"


def counts(functions):
    files = [file for file, _ in functions]
    changes = sum(1 for place, file in enumerate(files) if place == 0 or files[place - 1] != file)
    return len(files), len(set(files)), changes, changes - len(set(files))


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--trace"]
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).parent.parent)
    with tempfile.TemporaryDirectory() as folder:
        program = build(root.resolve(), pathlib.Path(folder))
        output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    print(f"{'':24}{'calls':>8}{'files':>8}{'changes of file':>18}{'returns':>10}")
    for call in output.split("call ")[1:]:
        name, *lines = call.splitlines()
        functions = [tuple(line.split(" ")) for line in lines]
        calls, files, changes, returns = counts(functions)
        print(f"{name:24}{calls:8}{files:8}{changes:18}{returns:10}")
        if "--trace" in sys.argv:
            print("".join(f"    {file}: {function}\n" for file, function in functions), end="")


if __name__ == "__main__":
    main()
