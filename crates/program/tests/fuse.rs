//! The pass that applies rewrites: the pairs that it replaces, and the positions of the new instances.

mod common;

use common::{Fun, vector};
use std::sync::Arc;
use xtrain_program::{
    Edge, Link, Node, Op, OpRewrite, Pair, Program, Replacement, Rewrite, Role, Stage, Tracer, ValueId, fuse,
};

fn node(name: &'static str, inputs: &[Edge], outputs: &[Edge]) -> OpRewrite {
    let op: Arc<dyn Op> = Arc::new(Fun(name));
    OpRewrite::New(Node { op, inputs: inputs.to_vec(), outputs: outputs.to_vec() })
}

fn is(op: Option<&Fun>, name: &str) -> Option<()> {
    op.is_some_and(|op| op.0 == name).then_some(())
}

/// `a(x) -> y`, `b(y) -> z` => `ab(x) -> z`, unless y has other readers.
const ABSORB: Rewrite = Rewrite {
    name: "absorb",
    link: Link::Output,
    apply: |pair: &Pair<'_>| {
        is(pair.producer(), "a").and(is(pair.consumer(), "b"))?;
        let consumer = node("ab", &[Edge::ProducerInput(0)], &[Edge::ConsumerOutput(0)]);
        pair.is_private(0).then_some(Replacement { producer: OpRewrite::Empty, consumer })
    },
};

/// `a(x) -> y`, `g(x) -> dx` => `ag(x) -> y` in the place of g. For brevity dx is dropped.
const SHARE: Rewrite = Rewrite {
    name: "share",
    link: Link::Input,
    apply: |pair: &Pair<'_>| {
        is(pair.producer(), "a").and(is(pair.consumer(), "g"))?;
        pair.shares(0)?;
        let consumer = node("ag", &[Edge::ConsumerInput(0)], &[Edge::ProducerOutput(0)]);
        Some(Replacement { producer: OpRewrite::Empty, consumer })
    },
};

/// `a(x) -> y`, `b(y) -> z` => `ab(x) -> y` and z in the producer's place.
const MOVE_UP: Rewrite = Rewrite {
    name: "move_up",
    link: Link::Output,
    apply: |pair: &Pair<'_>| {
        is(pair.producer(), "a").and(is(pair.consumer(), "b"))?;
        let producer = node("ab", &[Edge::ProducerInput(0)], &[Edge::ConsumerOutput(0)]);
        pair.is_private(0).then_some(Replacement { producer, consumer: OpRewrite::Empty })
    },
};

struct Trace(Tracer);

impl Trace {
    fn new() -> (Trace, ValueId) {
        let mut t = Tracer::new(Program::default(), Stage::Backward, Role::Dgrad);
        let x = t.input("x", vector(8));
        (Trace(t), x)
    }

    fn op(&mut self, name: &'static str, inputs: &[ValueId]) -> ValueId {
        self.0.emit(Fun(name), inputs).expect("traced")[0]
    }
}

/// The names of the ops after this rewrite.
fn after(trace: Trace, rewrite: &Rewrite) -> Vec<String> {
    let program = fuse::apply(trace.0.finish(), [rewrite]).expect("a program");
    program.instances.iter().map(|i| i.code.op().name().to_owned()).collect()
}

#[test]
fn a_private_value_is_never_written() {
    let (mut t, x) = Trace::new();
    let y = t.op("a", &[x]);
    t.op("other", &[x]);
    t.op("b", &[y]);
    assert_eq!(after(t, &ABSORB), ["other", "ab"]);
}

#[test]
fn a_value_with_another_reader_stays() {
    let (mut t, x) = Trace::new();
    let y = t.op("a", &[x]);
    t.op("b", &[y]);
    t.op("other", &[y]);
    assert_eq!(after(t, &ABSORB), ["a", "b", "other"]);
}

#[test]
fn readers_of_a_value_that_moves_down_wait_with_those_that_depend_on_them() {
    let (mut t, x) = Trace::new();
    let y = t.op("a", &[x]);
    let reader = t.op("reader", &[y]);
    t.op("independent", &[x]);
    t.op("dependent", &[reader]);
    t.op("g", &[x]);
    assert_eq!(after(t, &SHARE), ["independent", "ag", "reader", "dependent"]);
}

#[test]
fn a_consumer_that_depends_on_the_value_cannot_take_it_over() {
    let (mut t, x) = Trace::new();
    let y = t.op("a", &[x]);
    let reader = t.op("reader", &[y]);
    t.op("g", &[x, reader]);
    assert_eq!(after(t, &SHARE), ["a", "reader", "g"]);
}

#[test]
fn an_output_moves_up_unless_something_before_its_writer_touches_it() {
    let (mut t, x) = Trace::new();
    let y = t.op("a", &[x]);
    t.op("other", &[x]);
    t.op("b", &[y]);
    assert_eq!(after(t, &MOVE_UP), ["ab", "other"]);

    let (mut t, x) = Trace::new();
    let y = t.op("a", &[x]);
    let z = t.op("other", &[x]);
    t.0.emit_into(Fun("b"), &[y], &[Some(z)]).expect("traced");
    assert_eq!(after(t, &MOVE_UP), ["a", "other", "b"]);
}
