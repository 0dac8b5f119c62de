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

/// The message of Oniguruma, the regular-expression engine, if the system refuses it memory.
pub const NO_REGEX_MEMORY: &str = "fail to memory allocation";

/// The problem behind a panic. The regular-expression engine panics with its reason for giving up a search.
fn problem(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    match text.and_then(|text| text.strip_prefix("Onig: Regex search error: ")) {
        Some(NO_REGEX_MEMORY) => {
            "the system refuses memory for the search of a regular expression".to_owned()
        }
        Some(limit) => format!("a regular expression takes too long on this text ({limit})"),
        None => "the library that reads it failed".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_that_gives_up_is_told_from_one_without_memory() {
        let said = |why: &str| {
            let why = format!("Onig: Regex search error: {why}");
            catch_panic(|| -> Result<(), String> { panic!("{why}") }).expect_err("it panicked")
        };
        assert!(said("retry-limit-in-search over").contains("takes too long on this text (retry-limit"));
        assert!(said(NO_REGEX_MEMORY).contains("refuses memory"));
    }
}
