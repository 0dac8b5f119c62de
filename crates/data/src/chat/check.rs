//! Rows that are tokenized before a run, if they are few, so that a run does not fail on them later.

use super::encoder::ChatEncoder;
use super::{ChatOptions, ChatRecord};
use crate::error::{DataError, Result};
use crate::input::{InputFile, InputOptions, read_documents};
use crate::tokenizer::{CutRule, Tokenizer};

/// Maximum number of rows that are checked before a run.
const ROWS: usize = 100;

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
                Err(error) => {
                    let (reason, what) =
                        error.dropped(record.unreadable_rows() < read_as.skip_bad_rows).map_err(|error| {
                            DataError::input(&file.path, location, error.problem, error.advice)
                        })?;
                    record.drop(reason, &place, &what);
                }
            }
        }
        record.check(self.bad_rows)?;
        record.nothing_left().map_or(Ok(()), Err)
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
}
