//! The examples of README.md and docs/library.md are compiled and their outputs are real.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use xtrain::prelude::*;
use xtrain::report::metrics::format::grouped;
use xtrain::step::{engine, programs};
use xtrain::train::corpus::Corpus;
use xtrain::train::paths::Sources;
use xtrain::train::run;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

fn read(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The blocks of a page in `language`.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let (text, fence) = (read(page), format!("\n```{language}\n"));
    text.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap_or_default().to_owned()).collect()
}

#[test]
fn the_examples_of_the_library_are_those_that_are_compiled() {
    let compiled = ["train", "recompute"].map(|name| {
        let file = read(&format!("crates/xtrain/examples/{name}.rs"));
        let code: Vec<&str> =
            file.lines().skip_while(|line| line.starts_with("//!") || line.is_empty()).collect();
        code.join("\n") + "\n"
    });
    assert_eq!(blocks("docs/library.md", "rust"), compiled);
}

#[test]
fn a_program_that_ends_with_an_error_prints_what_the_command_line_prints() {
    let error = Config::load("no/such.toml".as_ref(), &["optimizer.lr=fast"]).expect_err("there is no file");
    let printed = format!("{:?}", Box::<dyn std::error::Error>::from(error.clone()));
    assert_eq!(printed, error.to_string());
    assert!(printed.starts_with("no/such.toml: cannot be read: "), "{printed}");
}

#[test]
fn the_example_of_the_library_prints_what_is_shown() {
    let file = path("examples/llama3_8b.toml");
    let parsed = Config::load(&file, &["train.micro_batch_size=2"]).expect("a run file");
    let mut spec = run::plan(&parsed).expect("a plan").spec;
    let mut printed = String::new();
    for recompute in [Recompute::None, Recompute::Norms, Recompute::Block] {
        spec.recompute = recompute;
        let program = programs::training(&spec).expect("a program");
        let plan = engine::Target::Cpu.plan(&program);
        printed +=
            &format!("{recompute:?}: {} ops, {} GiB\n", program.instances.len(), plan.total_bytes() >> 30);
    }
    assert!(blocks("docs/library.md", "text").contains(&printed), "docs/library.md lacks\n{printed}");
}

#[test]
fn the_quickstart_has_the_tokens_and_documents_of_the_snapshot() {
    let (snapshot, cache) = ("examples/data/snapshot.txt.gz", tempfile::tempdir().expect("a folder"));
    let text =
        |key, path: &Path| Override::Text { option: "the test", key, text: path.display().to_string() };
    let places = [text("data.train", &path(snapshot)), text("data.cache_dir", cache.path())];
    let run = Config::load(&path("examples/quickstart.toml"), &places).expect("a run file");
    let mut made = None;
    let mut notice = |notice| {
        if let Notice::Tokenizing { progress, .. } = notice {
            made = Some(progress);
        }
        ControlFlow::Continue(())
    };
    Corpus::open(&Sources::resolve(&run.config), None, &mut notice).expect("opens");
    let made = made.expect("it was tokenized");
    let (tokens, documents) = (grouped(made.tokens), grouped(made.documents));
    let line = format!("\n{snapshot}: {tokens} tokens in {documents} documents, ");
    assert!(blocks("README.md", "console")[0].contains(&line), "the README lacks {line}");
}

/// Lines of code in a file: without comments, empty lines, and tests at its end.
fn lines_of_code(text: &str) -> usize {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    code.lines().map(str::trim_start).filter(|line| !line.is_empty() && !line.starts_with("//")).count()
}

/// Lines of code of the files with this extension below a folder, without those of tests and samples.
fn lines_below(folder: &Path, extension: &str) -> usize {
    let is_test = |path: &Path| {
        path.file_stem().is_some_and(|stem| stem == "tests" || stem == "samples" || stem == "check")
    };
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let paths = entries.map(|entry| entry.expect("an entry").path()).filter(|path| !is_test(path));
    let lines = paths.map(|path| match path.extension() {
        _ if path.is_dir() => lines_below(&path, extension),
        Some(found) if found == extension => lines_of_code(&fs::read_to_string(&path).expect("text")),
        _ => 0,
    });
    lines.sum()
}

#[test]
fn the_readme_says_how_many_lines_a_step_and_an_op_have() {
    let step: usize = ["tensor", "program", "model", "step"]
        .map(|name| lines_below(&path(&format!("crates/{name}/src")), "rs"))
        .iter()
        .sum();
    let ops = path("crates/ops/src");
    let folders = fs::read_dir(&ops).expect("ops").map(|entry| entry.expect("an entry").path());
    let folders: Vec<PathBuf> = folders.filter(|path| path.join("cpu.rs").is_file()).collect();
    let median = |extension: &str| {
        let mut lines: Vec<usize> = folders.iter().map(|folder| lines_below(folder, extension)).collect();
        lines.sort_unstable();
        lines[lines.len() / 2]
    };
    let (rust, cuda) = (median("rs"), median("cu"));
    let said = format!(
        "about {} lines of Rust for a training step (crates `tensor`, `program`, `model` and `step`)",
        grouped((step as u64 + 250) / 500 * 500)
    );
    let of_ops = format!(
        "each op is a folder, half of them of fewer than {} lines of Rust and {} of CUDA",
        rust.div_ceil(50) * 50,
        cuda.div_ceil(50) * 50
    );
    let readme = read("README.md").replace("\n  ", " ");
    for text in [said, of_ops] {
        assert!(readme.contains(&text), "the README lacks {text:?}: {step} lines, medians {rust} and {cuda}");
    }
}
