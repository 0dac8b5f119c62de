//! A run while it goes: its page, its warnings, its lines, and the program that receives its metrics.

use crate::fragments::assert_says;
use crate::place::{Place, RUN, finish, wait, wait_until};
use serde_json::Value;
use std::process::Stdio;
use std::time::{Duration, Instant};

const SHORT: &str = "--set train.steps=12 --set log.every=1";

/// A rate at which a run diverges with finite numbers.
const TOO_HIGH: &str = "--set optimizer.lr=10 --set schedule.warmup_steps=0 --set schedule.kind=constant --set optimizer.grad_clip=0";

fn of_kind<'a>(lines: &'a [Value], kind: &str) -> Vec<&'a Value> {
    lines.iter().filter(|line| line["kind"] == kind).collect()
}

/// run.toml with these lines under `[log]`.
fn with_log(place: &Place, lines: &str) {
    place.write("hooked.toml", RUN.replace("[log]\n", &format!("[log]\n{lines}\n")).as_bytes());
}

#[test]
fn the_report_is_there_while_the_run_goes_and_says_how_far_it_is() {
    let place = Place::new();
    let mut command =
        place.command("train run.toml --out out --set train.steps=1000000 --set checkpoint.every=0");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    wait_until("a report", || place.exists("out/report.html"));
    let page = String::from_utf8(place.read("out/report.html")).expect("text");
    assert!(page.contains("running, step ") && page.contains(" of 1,000,000"), "{page}");
    let id = child.id().to_string();
    std::process::Command::new("kill").args(["-TERM", &id]).status().expect("runs");
    assert!(wait(&mut child, "train").success());
    let page = String::from_utf8(place.read("out/report.html")).expect("text");
    assert!(page.contains("stopped on request") && !page.contains("running, step"));
}

#[test]
fn the_keys_that_are_given_are_shown_and_all_or_nothing_if_that_is_asked_for() {
    let place = Place::new();
    let usual = place.train("usual", SHORT).stdout;
    assert!(usual.contains("\noptimizer.lr = 0.003\n") && usual.contains("train.steps = 12"), "{usual}");
    assert_says("train, the report", &usual);
    assert!(!usual.contains("weight_decay"), "{usual}");
    let whole = place.train("whole", &format!("{SHORT} --verbose")).stdout;
    assert!(whole.contains("\nweight_decay = 0.1\n"), "{whole}");
    for quiet in ["--quiet", "-q"] {
        let ran = place.train(&format!("quiet{quiet}"), &format!("{SHORT} {quiet}"));
        assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("", ""));
        assert!(place.exists(&format!("quiet{quiet}/report.html")));
    }
    // What is wrong is said nevertheless.
    let ran = place.train("diverged", &format!("{TOO_HIGH} --quiet"));
    assert_eq!(ran.stdout, "");
    assert!(ran.stderr.contains("warning"), "{}", ran.stderr);
    assert_ne!(place.run(&format!("train run.toml --out both {SHORT} -q -v")).code(), Some(0));
}

#[test]
fn the_quickstart_prints_no_more_than_forty_lines_before_its_first_step() {
    let place = Place::new();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let cache = place.path("cache");
    let mut command =
        place.command("train examples/quickstart.toml --set train.steps=1 --set train.batch_size=1");
    command.args(["--set", "data.seq_len=16", "--set", "eval.prompts=[]", "--set", "eval.at_end=false"]);
    command.args(["--set", "checkpoint.export_hf=false", "--set", "eval.tasks=[]"]);
    command.args(["--set", &format!("data.cache_dir={}", cache.display())]);
    command.args(["--out", &place.path("out").display().to_string()]);
    let ran = finish(
        {
            command.current_dir(root);
            command
        },
        "the quickstart",
    )
    .succeeds();
    let before = ran.stdout.lines().take_while(|line| !line.starts_with("step ")).count();
    assert!((5..40).contains(&before), "{before} lines: {}", ran.stdout);
}

#[test]
fn a_run_that_diverges_is_warned_of_with_its_cause_and_may_end_there() {
    let place = Place::new();
    let ran = place.train("out", TOO_HIGH);
    for said in
        ["warning ", "above 5.5", "guessing", "(now 1.00e1)", "lower optimizer.lr", "worse than guessing"]
    {
        assert!(ran.stdout.contains(said), "{said}: {}", ran.stdout);
    }
    assert_eq!(ran.stdout.matches("warning ").count(), 1, "{}", ran.stdout);
    assert_eq!(of_kind(&place.metrics("out"), "warning").len(), 1);
    let page = String::from_utf8(place.read("out/report.html")).expect("text");
    assert!(page.contains("<h2>Warning</h2>"));
    let ran =
        place.run(&format!("train run.toml --out stopped {TOO_HIGH} --set train.stop_on_divergence=true"));
    ran.refuses(&["guessing", "lower optimizer.lr", "train.stop_on_divergence", "--resume"]);
    let steps = of_kind(&place.metrics("stopped"), "step").len();
    assert!(steps < 30, "{steps}");
    let page = String::from_utf8(place.read("stopped/report.html")).expect("text");
    assert!(page.contains("ended by an error"), "the page says that it runs");
    let ran = place.train("sound", "");
    assert!(!ran.stdout.contains("warning"), "{}", ran.stdout);
}

#[test]
fn weights_that_training_continues_are_evaluated_first() {
    let place = Place::new();
    place.train("out", "");
    let go_on = "train continued.toml --set model.init_from=out/hf --out again --set train.steps=9";
    place.run(go_on).succeeds();
    let lines = place.metrics("again");
    let evals = of_kind(&lines, "eval");
    assert_eq!(evals[0]["step"], 0, "{evals:?}");
    assert_eq!(lines[0]["kind"], "eval", "before the first step");
    let before =
        of_kind(&place.metrics("out"), "eval").last().expect("one")["loss"].as_f64().expect("a loss");
    let first = evals[0]["loss"].as_f64().expect("a loss");
    assert!((first / before - 1.0).abs() < 1e-5, "{first} {before}");
    assert!(place.names("again/checkpoints").iter().all(|name| name != "step-0"));
    // A run of fresh weights has nothing to compare with.
    assert_ne!(of_kind(&place.metrics("out"), "eval")[0]["step"], 0);
    place.run(&go_on.replace("again", "none")).succeeds();
    let without = go_on.replace("again", "never") + " --set eval.every=0 --set eval.at_end=false";
    place.run(&without).succeeds();
    assert!(of_kind(&place.metrics("never"), "eval").is_empty());
}

#[test]
fn each_source_of_a_mixture_has_its_tokens_and_its_loss() {
    let place = Place::new();
    place.write("digits.txt", "0123456789 9876543210\n".repeat(300).as_bytes());
    let mixture = "train = [{ path = \"a.txt\", weight = 3.0 }, { path = \"digits.txt\", weight = 1.0 }]";
    place.write("mixed.toml", RUN.replace("train = \"a.txt\"", mixture).as_bytes());
    let all = "--set eval.tokens=0 --set log.every=1 --set train.micro_batch_size=2";
    let ran = place.run(&format!("train mixed.toml --out out {all}")).succeeds();
    assert!(ran.stdout.contains("source "), "{}", ran.stdout);
    let lines = place.metrics("out");
    let (evals, sources) = (of_kind(&lines, "eval"), of_kind(&lines, "source"));
    assert_eq!(sources.len(), 2 * evals.len());
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap_or_else(|| panic!("no {key}: {of}"));
    let steps = of_kind(&lines, "step");
    let (mut before, mut taken) = (0.0, [0.0; 2]);
    for (eval, sources) in evals.iter().zip(sources.chunks(2)) {
        // The training losses since the last evaluation have the mean of these steps.
        let after = number(eval, "step");
        let those: Vec<f64> =
            (steps.iter().filter(|step| (before + 1.0..=after).contains(&number(step, "step"))))
                .map(|step| number(step, "loss"))
                .collect();
        let now = [0, 1].map(|n| number(sources[n], "tokens"));
        let sum: f64 = (0..2).map(|n| number(sources[n], "train_loss") * (now[n] - taken[n])).sum();
        let mean = sum / (now[0] + now[1] - taken[0] - taken[1]);
        let expected = those.iter().sum::<f64>() / those.len() as f64;
        assert!(those.len() > 1 && (mean / expected - 1.0).abs() < 1e-5, "{mean}, not {expected}");
        (before, taken) = (after, now);
        assert_eq!([&sources[0]["source"], &sources[1]["source"]], ["a.txt", "digits.txt"]);
        let tokens: f64 = sources.iter().map(|source| number(source, "tokens")).sum();
        assert_eq!(tokens, number(eval, "step") * 4.0 * 16.0);
        let share = number(sources[0], "tokens") / tokens;
        assert!((share - 0.75).abs() < 0.1, "{share}");
        // The loss of all is a mean of theirs.
        let [a, b, all] = [number(sources[0], "loss"), number(sources[1], "loss"), number(eval, "loss")];
        assert!(a.min(b) < all && all < a.max(b), "{a} {b} {all}");
    }
    let page = String::from_utf8(place.read("out/report.html")).expect("text");
    assert!(page.contains("<h2>Sources</h2>") && page.contains("digits.txt"));
    // A single source is none of a mixture.
    place.train("one", SHORT);
    assert!(of_kind(&place.metrics("one"), "source").is_empty());
}

#[test]
fn a_program_receives_every_line_of_the_metrics() {
    let place = Place::new();
    with_log(&place, r#"command = ["sh", "-c", "cat > got.jsonl; echo $XTRAIN_RUN > where"]"#);
    place.run(&format!("train hooked.toml --out out {SHORT}")).succeeds();
    wait_until("the program's end", || place.exists("where") && !place.read("where").is_empty());
    assert_eq!(place.read("got.jsonl"), place.read("out/metrics.jsonl"));
    assert!(String::from_utf8(place.read("where")).expect("text").trim_end().ends_with("/out"));
    // It is in no file of the run, so that a run folder starts nothing.
    let config = String::from_utf8(place.read("out/config.toml")).expect("text");
    assert!(config.contains("command = []"), "{config}");
    place.run("train out/config.toml --out out --resume --set train.steps=14").succeeds();
    assert_ne!(place.read("got.jsonl").len(), 0);
}

#[test]
fn a_run_folder_starts_no_program() {
    let place = Place::new();
    place.train("out", SHORT);
    let config = String::from_utf8(place.read("out/config.toml")).expect("text");
    let planted = config.replace("command = []", r#"command = ["touch", "started"]"#);
    assert_ne!(planted, config);
    place.write("out/config.toml", planted.as_bytes());
    let ran = place.run("train out/config.toml --out out --resume --set train.steps=14").succeeds();
    assert_says("train, the command of a run folder", &ran.stderr);
    place.write("out/config.toml", planted.as_bytes());
    place.run("train out/config.toml --out other").succeeds();
    for verb in ["eval out", "report out", "generate out --prompt a --max-tokens 1"] {
        place.run(verb).succeeds();
    }
    assert!(!place.exists("started"));
    // The command line is the user's.
    place.run("train out/config.toml --out third --set log.command=[\"touch\",\"started\"]").succeeds();
    wait_until("the program", || place.exists("started"));
}

#[test]
fn a_program_that_reads_nothing_or_ends_costs_the_run_nothing_but_a_warning() {
    let place = Place::new();
    with_log(&place, r#"command = ["sh", "-c", "echo no way; exit 3"]"#);
    let ran = place.run("train hooked.toml --out ends").succeeds();
    assert_eq!(ran.stderr.matches("log.command: sh").count(), 1, "{}", ran.stderr);
    assert_eq!(place.read("ends/command.log"), b"no way\n");
    assert!(place.exists("ends/hf/model.safetensors"));
    with_log(&place, r#"command = ["sh", "-c", "exec sleep 300"]"#);
    let begun = Instant::now();
    place.run("train hooked.toml --out sleeps").succeeds();
    assert!(begun.elapsed() < Duration::from_secs(250), "the run waited");
    with_log(&place, r#"command = ["no-such-program-here", "x"]"#);
    place.run("train hooked.toml --out none").refuses(&["cannot start no-such-program-here", "log.command"]);
    // Nothing has begun there.
    place.run("train run.toml --out none --set train.steps=4").succeeds();
}
