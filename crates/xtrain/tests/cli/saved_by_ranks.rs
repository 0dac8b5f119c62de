//! Commands of one process on a checkpoint that several ranks wrote.

use crate::place::{Place, Ran, assert_same_file};
use crate::resume::recorded;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use xtrain_checkpoint::{Checkpoint, CheckpointStore, Others};
use xtrain_config::Config;
use xtrain_distributed::{ThreadChannel, ThreadCommunicator};
use xtrain_ops::registry::cpu_kernels;
use xtrain_planner::planned;
use xtrain_program::{Parallel, Shard};
use xtrain_rank::Rank;
use xtrain_runtime::CpuEngine;
use xtrain_step::learner::Learner;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_train::state_io::{CheckpointStep, SavedState};

/// Sizes that FP8 takes, with scales and histories in the checkpoint.
const FP8: &str = "--set precision.recipe=fp8-delayed --set precision.skip_slower=[] --set data.seq_len=32 --set model.ffn_dim=32";

/// Replaces the latest checkpoint of a run by one of the same state that `ranks` ranks write.
fn save_again(run: &Path, ranks: usize) {
    let parsed = Config::load::<&str>(&run.join("config.toml"), &[]).expect("a configuration");
    let planned = planned::planned(parsed.resolve(&Default::default()).expect("sizes")).expect("a plan");
    let folder = run.join("checkpoints");
    let old = open(&folder);
    let documents = ["position", "loader", "config"]
        .map(|name| (name.to_owned(), old.document(name).expect("a document")));
    let again = tempfile::tempdir().expect("a folder");
    let places = ThreadCommunicator::world(ranks).into_iter().zip(ThreadChannel::world(ranks));
    thread::scope(|scope| {
        for (rank, (communicator, channel)) in places.enumerate() {
            let parallel = Parallel {
                rank: Rank { index: rank, world_size: ranks },
                shard: Shard::Optimizer,
                ..planned.spec.parallel
            };
            let spec = TrainingSpec { parallel, ..planned.spec.clone() };
            let (folder, again, documents) = (&folder, again.path(), &documents);
            scope.spawn(move || {
                let engine =
                    CpuEngine::new(Arc::new(cpu_kernels())).with_communicator(Arc::new(communicator));
                let mut learner = Learner::new(Box::new(engine), spec, 1).expect("a learner");
                let state = SavedState::from_learner(&mut learner);
                let old = open(folder);
                state.load(&old, Others::Refuse, &mut learner).expect("the state");
                let store = CheckpointStore::open(again).expect("a folder");
                let step = CheckpointStep { number: old.step(), documents };
                state.save(&mut learner, &store, &channel, &step).expect("a checkpoint");
            });
        }
    });
    let name = format!("step-{}", old.step());
    fs::remove_dir_all(old.path()).expect("the old one");
    let copied = Command::new("cp").arg("-r").args([again.path().join(&name), folder]).status();
    assert!(copied.expect("cp").success());
}

fn open(folder: &Path) -> Checkpoint {
    CheckpointStore::open(folder).expect("a folder").latest().expect("checkpoints").expect("by-1")
}

#[test]
fn every_command_takes_a_checkpoint_of_three_ranks_as_one_of_one_process() {
    let place = Place::new();
    place.train("by-1", &format!("{FP8} --set train.steps=4"));
    place.copy("by-1", "by-3");
    save_again(&place.path("by-3"), 3);
    let files = place.names("by-3/checkpoints/step-4");
    for rank in 0..3 {
        assert!(files.contains(&format!("rank-{rank:05}-00001.safetensors")), "{files:?}");
    }
    let said = |command: &str, run: &str| -> String {
        let Ran { stdout, .. } = place.run(&command.replace("RUN", run)).succeeds();
        stdout.replace(run, "RUN")
    };
    place.train("other", &format!("{FP8} --set train.steps=4 --set train.seed=7"));
    for command in [
        "generate RUN --prompt the -n 9 --temperature 0.7 --seed 5",
        "eval RUN --data b.txt --json",
        "inspect RUN --json",
        "blame RUN --json",
        "report RUN",
        "compare RUN --baseline other --json",
        "export RUN --out exported-RUN",
    ] {
        assert_eq!(said(command, "by-3"), said(command, "by-1"), "{command}");
    }
    assert!(place.read("exported-by-3/model.safetensors") == place.read("exported-by-1/model.safetensors"));
    // One process goes on with it.
    for run in ["by-1", "by-3"] {
        place.train(run, &format!("{FP8} --set train.steps=8 --resume"));
    }
    for file in ["checkpoints/step-8/rank-00000-00001.safetensors", "hf/model.safetensors"] {
        assert_same_file(&place.path("by-1").join(file), &place.path("by-3").join(file));
    }
    assert_eq!(recorded(&place, "by-1"), recorded(&place, "by-3"));
}
