//! Tasks that models are evaluated on: rows with a right answer, the texts to score for each, and these as
//! tokens.
//!
//! A task is a TOML file that names a file of rows, or a file of rows alone. Rows are lines of JSON
//! ([`RowKind`] lists their keys), a `task.json` of BIG-bench, or lm-eval's `samples_*.jsonl`; they are
//! recognised by their keys. Requests are rendered and encoded as lm-eval 0.4.13 does, token by token.
//!
//! Invariants: rows are read one at a time, so memory does not grow with the file (but for 16 bytes for each
//! example of BIG-bench); bad input is an error of one line with file and row, never a panic; equal hashes
//! mean equal requests and equal scores.
//!
//! Deliberately absent: scoring and generation, which need a model; lm-eval's random few-shot draw, which its
//! samples hold; downloads.

mod answer;
mod big_bench;
mod content;
mod encode;
mod fault;
mod first_object;
mod generation;
mod metric;
mod open;
mod parsed_rows;
mod python_text;
mod render;
mod row;
mod row_reader;
mod sample_reading;
mod sample_settings;
mod samples;
mod settings;
mod shots;
mod stops;
mod summary;

#[cfg(test)]
mod tests;

pub use encode::{EncodedPrompt, EncodedRequest, encode};
pub use generation::GenerationRules;
pub use metric::Metric;
pub use open::{Task, TaskRows};
pub use row::{Gold, Request, RowKind, TaskRow};
pub use stops::StopStrings;
pub use summary::{PROTOCOL, TaskSummary};
