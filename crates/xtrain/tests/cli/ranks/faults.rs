//! Ranks that are killed, that stop, and that fail: all end, with the cause on each.

use super::ending::children;
use crate::fragments::assert_says;
use crate::place::{Place, signal, wait, wait_until};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// All are gone in this time.
const BAR: Duration = Duration::from_secs(15);

const ENDLESS: &str = "train run.toml --out out --set train.batch_size=12 --set train.micro_batch_size=1 \
                       --set train.steps=10000000 --set schedule.kind=constant --set checkpoint.every=5 --set eval.every=7";

/// A started run of three ranks that has made some steps.
struct Started {
    launcher: Child,
    ranks: Vec<u32>,
}

fn started(place: &Place) -> Started {
    let command = format!("{ENDLESS} --ranks 3");
    let launcher =
        place.command(&command).stdout(Stdio::null()).stderr(place.sink("stderr")).spawn().expect("starts");
    wait_until("a save", || place.exists("out/checkpoints/step-5"));
    let ranks = children(launcher.id());
    assert_eq!(ranks.len(), 3);
    Started { launcher, ranks }
}

fn is_gone(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.map_or(true, |stat| stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')))
}

/// Waits for the end of a run, in which something has happened to a rank since `since`. Returns its exit code
/// and the lines that name the cause.
fn ended(mut run: Started, since: Instant, place: &Place) -> (Option<i32>, Vec<String>) {
    let code = wait(&mut run.launcher, "a run whose rank has gone").code();
    assert!(since.elapsed() < BAR, "it took {:?}", since.elapsed());
    assert!(run.ranks.iter().all(|rank| is_gone(*rank)));
    let said = String::from_utf8(place.read("stderr")).expect("text");
    assert!(!said.contains("panicked") && !said.contains("Please report"), "{said}");
    (code, said.lines().filter(|line| line.contains("error: ")).map(str::to_owned).collect())
}

/// Nothing but whole files is left, and the run goes on.
fn goes_on(place: &Place) {
    let left = |folder: &str| place.names(folder).into_iter().filter(|name| name.contains(".tmp")).count();
    assert_eq!(
        left("out") + left("out/checkpoints"),
        0,
        "{:?} {:?}",
        place.names("out"),
        place.names("out/checkpoints")
    );
    let shared = "--set train.batch_size=12 --set train.micro_batch_size=1";
    let newest = place
        .names("out/checkpoints")
        .iter()
        .filter_map(|n| n.strip_prefix("step-")?.parse::<u64>().ok())
        .max();
    let steps = newest.expect("a checkpoint") + 2;
    place.run(&format!("train run.toml --out out --resume {shared} --ranks 2 --set train.steps={steps} --set schedule.kind=constant")).succeeds();
}

#[test]
fn a_killed_rank_ends_all_with_one_line_each() {
    for culprit in [0, 2] {
        let place = Place::new();
        let run = started(&place);
        let since = Instant::now();
        signal(run.ranks[culprit], "KILL");
        let (code, lines) = ended(run, since, &place);
        assert_eq!(code, Some(137), "{lines:?}");
        assert_eq!(lines.len(), 2, "{lines:?}");
        for line in &lines {
            assert!(
                line.contains(&format!("rank {culprit} (")) && line.contains("the process has gone"),
                "{line}"
            );
        }
        goes_on(&place);
    }
}

#[test]
fn a_stopped_rank_ends_all() {
    let place = Place::new();
    let run = started(&place);
    let since = Instant::now();
    signal(run.ranks[1], "STOP");
    let (code, lines) = ended(run, since, &place);
    assert_eq!(code, Some(1), "{lines:?}");
    for line in &lines {
        assert!(line.contains("rank 1 ("), "{line}");
        assert_says("train, a rank that is silent", line);
    }
    assert!(lines.len() >= 2, "{lines:?}");
    goes_on(&place);
}

#[test]
fn a_rank_that_fails_is_the_cause_on_all() {
    let place = Place::new();
    // A full disk under the run folder, once it has made steps.
    let command = format!("ulimit -f 60; exec {} {ENDLESS} --ranks 2", env!("CARGO_BIN_EXE_xtrain"));
    let mut shell = Command::new("sh");
    shell.args(["-c", &command]);
    let ran = crate::place::finish(place.settle(shell), "a limit on file sizes");
    assert_eq!(ran.code(), Some(2), "{}", ran.stderr);
    let lines: Vec<&str> = ran.stderr.lines().filter(|line| line.contains("error: ")).collect();
    assert!(!lines.is_empty() && lines.iter().all(|line| line.contains("File too large")), "{}", ran.stderr);
}

#[test]
fn a_save_that_fails_on_rank_0_is_the_cause_on_all() {
    let place = Place::new();
    let sets = "--ranks 3 --set parallel.shard=optimizer --set eval.every=0 --set checkpoint.every=1";
    place.train("first", "--set train.steps=1 --set schedule.warmup_steps=0");
    // The tokens are there, so the files of the state are the first that are too large.
    let command = format!("ulimit -f 24; exec {} {ENDLESS} {sets}", env!("CARGO_BIN_EXE_xtrain"));
    let mut shell = Command::new("sh");
    shell.args(["-c", &command]);
    let ran = crate::place::finish(place.settle(shell), "a limit on file sizes");
    assert_eq!(ran.code(), Some(2), "{}", ran.stderr);
    assert!(!ran.stderr.contains("does not see the folder"), "{}", ran.stderr);
    let cause = |line: &str| line.contains("checkpoints/step-1.tmp-") && line.contains("(os error 27)");
    assert!(ran.stderr.lines().any(cause), "{}", ran.stderr);
}

#[test]
fn a_step_that_hangs_is_named_with_its_part_and_collective() {
    let place = Place::new();
    // Nobody reads what rank 0 prints, so that it hangs when the pipe is full.
    let command = format!("{ENDLESS} --ranks 2 --set log.every=1 --set parallel.timeout=2s");
    let mut launcher =
        place.command(&command).stdout(Stdio::piped()).stderr(place.sink("stderr")).spawn().expect("starts");
    let code = wait(&mut launcher, "a run that hangs").code();
    let said = String::from_utf8(place.read("stderr")).expect("text");
    let lines: Vec<&str> = said.lines().filter(|line| line.contains("error: ")).collect();
    assert_eq!((code, lines.len()), (Some(1), 2), "{said}");
    for line in lines {
        for word in ["step ", "all_", " failed in the ", "waits for rank 0, from which nothing came for 2 s"]
        {
            assert!(line.contains(word), "{word}: {line}");
        }
    }
}

#[test]
fn the_program_that_receives_the_metrics_ends_with_a_killed_rank() {
    let place = Place::new();
    // One that neither reads its input nor minds a signal.
    place.write("stubborn.sh", b"trap '' TERM HUP INT\necho $$ > started\nwhile true; do sleep 0.1; done\n");
    let command = format!("{ENDLESS} --ranks 2 --set log.command=[\"sh\",\"stubborn.sh\"]");
    let mut launcher =
        place.command(&command).stdout(Stdio::null()).stderr(place.sink("stderr")).spawn().expect("starts");
    let started = || std::fs::read_to_string(place.path("started")).ok()?.trim().parse::<u32>().ok();
    wait_until("the program starts", || started().is_some() && children(launcher.id()).len() == 2);
    let program = started().expect("its number");
    assert!(!is_gone(program));
    signal(children(launcher.id())[0], "KILL");
    assert_eq!(wait(&mut launcher, "a run whose rank 0 was killed").code(), Some(137));
    wait_until("the program ends", || is_gone(program));
    let missing = "--set log.command=[\"no-such-program\"] --set train.steps=3";
    let ran = place.run(&format!("train run.toml --out other --ranks 2 {missing}"));
    assert_eq!(ran.code(), Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("no-such-program"), "{}", ran.stderr);
}

#[test]
fn numbers_that_are_not_finite_on_one_rank_skip_the_step_on_all() {
    let place = Place::new();
    let diverging = "train run.toml --out out --set train.batch_size=12 --set train.micro_batch_size=1 --set optimizer.lr=1e30 \
                     --set schedule.warmup_steps=0 --set optimizer.grad_clip=0 --ranks 3";
    let ran = place.run(diverging);
    assert_eq!(ran.code(), Some(2), "{}", ran.stderr);
    for line in ran.stderr.lines().filter(|line| line.contains("error: ")) {
        assert_says("train, steps that are not finite", line);
    }
}
