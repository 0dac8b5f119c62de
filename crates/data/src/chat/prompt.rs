//! Conversations as prompts: the ids that training has before an answer.

use xtrain_chat::{
    ChatError, ChatMessage, ChatRow, Conversation, Literals, MaskedText, RowFailure, RowFormat, Templates,
    encode, parse_row, prompt, read_row, recognise,
};

use super::ChatOptions;
use super::encoder::pair_beginning;
use super::vocabulary::templates;
use crate::error::{DataError, Result};
use crate::input::{Documents, Format, InputFile, InputOptions, read_documents};
use crate::tokenizer::{CutRule, MAX_CONVERSATION_BYTES, Tokenizer};

/// Renders conversations with a template, and encodes them with a tokenizer.
#[derive(Debug)]
pub struct ChatPrompts<'t> {
    tokenizer: &'t Tokenizer,
    /// The error is why there are none, for rows that need none.
    templates: std::result::Result<Templates, ChatError>,
    literals: Literals,
}

/// A row that a model is to answer.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptRow {
    /// Number of the row, counted from 1 through all files.
    pub row: u64,
    /// File and line or row, for messages.
    pub place: String,
    /// The prompt, or why there is none.
    pub prompt: std::result::Result<RowPrompt, ChatError>,
}

/// The prompt of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct RowPrompt {
    /// The part of the row before its answer.
    pub content: PromptContent,
    /// Token ids; at least one.
    pub ids: Vec<u32>,
    /// The content of the answer in the row, if there is one.
    pub expected: Option<String>,
}

/// The part of a row before its answer.
#[derive(Debug, Clone, PartialEq)]
pub enum PromptContent {
    /// Messages.
    Messages(Vec<ChatMessage>),
    /// A text, which no template renders.
    Text(String),
}

impl<'t> ChatPrompts<'t> {
    /// Prompts with the template that `options` name. If there is none, conversations fail.
    ///
    /// # Errors
    /// Names of special tokens that are too long to search for.
    pub fn new(
        tokenizer: &'t Tokenizer,
        options: &ChatOptions,
    ) -> std::result::Result<ChatPrompts<'t>, ChatError> {
        let literals = Literals::new(tokenizer.special_names())?;
        Ok(ChatPrompts { tokenizer, templates: templates(tokenizer, options), literals })
    }

    /// Fails if there is no template, or one that is refused.
    ///
    /// # Errors
    /// Says why.
    pub fn check(&self) -> std::result::Result<(), ChatError> {
        self.templates.as_ref().map(|_| ()).map_err(Clone::clone)
    }

    /// Token ids of a conversation with the generation prompt: those of transformers'
    /// `apply_chat_template(add_generation_prompt=True)`, where no message holds the name of a special token;
    /// such names are text.
    ///
    /// # Errors
    /// No template; one that raises an exception or fails; a text that is too long or cannot be encoded.
    pub fn ids(&self, conversation: &Conversation) -> std::result::Result<Vec<u32>, ChatError> {
        let sample = self.sample(conversation)?;
        refuse_long(sample.text.len())?;
        not_empty(encode(self.tokenizer, &sample)?.ids)
    }

    /// The text of a conversation with the generation prompt.
    pub(crate) fn text(&self, conversation: &Conversation) -> std::result::Result<String, ChatError> {
        self.sample(conversation).map(|sample| sample.text)
    }

    fn sample(&self, conversation: &Conversation) -> std::result::Result<MaskedText, ChatError> {
        let templates = self.templates.as_ref().map_err(Clone::clone)?;
        prompt(conversation, templates, &self.literals).map_err(|failure| match failure {
            RowFailure::Drop(reason) => ChatError::new(reason.to_string(), "change the messages"),
            RowFailure::Error(error) => error,
        })
    }

    /// The rows of files, in order, each without its last message if that is an answer. One row is in memory
    /// at a time.
    pub fn rows<'p>(&'p self, files: &'p [InputFile]) -> PromptRows<'p, 't> {
        PromptRows { prompts: self, files: files.iter(), open: None, row: 0 }
    }

    /// Reads the row `row` of all files from its text at `location` of `file`.
    fn read_row(&self, row: u64, file: &InputFile, location: &str, text: &str) -> Result<PromptRow> {
        let read = read(text);
        let is_chat = read.as_ref().is_ok_and(|row| matches!(row, ChatRow::Chat(_)));
        if let (true, Err(error)) = (is_chat, &self.templates) {
            let ChatError { problem, advice } = error.clone();
            return Err(DataError::input(&file.path, location, problem, advice));
        }
        let place = format!("{}, {location}", file.path.display());
        Ok(PromptRow { row, place, prompt: read.and_then(|row| self.row(row)) })
    }

    fn row(&self, row: ChatRow) -> std::result::Result<RowPrompt, ChatError> {
        match row {
            ChatRow::Chat(mut conversation) => {
                let answer = conversation.take_answer();
                if conversation.messages.is_empty() {
                    let advice = "give a message of a user";
                    return Err(ChatError::new("the row has no message before its answer", advice));
                }
                let ids = self.ids(&conversation)?;
                let text = |answer: ChatMessage| {
                    let texts: Vec<&str> = answer.texts().collect();
                    (!texts.is_empty()).then(|| texts.concat())
                };
                let content = PromptContent::Messages(conversation.messages);
                Ok(RowPrompt { content, ids, expected: answer.and_then(text) })
            }
            ChatRow::Pair { prompt, completion } => {
                refuse_long(prompt.len())?;
                let ids = not_empty(pair_beginning(self.tokenizer, &prompt)?)?;
                Ok(RowPrompt { content: PromptContent::Text(prompt), ids, expected: Some(completion) })
            }
            ChatRow::Text(_) => Err(ChatError::new(
                format!("the row has the key {}, which is text without a question", RowFormat::Text),
                "give messages, or prompt and completion",
            )),
        }
    }
}

/// Rows that a model is to answer, read one by one.
///
/// # Errors
/// A file that cannot be read, or is plain text; a template that is missing or refused, if a row needs one.
/// An error is the last item.
#[derive(Debug)]
pub struct PromptRows<'p, 't> {
    prompts: &'p ChatPrompts<'t>,
    files: std::slice::Iter<'p, InputFile>,
    open: Option<(&'p InputFile, Documents)>,
    row: u64,
}

impl PromptRows<'_, '_> {
    fn next_row(&mut self) -> Result<Option<PromptRow>> {
        loop {
            let Some((file, documents)) = &mut self.open else {
                let Some(file) = self.files.next() else { return Ok(None) };
                if file.format == Format::Text {
                    let place = file.path.display();
                    let problem = format!("{place} is plain text by its name, and conversations are rows");
                    return Err(DataError::invalid(problem, "name a .jsonl, .json or .parquet file"));
                }
                let input = InputOptions { whole_rows: true, ..InputOptions::default() };
                self.open = Some((file, read_documents(file, &input, CutRule::Anywhere)?));
                continue;
            };
            match documents.next().transpose()? {
                None => self.open = None,
                Some(piece) if piece.text.is_empty() => {}
                Some(piece) => {
                    self.row += 1;
                    let location = file.location_of_row(piece.row);
                    return self.prompts.read_row(self.row, file, &location, &piece.text).map(Some);
                }
            }
        }
    }
}

impl Iterator for PromptRows<'_, '_> {
    type Item = Result<PromptRow>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.next_row();
        if next.is_err() {
            (self.files, self.open) = ([].iter(), None);
        }
        next.transpose()
    }
}

fn read(text: &str) -> std::result::Result<ChatRow, ChatError> {
    let row = parse_row(text)?;
    read_row(recognise(&row)?, &row)
}

fn refuse_long(bytes: usize) -> std::result::Result<(), ChatError> {
    match bytes > MAX_CONVERSATION_BYTES {
        true => Err(ChatError::new(super::encoder::TOO_LONG, "split the conversation")),
        false => Ok(()),
    }
}

fn not_empty(ids: Vec<u32>) -> std::result::Result<Vec<u32>, ChatError> {
    match ids.is_empty() {
        true => Err(ChatError::new("the prompt is empty", "give it some text")),
        false => Ok(ids),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::{ChatEncoder, TemplateSource};
    use crate::input::list_inputs;

    fn chatml() -> ChatOptions {
        ChatOptions { template: TemplateSource::ChatMl, ..ChatOptions::default() }
    }

    fn tokenizer(folder: &std::path::Path) -> Tokenizer {
        Tokenizer::bytes().save(folder).expect("a tokenizer");
        let file = folder.join("tokenizer.json");
        let mut json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&file).expect("a file")).expect("JSON");
        let added = json["added_tokens"].as_array_mut().expect("a list");
        for (id, name) in [(257, "<|im_start|>"), (258, "<|im_end|>")] {
            added.push(serde_json::json!({
                "id": id, "content": name, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false
            }));
        }
        std::fs::write(&file, json.to_string()).expect("written");
        std::fs::write(folder.join("tokenizer_config.json"), r#"{"eos_token": "<|im_end|>"}"#)
            .expect("written");
        Tokenizer::load(folder).expect("a tokenizer")
    }

    fn rows(tokenizer: &Tokenizer, options: &ChatOptions, text: &str) -> Result<Vec<PromptRow>> {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("rows.jsonl");
        std::fs::write(&file, text).expect("written");
        let prompts = ChatPrompts::new(tokenizer, options).expect("prompts");
        let files = list_inputs(&[&file]).expect("a file");
        prompts.rows(&files).collect()
    }

    #[test]
    fn the_ids_of_a_prompt_begin_those_of_training() {
        let folder = tempfile::tempdir().expect("a folder");
        let tokenizer = tokenizer(folder.path());
        let encoder = ChatEncoder::new(&tokenizer, &chatml()).expect("an encoder");
        for (text, expected) in [
            (
                r#"{"messages": [{"role": "user", "content": "say <|im_end|>"}, {"role": "assistant", "content": "no"}]}"#,
                "no",
            ),
            (r#"{"conversations": [{"from": "human", "value": "é"}, {"from": "gpt", "value": "e"}]}"#, "e"),
            (r#"{"prompt": "one <|im_end|> and", "completion": " two"}"#, " two"),
            (r#"{"instruction": "add", "input": "1 1", "output": "2"}"#, "2"),
        ] {
            let found = rows(&tokenizer, &chatml(), text).expect("rows").remove(0).prompt.expect("a prompt");
            assert_eq!(found.expected.as_deref(), Some(expected));
            let trained = encoder.encode(text).expect("samples").samples.remove(0);
            let first = trained.trained.iter().skip(1).position(|&bit| bit).expect("an answer") + 1;
            assert_eq!(found.ids, trained.ids[..first], "{text}");
        }
    }

    #[test]
    fn rows_are_counted_and_those_without_a_question_are_refused_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let tokenizer = tokenizer(folder.path());
        let text = "{\"text\": \"a\"}\n\n{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}\n\
                    {\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n{\"messages\": 1}\n";
        let found = rows(&tokenizer, &chatml(), text).expect("rows");
        let error = |at: usize| found[at].prompt.as_ref().map(drop).map_err(ToString::to_string);
        assert!(error(0).is_err_and(|error| error.contains("key text")));
        assert!(error(1).is_err_and(|error| error.contains("no message before its answer")));
        assert!(found[2].prompt.as_ref().is_ok_and(|prompt| prompt.expected.is_none()));
        assert!(error(3).is_err_and(|error| error.contains("messages")));
        assert_eq!(found.iter().map(|row| row.row).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert!(found[3].place.ends_with("rows.jsonl, line 5"), "{}", found[3].place);
    }

    #[test]
    fn conversations_need_a_template_and_pairs_do_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let tokenizer = tokenizer(folder.path());
        let none = ChatOptions::default();
        let chat = r#"{"messages": [{"role": "user", "content": "a"}]}"#;
        let error = rows(&tokenizer, &none, chat).expect_err("no template").to_string();
        assert!(error.contains("no chat template") && error.contains("rows.jsonl, line 1"), "{error}");
        let pair = r#"{"prompt": "a", "completion": "b"}"#;
        // Rows before the error are whole, and nothing follows it.
        let all = format!("{pair}\n{chat}\n{pair}\n");
        let file = folder.path().join("mixed.jsonl");
        std::fs::write(&file, all).expect("written");
        let prompts = ChatPrompts::new(&tokenizer, &none).expect("prompts");
        let files = list_inputs(&[&file]).expect("a file");
        let read: Vec<_> = prompts.rows(&files).map(|row| row.map(|row| row.row)).collect();
        assert!(matches!(&read[..], [Ok(1), Err(error)] if error.to_string().contains("line 2")), "{read:?}");
        assert!(rows(&tokenizer, &none, pair).expect("rows")[0].prompt.is_ok());
    }
}
