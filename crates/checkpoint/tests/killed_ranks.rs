//! A kill of any rank at any moment of a save leaves the step complete or absent, shown with real processes.
//!
//! The tests run this test binary again as a child process for each rank, which runs only `rank`. Ranks talk
//! to this process by lines of text, as they do to rank 0 over a connection.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::ops::Range;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use xtrain_checkpoint::{Begun, Checkpoint, CheckpointStore};

use common::{content, random, small_state};

const FOLDER: &str = "XTRAIN_CHECKPOINT_TEST_FOLDER";
const RANK: &str = "XTRAIN_CHECKPOINT_TEST_RANK";
/// The point at which the rank stops and waits to be killed.
const STOP: &str = "XTRAIN_CHECKPOINT_TEST_STOP";

const WORLD: usize = 3;

/// Rank 2 has no row of the last tensors.
fn shares(rank: usize) -> Vec<Range<usize>> {
    let large = [0..20, 20..21, 21..64][rank].clone();
    vec![large, [0..30, 30..33, 0..0][rank].clone(), [0..0, 0..1, 0..0][rank].clone()]
}

/// The job of a child process; not a test.
#[test]
#[ignore = "the other tests run it in a child process"]
fn rank() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let rank: usize = std::env::var(RANK).unwrap().parse().unwrap();
    let store = CheckpointStore::open(Path::new(&folder)).unwrap();
    println!("ready");
    match rank {
        0 => lead(&store),
        _ => follow(&store, rank),
    }
}

/// Saves one step after another: says the name of the folder, and reads the reports of the other ranks.
fn lead(store: &CheckpointStore) {
    let mut lines = std::io::stdin().lines();
    for step in store.latest().unwrap().map_or(0, |latest| latest.step() + 1).. {
        let documents = [("trainer".to_string(), json!({ "step": step }))];
        let Begun::Writing(writer) = store.begin(step, &small_state(), &documents).unwrap() else {
            panic!("step {step} exists")
        };
        stop_at("begun");
        println!("write {step} {}", writer.name());
        let own = write(writer.writer(), 0, step);
        println!("report {}", hex(&own));
        let mut reports = vec![own];
        reports.extend((1..WORLD).map(|_| bytes(&lines.next().unwrap().unwrap())));
        stop_at("reports");
        writer.finish(&reports).unwrap();
        stop_at("finished");
        store.retain(2, 0, &[]).unwrap();
        println!("saved {step}");
    }
}

/// Writes its rows of every step that standard input names.
fn follow(store: &CheckpointStore, rank: usize) {
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (step, name) = line.split_once(' ').unwrap();
        let writer = store.join(name).unwrap();
        stop_at("joined");
        let report = write(&writer, rank, step.parse().unwrap());
        println!("report {}", hex(&report));
    }
}

fn write(writer: &xtrain_checkpoint::RankWriter, rank: usize, step: u64) -> Vec<u8> {
    let (specs, rows) = (small_state(), shares(rank));
    let mut read = |i: usize| {
        if i > 0 || rank == 2 {
            stop_at("half");
        }
        let row_bytes = specs[i].row_bytes();
        Ok(content(&specs[i], step)[rows[i].start * row_bytes..rows[i].end * row_bytes].to_vec())
    };
    let report = writer.write(rank, &specs, &rows, &mut read).unwrap();
    stop_at("written");
    report
}

fn stop_at(point: &str) {
    if std::env::var(STOP).is_ok_and(|stop| stop == point) {
        println!("stopped");
        std::thread::sleep(Duration::from_secs(600));
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    digits.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

/// A child process that is a rank. Killed when dropped.
struct Rank {
    child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Rank {
    fn start(folder: &Path, rank: usize, stop: Option<&str>) -> Rank {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "rank", "--ignored", "--nocapture"]);
        command.env(FOLDER, folder).env(RANK, rank.to_string());
        if let Some(stop) = stop {
            command.env(STOP, stop);
        }
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut rank = Rank { child, input, lines: BufReader::new(output).lines() };
        assert_eq!(rank.hear(&["ready"]), Some("ready".to_string()));
        rank
    }

    /// The next line that starts with one of these words; `None` when the process has ended.
    fn hear(&mut self, words: &[&str]) -> Option<String> {
        self.lines.by_ref().map_while(Result::ok).find(|line| words.iter().any(|word| line.starts_with(word)))
    }

    /// Says a line. A process that has ended does not hear it.
    fn tell(&mut self, line: &str) {
        let _ = writeln!(self.input, "{line}");
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(folder: &Path, stopped: usize, stop: Option<&str>) -> Vec<Rank> {
    (0..WORLD).map(|rank| Rank::start(folder, rank, stop.filter(|_| rank == stopped))).collect()
}

/// Relays what ranks say for one step. `None` as soon as one has ended or stopped.
fn relay(ranks: &mut [Rank]) -> Option<()> {
    let word = |rank: &mut Rank, word: &str| {
        rank.hear(&[word, "stopped"])?.strip_prefix(word).map(|rest| rest.trim().to_string())
    };
    let step = word(&mut ranks[0], "write")?;
    ranks[1..].iter_mut().for_each(|rank| rank.tell(&step));
    word(&mut ranks[0], "report")?;
    for rank in 1..ranks.len() {
        let report = word(&mut ranks[rank], "report")?;
        ranks[0].tell(&report);
    }
    word(&mut ranks[0], "saved").map(drop)
}

fn assert_loads(checkpoint: &Checkpoint) {
    let (specs, step) = (small_state(), checkpoint.step());
    let sink = &mut |i: usize, bytes: &[u8]| {
        assert!(bytes == content(&specs[i], step), "{} of step {step}", specs[i].name);
        Ok(())
    };
    checkpoint.load(&specs, sink).unwrap();
    assert_eq!(checkpoint.document("trainer").unwrap(), json!({ "step": step }));
}

fn has_temporary(folder: &Path) -> bool {
    let mut entries = fs::read_dir(folder).unwrap().flatten();
    entries.any(|entry| entry.file_name().to_string_lossy().contains(".tmp-"))
}

#[test]
fn a_rank_killed_at_any_point_leaves_the_older_step_and_a_folder_until_the_last_writer_ends() {
    for (killed, point) in [
        (0, "begun"),
        (0, "half"),
        (0, "written"),
        (0, "reports"),
        (0, "finished"),
        (1, "joined"),
        (1, "half"),
        (1, "written"),
        (2, "half"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut ranks = start(dir.path(), WORLD, None);
        relay(&mut ranks).expect("step 0 is saved");
        drop(ranks);
        let mut ranks = start(dir.path(), killed, Some(point));
        assert_eq!(relay(&mut ranks), None, "rank {killed} stops at '{point}'");
        ranks[killed].kill();
        let store = CheckpointStore::open(dir.path()).unwrap();
        let expected = if point == "finished" { 1 } else { 0 };
        assert_eq!(store.latest().unwrap().unwrap().step(), expected, "rank {killed} at '{point}'");
        // Rank 0 lives and writes; a sweep leaves it alone.
        assert!(killed == 0 || has_temporary(dir.path()), "rank {killed} at '{point}'");
        drop(ranks);
        let store = CheckpointStore::open(dir.path()).unwrap();
        assert!(!has_temporary(dir.path()), "rank {killed} at '{point}'");
        assert_loads(&store.latest().unwrap().unwrap());
        // A run that continues saves the step.
        let mut ranks = start(dir.path(), WORLD, None);
        relay(&mut ranks).expect("the next step is saved");
        assert_loads(&store.checkpoint(expected + 1).unwrap());
    }
}

#[test]
fn a_folder_whose_first_writer_was_killed_stays_while_another_writes_into_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut lead = Rank::start(dir.path(), 0, Some("reports"));
    let name = lead.hear(&["write"]).unwrap().rsplit(' ').next().unwrap().to_string();
    let store = CheckpointStore::open(dir.path()).unwrap();
    let writer = store.join(&name).unwrap();
    lead.kill();
    CheckpointStore::open(dir.path()).unwrap();
    let report = write(&writer, 1, 0);
    assert!(!report.is_empty() && dir.path().join(&name).join("rank-00001-00001.safetensors").exists());
    drop(writer);
    // A process that another test has just forked holds a copy of the lock until it runs its own program.
    let is_empty = || {
        CheckpointStore::open(dir.path()).unwrap();
        fs::read_dir(dir.path()).unwrap().count() == 0
    };
    let begun = Instant::now();
    while !is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(10), "the folder is not removed");
    }
    assert!(store.join(&name).unwrap_err().to_string().contains("does not see the folder"));
}

#[test]
fn ranks_killed_at_random_moments_leave_a_complete_checkpoint_whose_step_never_goes_back() {
    let dir = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let mut random = random();
    let (mut newest, mut kills, mut leftovers) = (None, 0, 0);
    while kills < 30 && begun.elapsed() < Duration::from_secs(30) {
        let mut ranks = start(dir.path(), WORLD, None);
        let killed = random(WORLD as u64) as usize;
        let (pid, moment) = (ranks[killed].child.id().to_string(), Duration::from_micros(random(100_000)));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(moment);
                assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
            });
            while relay(&mut ranks).is_some() {}
        });
        // The other ranks still run, as in the seconds before they know.
        let while_others_run = CheckpointStore::open(dir.path()).unwrap().latest().unwrap();
        while_others_run.iter().for_each(assert_loads);
        drop(ranks);
        kills += 1;
        leftovers += usize::from(has_temporary(dir.path()));
        let latest = CheckpointStore::open(dir.path()).unwrap().latest().unwrap();
        assert!(!has_temporary(dir.path()));
        let step = latest.as_ref().map(Checkpoint::step);
        assert!(step >= newest, "went back from {newest:?} to {step:?}");
        latest.iter().for_each(assert_loads);
        newest = step;
    }
    assert!(
        newest > Some(0) && leftovers > 0,
        "{kills} kills, {leftovers} of them in a save, step {newest:?}"
    );
}
