//! The first conversations of files: for a run file that is written for them, and to refuse rows of which
//! nothing would be trained before a run begins.

use xtrain_chat::row::Role;
use xtrain_chat::{ChatRow, parse_row, read_row, recognise};

use super::ChatOptions;
use super::encoder::{ChatEncoder, RowError};
use super::record::{ChatRecord, UNREADABLE};
use crate::error::{DataError, Result};
use crate::input::{InputFile, InputOptions, read_documents};
use crate::tokenizer::{CutRule, Tokenizer};

/// Number of rows that are read.
const ROWS: usize = 100;

/// Maximum bytes of the question.
const QUESTION_BYTES: usize = 400;

/// The first conversations of files.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FirstConversations {
    /// The first message of a user that is not long.
    pub question: Option<String>,
    /// The texts of each row.
    pub texts: Vec<String>,
    /// Bytes of these rows as JSON.
    pub row_bytes: usize,
}

/// Reads the first rows of files. Rows that are not conversations are skipped.
///
/// # Errors
/// A file that cannot be read.
pub fn first_conversations(files: &[InputFile]) -> Result<FirstConversations> {
    let options = InputOptions { whole_rows: true, ..InputOptions::default() };
    let mut found = FirstConversations::default();
    for file in files {
        let left = ROWS.saturating_sub(found.texts.len());
        for piece in read_documents(file, &options, CutRule::Anywhere)?.take(left) {
            let piece = piece?;
            let read = parse_row(&piece.text).and_then(|row| read_row(recognise(&row)?, &row));
            let text = match read {
                Err(_) => continue,
                Ok(ChatRow::Text(text)) => text,
                Ok(ChatRow::Pair { prompt, completion }) => prompt + &completion,
                Ok(ChatRow::Chat(conversation)) => {
                    let messages = &conversation.messages;
                    let first = messages.iter().find(|message| message.role() == Role::User);
                    let question = first.map(|message| message.texts().collect::<Vec<_>>().concat());
                    let fits = |text: &String| !text.trim().is_empty() && text.len() <= QUESTION_BYTES;
                    found.question = found.question.or(question.filter(fits));
                    messages.iter().flat_map(|message| message.texts()).collect::<Vec<_>>().join("\n")
                }
            };
            found.row_bytes += piece.text.len();
            found.texts.push(text);
        }
    }
    Ok(found)
}

/// Maximum bytes of rows that are checked before a run.
const CHECKED_BYTES: usize = 8 << 20;

impl ChatOptions {
    /// Fails as tokenizing would, if `files` have so few rows that all of them can be read before a run: on a
    /// row that cannot be read, on too many rows that are dropped, and if no token is trained.
    ///
    /// # Errors
    /// Those of tokenizing the rows.
    pub fn check_few_rows(
        &self,
        files: &[InputFile],
        read_as: &InputOptions,
        tokenizer: &Tokenizer,
    ) -> Result<()> {
        let input = InputOptions { whole_rows: true, ..read_as.clone() };
        let (mut rows, mut bytes) = (Vec::new(), 0);
        for file in files {
            for piece in read_documents(file, &input, CutRule::Anywhere)? {
                let piece = piece?;
                bytes += piece.text.len();
                if !piece.text.is_empty() {
                    rows.push((file, piece));
                }
                if rows.len() > ROWS || bytes > CHECKED_BYTES {
                    return Ok(());
                }
            }
        }
        let encoder = ChatEncoder::new(tokenizer, self)?;
        let mut record = ChatRecord::new(self, None);
        for (file, piece) in &rows {
            let location = file.location_of_row(piece.row);
            let place = format!("{}, {location}", file.path.display());
            match encoder.encode(&piece.text) {
                Ok(row) => record.add(&row.counts),
                Err(RowError::Dropped(reason, what)) => record.drop(reason, &place, &what),
                Err(RowError::Row(error)) if record.unreadable_rows() < read_as.skip_bad_rows => {
                    record.drop(UNREADABLE, &place, &error.problem);
                }
                Err(RowError::Row(error) | RowError::Template(error)) => {
                    return Err(DataError::input(&file.path, location, error.problem, error.advice));
                }
            }
        }
        record.check(self.bad_rows)?;
        record.nothing_left().map_or(Ok(()), Err)
    }
}

impl ChatRecord {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::TemplateSource;
    use crate::input::list_inputs;

    #[test]
    fn few_rows_are_refused_as_a_run_would_and_many_are_left_to_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("rows.jsonl");
        let question = r#"{"messages": [{"role": "user", "content": "Is it?"}]}"#;
        let answered =
            r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
        let said = |rows: &[&str], bad_rows: f64| {
            std::fs::write(&file, rows.join("\n")).expect("written");
            let options =
                ChatOptions { template: TemplateSource::ChatMl, bad_rows, ..ChatOptions::default() };
            let chats = std::slice::from_ref(&options);
            let (tokenizer, _) = crate::chat::with_markers(Tokenizer::bytes(), chats, None).expect("markers");
            let files = list_inputs(&[&file]).expect("a file");
            let found = options.check_few_rows(&files, &InputOptions::default(), &tokenizer);
            found.err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(said(&[answered], 0.05), "");
        assert!(
            said(&[answered, question], 0.05).starts_with("1 of 2 rows are dropped (1: no trained token)")
        );
        assert_eq!(said(&[answered, question], 0.5), "");
        let none = said(&[question, "", question], 1.0);
        assert!(none.starts_with("all 2 rows are dropped (2: no trained token); the first is "), "{none}");
        assert!(said(&[question], 1.0).starts_with("the only row is dropped"));
        assert!(said(&["{"], 0.05).contains("line 1: invalid JSON"));
        assert_eq!(said(&[question; ROWS + 1], 0.05), "");
    }

    #[test]
    fn the_first_short_question_is_found_and_rows_that_are_no_conversations_are_skipped() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("rows.jsonl");
        let row = |question: &str| {
            let user = serde_json::json!({"role": "user", "content": question});
            let answer = serde_json::json!({"role": "assistant", "content": "yes"});
            serde_json::json!({"messages": [user, answer]}).to_string()
        };
        let rows = [row(&"long ".repeat(200)), "{".to_owned(), row("Is it?"), row("Is that?")];
        std::fs::write(&file, rows.join("\n")).expect("written");
        let found = first_conversations(&list_inputs(&[&file]).expect("a file")).expect("rows");
        assert_eq!(found.question.as_deref(), Some("Is it?"));
        assert_eq!(found.texts[1..], ["Is it?\nyes", "Is that?\nyes"]);
        assert!(found.row_bytes > found.texts.iter().map(String::len).sum());
    }
}
