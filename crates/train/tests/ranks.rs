//! Training steps of several ranks: threads that each run the program of the step on their micro-batches.

mod common;

use common::{random_batch, small_model, spec};
use std::sync::Arc;
use std::thread;
use xtrain_data::Batch as TokenBatch;
use xtrain_distributed::{Communicator, ThreadCommunicator};
use xtrain_model::Recipe;
use xtrain_model::decoder::Batch;
use xtrain_ops::registry::cpu_kernels;
use xtrain_program::{Parallel, StateKind};
use xtrain_runtime::{CpuEngine, Engine};
use xtrain_train::learner::{Learner, Step, StepResult};
use xtrain_train::training_spec::TrainingSpec;

const BATCH: Batch = Batch { sequences: 2, seq_len: 13 };
const RANKS: usize = 3;

/// The result of a rank's step, its count of applied updates, and the bytes of its masters.
type Result = (StepResult, u32, Vec<Vec<u8>>);

/// The first step of a rank on its micro-batches, from weights that all ranks share. `damage` may change the
/// masters before it.
fn step(
    engine: impl Engine + 'static,
    spec: TrainingSpec,
    batches: &[TokenBatch],
    damage: impl Fn(usize, &mut Learner),
) -> Result {
    let Parallel { rank, world_size, .. } = spec.parallel;
    let names: Vec<String> = spec.model.parameters().into_iter().map(|p| p.name).collect();
    let mut learner = Learner::new(Box::new(engine), spec, 3).expect("a learner");
    learner.weights().initialize(5, 0.1).expect("weights");
    damage(rank, &mut learner);
    let valid_targets = batches.iter().map(|batch| batch.valid_targets).sum();
    let micro_steps = batches.len() / world_size;
    let step = Step { number: 0, lr: 1e-3, valid_targets, micro_steps };
    for n in 0..micro_steps {
        learner.micro_step(&step, n, &batches[n * world_size + rank]).expect("a step");
    }
    let ticket = learner.fetch().expect("outputs");
    let result = learner.collect(ticket).expect("outputs");
    let applied = learner.read_state(StateKind::Counter, "applied").expect("a counter");
    let mut master = |name: &String| learner.read_state(StateKind::Master, name).expect("a master");
    let masters = names.iter().map(&mut master).collect();
    (result, u32::from_le_bytes(applied.try_into().expect("four bytes")), masters)
}

fn batches() -> Vec<TokenBatch> {
    (0..2 * RANKS as u64).map(|seed| random_batch(BATCH, small_model().vocab_size, seed)).collect()
}

/// The step of each of several ranks in this recipe.
fn steps(recipe: Recipe, damage: impl Fn(usize, &mut Learner) + Sync) -> Vec<Result> {
    let batches = batches();
    let spec = TrainingSpec { recipe, ..spec(small_model(), BATCH) };
    thread::scope(|scope| {
        let spawn = |communicator: ThreadCommunicator| {
            let (batches, damage) = (&batches, &damage);
            let parallel = Parallel { world_size: RANKS, rank: communicator.rank(), ..Parallel::ALONE };
            let spec = TrainingSpec { parallel, ..spec.clone() };
            scope.spawn(move || {
                let seed = communicator.rank() as u64;
                let mut engine =
                    CpuEngine::new(Arc::new(cpu_kernels())).with_communicator(Arc::new(communicator));
                engine.set_random_order(seed);
                step(engine, spec, batches, damage)
            })
        };
        let handles: Vec<_> = ThreadCommunicator::world(RANKS).into_iter().map(spawn).collect();
        handles.into_iter().map(|handle| handle.join().expect("a rank")).collect()
    })
}

#[test]
fn ranks_have_equal_bits_and_are_near_one_process() {
    for recipe in [Recipe::Fp32, Recipe::Bf16] {
        let found = steps(recipe, |_, _| {});
        let spec = TrainingSpec { recipe, ..spec(small_model(), BATCH) };
        let alone = step(CpuEngine::new(Arc::new(cpu_kernels())), spec, &batches(), |_, _| {}).0;
        for (rank, result) in found.iter().enumerate() {
            assert!(*result == found[0], "rank {rank} has other bits than rank 0");
        }
        let StepResult { loss, grad_norm, skipped } = found[0].0;
        let tolerance = if recipe == Recipe::Fp32 { 1e-6 } else { 1e-2 };
        let is_near = |x: f64, expected: f64| (x / expected - 1.0).abs() < tolerance;
        assert!(!skipped && is_near(grad_norm, alone.grad_norm), "{recipe:?}: norm {grad_norm}, {alone:?}");
        assert!(is_near(loss, alone.loss), "{recipe:?}: loss {loss}, {alone:?}");
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
    for (rank, (result, applied, _)) in steps(Recipe::Fp32, damage).into_iter().enumerate() {
        assert!(result.skipped && applied == 0, "rank {rank} updates: {result:?}");
    }
}
