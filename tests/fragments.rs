//! Fragments in the catalogue of a crate's messages (`tests/messages.rs`): a command's output is long and has
//! numbers that differ between runs, so a test asserts the part that it is about. `XTRAIN_UPDATE_DOCS` cannot
//! know which part that is and leaves these lines as they are: edit them by hand. Spaces at the start and the
//! end of a fragment count.

use crate::messages::{in_one_line, line};

/// Asserts that the text contains the fragment of this name.
#[track_caller]
pub(crate) fn assert_says(name: &str, text: impl AsRef<str>) {
    let fragment = line(name).unwrap_or_else(|| panic!("the catalogue has no `{name}`"));
    assert!(!fragment.trim().is_empty(), "`{name}` is empty");
    let text = text.as_ref();
    assert!(in_one_line(text).contains(&fragment), "`{name}` ({fragment:?}) is not said: {text}");
}
