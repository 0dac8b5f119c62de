//! Protection against panics of other crates on damaged files.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a parser of another crate and turns a panic into an error.
///
/// After an error the caller must not use values that `step` was changing.
pub(crate) fn catch_panic<T, E: Display>(step: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(step)) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(_) => Err("the library that reads it failed".to_owned()),
    }
}
