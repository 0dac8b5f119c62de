//! Saves in which a rank fails or is killed: the old checkpoint stays, or the new one is complete.

use crate::checkpoints::{assert_equal, of_child, on_ranks, run_child, save, tensors};
use crate::world::World;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::slice;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use xtrain_checkpoint::{CheckpointStore, TensorSpec};
use xtrain_distributed::{Channel, CommError, ThreadChannel};
use xtrain_model::Recipe;
use xtrain_program::Shard;
use xtrain_tensor::DType;
use xtrain_train::error::RunError;
use xtrain_train::state_io::{CheckpointStep, write};

fn small_world() -> World {
    World { ranks: 3, shard: Shard::Optimizer, ..World::alone(Recipe::Fp32, false, 1) }
}

/// A channel of which a rank fails at one of its calls, before it or after it.
struct Failing {
    channel: ThreadChannel,
    /// The calls that are still made.
    calls: AtomicUsize,
    after: bool,
    fails: fn() -> CommError,
}

impl Failing {
    fn call<T>(&self, call: impl FnOnce(&ThreadChannel) -> Result<T, CommError>) -> Result<T, CommError> {
        let left = self.calls.fetch_sub(1, Ordering::SeqCst);
        if left == 0 && !self.after {
            return Err((self.fails)());
        }
        let result = call(&self.channel)?;
        if left == 0 { Err((self.fails)()) } else { Ok(result) }
    }
}

impl Channel for Failing {
    fn rank(&self) -> usize {
        self.channel.rank()
    }

    fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, CommError> {
        self.call(|channel| channel.broadcast(bytes))
    }

    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.call(|channel| channel.gather(bytes))
    }
}

/// The calls of a save: rank 0 names the folder, gathers the reports, and says that it is complete.
const CALLS: usize = 3;

/// Every rank, call of a save, and side of the call.
fn points(ranks: usize) -> Vec<(usize, usize, bool)> {
    let of_rank = |rank| (0..2 * CALLS).map(move |n| (rank, n / 2, n % 2 == 1));
    (0..ranks).flat_map(of_rank).collect()
}

/// True if a save is complete although a rank failed at this point: rank 0 had gathered the reports, and did
/// not fail before the manifest.
fn is_complete((rank, call, after): (usize, usize, bool)) -> bool {
    match rank {
        0 => call == 2,
        _ => call == 2 || (call == 1 && after),
    }
}

/// Saves one step after another, from step 1 on, in each of which a rank fails at the next of `points`.
fn fail_at(world: &World, folder: &Path, points: &[(usize, usize, bool)], fails: fn() -> CommError) {
    let channels: Vec<_> = points.iter().map(|_| ThreadChannel::world(world.ranks)).collect();
    let mut by_rank: Vec<Vec<ThreadChannel>> = (0..world.ranks).map(|_| Vec::new()).collect();
    for channels in channels {
        channels.into_iter().zip(&mut by_rank).for_each(|(channel, of_rank)| of_rank.push(channel));
    }
    let by_rank = Mutex::new(by_rank);
    on_ranks(world.ranks, |communicator, start| {
        let rank = start.rank();
        let channels = std::mem::take(&mut by_rank.lock().expect("channels")[rank]);
        let mut learner = world.learner(communicator);
        learner.weights().initialize(5, 0.1).expect("weights");
        let store = CheckpointStore::open(folder).expect("a folder");
        save(&mut learner, &store, &start, 0).expect("the first checkpoint");
        for (n, (channel, &(failing, call, after))) in channels.into_iter().zip(points).enumerate() {
            let calls = if failing == rank { call } else { usize::MAX };
            let channel = Failing { channel, calls: calls.into(), after, fails };
            let saved = save(&mut learner, &store, &channel, n as u64 + 1);
            assert!(failing != rank || saved.is_err(), "rank {rank} does not fail at {call}");
        }
    });
}

#[test]
fn a_rank_that_fails_at_any_call_of_a_save_leaves_the_old_checkpoint_or_the_new_one() {
    let world = small_world();
    let folder = tempfile::tempdir().expect("a folder");
    let points = points(world.ranks);
    fail_at(&world, folder.path(), &points, || CommError::System("the disk is full".into()));
    let complete = points.iter().enumerate().filter(|(_, point)| is_complete(**point));
    let expected: Vec<u64> = std::iter::once(0).chain(complete.map(|(n, _)| n as u64 + 1)).collect();
    let store = CheckpointStore::open(folder.path()).expect("a folder");
    assert_eq!(store.steps().expect("steps"), expected);
    let first = tensors(folder.path(), 0);
    for step in expected {
        assert_equal(&tensors(folder.path(), step), &first, &format!("step {step}"));
    }
    assert_eq!(temporary(folder.path()), Vec::<String>::new());
}

/// A channel of a rank that comes late to the folder of a step.
struct Late(ThreadChannel);

impl Channel for Late {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, CommError> {
        let received = self.0.broadcast(bytes);
        std::thread::sleep(std::time::Duration::from_millis(200));
        received
    }

    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.0.gather(bytes)
    }
}

#[test]
fn ranks_that_still_write_when_rank_0_fails_do_not_report_a_missing_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let tensors = [TensorSpec { name: "t".into(), dtype: DType::F32, shape: vec![3, 1] }];
    let errors: Vec<RunError> = std::thread::scope(|scope| {
        let rank = |channel: ThreadChannel| {
            let (rank, store) = (channel.rank(), CheckpointStore::open(folder.path()).expect("a folder"));
            let read = &mut |_| if rank == 0 { Err("the disk is full".into()) } else { Ok([0; 4]) };
            let (step, rows) = (CheckpointStep { number: 1, documents: &[] }, rank..rank + 1);
            let channel: Box<dyn Channel> =
                if rank == 0 { Box::new(channel) } else { Box::new(Late(channel)) };
            write(&store, channel.as_ref(), &step, &tensors, slice::from_ref(&rows), read)
                .expect_err("rank 0 fails")
        };
        let ranks: Vec<_> =
            ThreadChannel::world(3).into_iter().map(|channel| scope.spawn(move || rank(channel))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
    });
    assert!(errors[0].to_string().contains("the disk is full"), "{errors:?}");
    assert!(errors[1..].iter().all(|error| matches!(error, RunError::Ranks(_))), "{errors:?}");
    assert_eq!(temporary(folder.path()), Vec::<String>::new());
}

#[test]
#[ignore = "the next test runs it in a process of its own"]
fn killed_child() {
    let Some((folder, point)) = of_child() else { return };
    let world = small_world();
    let point = points(world.ranks)[point];
    fail_at(&world, &folder, &[point], || std::process::abort());
}

#[test]
fn ranks_that_are_killed_at_any_call_of_a_save_leave_the_old_checkpoint_or_the_new_one() {
    let points = points(small_world().ranks);
    let mut expected = None;
    for (n, point) in points.iter().enumerate() {
        let folder = tempfile::tempdir().expect("a folder");
        let output = run_child("failing_saves::killed_child", folder.path(), n);
        assert!(output.status.signal().is_some(), "{point:?} was not reached: {output:?}");
        let store = CheckpointStore::open(folder.path()).expect("a folder");
        let steps = store.steps().expect("steps");
        // Rank 0 may still be at the manifest when another rank is killed.
        assert!(steps == [0] || (steps == [0, 1] && is_complete(*point)), "{point:?}: {steps:?}");
        for step in steps {
            let found = tensors(folder.path(), step);
            assert_equal(&found, expected.get_or_insert_with(|| found.clone()), &format!("{point:?}"));
        }
        // Opening it removed what the killed ranks had begun.
        assert_eq!(temporary(folder.path()), Vec::<String>::new(), "{point:?}");
    }
}

/// Names in a folder of checkpoints that are not those of steps.
fn temporary(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).expect("a folder");
    let names = names.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains(".tmp")).collect()
}
