//! Signals, time limits, and two processes that want one folder.

use crate::place::{Place, signal, wait, wait_until};
use crate::resume::assert_same_end;
use serde_json::Value;
use std::process::{Child, Command, Stdio};

/// Far more steps than any test waits for.
const ENDLESS: &str = "train run.toml --out out --resume --set train.steps=10000000 --set schedule.kind=constant \
                       --set checkpoint.every=0 --set eval.every=0";

/// The steps that a run in `out` has reported so far.
pub(crate) fn steps(place: &Place) -> Vec<u64> {
    let text = std::fs::read_to_string(place.path("out/metrics.jsonl")).unwrap_or_default();
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["kind"] == "step").filter_map(|line| line["step"].as_u64()).collect()
}

fn start(place: &Place) -> Child {
    place.command(ENDLESS).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts")
}

#[test]
fn sigterm_saves_and_ends_well_and_the_same_command_goes_on() {
    let place = Place::new();
    for round in 0..3 {
        let before = steps(&place).len();
        let mut child = start(&place);
        wait_until("a step", || steps(&place).len() > before + 5);
        signal(child.id(), if round == 1 { "INT" } else { "TERM" });
        if round == 2 {
            // As `timeout` does, which signals a process and then its group. It may have ended by now.
            let _ =
                Command::new("sh").args(["-c", &format!("kill -TERM {} 2> /dev/null", child.id())]).status();
        }
        assert_eq!(wait(&mut child, "a stopped run").code(), Some(0));
        let last = steps(&place).len() as u64;
        assert!(
            place.exists(&format!("out/checkpoints/step-{last}")),
            "{last}: {:?}",
            place.names("out/checkpoints")
        );
        assert!(place.exists("out/report.html"));
    }
    // No step is missing or duplicated.
    let all = steps(&place);
    assert!(all.len() > 15 && all.iter().copied().eq(1..=all.len() as u64), "{all:?}");
}

#[test]
fn max_time_saves_and_ends_well_and_the_same_command_goes_on() {
    let place = Place::new();
    let mut reached = 0;
    for _ in 0..2 {
        let ran = place.run(&format!("{ENDLESS} --max-time 1s")).succeeds();
        assert!(
            ran.stdout.ends_with("time is up; the state is saved, continue with --resume\n"),
            "{}",
            ran.stdout
        );
        let now = steps(&place).len();
        assert!(now > reached, "{now} steps after {reached}");
        assert!(place.exists(&format!("out/checkpoints/step-{now}")));
        reached = now;
    }
}

#[test]
fn a_run_that_is_stopped_while_it_writes_a_sample_ends_well_with_what_it_has() {
    let place = Place::new();
    // A sample longer than any test waits for; drawn ones end sooner or later.
    let command = "train run.toml --out out --resume --set train.steps=2 --set eval.prompts=[\"the\"] \
                   --set eval.max_tokens=1000000000 --set eval.temperature=0";
    let mut child = place.command(command).stdout(Stdio::null()).spawn().expect("starts");
    wait_until("the model is exported", || place.exists("out/hf"));
    signal(child.id(), "TERM");
    assert_eq!(wait(&mut child, "a run stopped while it writes a sample").code(), Some(0));
    let outcome = || {
        let summary: Value = serde_json::from_slice(&place.read("out/summary.json")).expect("JSON");
        summary["outcome"].as_str().map(String::from)
    };
    assert_eq!(outcome().as_deref(), Some("stopped on request"));
    let ran = place.run(&format!("{command} --max-time 2s")).succeeds();
    assert!(ran.stdout.contains("time is up"), "{}", ran.stdout);
    assert_eq!(outcome().as_deref(), Some("stopped at the time limit"));
    assert!(place.read("out/sample.txt").starts_with(b"the"));
    assert!(place.exists("out/report.html"));
}

#[test]
fn a_second_process_on_a_folder_is_refused_and_disturbs_nothing() {
    let place = Place::new();
    let mut first = start(&place);
    wait_until("a step", || !steps(&place).is_empty());
    let id = first.id().to_string();
    place.run(ENDLESS).refuses(&["out", "another run", &id]);
    place.run("train run.toml --out out").refuses(&["out", "already holds a run"]);
    let before = steps(&place).len();
    wait_until("more steps", || steps(&place).len() > before + 3);
    // Reading is no writing: the latest checkpoint can be used meanwhile, or none exists so far.
    place.run("generate out --prompt the -n 2").refuses(&["no complete checkpoint yet"]);
    signal(first.id(), "TERM");
    assert_eq!(wait(&mut first, "the first run").code(), Some(0));
    place.run("generate out --prompt the -n 2").succeeds();
    // A lock does not outlive its process.
    let mut third = start(&place);
    wait_until("a step of the next process", || steps(&place).len() > before + 3);
    third.kill().expect("ends");
    wait(&mut third, "the third run");
}

#[test]
fn of_processes_that_begin_at_once_one_makes_the_run_and_the_others_are_refused() {
    let place = Place::new();
    place.train("peace", "");
    for (round, how) in ["", "--resume"].into_iter().enumerate() {
        let out = format!("out{round}");
        let mut all: Vec<Child> = (0..3)
            .map(|n| {
                let mut command = place.command(&format!("train run.toml --out {out} {how}"));
                command.stdout(Stdio::null()).stderr(place.sink(&format!("said{n}")));
                command.spawn().expect("starts")
            })
            .collect();
        let codes: Vec<_> = all.iter_mut().map(|child| wait(child, "one of three").code()).collect();
        assert!(codes.iter().all(|code| matches!(code, Some(0 | 2))), "{codes:?}");
        // With --resume, one that comes when another has finished finds nothing left to do, and says so with
        // success.
        assert!(codes.contains(&Some(0)), "{codes:?}");
        for (n, code) in codes.iter().enumerate().filter(|(_, code)| **code == Some(2)) {
            let said = String::from_utf8(place.read(&format!("said{n}"))).expect("text");
            assert!(said.contains(&out) && said.lines().count() == 1, "{code:?}: {said}");
        }
        assert_same_end(&place, "peace", &out);
    }
}

#[test]
fn a_reader_that_goes_away_ends_neither_a_run_nor_a_command_badly() {
    let place = Place::new();
    place.train("out", "--set train.steps=3");
    for command in ["plan run.toml --dump", "plan run.toml", "generate out --prompt the -n 3"] {
        let mut child =
            place.command(command).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("ends");
        assert_eq!(output.status.code(), Some(0), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let mut command = place.command("train run.toml --out piped");
    let mut child = command.stdout(Stdio::piped()).spawn().expect("starts");
    drop(child.stdout.take());
    assert_eq!(wait(&mut child, "a run").code(), Some(0));
    assert!(place.exists("piped/hf/model.safetensors"));
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_device_behind_standard_output_is_an_error_of_what_prints_and_not_of_a_run() {
    let place = Place::new();
    let to_full = |command: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("exec {} {command} > /dev/full", env!("CARGO_BIN_EXE_xtrain"))]);
        crate::place::finish(place.settle(shell), command)
    };
    to_full("plan run.toml").refuses(&["standard output"]);
    to_full("train run.toml --out out").succeeds();
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_device_behind_standard_error_changes_no_exit_code() {
    let place = Place::new();
    place.train("out", "--set train.steps=3");
    for (command, code) in [
        ("generate out --prompt the -n 40", 0),
        ("train run.toml --out new --set train.steps=3", 0),
        ("train run.toml --out out --resume", 0),
        ("train run.toml --out out", 2),
        ("train missing.toml", 2),
        ("generate out --prompt the --temperature NaN", 2),
        ("generate out --promt the", 2),
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("a full device");
        let status = place.command(command).stdout(Stdio::null()).stderr(full).status();
        assert_eq!(status.expect("starts").code(), Some(code), "{command}");
    }
}

#[test]
fn a_run_that_is_stopped_while_it_makes_tokens_ends_well_and_goes_on() {
    let place = Place::new();
    let big = place.read("a.txt").repeat(1000);
    place.write("big.txt", &big);
    let command = "train run.toml --out out --resume --set data.train=big.txt --set train.steps=3";
    let mut child = place.command(command).stdout(Stdio::null()).spawn().expect("starts");
    wait_until("tokens are made", || place.exists("cache"));
    signal(child.id(), "TERM");
    assert_eq!(wait(&mut child, "a run stopped while it makes tokens").code(), Some(0));
    assert!(!place.exists("out/hf"), "it went on");
    place.run(command).succeeds();
    assert!(place.exists("out/hf"));
}

#[test]
fn a_stopped_run_says_of_which_step_its_export_is() {
    let place = Place::new();
    let ran = place.run(&format!("{ENDLESS} --max-time 300ms")).succeeds();
    let line = "Hugging Face folder: not written yet, because the run is not at its end; xtrain export out --out FOLDER writes one of the saved state\n\
                time is up; the state is saved, continue with --resume\n";
    assert!(ran.stdout.ends_with(line), "{}", ran.stdout);
    place.run("export out --out exported").succeeds();
    assert!(place.exists("exported/model.safetensors"));

    place.train("short", "--set train.steps=6");
    let longer = ENDLESS.replace("--out out", "--out short");
    let ran = place.run(&format!("{longer} --max-time 0.3s")).succeeds();
    let line = "Hugging Face folder: short/hf is that of step 6; xtrain export short --out FOLDER writes one of the saved state\ntime is up";
    assert!(ran.stdout.contains(line), "{}", ran.stdout);
    let silent = place.run(&format!("{longer} --max-time 300ms --set checkpoint.export_hf=false")).succeeds();
    assert!(!silent.stdout.contains("Hugging Face"), "{}", silent.stdout);
}
