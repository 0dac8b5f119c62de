//! Errors of this crate, and reasons for which a row is dropped.
//!
//! Every message is one line: what was found, where, what is known.

use std::fmt;
use std::path::{Path, PathBuf};

/// A row, template or setting that cannot be used. The caller adds the place with [`ChatError::with_place`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; {advice}")]
pub struct ChatError {
    /// The problem, with what was found.
    pub problem: String,
    /// Advice for the user, with what is known.
    pub advice: String,
}

impl ChatError {
    /// An error. Both parts become one line.
    pub fn new(problem: impl Into<String>, advice: impl Into<String>) -> ChatError {
        ChatError { problem: one_line(&problem.into()), advice: one_line(&advice.into()) }
    }

    /// This error with the file and row in which it was found.
    pub fn with_place(self, place: &RowPlace) -> ChatError {
        ChatError { problem: format!("{place}: {}", self.problem), ..self }
    }
}

/// A row of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowPlace {
    file: PathBuf,
    row: u64,
}

impl RowPlace {
    /// Row `row` of a file, counted from 1.
    pub fn new(file: &Path, row: u64) -> RowPlace {
        RowPlace { file: file.to_owned(), row }
    }
}

impl fmt::Display for RowPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, row {}", self.file.display(), self.row)
    }
}

/// A reason for which a row is dropped and counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DropReason {
    /// The template raised an exception.
    Raised(String),
    /// The row begins with an answer, and the template renders no prompt before it: its error.
    BeginsWithAnswer(String),
    /// No token of the row is trained.
    NoTrainedToken,
    /// The row holds private-use characters that mark ranges of text here.
    PrivateUse,
    /// The template changes the name of a special token that the row holds as text.
    ChangedName,
    /// The template may make this name of a special token of texts of the row that do not hold it.
    JoinedName(String),
    /// The template renders each turn by itself, and the texts of all turns together are too large.
    TooManyTurns,
}

impl DropReason {
    /// Name of the reason, as counts are listed.
    pub fn name(&self) -> &'static str {
        match self {
            DropReason::Raised(_) => "the template raises an exception",
            DropReason::BeginsWithAnswer(_) => {
                "the row begins with an answer, and the template renders no prompt before it"
            }
            DropReason::NoTrainedToken => "no trained token",
            DropReason::PrivateUse => "private-use characters U+10F8F0 to U+10F8F5, which are reserved here",
            DropReason::ChangedName => "the template changes the name of a special token in the text",
            DropReason::JoinedName(_) => "the template makes the name of a special token of the text",
            DropReason::TooManyTurns => "too much text for a template that renders each turn by itself",
        }
    }
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DropReason::Raised(message) | DropReason::BeginsWithAnswer(message) => {
                write!(f, "{}: {}", self.name(), shown(message))
            }
            DropReason::JoinedName(name) => write!(f, "{}: {}", self.name(), shown(name)),
            DropReason::TooManyTurns => {
                write!(
                    f,
                    "{}: split the conversation, or name a template with {{% generation %}}",
                    self.name()
                )
            }
            other => f.write_str(other.name()),
        }
    }
}

/// Outcome of a row without samples.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RowFailure {
    /// The row is dropped and counted.
    #[error("dropped: {0}")]
    Drop(DropReason),
    /// The run ends.
    #[error(transparent)]
    Error(#[from] ChatError),
}

/// Maximum number of characters of foreign text in a message.
const SHOWN_CHARS: usize = 80;

/// The start of `text`, quoted, on one line.
pub(crate) fn shown(text: &str) -> String {
    let start: String = text.chars().take(SHOWN_CHARS).collect();
    let rest = if start.len() < text.len() { "..." } else { "" };
    format!("{start:?}{rest}")
}

/// The end of `text`, quoted, on one line.
pub(crate) fn shown_end(text: &str) -> String {
    let skipped = text.chars().count().saturating_sub(SHOWN_CHARS);
    let end: String = text.chars().skip(skipped).collect();
    format!("{}{end:?}", if skipped > 0 { "..." } else { "" })
}

fn one_line(text: &str) -> String {
    let is_break = |c: char| c.is_control() || c == '\u{2028}' || c == '\u{2029}';
    text.chars().map(|c| if is_break(c) { ' ' } else { c }).collect()
}
