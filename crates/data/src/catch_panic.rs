//! Protection against panics of other crates on damaged files.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a parser of another crate and turns a panic into an error.
///
/// After an error the caller must not use values that `step` was changing.
pub(crate) fn catch_panic<T, E: Display>(step: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(step)) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(panic) => Err(problem(panic.as_ref())),
    }
}

/// The problem behind a panic. The regular-expression engine panics with its reason for giving up a search.
fn problem(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    match text.and_then(|text| text.strip_prefix("Onig: Regex search error: ")) {
        Some(limit) => format!("a regular expression takes too long on this text ({limit})"),
        None => "the library that reads it failed".to_owned(),
    }
}
