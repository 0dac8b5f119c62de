//! Training steps of several ranks: threads that each run the program of the step on their part of the batch.
//! Their gradients are separate, as if each rank held other rows of all gradients.

mod common;

use common::{random_batch, small_model, spec};
use std::sync::Arc;
use std::thread;
use xtrain_data::Batch as TokenBatch;
use xtrain_distributed::{Communicator, ThreadCommunicator};
use xtrain_model::Recipe;
use xtrain_model::decoder::Batch;
use xtrain_ops::registry::cpu_kernels;
use xtrain_program::StateKind;
use xtrain_runtime::{CpuEngine, Engine};
use xtrain_train::learner::{Learner, Step, StepResult};
use xtrain_train::training_spec::TrainingSpec;

const BATCH: Batch = Batch { sequences: 2, seq_len: 13 };
const RANKS: usize = 3;

/// The result of a rank's step, and its count of applied updates.
type Result = (StepResult, u32);

/// The first step of a rank on its batch, from weights that all ranks share. `damage` may change the masters
/// before it.
fn step(
    engine: impl Engine + 'static,
    spec: TrainingSpec,
    batches: &[TokenBatch],
    rank: usize,
    damage: impl Fn(usize, &mut Learner),
) -> Result {
    let mut learner = Learner::new(Box::new(engine), spec, 3).expect("a learner");
    learner.weights().initialize(5, 0.1).expect("weights");
    damage(rank, &mut learner);
    let valid_targets = batches.iter().map(|batch| batch.valid_targets).sum();
    let step = Step { number: 0, lr: 1e-3, valid_targets, micro_steps: 1 };
    learner.micro_step(&step, 0, &batches[rank]).expect("a step");
    let ticket = learner.fetch().expect("outputs");
    let result = learner.collect(ticket).expect("outputs");
    let applied = learner.read_state(StateKind::Counter, "applied").expect("a counter");
    (result, u32::from_le_bytes(applied.try_into().expect("four bytes")))
}

fn batches() -> Vec<TokenBatch> {
    (0..RANKS as u64).map(|seed| random_batch(BATCH, small_model().vocab_size, seed)).collect()
}

/// The step of each of several ranks in this recipe.
fn steps(recipe: Recipe, damage: impl Fn(usize, &mut Learner) + Sync) -> Vec<Result> {
    let batches = batches();
    let spec = TrainingSpec { recipe, world_size: RANKS, ..spec(small_model(), BATCH) };
    thread::scope(|scope| {
        let spawn = |communicator: ThreadCommunicator| {
            let (spec, batches, damage) = (spec.clone(), &batches, &damage);
            scope.spawn(move || {
                let rank = communicator.rank();
                let mut engine =
                    CpuEngine::new(Arc::new(cpu_kernels())).with_communicator(Arc::new(communicator));
                engine.set_random_order(rank as u64);
                step(engine, spec, batches, rank, damage)
            })
        };
        let handles: Vec<_> = ThreadCommunicator::world(RANKS).into_iter().map(spawn).collect();
        handles.into_iter().map(|handle| handle.join().expect("a rank")).collect()
    })
}

#[test]
fn ranks_report_the_norm_and_the_loss_of_all() {
    for recipe in [Recipe::Fp32, Recipe::Bf16] {
        let found = steps(recipe, |_, _| {});
        let spec = TrainingSpec { recipe, ..spec(small_model(), BATCH) };
        let alone =
            |rank| step(CpuEngine::new(Arc::new(cpu_kernels())), spec.clone(), &batches(), rank, |_, _| {}).0;
        let alone: Vec<StepResult> = (0..RANKS).map(alone).collect();
        let norm = alone.iter().map(|rank| rank.grad_norm.powi(2)).sum::<f64>().sqrt();
        let loss = alone.iter().map(|rank| rank.loss).sum::<f64>();
        for (rank, (result, applied)) in found.iter().enumerate() {
            assert_eq!((result, applied), (&found[0].0, &1), "rank {rank} has other bits than rank 0");
        }
        let StepResult { loss: found_loss, grad_norm, skipped } = found[0].0;
        assert!(!skipped && (grad_norm / norm - 1.0).abs() < 1e-6, "norm {grad_norm} instead of {norm}");
        assert!((found_loss / loss - 1.0).abs() < 1e-6, "loss {found_loss} instead of {loss}");
    }
}

#[test]
fn a_step_that_is_not_finite_on_one_rank_is_skipped_on_all() {
    let damage = |rank: usize, learner: &mut Learner| {
        if rank == 1 {
            let name = "embed.weight";
            let master = learner.read_state(StateKind::Master, name).expect("a master");
            // Bytes of NaNs.
            learner.write_state(StateKind::Master, name, &vec![0xFF; master.len()]).expect("a master");
            learner.weights().refresh().expect("copies of masters");
        }
    };
    for (rank, (result, applied)) in steps(Recipe::Fp32, damage).into_iter().enumerate() {
        assert!(result.skipped && applied == 0, "rank {rank} updates: {result:?}");
    }
}
