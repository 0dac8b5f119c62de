//! Collectives on the CPU: values are those of a plain computation of all ranks, whatever the order of lanes
//! on each rank, and a rank that fails ends the others.

mod common;

use common::collectives::{expected, random_program, results_of_ranks};
use std::sync::Arc;
use std::thread;
use xtrain_distributed::{CommError, Communicator, ThreadCommunicator};
use xtrain_ops::collective::{AllGather, AllToAll};
use xtrain_ops::registry::cpu_kernels;
use xtrain_program::{Groups, Program, Role, Stage, Tracer, When};
use xtrain_runtime::{Checks, CpuEngine, Engine, EngineError, Part};
use xtrain_tensor::{DType, TensorType};

/// Random programs of each number of ranks, and orders of each.
const PROGRAMS: u64 = 25;
const ORDERS: u64 = 4;

fn engine(communicator: Arc<dyn Communicator>) -> CpuEngine {
    CpuEngine::new(Arc::new(cpu_kernels())).with_communicator(communicator)
}

#[test]
fn values_are_those_of_one_process_in_any_order_on_each_rank() {
    let first = common::seed();
    for (ranks, seed) in (1..=4).flat_map(|ranks| (0..PROGRAMS).map(move |n| (ranks, first.wrapping_add(n))))
    {
        let program = random_program(seed, ranks, ranks);
        let expected = expected(&program, ranks, 2);
        for order in 0..ORDERS {
            let found = results_of_ranks(&program, ranks, 2, |rank, communicator| {
                let mut engine = engine(communicator);
                engine.set_checks(Checks { poison: true, numerics: false });
                engine.set_random_order(order * 31 + rank as u64);
                Ok(Box::new(engine))
            });
            for (rank, (found, expected)) in found.into_iter().zip(&expected).enumerate() {
                assert!(
                    found.as_ref() == Ok(expected),
                    "rank {rank} of {ranks} of the program XTRAIN_TEST_SEED={seed} in the order {order}"
                );
            }
        }
    }
}

/// A program in which the last micro-step exchanges gradients and the update gathers words.
fn step(ranks: usize, first: usize) -> Program {
    step_of(Groups::world(ranks), first)
}

/// [`step`] in a group.
fn step_of(groups: Groups, first: usize) -> Program {
    let ranks = groups.size;
    let mut tracer = Tracer::default();
    let gradient = tracer.input("gradient", TensorType::new(DType::F32, [4, 2]));
    let op = AllToAll { groups, first, piece_rows: 4usize.div_ceil(ranks) };
    tracer.enter_block(Some(3));
    tracer.site("attn.qkv_proj").emit(op, &[gradient]).expect("it fits");
    let mut program = tracer.finish();
    program.instances[0].when = When::Last;
    let mut tracer = Tracer::new(program, Stage::Update, Role::Update);
    let words = tracer.input("words", TensorType::new(DType::F64, [1, 5]));
    let op = AllGather { groups, first: 0, rows: ranks };
    let all = tracer.site("grad_norm").emit(op, &[words]).expect("it fits")[0];
    tracer.output("words of all", all);
    tracer.finish()
}

/// The first error of each of two ranks, or `None`.
fn errors(run: impl Fn(usize, CpuEngine) -> Result<(), EngineError> + Sync) -> Vec<Option<EngineError>> {
    thread::scope(|scope| {
        let spawn = |communicator: ThreadCommunicator| {
            let (rank, run) = (communicator.rank(), &run);
            scope.spawn(move || run(rank, engine(Arc::new(communicator))).err())
        };
        let handles: Vec<_> = ThreadCommunicator::world(2).into_iter().map(spawn).collect();
        handles.into_iter().map(|handle| handle.join().expect("a rank")).collect()
    })
}

#[test]
fn a_rank_that_leaves_ends_the_others_with_an_error_that_names_the_collective() {
    let ends_after = |parts: &'static [Part]| {
        errors(move |rank, mut engine| {
            let id = engine.load(step(2, 0))?;
            let all = [Part::First, Part::Last, Part::Update];
            let parts = if rank == 0 { parts } else { &all };
            parts.iter().try_for_each(|&part| engine.run(id, part))
        })
    };
    let message = |errors: Vec<Option<EngineError>>| match &errors[..] {
        [None, Some(error)] => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        message(ends_after(&[Part::First])),
        "all_to_all at blocks.3.attn.qkv_proj (fprop) failed in the last micro-step: rank 0 has left the run"
    );
    assert_eq!(
        message(ends_after(&[Part::First, Part::Last])),
        "all_gather at grad_norm (update) failed in the update: rank 0 has left the run"
    );
}

#[test]
fn ranks_with_different_programs_end_with_an_error() {
    let errors = errors(|rank, mut engine| {
        let id = engine.load(step(2, rank))?;
        engine.run(id, Part::Whole)
    });
    for error in errors {
        let Some(EngineError::Collective { op: "all_to_all", part: "the only micro-step", error, .. }) =
            error
        else {
            panic!("{error:?}")
        };
        assert!(matches!(*error, CommError::Mismatch(_) | CommError::Left { .. }), "{error}");
    }
}

#[test]
fn a_program_of_other_ranks_is_refused_by_name() {
    let refused = |engine: &mut dyn Engine, ranks| engine.load(step(ranks, 0)).err().map(|e| e.to_string());
    let mut alone = CpuEngine::new(Arc::new(cpu_kernels()));
    assert_eq!(
        refused(&mut alone, 2).as_deref(),
        Some("all_to_all at blocks.3.attn.qkv_proj is a collective of 2 ranks, but this run has 1")
    );
    let mut two = engine(Arc::new(ThreadCommunicator::world(2).remove(0)));
    assert!(refused(&mut two, 3).is_some_and(|message| message.contains("of 3 ranks, but this run has 2")));
    for groups in [Groups { size: 2, stride: 1 }, Groups { size: 2, stride: 2 }] {
        let mut three = engine(Arc::new(ThreadCommunicator::world(3).remove(0)));
        let message = three.load(step_of(groups, 0)).expect_err("one is left").to_string();
        assert!(message.contains("of 2 ranks, but this run has 3"), "{message}");
    }
}

#[test]
fn one_process_copies() {
    let mut engine = CpuEngine::new(Arc::new(cpu_kernels()));
    let id = engine.load(step(1, 0)).expect("a run of one process needs no communicator");
    let words: Vec<u8> = (0..40).collect();
    engine.write_input(id, "words", &words).expect("an input");
    engine.run(id, Part::Whole).expect("it runs");
    assert_eq!(engine.outputs(id).expect("outputs").get("words of all"), Ok(&words[..]));
}
