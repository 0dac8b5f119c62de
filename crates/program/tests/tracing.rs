//! Names in a trace: values that are requested twice under one name.

mod common;

use common::vector;
use xtrain_program::{StateKind, Tracer, ValueId};
use xtrain_tensor::{HostTensor, TensorType};

/// A method that returns the value of a name.
type Ask = fn(&mut Tracer, TensorType) -> ValueId;

const ASKS: [(&str, Ask); 4] = [
    ("master `x`", |t, ty| t.parameter("x", ty)),
    ("moment1 `x`", |t, ty| t.state(StateKind::Moment1, "x", ty)),
    ("input `x`", |t, ty| t.input("x", ty)),
    ("constant `x`", |t, ty| t.constant("x", ty, move || HostTensor::zeros(ty))),
];

#[test]
fn a_name_asked_for_twice_is_one_value() {
    let mut t = Tracer::default();
    let first = ASKS.map(|(_, ask)| ask(&mut t, vector(3)));
    assert_eq!(ASKS.map(|(_, ask)| ask(&mut t, vector(3))), first);
    let program = t.finish();
    assert_eq!((program.values.len(), program.parameters.len()), (4, 1));
}

#[test]
fn a_name_asked_for_with_another_type_is_a_bug_that_says_so() {
    for (what, ask) in ASKS {
        let caught = std::panic::catch_unwind(|| {
            let mut t = Tracer::default();
            ask(&mut t, vector(3));
            ask(&mut t, vector(4))
        });
        let message = *caught.expect_err(what).downcast::<String>().expect("a message");
        assert!(
            message.contains(what) && message.contains("f32[3]") && message.contains("f32[4]"),
            "{message}"
        );
    }
}
