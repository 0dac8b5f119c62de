//! The first conversations of files, for a run file that is written for them.

use xtrain_chat::row::Role;
use xtrain_chat::{ChatRow, parse_row, read_row, recognise};

use crate::error::Result;
use crate::input::{InputFile, InputOptions, read_documents};
use crate::tokenizer::CutRule;

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
        if left == 0 {
            break;
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::list_inputs;

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

    #[test]
    fn files_after_the_last_row_that_is_read_are_not_opened() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = ["a.jsonl", "b.jsonl"].map(|name| folder.path().join(name));
        let row = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
        files.iter().for_each(|file| std::fs::write(file, row.repeat(ROWS)).expect("written"));
        let listed = list_inputs(&[&files[0], &files[1]]).expect("files");
        std::fs::remove_file(&files[1]).expect("removed");
        assert_eq!(first_conversations(&listed).expect("rows").texts.len(), ROWS);
    }
}
