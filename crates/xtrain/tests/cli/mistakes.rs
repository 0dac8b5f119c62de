//! Mistakes on the command line: a line each, and what it says to type is something that works.

use crate::place::{Place, finish};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use xtrain::config::is_key;

/// The words of a command, with single quotes around some.
fn words(command: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for (at, part) in command.split('\'').enumerate() {
        match at % 2 {
            1 => match words.last_mut().filter(|_| !command.contains(&format!(" '{part}"))) {
                Some(begun) => begun.push_str(part),
                None => words.push(part.to_owned()),
            },
            _ => words.extend(part.split_whitespace().map(str::to_owned)),
        }
    }
    words
}

/// The commands that a line says to type: those after a colon, up to a semicolon.
fn commands(line: &str) -> Vec<String> {
    let mut found = Vec::new();
    for after in line.trim_start_matches("error: ").split(": xtrain ").skip(1) {
        let all = after.split(';').next().unwrap_or_default();
        found.extend(all.split(", then xtrain ").map(str::to_owned));
    }
    found
}

/// Checks what a line tells the user to type: commands parse, keys and options exist.
fn check(place: &Place, verb: &str, line: &str) {
    for command in commands(line) {
        let mut run = place.command("");
        run.args(words(&command)).arg("--help");
        let ran = finish(run, &command);
        assert_eq!(ran.code(), Some(0), "{line}\n{command}: {}", ran.stderr);
    }
    for set in line.split("--set ").skip(1).filter(|set| !set.starts_with("section.")) {
        let key = set.split('=').next().unwrap_or_default();
        assert!(is_key(key), "{line}: {key}");
    }
    let help = place.run(&format!("{verb} --help")).stdout;
    for advice in ["did you mean --", "write --"] {
        if let Some((_, option)) = line.split_once(advice) {
            let option = option.split([' ', '?']).next().unwrap_or_default();
            assert!(help.contains(&format!("--{option}")), "{line}");
        }
    }
}

#[test]
fn every_mistake_is_a_line_and_what_it_says_to_type_works() {
    let place = Place::new();
    for mistake in [
        "train run.toml lr=1e-3",
        "train run.toml train.steps=3 --quiet",
        "train run.toml max_iters=3",
        "train run.toml nonsense=3",
        "train run.toml gpus=2",
        "train run.toml --lr 1e-3",
        "train run.toml --learning-rate=1e-3",
        "train run.toml --gradient-checkpointing",
        "train run.toml --batch-size 4",
        "train run.toml --num-gpus 2",
        "train run.toml --nproc-per-node=8",
        "train run.toml --lora-r 8",
        "train run.toml --compile",
        "train run.toml --fp16",
        "train run.toml --cpu",
        "train run.toml --epoch 3",
        "train run.toml --output-dir out",
        "train run.toml --wandb",
        "train run.toml --resum",
        "train run.toml --colour red",
        "train run.toml -x",
        "train run.toml --model Qwen/Qwen3-0.6B",
        "train --config run.toml",
        "train run.toml a.txt",
        "train",
        "train run.toml --threads 5000",
        "plan run.toml -q",
        "plan run.toml --resume",
        "plan run.toml --vram 80GiB",
        "plan run.toml --memory 40",
        "plan run.toml --dump-after fused",
        "generate out the",
        "generate out",
        "generate --model out --prompt the",
        "generate out --prompt the --temp 0",
        "generate out --prompt the --max-new-tokens 3",
        "generate out --prompt the --do-sample",
        "generate out --prompt the --lr 3",
        "generate out --prompt -x",
        "generate out --prompt the --fp8",
        "eval out a.txt",
        "eval out --data a.txt --ctx 16",
        "eval out --seq-len 8",
        "eval out --precision fp9",
        "export out",
        "export out --out hf --quantization fp8",
        "export out --out hf --dtype float32",
        "tokenize a.txt --out t --bytes --chars",
        "tokenize a.txt --bytes",
        "tokenize a.txt --out t --vocab-size 300",
        "tokenize --input a.txt --out t --bytes",
        "tokenize a.txt --out t --bytes --workers 2",
        "compare",
        "bench stp run.toml",
        "bench everything",
        "bench fp8 --shape 16,16",
        "completions csh",
        "trane run.toml",
        "tran run.toml",
        "run.toml",
        "cache run.toml",
        "-q train run.toml",
        "--lr 3",
        "finetune run.toml",
        "fine-tune run.toml",
        "pretrain run.toml",
        "sample out",
        "test out",
        "serve out",
        "convert out",
        "quantize out",
        "prepare a.txt",
        "estimate run.toml",
        "tensorboard out",
        "download Qwen/Qwen3-0.6B",
        "dpo run.toml",
        "torchrun run.toml",
        "wibble",
    ] {
        let line = place.run(mistake).refuses(&[]);
        assert!(line.len() < 400, "{mistake}: {line}");
        let verb =
            mistake.split(' ').take_while(|word| !word.contains(['.', '-'])).next().unwrap_or_default();
        check(&place, verb, &line);
    }
    assert_eq!(place.names("."), ["a.txt", "b.txt", "continued.toml", "run.toml"]);
}

#[test]
fn wrong_keys_and_names_get_no_advice_that_fails() {
    let place = Place::new();
    place.train("runs/mix", "--set train.steps=2");
    let line = place
        .run("train run.toml --set optimizer.name=muon")
        .refuses(&["AdamW is the default", "optimizer.kind"]);
    assert!(!line.contains("family"), "{line}");
    place
        .run("train run.toml --set train.gpus=2")
        .refuses(&["the number of processes is given to the command"]);
    for command in ["generate runs/nothing --prompt the", "eval runs/nothing", "export runs/nothing --out hf"]
    {
        let line = place.run(command).refuses(&["no folder runs/nothing; check the path; runs has mix"]);
        assert!(!line.contains("download"), "{line}");
    }
    let line = place.run("plan run.toml --set data.tokenizer=runs/tok").refuses(&["no tokenizer runs/tok"]);
    assert!(!line.contains("download"), "{line}");
}

#[test]
fn what_is_no_run_file_is_named_with_what_it_is_for() {
    let place = Place::new();
    place.train("runs/mix", "--set train.steps=4");
    place.write("texts/a.txt", &place.read("a.txt"));
    place.write("configs/one.toml", &place.read("run.toml"));
    place.write("settings.yaml", b"model: {}");
    place.write("empty/x", b"");
    for (path, words) in [
        (
            "runs/mix",
            &["is a run, not a run file", "train runs/mix/config.toml --out runs/mix --resume;"][..],
        ),
        ("runs/mix/checkpoints/step-4", &["is a run, not a run file", "runs/mix/config.toml --out FOLDER"]),
        ("runs/mix/hf", &["is a model, not a run file", ": xtrain init runs/mix/hf TEXT"]),
        ("texts", &["is a folder of texts, not a run file", ": xtrain init texts"]),
        ("a.txt", &["is a text, not a run file", ": xtrain init a.txt"]),
        ("configs", &["name a run file in it: one.toml"]),
        ("settings.yaml", &["TOML", "xtrain init"]),
        ("empty", &["is a folder; name a run file"]),
        ("run", &["does not exist; did you mean run.toml?"]),
        ("configs/ones.toml", &["does not exist; did you mean configs/one.toml?"]),
        ("nowhere.toml", &["cannot be read: No such file or directory"]),
    ] {
        let line = place.run(&format!("train {path}")).refuses(words);
        check(&place, "train", &line);
    }
    // Those about a run work as they stand.
    place.run("train runs/mix/config.toml --out runs/mix --resume --set train.steps=6").succeeds();
    place.run("train runs/mix/config.toml --out runs/again --set train.steps=2").succeeds();
    place.run("plan runs/mix").succeeds();
    place.run("plan texts").refuses(&["xtrain init texts"]);
    place.run("bench step a.txt").refuses(&["xtrain init a.txt"]);
}

#[test]
fn a_path_that_no_run_file_can_hold_is_refused_in_a_line() {
    let place = Place::new();
    for (option, value) in [("--out", &b"r\xFFn"[..]), ("--set", b"data.train=\xFF.txt")] {
        let mut command = place.command("train run.toml");
        command.arg(option).arg(OsStr::from_bytes(value));
        finish(command, option).refuses(&[option, "is not UTF-8"]);
    }
    // Where no run file is concerned, any name will do.
    let mut command = place.command("tokenize a.txt --bytes --out");
    command.arg(OsStr::from_bytes(b"t\xFF"));
    finish(command, "tokenize").succeeds();
}

#[test]
#[cfg(target_os = "linux")]
fn help_that_cannot_be_written_is_an_error() {
    let place = Place::new();
    for arguments in ["--help", "train --help", "--version", "completions bash"] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
        let mut command = place.command(arguments);
        let ran = command.stdout(full).output().expect("runs");
        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(2), "{arguments}");
        assert!(said.starts_with("error: cannot write to standard output: "), "{arguments}: {said}");
    }
}

#[test]
fn every_key_that_a_source_or_a_page_tells_to_set_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut folders: Vec<_> = ["crates", "docs", "examples", "benches"].map(|name| root.join(name)).into();
    let mut files = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let is_read = ["rs", "md", "toml"].iter().any(|kind| path.extension() == Some(OsStr::new(kind)));
            match path.is_dir() {
                true if !path.ends_with("tests") => folders.push(path),
                false if is_read => files.push(path),
                _ => {}
            }
        }
    }
    let mut seen = 0;
    for file in files {
        let text = std::fs::read_to_string(&file).expect("text");
        for set in text.split("--set ").skip(1) {
            let set = set.trim_start_matches(['\'', '"']);
            let key: String =
                set.chars().take_while(|c| c.is_ascii_lowercase() || "_.".contains(*c)).collect();
            let is_a_key = key.contains('.') && !key.ends_with('.') && set[key.len()..].starts_with('=');
            if is_a_key && key != "section.key" {
                assert!(is_key(&key), "{}: --set {key}", file.display());
                seen += 1;
            }
        }
    }
    assert!(seen > 50, "only {seen} were found");
}
