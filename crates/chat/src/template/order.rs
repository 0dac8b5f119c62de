//! Comparisons of values, as Python's `==`, `<` and `in`, which pay for what they compare. Python does not
//! order values of unlike types.

use std::cmp::Ordering;

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, State, Value, tests};

use super::{lazy, python, refuse, work};

/// Filter that pays for an operand of a comparison.
pub(super) const COMPARED_FILTER: &str = "xtrain_compared";

/// Filter that refuses an operand of a chain of comparisons that is no number.
pub(super) const NUMBER_FILTER: &str = "xtrain_number";

/// The order of two values.
///
/// # Errors
/// Values that Python does not order: of unlike types, undefined, none, dictionaries.
pub(super) fn order(one: &Value, other: &Value) -> Result<Ordering, Error> {
    if let (Some(one), Some(other)) = (number(one), number(other)) {
        return Ok(one.cmp(&other));
    }
    if let (Some(one), Some(other)) = (one.as_str(), other.as_str()) {
        return Ok(one.cmp(other));
    }
    if !python::is_list(one) || !python::is_list(other) || one.is_tuple() != other.is_tuple() {
        let kinds = format!("{} and {}", one.kind(), other.kind());
        return Err(refuse(format!("values of types that Python does not order ({kinds})")));
    }
    let (mut one, mut other) = (one.try_iter()?, other.try_iter()?);
    loop {
        match (one.next(), other.next()) {
            (Some(one), Some(other)) if one == other => {}
            (Some(one), Some(other)) => return order(&one, &other),
            (one, other) => return Ok(one.is_some().cmp(&other.is_some())),
        }
    }
}

/// The number, as a value that `minijinja` compares with other numbers.
fn number(value: &Value) -> Option<Value> {
    match (python::as_float(value), value.kind()) {
        (Some(float), _) => Some(Value::from(float)),
        (None, ValueKind::Bool) => Some(Value::from(i64::from(value.is_true()))),
        (None, ValueKind::Number) => Some(value.clone()),
        _ => None,
    }
}

/// `value in container`.
///
/// # Errors
/// A container that holds nothing, such as a number; a value that the container cannot hold.
fn contains(state: &State, value: &Value, container: &Value) -> Result<bool, Error> {
    if container.as_str().is_some() && value.as_str().is_none() {
        return Err(refuse(format!("`in` asks a string for a value that is none ({})", value.kind())));
    }
    if container.kind() == ValueKind::Map && !is_hashable(value) {
        return Err(refuse(format!("`in` asks a dictionary for a value that is no key ({})", value.kind())));
    }
    if let Some(items) = lazy::taken(container)? {
        return tests::is_in(state, value, &items);
    }
    let is_single =
        matches!(container.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Plain);
    if is_single || python::is_opaque(container) {
        return Err(refuse(format!("`in` asks a value that holds no others ({})", container.kind())));
    }
    tests::is_in(state, value, container)
}

/// True for a value that may be a key of a dictionary.
pub(super) fn is_hashable(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Map => false,
        ValueKind::Seq | ValueKind::Iterable => {
            value.is_tuple() && value.try_iter().is_ok_and(|mut items| items.all(|item| is_hashable(&item)))
        }
        _ => true,
    }
}

/// A value that `==` compares as Python does.
///
/// # Errors
/// A value whose `==` in Python is that of its address, or of a set.
fn comparable(value: &Value) -> Result<Value, Error> {
    match python::is_opaque(value) || lazy::is_lazy(value) {
        true => Err(refuse("a namespace, macro or iterator is compared")),
        // Floats that print with an exponent are objects.
        false => Ok(python::as_float(value).map_or_else(|| value.clone(), Value::from)),
    }
}

/// Adds the filters and tests that compare values, with payment.
pub(super) fn add(environment: &mut Environment<'static>) {
    environment.add_filter(COMPARED_FILTER, |state: &State, value: Value| {
        work::pay_for_walk(state, &value)?;
        comparable(&value)
    });
    environment.add_filter(NUMBER_FILTER, |value: Value| {
        number(&value).ok_or_else(|| refuse("a chain of comparisons needs numbers: write them with `and`"))
    });
    type Compares = fn(&Value, &Value) -> Result<bool, Error>;
    let compares: [(&[&'static str], Compares); 7] = [
        (&["eq", "equalto", "=="], |a, b| Ok(comparable(a)? == comparable(b)?)),
        (&["ne", "!="], |a, b| Ok(comparable(a)? != comparable(b)?)),
        (&["lt", "lessthan", "<"], |a, b| Ok(order(a, b)?.is_lt())),
        (&["le", "<="], |a, b| Ok(order(a, b)?.is_le())),
        (&["gt", "greaterthan", ">"], |a, b| Ok(order(a, b)?.is_gt())),
        (&["ge", ">="], |a, b| Ok(order(a, b)?.is_ge())),
        (&["sameas"], |a, b| Ok(tests::is_sameas(a, b))),
    ];
    for (names, compares) in compares {
        for name in names {
            environment.add_test(*name, move |state: &State, a: Value, b: Value| {
                work::pay_for_walk(state, &a)?;
                work::pay_for_walk(state, &b)?;
                compares(&a, &b)
            });
        }
    }
    environment.add_test("in", |state: &State, a: Value, b: Value| {
        work::pay_for_walk(state, &a)?;
        work::pay_for_walk(state, &b)?;
        contains(state, &a, &b)
    });
}

#[cfg(test)]
mod tests_of_order {
    use super::*;

    #[test]
    fn unlike_types_have_no_order() {
        let list = |items: &[&Value]| Value::from(items.iter().map(|&item| item.clone()).collect::<Vec<_>>());
        let (one, text, none) = (Value::from(1), Value::from("a"), Value::from(()));
        for (a, b, wanted) in [
            (&one, &Value::from(1.5), Some(Ordering::Less)),
            (&Value::from(true), &one, Some(Ordering::Equal)),
            (&text, &Value::from("B"), Some(Ordering::Greater)),
            (&one, &text, None),
            (&none, &none, None),
            (&Value::UNDEFINED, &one, None),
            (&list(&[&none]), &list(&[&none]), Some(Ordering::Equal)),
            (&list(&[&one]), &list(&[&one, &text]), Some(Ordering::Less)),
            (&list(&[&one, &text]), &list(&[&one, &none]), None),
        ] {
            assert_eq!(order(a, b).ok(), wanted, "{a:?} {b:?}");
        }
    }
}
