//! Runs that are asked to stop, that reach their time, and that go on with another number of processes.

use super::{SHARED, assert_near, numbers};
use crate::place::{Place, signal, wait, wait_until};
use crate::stopping::steps;
use std::process::{Child, Stdio};

const ENDLESS: &str = "train run.toml --out out --resume --set train.batch_size=12 --set train.micro_batch_size=1 \
                       --set train.steps=10000000 --set schedule.kind=constant --set checkpoint.every=0 --set eval.every=0";

fn start(place: &Place, ranks: usize) -> Child {
    let command = format!("{ENDLESS} --ranks {ranks}");
    place.command(&command).stdout(Stdio::null()).stderr(place.sink("stderr")).spawn().expect("starts")
}

/// The processes that a launcher started, in the order of ranks.
pub(super) fn children(launcher: u32) -> Vec<u32> {
    let path = format!("/proc/{launcher}/task/{launcher}/children");
    let list = std::fs::read_to_string(path).unwrap_or_default();
    let mut children: Vec<u32> = list.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    let rank = |process: &u32| {
        let variables = std::fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        let variables = String::from_utf8_lossy(&variables).into_owned();
        variables
            .split('\0')
            .find_map(|v| v.strip_prefix("RANK=").and_then(|rank| rank.parse::<usize>().ok()))
    };
    children.sort_by_key(rank);
    children
}

#[test]
fn a_signal_to_any_rank_saves_and_ends_all_after_the_same_step() {
    let place = Place::new();
    for (round, target) in [None, Some(0), Some(1), Some(2)].into_iter().enumerate() {
        let before = steps(&place).len();
        let mut child = start(&place, 3);
        wait_until("a step", || steps(&place).len() > before + 3);
        match target {
            // The launcher passes it on to all.
            None => signal(child.id(), "TERM"),
            Some(rank) => signal(children(child.id())[rank], ["TERM", "INT", "USR1"][rank]),
        }
        let ended = wait(&mut child, "a stopped run");
        let said = String::from_utf8(place.read("stderr")).expect("text");
        assert_eq!(ended.code(), Some(0), "round {round}: {said}");
        let last = steps(&place).len();
        assert!(place.exists(&format!("out/checkpoints/step-{last}")), "round {round}: {last}");
    }
    let all = steps(&place);
    assert!(all.iter().copied().eq(1..=all.len() as u64), "{all:?}");
}

#[test]
fn the_time_limit_saves_and_ends_all() {
    let place = Place::new();
    let mut reached = 0;
    for _ in 0..2 {
        let ran = place.run(&format!("{ENDLESS} --ranks 2 --max-time 2s")).succeeds();
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
fn any_number_of_ranks_continues_a_run_with_the_same_tokens() {
    let place = Place::new();
    let until = |steps: usize| {
        format!(
            "train run.toml --resume --set train.batch_size=12 --set train.micro_batch_size=1 --set schedule.kind=constant --set \
             schedule.warmup_steps=0 --set eval.every=0 --set train.steps={steps}"
        )
    };
    place.run(&format!("{} --out peace", until(16))).succeeds();
    for (steps, ranks) in [(4, 4), (8, 1), (12, 3), (16, 2)] {
        place.run(&format!("{} --out out --ranks {ranks}", until(steps))).succeeds();
    }
    for key in ["loss", "tokens", "epoch"] {
        let [ours, alone] = ["out", "peace"].map(|out| numbers(&place, out, "step", key));
        assert_eq!(alone.len(), 16);
        assert_near(&ours, &alone, 1e-5);
    }
    let state = |out: &str| place.read(&format!("{out}/checkpoints/step-16/loader.json"));
    assert_eq!(state("out"), state("peace"));
}

#[test]
fn a_finished_run_is_finished_on_any_number_of_ranks() {
    let place = Place::new();
    place.train("out", &format!("{SHARED} --ranks 2"));
    let before = place.contents("out");
    let ran = place.train("out", &format!("{SHARED} --ranks 3 --resume"));
    assert!(ran.stdout.starts_with("already finished: 10 of 10 steps"), "{}", ran.stdout);
    assert!(place.contents("out") == before);
}
