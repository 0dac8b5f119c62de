//! Saves of several ranks, as threads, while their training continues.

use super::super::snapshot::{CheckpointWriter, Snapshot, places};
use super::{PATIENCE, Recorder, run_file};
use crate::error::RunError;
use crate::folder::RunFolder;
use crate::position::Position;
use crate::process_group::ProcessGroup;
use crate::run::open::{Opened, open};
use crate::run::{Run, Start};
use crate::state_io::{self, SavedState};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;
use xtrain_checkpoint::CheckpointStore;
use xtrain_distributed::{Channel, ThreadChannel, ThreadCommunicator};
use xtrain_ops::registry::cpu_kernels;
use xtrain_program::{Parallel, Shard};
use xtrain_rank::Rank;
use xtrain_runtime::CpuEngine;
use xtrain_step::learner::Learner;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_tensor::host::ALIGN_BYTES;

/// First row of a tensor, and bytes of rows from there on, by the tensor's name.
type Rows = BTreeMap<String, (usize, Vec<u8>)>;

/// Runs `job` on each of `ranks` ranks with optimizer state of its own, all of which save to the same folder.
fn on_ranks<T: Send>(
    run: &Run,
    folder: &RunFolder,
    ranks: usize,
    job: impl Fn(Learner, CheckpointWriter) -> T + Sync,
) -> Vec<T> {
    let (spec, places) =
        (run.learner.spec(), ThreadCommunicator::world(ranks).into_iter().zip(ThreadChannel::world(ranks)));
    thread::scope(|scope| {
        let job = &job;
        let start = |(communicator, channel): (ThreadCommunicator, ThreadChannel)| {
            let rank = channel.rank();
            let parallel = Parallel {
                rank: Rank { index: rank, world_size: ranks },
                shard: Shard::Optimizer,
                ..spec.parallel
            };
            let spec = TrainingSpec { parallel, ..spec.clone() };
            scope.spawn(move || {
                let engine =
                    CpuEngine::new(Arc::new(cpu_kernels())).with_communicator(Arc::new(communicator));
                let learner = Learner::new(Box::new(engine), spec, 1).expect("a learner");
                job(learner, CheckpointWriter::new(folder, Arc::new(channel), None).expect("a folder"))
            })
        };
        let handles: Vec<_> = places.map(start).collect();
        handles.into_iter().map(|handle| handle.join().expect("a rank")).collect()
    })
}

/// The rows of a rank.
fn rows(learner: &mut Learner) -> Rows {
    let state = SavedState::from_learner(learner);
    let read = |value: state_io::SavedValue| {
        let bytes = learner.read_state(value.entry.kind, &value.entry.name).expect("state");
        let start = value.rows.start * value.tensor.row_bytes();
        (value.tensor.name, (start, bytes))
    };
    state.values.into_iter().map(read).collect()
}

#[test]
fn ranks_save_their_rows_while_training_continues_and_other_ranks_restore_them() {
    /// Ranks whose state has changed since they began to save.
    static CHANGED: AtomicUsize = AtomicUsize::new(0);
    fn write(store: &CheckpointStore, of: &Snapshot) -> Result<PathBuf, RunError> {
        let begun = Instant::now();
        while CHANGED.load(Ordering::SeqCst) < 3 {
            assert!(begun.elapsed() < PATIENCE, "a rank waits for its save");
            thread::yield_now();
        }
        Snapshot::write(store, of)
    }
    static DONE: AtomicU64 = AtomicU64::new(0);
    let folder = tempfile::tempdir().expect("a folder");
    let mut recorder = Recorder { seen: Vec::new(), done: &DONE };
    let Ok(Opened::Run(run)) =
        open(&run_file(folder.path(), "out"), Start::New, &ProcessGroup::alone(), &mut recorder, &|| false)
    else {
        panic!("it does not open")
    };
    let (loader, config, of_ranks) = (&run.corpus.loader, &run.config, folder.path().join("ranks"));
    let of_ranks = RunFolder::new(of_ranks);
    let saved = on_ranks(&run, &of_ranks, 3, |mut learner, mut checkpoints| {
        learner.weights().initialize(1, 0.1).expect("weights");
        checkpoints.write = write;
        checkpoints.prepare(&mut learner);
        let expected = rows(&mut learner);
        let at = Position { step: 3, ..Position::default() };
        assert!(checkpoints.can_copy(&mut learner));
        let begun = checkpoints.begin(&mut learner, loader, config, &at, None, true).expect("a save");
        assert!(begun.is_none(), "it is under way");
        for value in SavedState::from_learner(&mut learner).values {
            let bytes = vec![7; value.entry.ty.bytes()];
            learner.write_state(value.entry.kind, &value.entry.name, &bytes).expect("state");
        }
        CHANGED.fetch_add(1, Ordering::SeqCst);
        let written = checkpoints.finish().expect("a checkpoint").expect("one");
        assert_eq!((written.step, written.path), (3, checkpoints.store.step_folder(3)));
        // The copy is of what this rank writes.
        let copied: usize = expected.iter().map(|(_, (_, bytes))| bytes.len()).sum();
        let (_, in_memory) = places(&SavedState::from_learner(&mut learner).copied());
        assert!(in_memory <= copied + expected.len() * ALIGN_BYTES, "{in_memory} bytes for {copied}");
        expected
    });
    for ranks in [2, 1] {
        let restored = on_ranks(&run, &of_ranks, ranks, |mut learner, mut checkpoints| {
            let at = checkpoints.restore(&mut learner, loader, config).expect("a checkpoint").expect("one");
            assert_eq!(at.step, 3);
            rows(&mut learner)
        });
        for name in saved[0].keys() {
            assert!(whole(&restored, name) == whole(&saved, name), "{name} with {ranks} ranks");
        }
    }
}

/// The tensor `name` of which each rank has rows.
fn whole(ranks: &[Rows], name: &str) -> Vec<u8> {
    let mut whole = Vec::new();
    let mut parts: Vec<&(usize, Vec<u8>)> = ranks.iter().map(|rank| &rank[name]).collect();
    parts.sort_by_key(|(start, bytes)| (*start, bytes.len()));
    for (start, bytes) in parts {
        // Ranks that all have it have equal bits.
        if whole.len() <= *start {
            assert_eq!(whole.len(), *start, "{name}");
            whole.extend(bytes);
        }
    }
    whole
}
