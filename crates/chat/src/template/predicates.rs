//! Tests of Jinja2 (`x is string`), where `minijinja` has others or answers otherwise. Tests that only
//! `minijinja` has are removed.

use minijinja::value::{ObjectRepr, ValueKind};
use minijinja::{Environment, Error, State, Value};

use super::data::BoundMethod;
use super::lazy::{self, Lazy};
use super::python;

/// Tests of `minijinja` that Jinja2 lacks.
const REMOVED: [&str; 5] = ["int", "safe", "escaped", "startingwith", "endingwith"];

/// Adds the tests.
pub(super) fn add(environment: &mut Environment<'static>) {
    REMOVED.iter().for_each(|name| environment.remove_test(name));
    let mut add = |name: &'static str, is: fn(&Value) -> bool| {
        environment.add_test(name, move |value: Value| is(&value));
    };
    add("none", Value::is_none);
    add("boolean", |value| value.kind() == ValueKind::Bool);
    add("true", |value| value.kind() == ValueKind::Bool && value.is_true());
    add("false", |value| value.kind() == ValueKind::Bool && !value.is_true());
    add("string", |value| value.as_str().is_some());
    add("integer", |value| value.kind() == ValueKind::Number && value.is_integer());
    add("float", |value| python::as_float(value).is_some());
    // Python's booleans are numbers.
    add("number", |value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool) || python::as_float(value).is_some()
    });
    add("mapping", is_mapping);
    // What has a length and items; undefined has both.
    add("sequence", |value| {
        let has_items = is_mapping(value) || value.is_undefined();
        let is_range = value.downcast_object_ref::<Lazy>().is_some_and(Lazy::is_sequence);
        has_items || is_range || value.as_str().is_some() || python::is_list(value)
    });
    add("iterable", |value| {
        let is_single = matches!(
            value.kind(),
            ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Plain | ValueKind::Invalid
        );
        lazy::is_lazy(value) || !is_single && !python::is_opaque(value)
    });
    // Calling undefined is what fails, in Jinja2.
    add("callable", |value| value.is_undefined() || is_callable(value));
    let mut add = |name: &'static str, has: fn(char) -> bool, lacks: fn(char) -> bool| {
        environment.add_test(name, move |state: &State, value: Value| -> Result<bool, Error> {
            let text = python::string(state, &value)?;
            Ok(text.chars().any(has) && !text.chars().any(lacks))
        });
    };
    add("lower", char::is_lowercase, char::is_uppercase);
    add("upper", char::is_uppercase, char::is_lowercase);
}

fn is_mapping(value: &Value) -> bool {
    value.kind() == ValueKind::Map && !python::is_opaque(value)
}

/// True for values that can be called.
fn is_callable(value: &Value) -> bool {
    let is_plain = value.as_object().is_some_and(|object| object.repr() == ObjectRepr::Plain);
    value.downcast_object_ref::<BoundMethod>().is_some()
        || is_plain && !lazy::is_lazy(value) && value.downcast_object_ref::<python::Float>().is_none()
}
