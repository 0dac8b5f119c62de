//! Every suggestion of the tables is one that the command line takes.

mod options;

use super::elsewhere::{COMMANDS, Here, OPTIONS, Row};
use super::{has, line, positionals};
use crate::cli::Cli;
use clap::Command;
use clap::error::ErrorKind;
use std::collections::HashSet;
use std::ffi::OsString;
use std::path::Path;
use xtrain_config::{Config, is_key};

/// All commands, those below others too.
fn commands() -> Vec<Command> {
    let mut found = vec![Cli::whole()];
    let mut at = 0;
    while let Some(below) =
        found.get(at).map(|command| command.get_subcommands().cloned().collect::<Vec<_>>())
    {
        found.extend(below);
        at += 1;
    }
    found
}

/// Asserts that `xtrain` takes these arguments.
fn parses(arguments: &str) {
    let args = ["xtrain"].into_iter().chain(arguments.split_whitespace());
    match Cli::whole().try_get_matches_from(args) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::DisplayVersion => {}
        Err(error) => panic!("{arguments}: {error}"),
    }
}

/// A small run file.
const RUN: &[u8] =
    b"[model]\ndim = 64\nlayers = 2\nheads = 4\n[data]\ntrain = 'a.txt'\n[train]\nsteps = 1000000\n";

/// Asserts that a run file takes this `section.key=value`, or that the key exists.
fn sets(key: &str) {
    match key.split_once('=') {
        Some(_) => assert!(Config::parse(Path::new("run.toml"), RUN, &[key]).is_ok(), "{key}"),
        None => assert!(is_key(key), "{key}"),
    }
}

#[test]
fn every_row_of_the_tables_names_something_that_exists() {
    let commands = commands();
    for row in COMMANDS.iter().chain(OPTIONS) {
        assert!(!row.here.is_empty(), "{:?}", row.names);
        for here in row.here {
            match *here {
                Here::Command(command) => parses(command),
                Here::Option(option) => {
                    let (name, value) = option.split_once(' ').unwrap_or((option, ""));
                    let owners: Vec<&Command> =
                        commands.iter().filter(|command| has(command, name)).collect();
                    assert!(!owners.is_empty(), "{option}");
                    let arg = owners[0].get_arguments().find(|arg| arg.get_long() == name.strip_prefix("--"));
                    assert!(
                        value.is_empty() || arg.is_some_and(|arg| arg.get_action().takes_values()),
                        "{option}"
                    );
                }
                Here::Argument(name) => {
                    let is_taken = |command: &Command| positionals(command).any(|taken| taken == name);
                    assert!(commands.iter().any(is_taken), "{name}");
                }
                Here::Key(key) => sets(key),
                Here::Nothing(why) => assert!(why.len() > 10, "{why}"),
            }
        }
    }
}

#[test]
fn a_name_is_in_a_table_once_and_is_none_of_ours() {
    let check = |table: &[Row], ours: &dyn Fn(&str) -> bool| {
        let mut seen = HashSet::new();
        for name in table.iter().flat_map(|row| row.names) {
            assert!(seen.insert(name), "{name} stands twice");
            assert!(!name.contains(['-', '_']) && name.to_lowercase() == **name, "{name} is not plain");
            assert!(!ours(name), "{name}");
        }
    };
    check(COMMANDS, &|name| Cli::whole().find_subcommand(name).is_some());
    check(OPTIONS, &|_| false);
}

/// The line for these arguments; `None` if they are no mistake.
fn said(args: &[&str]) -> Option<String> {
    let mut command = Cli::whole();
    let args: Vec<OsString> = args.iter().map(OsString::from).collect();
    let whole = ["xtrain".into()].into_iter().chain(args.iter().cloned());
    let error = command.try_get_matches_from_mut(whole).err()?;
    Some(line(&error, &command, &args))
}

#[test]
fn a_mistake_is_answered_with_what_to_type() {
    let mut wrong = Vec::new();
    for (args, words) in [
        (&["train", "run.toml", "lr=1e-3"][..], "--set optimizer.lr=1e-3"),
        (&["train", "run.toml", "optimizer.lr=1e-3"], "--set optimizer.lr=1e-3"),
        (&["train", "run.toml", "--set", "optimizer.lr", "1e-3"], "write --set optimizer.lr=1e-3"),
        (&["train", "run.toml", "--lr", "1e-3"], "--set optimizer.lr=1e-3"),
        (&["train", "run.toml", "-lr", "1e-3"], "--set optimizer.lr=1e-3"),
        (&["train", "run.toml", "--batch-size=4"], "--set train.batch_size=4"),
        (
            &["train", "run.toml", "--tokens", "1M"],
            "--set train.tokens=1M --set train.steps= --set train.epochs= or --set eval.tokens=1M",
        ),
        (&["train", "run.toml", "--num-gpus", "2"], "write --gpus 2"),
        (&["train", "run.toml", "--resum"], "did you mean --resume?"),
        (&["train", "run.toml", "--verb"], "did you mean --verbose?"),
        (&["train", "run.toml", "--bf16"], "write --set precision.recipe=bf16"),
        (&["train", "--config", "run.toml"], "write it without an option: xtrain train run.toml"),
        (&["train", "--cpu", "run.toml"], "write --set train.device=cpu"),
        (
            &["train", "run.toml", "other.toml"],
            "\"other.toml\" is one argument too many; xtrain train takes FILE",
        ),
        (&["plan", "run.toml", "-q"], "there is no option -q of xtrain plan; xtrain train has it"),
        (&["generate", "out", "the river"], "--prompt 'the river'"),
        (
            &["generate", "out", "-p", "Once", "upon", "a", "time", "-n", "9"],
            "in quotes: --prompt 'Once upon a time'",
        ),
        (&["generate", "out", "-p", "x", "--temp", "0"], "write --temperature 0"),
        (&["generate", "out", "-p", "x", "--max-new-tokens=20"], "write --max-tokens 20"),
        (&["generate", "out", "-p", "x", "--greedy"], "write --temperature 0"),
        (&["generate", "--model", "out", "-p", "x"], "write it without an option: xtrain generate out"),
        (
            &["generate", "out"],
            "needs --prompt PROMPT or --tokens ID,ID,... or --chats FILE, as in: xtrain generate",
        ),
        (&["generate", "out", "--prompt", "-x"], "after =: --prompt=-x"),
        (&["eval", "out", "a.txt"], "--data a.txt"),
        (
            &["eval", "out", "--seq-len", "8"],
            "with these options needs --data DATA, as in: xtrain eval models/Qwen3-0.6B --data wiki.jsonl",
        ),
        (&["plan", "run.toml", "--link", "5GB/s"], "needs --gpus N, as in: xtrain plan run.toml --gpus 8"),
        (&["finetune", "run.toml"], "use: xtrain init MODEL TEXT, then xtrain train run.toml"),
        (&["serve", "out"], "inference engines serve its exports; use: xtrain export RUN --out FOLDER"),
        (&["trane", "run.toml"], "did you mean: xtrain train run.toml"),
        (&["gen", "out", "-p", "the sea"], "did you mean: xtrain generate out -p 'the sea'"),
        (&["bench", "stp", "run.toml"], "did you mean: xtrain bench step run.toml"),
        (&["bench", "everything"], "the commands are step, op, gemm, fp8, attention and comm"),
        (&["run.toml"], "to train from a run file: xtrain train run.toml"),
        (&["-q", "train", "run.toml"], "put options after it: xtrain train run.toml -q"),
        (&["tokenize", "a", "--out", "t", "--bytes", "--chars"], "--bytes excludes --chars"),
        (&["tokenize", "a", "--out", "t", "--out", "u"], "--out is given twice"),
        (
            &["train", "run.toml", "--threads", "many"],
            "--threads is \"many\"; write a whole number from 0 to 1024",
        ),
        (&["generate", "out", "-p", "x", "-t", "warm"], "--temperature is \"warm\"; write a number"),
        (&["eval", "out", "--precision", "fp9"], "it must be fp32, bf16, "),
        (&["eval", "out", "--device", "gpu"], "--device is \"gpu\"; did you mean 'cuda'?"),
        (&["train"], "xtrain train needs FILE, as in: xtrain train examples/quickstart.toml"),
        (&["completions", "csh"], "it must be bash, elvish, fish, powershell or zsh"),
    ] {
        let said = said(args).expect("a mistake");
        if !said.contains(words) || said.contains('\n') {
            wrong.push(format!("{args:?}: {said}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
