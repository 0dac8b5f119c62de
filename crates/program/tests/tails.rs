//! The tail of a ragged tensor is left undefined exactly where no reader needs it.

mod common;

use common::{Fun, vector};
use std::sync::Arc;
use xtrain_program::{
    Op, OpError, Program, RaggedOp, RaggedOps, Role, Stage, Storage, Tail, Tracer, ValueId, tails,
};
use xtrain_tensor::TensorType;

/// Row by row: it reads the tails of its inputs if it writes that of its output.
#[derive(Clone, Copy, Debug)]
struct Rows(Tail);

impl Op for Rows {
    fn name(&self) -> &'static str {
        if self.0.is_undefined() { "undefined" } else { "zeros" }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![inputs[0]])
    }
}

impl RaggedOp for Rows {
    fn reads_tail(&self, _: usize) -> bool {
        !self.0.is_undefined()
    }

    fn tail(&self, _: usize) -> Option<Tail> {
        Some(self.0)
    }

    fn with_tail(&self, tail: Tail) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Rows(tail)))
    }
}

/// A GEMM of groups, which reads no tail of its first input.
#[derive(Clone, Copy, Debug)]
struct Groups;

impl Op for Groups {
    fn name(&self) -> &'static str {
        "groups"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![inputs[0]])
    }
}

impl RaggedOp for Groups {
    fn reads_tail(&self, input: usize) -> bool {
        input > 0
    }

    fn live_rows(&self) -> Option<usize> {
        Some(300)
    }
}

/// The ops that know tails.
fn ragged() -> RaggedOps {
    let mut ops = RaggedOps::default();
    ops.register::<Rows>(|op| op);
    ops.register::<Groups>(|op| op);
    ops
}

/// x -> a -> b -> GEMM, and further readers of a or b.
fn chain(further: impl FnOnce(&mut Tracer, [ValueId; 2])) -> Program {
    let mut t = Tracer::new(Program::default(), Stage::Backward, Role::Dgrad);
    let x = t.input("x", vector(1024));
    let a = t.site("a").emit(Rows(Tail::Zeros), &[x]).expect("traced")[0];
    let b = t.site("b").emit(Rows(Tail::Zeros), &[a]).expect("traced")[0];
    t.site("gemm").emit(Groups, &[b, x]).expect("traced");
    further(&mut t, [a, b]);
    tails::apply(t.finish(), &ragged())
}

/// The ops at a and b.
fn ops(program: &Program) -> [&'static str; 2] {
    [0, 1].map(|n| program.instances[n].code.op().name())
}

#[test]
fn a_tail_is_undefined_if_no_reader_depends_on_it() {
    let program = chain(|_, _| {});
    assert_eq!(ops(&program), ["undefined"; 2]);
    let tail = Some(Tail::Undefined { live_rows: 300 });
    let ragged = ragged();
    let found = [0, 1].map(|n| ragged.find(program.instances[n].code.op()).and_then(|op| op.tail(0)));
    assert_eq!(found, [tail; 2]);
    assert_eq!(ops(&tails::written(program)), ["zeros"; 2]);
}

#[test]
fn a_reader_of_the_tail_keeps_it_and_those_that_it_is_computed_from() {
    let read = |n: usize| chain(|t, values| drop(t.site("other").emit(Fun("other"), &[values[n]])));
    assert_eq!(ops(&read(0)), ["zeros", "undefined"]);
    assert_eq!(ops(&read(1)), ["zeros"; 2]);
    let of_gemm = chain(|t, [a, b]| drop(t.site("other gemm").emit(Groups, &[b, a])));
    assert_eq!(ops(&of_gemm), ["zeros", "undefined"], "the second input of a GEMM");
}

#[test]
fn the_host_and_state_keep_tails() {
    let output = chain(|t, [_, b]| t.output("b", b));
    assert_eq!(ops(&output), ["zeros"; 2]);
    let mut program = chain(|_, _| {});
    let b = program.instances[1].outputs[0].value;
    program.values[b.0 as usize].storage = Storage::Output { name: "b".into() };
    assert_eq!(ops(&tails::apply(tails::written(program), &ragged())), ["zeros"; 2]);
}

#[test]
fn without_groups_all_tails_are_written() {
    let mut t = Tracer::new(Program::default(), Stage::Backward, Role::Dgrad);
    let x = t.input("x", vector(1024));
    let a = t.emit(Rows(Tail::Zeros), &[x]).expect("traced")[0];
    t.emit(Rows(Tail::Zeros), &[a]).expect("traced");
    assert_eq!(ops(&tails::apply(t.finish(), &ragged())), ["zeros"; 2]);
}
