//! Saves in progress while training continues. The function that writes files is replaced, so that no test
//! depends on their duration.

mod ranks;
mod together;

use super::open::{Opened, open};
use super::snapshot::{CheckpointWriter, Snapshot};
use super::watch::Watch;
use super::{Observer, Outcome, Start};
use crate::corpus::Notice;
use crate::error::RunError;
use crate::folder::RunFolder;
use crate::position::position;
use crate::process_group::ProcessGroup;
use std::io::{Error, ErrorKind};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use xtrain_checkpoint::{CheckpointError, CheckpointStore};
use xtrain_config::{Config, Parsed};
use xtrain_report::metrics::Event;

/// Upper bound of any wait in these tests.
const PATIENCE: Duration = Duration::from_secs(60);

fn run_file(folder: &Path, out: &str) -> Parsed {
    let text = folder.join("a.txt");
    std::fs::write(&text, "the ship sails at dawn and the river runs to the sea\n".repeat(40))
        .expect("a text");
    let file = "[model]\ndim = 16\nlayers = 1\nheads = 2\n[data]\ntokenizer = 'bytes'\nseq_len = 16\nheld_out = 0\n\
                [schedule]\nkind = 'constant'\n[train]\nsteps = 16\nbatch_size = 2\n[checkpoint]\nevery = 4\nkeep_last = 9\n\
                [log]\nevery = 1\ntensorboard = false\n";
    let set = [
        format!("data.train={}", text.display()),
        format!("data.cache_dir={}", folder.join("cache").display()),
        format!("train.out={}", folder.join(out).display()),
    ];
    Config::parse(Path::new("run.toml"), file.as_bytes(), &set).expect("a run file")
}

/// Events of a run in order: steps when they were done, checkpoints when they were complete.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Step(u64),
    Saved(u64),
}

struct Recorder {
    seen: Vec<Seen>,
    /// The last step that was done.
    done: &'static AtomicU64,
}

impl Observer for Recorder {
    fn notice(&mut self, _: Notice) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
    fn started(&mut self, _: &Config, _: &str, _: &str, _: u64, _: u64) {}
    fn stepped(&mut self, done: u64, _: u64) {
        self.seen.push(Seen::Step(done));
        self.done.store(done, Ordering::SeqCst);
    }
    fn event(&mut self, event: &Event, _: u64) {
        if let Event::Checkpoint(checkpoint) = event {
            self.seen.push(Seen::Saved(checkpoint.step));
        }
    }
    fn wrote(&mut self, _: &str, _: &Path) {}
}

/// Runs the training after `prepare` has changed its saves.
fn run(
    parsed: &Parsed,
    done: &'static AtomicU64,
    prepare: impl FnOnce(&mut CheckpointWriter),
) -> (Result<Outcome, RunError>, Vec<Seen>) {
    let mut recorder = Recorder { seen: Vec::new(), done };
    let Ok(Opened::Run(mut run)) = open(parsed, Start::New, &ProcessGroup::alone(), &mut recorder, &|| false)
    else {
        panic!("it does not open")
    };
    prepare(&mut run.checkpoints);
    let ended = run.go(Watch::new(&AtomicBool::new(false), Instant::now(), None), &mut recorder);
    (ended, recorder.seen)
}

fn at(seen: &[Seen], what: Seen) -> usize {
    seen.iter().position(|t| *t == what).unwrap_or_else(|| panic!("{what:?} is not among {seen:?}"))
}

#[test]
fn steps_are_made_while_a_checkpoint_is_written() {
    static DONE: AtomicU64 = AtomicU64::new(0);
    /// Ends only when three more steps are done, or all.
    fn write(store: &CheckpointStore, of: &Snapshot) -> Result<PathBuf, RunError> {
        let begun = Instant::now();
        while DONE.load(Ordering::SeqCst) < (of.step + 3).min(16) {
            assert!(begun.elapsed() < PATIENCE, "no step is made while step {} is written", of.step);
            std::thread::yield_now();
        }
        Snapshot::write(store, of)
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (ended, seen) = run(&run_file(folder.path(), "out"), &DONE, |saved| saved.write = write);
    assert_eq!(ended.expect("a run"), Outcome::Finished);
    for step in [4, 8, 12] {
        let saved = at(&seen, Seen::Saved(step));
        assert!(saved > at(&seen, Seen::Step(step + 3)), "{seen:?}");
        // No save begins before the last one is done.
        assert!(saved < at(&seen, Seen::Saved(step + 4)), "{seen:?}");
    }
    // A checkpoint written meanwhile holds the state of its own step, as if training had waited for each
    // save.
    let waiting =
        run(&run_file(folder.path(), "waiting"), &DONE, |saved| saved.available_bytes = || Some(0)).1;
    for step in [4, 8, 12, 16] {
        assert_eq!(at(&waiting, Seen::Saved(step)), at(&waiting, Seen::Step(step)) + 1, "{waiting:?}");
        let state = |out: &str| {
            let file = format!("{out}/checkpoints/step-{step}/rank-00000-00001.safetensors");
            std::fs::read(folder.path().join(file)).expect("a state")
        };
        assert!(state("out") == state("waiting"), "step {step}");
    }
}

#[test]
fn a_save_that_fails_while_steps_are_made_ends_the_run_and_leaves_the_one_before() {
    static DONE: AtomicU64 = AtomicU64::new(0);
    fn write(store: &CheckpointStore, of: &Snapshot) -> Result<PathBuf, RunError> {
        if of.step < 8 {
            return Snapshot::write(store, of);
        }
        let source = Error::from(ErrorKind::StorageFull);
        Err(CheckpointError::Io { path: PathBuf::from("step-8"), action: "write", source }.into())
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (ended, seen) = run(&run_file(folder.path(), "out"), &DONE, |saved| saved.write = write);
    let error = ended.expect_err("it fails");
    assert!(error.is_users() && error.to_string().starts_with("step-8: cannot write"), "{error}");
    // The next save would have begun after step 12.
    assert!(!seen.contains(&Seen::Step(13)) && !seen.contains(&Seen::Saved(8)), "{seen:?}");
    let kept = position(&RunFolder::new(folder.path().join("out"))).expect("checkpoints").expect("one");
    assert_eq!(kept.step, 4);
}

#[test]
fn a_save_that_is_under_way_when_the_steps_end_badly_is_completed() {
    static DONE: AtomicU64 = AtomicU64::new(0);
    let folder = tempfile::tempdir().expect("a folder");
    let mut recorder = Recorder { seen: Vec::new(), done: &DONE };
    let parsed = run_file(folder.path(), "out");
    let Ok(Opened::Run(mut run)) =
        open(&parsed, Start::New, &ProcessGroup::alone(), &mut recorder, &|| false)
    else {
        panic!("it does not open")
    };
    let metrics = run.reports.sink.unsynced().expect("metrics");
    run.position.step = 3;
    assert!(run.checkpoints.can_copy(&mut run.learner));
    let begun = run.checkpoints.begin(
        &mut run.learner,
        &run.corpus.loader,
        &run.config,
        &run.position,
        metrics,
        true,
    );
    assert!(begun.expect("a save").is_none(), "it is under way");
    drop(run);
    let kept = position(&RunFolder::new(folder.path().join("out"))).expect("checkpoints").expect("one");
    assert_eq!(kept.step, 3);
}
