//! Requests of a row, as lm-eval 0.4.13 renders them: each few-shot example is its question, the delimiter,
//! its answer and the separator; then comes the row's question. The delimiter begins the continuation. (In
//! lm-eval, `fewshot_context` and `construct_requests` of `ConfigurableTask`, with sampler `first_n`.)
//!
//! With a chat template, questions are messages of the user and answers of the assistant, without delimiters
//! and separators (`--apply_chat_template`).

use std::sync::Arc;

use xtrain_chat::row::Role;
use xtrain_chat::{ChatMessage, Conversation};

use super::content::{NamedRow, RowContent};
use super::fault::{RowFault, RowResult};
use super::row::{Gold, Request, TaskRow};
use super::shots::Shots;
use crate::chat::ChatPrompts;

/// Maximum size of the requests of a row, in bytes of text.
const MAX_BYTES: usize = 64 << 20;

/// Settings of requests.
pub(super) struct Rendering<'a> {
    pub(super) shots: &'a Shots,
    pub(super) separator: &'a str,
    pub(super) delimiter: &'a str,
    pub(super) chat: Option<&'a ChatPrompts<'a>>,
}

impl Rendering<'_> {
    /// The requests of a row.
    pub(super) fn render(&self, number: u64, row: NamedRow) -> RowResult<TaskRow> {
        let NamedRow { id, cluster, content } = row;
        let shots = self.shots.of_row(&content)?;
        self.refuse_long(&content, &shots)?;
        let context = |question: &str| self.context(&shots, question);
        let (requests, gold) = match &content {
            RowContent::Choices { query, choices, gold } => {
                let context = context(query)?;
                let requests = choices.iter().map(|choice| self.request(context.clone(), choice)).collect();
                (requests, Gold::Choice(*gold))
            }
            RowContent::Schema { contexts, continuation, gold } => {
                let request = |option: &String| Ok(self.request(context(option)?, continuation));
                (contexts.iter().map(request).collect::<RowResult<_>>()?, Gold::Choice(*gold))
            }
            RowContent::Continuation { context: question, continuation } => {
                (vec![self.request(context(question)?, continuation)], Gold::Greedy)
            }
            RowContent::Answer { query, answer, extract } => {
                let gold = Gold::Answer { answer: answer.clone(), extract: extract.clone() };
                (vec![self.request(context(query)?, answer)], gold)
            }
        };
        Ok(TaskRow { row: number, id, cluster, requests, gold })
    }

    fn request(&self, context: Arc<str>, choice: &str) -> Request {
        Request {
            context,
            continuation: [self.delimiter, choice].concat(),
            characters: choice.chars().count(),
            bytes: choice.len(),
        }
    }

    fn context(&self, shots: &[RowContent], question: &str) -> RowResult<Arc<str>> {
        let shots = shots.iter().map(RowContent::question_and_answer);
        if let Some(chat) = self.chat {
            let of_shot = |(question, answer): (&str, &str)| {
                [ChatMessage::new(Role::User, question), ChatMessage::new(Role::Assistant, answer)]
            };
            let mut messages: Vec<ChatMessage> = shots.flat_map(of_shot).collect();
            messages.push(ChatMessage::new(Role::User, question));
            let text = chat.text(&Conversation { messages, tools: None });
            return text.map(Arc::from).map_err(|error| RowFault::new(error.problem, error.advice));
        }
        let mut text = String::new();
        for (question, answer) in shots {
            text.extend([question, self.delimiter, answer, self.separator]);
        }
        text.push_str(question);
        Ok(Arc::from(text))
    }

    /// Fails if the requests would fill the memory.
    fn refuse_long(&self, content: &RowContent, shots: &[RowContent]) -> RowResult<()> {
        let lengths = shots.iter().map(|shot| {
            let (question, answer) = shot.question_and_answer();
            question.len() + self.delimiter.len() + answer.len() + self.separator.len()
        });
        let shots: usize = lengths.sum();
        let texts = |texts: &[String]| texts.iter().map(|text| self.delimiter.len() + text.len()).sum();
        let bytes: usize = match content {
            RowContent::Choices { query, choices, .. } => shots + query.len() + texts(choices),
            RowContent::Schema { contexts, continuation, .. } => {
                let each = shots + self.delimiter.len() + continuation.len();
                contexts.len().saturating_mul(each).saturating_add(texts(contexts))
            }
            RowContent::Continuation { context: question, continuation: answer }
            | RowContent::Answer { query: question, answer, .. } => shots + question.len() + answer.len(),
        };
        match bytes > MAX_BYTES {
            true => Err(RowFault::new(
                format!("the requests of the row have {} MiB, more than {}", bytes >> 20, MAX_BYTES >> 20),
                "take fewer examples, or shorten the row",
            )),
            false => Ok(()),
        }
    }
}
