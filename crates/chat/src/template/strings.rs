//! Operations on strings that filters and methods share.

use std::collections::BTreeSet;

use minijinja::{Error, State, Value};

use super::python;

/// `str.strip` at either end, of Python's white space unless `chars` are given.
pub(super) fn strip<'s>(string: &'s str, chars: Option<&str>, at_start: bool, at_end: bool) -> &'s str {
    let chars: Option<BTreeSet<char>> = chars.map(|chars| chars.chars().collect());
    let is_removed = |c: char| chars.as_ref().map_or(python::is_space(c), |chars| chars.contains(&c));
    let string = if at_start { string.trim_start_matches(is_removed) } else { string };
    if at_end { string.trim_end_matches(is_removed) } else { string }
}

/// Bytes that are searched or replaced for the work of one instruction.
const SEARCHED_BYTES: usize = 16;

/// `str.replace`, whose result is paid for before it exists.
pub(super) fn replace(
    state: &State,
    string: &str,
    old: &str,
    new: &str,
    count: usize,
) -> Result<Value, Error> {
    state.consume_fuel(1 + (string.len() / SEARCHED_BYTES) as u64)?;
    let matches = if old.is_empty() { string.len() + 1 } else { string.matches(old).count() }.min(count);
    let growth = matches.saturating_mul(new.len().saturating_sub(old.len()));
    state.consume_fuel((growth / SEARCHED_BYTES) as u64)?;
    Ok(Value::from(string.replacen(old, new, matches)))
}
