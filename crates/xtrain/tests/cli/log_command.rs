//! The program of `log.command` beside its run: its environment, its log, and its end.

use crate::place::{Place, finish, signal, wait, wait_until};
use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const ENDLESS: &str = "train run.toml --out out --set train.steps=10000000 --set schedule.kind=constant \
                       --set checkpoint.every=0 --set eval.every=0";

/// Options that start a script, which `place` then has.
fn with_script(place: &Place, script: &str) -> String {
    place.write("script.sh", script.as_bytes());
    "--set log.command=[\"sh\",\"script.sh\"]".to_owned()
}

fn is_gone(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"));
    stat.map_or(true, |stat| stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')))
}

/// The numbers of processes that a script wrote into a file.
fn processes(place: &Place, file: &str, count: usize) -> Vec<u32> {
    let numbers = || -> Vec<u32> {
        let text = fs::read_to_string(place.path(file)).unwrap_or_default();
        text.lines().filter_map(|line| line.trim().parse().ok()).collect()
    };
    wait_until("the script's processes", || numbers().len() == count);
    numbers()
}

#[test]
fn it_ends_with_a_killed_run_and_takes_its_children_along() {
    let place = Place::new();
    // It neither reads its input nor minds a signal, and neither does its child.
    let stubborn = "trap '' TERM HUP INT\n(trap '' TERM HUP INT; sh -c 'echo $PPID' >> started; while true; do sleep 0.1; done) &\n\
                    echo $$ >> started\nwhile true; do sleep 0.1; done\n";
    let option = with_script(&place, stubborn);
    let mut run = place.command(&format!("{ENDLESS} {option}"));
    let mut run = run.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    let started = processes(&place, "started", 2);
    assert!(started.iter().all(|process| !is_gone(*process)));
    signal(run.id(), "KILL");
    wait(&mut run, "a killed run");
    let since = Instant::now();
    wait_until("the program ends", || started.iter().all(|process| is_gone(*process)));
    assert!(since.elapsed() < Duration::from_secs(15), "{:?}", since.elapsed());
}

#[test]
fn it_has_time_to_finish_after_a_run_that_ended_in_order() {
    let finishes = |ranks: &str| {
        let place = Place::new();
        // More than the three seconds that a killed run would leave it.
        let option = with_script(&place, "cat > got.jsonl\nsleep 3.5\necho done > finished\n");
        place.run(&format!("train run.toml --out out --set train.steps=6 {option} {ranks}")).succeeds();
        wait_until("the program's end", || place.exists("finished"));
        assert_eq!(place.read("got.jsonl"), place.read("out/metrics.jsonl"));
    };
    thread::scope(|scope| {
        for ranks in ["", "--ranks 2"] {
            scope.spawn(move || finishes(ranks));
        }
    });
}

#[test]
fn it_has_the_limit_on_open_files_that_the_user_gave() {
    let place = Place::new();
    let option = with_script(&place, "ulimit -S -n > limit.new\nmv limit.new limit\ncat > /dev/null\n");
    for ranks in ["", "--ranks 2"] {
        let train = format!("train run.toml --out out --set train.steps=3 {option} {ranks}");
        let mut shell = Command::new("sh");
        shell.args(["-c", "ulimit -S -n 200; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_xtrain")]);
        shell.args(train.split_whitespace());
        finish(place.settle(shell), &train).succeeds();
        wait_until("the program", || place.exists("limit"));
        assert_eq!(place.read("limit"), b"200\n", "{train}");
        fs::remove_file(place.path("limit")).expect("a file");
        fs::remove_dir_all(place.path("out")).expect("a run");
    }
}

#[test]
fn it_inherits_no_variable_of_a_launch() {
    let place = Place::new();
    let option = with_script(&place, "env > variables.new\nmv variables.new variables\ncat > /dev/null\n");
    // Ranks that xtrain starts, and the only rank of another launcher, in a job of Slurm.
    for ranks in ["--ranks 2", ""] {
        let mut command =
            place.command(&format!("train run.toml --out out --set train.steps=6 {option} {ranks}"));
        command.envs([("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")]);
        command.envs([
            ("PMI_RANK", "0"),
            ("PMI_SIZE", "1"),
            ("PMIX_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "1"),
        ]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("WANDB_MODE", "offline")]);
        command.env("XTRAIN_SECRET", "0123456789abcdef0123456789abcdef");
        finish(command, "a run with a program").succeeds();
        wait_until("the program", || place.exists("variables"));
        let text = String::from_utf8(place.read("variables")).expect("text");
        let names: Vec<&str> = text.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
        for kept in ["XTRAIN_RUN", "SLURM_JOB_ID", "WANDB_MODE", "PATH"] {
            assert!(names.contains(&kept), "{kept}: {names:?}");
        }
        for name in &names {
            let is_of_a_launch =
                ["RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "PMI", "OMPI_", "SLURM_STEP", "SLURM_PROCID"]
                    .iter()
                    .any(|start| name.starts_with(start));
            assert!(!is_of_a_launch && !["XTRAIN_SECRET", "XTRAIN_LAUNCHER"].contains(name), "{name}");
        }
        fs::remove_file(place.path("variables")).expect("a file");
        fs::remove_dir_all(place.path("out")).expect("a run");
    }
}

#[test]
fn a_command_of_xtrain_runs_in_it_beside_ranks() {
    let place = Place::new();
    let xtrain = env!("CARGO_BIN_EXE_xtrain");
    let script =
        format!("cat > /dev/null\n{xtrain} report $XTRAIN_RUN --out page.new && mv page.new page.html\n");
    let option = with_script(&place, &script);
    place.run(&format!("train run.toml --out out --ranks 2 --set train.steps=6 {option}")).succeeds();
    wait_until("a page", || place.exists("page.html"));
}

#[test]
fn a_flood_fills_no_disk() {
    let place = Place::new();
    let option = with_script(&place, "echo the first line\nyes flood\n");
    place.run(&format!("train run.toml --out out --set train.steps=200 {option}")).succeeds();
    wait_until("the log", || place.exists("out/command.log"));
    let log = place.read("out/command.log");
    assert!(log.len() < 5 << 20, "{} bytes", log.len());
    assert!(log.starts_with(b"the first line\n"));
}

#[test]
fn a_program_that_cannot_be_executed_is_refused_before_the_run_begins() {
    let place = Place::new();
    place.write("data.sh", b"no program");
    for (program, why) in
        [("./data.sh", "Permission denied"), ("./none", "No such file"), ("..", "Permission denied")]
    {
        let option = format!("--set log.command=[\"{program}\"]");
        for ranks in ["", "--ranks 2"] {
            let ran = place.run(&format!("train run.toml --out out {option} {ranks}"));
            assert_eq!(ran.code(), Some(2), "{}", ran.stderr);
            assert!(ran.stderr.contains(&format!("cannot start {program}: {why}")), "{}", ran.stderr);
        }
    }
    place.run("train run.toml --out out --set train.steps=3").succeeds();
}
