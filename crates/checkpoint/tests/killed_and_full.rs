//! Killed processes and full disks never damage checkpoints or exports, shown with real processes.
//!
//! The tests run this test binary again as a child process that runs only `child`; environment variables
//! select its job.

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use xtrain_checkpoint::hf::{ExportDtype, ExportOptions, NameEntry, NameMap, NamePart, export, import};
use xtrain_checkpoint::{Checkpoint, CheckpointStore};

use common::{content, random, small_state};

const JOB: &str = "XTRAIN_CHECKPOINT_TEST_JOB";
const FOLDER: &str = "XTRAIN_CHECKPOINT_TEST_FOLDER";

fn names() -> NameMap {
    let part = NamePart { hf_name: "w".to_string(), rows: 50 };
    let entry = NameEntry { name: "w".to_string(), shape: vec![50, 1000], parts: vec![part], fp8: None };
    NameMap { entries: vec![entry], ..NameMap::default() }
}

fn overwrite() -> ExportOptions {
    ExportOptions { dtype: ExportDtype::Fp32, overwrite: true, ..ExportOptions::default() }
}

/// The job of a child process; not a test.
#[test]
#[ignore = "the other tests run it in a child process"]
fn child() {
    let (Ok(job), Ok(folder)) = (std::env::var(JOB), std::env::var(FOLDER)) else { return };
    match job.as_str() {
        "save" => save_for_ever(Path::new(&folder)),
        "repair" => repair_for_ever(Path::new(&folder)),
        "export" => export_for_ever(Path::new(&folder)),
        "full" => fill_the_disk(Path::new(&folder)),
        other => panic!("no job '{other}'"),
    }
}

fn save_for_ever(folder: &Path) {
    let store = CheckpointStore::open(folder).unwrap();
    let mut step = store.latest().unwrap().map_or(0, |checkpoint| checkpoint.step() + 1);
    println!("started");
    loop {
        save_step(&store, step);
        store.retain(2, 0, &[]).unwrap();
        step += 1;
    }
}

fn save_step(store: &CheckpointStore, step: u64) {
    let specs = small_state();
    let documents = [("trainer".to_string(), json!({ "step": step }))];
    store.save(step, &specs, &mut |i| Ok(content(&specs[i], step)), &documents).unwrap();
}

/// Damages step 2 and saves it again, in a loop.
fn repair_for_ever(folder: &Path) {
    let store = CheckpointStore::open(folder).unwrap();
    let path = folder.join("step-2/rank-00000-00001.safetensors");
    println!("started");
    loop {
        save_step(&store, 2);
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"rot", file.metadata().unwrap().len() - 9).unwrap();
    }
}

fn export_for_ever(folder: &Path) {
    println!("started");
    for value in 0.. {
        export(folder, &names(), &mut |_| Ok(vec![value as f32; 50_000]), &[], &overwrite()).unwrap();
    }
}

/// Runs both writers under a limit of some KiB on file sizes.
fn fill_the_disk(folder: &Path) {
    let store = CheckpointStore::open(folder).unwrap();
    let specs = small_state();
    let error = store.save(2, &specs, &mut |i| Ok(content(&specs[i], 2)), &[]).unwrap_err();
    assert!(
        error.to_string().contains("step-2.tmp-") && error.to_string().contains("rank-00000-00001"),
        "{error}"
    );
    assert!(error.to_string().contains("cannot write") && error.is_users(), "{error}");
    let model = folder.join("model");
    let error = export(&model, &names(), &mut |_| Ok(vec![1.0; 50_000]), &[], &overwrite()).unwrap_err();
    assert!(error.to_string().contains("model.safetensors: cannot write"), "{error}");
    println!("refused");
}

fn child_command(job: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--ignored", "--nocapture"]).env(JOB, job).env(FOLDER, folder);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts the child, waits until it has started its job, and kills it (SIGKILL) after `moment`.
fn kill_soon(job: &str, folder: &Path, moment: Duration) {
    let mut child = child_command(job, folder).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let started = lines.any(|line| line.unwrap().contains("started"));
    if started {
        std::thread::sleep(moment);
    }
    let failed = child.try_wait().unwrap();
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(started && failed.is_none(), "the child failed: {}", String::from_utf8_lossy(&output.stderr));
}

/// Random delays of up to `most`, different in every run of the test.
fn moments(most: Duration) -> impl Iterator<Item = Duration> {
    let mut random = random();
    std::iter::repeat_with(move || Duration::from_micros(random(most.as_micros() as u64)))
}

fn assert_loads(checkpoint: &Checkpoint) {
    let specs = small_state();
    let mut loaded = 0;
    let step = checkpoint.step();
    checkpoint
        .load(&specs, &mut |i, bytes| {
            assert!(bytes == content(&specs[i], step), "{} of step {step}", specs[i].name);
            loaded += 1;
            Ok(())
        })
        .unwrap();
    assert_eq!(loaded, specs.len());
    assert_eq!(checkpoint.document("trainer").unwrap(), json!({ "step": step }));
}

#[test]
fn a_killed_run_leaves_a_complete_checkpoint_whose_step_never_goes_back() {
    let dir = tempfile::tempdir().unwrap();
    let started = Instant::now();
    let (mut newest, mut kills, mut leftovers) = (None, 0, 0);
    for moment in moments(Duration::from_millis(150)).take(60) {
        kill_soon("save", dir.path(), moment);
        kills += 1;
        let names: Vec<PathBuf> =
            fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.path()).collect();
        leftovers += usize::from(names.iter().any(|name| name.to_string_lossy().contains(".tmp-")));
        let latest = CheckpointStore::open(dir.path()).unwrap().latest().unwrap();
        assert!(latest.is_some() || newest.is_none(), "the checkpoints are missing after {kills} kills");
        if let Some(latest) = latest {
            assert_loads(&latest);
            assert!(newest.is_none_or(|newest| latest.step() >= newest), "went back to {}", latest.step());
            newest = Some(latest.step());
        }
        let swept = fs::read_dir(dir.path()).unwrap().flatten();
        assert!(swept.into_iter().all(|entry| !entry.file_name().to_string_lossy().contains(".tmp-")));
        // Stop early on a slow disk.
        if started.elapsed() > Duration::from_secs(40) {
            break;
        }
    }
    assert!(newest > Some(0), "{kills} kills, but no second checkpoint");
    assert!(leftovers > 0, "{kills} kills, but none during a write");
}

#[test]
fn a_kill_while_a_step_is_repaired_leaves_it_damaged_or_intact_but_never_missing() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    save_step(&store, 1);
    save_step(&store, 2);
    let (mut intact, mut leftovers) = (0, 0);
    for moment in moments(Duration::from_millis(60)).take(25) {
        kill_soon("repair", dir.path(), moment);
        leftovers += usize::from(fs::read_dir(dir.path()).unwrap().count() > 2);
        let latest = CheckpointStore::open(dir.path()).unwrap().latest().unwrap().unwrap();
        assert_eq!(latest.step(), 2, "step 2 has all its files");
        if latest.verify().is_ok() {
            assert_loads(&latest);
            intact += 1;
        }
        let older = store.newest_intact_before(2).unwrap().expect("step 1 is intact");
        assert!(older.step() == 1 && fs::read_dir(dir.path()).unwrap().count() == 2);
    }
    assert!(intact < 25 && leftovers > 0, "{intact} intact, {leftovers} leftovers: no kill hit a save");
    save_step(&store, 2);
    assert_loads(&store.checkpoint(2).unwrap());
}

#[test]
fn a_killed_export_loses_neither_the_old_folder_nor_the_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    export(&model, &names(), &mut |_| Ok(vec![-1.0; 50_000]), &[], &overwrite()).unwrap();
    for moment in moments(Duration::from_millis(60)).take(25) {
        kill_soon("export", &model, moment);
        let is_old = |path: &PathBuf| path.to_string_lossy().contains("model.old-");
        let names_in = || fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.path());
        let place =
            if model.exists() { model.clone() } else { names_in().find(is_old).expect("a complete folder") };
        let mut values = Vec::new();
        import(&place, &names(), &mut |_, found| {
            values = found.to_vec();
            Ok(())
        })
        .unwrap();
        assert!(values.len() == 50_000 && values.iter().all(|value| *value == values[0]));
    }
    export(&model, &names(), &mut |_| Ok(vec![-1.0; 50_000]), &[], &overwrite()).unwrap();
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["model"], "the next export cleans up");
}

#[test]
fn a_full_disk_is_an_error_that_names_the_file_and_leaves_the_older_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    let specs = small_state();
    let documents = [("trainer".to_string(), json!({ "step": 1 }))];
    store.save(1, &specs, &mut |i| Ok(content(&specs[i], 1)), &documents).unwrap();
    // A limit on file sizes simulates the full disk without privileges. Ignoring its signal turns it into an
    // error.
    let plain = child_command("full", dir.path());
    let mut command = Command::new("sh");
    command
        .args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$0\" \"$@\""])
        .arg(plain.get_program())
        .args(plain.get_args());
    command.env(JOB, "full").env(FOLDER, dir.path());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("refused"), "{text}");
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["step-1"]);
    assert_loads(&store.latest().unwrap().unwrap());
}
