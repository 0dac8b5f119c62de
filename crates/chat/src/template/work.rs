//! Payment in fuel for work that `minijinja` does not count, or not enough: walks of values, and text that
//! is read character by character.
//!
//! A list may hold another one twice, which holds another twice, and so on: the walk of such a value has no
//! end, although it takes no memory. So what is printed or compared is paid for value by value, each as often
//! as it is reached.

use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};

use super::lazy::Lazy;
use super::refuse;

/// Maximum depth of values that are printed, compared or stored; JSON of rows reaches 128.
pub(super) const MAX_DEPTH: usize = 200;

/// Bytes of text that cost as much as an instruction.
const BYTES: usize = 16;

/// Bytes that are compared or copied for the same.
const COPIED_BYTES: usize = 64;

/// The problem of a template that has no fuel left.
pub(super) const TOO_LONG: &str = "runs too long";

/// Pays for a text of so many bytes that is read or written character by character.
pub(super) fn pay_for_text(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel(1 + (bytes / BYTES) as u64)
}

/// Pays for a text of so many bytes that is copied.
pub(super) fn pay_for_copy(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel((bytes / COPIED_BYTES) as u64)
}

/// Pays for a walk of a value, and of all that it holds.
///
/// # Errors
/// Values nested too deeply.
pub(super) fn pay_for_walk(state: &State, value: &Value) -> Result<(), Error> {
    walk(state, value, 0)
}

fn walk(state: &State, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(refuse("values are nested too deeply"));
    }
    state.consume_fuel(1 + value.as_str().map_or(0, |text| (text.len() / COPIED_BYTES) as u64))?;
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                walk(state, &item, depth + 1)?;
            }
        }
        ValueKind::Map => {
            for key in value.try_iter()? {
                walk(state, &key, depth + 1)?;
                walk(state, &value.get_item(&key)?, depth + 1)?;
            }
        }
        _ => {
            let items = value.downcast_object_ref::<Lazy>().map(Lazy::items);
            items.map_or(Ok(()), |items| walk(state, items, depth + 1))?;
        }
    }
    Ok(())
}

/// Pays for comparisons of the items of a list with each other, as sorting does.
pub(super) fn pay_for_sort(state: &State, value: &Value) -> Result<(), Error> {
    let consumed = || state.fuel_levels().map_or(0, |(consumed, _)| consumed);
    let before = consumed();
    pay_for_walk(state, value)?;
    let each = u64::from(value.len().unwrap_or_default().max(1).ilog2());
    state.consume_fuel((consumed() - before).saturating_mul(each))
}
