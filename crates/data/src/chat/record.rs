//! The record of how rows became documents, part of the index of a dataset.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use xtrain_chat::{Date, Method, RowFormat};

use super::{ChatOptions, TemplateSource};
use crate::error::{DataError, Result};

/// How rows of conversations became documents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatRecord {
    /// Hash of the template; `None` if there was none.
    pub template: Option<String>,
    /// The file with the template, if it is none of the tokenizer's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_file: Option<String>,
    /// `data.chat_template_kwargs`.
    pub kwargs: Map<String, Value>,
    /// The date that templates print, as `2026-11-29`.
    pub today: String,
    /// Part that is trained: `assistant`, `last` or `all`.
    pub train_on: String,
    /// Rows that became documents, by their format.
    pub formats: BTreeMap<String, u64>,
    /// Rows by the method that found their answers.
    pub methods: BTreeMap<String, u64>,
    /// Rows that were dropped, by reason.
    pub dropped: BTreeMap<String, u64>,
    /// The first of these that could be read, with its place and what happened.
    pub first_dropped: Option<String>,
    /// Trained tokens that reach beyond what is trained.
    pub crossing_tokens: u64,
    /// Messages of users that a rendering lacks.
    pub missing_messages: u64,
    /// Text of the rows of which each answer became a sample, and that of these samples, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn_by_turn: Option<[u64; 2]>,
}

/// The reason for which rows are dropped that cannot be read.
pub(super) const UNREADABLE: &str = "a row that cannot be read";

/// Rows after which a warning says that too many are dropped.
const EARLY_ROWS: u64 = 1000;

/// Counts by reason as `2: no trained token; 1: ...`.
fn in_words<'r>(counts: impl Iterator<Item = (&'r String, &'r u64)>) -> String {
    counts.map(|(reason, count)| format!("{count}: {reason}")).collect::<Vec<_>>().join("; ")
}

/// Counts of a row.
#[derive(Debug)]
pub(crate) struct RowCounts {
    pub(crate) format: RowFormat,
    /// Method by which answers were found; `None` for plain texts and pairs.
    pub(crate) method: Option<Method>,
    /// Trained tokens that reach beyond an answer.
    pub(crate) crossing_tokens: u64,
    /// Messages of users that the rendering lacks.
    pub(crate) missing_messages: u64,
    /// If each answer became a sample: the text of the row and that of the samples, in bytes.
    pub(crate) turn_by_turn: Option<[u64; 2]>,
}

pub(super) fn date(date: Date) -> String {
    date.to_string()
}

impl ChatRecord {
    /// A record without rows, of the template with this hash.
    pub(crate) fn new(options: &ChatOptions, template: Option<String>) -> ChatRecord {
        ChatRecord {
            template,
            template_file: match &options.template {
                TemplateSource::File(path) => Some(path.display().to_string()),
                TemplateSource::Tokenizer | TemplateSource::ChatMl => None,
            },
            kwargs: options.kwargs.clone(),
            today: date(options.today),
            train_on: options.train_on.name().to_owned(),
            formats: BTreeMap::new(),
            methods: BTreeMap::new(),
            dropped: BTreeMap::new(),
            first_dropped: None,
            crossing_tokens: 0,
            missing_messages: 0,
            turn_by_turn: None,
        }
    }

    /// Counts a row.
    pub(crate) fn add(&mut self, row: &RowCounts) {
        *self.formats.entry(row.format.to_string()).or_default() += 1;
        if let Some(method) = row.method {
            *self.methods.entry(method.to_string()).or_default() += 1;
        }
        self.crossing_tokens += row.crossing_tokens;
        self.missing_messages += row.missing_messages;
        if let Some([whole, samples]) = row.turn_by_turn {
            let [all_whole, all_samples] = self.turn_by_turn.get_or_insert_default();
            *all_whole += whole;
            *all_samples += samples;
        }
    }

    /// Counts a row that is dropped.
    pub(crate) fn drop(&mut self, reason: &str, place: &str, what: &str) {
        *self.dropped.entry(reason.to_owned()).or_default() += 1;
        if reason != UNREADABLE {
            self.first_dropped.get_or_insert_with(|| format!("{place}: {what}"));
        }
    }

    /// Number of rows that were dropped because they cannot be read.
    pub(crate) fn unreadable_rows(&self) -> u64 {
        self.dropped.get(UNREADABLE).copied().unwrap_or_default()
    }

    /// Number of rows that were dropped.
    pub fn dropped_rows(&self) -> u64 {
        self.dropped.values().sum()
    }

    /// Number of rows, dropped ones too.
    pub fn rows(&self) -> u64 {
        self.formats.values().sum::<u64>() + self.dropped_rows()
    }

    /// Fails if more than this share of all rows was dropped. Rows that cannot be read do not count: their
    /// number has a limit of its own.
    ///
    /// # Errors
    /// Says how many, why, and what happened to the first.
    pub(crate) fn check(&self, bad_rows: f64) -> Result<()> {
        if !self.exceeds(bad_rows) {
            return Ok(());
        }
        let first = self.first_dropped.as_deref().unwrap_or_default();
        Err(DataError::invalid(
            format!("{}; the first is {first}", self.share()),
            format!(
                "repair the rows or the template, or raise data.bad_rows (tokenize: --bad-rows), the share that may be dropped \
                 ({bad_rows})"
            ),
        ))
    }

    /// The error for rows that were all dropped, if they were.
    pub(crate) fn nothing_left(&self) -> Option<DataError> {
        let (dropped, rows) = (self.dropped_rows(), self.rows());
        if dropped == 0 || dropped < rows {
            return None;
        }
        let first =
            self.first_dropped.as_ref().map_or(String::new(), |first| format!("; the first is {first}"));
        let all = if rows == 1 { "the only row is".to_owned() } else { format!("all {rows} rows are") };
        let problem = format!("{all} dropped ({}){first}", self.reasons());
        Some(DataError::invalid(problem, "repair the rows, or name a template that renders them"))
    }

    /// As [`ChatRecord::check`], before all rows are read: fails if no row may be dropped, and else warns
    /// once.
    ///
    /// # Errors
    /// Those of [`ChatRecord::check`].
    pub(crate) fn check_early(&self, bad_rows: f64, is_warned: &mut bool) -> Result<()> {
        if bad_rows <= 0.0 {
            return self.check(bad_rows);
        }
        if !*is_warned && self.rows() >= EARLY_ROWS && self.exceeds(bad_rows) {
            *is_warned = true;
            let (share, first) = (self.share(), self.first_dropped.as_deref().unwrap_or_default());
            tracing::warn!(
                "so far, {share}; the first is {first}; if they are more than {bad_rows} of all rows, that is an error"
            );
        }
        Ok(())
    }

    /// True if more than this share of the rows was dropped that could be read.
    fn exceeds(&self, bad_rows: f64) -> bool {
        let dropped = self.dropped_rows() - self.unreadable_rows();
        dropped > 0 && dropped as f64 > bad_rows * self.rows() as f64
    }

    /// The number of rows that were dropped though they could be read, and the reasons.
    fn share(&self) -> String {
        let reasons = self.dropped.iter().filter(|(reason, _)| *reason != UNREADABLE);
        let dropped = self.dropped_rows() - self.unreadable_rows();
        format!("{dropped} of {} rows are dropped ({})", self.rows(), in_words(reasons))
    }

    /// The reasons for which rows were dropped, with their numbers.
    pub fn reasons(&self) -> String {
        in_words(self.dropped.iter())
    }

    /// A line for the log: formats, methods, dropped rows.
    pub fn summary(&self) -> String {
        let list = |counts: &BTreeMap<String, u64>| -> String {
            let parts: Vec<String> = match counts.len() {
                1 => counts.keys().cloned().collect(),
                _ => counts.iter().map(|(name, count)| format!("{name} ({count} rows)")).collect(),
            };
            parts.join(", ")
        };
        let mut said = format!("rows of {}", list(&self.formats));
        if !self.methods.is_empty() {
            said += &format!("; answers are found {}", list(&self.methods));
        }
        if let Some([whole, samples]) = self.turn_by_turn {
            let times = samples as f64 / whole.max(1) as f64;
            said += &format!("; samples turn by turn have {times:.1} times the text of their conversations");
        }
        if self.dropped_rows() > 0 {
            said +=
                &format!("; {} of {} rows dropped ({})", self.dropped_rows(), self.rows(), self.reasons());
        }
        if self.crossing_tokens > 0 {
            said += &format!("; {} trained tokens reach beyond an answer", self.crossing_tokens);
        }
        if self.missing_messages > 0 {
            let missing = self.missing_messages;
            said += &format!(
                "; the template leaves out text of {missing} messages of users, which \
                 `xtrain tokenize FILE --tokenizer FOLDER --show 3` shows"
            );
        }
        said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_that_turn_by_turn_adds_is_summed_and_said() {
        let mut record = ChatRecord::new(&ChatOptions::default(), None);
        for turn_by_turn in [None, Some([100, 150]), Some([300, 850])] {
            let (format, method) = (RowFormat::Text, turn_by_turn.map(|_| Method::TurnByTurn));
            record.add(&RowCounts { format, method, crossing_tokens: 0, missing_messages: 0, turn_by_turn });
        }
        assert_eq!(record.turn_by_turn, Some([400, 1000]));
        assert!(record.summary().contains(" 2.5 times the text"), "{}", record.summary());
    }

    #[test]
    fn rows_that_cannot_be_read_are_left_out_of_number_reasons_and_the_first() {
        let mut record = ChatRecord::new(&ChatOptions::default(), None);
        let row = RowCounts {
            format: RowFormat::Text,
            method: None,
            crossing_tokens: 0,
            missing_messages: 0,
            turn_by_turn: None,
        };
        record.drop(UNREADABLE, "a, line 1", "no JSON");
        record.drop("no trained token", "a, line 2", "nothing");
        record.add(&row);
        let error = record.check(0.3).expect_err("a third").to_string();
        assert!(
            error.starts_with(
                "1 of 3 rows are dropped (1: no trained token); the first is a, line 2: nothing"
            ),
            "{error}"
        );
        assert!(record.check(0.4).is_ok() && record.summary().contains("2 of 3 rows dropped"));
        let mut is_warned = false;
        assert!(record.check_early(0.0, &mut is_warned).is_err());
        assert!(record.check_early(0.1, &mut is_warned).is_ok() && !is_warned);
        (0..EARLY_ROWS).for_each(|_| record.drop("no trained token", "a, line 3", "nothing"));
        assert!(record.check_early(0.1, &mut is_warned).is_ok() && is_warned);
    }
}
