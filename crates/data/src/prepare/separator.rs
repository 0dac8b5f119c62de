//! A warning for text with document separators that are not configured.

use crate::input::{Format, InputFile, InputOptions};
use crate::tokenizer::Tokenizer;

/// Detector of an unconfigured separator. Many text collections end documents with the name of the
/// tokenizer's end token. Without a configured separator that name is plain text, and the documents are
/// merged into one; the first occurrence logs a warning.
pub(super) struct UnusedSeparator {
    /// The name to look for; `None` if a separator is configured, or after the warning.
    name: Option<String>,
}

impl UnusedSeparator {
    pub(super) fn new(tokenizer: &Tokenizer, options: &InputOptions) -> UnusedSeparator {
        let is_unset = options.separator.is_none();
        UnusedSeparator { name: is_unset.then(|| tokenizer.end_of_document_name()).flatten() }
    }

    /// Checks a piece of `input`.
    pub(super) fn check(&mut self, input: &InputFile, text: &str) {
        if input.format != Format::Text {
            return;
        }
        if let Some(name) = self.name.take_if(|name| text.contains(name.as_str())) {
            tracing::warn!(
                "{} contains {name:?}, which is plain text and does not end documents; to end documents there, set \
                 data.separator = {name:?} (for tokenize and eval: --separator)",
                input.path.display()
            );
        }
    }
}
