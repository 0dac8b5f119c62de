//! The executor on a GPU: more runs in flight than it has buffers, state that changes between them, programs
//! that are loaded while others run, programs of several lanes, and collectives. Without a GPU every test is
//! ignored, and the reason is printed.

#[path = "../common/mod.rs"]
mod common;
mod lanes;
mod ranks;
mod variants;

use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::{Arc, RwLock};
use xtrain_cuda::{CudaDevice, Gpu, Installed, Library};
use xtrain_ops::add::Add;
use xtrain_ops::registry::cuda_kernels;
use xtrain_program::{Program, StateKind, Tracer, ValueId};
use xtrain_runtime::{CudaEngine, Engine, EngineError, Part, ProgramId};
use xtrain_tensor::{DType, TensorType};

/// Held exclusively by tests whose ranks are threads that wait for each other on GPUs: captures of other
/// tests would wait for them, and they for these captures.
static ALONE: RwLock<()> = RwLock::new(());

/// Elements of small tensors.
const SMALL: usize = 1000;
/// Random programs of several lanes.
const LANE_PROGRAMS: u64 = 6;

fn engine() -> Result<CudaEngine, Failed> {
    Ok(CudaEngine::new(Arc::new(cuda_kernels()), Gpu::open(0)?)?)
}

fn vector(elements: usize) -> TensorType {
    TensorType::new(DType::F32, [elements])
}

/// out = in + `terms` times the state.
fn add_state(terms: usize) -> Program {
    let mut tracer = Tracer::default();
    let input = tracer.input("in", vector(SMALL));
    let state = tracer.state(StateKind::Master, "state", vector(SMALL));
    add(tracer, input, state, terms)
}

/// out = in + `terms` times another input.
fn add_input(elements: usize, terms: usize) -> Program {
    let mut tracer = Tracer::default();
    let input = tracer.input("in", vector(elements));
    let other = tracer.input("other", vector(elements));
    add(tracer, input, other, terms)
}

fn add(mut tracer: Tracer, input: ValueId, term: ValueId, terms: usize) -> Program {
    let mut sum = input;
    for _ in 0..terms {
        sum = tracer.site("sum").emit(Add, &[sum, term]).expect("two vectors of one type")[0];
    }
    tracer.output("out", sum);
    tracer.finish()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

fn filled(value: f32, elements: usize) -> Vec<u8> {
    value.to_le_bytes().repeat(elements)
}

/// Enqueues a run whose input has this value in every element.
fn enqueue(engine: &mut CudaEngine, id: ProgramId, value: u8) -> Result<(), EngineError> {
    engine.write_input(id, "in", &filled(value.into(), SMALL))?;
    engine.run(id, Part::Whole)
}

/// Checks that every element of a run's output has this value.
fn check(what: &str, bytes: &[u8], expected: f32) {
    let wrong = floats(bytes).into_iter().enumerate().find(|(_, x)| *x != expected);
    assert!(wrong.is_none(), "{what}: element and value {wrong:?} instead of {expected}");
}

type Test = fn() -> Result<(), Failed>;

fn main() {
    let arguments = Arguments::from_args();
    let gpu = common::gpu();
    let has_gpus = gpu.is_some() && CudaDevice::all().is_ok_and(|gpus| gpus.len() >= 2);
    let has_nccl = has_gpus && Installed::open(Library::Nccl).is_ok();
    let all: [(&str, Test); 22] = [
        ("runs_in_flight_keep_their_inputs_and_outputs", lanes::runs_in_flight_keep_their_inputs_and_outputs),
        ("state_changes_between_runs_in_flight", lanes::state_changes_between_runs_in_flight),
        ("programs_are_loaded_beside_runs_in_flight", lanes::programs_are_loaded_beside_runs_in_flight),
        ("lanes_wait_for_each_other", lanes::lanes_wait_for_each_other),
        ("two_lanes_wait_for_each_other", lanes::two_lanes_wait_for_each_other),
        ("the_head_computes_rows_with_a_target", variants::the_head_computes_rows_with_a_target),
        ("more_rows_than_needed_change_nothing", variants::more_rows_than_needed_change_nothing),
        ("ranks_exchange_through_the_host", ranks::ranks_exchange_through_the_host),
        ("stages_exchange_through_the_host", ranks::stages_exchange_through_the_host),
        ("stages_exchange_by_copies", ranks::stages_exchange_by_copies),
        ("stages_exchange_by_nccl", ranks::stages_exchange_by_nccl),
        ("collectives_of_one_process_are_recorded", ranks::collectives_of_one_process_are_recorded),
        (
            "collectives_with_absent_ranks_take_their_time",
            ranks::collectives_with_absent_ranks_take_their_time,
        ),
        ("ranks_exchange_by_nccl", ranks::ranks_exchange_by_nccl),
        ("ranks_add_by_nccl", ranks::ranks_add_by_nccl),
        ("a_rank_that_waits_in_vain_is_freed_by_nccl", ranks::a_rank_that_waits_in_vain_is_freed_by_nccl),
        ("a_stage_that_waits_in_vain_is_freed_by_nccl", ranks::a_stage_that_waits_in_vain_is_freed_by_nccl),
        (
            "a_stage_that_waits_in_vain_is_freed_by_copies",
            ranks::a_stage_that_waits_in_vain_is_freed_by_copies,
        ),
        ("a_rank_waits_while_runs_complete_by_nccl", ranks::a_rank_waits_while_runs_complete_by_nccl),
        ("a_rank_waits_while_runs_complete_by_copies", ranks::a_rank_waits_while_runs_complete_by_copies),
        ("ranks_exchange_by_copies", ranks::ranks_exchange_by_copies),
        ("a_rank_that_waits_in_vain_is_freed_by_copies", ranks::a_rank_that_waits_in_vain_is_freed_by_copies),
    ];
    let test = |(name, test): (&str, Test)| {
        let (by_nccl, by_copies) = (name.ends_with("by_nccl"), name.ends_with("by_copies"));
        let runs = if by_nccl {
            has_nccl
        } else if by_copies {
            has_gpus
        } else {
            gpu.is_some()
        };
        let is_alone = by_nccl || by_copies;
        let test = move || {
            let _alone = is_alone.then(|| ALONE.write());
            let _beside_others = (!is_alone).then(|| ALONE.read());
            test()
        };
        Trial::test(name, test).with_ignored_flag(!runs)
    };
    let conclusion = libtest_mimic::run(&arguments, all.into_iter().map(test).collect());
    drop(gpu);
    conclusion.exit();
}
