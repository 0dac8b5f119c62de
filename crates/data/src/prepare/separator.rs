//! Noticing a separator that nobody configured.

use crate::input::{Format, InputFile, InputOptions};
use crate::tokenizer::Tokenizer;

/// Many collections of text end documents with the name of the tokenizer's end token. Where no separator is
/// configured that name is text like any other and documents run together, which is worth a warning, once.
pub(super) struct UnusedSeparator {
    /// The name to look for; `None` where a separator is configured or the warning is given.
    name: Option<String>,
}

impl UnusedSeparator {
    pub(super) fn new(tokenizer: &Tokenizer, options: &InputOptions) -> UnusedSeparator {
        let is_unset = options.separator.is_none();
        UnusedSeparator { name: is_unset.then(|| tokenizer.end_of_document_name()).flatten() }
    }

    /// Looks at a piece of `input`.
    pub(super) fn check(&mut self, input: &InputFile, text: &str) {
        if input.format != Format::Text {
            return;
        }
        if let Some(name) = self.name.take_if(|name| text.contains(name.as_str())) {
            tracing::warn!(
                "{} contains {name:?}, which is plain text there and ends no document; if it is to, set \
                 data.separator = {name:?} (for tokenize and eval: --separator)",
                input.path.display()
            );
        }
    }
}
