//! Commands in messages, pasted into a shell, pass on the names that the messages are about.

use crate::place::{Place, Ran, finish};
use std::process::{Command, Output};

/// Runs `xtrain` with these arguments, which may hold spaces.
fn run(place: &Place, arguments: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtrain"));
    command.args(arguments);
    finish(place.settle(command), &arguments.join(" "))
}

/// The words that `shell` passes to a program for the part of `said` after `start` and before `end`.
#[track_caller]
fn words(shell: &str, said: &str, start: &str, end: &str) -> Vec<String> {
    let (_, rest) = said.split_once(start).unwrap_or_else(|| panic!("{start:?} is not in: {said}"));
    let command = rest.split_once(end).unwrap_or_else(|| panic!("{end:?} is not in: {rest}")).0;
    let Output { status, stdout, .. } =
        Command::new(shell).args(["-c", &format!("printf '%s\\0' {command}")]).output().expect("a shell");
    let text = String::from_utf8(stdout).expect("text");
    assert!(status.success() && text.ends_with('\0'), "{command}: {text}");
    text.trim_end_matches('\0').split('\0').map(str::to_owned).collect()
}

/// Provokes messages about files in a folder called `name`.
fn messages_name(name: &str, shell: &str) {
    let place = Place::new();
    let at = |file: &str| format!("{name}/{file}");
    let [text, config, run_folder, scales] = ["t.txt", "run.toml", "run", "s.toml"].map(at);
    place.write(&text, &place.read("a.txt"));
    let check = |arguments: &[&str], start: &str, end: &str, expected: &[&str]| {
        let ran = run(&place, arguments);
        let said = format!("{}{}", ran.stdout, ran.stderr);
        assert_eq!(words(shell, &said, start, end), expected, "`{arguments:?}`: {said}");
    };
    check(&["train", name], "run file for them: xtrain ", "\n", &["init", name]);
    check(&["train", &text], "run file for it: xtrain ", "\n", &["init", &text]);
    check(&["init", &text, "--out", &config], "then run: xtrain ", ", and", &["plan", &config]);
    let draft = String::from_utf8(place.read(&config)).expect("text");
    assert_eq!(words(shell, &draft, "#     xtrain plan ", "  "), [config.as_str()]);
    check(&["generate", &config, "--prompt", "a"], "has not begun: xtrain ", "\n", &["train", &config]);

    let trained = ["train", "run.toml", "--out", &run_folder, "--set", "train.steps=3"];
    run(&place, &[&trained[..], &["--set", "checkpoint.export_hf=false"]].concat()).succeeds();
    let of_run = at("run/config.toml");
    check(
        &["train", &run_folder],
        "continue it with: xtrain ",
        "; start",
        &["train", &of_run, "--out", &run_folder, "--resume"],
    );
    let exported = ["export", &run_folder, "--out", "FOLDER"];
    check(&["init", &run_folder, "a.txt", "--out", "new.toml"], "export it first: xtrain ", "\n", &exported);
    // A value that --set would read as something else is a string of TOML.
    let value = |text: &str| match name.starts_with(['[', ' ']) || name.contains('\n') {
        true => serde_json::Value::from(text).to_string(),
        false => text.to_owned(),
    };
    let init_from = format!("model.init_from={}", value(&run_folder));
    check(&["train", "continued.toml", "--set", &init_from], "export it first: xtrain ", "\n", &exported);

    let fp8 = ["--set", "precision.recipe=fp8-delayed", "--set"];
    let set = format!("precision.static_scales={}", value(&scales));
    check(
        &[&["train", "run.toml"], &fp8[..], &[&set]].concat(),
        "write it with xtrain ",
        "\n",
        &["inspect", "RUN", "--write-scales", &scales],
    );
    check(
        &["inspect", &run_folder, "--write-scales", &scales],
        "train with ",
        "\n",
        &[&fp8[..], &[&set]].concat(),
    );

    for (file, bytes, start, end) in [
        ("t.tar", &b"a"[..], "unpack it first: tar xf ", "\n"),
        ("t.json", b"{\n \"data\": [\n", "per line: jq -c . ", " > "),
        ("u.txt", b"\xff\xfea\0b\0c\0d\0", "iconv -f UTF-16 -t UTF-8 ", " > "),
    ] {
        place.write(&at(file), bytes);
        check(&["tokenize", &at(file), "--bytes", "--out", "shards"], start, end, &[&at(file)]);
    }
}

#[test]
fn commands_in_messages_are_quoted_for_a_shell() {
    messages_name("a b'$c", "sh");
    messages_name("[x]*{y,z};`~#", "sh");
    messages_name(" \\n \"b\"", "sh");
}

#[test]
fn control_characters_in_commands_are_escaped_for_bash() {
    messages_name("a\n\u{1b}[31m'\\", "bash");
}

#[test]
fn addresses_in_commands_are_quoted_for_a_shell() {
    let place = Place::new();
    for (address, start, end, expected) in [
        ("https://host/a b'$c?x=1&y=2", "curl -LO ", "\n", "https://host/a b'$c?x=1&y=2"),
        ("s3://bucket/a b'$c/t.txt", "aws s3 sync ", " FOLDER", "s3://bucket/a b'$c"),
        ("hf://datasets/me/$(a)/t", "hf download ", " --repo-type", "me/$(a)"),
    ] {
        let line = run(&place, &["tokenize", address, "--out", "shards"]).stderr;
        assert_eq!(words("sh", &line, start, end), [expected], "{line}");
    }
}
