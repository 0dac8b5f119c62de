//! Runs in flight, and programs of several lanes.

use super::{LANE_PROGRAMS, SMALL, add_input, add_state, check, engine, enqueue, filled, floats, vector};
use crate::common;
use crate::common::lanes::{random_program, results};
use libtest_mimic::Failed;
use std::sync::Arc;
use xtrain_ops::add::Add;
use xtrain_ops::grad_norm::GradNorm;
use xtrain_ops::registry::cpu_kernels;
use xtrain_program::{Lane, Program, StateKind, Tracer, ValueId};
use xtrain_runtime::{CpuEngine, Engine, EngineError, Part};

/// Elements of a state value that needs six pieces of the four staging buffers of 8 MiB.
const LARGE: usize = (41 << 20) / 4;
/// Runs in flight: more than the four slots of inputs and outputs, several times over.
const RUNS: u8 = 20;

/// Each run in flight has an input and an output of its own, whenever the output is collected.
pub(crate) fn runs_in_flight_keep_their_inputs_and_outputs() -> Result<(), Failed> {
    let mut engine = engine()?;
    let id = engine.load(add_state(3))?;
    engine.write_state(StateKind::Master, "state", &filled(0.5, SMALL))?;
    let mut tickets = Vec::new();
    for n in 0..RUNS {
        enqueue(&mut engine, id, n)?;
        tickets.push((n, engine.fetch(id)?));
    }
    // The second half is collected first.
    tickets.rotate_left(usize::from(RUNS / 2));
    for (n, ticket) in tickets {
        let outputs = engine.collect(ticket)?;
        check(&format!("run {n} of add at sum"), outputs.get("out")?, f32::from(n) + 1.5);
    }
    Ok(())
}

/// State is written and read in the order of the runs around it, in more pieces than there are staging
/// buffers.
pub(crate) fn state_changes_between_runs_in_flight() -> Result<(), Failed> {
    let mut engine = engine()?;
    let mut tracer = Tracer::default();
    let state = tracer.state(StateKind::Gradient, "large", vector(LARGE));
    let norm = tracer.site("norm").emit(GradNorm, &[state])?[0];
    tracer.output("norm", norm);
    let id = engine.load(tracer.finish())?;
    check("new state", &engine.read_state(StateKind::Gradient, "large")?, 0.0);
    let value = |n: usize, i: usize| (n * 7 + i / (1 << 18) + 1) as f32;
    let mut tickets = Vec::new();
    for n in 0..3 {
        let bytes: Vec<u8> = (0..LARGE).flat_map(|i| value(n, i).to_le_bytes()).collect();
        engine.write_state(StateKind::Gradient, "large", &bytes)?;
        engine.run(id, Part::Whole)?;
        tickets.push((n, engine.fetch(id)?));
    }
    let read = floats(&engine.read_state(StateKind::Gradient, "large")?);
    let wrong = read.iter().enumerate().find(|&(i, x)| *x != value(2, i));
    assert!(wrong.is_none(), "the state that was written last has the element and value {wrong:?}");
    for (n, ticket) in tickets {
        let expected = (0..LARGE).map(|i| f64::from(value(n, i)).powi(2)).sum::<f64>().sqrt() as f32;
        let found = floats(engine.collect(ticket)?.get("norm")?)[0];
        let error = (found / expected - 1.0).abs();
        assert!(
            error < 1e-6,
            "run {n} of grad_norm at norm reads the state of another run: {found} instead of {expected}"
        );
    }
    Ok(())
}

/// A program that needs more scratch is loaded while another one is in flight. Both then run as graphs, and
/// the engine is dropped while runs are in flight.
pub(crate) fn programs_are_loaded_beside_runs_in_flight() -> Result<(), Failed> {
    let mut engine = engine()?;
    let small = engine.load(add_state(4))?;
    engine.write_state(StateKind::Master, "state", &filled(0.25, SMALL))?;
    let mut tickets = Vec::new();
    for n in 0..3 {
        enqueue(&mut engine, small, n)?;
        tickets.push((n, engine.fetch(small)?));
    }
    let elements = (3 << 20) / 4 + 3;
    let large = engine.load(add_input(elements, 3))?;
    for n in 3..6u8 {
        engine.write_input(large, "in", &filled(n.into(), elements))?;
        engine.write_input(large, "other", &filled(2.0, elements))?;
        engine.run(large, Part::Whole)?;
        enqueue(&mut engine, small, n)?;
        tickets.push((n, engine.fetch(small)?));
        let outputs = engine.outputs(large)?;
        check(&format!("run {n} of the program loaded last"), outputs.get("out")?, f32::from(n) + 6.0);
    }
    for (n, ticket) in tickets {
        let outputs = engine.collect(ticket)?;
        check(&format!("run {n} of the program loaded first"), outputs.get("out")?, f32::from(n) + 1.0);
    }
    for n in 0..3 {
        enqueue(&mut engine, small, n)?;
    }
    drop(engine);
    Ok(())
}

/// Programs of several lanes give the CPU's bits op by op, while they are recorded, and as graphs.
pub(crate) fn lanes_wait_for_each_other() -> Result<(), Failed> {
    for seed in (0..LANE_PROGRAMS).map(|n| common::seed().wrapping_add(n)) {
        let expected = results(&mut CpuEngine::new(Arc::new(cpu_kernels())), random_program(seed), 3)?;
        let found = results(&mut engine()?, random_program(seed), 3)?;
        assert!(
            found == expected,
            "program XTRAIN_TEST_SEED={seed}: add at sum has other bits than on the CPU"
        );
    }
    Ok(())
}

/// A program of two lanes in which every wait matters: between the lanes in both directions, for the copy of
/// the inputs before it, and for the state that the run before left.
fn two_lanes() -> Program {
    let mut tracer = Tracer::default();
    let input = tracer.input("in", vector(SMALL));
    let [r, s, t, u] = ["r", "s", "t", "u"].map(|name| tracer.state(StateKind::Master, name, vector(SMALL)));
    let mut lanes = Vec::new();
    let mut sum = |lane, inputs: [ValueId; 2], target| {
        lanes.push(lane);
        tracer.site("sum").emit_into(Add, &inputs, &[target]).expect("two vectors of one type")[0]
    };
    sum(Lane::Communication, [u, input], Some(u));
    let a = sum(Lane::Compute, [input, s], None);
    sum(Lane::Communication, [r, a], Some(r));
    let c = sum(Lane::Compute, [input, t], None);
    let out = sum(Lane::Compute, [c, r], None);
    sum(Lane::Communication, [t, c], Some(t));
    sum(Lane::Compute, [s, u], Some(s));
    tracer.output("out", out);
    let mut program = tracer.finish();
    program.instances.iter_mut().zip(lanes).for_each(|(instance, lane)| instance.lane = lane);
    program
}

/// Runs of [`two_lanes`] that follow each other without a wait: two op by op, two recorded, two replayed.
pub(crate) fn two_lanes_wait_for_each_other() -> Result<(), Failed> {
    let run = |engine: &mut dyn Engine| -> Result<Vec<f32>, EngineError> {
        let id = engine.load(two_lanes())?;
        let mut tickets = Vec::new();
        for n in 1..7u8 {
            engine.write_input(id, "in", &filled(n.into(), SMALL))?;
            engine.run(id, if n % 2 == 1 { Part::Whole } else { Part::First })?;
            tickets.push(engine.fetch(id)?);
        }
        let mut found = Vec::new();
        for ticket in tickets {
            found.extend(floats(engine.collect(ticket)?.get("out")?));
        }
        for name in ["r", "s", "t", "u"] {
            found.extend(floats(&engine.read_state(StateKind::Master, name)?));
        }
        Ok(found)
    };
    let expected = run(&mut CpuEngine::new(Arc::new(cpu_kernels())))?;
    let found = run(&mut engine()?)?;
    let wrong = found.iter().zip(&expected).enumerate().find(|(_, (found, expected))| found != expected);
    assert!(wrong.is_none(), "add at sum: element and values {wrong:?} differ from the CPU's");
    Ok(())
}
