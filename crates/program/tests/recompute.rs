//! Recomputation changes the backward alone, and recomputes only values that the backward reads.

mod common;

use common::{Cast, Fun, Inserted, vector};
use xtrain_program::backward::backward;
use xtrain_program::{
    Op, OpError, Plan, Program, Purpose, Rebuild, Recompute, Role, Root, Stage, StateKind, Tracer, ValueId,
    recompute,
};
use xtrain_tensor::{DType, TensorType};

/// A block of two ops, the second of which reads a cast that a precision pass put between them, and its
/// backward.
fn with_a_cast() -> Program {
    let mut t = Tracer::default();
    let (x, w) = (t.input("x", vector(1024)), t.parameter("w", vector(1024)));
    let entered = t.site("embed").apply(Fun("embed"), &[x, w]).expect("traced")[0];
    t.enter_block(Some(0));
    t.boundary(entered);
    let hidden = t.site("up").apply(Fun("up"), &[entered, w]).expect("traced")[0];
    t.site("down").apply(Fun("down"), &[hidden, w]).expect("traced");
    let mut program = t.finish();
    // The cast stands before its reader, as the pass writes it.
    let reader = program.instances.pop().expect("down");
    let mut t = Tracer::new(program, Stage::Forward, Role::Precision);
    t.enter_block(Some(0));
    let cast = t.site("down").emit(Cast(DType::F32), &[hidden]).expect("traced")[0];
    let mut program = t.finish();
    program.instances.push(xtrain_program::Instance { inputs: vec![cast, w], ..reader });
    let mut t = Tracer::new(program, Stage::Backward, Role::Dgrad);
    t.enter_block(Some(0));
    let last = t.program().instances.last().expect("down").outputs[0].value;
    let through = t.site("down").emit(Fun("down_grad"), &[last, cast, w]).expect("traced")[0];
    t.site("up").emit(Fun("up_grad"), &[through, entered]).expect("traced");
    t.finish()
}

/// The op, role and inputs of each instance.
fn lines(program: &Program) -> Vec<(&str, Role, Vec<ValueId>)> {
    program.instances.iter().map(|i| (i.code.op().name(), i.origin.role, i.inputs.clone())).collect()
}

#[test]
fn a_cast_in_the_forward_is_recomputed_with_its_block() {
    let before = with_a_cast();
    let after = recompute::apply(before.clone(), Recompute::Block, None).expect("applied");
    // The forward reads no recomputed value.
    assert_eq!(lines(&after)[..4], lines(&before)[..4]);
    let recomputed: Vec<&str> = after
        .instances
        .iter()
        .filter(|i| i.origin.role == Role::Recompute)
        .map(|i| i.code.op().name())
        .collect();
    assert_eq!(recomputed, ["up", "cast", "down"]);
    assert!(after.instances.iter().skip(4).all(|i| i.origin.stage == Stage::Backward));
    let cast = before.instances[2].outputs[0].value;
    assert!(!after.instances.iter().skip(4).any(|i| i.inputs.contains(&cast)), "{after}");
}

#[test]
fn a_cast_in_the_forward_that_the_backward_reads_counts_as_saved_by_its_block() {
    let plan = Plan::new(&with_a_cast(), &|_, _| Vec::new());
    let saved = |p: &Purpose| matches!(p, Purpose::Saved(Some(0)));
    let bytes: usize = plan.memory.rows.iter().filter(|r| saved(&r.purpose)).map(|r| r.bytes).sum();
    // The cast and the last output: at the peak both are live until the backward reads them.
    assert_eq!(bytes, 2 * 4096, "{:?}", plan.memory);
}

/// `x -> (y, cache)`: writes a state value in addition to its output.
#[derive(Clone, Copy, Debug)]
struct Store;

impl Op for Store {
    fn name(&self) -> &'static str {
        "store"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![inputs[0], inputs[0]])
    }

    fn rebuild(&self, _: &[bool]) -> Rebuild {
        Rebuild::Never
    }
}

#[test]
fn an_op_that_writes_state_runs_once() {
    let mut t = Tracer::default();
    let (x, w) = (t.input("x", vector(8)), t.parameter("w", vector(8)));
    let cache = t.state(StateKind::Cache, "keys", vector(8));
    t.enter_block(Some(0));
    let output = t.site("core").emit_into(Store, &[x], &[None, Some(cache)]).expect("traced")[0];
    let loss = t.site("up").apply(Fun("up"), &[output, w]).expect("traced")[0];
    let seed = t.input("seed", vector(8));
    let root = Root { value: loss, grad: Some(seed) };
    let (program, _) = backward(t.finish(), &[root], &[], &Inserted).expect("a backward");
    let after = recompute::apply(program.clone(), Recompute::Block, None).expect("applied");
    assert_eq!(lines(&after), lines(&program));
    let effects: Vec<ValueId> = after.instances[0].effects(&after).collect();
    assert_eq!(effects, [cache]);
}
