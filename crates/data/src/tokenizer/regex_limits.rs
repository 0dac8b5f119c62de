//! Limits of the regular-expression engine, Oniguruma, which backtracks.
//!
//! A `tokenizer.json` may bring an expression whose search takes exponential time, or memory for each way of
//! matching a text. The engine stops at these limits with an error, which the `tokenizers` crate turns into a
//! panic and [`crate::catch_panic`] into a message. They are process-wide: the crate compiles and searches
//! without parameters of its own. So do the expressions of tasks.

#![allow(unsafe_code)]

use std::sync::Once;

use super::MAX_HF_BYTES;

/// Maximum number of pending alternatives in a search, of 32 bytes each. A run of equal characters in the
/// longest text leaves one for each character; the expressions of published tokenizers leave at most two.
const MATCH_STACK: u32 = 2 * MAX_HF_BYTES as u32 + (1 << 20);

/// Maximum number of alternatives that one search tries, some ten seconds of work. The engine's own limit for
/// each start of a match, 10 million, is lower.
const RETRIES: u32 = 1_000_000_000;

/// Maximum depth of groups in an expression. Parsing recurses on the stack of the thread.
const DEPTH: u32 = 250;

/// Sets the limits of all expressions in this process.
pub(crate) fn set() {
    static SET: Once = Once::new();
    SET.call_once(|| {
        // SAFETY: takes a number and stores it in a variable of the library.
        unsafe { onig_sys::onig_set_match_stack_limit_size(MATCH_STACK) };
        // SAFETY: as above.
        unsafe { onig_sys::onig_set_retry_limit_in_search(RETRIES.into()) };
        // SAFETY: as above.
        unsafe { onig_sys::onig_set_parse_depth_limit(DEPTH) };
    });
}
