//! Steps of other crates that damaged files make panic.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a step of a crate that reads what is in a file. A damaged one can make it panic, and a panic is an error here.
///
/// What the step changes must be of no use after an error.
pub(crate) fn catch_panic<T, E: Display>(step: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(step)) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(_) => Err("the library that reads it gave up".to_owned()),
    }
}
