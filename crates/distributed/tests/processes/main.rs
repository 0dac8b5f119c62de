//! Launchers and ranks as real processes: copies of this program.

mod roles;

use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

/// More than a loaded machine needs for anything.
const LONG: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() == Some("role") {
        return roles::play(&args.collect::<Vec<_>>());
    }
    macro_rules! trials {
        ($($name:ident),* $(,)?) => {
            vec![$(Trial::test(stringify!($name), || { $name(); Ok::<(), Failed>(()) })),*]
        };
    }
    let trials = trials![
        ranks_of_a_launch_form_one_run,
        rank_0_has_the_terminal,
        the_first_failure_ends_all_and_gives_the_exit_code,
        a_rank_that_ignores_sigterm_is_killed,
        signals_reach_all_ranks,
        a_killed_launcher_leaves_no_process,
        a_rank_without_its_launcher_ends,
        a_rank_killed_in_a_collective_is_the_cause_on_all_ranks,
        a_stopped_rank_ends_the_run,
        a_process_that_a_rank_left_behind_does_not_hold_the_launcher,
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// A launcher with its ranks.
struct Launched {
    process: Child,
    lines: Receiver<String>,
}

/// The end of a launcher.
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: Vec<String>,
}

fn launch(ranks: usize, role: &[&str]) -> Launched {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(["role", "launcher", &ranks.to_string()]).args(role);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().expect("a launcher");
    let stderr = process.stderr.take().expect("a pipe");
    let (to, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            // The test may have ended.
            let _ = to.send(line);
        }
    });
    Launched { process, lines }
}

impl Launched {
    /// Waits for lines that contain `text` on as many ranks. Returns them.
    fn wait_for(&self, text: &str, count: usize) -> Vec<String> {
        let since = Instant::now();
        let mut found = Vec::new();
        while found.len() < count {
            let rest = LONG.checked_sub(since.elapsed()).expect("the lines come");
            let line = self.lines.recv_timeout(rest).expect("the lines come");
            if line.contains(text) {
                found.push(line);
            }
        }
        found
    }

    /// The process numbers of the ranks, in order. Ranks print `ready <rank> <number>`.
    fn ready(&self, ranks: usize) -> Vec<Pid> {
        let mut ready: Vec<(usize, i32)> = self
            .wait_for("ready ", ranks)
            .iter()
            .map(|line| {
                let words: Vec<&str> = line.split("ready ").nth(1).expect("words").split(' ').collect();
                (words[0].parse().expect("a rank"), words[1].parse().expect("a number"))
            })
            .collect();
        ready.sort_unstable();
        ready.into_iter().map(|(_, pid)| Pid::from_raw(pid).expect("a number")).collect()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).expect("it runs");
    }

    fn end(mut self) -> Ended {
        let since = Instant::now();
        drop(self.process.stdin.take());
        let status = loop {
            if let Some(status) = self.process.try_wait().expect("our process") {
                break status;
            }
            if since.elapsed() > LONG {
                self.process.kill().expect("our process");
                panic!("the launcher does not end: {:?}", self.lines.try_iter().collect::<Vec<_>>());
            }
            thread::sleep(Duration::from_millis(10));
        };
        let mut stdout = String::new();
        self.process.stdout.take().expect("a pipe").read_to_string(&mut stdout).expect("text");
        Ended { code: status.code(), stdout, stderr: self.lines.iter().collect() }
    }
}

/// True if the process has ended. One that nobody has waited for yet has.
fn is_gone(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.map_or(true, |stat| stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')))
}

fn until(what: &str, is_true: impl Fn() -> bool) {
    let since = Instant::now();
    while !is_true() {
        assert!(since.elapsed() < LONG, "{what}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn ranks_of_a_launch_form_one_run() {
    let ended = launch(4, &["collectives"]).end();
    assert_eq!(ended.code, Some(0), "{:?}", ended.stderr);
    assert_eq!(ended.stdout, "rank 0 of 4: all collectives are right\n");
    let mut warnings = ended.stderr;
    warnings.sort();
    assert_eq!(warnings, ["[rank 1] a warning", "[rank 2] a warning", "[rank 3] a warning", "a warning"]);
}

fn rank_0_has_the_terminal() {
    let mut launched = launch(3, &["echo"]);
    launched.process.stdin.as_mut().expect("a pipe").write_all(b"typed\n").expect("a reader");
    let ended = launched.end();
    assert_eq!((ended.code, &*ended.stdout), (Some(0), "rank 0 read: typed\n"));
    assert!(ended.stderr.is_empty(), "{:?}", ended.stderr);
}

fn the_first_failure_ends_all_and_gives_the_exit_code() {
    let launched = launch(3, &["fail", "1", "7"]);
    let ended = launched.end();
    assert_eq!(ended.code, Some(7), "{:?}", ended.stderr);
    // The standard output of the rank that failed, and of no other.
    assert!(ended.stderr.contains(&"[rank 1] printed by rank 1".to_owned()), "{:?}", ended.stderr);
    assert!(!ended.stderr.iter().any(|line| line.contains("printed by rank 2")), "{:?}", ended.stderr);
}

fn a_rank_that_ignores_sigterm_is_killed() {
    let launched = launch(3, &["stubborn"]);
    let pids = launched.ready(3);
    kill_process(pids[1], Signal::KILL).expect("it runs");
    let ended = launched.end();
    assert_eq!(ended.code, Some(137), "{:?}", ended.stderr);
    assert!(ended.stderr.iter().any(|line| line.starts_with("[rank 1] ended by signal 9 (SIGKILL)")));
    assert!(pids.into_iter().all(is_gone));
}

fn signals_reach_all_ranks() {
    for (signal, name) in [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM"), (Signal::USR1, "SIGUSR1")] {
        let launched = launch(3, &["signals"]);
        launched.ready(3);
        launched.signal(signal);
        let ended = launched.end();
        let lines = ended.stderr.iter().filter(|line| line.ends_with(name)).count();
        assert_eq!((ended.code, lines), (Some(0), 3), "{name}: {:?}", ended.stderr);
    }
}

fn a_killed_launcher_leaves_no_process() {
    let mut launched = launch(3, &["sleep"]);
    let pids = launched.ready(3);
    launched.process.kill().expect("it runs");
    launched.process.wait().expect("our process");
    until("all ranks end", || pids.iter().all(|pid| is_gone(*pid)));
}

fn a_rank_without_its_launcher_ends() {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    // The first process of the system is not its parent.
    let output = command.args(["role", "sleep"]).env("XTRAIN_LAUNCHER", "1").output().expect("a process");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("has ended"));
}

fn a_rank_killed_in_a_collective_is_the_cause_on_all_ranks() {
    for culprit in [0, 2] {
        let launched = launch(4, &["loop"]);
        let pids = launched.ready(4);
        kill_process(pids[culprit], Signal::KILL).expect("it runs");
        let since = Instant::now();
        let ended = launched.end();
        assert!(since.elapsed() < LONG / 2);
        assert_eq!(ended.code, Some(137), "{:?}", ended.stderr);
        let cause = format!("error: rank {culprit} (");
        let is_cause = |line: &&String| {
            line.contains(&cause) && line.contains("the process has gone: its connection was closed")
        };
        assert_eq!(ended.stderr.iter().filter(is_cause).count(), 3, "{:?}", ended.stderr);
        assert!(pids.into_iter().all(is_gone));
    }
}

fn a_stopped_rank_ends_the_run() {
    let launched = launch(3, &["loop"]);
    let pids = launched.ready(3);
    kill_process(pids[1], Signal::STOP).expect("it runs");
    let ended = launched.end();
    assert_eq!(ended.code, Some(1), "{:?}", ended.stderr);
    let is_cause =
        |line: &&String| line.contains("error: rank 1 (") && line.contains("nothing came from it for");
    assert_eq!(ended.stderr.iter().filter(is_cause).count(), 2, "{:?}", ended.stderr);
    assert!(pids.into_iter().all(is_gone));
}

fn a_process_that_a_rank_left_behind_does_not_hold_the_launcher() {
    let since = Instant::now();
    let ended = launch(2, &["orphan"]).end();
    assert_eq!(ended.code, Some(0), "{:?}", ended.stderr);
    // The process that is left sleeps for 40 s.
    assert!(since.elapsed() < LONG / 2);
}
