//! `xtrain generate`: what goes where, and what happens when the context is full.

use crate::place::{Place, wait};
use serde_json::Value;
use std::io::Read;
use std::process::Stdio;

/// Positions of the model of `run.toml`: its sequence length.
const CONTEXT: usize = 16;

fn trained() -> Place {
    let place = Place::new();
    place.train("out", "");
    place
}

fn json(place: &Place, arguments: &str) -> Value {
    let ran = place.run(&format!("generate out --json {arguments}")).succeeds();
    assert_eq!(ran.stdout.lines().count(), 1, "{}", ran.stdout);
    serde_json::from_str(&ran.stdout).expect("JSON")
}

fn tokens(answer: &Value, key: &str) -> Vec<u64> {
    answer[key].as_array().expect("tokens").iter().map(|t| t.as_u64().expect("an id")).collect()
}

fn steps(answer: &Value) -> &[Value] {
    answer["steps"].as_array().expect("steps")
}

fn joined(ids: &[u64]) -> String {
    ids.iter().map(u64::to_string).collect::<Vec<_>>().join(",")
}

#[test]
fn the_text_alone_goes_to_standard_output() {
    let place = trained();
    let arguments = "--prompt the -n 13 --temperature 0.7 --seed 5";
    let ran = place.run(&format!("generate out {arguments}")).succeeds();
    assert!(ran.stderr.lines().count() == 1 && ran.stderr.contains(" tokens/s"), "{}", ran.stderr);
    let answer = json(&place, arguments);
    assert_eq!(ran.stdout, format!("{}\n", answer["text"].as_str().expect("text")));
    assert_eq!(tokens(&answer, "tokens").len(), 13);
    // Standard input gives the same, and so does the same seed again.
    place.write("prompt", b"the");
    let mut command = place.command("generate out --prompt - -n 13 --temperature 0.7 --seed 5");
    command.stdin(std::fs::File::open(place.path("prompt")).expect("opens"));
    assert_eq!(crate::place::finish(command, "a prompt from standard input").succeeds().stdout, ran.stdout);
    // Another seed, another text.
    let other = place.run("generate out --prompt the -n 13 --temperature 0.7 --seed 6").succeeds();
    assert_ne!(other.stdout, ran.stdout);
}

#[test]
fn ids_are_continued_with_ids_where_a_folder_has_no_tokenizer() {
    let place = trained();
    let arguments = "--tokens 116,104,101 -n 5 --temperature 0";
    let made = joined(&tokens(&json(&place, arguments), "tokens"));
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::remove_file(place.path(&format!("out/hf/{file}"))).expect("removed");
    }
    let ran = place.run(&format!("generate out/hf {arguments}")).succeeds();
    assert_eq!(ran.stdout, format!("{made}\n"));
    place.run("generate out/hf --prompt the").refuses(&["out/hf", "no tokenizer.json"]);
}

#[test]
fn a_full_context_forgets_its_older_half_and_goes_on_as_from_a_fresh_prompt() {
    let place = trained();
    let prompt = [116u64, 104, 101];
    let answer = json(&place, "--tokens 116,104,101 -n 60 --temperature 0");
    let made = tokens(&answer, "tokens");
    assert_eq!(made.len(), 60);
    let all: Vec<u64> = prompt.iter().chain(&made).copied().collect();
    // Up to the first token that no longer fits, as many as are asked for make no difference.
    let within = CONTEXT - prompt.len() + 1;
    let short = json(&place, &format!("--tokens 116,104,101 -n {within} --temperature 0"));
    assert_eq!(steps(&short), &steps(&answer)[..within]);
    // From then on: half a context as a prompt of its own, until that has filled the context.
    let mut first = CONTEXT + 1 - CONTEXT / 2;
    while first + CONTEXT < all.len() {
        let kept = first..first + CONTEXT / 2;
        let count = CONTEXT / 2 + 1;
        let fresh =
            json(&place, &format!("--tokens {} -n {count} --temperature 0", joined(&all[kept.clone()])));
        let at = kept.end - prompt.len();
        assert_eq!(steps(&fresh), &steps(&answer)[at..at + count], "tokens from {}", kept.end);
        first += CONTEXT / 2 + 1;
    }
    assert!(first > 3 * CONTEXT, "{first}");
}

#[test]
fn a_context_that_will_be_full_is_said_once_beforehand() {
    let place = trained();
    let ran = place.run("generate out --prompt the -n 60").succeeds();
    assert_eq!(ran.stderr.matches("context of 16 tokens").count(), 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("older half"), "{}", ran.stderr);
    assert!(place.run("generate --help").succeeds().stdout.contains("older half is dropped"));
    // Samples at the end of a run keep to it as well, whatever the length of the prompt.
    let long = "the_river_ran_under_a_stone_bridge";
    let prompts = format!(r#"--set eval.prompts=["the","{long}"] --set eval.max_tokens=50"#);
    place.train("sampled", &format!("--set train.steps=2 {prompts}"));
    let sample = String::from_utf8(place.read("sampled/sample.txt")).expect("text");
    assert!(sample.contains(long), "{sample}");
}

#[test]
fn generation_ends_when_its_reader_goes_away() {
    let place = trained();
    let mut command = place.command("generate out --prompt the -n 1000000000");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    let mut out = child.stdout.take().expect("piped");
    out.read_exact(&mut [0; 10]).expect("ten bytes come while the rest is made");
    drop(out);
    assert_eq!(wait(&mut child, "generate").code(), Some(0));
    let mut said = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    assert!(!said.contains("panicked") && !said.contains("error"), "{said}");
}
