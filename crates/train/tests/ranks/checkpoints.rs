//! Checkpoints that the ranks of one world write, and those of another read.

use crate::world::{World, drawn};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::thread;
use xtrain_checkpoint::hf::{ExportDtype, ExportOptions};
use xtrain_checkpoint::{Checkpoint, CheckpointStore, Others};
use xtrain_data::Tokenizer;
use xtrain_distributed::{Alone, Channel, Communicator, ThreadChannel, ThreadCommunicator};
use xtrain_model::{Description, Recipe};
use xtrain_program::{Reduce, Shard, StateKind};
use xtrain_step::layout::Layout;
use xtrain_step::learner::{Learner, StepResult};
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_train::error::RunError;
use xtrain_train::exchange::{Identity, export, export_checkpoint, import};
use xtrain_train::state_io::{self, CheckpointStep, SavedState, SavedValue};

/// Tensors by name.
type Tensors = BTreeMap<String, Vec<u8>>;

/// Runs `job` on all ranks, as threads.
pub(crate) fn on_ranks<T: Send>(
    ranks: usize,
    job: impl Fn(Arc<ThreadCommunicator>, ThreadChannel) -> T + Sync,
) -> Vec<T> {
    let places = ThreadCommunicator::world(ranks).into_iter().zip(ThreadChannel::world(ranks));
    thread::scope(|scope| {
        let job = &job;
        let spawn = |(communicator, channel)| scope.spawn(move || job(Arc::new(communicator), channel));
        let handles: Vec<_> = places.map(spawn).collect();
        handles.into_iter().map(|handle| handle.join().expect("a rank")).collect()
    })
}

/// Begins at the latest checkpoint in `folder`, or at the initial weights, runs these steps and saves.
/// `number` is the number of the checkpoint.
fn run_part(world: &World, folder: &Path, steps: Range<usize>, number: u64) -> Vec<StepResult> {
    let results = on_ranks(world.ranks, |communicator, channel| {
        let mut learner = world.learner(communicator);
        let store = CheckpointStore::open(folder).expect("a folder");
        match state_io::latest(&store, &channel).expect("checkpoints") {
            None => learner.weights().initialize(5, 0.1).expect("weights"),
            Some(checkpoint) => load(&mut learner, &checkpoint),
        }
        let results: Vec<_> = steps.clone().map(|step| world.step(&mut learner, step)).collect();
        save(&mut learner, &store, &channel, number).expect("a checkpoint");
        results
    });
    results.into_iter().next().expect("a rank")
}

fn load(learner: &mut Learner, checkpoint: &Checkpoint) {
    SavedState::from_learner(learner)
        .load(checkpoint, Others::Refuse, learner)
        .expect("the state of this model");
    learner.weights().refresh().expect("weights");
}

pub(crate) fn save(
    learner: &mut Learner,
    store: &CheckpointStore,
    channel: &dyn Channel,
    number: u64,
) -> Result<(), RunError> {
    let documents = [("step".to_string(), serde_json::json!(number))];
    let step = CheckpointStep { number, documents: &documents };
    SavedState::from_learner(learner).save(learner, store, channel, &step).map(drop)
}

/// The whole tensors of a checkpoint.
pub(crate) fn tensors(folder: &Path, number: u64) -> Tensors {
    let checkpoint =
        CheckpointStore::open(folder).expect("a folder").checkpoint(number).expect("a checkpoint");
    let mut tensors = Tensors::new();
    let specs = checkpoint.tensors();
    let sink = &mut |n: usize, bytes: &[u8]| {
        tensors.insert(specs[n].name.clone(), bytes.to_vec());
        Ok(())
    };
    checkpoint.load(specs, sink).expect("tensors");
    tensors
}

/// Fails if two checkpoints differ in a bit.
pub(crate) fn assert_equal(found: &Tensors, expected: &Tensors, what: &str) {
    assert!(found.keys().eq(expected.keys()), "{what}: other tensors");
    for (name, bytes) in found {
        assert!(*bytes == expected[name], "{what}: {name} differs");
    }
}

/// The world of `ranks` ranks with as many micro-batches in a step as `world`.
fn resized(world: World, ranks: usize, shard: Shard) -> World {
    World { ranks, replicas: 1, shard, micro_steps: world.ranks * world.micro_steps / ranks, ..world }
}

#[test]
fn a_run_in_any_world_that_goes_on_with_other_ranks_has_the_bits_of_one_that_was_not_interrupted() {
    let mut all = Vec::new();
    for recipe in Recipe::ALL {
        for case in 0..4 {
            let shards = if case & 1 == 0 { [Shard::Optimizer; 2] } else { [Shard::Weights, Shard::None] };
            all.push((World { reduce: Reduce::AnyWorld, ..World::alone(recipe, case & 2 == 0, 4) }, shards));
        }
    }
    for (world, shards) in drawn(all) {
        let whole = tempfile::tempdir().expect("a folder");
        let expected = run_part(&world, whole.path(), 0..8, 8);
        let parts = tempfile::tempdir().expect("a folder");
        let mut results = Vec::new();
        for (n, (ranks, replicas)) in [(4, 2), (1, 1), (2, 1), (4, 1)].into_iter().enumerate() {
            let world = World { replicas, ..resized(world, ranks, shards[n % 2]) };
            results.extend(run_part(&world, parts.path(), 2 * n..2 * n + 2, 2 * n as u64 + 2));
        }
        assert_eq!(results, expected, "{world:?}");
        let what = format!("{world:?} in parts");
        assert_equal(&tensors(parts.path(), 8), &tensors(whole.path(), 8), &what);
    }
}

#[test]
fn a_run_that_goes_on_with_other_ranks_stays_near_one_that_was_not_interrupted() {
    let world = World::alone(Recipe::Fp32, true, 12);
    let whole = tempfile::tempdir().expect("a folder");
    let expected = run_part(&world, whole.path(), 0..8, 8);
    let parts = tempfile::tempdir().expect("a folder");
    for (n, ranks) in [4, 1, 3, 2].into_iter().enumerate() {
        let world = resized(world, ranks, if n == 3 { Shard::None } else { Shard::Optimizer });
        let results = run_part(&world, parts.path(), 2 * n..2 * n + 2, 2 * n as u64 + 2);
        for (found, expected) in results.iter().zip(&expected[2 * n..]) {
            let is_near = |x: f64, expected: f64| (x / expected - 1.0).abs() < 1e-5;
            assert!(
                is_near(found.loss, expected.loss) && is_near(found.grad_norm, expected.grad_norm),
                "{ranks} ranks from step {}: {found:?} instead of {expected:?}",
                2 * n
            );
        }
    }
}

#[test]
fn a_checkpoint_passes_through_every_kind_of_world_unchanged() {
    for recipe in [Recipe::Bf16, Recipe::Fp8Delayed, Recipe::Fp8Block] {
        let base = World::alone(recipe, recipe == Recipe::Bf16, 4);
        let folder = tempfile::tempdir().expect("a folder");
        run_part(&base, folder.path(), 0..2, 0);
        let first = tensors(folder.path(), 0);
        assert!(first.values().all(|bytes| bytes.iter().any(|&byte| byte != 0)), "{recipe:?}");
        let (same, any) = (Reduce::SameWorld, Reduce::AnyWorld);
        let kinds = [
            (4, 1, Shard::Optimizer, same),
            (1, 1, Shard::None, any),
            (3, 1, Shard::Optimizer, same),
            (4, 1, Shard::None, any),
            (4, 2, Shard::Weights, any),
            (2, 1, Shard::Optimizer, any),
            (6, 3, Shard::Gradients, Reduce::Fast),
            (4, 1, Shard::None, same),
            (2, 2, Shard::Weights, same),
            (4, 1, Shard::None, any),
        ];
        for (n, (ranks, replicas, shard, reduce)) in kinds.into_iter().enumerate() {
            let micro_steps = (4 / ranks).max(1);
            let world = World { reduce, replicas, micro_steps, ..resized(base, ranks, shard) };
            run_part(&world, folder.path(), 0..0, n as u64 + 1);
            assert_equal(&tensors(folder.path(), n as u64 + 1), &first, &format!("{world:?}"));
        }
    }
}

#[test]
fn a_rank_writes_its_rows_alone_and_rank_0_what_all_have() {
    let world = World { ranks: 4, shard: Shard::Optimizer, ..World::alone(Recipe::Fp8Delayed, false, 1) };
    let folder = tempfile::tempdir().expect("a folder");
    run_part(&world, folder.path(), 0..1, 1);
    let bytes = |rank: usize| -> u64 {
        let name = format!("step-1/rank-{rank:05}-00001.safetensors");
        std::fs::metadata(folder.path().join(name)).expect("a file of the rank").len()
    };
    let largest = (1..4).map(bytes).max().expect("ranks");
    let smallest = (1..4).map(bytes).min().expect("ranks");
    assert!(largest < smallest + smallest / 3, "{smallest} to {largest}");
    // Scales and histories of amaxes.
    assert!(bytes(0) > largest);
}

#[test]
fn the_first_replica_writes_the_rows() {
    let alone = World { ranks: 4, shard: Shard::Weights, ..World::alone(Recipe::Bf16, false, 1) };
    let world = World { replicas: 2, ..alone };
    let folder = tempfile::tempdir().expect("a folder");
    run_part(&world, folder.path(), 0..1, 1);
    let files = std::fs::read_dir(folder.path().join("step-1")).expect("a folder");
    let mut ranks: Vec<String> =
        files.map(|file| file.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    ranks.retain(|name| name.starts_with("rank-"));
    ranks.sort();
    assert_eq!(ranks, ["rank-00000-00001.safetensors", "rank-00001-00001.safetensors"]);
    // Ranks of the second replica have nothing to copy for a save.
    let copied = |rank| {
        let spec = world.spec(rank);
        Layout::from_spec(&spec)
            .expect("a layout")
            .copied_bytes(&programs::training(&spec).expect("a program"))
    };
    assert!(copied(0) > 0 && copied(1) > 0 && [copied(2), copied(3)] == [0, 0]);
}

#[test]
fn an_export_of_a_checkpoint_is_that_of_one_process_and_ranks_import_their_rows_of_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let world = World { ranks: 4, shard: Shard::Optimizer, ..World::alone(Recipe::Bf16, true, 1) };
    run_part(&world, folder.path(), 0..1, 1);
    let saved = tensors(folder.path(), 1);
    let checkpoint = CheckpointStore::open(folder.path()).expect("a folder").checkpoint(1).expect("a step");
    let mut alone = resized(world, 1, Shard::None).learner(Arc::new(Alone));
    load(&mut alone, &checkpoint);
    let (model, numerics) = (alone.spec().model.clone(), alone.spec().numerics());
    let tokenizer = Tokenizer::bytes();
    let identity = Identity::new(None, &model, &tokenizer, None).expect("a model");
    for dtype in ExportDtype::ALL {
        let options = ExportOptions { dtype, max_shard_bytes: 20_000, ..ExportOptions::default() };
        let of = |name: &str| folder.path().join(format!("{name}-{}", dtype.name()));
        let (by_ranks, by_one) = (of("ranks"), of("one"));
        let exported = [
            export_checkpoint(&checkpoint, (&model, &numerics), &identity, &tokenizer, &by_ranks, &options),
            export(alone.weights(), &identity, &tokenizer, &by_one, &options),
        ];
        if dtype == ExportDtype::Fp8 {
            // No layer of this model consists of whole blocks.
            assert!(exported.iter().all(Result::is_err));
            continue;
        }
        exported.into_iter().for_each(|export| export.expect("an export"));
        let files = |folder: &Path| -> BTreeMap<_, _> {
            let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry"));
            entries.map(|e| (e.file_name(), std::fs::read(e.path()).expect("a file"))).collect()
        };
        assert!(files(&by_ranks).contains_key(std::ffi::OsStr::new("model.safetensors.index.json")));
        assert!(files(&by_ranks) == files(&by_one), "{dtype:?}");
    }
    let from = folder.path().join("ranks-fp32");
    on_ranks(3, |communicator, channel| {
        let mut learner =
            resized(World { micro_steps: 3, ..world }, 3, Shard::Optimizer).learner(communicator);
        import(learner.weights(), &from).expect("a model");
        for value in SavedState::from_learner(&mut learner).values {
            let SavedValue { entry, tensor, rows, .. } = value;
            if entry.kind == StateKind::Master {
                let bytes = tensor.row_bytes();
                let expected = &saved[&tensor.name][rows.start * bytes..rows.end * bytes];
                let found = learner.read_state(entry.kind, &entry.name).expect("a master");
                assert!(found == expected, "{} on rank {}", tensor.name, channel.rank());
            }
        }
    });
}

const FOLDER: &str = "XTRAIN_RANKS_TEST_FOLDER";
const NUMBER: &str = "XTRAIN_RANKS_TEST_NUMBER";

/// Runs the ignored test `name`, given a folder and a number, in a process of its own.
pub(crate) fn run_child(name: &str, folder: &Path, number: usize) -> Output {
    let mut command = Command::new(std::env::current_exe().expect("this test"));
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    command.env(FOLDER, folder).env(NUMBER, number.to_string());
    command.output().expect("a process")
}

/// The argument of a child process.
pub(crate) fn of_child() -> Option<(PathBuf, usize)> {
    let number = std::env::var(NUMBER).ok()?.parse().ok()?;
    Some((std::env::var(FOLDER).ok()?.into(), number))
}

#[test]
#[ignore = "the next test runs it in a process of its own"]
fn reading_child() {
    let Some((folder, ranks)) = of_child() else { return };
    for communicator in ThreadCommunicator::world(ranks) {
        let rank = communicator.rank();
        let mut learner = large_learner(ranks, communicator);
        let checkpoint = CheckpointStore::open(&folder).expect("a folder").latest().expect("steps");
        let state = SavedState::from_learner(&mut learner);
        let own: usize = state.values.iter().map(|v| v.rows.len() * v.tensor.row_bytes()).sum();
        let before = bytes_read();
        state.load(&checkpoint.expect("a step"), Others::Refuse, &mut learner).expect("the state");
        println!("rank {rank}: {} {own}", bytes_read() - before);
    }
}

/// A learner of a rank of `ranks`, with matrices of many pieces of checkpoints.
fn large_learner(ranks: usize, communicator: ThreadCommunicator) -> Learner {
    let description = Description { vocab_size: 1 << 15, dim: 256, layers: 1, ..crate::common::wide() };
    let world = World { ranks, shard: Shard::Optimizer, ..World::alone(Recipe::Fp32, false, 1) };
    let spec = world.spec(communicator.rank());
    let spec = TrainingSpec { model: crate::common::built(description), ..spec };
    let order = communicator.rank() as u64;
    crate::world::learner(spec, Arc::new(communicator), order)
}

#[test]
fn a_rank_reads_little_more_than_its_rows() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(4, |communicator, channel| {
        let communicator = Arc::into_inner(communicator).expect("the only one");
        let mut learner = large_learner(4, communicator);
        let store = CheckpointStore::open(folder.path()).expect("a folder");
        save(&mut learner, &store, &channel, 1).expect("a checkpoint");
    });
    let output = run_child("checkpoints::reading_child", folder.path(), 3);
    let output = String::from_utf8(output.stdout).expect("text");
    let lines: Vec<&str> = output.lines().filter_map(|line| line.strip_prefix("rank ")).collect();
    assert_eq!(lines.len(), 3, "{output}");
    for line in lines {
        let (_, bytes) = line.split_once(": ").expect("figures");
        let (read, own) = bytes.split_once(' ').expect("two");
        let (read, own): (usize, usize) = (read.parse().expect("bytes"), own.parse().expect("bytes"));
        // A matrix of 32 MiB, of three kinds in two places, has pieces of 4 MiB. At each end of its rows a
        // rank may read a part of a piece for nothing.
        let more = 2 * 6 * (4 << 20);
        assert!(own > (60 << 20) && read >= own && read < own + more, "{line}");
    }
}

/// Bytes that this process has read from files.
fn bytes_read() -> usize {
    let io = std::fs::read_to_string("/proc/self/io").expect("figures of this process");
    let line = io.lines().find_map(|line| line.strip_prefix("rchar: ")).expect("bytes read");
    line.parse().expect("a number")
}
