//! The backward pass: which ops it needs to differentiate, and its errors.

mod common;

use common::{Fun, Inserted, vector};
use xtrain_program::backward::{BackwardError, backward};
use xtrain_program::{Root, Tracer};

#[test]
fn an_op_without_a_backward_between_loss_and_parameters_is_an_error_that_names_it() {
    let mut t = Tracer::default();
    t.enter_block(Some(2));
    let (x, w) = (t.input("x", vector(4)), t.parameter("w", vector(4)));
    let hidden = t.site("first").apply(Fun("first"), &[x, w]).expect("traced")[0];
    let cached = t.site("core").emit(Fun("cached"), &[hidden]).expect("traced")[0];
    let loss = t.site("last").apply(Fun("last"), &[cached]).expect("traced")[0];
    let seed = t.input("seed", vector(4));
    let root = Root { value: loss, grad: Some(seed) };
    let refused = backward(t.finish(), &[root], &[], &Inserted).map(|_| ()).expect_err("no backward");
    assert_eq!(refused, BackwardError::NoBackward { site: "blocks.2.core".into(), op: "cached" });
}

#[test]
fn an_op_without_a_backward_is_accepted_where_no_gradient_flows() {
    let mut t = Tracer::default();
    let (x, w) = (t.input("x", vector(4)), t.parameter("w", vector(4)));
    // No input needs a gradient.
    let prepared = t.emit(Fun("prepared"), &[x]).expect("traced")[0];
    let loss = t.apply(Fun("loss"), &[prepared, w]).expect("traced")[0];
    // No output has a gradient.
    t.emit(Fun("metric"), &[loss]).expect("traced");
    let seed = t.input("seed", vector(4));
    let root = Root { value: loss, grad: Some(seed) };
    let (program, _) = backward(t.finish(), &[root], &[], &Inserted).expect("a backward");
    assert!(program.parameters[0].gradient.is_some());
}
