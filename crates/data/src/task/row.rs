//! Rows as a model scores them.

use std::sync::Arc;

/// A row of a task.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskRow {
    /// Number of the row in its file, from 1: the line, or the element of a list of examples.
    pub row: u64,
    /// Name of the row, if the file gives one.
    pub id: Option<String>,
    /// Name of the cluster of rows that it belongs to, such as those of one document.
    pub cluster: Option<String>,
    /// Continuations to score, in order: one for each choice. A row with [`Gold::Greedy`] or
    /// [`Gold::Answer`] has one.
    pub requests: Vec<Request>,
    /// The right answer.
    pub gold: Gold,
}

/// A continuation to score after a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Text before the continuation, with the few-shot examples. The choices of a row share it.
    pub context: Arc<str>,
    /// Text to score, with the delimiter.
    pub continuation: String,
    /// Unicode code points of the choice as written, without the delimiter: the divisor of `acc_norm`.
    pub characters: usize,
    /// UTF-8 bytes of the choice as written, without the delimiter: the divisor of `acc_bytes`.
    pub bytes: usize,
}

/// The right answer of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gold {
    /// The request with this index is right if its score is the highest.
    Choice(usize),
    /// The request is right if each of its tokens is the likeliest.
    Greedy,
    /// The text that a model generates after the context is right if it equals the answer.
    Answer {
        /// The answer.
        answer: String,
        /// A regular expression of Python that finds the answer in the generated text: its first match, and
        /// of that the first group, if there is one.
        extract: Option<String>,
    },
}

/// The kind of a task's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowKind {
    /// `query`, `choices`, `gold`.
    MultipleChoice,
    /// `context_options`, `continuation`, `gold`: one continuation after several contexts.
    Schema,
    /// `context`, `continuation`: right if greedy decoding gives it.
    Continuation,
    /// `query`, `answer` and perhaps `extract`.
    Generated,
}

impl RowKind {
    /// All kinds.
    pub const ALL: [RowKind; 4] =
        [RowKind::MultipleChoice, RowKind::Schema, RowKind::Continuation, RowKind::Generated];

    /// Name, for messages.
    pub fn name(self) -> &'static str {
        match self {
            RowKind::MultipleChoice => "multiple choice",
            RowKind::Schema => "schema",
            RowKind::Continuation => "continuation",
            RowKind::Generated => "generated answer",
        }
    }

    /// Keys that a row must have.
    pub fn keys(self) -> &'static [&'static str] {
        match self {
            RowKind::MultipleChoice => &["query", "choices", "gold"],
            RowKind::Schema => &["context_options", "continuation", "gold"],
            RowKind::Continuation => &["context", "continuation"],
            RowKind::Generated => &["query", "answer"],
        }
    }
}
